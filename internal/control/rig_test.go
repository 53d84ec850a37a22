package control

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"autobyte/internal/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of the tests; nothing comes near it unless it fails.
const patience = 30 * time.Second

// networks runs a test on TCP over loopback and in memory.
func networks(t *testing.T, f func(t *testing.T, n transport.Network)) {
	t.Run("tcp", func(t *testing.T) { t.Parallel(); f(t, transport.TCP{}) })
	t.Run("memory", func(t *testing.T) { t.Parallel(); f(t, &transport.Memory{}) })
}

var someTensors = []Tensor{
	{Name: "conv.weight", DType: "float32", Shape: []int64{8, 3, 3, 3}},
	{Name: "bn.weight", DType: "float32", Shape: []int64{8}},
	{Name: "fc.weight", DType: "float32", Shape: []int64{10, 8}},
}

// member is one rank with all that its Handle was given.
type member struct {
	*Group
	rank int
	log  *lockedBuffer

	mu     sync.Mutex
	events []Event
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (m *member) handle(e Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.events = append(m.events, e)
}

func (m *member) seen() []Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.events)
}

// until waits for the condition on what was seen so far.
func (m *member) until(t testing.TB, what string, cond func([]Event) bool) []Event {
	t.Helper()
	for start := time.Now(); time.Since(start) < patience; time.Sleep(2 * time.Millisecond) {
		if seen := m.seen(); cond(seen) {
			return seen
		}
	}
	t.Fatalf("rank %d never saw %s; it saw %v; its log:\n%s", m.rank, what, m.seen(), m.log)
	return nil
}

func count[E Event](events []Event) (n int) {
	for _, e := range events {
		if _, ok := e.(E); ok {
			n++
		}
	}
	return n
}

func lostOf(events []Event) map[int]Lost {
	out := map[int]Lost{}
	for _, e := range events {
		if l, ok := e.(Lost); ok {
			if before, ok := out[l.Rank]; ok {
				panic(fmt.Sprintf("two Lost for rank %d: %v and %v", l.Rank, before, l))
			}
			out[l.Rank] = l
		}
	}
	return out
}

// untilLost waits for the Lost of a rank and returns it.
func (m *member) untilLost(t testing.TB, rank int) Lost {
	t.Helper()
	events := m.until(t, fmt.Sprintf("the loss of rank %d", rank), func(e []Event) bool {
		_, ok := lostOf(e)[rank]
		return ok
	})
	return lostOf(events)[rank]
}

// rig is a job whose ranks are all in this process.
type rig struct {
	network transport.Network
	options func(rank int, o *Options)     // may be nil
	via     func(rank int) (string, error) // the address for a rank; nil: rank 0's own
	r       Rendezvous
	ranks   []*member
}

func (g *rig) option(rank, world int) (Options, *member) {
	m := &member{rank: rank, log: &lockedBuffer{}}
	o := Options{
		Rank: rank, World: world, Job: "job", Incarnation: 1, Timeout: 20 * time.Second,
		Tensors: someTensors, Settings: fmt.Appendf(nil, `{"rank":%d}`, rank),
		Handle: m.handle, Network: g.network,
		Log: slog.New(slog.NewTextHandler(m.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	if g.options != nil {
		g.options(rank, &o)
	}
	return o, m
}

func (g *rig) listen(t testing.TB, world int) *member {
	t.Helper()
	o, m := g.option(0, world)
	var err error
	if m.Group, g.r, err = Listen(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	g.ranks = make([]*member, world)
	g.ranks[0] = m
	return m
}

func (g *rig) join(t testing.TB, rank int) (*member, error) {
	t.Helper()
	o, m := g.option(rank, len(g.ranks))
	r := g.r
	if g.via != nil {
		if addr, err := g.via(rank); err != nil {
			return nil, err
		} else if addr != "" {
			r.Addrs = []string{addr}
		}
	}
	var err error
	if m.Group, err = Join(t.Context(), o, r); err != nil {
		return nil, err
	}
	t.Cleanup(func() { m.Close() })
	g.ranks[rank] = m
	return m, nil
}

// await calls Await on all ranks at once and returns their errors.
func (g *rig) await(t testing.TB) []error {
	errs := make([]error, len(g.ranks))
	var wg sync.WaitGroup
	for i, m := range g.ranks {
		if m == nil {
			continue
		}
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			errs[i] = m.Await(ctx)
		})
	}
	wg.Wait()
	return errs
}

// start brings up a whole job.
func (g *rig) start(t testing.TB, world int) []*member {
	t.Helper()
	g.listen(t, world)
	for rank := 1; rank < world; rank++ {
		if _, err := g.join(t, rank); err != nil {
			t.Fatalf("rank %d: %v", rank, err)
		}
	}
	for rank, err := range g.await(t) {
		if err != nil {
			t.Fatalf("rank %d: %v", rank, err)
		}
	}
	return g.ranks
}

// proxy forwards between ranks and rank 0 until it is told to stop or to cut.
type proxy struct {
	network transport.Network
	l       net.Listener
	target  string
	running sync.WaitGroup

	mu     sync.Mutex
	conns  []net.Conn
	frozen chan struct{} // closed: nothing is forwarded any more
	done   chan struct{}
}

func newProxy(t testing.TB, n transport.Network, target string) *proxy {
	l, err := n.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{network: n, l: l, target: target, frozen: make(chan struct{}), done: make(chan struct{})}
	p.running.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := n.Dial(context.Background(), target)
			if err != nil {
				near.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, near, far)
			p.mu.Unlock()
			p.running.Go(func() { p.forward(near, far) })
			p.running.Go(func() { p.forward(far, near) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		close(p.done)
		p.cut()
		p.running.Wait()
	})
	return p
}

func (p *proxy) forward(from, to net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		select {
		case <-p.frozen:
			<-p.done // hold both ends open, say nothing
			return
		default:
		}
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				break
			}
		}
		if err == io.EOF {
			to.(interface{ CloseWrite() error }).CloseWrite()
			return
		}
		if err != nil {
			break
		}
	}
	from.Close()
	to.Close()
}

func (p *proxy) freeze() { close(p.frozen) }

// cut closes the raw connections, as the kernel does for a process that was killed.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.Close()
	}
}
