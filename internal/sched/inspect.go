package sched

import "fmt"

// Reason says why the partition whose turn it is has not been issued.
type Reason uint8

const (
	// Idle: no partition is in line.
	Idle Reason = iota
	// Free: nothing holds it back, Next would issue it.
	Free
	// NotReady: a follower waits for gradients of its own.
	NotReady
	// NoCredit: the engine holds too many bytes.
	NoCredit
	// NoLane: too many operations are in flight.
	NoLane
)

// String returns a word or two for messages.
func (r Reason) String() string {
	switch r {
	case Idle:
		return "idle"
	case Free:
		return "free"
	case NotReady:
		return "not ready"
	case NoCredit:
		return "no credit"
	case NoLane:
		return "no lane"
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

// Head returns the partition whose turn it is and why it has not been issued. If
// the reason is Idle, there is none.
func (s *Scheduler) Head() (Op, Reason) {
	sl, i := s.front()
	if sl == nil {
		return Op{}, Idle
	}
	q := &sl.plan.parts[i]
	return Op{Step: sl.step, Index: i, Space: q.space, Offset: q.offset, Bytes: q.bytes}, s.check(sl, i)
}

// Layout returns the layout that the scheduler was made for.
func (s *Scheduler) Layout() *Layout { return s.layout }

// Role returns the role that the scheduler was made for.
func (s *Scheduler) Role() Role { return s.role }

// Alive returns how many steps are alive: 0, 1 or 2.
func (s *Scheduler) Alive() int {
	n := 0
	for _, sl := range s.alive {
		if sl != nil {
			n++
		}
	}
	return n
}

// AliveSteps appends the steps that are alive, oldest first.
func (s *Scheduler) AliveSteps(dst []uint64) []uint64 {
	for _, sl := range s.alive {
		if sl != nil {
			dst = append(dst, sl.step)
		}
	}
	return dst
}

// IsOpen says whether a step is alive: opened and not retired.
func (s *Scheduler) IsOpen(step uint64) bool {
	_, err := s.find(step)
	return err == nil
}

// IsClosed says whether a step was closed; a retired one was.
func (s *Scheduler) IsClosed(step uint64) bool {
	sl, err := s.find(step)
	if err != nil {
		return err == ErrRetired
	}
	return sl.closed
}

// PlanOf returns the plan of an alive step, nil if it is not alive or has none.
func (s *Scheduler) PlanOf(step uint64) *Plan {
	sl, err := s.find(step)
	if err != nil {
		return nil
	}
	return sl.plan
}

// IsReady says whether a tensor is ready in a step; in a retired one all are.
func (s *Scheduler) IsReady(step uint64, tensor int) bool {
	if tensor < 0 || tensor >= s.layout.Tensors() {
		return false
	}
	sl, err := s.find(step)
	if err != nil {
		return err == ErrRetired
	}
	return sl.tensorReady[tensor]
}

// TensorDone says whether all partitions of a tensor are done in a step; in a
// retired one they are.
func (s *Scheduler) TensorDone(step uint64, tensor int) bool {
	if tensor < 0 || tensor >= s.layout.Tensors() {
		return false
	}
	sl, err := s.find(step)
	if err != nil {
		return err == ErrRetired
	}
	return sl.plan != nil && sl.undone[tensor] == 0
}

// StepDone says whether a step has retired. It is true of every step up to the
// newest opened that is not alive, also of those before the first opened, and
// false of one that is still to come.
func (s *Scheduler) StepDone(step uint64) bool {
	_, err := s.find(step)
	return err == ErrRetired
}

// Pending appends the tensors of an alive step that are not done.
func (s *Scheduler) Pending(dst []int, step uint64) []int {
	sl, err := s.find(step)
	if err != nil {
		return dst
	}
	for t := range sl.tensorReady {
		if sl.plan == nil || sl.undone[t] > 0 {
			dst = append(dst, t)
		}
	}
	return dst
}

// HeldBytes returns the bytes that the engine holds: issued and not sent.
func (s *Scheduler) HeldBytes() int64 { return s.held }

// InFlight returns the operations in flight: issued and not done.
func (s *Scheduler) InFlight() int { return s.inFlight }

// Queued returns the partitions in line: on a leader those ready and not
// issued, on a follower those ordered and not issued.
func (s *Scheduler) Queued() int {
	n := 0
	for _, sl := range s.alive {
		if sl != nil {
			n += sl.queued()
		}
	}
	return n
}
