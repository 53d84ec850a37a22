package control

import (
	"fmt"
	"testing"
	"time"

	"autobyte/internal/transport"
)

// sinks starts a job whose followers read frames and do nothing, so that what
// is counted is the sender's.
func sinks(tb testing.TB, world int) *Group {
	g, r, err := Listen(Options{World: world, Tensors: nil})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { g.Close() })
	for rank := 1; rank < world; rank++ {
		o := Options{Rank: rank, World: world}
		c, err := transport.Dialer{Self: o.identity(), Secret: r.Secret}.Dial(tb.Context(), r.Addrs)
		if err != nil {
			tb.Fatal(err)
		}
		if err := c.WriteFrame(16, []byte{0, 0, 0, 0}, time.Second); err != nil { // registers no tensors
			tb.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				if _, _, err := c.ReadFrame(time.Minute); err != nil {
					return
				}
			}
		}()
		tb.Cleanup(func() {
			c.Close()
			<-done
		})
	}
	if err := g.Await(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	return g
}

// drained waits until the writers have nothing left, so that a benchmark
// measures a rate that lasts.
func (g *Group) drained() bool {
	for _, p := range g.peers {
		if p != nil {
			p.mu.Lock()
			n := len(p.pending)
			p.mu.Unlock()
			if n > keptBuffer/4 {
				return false
			}
		}
	}
	return true
}

func BenchmarkSendOrder(b *testing.B) {
	for _, world := range []int{2, 4, 8} {
		b.Run(fmt.Sprintf("world=%d", world), func(b *testing.B) {
			g := sinks(b, world)
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				g.SendOrder(1, i)
				if i%1024 == 0 {
					for !g.drained() {
						time.Sleep(50 * time.Microsecond)
					}
				}
			}
			b.StopTimer()
			if n := len(g.Alive()); n != world-1 {
				b.Fatalf("%d peers are left of %d", n, world-1)
			}
		})
	}
}

// TestSendOrderAllocates: nothing, once the buffers have grown.
func TestSendOrderAllocates(t *testing.T) {
	g := sinks(t, 3)
	burst := func() {
		for i := range 1000 {
			g.SendOrder(1, i)
		}
		for !g.drained() {
			time.Sleep(time.Millisecond)
		}
	}
	for range 100 {
		burst()
	}
	// Heartbeats allocate too, a few times a second.
	if perBurst := testing.AllocsPerRun(50, burst); perBurst > 10 {
		t.Errorf("%v allocations in 1000 orders, want none", perBurst)
	}
}

// BenchmarkOrderDelivery measures from SendOrder to Handle.
func BenchmarkOrderDelivery(b *testing.B) {
	arrived := make(chan struct{}, 1)
	last := b.N - 1
	g := rig{network: transport.TCP{}, options: func(rank int, o *Options) {
		o.Log = nil
		o.Handle = func(e Event) {
			if o, ok := e.(Order); ok && o.Index == last {
				arrived <- struct{}{}
			}
		}
	}}
	g.start(b, 2)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		g.ranks[0].SendOrder(1, i)
		if i%1024 == 0 {
			for !g.ranks[0].drained() {
				time.Sleep(50 * time.Microsecond)
			}
		}
	}
	<-arrived
}
