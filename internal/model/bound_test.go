package model

import (
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"
)

// chain makes a profile of layers (forward, backward, communication), all in seconds: two workers at
// bytesPerSecond take the last figure to reduce the layer's one tensor.
func chain(layers ...[3]int) Profile {
	p := Profile{Format: Format, Name: "chain", Batch: 1, Device: "none", Sources: []Source{
		{"tensors", Estimated, "test"}, {"forward_s", Estimated, "test"}, {"backward_s", Estimated, "test"},
	}}
	for i, l := range layers {
		layer := Layer{Name: fmt.Sprint(i), Forward: float64(l[0]), Backward: float64(l[1])}
		if l[2] > 0 {
			layer.Tensors = []Tensor{{Name: fmt.Sprint(i, ".w"), Bytes: int64(4 * l[2]), DType: "float32"}}
		}
		p.Layers = append(p.Layers, layer)
	}
	return p
}

// bytesPerSecond makes a chain's communication figures seconds: two workers move each byte once.
const bytesPerSecond = 4

func TestLowerBound(t *testing.T) {
	f := func(layers [][3]int, workers int, want float64, wantLayer int) {
		t.Helper()
		b, err := LowerBound(chain(layers...), workers, bytesPerSecond)
		if err != nil {
			t.Fatal(err)
		}
		if math.Abs(b.Step-want) > 1e-12 || b.Layer != wantLayer {
			t.Errorf("LowerBound(%v, %d workers) = %v decided by layer %d, want %v by %d", layers, workers, b.Step, b.Layer, want, wantLayer)
		}
	}
	f([][3]int{{1, 2, 3}}, 2, 6, 0)                         // one layer overlaps with nothing
	f([][3]int{{1, 2, 3}}, 1, 3, -1)                        // nothing to communicate
	f([][3]int{{1, 2, 3}}, 4, 7.5, 0)                       // 2(n-1)/n
	f([][3]int{{1, 1, 1}, {5, 5, 0}}, 2, 13, 0)             // only layer 0's gradient delays anything
	f([][3]int{{1, 1, 1}, {5, 5, 20}}, 2, 31, 1)            // communication decides
	f([][3]int{{1, 1, 0}, {5, 5, 1}, {1, 1, 0}}, 2, 14, -1) // hidden behind layer 0
}

func TestLowerBoundErrors(t *testing.T) {
	good := chain([3]int{1, 1, 1})
	f := func(p Profile, workers int, rate float64) {
		t.Helper()
		if b, err := LowerBound(p, workers, rate); err == nil {
			t.Errorf("LowerBound(%s, %d, %v) = %v, want an error", p.Name, workers, rate, b)
		}
	}
	f(good, 0, 1)
	f(good, 2, 0)
	f(good, 2, -1)
	f(good, 2, math.NaN())
	f(good, 2, math.Inf(1))
	f(Profile{}, 2, 1)
}

// simulate runs the chain unit by unit: one processor computes, one link sends a unit of the layer that
// choose picks among those ready, and a layer's forward pass waits for its gradient. It returns the times
// between starts of the watched layer's forward pass, once the start-up is over.
func simulate(layers [][3]int, watched int, choose func(ready []int) int) []int {
	const warm, steps = 12, 36 // many more than any chain here has layers
	n := len(layers)
	left := make([]int, n) // units of the newest gradient that are not yet sent
	position, backward, progress := 0, false, 0
	var starts, ready []int
	started := false // the watched layer's forward pass in this step
	for now := 0; ; now++ {
		// Layers that take no time pass at once.
		for {
			l := layers[position]
			if !backward {
				if left[position] > 0 {
					break
				}
				if position == watched && !started {
					started = true
					if starts = append(starts, now); len(starts) == steps {
						var gaps []int
						for i := warm; i < steps; i++ {
							gaps = append(gaps, starts[i]-starts[i-1])
						}
						return gaps
					}
				}
				if progress < l[0] {
					break
				}
				progress = 0
				if position++; position == n {
					position, backward = n-1, true
				}
				continue
			}
			if progress < l[1] {
				break
			}
			progress, left[position] = 0, l[2]
			if position--; position < 0 {
				position, backward, started = 0, false, false
			}
		}
		ready = ready[:0]
		for i, units := range left {
			if units > 0 {
				ready = append(ready, i)
			}
		}
		if backward || left[position] == 0 {
			progress++
		}
		if len(ready) > 0 {
			left[choose(ready)]--
		}
	}
}

func mean(gaps []int) float64 {
	sum := 0
	for _, g := range gaps {
		sum += g
	}
	return float64(sum) / float64(len(gaps))
}

// byRank picks the ready layer that comes first in an order of all layers.
func byRank(rank []int) func([]int) int {
	return func(ready []int) int {
		best := ready[0]
		for _, i := range ready {
			if rank[i] < rank[best] {
				best = i
			}
		}
		return best
	}
}

func permutations(n int, visit func([]int)) {
	p := make([]int, n)
	for i := range p {
		p[i] = i
	}
	var recurse func(int)
	recurse = func(k int) {
		if k == n {
			visit(p)
			return
		}
		for i := k; i < n; i++ {
			p[k], p[i] = p[i], p[k]
			recurse(k + 1)
			p[k], p[i] = p[i], p[k]
		}
	}
	recurse(0)
}

func drawChain(t *rapid.T) [][3]int {
	n := rapid.IntRange(1, 5).Draw(t, "layers")
	layers := make([][3]int, n)
	total := 0
	for i := range layers {
		layers[i] = [3]int{rapid.IntRange(0, 4).Draw(t, "forward"), rapid.IntRange(0, 4).Draw(t, "backward"), rapid.IntRange(0, 6).Draw(t, "communication")}
		total += layers[i][2]
	}
	layers[0][0]++ // a step must take time
	layers[n-1][2]++
	return layers
}

// In every order of the layers, and in orders that change at every unit, no step is shorter than T* where T*
// is decided; in forward order none is longer.
func TestLowerBoundAgainstEveryOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := drawChain(t)
		bound, err := LowerBound(chain(layers...), 2, bytesPerSecond)
		if err != nil {
			t.Fatal(err)
		}
		watched := max(bound.Layer, 0)
		const tiny = 1e-9
		atLeast := func(what string, gaps []int) {
			for _, g := range gaps {
				if float64(g) < bound.Step-tiny {
					t.Fatalf("%s of %v has a step of %d, T* is %v", what, layers, g, bound.Step)
				}
			}
		}
		permutations(len(layers), func(rank []int) {
			atLeast(fmt.Sprint("order ", rank), simulate(layers, watched, byRank(rank)))
		})
		forward := simulate(layers, watched, func(ready []int) int { return ready[0] })
		if step := mean(forward); math.Abs(step-bound.Step) > tiny {
			t.Fatalf("forward order of %v takes %v a step, T* is %v", layers, step, bound.Step)
		}
		whim := rapid.SliceOfN(rapid.IntRange(0, 59), 16, 16).Draw(t, "whim")
		i := 0
		atLeast("a changing order", simulate(layers, watched, func(ready []int) int { i++; return ready[whim[i%len(whim)]%len(ready)] }))
	})
}

func TestLowerBoundProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := chain(drawChain(t)...)
		workers := rapid.IntRange(1, 16).Draw(t, "workers")
		rate := rapid.Float64Range(0.1, 100).Draw(t, "rate")
		b, err := LowerBound(p, workers, rate)
		if err != nil {
			t.Fatal(err)
		}
		const slack = 1 + 1e-12
		if b.Step*slack < b.Compute || b.Step*slack < b.Communication {
			t.Fatalf("T* %v is below computation %v or communication %v", b.Step, b.Compute, b.Communication)
		}
		if b.Step > (b.Compute+b.Communication)*slack {
			t.Fatalf("T* %v is more than computation %v and communication %v one after the other", b.Step, b.Compute, b.Communication)
		}
		faster, err := LowerBound(p, workers, 2*rate)
		if err != nil {
			t.Fatal(err)
		}
		if faster.Step > b.Step*slack {
			t.Fatalf("twice the rate takes %v, more than %v", faster.Step, b.Step)
		}
		scaled, err := p.Scaled(3 * p.ComputeSeconds())
		if err != nil {
			t.Fatal(err)
		}
		slower, err := LowerBound(scaled, workers, rate/3)
		if err != nil {
			t.Fatal(err)
		}
		if math.Abs(slower.Step-3*b.Step) > 1e-9*b.Step {
			t.Fatalf("everything three times as slow takes %v, want 3 x %v", slower.Step, b.Step)
		}
	})
}
