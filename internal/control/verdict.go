package control

import (
	"fmt"
	"math"
	"slices"
)

// maxOpenSteps bounds the steps that some ranks have closed and others not.
// Training keeps two; only a rank that misbehaves comes near.
const maxOpenSteps = 1024

// tally finds the tensors that were absent on every rank. A rank closes steps
// in ascending order, each once.
type tally struct {
	next []uint64 // by rank: the lowest step that it may close
	open map[uint64]*stepTally
}

type stepTally struct {
	closed int
	any    bool    // a rank had absent tensors
	absent []int32 // absent on all ranks that have closed
}

func newTally(world int) *tally {
	return &tally{next: make([]uint64, world), open: make(map[uint64]*stepTally)}
}

// close takes one rank's absent tensors, ascending. When it was the last rank
// and any rank had absent ones, it returns true and those absent everywhere.
func (t *tally) close(rank int, step uint64, absent []int32) ([]int32, bool, error) {
	if step < t.next[rank] || step == math.MaxUint64 {
		return nil, false, fmt.Errorf("rank %d closed step %d, want step %d or later", rank, step, t.next[rank])
	}
	s := t.open[step]
	if s == nil {
		if len(t.open) >= maxOpenSteps {
			return nil, false, fmt.Errorf("rank %d closed step %d while %d steps are not closed by all ranks", rank, step, len(t.open))
		}
		s = &stepTally{absent: slices.Clone(absent)}
		t.open[step] = s
	} else {
		s.absent = intersect(s.absent, absent)
	}
	t.next[rank] = step + 1
	s.closed++
	s.any = s.any || len(absent) > 0
	if s.closed < len(t.next) {
		return nil, false, nil
	}
	delete(t.open, step)
	return s.absent, s.any, nil
}

// intersect keeps in a what is in b too; both ascend.
func intersect(a, b []int32) []int32 {
	kept := a[:0]
	for _, v := range a {
		for len(b) > 0 && b[0] < v {
			b = b[1:]
		}
		if len(b) > 0 && b[0] == v {
			kept = append(kept, v)
		}
	}
	return kept
}
