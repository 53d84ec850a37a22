package sched

import (
	"errors"
	"fmt"
)

// MaxPartitions bounds a plan, and with it the memory that a slip in a
// configuration can take.
const MaxPartitions = 1 << 24

// Partition is a contiguous range of a space: the unit that is communicated.
// Offset and Bytes are multiples of Align, so Bytes includes the padding
// between and behind the tensors it covers.
type Partition struct {
	Space         int
	Offset, Bytes int64
	First, Last   int // ids of the first and last tensor it covers, whole or in part
}

// Plan cuts the spaces of a layout into partitions under one configuration. A
// partition's index is its priority: partitions are in the order of the forward
// position of their first tensor over all spaces, then of the offset.
//
// A tensor lies either whole in one partition, which may cover others of its
// space too, or in several consecutive ones of its own.
type Plan struct {
	layout *Layout
	config Config
	parts  []part
	first  []int32 // by tensor: its first partition
	count  []int32 // by tensor: how many partitions it has
	needs  []int32 // by partition: how many tensors it covers
	hash   uint64
}

// part is a partition as the scheduler reads it. The tensors it covers are
// layout.bySpace[lo:hi].
type part struct {
	offset, bytes int64
	space, lo, hi int32
}

// NewPlan cuts l under c. The cuts depend on nothing else. In each space, from
// its start: neighbours smaller than the fusion size are joined while the range,
// padding included, is at most the fusion size; every other tensor is cut into
// pieces of at most the partition size that differ by at most Align.
func NewPlan(l *Layout, c Config) (*Plan, error) {
	if l == nil {
		return nil, errors.New("sched: plan without a layout; make one with NewLayout")
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	n, err := countPartitions(l, c)
	if err != nil {
		return nil, err
	}
	p := &Plan{
		layout: l,
		config: c,
		parts:  make([]part, 0, n),
		first:  make([]int32, l.Tensors()),
		count:  make([]int32, l.Tensors()),
	}
	joined := append([]int32(nil), l.group...) // by space: the part of bySpace before it is cut
	for t := range l.tensors {
		space := l.tensors[t].Space
		switch {
		case l.place[t] < joined[space]: // in a run that an earlier tensor began
		case l.tensors[t].Bytes < c.Fusion:
			joined[space] = p.join(t)
		default:
			p.cut(t)
			joined[space]++
		}
	}
	p.needs = make([]int32, len(p.parts))
	h := newHash(l.hash).add(uint64(c.Partition)).add(uint64(c.Credit)).add(uint64(c.Fusion)).
		add(uint64(c.Lanes)).add(uint64(c.Policy)).add(uint64(len(p.parts)))
	for i := range p.parts {
		q := &p.parts[i]
		p.needs[i] = q.hi - q.lo
		h = h.add(uint64(q.offset)).add(uint64(q.space)<<32 | uint64(q.lo)).add(uint64(q.bytes))
	}
	p.hash = uint64(h)
	return p, nil
}

// countPartitions returns the number of partitions before small tensors are
// joined, or an error if it is senseless.
func countPartitions(l *Layout, c Config) (int, error) {
	var n int64
	for _, t := range l.tensors {
		if t.Bytes < c.Fusion {
			n++
		} else {
			n += pieces(t.Bytes, c.Partition)
		}
		if n > MaxPartitions {
			return 0, fmt.Errorf("sched: partitions of %d bytes cut this layout into more than %d; choose a larger partition size",
				c.Partition, MaxPartitions)
		}
	}
	return int(n), nil
}

// pieces returns how many pieces a tensor of the given size is cut into.
func pieces(bytes, partition int64) int64 {
	units, most := padded(bytes)/Align, partition/Align
	return 1 + (units-1)/most
}

// join makes one partition of tensor t and those after it in its space that it
// can be joined with, and returns where in bySpace the next run begins.
func (p *Plan) join(t int) int32 {
	l := p.layout
	lo, start := l.place[t], l.offset[t]
	hi, end := lo+1, l.end(t)
	for stop := l.group[l.tensors[t].Space+1]; hi < stop; hi++ {
		next := int(l.bySpace[hi])
		if l.end(next)-start > p.config.Fusion { // as with every tensor of that size
			break
		}
		end = l.end(next)
	}
	for _, member := range l.bySpace[lo:hi] {
		p.first[member], p.count[member] = int32(len(p.parts)), 1
	}
	p.parts = append(p.parts, part{start, end - start, int32(l.tensors[t].Space), lo, hi})
	return hi
}

// cut makes partitions of tensor t alone.
func (p *Plan) cut(t int) {
	l := p.layout
	n := pieces(l.tensors[t].Bytes, p.config.Partition)
	units := padded(l.tensors[t].Bytes) / Align
	p.first[t], p.count[t] = int32(len(p.parts)), int32(n)
	offset := l.offset[t]
	for i := range n {
		bytes := units / n * Align
		if i < units%n {
			bytes += Align
		}
		p.parts = append(p.parts, part{offset, bytes, int32(l.tensors[t].Space), l.place[t], l.place[t] + 1})
		offset += bytes
	}
}

// Len returns the number of partitions.
func (p *Plan) Len() int { return len(p.parts) }

// Partition returns partition i.
func (p *Plan) Partition(i int) Partition {
	q := &p.parts[i]
	return Partition{
		Space: int(q.space), Offset: q.offset, Bytes: q.bytes,
		First: int(p.layout.bySpace[q.lo]), Last: int(p.layout.bySpace[q.hi-1]),
	}
}

// AppendTensors appends the ids of the tensors that partition i covers. They are
// those of its space from First to Last; ids of other spaces may lie between.
func (p *Plan) AppendTensors(dst []int, i int) []int {
	for _, t := range p.tensors(int32(i)) {
		dst = append(dst, int(t))
	}
	return dst
}

// Partitions returns the first partition of tensor t, and how many it has; they
// are consecutive.
func (p *Plan) Partitions(t int) (first, n int) { return int(p.first[t]), int(p.count[t]) }

// Hash identifies layout, cuts and configuration: ranks whose plans have the
// same hash communicate the same ranges under the same limits.
func (p *Plan) Hash() uint64 { return p.hash }

// Config returns the configuration that the plan was made with.
func (p *Plan) Config() Config { return p.config }

// Layout returns the layout that the plan cuts.
func (p *Plan) Layout() *Layout { return p.layout }

// tensors returns the tensors that partition i covers.
func (p *Plan) tensors(i int32) []int32 {
	q := &p.parts[i]
	return p.layout.bySpace[q.lo:q.hi]
}
