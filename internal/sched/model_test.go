package sched

import (
	"sort"
)

// dumb is the specification, written to be read: no queue, no counters, every
// answer computed anew from what happened. It takes correct calls only.
type dumb struct {
	layout *Layout
	role   Role
	steps  map[uint64]*dumbStep
	now    int
}

type dumbStep struct {
	plan      *Plan
	closed    bool
	readyAt   map[int]int // by tensor
	orderedAt map[int]int // by partition
	issued    map[int]bool
	sent      map[int]bool
	done      map[int]bool
}

func newDumb(l *Layout, role Role) *dumb {
	return &dumb{layout: l, role: role, steps: map[uint64]*dumbStep{}}
}

func (d *dumb) open(step uint64) {
	d.steps[step] = &dumbStep{
		readyAt: map[int]int{}, orderedAt: map[int]int{},
		issued: map[int]bool{}, sent: map[int]bool{}, done: map[int]bool{},
	}
}

func (d *dumb) ready(step uint64, t int) {
	d.now++
	d.steps[step].readyAt[t] = d.now
}

func (d *dumb) close(step uint64) (absent []int) {
	st := d.steps[step]
	st.closed = true
	for t := range d.layout.Tensors() {
		if st.readyAt[t] == 0 {
			d.ready(step, t)
			absent = append(absent, t)
		}
	}
	return absent
}

func (d *dumb) order(step uint64, i int) {
	d.now++
	d.steps[step].orderedAt[i] = d.now
}

// covers lists the tensors that overlap a partition.
func covers(p *Plan, i int) (tensors []int) {
	q, l := p.Partition(i), p.Layout()
	for t := range l.Tensors() {
		begin, end := l.Offset(t), l.Offset(t)+l.Tensor(t).Bytes
		if l.Tensor(t).Space == q.Space && begin < q.Offset+q.Bytes && end > q.Offset {
			tensors = append(tensors, t)
		}
	}
	return tensors
}

// partReadyAt returns when the last tensor of a partition became ready, 0 if one
// is not.
func (st *dumbStep) partReadyAt(i int) int {
	at := 0
	for _, t := range covers(st.plan, i) {
		if st.readyAt[t] == 0 {
			return 0
		}
		at = max(at, st.readyAt[t])
	}
	return at
}

// stepDone says that a step is closed and all its partitions are done.
func (st *dumbStep) stepDone() bool {
	return st.closed && st.plan != nil && len(st.done) == st.plan.Len()
}

func (st *dumbStep) tensorDone(t int) bool {
	if st.plan == nil {
		return false
	}
	for i := range st.plan.Len() {
		for _, c := range covers(st.plan, i) {
			if c == t && !st.done[i] {
				return false
			}
		}
	}
	return true
}

func (d *dumb) alive() (steps []uint64) {
	for step, st := range d.steps {
		if !st.stepDone() {
			steps = append(steps, step)
		}
	}
	sort.Slice(steps, func(i, j int) bool { return steps[i] < steps[j] })
	return steps
}

func (d *dumb) held() (bytes int64, inFlight int) {
	for _, st := range d.steps {
		for i := range st.issued {
			if !st.sent[i] {
				bytes += st.plan.Partition(i).Bytes
			}
			if !st.done[i] {
				inFlight++
			}
		}
	}
	return bytes, inFlight
}

// candidate is a partition that is in line, and what decides its turn.
type candidate struct {
	step  uint64
	index int
	at    int
	fifo  bool
	ready bool
}

// before is the whole rule of who goes first.
func (d *dumb) before(a, b candidate) bool {
	if d.role == Follower {
		return a.at < b.at
	}
	if a.step != b.step {
		return a.step < b.step
	}
	if a.fifo && a.at != b.at {
		return a.at < b.at
	}
	return a.index < b.index
}

func (d *dumb) next() (ops []Op) {
	for {
		var best *candidate
		for _, step := range d.alive() {
			st := d.steps[step]
			if st.plan == nil {
				continue
			}
			for i := range st.plan.Len() {
				c := candidate{step, i, st.partReadyAt(i), st.plan.Config().Policy == FIFO, st.partReadyAt(i) > 0}
				if d.role == Follower {
					c.at = st.orderedAt[i]
				}
				if !st.issued[i] && c.at > 0 && (best == nil || d.before(c, *best)) {
					best = &c
				}
			}
		}
		if best == nil || !best.ready {
			return ops
		}
		st := d.steps[best.step]
		q, c := st.plan.Partition(best.index), st.plan.Config()
		held, inFlight := d.held()
		if held > 0 && held+q.Bytes > c.Credit || c.Lanes > 0 && inFlight+1 > c.Lanes {
			return ops
		}
		st.issued[best.index] = true
		ops = append(ops, Op{best.step, int32(best.index), int32(q.Space), q.Offset, q.Bytes})
	}
}

// complete is Done: it returns the tensors that this completes.
func (d *dumb) complete(step uint64, i int) (tensors []int) {
	st := d.steps[step]
	was := map[int]bool{}
	for _, t := range covers(st.plan, i) {
		was[t] = st.tensorDone(t)
	}
	st.sent[i], st.done[i] = true, true
	for _, t := range covers(st.plan, i) {
		if !was[t] && st.tensorDone(t) {
			tensors = append(tensors, t)
		}
	}
	return tensors
}
