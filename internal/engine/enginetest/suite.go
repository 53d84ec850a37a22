// Package enginetest is what every engine must pass, whoever carries its
// bytes, and a carrier that sums for engines that have none of their own.
package enginetest

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"autobyte/internal/engine"
	"autobyte/internal/sched"
)

// patience bounds every wait; nothing comes near it unless it fails.
const patience = 20 * time.Second

// silence is how long nothing must be reported where nothing may be.
const silence = 50 * time.Millisecond

// Make returns an engine for each rank of a new cluster. memory holds the
// ranks' flat buffers by space; reports are the ranks' ears. What the engines
// need besides, it starts, and ends in the test's cleanup.
type Make func(t *testing.T, memory [][][]float32, reports []engine.Reports) []engine.Engine

// Run runs the conformance suite.
func Run(t *testing.T, build Make) {
	for name, test := range map[string]func(*testing.T, Make){
		"sums are right, reported once, and nothing else is touched": testSums,
		"steps reuse the memory":                                     testSteps,
		"nothing is done before all ranks have":                      testWaitsForAll,
		"a report may submit":                                        testSubmitInReport,
		"submit does not wait":                                       testSubmitDoesNotWait,
		"after close nothing is reported":                            testClose,
	} {
		t.Run(name, func(t *testing.T) {
			defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
			t.Run("", func(t *testing.T) { test(t, build) }) // so that its cleanup is over before the check
		})
	}
}

// recorder hears one rank's reports.
type recorder struct {
	mu     sync.Mutex
	done   map[sched.Op]int
	failed []string
	onDone func(step uint64, index int)
	ops    map[[2]uint64]sched.Op // by step and index
	came   chan struct{}          // capacity 1
}

func (r *recorder) Sent(uint64, int) {}

func (r *recorder) Done(step uint64, index int) error {
	r.mu.Lock()
	op, known := r.ops[[2]uint64{step, uint64(index)}]
	r.done[op]++
	if !known {
		r.failed = append(r.failed, fmt.Sprintf("partition %d of step %d was never submitted", index, step))
	}
	onDone := r.onDone
	r.mu.Unlock()
	if onDone != nil {
		onDone(step, index)
	}
	r.signal()
	return nil
}

func (r *recorder) Failed(step uint64, index int, cause error) {
	r.mu.Lock()
	r.failed = append(r.failed, fmt.Sprintf("partition %d of step %d: %v", index, step, cause))
	r.mu.Unlock()
	r.signal()
}

func (r *recorder) signal() {
	select {
	case r.came <- struct{}{}:
	default:
	}
}

func (r *recorder) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.done)
}

// cluster is a set of engines with their memory and what they reported.
type cluster struct {
	memory  [][][]float32
	ears    []*recorder
	engines []engine.Engine
}

func newCluster(t *testing.T, build Make, world int, spaces ...int) *cluster {
	c := &cluster{}
	var reports []engine.Reports
	for range world {
		ear := &recorder{done: map[sched.Op]int{}, ops: map[[2]uint64]sched.Op{}, came: make(chan struct{}, 1)}
		c.ears = append(c.ears, ear)
		reports = append(reports, ear)
		var memory [][]float32
		for _, length := range spaces {
			memory = append(memory, make([]float32, length))
		}
		c.memory = append(c.memory, memory)
	}
	c.engines = build(t, c.memory, reports)
	if len(c.engines) != world {
		t.Fatalf("%d engines for %d ranks", len(c.engines), world)
	}
	t.Cleanup(func() {
		for _, e := range c.engines {
			if err := e.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		}
	})
	return c
}

func (c *cluster) submit(rank int, ops ...sched.Op) {
	ear := c.ears[rank]
	ear.mu.Lock()
	for _, op := range ops {
		ear.ops[[2]uint64{op.Step, uint64(op.Index)}] = op
	}
	ear.mu.Unlock()
	c.engines[rank].Submit(ops)
}

// await waits until a rank has reported a number of operations as done.
func (c *cluster) await(t *testing.T, rank, count int) {
	t.Helper()
	ear := c.ears[rank]
	limit := time.After(patience)
	for ear.count() < count {
		select {
		case <-ear.came:
		case <-limit:
			t.Fatalf("rank %d: %d of %d operations are done; %v", rank, ear.count(), count, ear.failed)
		}
	}
	ear.mu.Lock()
	defer ear.mu.Unlock()
	if len(ear.failed) > 0 {
		t.Errorf("rank %d: %v", rank, ear.failed)
	}
	for op, n := range ear.done {
		if n != 1 {
			t.Errorf("rank %d: %+v was done %d times", rank, op, n)
		}
	}
}

// fill gives every rank values whose sum is exact, and returns the sums.
func (c *cluster) fill(random *rand.Rand) [][]float32 {
	var sums [][]float32
	for s := range c.memory[0] {
		sum := make([]float32, len(c.memory[0][s]))
		for rank := range c.memory {
			for i := range sum {
				v := float32(random.IntN(1000) - 500)
				c.memory[rank][s][i] = v
				sum[i] += v
			}
		}
		sums = append(sums, sum)
	}
	return sums
}

// cut cuts a space into operations of random length, with holes between them.
func cut(random *rand.Rand, step uint64, space, length int) []sched.Op {
	var ops []sched.Op
	for at := 0; at < length; {
		n := min(1+random.IntN(64), length-at)
		if random.IntN(5) > 0 {
			ops = append(ops, sched.Op{
				Step: step, Index: int32(len(ops) + space*1000), Space: int32(space),
				Offset: int64(at) * 4, Bytes: int64(n) * 4,
			})
		}
		at += n
	}
	return ops
}

func testSums(t *testing.T, build Make) {
	for world := 1; world <= 5; world++ {
		random := rand.New(rand.NewPCG(uint64(world), 1))
		c := newCluster(t, build, world, 700, 300)
		ops := append(cut(random, 1, 0, 700), cut(random, 1, 1, 300)...)
		random.Shuffle(len(ops), func(i, j int) { ops[i], ops[j] = ops[j], ops[i] })
		sums := c.fill(random)
		want := make([][][]float32, world)
		for rank := range world {
			want[rank] = [][]float32{append([]float32(nil), c.memory[rank][0]...), append([]float32(nil), c.memory[rank][1]...)}
			for _, op := range ops {
				at, n := op.Offset/4, op.Bytes/4
				copy(want[rank][op.Space][at:at+n], sums[op.Space][at:at+n])
			}
		}
		for rank := range world {
			for rest := ops; len(rest) > 0; { // in bunches of any size, empty ones too
				n := min(random.IntN(4), len(rest))
				c.submit(rank, rest[:n]...)
				rest = rest[n:]
			}
		}
		for rank := range world {
			c.await(t, rank, len(ops))
			for s := range want[rank] {
				for i, v := range want[rank][s] {
					if c.memory[rank][s][i] != v {
						t.Fatalf("%d ranks: rank %d, space %d, element %d is %g, want %g", world, rank, s, i, c.memory[rank][s][i], v)
					}
				}
			}
		}
	}
}

func testSteps(t *testing.T, build Make) {
	const world, steps = 3, 10
	random := rand.New(rand.NewPCG(7, 7))
	c := newCluster(t, build, world, 256)
	reported := 0
	for step := uint64(1); step <= steps; step++ {
		sums := c.fill(random)
		ops := cut(random, step, 0, 256)
		for rank := range world {
			c.submit(rank, ops...)
		}
		reported += len(ops)
		for rank := range world {
			c.await(t, rank, reported)
			for _, op := range ops {
				for i := op.Offset / 4; i < (op.Offset+op.Bytes)/4; i++ {
					if got := c.memory[rank][0][i]; got != sums[0][i] {
						t.Fatalf("step %d, rank %d: element %d is %g, want %g", step, rank, i, got, sums[0][i])
					}
				}
			}
		}
	}
}

func testWaitsForAll(t *testing.T, build Make) {
	c := newCluster(t, build, 3, 64)
	op := sched.Op{Step: 1, Index: 0, Bytes: 256}
	c.submit(0, op)
	c.submit(2, op)
	select {
	case <-c.ears[0].came:
		t.Fatal("rank 0 is done without rank 1")
	case <-c.ears[2].came:
		t.Fatal("rank 2 is done without rank 1")
	case <-time.After(silence):
	}
	c.submit(1, op)
	for rank := range 3 {
		c.await(t, rank, 1)
	}
}

func testSubmitInReport(t *testing.T, build Make) {
	const steps = 20
	c := newCluster(t, build, 2, 64)
	for rank := range 2 {
		c.ears[rank].onDone = func(step uint64, _ int) {
			if step < steps {
				c.submit(rank, sched.Op{Step: step + 1, Bytes: 256})
			}
		}
	}
	for rank := range 2 {
		c.submit(rank, sched.Op{Step: 1, Bytes: 256})
	}
	for rank := range 2 {
		c.await(t, rank, steps)
	}
}

func testSubmitDoesNotWait(t *testing.T, build Make) {
	const count = 5000
	c := newCluster(t, build, 2, 64)
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		for i := range count {
			c.submit(0, sched.Op{Step: 1, Index: int32(i), Bytes: 256})
		}
	}()
	select {
	case <-returned: // though the other rank has given nothing
	case <-time.After(patience):
		t.Fatal("Submit waits for another rank")
	}
	for i := range count {
		c.submit(1, sched.Op{Step: 1, Index: int32(i), Bytes: 256})
	}
	for rank := range 2 {
		c.await(t, rank, count)
	}
}

func testClose(t *testing.T, build Make) {
	c := newCluster(t, build, 2, 64)
	c.submit(0, sched.Op{Step: 1, Index: 0, Bytes: 256}) // under way for ever
	closed := make(chan error, 1)
	go func() { closed <- c.engines[0].Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Fatalf("Close: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("Close waits for another rank")
	}
	if err := c.engines[0].Close(); err != nil {
		t.Fatalf("second Close: %v", err)
	}
	c.submit(0, sched.Op{Step: 1, Index: 1, Bytes: 256})
	c.submit(1, sched.Op{Step: 1, Index: 0, Bytes: 256}, sched.Op{Step: 1, Index: 1, Bytes: 256})
	select {
	case <-c.ears[0].came:
		t.Fatalf("rank 0 heard something after Close: %v %v", c.ears[0].done, c.ears[0].failed)
	case <-time.After(silence):
	}
}
