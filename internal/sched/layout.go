package sched

import (
	"errors"
	"fmt"
)

// Align is the alignment in bytes of everything in a space: every tensor starts
// at a multiple of it, and every cut is one. It is a cache line, and a multiple
// of the size of every dtype, so no partition splits an element.
const Align = 64

// maxLayoutBytes keeps sums of bytes over the two alive steps far from overflow.
const maxLayoutBytes = 1 << 60

// Tensor is one parameter's gradient.
type Tensor struct {
	Space int   // the space it lies in: one per dtype and device
	Bytes int64 // its size, without padding
}

// Layout places tensors in spaces. The index of a tensor in the slice given to
// NewLayout is its id and its forward position over all spaces. Within a space,
// tensors lie end to end in forward order, each padded to a multiple of Align.
type Layout struct {
	tensors []Tensor
	offset  []int64 // by tensor
	spaces  []int64 // bytes by space, padding included
	bySpace []int32 // tensors grouped by space, in forward order within it
	place   []int32 // by tensor: its position in bySpace
	group   []int32 // by space: where its group begins in bySpace; one more at the end
	hash    uint64
}

// NewLayout lays out tensors given in forward order. It needs at least one
// tensor; every size must be positive, and the spaces in use must be 0 to k-1
// without holes.
func NewLayout(tensors []Tensor) (*Layout, error) {
	if len(tensors) == 0 {
		return nil, errors.New("sched: layout without tensors; give at least one")
	}
	if len(tensors) > MaxPartitions {
		return nil, fmt.Errorf("sched: layout has %d tensors; at most %d are allowed", len(tensors), MaxPartitions)
	}
	l := &Layout{
		tensors: append([]Tensor(nil), tensors...),
		offset:  make([]int64, len(tensors)),
		bySpace: make([]int32, len(tensors)),
		place:   make([]int32, len(tensors)),
	}
	k := 0
	var total int64
	for t, x := range tensors {
		if x.Space < 0 || x.Space >= len(tensors) {
			return nil, fmt.Errorf("sched: tensor %d is in space %d; %d tensors have spaces 0 to %d at most, without holes",
				t, x.Space, len(tensors), len(tensors)-1)
		}
		if x.Bytes <= 0 || x.Bytes > maxLayoutBytes-total {
			return nil, fmt.Errorf("sched: tensor %d has %d bytes; a size must be positive and all together at most %d",
				t, x.Bytes, int64(maxLayoutBytes))
		}
		total += padded(x.Bytes)
		k = max(k, x.Space+1)
	}
	l.spaces = make([]int64, k)
	l.group = make([]int32, k+1)
	for t, x := range tensors {
		l.offset[t] = l.spaces[x.Space]
		l.spaces[x.Space] += padded(x.Bytes)
		l.group[x.Space+1]++
	}
	for s, bytes := range l.spaces {
		if bytes == 0 {
			return nil, fmt.Errorf("sched: space %d has no tensor, space %d has; number the spaces 0 to k-1 without holes", s, k-1)
		}
		l.group[s+1] += l.group[s]
	}
	fill := append([]int32(nil), l.group...)
	h := newHash(uint64(len(tensors)))
	for t, x := range tensors {
		l.place[t] = fill[x.Space]
		l.bySpace[fill[x.Space]] = int32(t)
		fill[x.Space]++
		h = h.add(uint64(x.Space)).add(uint64(x.Bytes))
	}
	l.hash = uint64(h)
	return l, nil
}

// Tensors returns the number of tensors.
func (l *Layout) Tensors() int { return len(l.tensors) }

// Spaces returns the number of spaces.
func (l *Layout) Spaces() int { return len(l.spaces) }

// SpaceBytes returns the size of space s, padding included: a multiple of Align.
func (l *Layout) SpaceBytes(s int) int64 { return l.spaces[s] }

// Offset returns where tensor t begins in its space: a multiple of Align.
func (l *Layout) Offset(t int) int64 { return l.offset[t] }

// Tensor returns tensor t as it was given to NewLayout.
func (l *Layout) Tensor(t int) Tensor { return l.tensors[t] }

// Hash identifies the layout: ranks with the same tensors in the same order and
// spaces have the same hash, on every machine.
func (l *Layout) Hash() uint64 { return l.hash }

// end returns where tensor t ends in its space, padding included.
func (l *Layout) end(t int) int64 { return l.offset[t] + padded(l.tensors[t].Bytes) }

// padded rounds bytes up to a multiple of Align.
func padded(bytes int64) int64 { return (bytes + Align - 1) &^ (Align - 1) }

// hash is a 64-bit hash over words, the same on every machine and in every
// process. It tells mistakes apart, not attackers.
type hash uint64

func newHash(v uint64) hash { return hash(0x6175746f62797465).add(v) }

func (h hash) add(v uint64) hash {
	x := (uint64(h) ^ v) * 0x9e3779b97f4a7c15
	x ^= x >> 29
	x *= 0xbf58476d1ce4e5b9
	return hash(x ^ x>>32)
}
