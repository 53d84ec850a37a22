// Package external is the engine whose carrier is somebody else: a queue that
// a thread of the host program drains into torch.distributed. It keeps the
// order of Submit, because collectives must be issued alike on every rank.
// All methods may be called concurrently.
package external

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"autobyte/internal/engine"
	"autobyte/internal/sched"
)

// ErrStopped is returned by Take once the engine is closed.
var ErrStopped = errors.New("external engine: stopped")

// ErrTimeout is returned by Take when nothing was submitted in time.
var ErrTimeout = errors.New("external engine: nothing to issue yet")

type key struct {
	step  uint64
	index int32
}

// Engine queues operations until Take hands them to the host program, which
// answers each with Done or Failed.
type Engine struct {
	reports engine.Reports

	mu     sync.Mutex
	queue  []sched.Op       // submitted, not taken; consumed from head
	head   int              // first live entry of queue
	taken  map[key]struct{} // handed out, not answered
	closed bool
	wake   chan struct{} // capacity 1: something changed for Take
	idle   chan struct{} // closed when the last taken operation is answered; nil unless someone waits
}

var _ engine.Engine = (*Engine)(nil)

// New returns an empty engine that answers to reports.
func New(reports engine.Reports) *Engine {
	return &Engine{
		reports: reports,
		taken:   make(map[key]struct{}),
		wake:    make(chan struct{}, 1),
	}
}

// Submit appends operations to the queue. After Close it drops them.
func (e *Engine) Submit(ops []sched.Op) {
	if len(ops) == 0 {
		return
	}
	e.mu.Lock()
	if !e.closed {
		if e.head > len(e.queue)-e.head {
			// Half and more is consumed: moving the rest to the front costs
			// less than what was taken since, and bounds the queue.
			e.queue = e.queue[:copy(e.queue, e.queue[e.head:])]
			e.head = 0
		}
		e.queue = append(e.queue, ops...)
	}
	e.mu.Unlock()
	e.signal()
}

func (e *Engine) signal() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// Take returns the next operation to issue, waiting up to wait for one. It
// returns ErrTimeout or ErrStopped when there is none. One consumer only: two
// would issue in an order that nobody agreed on.
func (e *Engine) Take(wait time.Duration) (sched.Op, error) {
	var timeout <-chan time.Time
	for {
		e.mu.Lock()
		if e.closed {
			e.mu.Unlock()
			return sched.Op{}, ErrStopped
		}
		if e.head < len(e.queue) {
			op := e.queue[e.head]
			e.head++
			e.taken[key{op.Step, op.Index}] = struct{}{}
			e.mu.Unlock()
			return op, nil
		}
		e.mu.Unlock()
		if wait <= 0 {
			return sched.Op{}, ErrTimeout
		}
		if timeout == nil {
			timer := time.NewTimer(wait)
			defer timer.Stop()
			timeout = timer.C
		}
		select {
		case <-e.wake:
		case <-timeout:
			return sched.Op{}, ErrTimeout
		}
	}
}

// underWayLocked demands that an operation was handed out and not answered.
func (e *Engine) underWayLocked(step uint64, index int) error {
	if _, ok := e.taken[key{step, int32(index)}]; !ok || index != int(int32(index)) {
		return fmt.Errorf("external engine: partition %d of step %d is not under way", index, step)
	}
	return nil
}

// answered takes an operation off the list of those handed out, and says
// whether the answer is to be reported.
func (e *Engine) answered(step uint64, index int) (report bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.underWayLocked(step, index); err != nil {
		return false, err
	}
	delete(e.taken, key{step, int32(index)})
	if len(e.taken) == 0 && e.idle != nil {
		close(e.idle)
		e.idle = nil
	}
	return !e.closed, nil
}

// Sent says that the bytes of a taken operation have left.
func (e *Engine) Sent(step uint64, index int) error {
	e.mu.Lock()
	err, closed := e.underWayLocked(step, index), e.closed
	e.mu.Unlock()
	if err != nil || closed {
		return err
	}
	e.reports.Sent(step, index)
	return nil
}

// Done says that a taken operation has been reduced.
func (e *Engine) Done(step uint64, index int) error {
	if report, err := e.answered(step, index); !report {
		return err
	}
	return e.reports.Done(step, index)
}

// Failed says that a taken operation can't be reduced, and why.
func (e *Engine) Failed(step uint64, index int, cause error) error {
	if report, err := e.answered(step, index); !report {
		return err
	}
	e.reports.Failed(step, index, cause)
	return nil
}

// WaitIdle waits until every operation handed out has been answered, or until
// the time is over, and returns how many are left.
func (e *Engine) WaitIdle(wait time.Duration) int {
	e.mu.Lock()
	if len(e.taken) == 0 {
		e.mu.Unlock()
		return 0
	}
	if e.idle == nil {
		e.idle = make(chan struct{})
	}
	idle := e.idle
	e.mu.Unlock()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-idle:
	case <-timer.C:
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.taken)
}

// Close stops Take and drops what was not taken. Answers for what was taken
// are still accepted, for WaitIdle, and no longer reported.
func (e *Engine) Close() error {
	e.mu.Lock()
	e.closed = true
	e.queue, e.head = nil, 0
	e.mu.Unlock()
	e.signal()
	return nil
}
