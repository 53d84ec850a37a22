package sched

// What has happened to a partition. Each flag is set at most once in a step.
const (
	flagReady   uint8 = 1 << iota // all its tensors are ready
	flagOrdered                   // follower: it is in the leader's order
	flagIssued
	flagSent // its credit came back
	flagDone
)

// entry is a partition in a queue that is first in, first out. Turns count over
// all steps, so that a follower finds which of two queues is first; a leader
// always takes the older step's, and leaves them 0.
type entry struct {
	turn  uint64
	index int32
}

// slot holds the state of one alive step. What is sized by tensor is allocated
// once; what is sized by partition grows with the largest plan seen.
type slot struct {
	step   uint64
	alive  bool
	closed bool
	plan   *Plan // nil until SetPlan

	tensorReady []bool
	readied     []int32 // tensors in the order they became ready
	undone      []int32 // by tensor: partitions not done, once planned

	flags  []uint8 // by partition
	needs  []int32 // by partition: tensors not ready
	done   int     // partitions done
	byPrio bool    // ready partitions are in set, not in queue

	set   minSet  // leader, Priority: ready and not issued
	queue []entry // leader, FIFO: in order of readiness; follower: in the leader's order
	head  int     // queue[head:] is not issued
}

// open starts step in an unused slot.
func (sl *slot) open(step uint64) {
	sl.step, sl.alive, sl.closed, sl.plan = step, true, false, nil
	clear(sl.tensorReady)
	sl.readied, sl.queue = sl.readied[:0], sl.queue[:0]
	sl.done, sl.head = 0, 0
	sl.byPrio = false
}

// use puts p in force and replays the tensors that are ready already.
func (sl *slot) use(p *Plan, role Role) {
	sl.plan = p
	sl.byPrio = role == Leader && p.config.Policy == Priority
	sl.flags = resized(sl.flags, p.Len())
	clear(sl.flags)
	sl.needs = resized(sl.needs, p.Len())
	copy(sl.needs, p.needs)
	copy(sl.undone, p.count)
	if sl.byPrio {
		sl.set.reset(p.Len())
	} else {
		sl.queue = resized(sl.queue, p.Len())[:0]
	}
	for _, t := range sl.readied {
		sl.arrive(t, role)
	}
}

// tensor marks tensor t, which is not ready, as ready.
func (sl *slot) tensor(t int32, role Role) {
	sl.tensorReady[t] = true
	sl.readied = append(sl.readied, t)
	if sl.plan != nil {
		sl.arrive(t, role)
	}
}

// arrive tells the partitions of tensor t that it is ready.
func (sl *slot) arrive(t int32, role Role) {
	first := sl.plan.first[t]
	for i := first; i < first+sl.plan.count[t]; i++ {
		if sl.needs[i]--; sl.needs[i] > 0 {
			continue
		}
		sl.flags[i] |= flagReady
		switch {
		case sl.byPrio:
			sl.set.add(i)
		case role == Leader:
			sl.queue = append(sl.queue, entry{index: i})
		}
	}
}

// queued returns how many partitions stand in line: ready ones on a leader,
// ordered ones on a follower.
func (sl *slot) queued() int {
	if sl.byPrio {
		return sl.set.n
	}
	return len(sl.queue) - sl.head
}

// front returns the partition at the head of the line, which is not empty.
func (sl *slot) front() int32 {
	if sl.byPrio {
		return sl.set.min()
	}
	return sl.queue[sl.head].index
}

// pop takes the partition i out of the head of the line.
func (sl *slot) pop(i int32) {
	if sl.byPrio {
		sl.set.remove(i)
	} else {
		sl.head++
	}
	sl.flags[i] |= flagIssued
}

// drained says whether the step has nothing left to wait for.
func (sl *slot) drained() bool {
	return sl.closed && sl.plan != nil && sl.done == sl.plan.Len()
}
