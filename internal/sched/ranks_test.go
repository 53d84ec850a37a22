package sched

import (
	"errors"
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

// The cluster is n ranks, each with its own Scheduler, and an engine that
// completes an operation once every rank has issued it. Which of the possible
// events comes next is drawn, so any delay of anything is a case. If no event is
// possible and the work is not finished, ranks wait for ever.
type cluster struct {
	l      *Layout
	plans  []*Plan // by step
	native bool    // every rank chooses its order; Sent does not wait for others
	ranks  []*rankState
	issued map[[2]int]int // (step, index): ranks that issued it
}

type rankState struct {
	s      *Scheduler
	script []gradEvent
	at     int // script[at] is next

	feed  []orderEntry // external: what the leader announced and this rank has not taken
	trail []orderEntry // what it issued, in order
	sent  []orderEntry // issued, Sent not yet reported
	undo  []orderEntry // issued, Done not yet reported
}

// gradEvent is what the training script of a rank does next.
type gradEvent struct {
	kind   byte // 'o'pen, 'r'eady, 'c'lose, 'w'ait until the tensor is done
	step   int
	tensor int
}

func (e gradEvent) String() string { return fmt.Sprintf("%c%d.%d", e.kind, e.step, e.tensor) }

// orderEntry is a partition of the leader's order, or its choice of a plan.
type orderEntry struct{ step, index int }

const planEntry = -1

// drawScript draws what one rank does: steps in order, tensors in any order,
// some never. It may open a step before it closes the one before, and before it
// gives a gradient it may wait for any tensor of a step that it has closed.
func (c *cluster) drawScript(t *rapid.T) (script []gradEvent) {
	tensors := make([]int, c.l.Tensors())
	for i := range tensors {
		tensors[i] = i
	}
	early := false
	for step := range c.plans {
		if !early {
			script = append(script, gradEvent{'o', step, 0})
		}
		early = false
		for _, tensor := range rapid.Permutation(tensors).Draw(t, "order") {
			switch rapid.SampledFrom([]byte("rrrrrraow")).Draw(t, "event") {
			case 'a': // absent
				continue
			case 'o':
				if !early && step+1 < len(c.plans) {
					early = true
					script = append(script, gradEvent{'o', step + 1, 0})
				}
			case 'w':
				if step > 0 {
					script = append(script, gradEvent{'w', step - 1, rapid.SampledFrom(tensors).Draw(t, "gate")})
				}
			}
			script = append(script, gradEvent{'r', step, tensor})
		}
		script = append(script, gradEvent{'c', step, 0})
	}
	return script
}

// runScript does a rank's next gradient event if it can.
func (c *cluster) runScript(r *rankState) (bool, error) {
	if r.at == len(r.script) {
		return false, nil
	}
	e := r.script[r.at]
	step := uint64(e.step)
	switch e.kind {
	case 'o':
		if err := r.s.Open(step); errors.Is(err, ErrBusy) {
			return false, nil
		} else if err != nil {
			return false, err
		}
		if r.s.Role() == Leader {
			if err := r.s.SetPlan(step, c.plans[e.step]); err != nil {
				return false, err
			}
			c.announce(r, orderEntry{e.step, planEntry})
		}
	case 'r':
		if err := r.s.Ready(step, e.tensor); err != nil {
			return false, err
		}
	case 'c':
		if _, err := r.s.Close(nil, step); err != nil {
			return false, err
		}
	case 'w':
		if !r.s.TensorDone(step, e.tensor) {
			return false, nil
		}
	}
	r.at++
	return true, nil
}

func (c *cluster) announce(leader *rankState, e orderEntry) {
	for _, r := range c.ranks {
		if r != leader && !c.native {
			r.feed = append(r.feed, e)
		}
	}
}

// takeOrder gives a follower the next entry of the leader's order if it can.
func (c *cluster) takeOrder(r *rankState) (bool, error) {
	if len(r.feed) == 0 {
		return false, nil
	}
	e := r.feed[0]
	if !r.s.IsOpen(uint64(e.step)) {
		return false, nil
	}
	var err error
	if e.index == planEntry {
		err = r.s.SetPlan(uint64(e.step), c.plans[e.step])
	} else {
		err = r.s.Order(uint64(e.step), e.index)
	}
	r.feed = r.feed[1:]
	return true, err
}

// issue hands a rank's operations to the engine.
func (c *cluster) issue(r *rankState) (bool, error) {
	ops := r.s.Next(nil)
	for _, op := range ops {
		e := orderEntry{int(op.Step), int(op.Index)}
		c.issued[[2]int{e.step, e.index}]++
		r.trail = append(r.trail, e)
		r.undo = append(r.undo, e)
		if c.native {
			r.sent = append(r.sent, e)
		} else if other := c.ranks[0].trail; r != c.ranks[0] && other[len(r.trail)-1] != e {
			return true, fmt.Errorf("a follower issued %v where the leader had issued %v", e, other[len(r.trail)-1])
		}
		if r == c.ranks[0] {
			c.announce(r, e)
		}
	}
	config := c.plans[0].Config()
	if len(ops) > 0 {
		config = c.plans[ops[len(ops)-1].Step].Config()
		if held := r.s.HeldBytes(); held > config.Credit && held != ops[len(ops)-1].Bytes {
			return true, fmt.Errorf("holds %d bytes with a credit of %d", held, config.Credit)
		}
		if config.Lanes > 0 && r.s.InFlight() > config.Lanes {
			return true, fmt.Errorf("%d in flight with %d lanes", r.s.InFlight(), config.Lanes)
		}
	}
	return len(ops) > 0, nil
}

// give reports one sent partition.
func (c *cluster) give(r *rankState, pick int) (bool, error) {
	if len(r.sent) == 0 {
		return false, nil
	}
	i := pick % len(r.sent)
	e := r.sent[i]
	r.sent = append(r.sent[:i], r.sent[i+1:]...)
	return true, r.s.Sent(uint64(e.step), e.index)
}

// finish reports one partition that every rank has issued, in any order.
func (c *cluster) finish(r *rankState, pick int) (bool, error) {
	for k := range r.undo {
		i := (pick + k) % len(r.undo)
		e := r.undo[i]
		if c.issued[[2]int{e.step, e.index}] < len(c.ranks) || contains(r.sent, e) {
			continue
		}
		r.undo = append(r.undo[:i], r.undo[i+1:]...)
		_, err := r.s.Done(nil, uint64(e.step), e.index)
		return true, err
	}
	return false, nil
}

func contains(s []orderEntry, e orderEntry) bool {
	for _, x := range s {
		if x == e {
			return true
		}
	}
	return false
}

// run does drawn events until none is possible.
func (c *cluster) run(t *rapid.T) error {
	picks := rapid.SliceOfN(rapid.IntRange(0, 1<<16), 64, 64).Draw(t, "picks")
	for n := 0; ; n++ {
		pick := picks[n%len(picks)] + n/len(picks)*31
		did := false
		for k := 0; k < 5*len(c.ranks) && !did; k++ {
			which := (pick + k) % (5 * len(c.ranks))
			r := c.ranks[which/5]
			var err error
			switch which % 5 {
			case 0:
				did, err = c.runScript(r)
			case 1:
				did, err = c.takeOrder(r)
			case 2:
				did, err = c.issue(r)
			case 3:
				did, err = c.give(r, pick/7)
			case 4:
				did, err = c.finish(r, pick/7)
			}
			if err != nil {
				return fmt.Errorf("rank %d: %w", which/5, err)
			}
		}
		if !did {
			return c.finished()
		}
	}
}

// finished returns an error that says who waits for what.
func (c *cluster) finished() error {
	var stuck []error
	for i, r := range c.ranks {
		if r.at < len(r.script) || r.s.Alive() > 0 {
			op, why := r.s.Head()
			stuck = append(stuck, fmt.Errorf("rank %d waits for ever: script at %d of %v, alive %v, next %+v %v, holds %d with %d in flight",
				i, r.at, r.script, r.s.AliveSteps(nil), op, why, r.s.HeldBytes(), r.s.InFlight()))
			continue
		}
		if r.s.HeldBytes() != 0 || r.s.InFlight() != 0 || r.s.Queued() != 0 {
			return fmt.Errorf("rank %d has something left: %d bytes, %d in flight", i, r.s.HeldBytes(), r.s.InFlight())
		}
		want := 0
		for _, p := range c.plans {
			want += p.Len()
		}
		if len(r.trail) != want {
			return fmt.Errorf("rank %d issued %d partitions, want %d", i, len(r.trail), want)
		}
	}
	return errors.Join(stuck...)
}

// newCluster makes ranks with one plan a step, each step configured by itself.
func newCluster(l *Layout, plans []*Plan, ranks int, native bool) *cluster {
	c := &cluster{l: l, plans: plans, native: native, issued: map[[2]int]int{}}
	for i := range ranks {
		role := Follower
		if i == 0 || native {
			role = Leader
		}
		c.ranks = append(c.ranks, &rankState{s: New(l, role)})
	}
	return c
}

func testNobodyWaitsForEver(t *testing.T, native bool) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLayout(t)
		plans := make([]*Plan, rapid.IntRange(1, 4).Draw(t, "steps"))
		for i := range plans {
			config := drawConfig(t)
			if native {
				config.Lanes = 0
			}
			plans[i] = mustPlan(l, config)
		}
		c := newCluster(l, plans, rapid.IntRange(1, 4).Draw(t, "ranks"), native)
		for _, r := range c.ranks {
			r.script = c.drawScript(t)
		}
		if err := c.run(t); err != nil {
			t.Fatal(err)
		}
	})
}

func TestNobodyWaitsForEverInOneOrder(t *testing.T)    { testNobodyWaitsForEver(t, false) }
func TestNobodyWaitsForEverInOrdersOfOwn(t *testing.T) { testNobodyWaitsForEver(t, true) }

// TestLanesNeedOneOrder shows why Config.Lanes warns: two ranks that choose for
// themselves fill their one lane with different partitions. It also shows that
// the cluster above notices a wait without end.
func TestLanesNeedOneOrder(t *testing.T) {
	l, err := NewLayout([]Tensor{{0, 64}, {0, 64}})
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		c := newCluster(l, []*Plan{mustPlan(l, Config{Partition: 64, Credit: 1 << 20, Lanes: 1})}, 2, true)
		for i, r := range c.ranks {
			r.script = []gradEvent{{'o', 0, 0}, {'r', 0, i}}
			for range r.script {
				if did, err := c.runScript(r); !did || err != nil {
					t.Fatal(did, err)
				}
			}
			if did, err := c.issue(r); !did || err != nil {
				t.Fatal(did, err)
			}
			r.script = append(r.script, gradEvent{'r', 0, 1 - i}, gradEvent{'c', 0, 0})
		}
		if err := c.run(t); err == nil {
			t.Fatal("two ranks with one lane each and different partitions in it went on")
		}
	})
}
