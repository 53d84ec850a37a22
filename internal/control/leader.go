package control

import (
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"autobyte/internal/transport"
	"autobyte/internal/wire"
)

// Listen makes the job's secret and starts to take the other ranks. It returns
// at once; Await waits for them.
func Listen(o Options) (*Group, Rendezvous, error) {
	o, err := o.validate()
	if err != nil {
		return nil, Rendezvous{}, err
	}
	if o.Rank != Leader {
		return nil, Rendezvous{}, fmt.Errorf("control: rank %d can't listen, only rank %d; use Join", o.Rank, Leader)
	}
	bind, err := o.bindAddr()
	if err != nil {
		return nil, Rendezvous{}, err
	}
	listener, err := o.Network.Listen(bind)
	if err != nil {
		return nil, Rendezvous{}, fmt.Errorf("control: rank 0 can't listen on %s: %w", bind, err)
	}
	r := Rendezvous{Secret: make([]byte, 32)}
	rand.Read(r.Secret)
	if r.Addrs, err = published(listener.Addr()); err != nil {
		listener.Close()
		return nil, Rendezvous{}, err
	}
	g := newGroup(o)
	g.settings = slices.Clone(o.Settings)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.server, err = transport.NewServer(listener, transport.ServerOptions{
		Self: o.identity(), Secret: r.Secret, Log: g.log,
		Admit: g.admit, Serve: g.serve,
	})
	if err != nil {
		return nil, Rendezvous{}, err
	}
	g.deadline = time.AfterFunc(o.Timeout, func() {
		g.giveUp(fmt.Errorf("not all ranks joined within %v (a longer timeout lets them come later)", o.Timeout))
	})
	g.run("heartbeat", g.heartbeat)
	g.startIfCompleteLocked() // a world of one
	return g, r, nil
}

// admit has the last word on a rank that has proved to be of this job.
func (g *Group) admit(id transport.Identity) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	refuse := func(code wire.RefuseCode, format string, args ...any) error {
		return &transport.Refused{Refuse: wire.Refuse{Code: code, Reason: fmt.Sprintf(format, args...)}}
	}
	switch {
	case g.closing || g.left:
		return refuse(wire.CodeBusy, "rank 0 is leaving")
	case g.reserved[id.Rank] && (g.peers[id.Rank] == nil || !g.peers[id.Rank].lost):
		return refuse(wire.CodeTaken, "rank %d has joined already; is RANK set differently on every process?", id.Rank)
	case id.Connection != 0:
		return refuse(wire.CodeIdentity, "connection %d of rank %d: control has number 0 only", id.Connection, id.Rank)
	case g.phase == failed:
		return refuse(wire.CodeBusy, "the job can't start: %v", g.startErr)
	case g.phase == started:
		return refuse(wire.CodeBusy, "the job runs already; rank %d was lost and can't come back", id.Rank)
	}
	g.reserved[id.Rank] = true
	return nil
}

// serve takes over the connection of an admitted rank.
func (g *Group) serve(conn *transport.Conn, id transport.Identity) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closing || g.left {
		conn.Close()
		return
	}
	p := newPeer(id.Rank, conn, g.o.Timeout)
	g.attachLocked(p)
	if g.phase == failed {
		g.sendStart(p)
	}
}

func (g *Group) startFrame() []byte {
	s := wire.Start{Settings: g.settings}
	if g.phase == failed {
		s = wire.Start{Error: g.startErr.Error()}
	}
	return wire.MarshalFrame(nil, wire.TypeStart, wire.MarshalStart(nil, &s))
}

func (g *Group) sendStart(p *peer) { p.push(g.startFrame()) }

// registerLocked takes a follower's tensors.
func (g *Group) registerLocked(p *peer, tensors []wire.Tensor) error {
	if p.registered {
		return misbehaved("it registered twice")
	}
	p.registered = true
	p.tensors = fromWire(tensors)
	if g.phase == joining {
		g.startIfCompleteLocked()
	}
	return nil
}

// startIfCompleteLocked starts the job when all ranks are there and agree.
func (g *Group) startIfCompleteLocked() {
	if len(g.missingLocked()) > 0 {
		return
	}
	first, others := "", 0
	for rank, p := range g.peers {
		if rank == Leader {
			continue
		}
		diff := firstDifference(g.o.Tensors, p.tensors, fmt.Sprintf("on rank %d", rank))
		p.tensors = nil
		switch {
		case diff == "":
		case first == "":
			first = fmt.Sprintf("rank %d and rank 0 don't have the same trainable parameters: %s", rank, diff)
		default:
			others++
		}
	}
	if first != "" {
		if others > 0 {
			first += fmt.Sprintf(" (%d more ranks differ from rank 0)", others)
		}
		g.failStartLocked(first)
		return
	}
	g.settleLocked(started, nil)
	g.broadcastLocked(g.startFrame())
}

// failStartLocked gives every rank that has joined, or still comes, the reason
// why the job can't start.
func (g *Group) failStartLocked(reason string) {
	if g.phase != joining {
		return
	}
	g.settleLocked(failed, errors.New("control: "+reason))
	if g.o.Rank == Leader {
		g.broadcastLocked(g.startFrame())
	}
}

func (g *Group) missingLocked() []int {
	var missing []int
	for rank, p := range g.peers {
		if rank != Leader && (p == nil || !p.registered) {
			missing = append(missing, rank)
		}
	}
	return missing
}

// giveUp ends the joining when it takes too long.
func (g *Group) giveUp(cause error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.phase != joining {
		return
	}
	if g.o.Rank != Leader {
		// Rank 0 waits for this one too, and tells the others.
		reason := fmt.Sprintf("rank %d stopped waiting for the other ranks: %v", g.o.Rank, cause)
		g.broadcastLocked(wire.MarshalFrame(nil, wire.TypeFail, wire.MarshalFail(nil, reason)))
		g.failStartLocked(reason)
		return
	}
	g.failStartLocked(fmt.Sprintf("%v; missing: %s", cause, ranks(g.missingLocked())))
}

// lostWhileJoiningLocked: a rank that had told its tensors won't come back. One
// that had not may be trying again.
func (g *Group) lostWhileJoiningLocked(p *peer, reason string, clean bool) {
	if clean {
		reason = "it left"
	}
	if g.o.Rank == Leader && !p.registered && !clean {
		g.log.Warn("a rank was lost while it joined", "lost", p.rank, "reason", reason)
		g.peers[p.rank] = nil
		g.reserved[p.rank] = false
		return
	}
	g.failStartLocked(fmt.Sprintf("rank %d was lost before the job could start: %s", p.rank, reason))
}

// ranks lists rank numbers for a message.
func ranks(list []int) string {
	const most = 16
	var b strings.Builder
	if len(list) == 1 {
		b.WriteString("rank ")
	} else {
		b.WriteString("ranks ")
	}
	for i, r := range list {
		if i == most {
			fmt.Fprintf(&b, " and %d more", len(list)-most)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprint(&b, r)
	}
	return b.String()
}
