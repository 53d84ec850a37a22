package worker

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"autobyte/internal/engine/enginetest"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if testing.Short() {
		_ = flag.Set("rapid.checks", "15")
	}
	goleak.VerifyTestMain(m)
}

// patience bounds every wait of the tests; nothing comes near it unless it fails.
const patience = 30 * time.Second

// slice is how long one call waits, as the Python side does.
const slice = 20 * time.Millisecond

// failer is what a test and a rapid check have in common.
type failer interface {
	Helper()
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
}

// rig is a job of several ranks in this process: real control connections on
// loopback, and a carrier that sums and demands one order on all ranks.
type rig struct {
	t       failer
	carrier *enginetest.AllReduce
	ranks   []*rank
	drains  sync.WaitGroup
}

// rank is one worker with the memory of its spaces.
type rank struct {
	*Worker
	rig     *rig
	number  int
	tensors []Tensor

	mu     sync.Mutex
	memory [][]float32
	layout LayoutInfo
}

func options(rank, world int, tensors []Tensor) Options {
	return Options{Rank: rank, World: world, Job: "test", TimeoutS: patience.Seconds(), Tensors: tensors}
}

// open starts the ranks and meets them. Each rank's options can be changed
// before; close ends the rig.
func open(t failer, world int, tensors []Tensor, change func(*Options)) *rig {
	t.Helper()
	r := &rig{t: t}
	r.carrier = enginetest.NewAllReduce(world, func(rank, space int) []float32 { return r.ranks[rank].space(space) })
	for i := range world {
		o := options(i, world, tensors)
		if change != nil {
			change(&o)
		}
		w, err := Open(o)
		if err != nil {
			t.Fatalf("rank %d: Open: %v", i, err)
		}
		r.ranks = append(r.ranks, &rank{Worker: w, rig: r, number: i})
	}
	rendezvous := r.ranks[0].Rendezvous()
	for i, m := range r.ranks {
		to := &rendezvous
		if i == 0 {
			to = nil
		}
		if err := m.Join(to); err != nil {
			t.Fatalf("rank %d: Join: %v", i, err)
		}
	}
	for i, m := range r.ranks {
		if err := m.again(func() error { return m.Joined(slice) }); err != nil {
			t.Fatalf("rank %d: Joined: %v", i, err)
		}
		r.drains.Go(func() { _ = r.carrier.Drain(i, m, ErrAgain) })
	}
	return r
}

// close ends what still runs and checks that all ranks issued alike.
func (r *rig) close() {
	r.t.Helper()
	var ends sync.WaitGroup
	for _, m := range r.ranks {
		ends.Go(func() { _ = m.Shutdown("") })
	}
	ends.Wait()
	r.drains.Wait()
	r.carrier.Wait()
	if err := r.carrier.Err(); err != nil {
		r.t.Errorf("the ranks did not issue in one order: %v", err)
	}
}

// each runs f on all ranks at once and returns their errors.
func (r *rig) each(f func(*rank) error) []error {
	errs := make([]error, len(r.ranks))
	var all sync.WaitGroup
	for i, m := range r.ranks {
		all.Go(func() { errs[i] = f(m) })
	}
	all.Wait()
	return errs
}

// again calls f until it returns something other than ErrAgain.
func (m *rank) again(f func() error) error {
	for begin := time.Now(); time.Since(begin) < patience; {
		if err := f(); !errors.Is(err, ErrAgain) {
			return err
		}
	}
	return fmt.Errorf("rank %d: nothing came for %v: %s", m.number, patience, m.WaitingFor())
}

func (m *rank) space(s int) []float32 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.memory[s]
}

// lay agrees on a layout and makes its memory.
func (m *rank) lay(tensors []Tensor, order []int32) error {
	if m.number != 0 {
		order = nil
	}
	if err := m.SetTensors(tensors, order); err != nil {
		return err
	}
	var info LayoutInfo
	err := m.again(func() (err error) {
		info, err = m.LayoutReady(slice)
		return err
	})
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tensors, m.layout, m.memory = tensors, info, nil
	for _, size := range info.SpaceBytes {
		m.memory = append(m.memory, make([]float32, size/4))
	}
	return nil
}

// view is a tensor's place.
func (m *rank) view(tensor int) []float32 {
	t := m.tensors[tensor]
	first := m.layout.Offsets[tensor] / 4
	return m.space(t.Space)[first : first+t.Bytes/4]
}

func (m *rank) wait(tensor int) error {
	return m.again(func() error {
		_, err := m.Wait(tensor, 1, slice)
		return err
	})
}

// give writes a gradient, once the last one is reduced, and says so.
func (m *rank) give(tensor int, value float32) error {
	if err := m.put(tensor, value); err != nil {
		return err
	}
	return m.again(func() error { return m.Ready(tensor, slice) })
}

func (m *rank) put(tensor int, value float32) error {
	if err := m.wait(tensor); err != nil {
		return err
	}
	for i, view := 0, m.view(tensor); i < len(view); i++ {
		view[i] = value
	}
	return nil
}

// check waits for a tensor and compares all its elements.
func (m *rank) check(tensor int, want float32) error {
	if err := m.wait(tensor); err != nil {
		return err
	}
	for i, got := range m.view(tensor) {
		if got != want {
			return fmt.Errorf("rank %d: element %d of %s is %g, want %g", m.number, i, m.tensors[tensor].Name, got, want)
		}
	}
	return nil
}

// tensorsOf makes tensors of these lengths, dealt to the spaces in turn.
func tensorsOf(spaces int, lengths ...int) []Tensor {
	var out []Tensor
	for i, n := range lengths {
		out = append(out, Tensor{
			Name: fmt.Sprintf("layer%d.weight", i), DType: fmt.Sprintf("type%d", i%spaces),
			Shape: []int64{int64(n)}, Bytes: int64(n) * 4, Space: i % spaces,
		})
	}
	return out
}

// inOrder is the forward order that equals the registration order.
func inOrder(tensors []Tensor) []int32 {
	order := make([]int32, len(tensors))
	for i := range order {
		order[i] = int32(i)
	}
	return order
}

// small are settings that cut the tests' tensors into several pieces.
func small(o *Options) {
	partition, credit, fusion := int64(256), int64(600), int64(128)
	o.Settings = Settings{Partition: &partition, Credit: &credit, Fusion: &fusion}
}

// ready is a rig whose ranks have a layout.
func ready(t *testing.T, world int, change func(*Options)) *rig {
	t.Helper()
	tensors := tensorsOf(2, 40, 300, 7, 120, 1, 64)
	r := open(t, world, tensors, change)
	for i, err := range r.each(func(m *rank) error { return m.lay(tensors, inOrder(tensors)) }) {
		if err != nil {
			t.Fatalf("rank %d: %v", i, err)
		}
	}
	return r
}

// pass gives all tensors, last first as backward does, but not the skipped ones.
func (m *rank) pass(value float32, skip ...int) error {
	for tensor := len(m.tensors) - 1; tensor >= 0; tensor-- {
		if slices.Contains(skip, tensor) {
			continue
		}
		if err := m.give(tensor, value); err != nil {
			return err
		}
	}
	return nil
}
