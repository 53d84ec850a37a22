package worker

import (
	"errors"
	"time"

	"autobyte/internal/engine/external"
	"autobyte/internal/sched"
)

// The carrier is the host program's end of the external engine: one thread
// takes operations, issues them as collectives and answers for each.

// Take returns the next partition to issue, waiting up to wait for one:
// ErrAgain if there is none yet, ErrStopped after Stop. One consumer only.
func (w *Worker) Take(wait time.Duration) (sched.Op, error) {
	op, err := w.engine.Take(wait)
	switch {
	case errors.Is(err, external.ErrTimeout):
		return op, ErrAgain
	case errors.Is(err, external.ErrStopped):
		return op, ErrStopped
	}
	return op, err
}

// Sent says that the bytes of a taken partition have left. It is optional.
func (w *Worker) Sent(step uint64, index int) error { return w.engine.Sent(step, index) }

// Done says that a taken partition is reduced.
func (w *Worker) Done(step uint64, index int) error { return w.engine.Done(step, index) }

// Failed says that a taken partition can't be reduced, and why.
func (w *Worker) Failed(step uint64, index int, cause error) error {
	return w.engine.Failed(step, index, cause)
}

// WaitIdle waits until every partition taken is answered, or until the time is
// over, and returns how many are not.
func (w *Worker) WaitIdle(wait time.Duration) int { return w.engine.WaitIdle(wait) }
