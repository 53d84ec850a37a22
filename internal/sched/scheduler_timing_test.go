package sched

import (
	"fmt"
	"testing"
)

// resnet50 has the sizes of ResNet50's 161 gradients in float32: 102 MB.
func resnet50() *Layout {
	var tensors []Tensor
	add := func(numbers int64) { tensors = append(tensors, Tensor{0, 4 * numbers}) }
	convolution := func(in, out, side int64) {
		add(in * out * side * side)
		add(out) // batch norm
		add(out)
	}
	convolution(3, 64, 7)
	in := int64(64)
	for stage, blocks := range []int{3, 4, 6, 3} {
		width := int64(64) << stage
		for block := range blocks {
			convolution(in, width, 1)
			convolution(width, width, 3)
			convolution(width, 4*width, 1)
			if block == 0 {
				convolution(in, 4*width, 1)
			}
			in = 4 * width
		}
	}
	add(2048 * 1000)
	add(1000)
	return mustLayout(tensors)
}

// manyPartitions has 2,000 tensors of 10 partitions each, in two spaces.
func manyPartitions() *Layout {
	tensors := make([]Tensor, 2000)
	for i := range tensors {
		tensors[i] = Tensor{i & 1, 10 * 4096}
	}
	return mustLayout(tensors)
}

func mustLayout(tensors []Tensor) *Layout {
	l, err := NewLayout(tensors)
	if err != nil {
		panic(err)
	}
	return l
}

// life takes partitions through whole steps, as an engine with several
// operations in flight does. Its slices are kept, so that only the scheduler
// can allocate.
type life struct {
	s     *Scheduler
	plan  *Plan
	step  uint64
	order []int // a follower's
	ops   []Op  // in flight, oldest first
	done  []int
}

func newLife(l *Layout, c Config, role Role) *life {
	f := &life{s: New(l, role), plan: mustPlan(l, c), done: make([]int, 0, l.Tensors())}
	f.ops = make([]Op, 0, f.plan.Len())
	for i := range f.plan.Len() {
		f.order = append(f.order, i)
	}
	for range 3 { // both slots grow to the plan
		if err := f.run(); err != nil {
			panic(err)
		}
	}
	return f
}

// finish reports the oldest n operations and issues what then may go.
func (f *life) finish(n int) (err error) {
	for _, op := range f.ops[:n] {
		if err := f.s.Sent(op.Step, int(op.Index)); err != nil {
			return err
		}
		if f.done, err = f.s.Done(f.done[:0], op.Step, int(op.Index)); err != nil {
			return err
		}
	}
	f.ops = append(f.ops[:0], f.ops[n:]...)
	f.ops = f.s.Next(f.ops)
	return nil
}

// run takes one step from Open to its last operations, which the next step finds
// in flight: gradients come from the last tensor to the first, faster than the engine takes them.
func (f *life) run() error {
	step := f.step
	f.step++
	if err := f.s.Open(step); err != nil {
		return err
	}
	if err := f.s.SetPlan(step, f.plan); err != nil {
		return err
	}
	if f.s.Role() == Follower {
		for _, i := range f.order {
			if err := f.s.Order(step, i); err != nil {
				return err
			}
		}
	}
	for t := f.s.Layout().Tensors() - 1; t >= 0; t-- {
		if err := f.s.Ready(step, t); err != nil {
			return err
		}
		f.ops = f.s.Next(f.ops)
		if t%2 == 0 {
			if err := f.finish(min(1, len(f.ops))); err != nil {
				return err
			}
		}
	}
	if _, err := f.s.Close(nil, step); err != nil {
		return err
	}
	for f.s.Queued() > 0 || len(f.ops) > 3 {
		if err := f.finish(1); err != nil {
			return err
		}
	}
	if f.s.Alive() != 1 || !f.s.IsOpen(step) {
		return fmt.Errorf("at the end of step %d, %v are alive", step, f.s.AliveSteps(nil))
	}
	return nil
}

// lives are the cases of benchmark and allocation test.
func lives(f func(name string, l *life)) {
	for _, layout := range []struct {
		name   string
		l      *Layout
		config Config
	}{
		{"resnet50", resnet50(), Config{Partition: 1 << 20, Credit: 4 << 20}},
		{"resnet50fused", resnet50(), Config{Partition: 1 << 20, Credit: 4 << 20, Fusion: 256 << 10}},
		{"20000", manyPartitions(), Config{Partition: 4096, Credit: 16384, Lanes: 8}},
	} {
		for _, policy := range []Policy{Priority, FIFO} {
			c := layout.config
			c.Policy = policy
			f(fmt.Sprintf("%s/%v/leader", layout.name, policy), newLife(layout.l, c, Leader))
		}
		f(layout.name+"/follower", newLife(layout.l, layout.config, Follower))
	}
}

func TestSteadyStepAllocatesNothing(t *testing.T) {
	lives(func(name string, l *life) {
		if n := testing.AllocsPerRun(5, func() {
			if err := l.run(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}); n != 0 {
			t.Errorf("%s: a step allocates %v times, want 0", name, n)
		}
	})
}

// BenchmarkScheduler measures the whole life of partitions, from Open to
// retirement; one operation is one step.
func BenchmarkScheduler(b *testing.B) {
	lives(func(name string, l *life) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := l.run(); err != nil {
					b.Fatal(err)
				}
			}
			n := float64(b.N) * float64(l.plan.Len())
			b.ReportMetric(n/b.Elapsed().Seconds(), "partitions/s")
			b.ReportMetric(b.Elapsed().Seconds()*1e9/n, "ns/partition")
		})
	})
}

func BenchmarkNewPlan(b *testing.B) {
	lives(func(name string, l *life) {
		if l.s.Role() == Follower || l.plan.Config().Policy == FIFO {
			return
		}
		b.Run(name[:len(name)-len("/priority/leader")], func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := NewPlan(l.plan.Layout(), l.plan.Config()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(l.plan.Len()), "partitions")
		})
	})
}
