package worker

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"autobyte/internal/sched"
)

// story is what a job does, equally on all ranks except for what is listed by
// rank.
type story struct {
	world   int
	seed    uint64
	tensors []Tensor
	config  sched.Config
	steps   []chapter
}

// chapter is one optimizer step.
type chapter struct {
	passes  [][][]bool // by pass, rank and tensor: has no gradient
	retune  *sched.Config
	relay   []Tensor // a new layout before the step; nil keeps the old one
	look    []bool   // by rank: checks all sums before the next step begins
	laggard int      // this rank is slow in the step; -1: none
}

func drawTensors(t *rapid.T) []Tensor {
	spaces := rapid.IntRange(1, 2).Draw(t, "spaces")
	lengths := rapid.SliceOfN(rapid.OneOf(rapid.IntRange(1, 40), rapid.IntRange(1, 600)), spaces, 7).Draw(t, "lengths")
	return tensorsOf(spaces, lengths...)
}

func drawConfig(t *rapid.T) sched.Config {
	return sched.Config{
		Partition: rapid.Int64Range(64, 900).Draw(t, "partition"),
		Credit:    rapid.Int64Range(1, 2000).Draw(t, "credit"),
		Fusion:    rapid.Int64Range(0, 800).Draw(t, "fusion"),
		Lanes:     rapid.IntRange(0, 3).Draw(t, "lanes"),
		Policy:    rapid.SampledFrom([]sched.Policy{sched.Priority, sched.FIFO}).Draw(t, "policy"),
	}
}

func drawStory(t *rapid.T) story {
	s := story{
		world:   rapid.IntRange(2, 5).Draw(t, "world"),
		seed:    rapid.Uint64().Draw(t, "seed"),
		tensors: drawTensors(t),
		config:  drawConfig(t),
	}
	tensors := s.tensors
	for range rapid.IntRange(1, 6).Draw(t, "steps") {
		var c chapter
		if rapid.IntRange(0, 4).Draw(t, "relay") == 0 {
			c.relay = drawTensors(t)
			tensors = c.relay
		}
		if rapid.IntRange(0, 2).Draw(t, "retune") == 0 {
			config := drawConfig(t)
			c.retune = &config
		}
		for range rapid.SampledFrom([]int{1, 1, 1, 2, 3}).Draw(t, "passes") {
			var pass [][]bool
			some := rapid.IntRange(0, 2).Draw(t, "some absent") == 0
			for range s.world {
				absent := make([]bool, len(tensors))
				for i := range absent {
					absent[i] = some && rapid.IntRange(0, 2).Draw(t, "absent") == 0
				}
				if !slices.Contains(absent, false) {
					absent[0] = false // a pass begins with a gradient
				}
				pass = append(pass, absent)
			}
			c.passes = append(c.passes, pass)
		}
		c.look = rapid.SliceOfN(rapid.Bool(), s.world, s.world).Draw(t, "look")
		c.laggard = rapid.IntRange(-1, s.world-1).Draw(t, "laggard")
		s.steps = append(s.steps, c)
	}
	return s
}

// value is a rank's gradient: small whole numbers, so that sums are exact.
func value(rank int, pass uint64, tensor int) float32 {
	return float32((uint64(rank+1)*7+pass*13+uint64(tensor)*3)%64 + 1)
}

func TestSumsAreRightWhateverTheRanksDo(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawStory(t)
		r := open(t, s.world, s.tensors, func(o *Options) { o.Settings = settingsOf(s.config) })
		defer r.close()
		r.carrier.Pause = func(rank int) {
			if rand.IntN(4) == 0 {
				time.Sleep(time.Duration(rand.IntN(300)) * time.Microsecond)
			}
		}
		for i, err := range r.each(func(m *rank) error { return m.live(s) }) {
			if err != nil {
				t.Errorf("rank %d: %v", i, err)
			}
		}
	})
}

// live runs a story on one rank.
func (m *rank) live(s story) error {
	random := rand.New(rand.NewPCG(s.seed, uint64(m.number)))
	order := func(n int) []int32 { // rank 0's decides
		order := inOrder(make([]Tensor, n))
		random.Shuffle(n, func(i, j int) { order[i], order[j] = order[j], order[i] })
		return order
	}
	if err := m.lay(s.tensors, order(len(s.tensors))); err != nil {
		return err
	}
	var pass uint64
	var sums []float32 // by tensor: of the last pass
	for number, c := range s.steps {
		if c.relay != nil {
			if err := m.again(func() error { return m.Drain(slice) }); err != nil {
				return err
			}
			if err := m.lay(c.relay, order(len(c.relay))); err != nil {
				return err
			}
		}
		if c.retune != nil {
			if err := m.Configure(settingsOf(*c.retune), uint64(random.IntN(4))); err != nil {
				return err
			}
		}
		for i, absent := range c.passes {
			pass++
			if c.laggard == m.number {
				time.Sleep(time.Duration(random.IntN(4)) * time.Millisecond)
			}
			var err error
			if sums, err = m.livePass(random, pass, absent, i == len(c.passes)-1); err != nil {
				return fmt.Errorf("step %d: %w", number, err)
			}
		}
		if c.look[m.number] || number == len(s.steps)-1 || s.steps[number+1].relay != nil {
			for tensor, sum := range sums {
				if err := m.check(tensor, sum); err != nil {
					return fmt.Errorf("step %d: %w", number, err)
				}
			}
		}
	}
	return m.again(func() error { return m.Drain(slice) })
}

// livePass runs one backward pass and returns the sums to expect.
func (m *rank) livePass(random *rand.Rand, pass uint64, absent [][]bool, last bool) ([]float32, error) {
	mine := absent[m.number]
	missing := 0
	for _, tensor := range random.Perm(len(mine)) {
		if mine[tensor] {
			missing++
			continue
		}
		if err := m.give(tensor, value(m.number, pass, tensor)); err != nil {
			return nil, err
		}
	}
	for tensor := range mine {
		if mine[tensor] {
			if err := m.put(tensor, 0); err != nil {
				return nil, err
			}
		}
	}
	closed, count, err := m.Close(last)
	if err != nil {
		return nil, err
	}
	if closed != pass || count != missing {
		return nil, fmt.Errorf("Close: pass %d with %d absent, want pass %d with %d", closed, count, pass, missing)
	}
	sums := make([]float32, len(mine))
	var nowhere []int32
	for tensor := range mine {
		everywhere := true
		for rank := range absent {
			if !absent[rank][tensor] {
				everywhere = false
				sums[tensor] += value(rank, pass, tensor)
			}
		}
		if everywhere {
			nowhere = append(nowhere, int32(tensor))
		}
	}
	if missing == 0 {
		return sums, nil
	}
	var got []int32
	if err := m.again(func() (err error) { got, err = m.Absent(pass, slice); return err }); err != nil {
		return nil, err
	}
	if slices.Sort(got); !slices.Equal(got, nowhere) {
		return nil, fmt.Errorf("pass %d: tensors %v had no gradient anywhere, want %v", pass, got, nowhere)
	}
	return sums, nil
}
