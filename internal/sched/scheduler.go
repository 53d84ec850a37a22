package sched

import (
	"errors"
	"fmt"
)

// Errors that a caller may want to tell apart with errors.Is. All others are
// mistakes of the caller.
var (
	// ErrBusy says that two steps are alive, so no other can be opened yet.
	ErrBusy = errors.New("two steps are alive; wait until one has retired")
	// ErrNotOpen says that a step has not been opened yet.
	ErrNotOpen = errors.New("the step is not open yet")
	// ErrRetired says that a step was closed and all its partitions are done.
	ErrRetired = errors.New("the step has retired")
	// ErrNoPlan says that an open step has no plan yet.
	ErrNoPlan = errors.New("the step has no plan yet")
)

// Role says who chooses the order in which partitions are issued.
type Role uint8

const (
	// Leader chooses, by the policy of the plan.
	Leader Role = iota
	// Follower issues in the order that Order tells.
	Follower
)

// String returns "leader" or "follower".
func (r Role) String() string {
	switch r {
	case Leader:
		return "leader"
	case Follower:
		return "follower"
	}
	return fmt.Sprintf("role(%d)", uint8(r))
}

// Op is a partition that the engine shall carry now.
type Op struct {
	Step          uint64
	Index         int32 // in the step's plan
	Space         int32
	Offset, Bytes int64
}

// Scheduler is the core's state on one rank. Make one with New.
type Scheduler struct {
	layout   *Layout
	role     Role
	slots    [2]slot
	alive    [2]*slot // by step, oldest first; nil behind the last
	opened   bool     // a step was ever opened, and
	last     uint64   // this is the newest
	turns    uint64   // partitions ordered so far
	held     int64    // bytes issued and not sent
	inFlight int      // partitions issued and not done
}

// New returns a scheduler for the tensors of l. It panics if l is nil.
func New(l *Layout, role Role) *Scheduler {
	s := &Scheduler{layout: l, role: role}
	for i := range s.slots {
		s.slots[i].tensorReady = make([]bool, l.Tensors())
		s.slots[i].readied = make([]int32, 0, l.Tensors())
		s.slots[i].undone = make([]int32, l.Tensors())
	}
	return s
}

// Open opens a step: a pass of gradients over all spaces. The first may have any
// number, each later one is the one after the step opened before it. While two
// steps are alive it returns ErrBusy.
func (s *Scheduler) Open(step uint64) error {
	if s.opened && step != s.last+1 {
		return fmt.Errorf("sched: open step %d: steps follow each other, the next is %d", step, s.last+1)
	}
	if s.alive[1] != nil {
		return fmt.Errorf("sched: open step %d while %d and %d are alive: %w", step, s.alive[0].step, s.alive[1].step, ErrBusy)
	}
	sl := &s.slots[0]
	if sl.alive {
		sl = &s.slots[1]
	}
	sl.open(step)
	if s.alive[0] == nil {
		s.alive[0] = sl
	} else {
		s.alive[1] = sl
	}
	s.opened, s.last = true, step
	return nil
}

// SetPlan puts p in force for an open step, once and for all its partitions,
// also those whose gradients are ready already. Plans are set in the order of
// the steps.
func (s *Scheduler) SetPlan(step uint64, p *Plan) error {
	sl, err := s.find(step)
	switch {
	case err != nil:
		return fmt.Errorf("sched: set the plan of step %d: %w", step, err)
	case p == nil:
		return fmt.Errorf("sched: set the plan of step %d: no plan given; make one with NewPlan", step)
	case p.layout != s.layout && p.layout.hash != s.layout.hash:
		return fmt.Errorf("sched: set the plan of step %d: it cuts layout %016x, this scheduler's is %016x",
			step, p.layout.hash, s.layout.hash)
	case sl.plan != nil:
		return fmt.Errorf("sched: set the plan of step %d: it has one; a step keeps its plan, give the new one to a later step", step)
	case sl == s.alive[1] && s.alive[0].plan == nil:
		return fmt.Errorf("sched: set the plan of step %d: set that of step %d first", step, s.alive[0].step)
	}
	sl.use(p, s.role)
	return nil
}

// Ready says that the gradient of a tensor lies in its space and may be sent. It
// is called once per tensor and step; Close does it for those that never come.
// Gradients come in the order of the steps: the step before must be closed.
func (s *Scheduler) Ready(step uint64, tensor int) error {
	sl, err := s.find(step)
	switch {
	case err != nil:
		return fmt.Errorf("sched: tensor %d ready in step %d: %w", tensor, step, err)
	case tensor < 0 || tensor >= len(sl.tensorReady):
		return fmt.Errorf("sched: tensor %d ready in step %d: tensors are 0 to %d", tensor, step, len(sl.tensorReady)-1)
	case sl.closed:
		return fmt.Errorf("sched: tensor %d ready in step %d: the step is closed; it belongs to a later step", tensor, step)
	case sl.tensorReady[tensor]:
		return fmt.Errorf("sched: tensor %d ready in step %d: it is already; a second gradient belongs to a later step", tensor, step)
	case s.early(sl):
		return fmt.Errorf("sched: tensor %d ready in step %d: close step %d first", tensor, step, s.alive[0].step)
	}
	sl.tensor(int32(tensor), s.role)
	return nil
}

// Close says that no more gradients come in a step. Every tensor that is not
// ready becomes so, in forward order, and is appended to dst: it contributes
// the zeros that the caller puts there before it calls Next.
func (s *Scheduler) Close(dst []int, step uint64) ([]int, error) {
	sl, err := s.find(step)
	switch {
	case err != nil:
		return dst, fmt.Errorf("sched: close step %d: %w", step, err)
	case sl.closed:
		return dst, fmt.Errorf("sched: close step %d: it is closed already", step)
	case s.early(sl):
		return dst, fmt.Errorf("sched: close step %d: close step %d first", step, s.alive[0].step)
	}
	sl.closed = true
	if len(sl.readied) < len(sl.tensorReady) {
		for t, ready := range sl.tensorReady {
			if !ready {
				sl.tensor(int32(t), s.role)
				dst = append(dst, t)
			}
		}
	}
	s.retire(sl)
	return dst, nil
}

// Order tells a follower the next partition in the leader's order. Its tensors
// need not be ready: then it waits, and all ordered after it wait behind it. Its
// step must be open and planned (else the error is ErrNotOpen or ErrNoPlan, and
// the caller keeps the entry until it is).
func (s *Scheduler) Order(step uint64, index int) error {
	if s.role != Follower {
		return fmt.Errorf("sched: order partition %d of step %d: a %v chooses its own order", index, step, s.role)
	}
	sl, err := s.planned(step, index)
	if err == nil && sl.flags[index]&flagOrdered != 0 {
		err = errors.New("it was ordered before")
	}
	if err != nil {
		return fmt.Errorf("sched: order partition %d of step %d: %w", index, step, err)
	}
	sl.flags[index] |= flagOrdered
	s.turns++
	sl.queue = append(sl.queue, entry{s.turns, int32(index)})
	return nil
}

// Next appends every operation that may be issued now, in the order in which the
// engine shall take them. They count as issued.
func (s *Scheduler) Next(dst []Op) []Op {
	for {
		sl, i := s.front()
		if sl == nil || s.check(sl, i) != Free {
			return dst
		}
		sl.pop(i)
		q := &sl.plan.parts[i]
		s.held += q.bytes
		s.inFlight++
		dst = append(dst, Op{Step: sl.step, Index: i, Space: q.space, Offset: q.offset, Bytes: q.bytes})
	}
}

// Sent says that the engine no longer holds an issued partition's bytes, and
// gives its credit back. It comes before Done or not at all.
func (s *Scheduler) Sent(step uint64, index int) error {
	sl, err := s.planned(step, index)
	if err == nil {
		switch f := sl.flags[index]; {
		case f&flagIssued == 0:
			err = errors.New("it was not issued")
		case f&flagDone != 0:
			err = errors.New("it is done, which gave its credit back")
		case f&flagSent != 0:
			err = errors.New("it was sent before")
		}
	}
	if err != nil {
		return fmt.Errorf("sched: partition %d of step %d sent: %w", index, step, err)
	}
	sl.flags[index] |= flagSent
	s.held -= sl.plan.parts[index].bytes
	return nil
}

// Done says that an issued partition is reduced: its range holds the result. It
// gives the credit back if Sent did not, and appends the tensors of which this
// was the last partition.
func (s *Scheduler) Done(dst []int, step uint64, index int) ([]int, error) {
	sl, err := s.planned(step, index)
	if err == nil {
		switch f := sl.flags[index]; {
		case f&flagIssued == 0:
			err = errors.New("it was not issued")
		case f&flagDone != 0:
			err = errors.New("it was done before")
		}
	}
	if err != nil {
		return dst, fmt.Errorf("sched: partition %d of step %d done: %w", index, step, err)
	}
	if sl.flags[index]&flagSent == 0 {
		s.held -= sl.plan.parts[index].bytes
	}
	sl.flags[index] |= flagSent | flagDone
	s.inFlight--
	sl.done++
	for _, t := range sl.plan.tensors(int32(index)) {
		if sl.undone[t]--; sl.undone[t] == 0 {
			dst = append(dst, int(t))
		}
	}
	s.retire(sl)
	return dst, nil
}

// front returns the partition whose turn it is, and nil if none is in line. For
// a leader the older step goes first: all its partitions were in line before the
// first of the later one, since plans and gradients come in the order of steps.
func (s *Scheduler) front() (*slot, int32) {
	a, b := s.alive[0], s.alive[1]
	switch {
	case b == nil || b.queued() == 0:
		if a == nil || a.queued() == 0 {
			return nil, 0
		}
	case a.queued() == 0 || s.role == Follower && b.queue[b.head].turn < a.queue[a.head].turn:
		a = b
	}
	return a, a.front()
}

// check says whether partition i, whose turn it is, may be issued.
func (s *Scheduler) check(sl *slot, i int32) Reason {
	c := &sl.plan.config
	switch {
	case sl.flags[i]&flagReady == 0:
		return NotReady
	case s.held > 0 && sl.plan.parts[i].bytes > c.Credit-s.held:
		return NoCredit
	case c.Lanes > 0 && s.inFlight >= c.Lanes:
		return NoLane
	}
	return Free
}

// early says whether the step before this one is still open for gradients.
func (s *Scheduler) early(sl *slot) bool {
	return sl == s.alive[1] && !s.alive[0].closed
}

// retire frees the slot of a step that has nothing left to wait for.
func (s *Scheduler) retire(sl *slot) {
	if !sl.drained() {
		return
	}
	sl.alive = false
	if s.alive[0] == sl {
		s.alive[0] = s.alive[1]
	}
	s.alive[1] = nil
}

// find returns the slot of an alive step.
func (s *Scheduler) find(step uint64) (*slot, error) {
	for _, sl := range s.alive {
		if sl != nil && sl.step == step {
			return sl, nil
		}
	}
	if s.opened && step <= s.last {
		return nil, ErrRetired
	}
	return nil, ErrNotOpen
}

// planned returns the slot of an alive step that has a plan with this index.
func (s *Scheduler) planned(step uint64, index int) (*slot, error) {
	sl, err := s.find(step)
	switch {
	case err != nil:
		return nil, err
	case sl.plan == nil:
		return nil, ErrNoPlan
	case index < 0 || index >= sl.plan.Len():
		return nil, fmt.Errorf("partitions are 0 to %d", sl.plan.Len()-1)
	}
	return sl, nil
}
