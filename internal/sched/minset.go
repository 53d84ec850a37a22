package sched

import "math/bits"

// minSet is a set of integers below a limit, of at most MaxPartitions, that
// finds its least member in a few instructions. A bit in a level above the
// first is set if and only if its word in the level below is not zero.
type minSet struct {
	levels [4][]uint64 // 64^4 = MaxPartitions
	depth  int         // levels in use; the last has one word
	n      int         // members
}

// reset empties the set and makes n its limit. It allocates only to grow.
func (m *minSet) reset(n int) {
	m.n, m.depth = 0, 0
	for {
		n = (n + 63) / 64
		m.levels[m.depth] = resized(m.levels[m.depth], n)
		clear(m.levels[m.depth])
		m.depth++
		if n <= 1 {
			return
		}
	}
}

// add puts i, which is not in it, into the set.
func (m *minSet) add(i int32) {
	m.n++
	for l := range m.depth {
		word := &m.levels[l][i>>6]
		was := *word
		*word = was | 1<<(i&63)
		if was != 0 {
			return
		}
		i >>= 6
	}
}

// remove takes i, which is in it, out of the set.
func (m *minSet) remove(i int32) {
	m.n--
	for l := range m.depth {
		word := &m.levels[l][i>>6]
		*word &^= 1 << (i & 63)
		if *word != 0 {
			return
		}
		i >>= 6
	}
}

// min returns the least member of a set that is not empty.
func (m *minSet) min() int32 {
	i := 0
	for l := m.depth - 1; l >= 0; l-- {
		i = i<<6 | bits.TrailingZeros64(m.levels[l][i])
	}
	return int32(i)
}

// resized returns a slice of length n with undefined content, allocated only if
// s is too small for it.
func resized[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}
