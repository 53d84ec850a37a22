package control

import (
	"errors"
	"math"
	"slices"
	"time"

	"autobyte/internal/sched"
	"autobyte/internal/wire"
)

// SendLayout announces the forward order to every follower. Rank 0 only.
func (g *Group) SendLayout(l Layout) {
	if err := checkTensors(l.Tensors); err != nil {
		g.log.Error("layout not sent", "error", err)
		return
	}
	w := wire.Layout{Generation: l.Generation, Tensors: toWire(l.Tensors), Order: l.Order}
	if i := wire.FirstNotPermuted(l.Order, len(l.Tensors)); i >= 0 {
		g.log.Error("layout not sent: its order is not a permutation of its tensors", "entry", i, "tensors", len(l.Tensors))
		return
	}
	payload := wire.MarshalLayout(nil, &w)
	if len(payload) > wire.MaxPayload {
		g.log.Error("layout not sent: it is too long", "bytes", len(payload), "allowed", wire.MaxPayload)
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tensors = max(g.tensors, len(l.Tensors))
	g.leadLocked("layout", wire.MarshalFrame(nil, wire.TypeLayout, payload))
}

// SendOpen opens a step on every follower. Rank 0 only.
func (g *Group) SendOpen(o Open) {
	if err := o.Config.Validate(); err != nil {
		g.log.Error("step not opened", "step", o.Step, "error", err)
		return
	}
	w := wire.Open{
		Generation: o.Generation, Step: o.Step, Iteration: o.Iteration,
		Partition: o.Config.Partition, Credit: o.Config.Credit, Fusion: o.Config.Fusion,
		Lanes: uint32(o.Config.Lanes), Policy: uint8(o.Config.Policy), PlanHash: o.PlanHash,
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leadLocked("step", wire.MarshalFrame(nil, wire.TypeOpen, wire.MarshalOpen(nil, &w)))
}

// SendOrder tells every follower the next partition to issue. Rank 0 only.
func (g *Group) SendOrder(step uint64, index int) {
	if index < 0 || index > math.MaxInt32 {
		g.log.Error("order not sent: no such partition", "step", step, "index", index)
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.order = wire.MarshalOrderFrame(g.order[:0], wire.Order{Step: step, Index: int32(index)})
	g.leadLocked("order", g.order)
}

// leadLocked sends what only rank 0 of a job that runs may send.
func (g *Group) leadLocked(what string, frame []byte) {
	switch {
	case g.o.Rank != Leader:
		g.log.Error("not sent: only rank 0 leads", "what", what)
	case g.phase != started:
		g.log.Error("not sent: the job has not started", "what", what)
	case !g.closing && !g.left:
		g.broadcastLocked(frame)
	}
}

// SendClose says that this rank has closed a step, and which tensors never
// came. A rank closes its steps in ascending order. When all ranks have closed
// the step and any had absent tensors, all get the Verdict.
func (g *Group) SendClose(step uint64, absent []int) {
	a := wire.Absence{Step: step}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, i := range absent {
		if i < 0 || i >= g.tensors {
			g.log.Error("no such tensor to be absent", "step", step, "index", i, "tensors", g.tensors)
			continue
		}
		a.Absent = append(a.Absent, int32(i))
	}
	slices.Sort(a.Absent)
	a.Absent = slices.Compact(a.Absent)
	switch {
	case g.phase != started:
		g.log.Error("step not closed: the job has not started", "step", step)
	case g.closing || g.left:
	case g.o.Rank == Leader:
		if err := g.closeLocked(Leader, a); err != nil {
			g.log.Error("step not closed", "step", step, "error", err)
		}
	default:
		g.broadcastLocked(wire.MarshalFrame(nil, wire.TypeClose, wire.MarshalAbsence(nil, &a)))
	}
}

// closeLocked counts one rank's Close and sends the Verdict when it is due.
func (g *Group) closeLocked(rank int, a wire.Absence) error {
	absent, due, err := g.tally.close(rank, a.Step, a.Absent)
	if err != nil {
		return misbehaved("%v", err)
	}
	if !due {
		return nil
	}
	v := wire.Absence{Step: a.Step, Absent: absent}
	g.broadcastLocked(wire.MarshalFrame(nil, wire.TypeVerdict, wire.MarshalAbsence(nil, &v)))
	g.events.put(verdictOf(v))
	return nil
}

func verdictOf(a wire.Absence) Verdict {
	v := Verdict{Step: a.Step, Absent: make([]int, len(a.Absent))}
	for i, index := range a.Absent {
		v.Absent[i] = int(index)
	}
	return v
}

// checkAbsentLocked: they ascend, so the last is the highest.
func (g *Group) checkAbsentLocked(a wire.Absence) error {
	if n := len(a.Absent); n > 0 && int(a.Absent[n-1]) >= g.tensors {
		return misbehaved("absent tensor %d of %d in step %d", a.Absent[n-1], g.tensors, a.Step)
	}
	return nil
}

// receive takes one message of a peer. An error ends the peer.
func (g *Group) receive(p *peer, t wire.Type, payload []byte) error {
	switch t {
	case wire.TypePing:
		if _, err := wire.UnmarshalStamp(payload); err != nil {
			return err
		}
		if !p.send(wire.TypePong, payload) {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.overflowLocked(p)
		}
		return nil
	case wire.TypePong:
		sent, err := wire.UnmarshalStamp(payload)
		if err == nil {
			p.heardBack(time.Duration(g.now() - sent))
		}
		return err
	case wire.TypeGoodbye:
		g.mu.Lock()
		defer g.mu.Unlock()
		g.loseLocked(p, "it said goodbye", true)
		return nil
	case wire.TypeFail:
		reason, err := wire.UnmarshalFail(payload)
		if err != nil {
			return err
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.loseLocked(p, reason, false)
		return nil
	}
	if g.o.Rank == Leader {
		return g.receiveAsLeader(p, t, payload)
	}
	return g.receiveAsFollower(t, payload)
}

func (g *Group) receiveAsLeader(p *peer, t wire.Type, payload []byte) error {
	switch t {
	case wire.TypeRegister:
		tensors, err := wire.UnmarshalRegister(payload)
		if err != nil {
			return err
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.registerLocked(p, tensors)
	case wire.TypeClose:
		a, err := wire.UnmarshalAbsence(payload)
		if err != nil {
			return err
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.phase != started || p.lost {
			return misbehaved("step %d closed before the job has started", a.Step)
		}
		if err := g.checkAbsentLocked(a); err != nil {
			return err
		}
		return g.closeLocked(p.rank, a)
	}
	return misbehaved("a message of type %d, which rank 0 does not take", t)
}

func (g *Group) receiveAsFollower(t wire.Type, payload []byte) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if t == wire.TypeStart {
		return g.startedLocked(payload)
	}
	if g.phase != started {
		return misbehaved("a message of type %d before the job has started", t)
	}
	switch t {
	case wire.TypeOrder:
		o, err := wire.UnmarshalOrder(payload)
		if err != nil {
			return err
		}
		g.events.put(Order{Step: o.Step, Index: int(o.Index)})
	case wire.TypeOpen:
		o, err := wire.UnmarshalOpen(payload)
		if err != nil {
			return err
		}
		c := sched.Config{
			Partition: o.Partition, Credit: o.Credit, Fusion: o.Fusion,
			Lanes: int(o.Lanes), Policy: sched.Policy(o.Policy),
		}
		if err := c.Validate(); err != nil {
			return misbehaved("step %d: %v", o.Step, err)
		}
		g.events.put(Open{Generation: o.Generation, Step: o.Step, Iteration: o.Iteration, Config: c, PlanHash: o.PlanHash})
	case wire.TypeLayout:
		l, err := wire.UnmarshalLayout(payload)
		if err != nil {
			return err
		}
		g.tensors = max(g.tensors, len(l.Tensors))
		g.events.put(Layout{Generation: l.Generation, Tensors: fromWire(l.Tensors), Order: l.Order})
	case wire.TypeVerdict:
		a, err := wire.UnmarshalAbsence(payload)
		if err != nil {
			return err
		}
		if err := g.checkAbsentLocked(a); err != nil {
			return err
		}
		g.events.put(verdictOf(a))
	case wire.TypeLost:
		l, err := wire.UnmarshalLost(payload)
		if err != nil {
			return err
		}
		if l.Rank == Leader || int64(l.Rank) >= int64(g.o.World) || int(l.Rank) == g.o.Rank {
			return misbehaved("rank %d was reported lost to rank %d of %d", l.Rank, g.o.Rank, g.o.World)
		}
		if !g.left && !g.closing {
			g.announceLostLocked(int(l.Rank), l.Reason, l.Clean)
		}
	default:
		return misbehaved("a message of type %d, which only rank 0 takes", t)
	}
	return nil
}

// startedLocked takes the leader's word on whether the job starts.
func (g *Group) startedLocked(payload []byte) error {
	s, err := wire.UnmarshalStart(payload)
	if err != nil {
		return err
	}
	if g.phase != joining {
		if g.left || g.closing || g.phase == failed {
			return nil // this rank has given up meanwhile
		}
		return misbehaved("the job started twice")
	}
	if s.Error != "" {
		g.settleLocked(failed, errors.New(s.Error))
		return nil
	}
	g.settings = s.Settings
	g.settleLocked(started, nil)
	return nil
}
