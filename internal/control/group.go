package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"autobyte/internal/transport"
	"autobyte/internal/wire"
)

type phase uint8

const (
	joining phase = iota
	started
	failed // the job can't start; startErr says why
)

// How long Close waits: for the peers to take what was sent last, and for a
// Handle that is running.
const (
	lingerLimit = time.Second
	handleLimit = 2 * time.Second
)

// Group is one rank's end of the control plane.
type Group struct {
	o       Options
	log     *slog.Logger
	clock   time.Time // origin of the group's clock
	events  *mailbox
	server  *transport.Server // rank 0
	done    chan struct{}     // closed when Close begins
	closed  chan struct{}     // closed when Close has ended
	settled chan struct{}     // closed when the phase is no longer joining
	ioDone  sync.WaitGroup    // readers, writers, heartbeat

	dispatchOnce sync.Once
	dispatched   chan struct{} // closed when the dispatcher has ended; nil until it runs, under mu

	mu       sync.Mutex
	phase    phase
	startErr error
	peers    []*peer // by rank on rank 0, nil where there is none; else only [Leader]
	reserved []bool  // rank 0: admitted, or connected
	gone     []bool  // by rank: its Lost was delivered
	deadline *time.Timer
	settings []byte
	tally    *tally // rank 0
	tensors  int    // indices of absent tensors are below this
	left     bool   // this rank has said that it stops: it hears nothing more
	closing  bool
	order    []byte // scratch of SendOrder, which must not allocate
}

func newGroup(o Options) *Group {
	return &Group{
		o:        o,
		log:      o.Log.With("rank", o.Rank),
		clock:    time.Now(),
		events:   newMailbox(),
		done:     make(chan struct{}),
		closed:   make(chan struct{}),
		settled:  make(chan struct{}),
		peers:    make([]*peer, o.World),
		reserved: make([]bool, o.World),
		gone:     make([]bool, o.World),
		tally:    newTally(o.World),
		tensors:  len(o.Tensors),
	}
}

func (o Options) identity() transport.Identity {
	return transport.Identity{
		Purpose: wire.PurposeControl, Job: o.Job, Rank: o.Rank, World: o.World, Incarnation: o.Incarnation,
	}
}

func (g *Group) now() int64 { return int64(time.Since(g.clock)) }

// run starts a goroutine whose panic is a failure of this rank and never ends
// the program.
func (g *Group) run(what string, f func()) {
	g.ioDone.Add(1)
	go func() {
		defer g.ioDone.Done()
		defer g.recovered(what)
		f()
	}()
}

func (g *Group) recovered(what string) {
	if r := recover(); r != nil {
		g.log.Error("internal error", "in", what, "panic", r, "stack", string(debug.Stack()))
		// The panic may have left the lock held by this goroutine.
		go g.Fail(fmt.Sprintf("internal error in %s: %v", what, r))
	}
}

// attachLocked makes a peer of an open connection.
func (g *Group) attachLocked(p *peer) {
	p.heard.Store(g.now())
	g.peers[p.rank] = p
	g.run("reader", func() {
		err := g.read(p)
		g.mu.Lock()
		g.loseLocked(p, p.lossReason(err), false)
		g.mu.Unlock()
		p.stop()
	})
	g.run("writer", func() {
		err := p.write()
		if err == nil {
			return // finished: the reader ends the peer
		}
		reason := p.lossReason(err)
		var timeout interface{ Timeout() bool }
		if errors.As(err, &timeout) && timeout.Timeout() {
			reason = fmt.Sprintf("it took nothing that was sent to it for %v", p.timeout)
		}
		g.mu.Lock()
		g.loseLocked(p, reason, false)
		g.mu.Unlock()
		p.stop()
	})
}

// read takes a peer's messages until an error.
func (g *Group) read(p *peer) error {
	for {
		t, payload, err := p.conn.ReadFrame(p.timeout)
		if err != nil {
			return err
		}
		p.heard.Store(g.now())
		if err := g.receive(p, t, payload); err != nil {
			return err
		}
		g.events.waitForSpace(g.done)
	}
}

// heartbeat tells all peers that this rank lives, until Close.
func (g *Group) heartbeat() {
	ticker := time.NewTicker(min(time.Second, max(time.Millisecond, g.o.Timeout/6)))
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-g.done:
			return
		}
		frame := wire.MarshalFrame(nil, wire.TypePing, wire.MarshalStamp(nil, g.now()))
		g.mu.Lock()
		g.broadcastLocked(frame)
		g.mu.Unlock()
	}
}

// broadcastLocked sends frames to every peer. Under the lock, so that all
// peers get everything in the same order.
func (g *Group) broadcastLocked(frames []byte) {
	for _, p := range g.peers {
		if p != nil && !p.lost && !p.push(frames) {
			g.overflowLocked(p)
		}
	}
}

func (g *Group) overflowLocked(p *peer) {
	g.loseLocked(p, fmt.Sprintf("more than %d MiB wait to be sent to it", maxBacklog>>20), false)
	p.stop()
}

// loseLocked is called whenever a peer ends, for whatever reason; the first
// reason counts. The caller stops the peer.
func (g *Group) loseLocked(p *peer, reason string, clean bool) {
	if p.lost {
		return
	}
	p.lost = true
	if g.closing || g.left {
		return
	}
	switch g.phase {
	case joining:
		g.lostWhileJoiningLocked(p, reason, clean)
	case started:
		g.announceLostLocked(p.rank, reason, clean)
	}
}

// announceLostLocked delivers a Lost here and, from rank 0, to the others.
func (g *Group) announceLostLocked(rank int, reason string, clean bool) {
	if g.gone[rank] {
		return
	}
	g.gone[rank] = true
	if clean {
		g.log.Debug("a rank has left", "lost", rank)
	} else {
		g.log.Warn("a rank is lost", "lost", rank, "reason", reason)
	}
	g.events.put(Lost{Rank: rank, Reason: reason, Clean: clean})
	if g.o.Rank == Leader {
		lost := wire.Lost{Rank: uint32(rank), Reason: reason, Clean: clean}
		g.broadcastLocked(wire.MarshalFrame(nil, wire.TypeLost, wire.MarshalLost(nil, &lost)))
	}
}

// settleLocked ends the joining.
func (g *Group) settleLocked(to phase, err error) {
	g.phase, g.startErr = to, err
	close(g.settled)
	if g.deadline != nil {
		g.deadline.Stop()
	}
}

// Await waits until all ranks have joined and have the same tensors. The error
// names the ranks that did not come, or the rank and the first tensor that
// differs, and is the same on every rank. Events come after Await has
// succeeded.
func (g *Group) Await(ctx context.Context) error {
	limit := time.NewTimer(g.o.Timeout + g.o.Timeout/4)
	defer limit.Stop()
	select {
	case <-g.settled:
	case <-ctx.Done():
		g.giveUp(context.Cause(ctx))
	case <-limit.C:
		g.giveUp(fmt.Errorf("rank 0 has not started the job within %v", g.o.Timeout+g.o.Timeout/4))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.phase == failed {
		return g.startErr
	}
	if g.closing {
		return ErrClosed
	}
	g.dispatchOnce.Do(func() {
		g.dispatched = make(chan struct{})
		go g.dispatch(g.dispatched)
	})
	return nil
}

// LeaderSettings returns rank 0's settings. They are valid once Await has
// succeeded; the caller must not change them.
func (g *Group) LeaderSettings() []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.settings
}

// dispatch calls Handle for each event until Close.
func (g *Group) dispatch(ended chan struct{}) {
	defer close(ended)
	for {
		e, ok := g.events.take()
		if !ok {
			select {
			case <-g.events.wake:
			case <-g.done:
				return
			}
			continue
		}
		g.deliver(e)
	}
}

func (g *Group) deliver(e Event) {
	defer g.recovered("event handler")
	g.o.Handle(e)
}

// Alive returns the peers that are connected: all followers on rank 0, rank 0
// on a follower.
func (g *Group) Alive() []PeerStatus {
	now := g.now()
	g.mu.Lock()
	defer g.mu.Unlock()
	var alive []PeerStatus
	for _, p := range g.peers {
		if p != nil && !p.lost {
			alive = append(alive, PeerStatus{
				Rank:       p.rank,
				SinceHeard: time.Duration(max(0, now-p.heard.Load())),
				RoundTrip:  time.Duration(p.roundTrip.Load()),
			})
		}
	}
	return alive
}

// Fail tells every other rank that this one stops because of an error: they
// get a Lost with the reason. This rank gets no events any more. Close is
// still to be called.
func (g *Group) Fail(reason string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopHearingLocked(wire.TypeFail, wire.MarshalFail(nil, reason), "this rank stopped: "+reason)
}

// Leave says goodbye to the other ranks, which get a clean Lost, and closes.
func (g *Group) Leave() {
	g.mu.Lock()
	g.stopHearingLocked(wire.TypeGoodbye, nil, "this rank left")
	g.mu.Unlock()
	_ = g.Close() // its error was logged
}

// stopHearingLocked sends the last word of this rank, once.
func (g *Group) stopHearingLocked(t wire.Type, payload []byte, why string) {
	if g.left || g.closing {
		return
	}
	g.broadcastLocked(wire.MarshalFrame(nil, t, payload))
	g.left = true
	g.events.close()
	if g.phase == joining {
		g.settleLocked(failed, fmt.Errorf("control: %s", why))
	}
}

// Close ends the group: what was sent goes out, within a bound, and the
// group's goroutines end. Peers that had no goodbye and no failure from this
// rank report it as lost.
func (g *Group) Close() error {
	g.mu.Lock()
	if g.closing {
		g.mu.Unlock()
		<-g.closed // bounded, as the other caller's Close is
		return nil
	}
	g.closing = true
	close(g.done)
	g.events.close()
	if g.phase == joining {
		g.settleLocked(failed, ErrClosed)
	}
	peers := slices.DeleteFunc(slices.Clone(g.peers), func(p *peer) bool { return p == nil })
	dispatched := g.dispatched
	g.mu.Unlock()
	defer close(g.closed)

	for _, p := range peers {
		p.finish()
	}
	if g.server != nil {
		g.server.Close()
	}
	ended := make(chan struct{})
	go func() {
		g.ioDone.Wait()
		close(ended)
	}()
	linger := time.NewTimer(lingerLimit)
	defer linger.Stop()
	select {
	case <-ended:
	case <-linger.C:
	}
	for _, p := range peers {
		p.stop()
	}
	<-ended // bounded: every connection is closed
	if dispatched == nil {
		return nil
	}
	handling := time.NewTimer(handleLimit)
	defer handling.Stop()
	select {
	case <-dispatched:
		return nil
	case <-handling.C:
		err := fmt.Errorf("control: Handle has not returned for %v", handleLimit)
		g.log.Error("the group is closed, but", "error", err)
		return err
	}
}
