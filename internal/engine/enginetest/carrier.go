package enginetest

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"autobyte/internal/sched"
)

// Queue is the side of an engine that a carrier drains: what the external
// engine shows to the host program, and what a worker passes on.
type Queue interface {
	Take(wait time.Duration) (sched.Op, error)
	Done(step uint64, index int) error
	Failed(step uint64, index int, cause error) error
}

// AllReduce carries operations as torch.distributed does: the k-th operation
// of every rank must be the same, and is summed once all ranks have issued it.
// Another order, which would corrupt the sums or abort a real engine, is an
// error here. It may be used concurrently.
type AllReduce struct {
	// Memory returns a rank's flat buffer of a space.
	Memory func(rank, space int) []float32
	// Pause, if set, is called before an operation's sum is reported to a rank.
	Pause func(rank int)

	world   int
	mu      sync.Mutex
	issued  []int // by rank: how many
	rounds  []*round
	gone    []bool
	broken  error
	reports sync.WaitGroup
}

// round is one collective: the same operation of every rank.
type round struct {
	op      sched.Op
	waiting []member
}

type member struct {
	rank  int
	queue Queue
}

// ErrGone is why operations fail that a rank takes no part in any more.
var ErrGone = errors.New("connection closed by peer")

// NewAllReduce returns a carrier for a number of ranks.
func NewAllReduce(world int, memory func(rank, space int) []float32) *AllReduce {
	return &AllReduce{Memory: memory, world: world, issued: make([]int, world), gone: make([]bool, world)}
}

// Drain issues what a rank's queue hands out until Take returns an error other
// than again, which it returns.
func (a *AllReduce) Drain(rank int, queue Queue, again error) error {
	for {
		op, err := queue.Take(10 * time.Millisecond)
		if errors.Is(err, again) {
			continue
		}
		if err != nil {
			return err
		}
		a.Issue(rank, queue, op)
	}
}

// Issue is a rank's call of the collective. It does not wait for the others.
func (a *AllReduce) Issue(rank int, queue Queue, op sched.Op) {
	a.mu.Lock()
	k := a.issued[rank]
	a.issued[rank]++
	if k == len(a.rounds) {
		a.rounds = append(a.rounds, &round{op: op})
	}
	r := a.rounds[k]
	if r.op != op {
		if a.broken == nil {
			a.broken = fmt.Errorf("rank %d issues %+v as its operation %d, another rank issued %+v", rank, op, k, r.op)
		}
		err := a.broken
		a.mu.Unlock()
		_ = queue.Failed(op.Step, int(op.Index), err)
		return
	}
	r.waiting = append(r.waiting, member{rank, queue})
	switch {
	case len(r.waiting) == a.world:
		a.sum(op)
		a.report(r.waiting, op, nil)
		r.waiting = nil
	case a.anyGoneLocked(r):
		a.report(r.waiting, op, ErrGone)
		r.waiting = nil
	}
	a.mu.Unlock()
}

// anyGoneLocked reports whether a rank is gone that has not issued the round.
func (a *AllReduce) anyGoneLocked(r *round) bool {
	for rank, gone := range a.gone {
		if gone {
			issued := false
			for _, m := range r.waiting {
				issued = issued || m.rank == rank
			}
			if !issued {
				return true
			}
		}
	}
	return false
}

// Lose makes a rank fall out: what it has not issued fails on the others.
func (a *AllReduce) Lose(rank int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.gone[rank] = true
	for _, r := range a.rounds {
		if len(r.waiting) > 0 && a.anyGoneLocked(r) {
			a.report(r.waiting, r.op, ErrGone)
			r.waiting = nil
		}
	}
}

// sum puts the sum over all ranks into every rank's memory.
func (a *AllReduce) sum(op sched.Op) {
	first, n := op.Offset/4, op.Bytes/4
	total := make([]float32, n)
	for rank := range a.world {
		for i, v := range a.Memory(rank, int(op.Space))[first : first+n] {
			total[i] += v
		}
	}
	for rank := range a.world {
		copy(a.Memory(rank, int(op.Space))[first:first+n], total)
	}
}

func (a *AllReduce) report(to []member, op sched.Op, failure error) {
	for _, m := range to {
		a.reports.Go(func() {
			if a.Pause != nil {
				a.Pause(m.rank)
			}
			if failure != nil {
				_ = m.queue.Failed(op.Step, int(op.Index), failure)
			} else {
				_ = m.queue.Done(op.Step, int(op.Index))
			}
		})
	}
}

// Err returns the first difference of order, if there was one.
func (a *AllReduce) Err() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.broken
}

// Rounds returns how many operations were summed or are waiting.
func (a *AllReduce) Rounds() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.rounds)
}

// Wait waits for reports that are under way.
func (a *AllReduce) Wait() { a.reports.Wait() }
