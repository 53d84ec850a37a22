package sched

import "pgregory.net/rapid"

// drawLayout draws a small layout with tensors around the alignment and some of
// many pieces.
func drawLayout(t *rapid.T) *Layout {
	spaces := rapid.IntRange(1, 3).Draw(t, "spaces")
	n := rapid.IntRange(spaces, 9).Draw(t, "tensors")
	tensors := make([]Tensor, n)
	for i := range tensors {
		tensors[i] = Tensor{
			Space: rapid.IntRange(0, spaces-1).Draw(t, "space"),
			Bytes: rapid.OneOf(rapid.Int64Range(1, 130), rapid.Int64Range(1, 1200)).Draw(t, "bytes"),
		}
	}
	for s := range spaces { // without holes
		tensors[n-1-s].Space = s
	}
	l, err := NewLayout(tensors)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func drawConfig(t *rapid.T) Config {
	return Config{
		Partition: rapid.Int64Range(64, 700).Draw(t, "partition"),
		Credit:    rapid.OneOf(rapid.Int64Range(1, 64), rapid.Int64Range(64, 2000)).Draw(t, "credit"),
		Fusion:    rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(1, 800)).Draw(t, "fusion"),
		Lanes:     rapid.IntRange(0, 3).Draw(t, "lanes"),
		Policy:    rapid.SampledFrom([]Policy{Priority, FIFO}).Draw(t, "policy"),
	}
}

func mustPlan(l *Layout, c Config) *Plan {
	p, err := NewPlan(l, c)
	if err != nil {
		panic(err)
	}
	return p
}
