package sched

import (
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

// pair drives a Scheduler and the dumb model with the same events. Each event
// takes two numbers, which it reduces to what is possible, so the property test
// and the fuzzer share it. A difference is returned as an error.
type pair struct {
	s     *Scheduler
	d     *dumb
	plans []*Plan
	next  uint64 // step to open
	first uint64

	issued map[Op]bool // every operation ever handed out, to see each once
}

func newPair(l *Layout, role Role, first uint64, plans []*Plan) *pair {
	return &pair{s: New(l, role), d: newDumb(l, role), plans: plans, next: first, first: first, issued: map[Op]bool{}}
}

const pairEvents = 8

// event does one event. Calls that the rules forbid are made too: they must
// return an error, and the comparison after each event shows that they changed
// nothing.
func (p *pair) event(kind, a, b int) error {
	// The alive steps come first, so that drain can name one by its place.
	steps := append(p.d.alive(), p.next-1, p.next)
	step := steps[a%len(steps)]
	st, alive := p.d.steps[step], false
	if st != nil {
		alive = !st.stepDone()
	}
	planned := alive && st.plan != nil
	var older *dumbStep // the alive step before this one, if there is one
	if before := p.d.alive(); alive && before[0] != step {
		older = p.d.steps[before[0]]
	}
	first := older == nil || older.closed
	tensor := b % p.s.layout.Tensors()
	index := 0
	if planned {
		index = b % st.plan.Len()
	}
	// expect compares whether the call was allowed with what it returned.
	expect := func(what string, allowed bool, err error) error {
		if allowed != (err == nil) {
			return fmt.Errorf("%s: allowed %v, returned %v", what, allowed, err)
		}
		return nil
	}
	same := func(what string, want, got any) error {
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			return fmt.Errorf("%s (-model +scheduler):\n%s", what, diff)
		}
		return nil
	}
	switch kind % pairEvents {
	case 0:
		allowed := len(p.d.alive()) < 2
		err := p.s.Open(p.next)
		if !allowed && !errors.Is(err, ErrBusy) {
			return fmt.Errorf("open %d with two alive: %v, want ErrBusy", p.next, err)
		}
		if allowed {
			p.d.open(p.next)
			p.next++
		}
		return expect("open", allowed, err)
	case 1:
		plan := p.plans[b%len(p.plans)]
		allowed := alive && st.plan == nil && (older == nil || older.plan != nil)
		if allowed {
			st.plan = plan
		}
		return expect("plan", allowed, p.s.SetPlan(step, plan))
	case 2:
		allowed := alive && first && !st.closed && st.readyAt[tensor] == 0
		if allowed {
			p.d.ready(step, tensor)
		}
		return expect("ready", allowed, p.s.Ready(step, tensor))
	case 3:
		if b%3 != 0 { // closing is rare, else all are ready at once
			return nil
		}
		allowed := alive && first && !st.closed
		var want []int
		if allowed {
			want = p.d.close(step)
		}
		got, err := p.s.Close(nil, step)
		return errors.Join(expect("close", allowed, err), same("absent", want, got))
	case 4:
		allowed := planned && p.s.role == Follower && st.orderedAt[index] == 0
		if allowed {
			p.d.order(step, index)
		}
		return expect("order", allowed, p.s.Order(step, index))
	case 5:
		want, got := p.d.next(), p.s.Next(nil)
		for _, op := range got {
			if p.issued[op] {
				return fmt.Errorf("%+v issued twice", op)
			}
			p.issued[op] = true
		}
		return same("next", want, got)
	case 6:
		allowed := planned && st.issued[index] && !st.sent[index]
		if allowed {
			st.sent[index] = true
		}
		return expect("sent", allowed, p.s.Sent(step, index))
	default:
		allowed := planned && st.issued[index] && !st.done[index]
		var want []int
		if allowed {
			want = p.d.complete(step, index)
		}
		got, err := p.s.Done(nil, step, index)
		return errors.Join(expect("done", allowed, err), same("tensors done", want, got))
	}
}

// check compares everything that can be seen from outside.
func (p *pair) check() error {
	held, inFlight := p.d.held()
	if p.s.HeldBytes() != held || p.s.InFlight() != inFlight {
		return fmt.Errorf("holds %d bytes with %d in flight, want %d with %d", p.s.HeldBytes(), p.s.InFlight(), held, inFlight)
	}
	if got, want := p.s.AliveSteps(nil), p.d.alive(); !cmp.Equal(got, want, cmpopts.EquateEmpty()) || p.s.Alive() != len(want) {
		return fmt.Errorf("alive %v, want %v", got, want)
	}
	if !p.s.StepDone(p.first-1) && p.next > p.first || p.s.StepDone(p.next) {
		return errors.New("a step before the first is not done, or one to come is")
	}
	for step, st := range p.d.steps {
		if p.s.StepDone(step) != st.stepDone() || p.s.IsOpen(step) == st.stepDone() || p.s.IsClosed(step) != st.closed {
			return fmt.Errorf("step %d: done %v, want %v", step, p.s.StepDone(step), st.stepDone())
		}
		if plan := p.s.PlanOf(step); !st.stepDone() && plan != st.plan {
			return fmt.Errorf("step %d: has another plan", step)
		}
		var pending []int
		for t := range p.s.layout.Tensors() {
			if p.s.IsReady(step, t) != (st.readyAt[t] > 0) || p.s.TensorDone(step, t) != st.tensorDone(t) {
				return fmt.Errorf("step %d tensor %d: ready %v done %v, want %v %v", step, t,
					p.s.IsReady(step, t), p.s.TensorDone(step, t), st.readyAt[t] > 0, st.tensorDone(t))
			}
			if !st.tensorDone(t) {
				pending = append(pending, t)
			}
		}
		if got := p.s.Pending(nil, step); !st.stepDone() && !cmp.Equal(got, pending, cmpopts.EquateEmpty()) {
			return fmt.Errorf("step %d pending %v, want %v", step, got, pending)
		}
	}
	return nil
}

// drain finishes every alive step, to show that no reachable state is stuck.
func (p *pair) drain() error {
	for range 10 * MaxPartitions {
		alive := p.d.alive()
		if len(alive) == 0 {
			if p.s.HeldBytes() != 0 || p.s.InFlight() != 0 || p.s.Queued() != 0 {
				return fmt.Errorf("left behind: %d bytes, %d in flight, %d queued", p.s.HeldBytes(), p.s.InFlight(), p.s.Queued())
			}
			return nil
		}
		progress := false
		for place, step := range alive {
			st := p.d.steps[step]
			if st.plan == nil {
				if err := p.event(1, place, 0); err != nil {
					return err
				}
				progress = true
			}
			if !st.closed {
				if err := p.event(3, place, 0); err != nil {
					return err
				}
				progress = true
			}
			for i := 0; i < st.plan.Len() && !st.stepDone(); i++ {
				if p.s.role == Follower && st.orderedAt[i] == 0 {
					if err := p.event(4, place, i); err != nil {
						return err
					}
				}
				if st.issued[i] && !st.done[i] {
					if err := p.event(7, place, i); err != nil {
						return err
					}
					progress = true
				}
			}
			if st.stepDone() { // places have shifted
				break
			}
		}
		before := len(p.issued)
		if err := p.event(5, 0, 0); err != nil {
			return err
		}
		if !progress && len(p.issued) == before {
			op, why := p.s.Head()
			return fmt.Errorf("stuck with %v alive; next is %+v: %v", alive, op, why)
		}
	}
	return errors.New("does not drain")
}

func TestSchedulerDoesWhatTheModelDoes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLayout(t)
		plans := make([]*Plan, rapid.IntRange(1, 3).Draw(t, "plans"))
		for i := range plans {
			plans[i] = mustPlan(l, drawConfig(t))
		}
		p := newPair(l, rapid.SampledFrom([]Role{Leader, Follower}).Draw(t, "role"), rapid.Uint64Range(1, 5).Draw(t, "first"), plans)
		kinds := rapid.SampledFrom([]int{0, 1, 2, 2, 2, 2, 3, 4, 4, 4, 4, 5, 5, 5, 6, 6, 7, 7, 7, 7})
		for range rapid.IntRange(1, 150).Draw(t, "events") {
			kind, a, b := kinds.Draw(t, "kind"), rapid.SampledFrom([]int{0, 0, 1, 1, 2, 3}).Draw(t, "step"), rapid.IntRange(0, 40).Draw(t, "which")
			if err := p.event(kind, a, b); err != nil {
				t.Fatal(err)
			}
			if err := p.check(); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.drain(); err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzEvents takes the first bytes as layout and configurations and the others
// as events, wrong ones among them.
func FuzzEvents(f *testing.F) {
	f.Add([]byte("\x03\x10\x80\x40\x22\x05\x11\x31\x00\x01\x02\x02\x02\x05\x07\x07\x03\x05"))
	f.Add([]byte{1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 1, 0, 0, 2, 0, 1, 2, 0, 0, 5, 0, 0, 7, 0, 0, 3, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) < 8 || len(data) > 600 {
			return
		}
		tensors := make([]Tensor, 1+int(data[0]%6))
		for i := range tensors {
			b := data[1+i%4]
			tensors[i] = Tensor{Space: i % (1 + int(data[0]>>7)), Bytes: 1 + int64(b)*int64(1+i)}
		}
		l, err := NewLayout(tensors)
		if err != nil {
			t.Fatal(err)
		}
		a, b := data[5], data[6]
		plans := []*Plan{
			mustPlan(l, Config{Partition: 64 + int64(a), Credit: 1 + int64(b)*4, Fusion: int64(a&7) * 50, Lanes: int(b & 3), Policy: Policy(a >> 7)}),
			mustPlan(l, Config{Partition: 64 + int64(b)*2, Credit: 1 + int64(a), Fusion: int64(b&3) * 100, Lanes: int(a & 1), Policy: Policy(b >> 7)}),
		}
		p := newPair(l, Role(data[7]&1), 1, plans)
		for data = data[8:]; len(data) >= 2; data = data[2:] {
			if err := p.event(int(data[0]), int(data[0]>>7), int(data[1])); err != nil {
				t.Fatal(err)
			}
			if err := p.check(); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.drain(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestErrors calls everything wrongly once and looks at the words.
func TestErrors(t *testing.T) {
	l, _ := NewLayout([]Tensor{{0, 64}, {0, 64}})
	other, _ := NewLayout([]Tensor{{0, 64}, {0, 128}})
	c := Config{Partition: 64, Credit: 64}
	plan := mustPlan(l, c)
	f := func(what string, role Role, call func(s *Scheduler) error, want string, is error) {
		t.Helper()
		s := New(l, role)
		for _, err := range []error{s.Open(7), s.Open(8), s.SetPlan(7, plan), s.Ready(7, 1)} {
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
		}
		if role == Follower {
			if err := s.Order(7, 1); err != nil {
				t.Fatal(err)
			}
		}
		if ops := s.Next(nil); len(ops) != 1 || ops[0].Index != 1 {
			t.Fatalf("%s: issued %v, want partition 1", what, ops)
		}
		err := call(s)
		if err == nil || err.Error() != want {
			t.Errorf("%s: error\n %v, want\n %s", what, err, want)
		}
		if is != nil && !errors.Is(err, is) {
			t.Errorf("%s: %v is not %v", what, err, is)
		}
		if held, fly := s.HeldBytes(), s.InFlight(); held != 64 || fly != 1 || s.IsReady(7, 0) || s.Queued() != 0 {
			t.Errorf("%s: the call changed something: held %d, in flight %d", what, held, fly)
		}
	}
	f("open", Leader, func(s *Scheduler) error { return s.Open(9) }, "sched: open step 9 while 7 and 8 are alive: two steps are alive; wait until one has retired", ErrBusy)
	f("gap", Leader, func(s *Scheduler) error { return s.Open(10) }, "sched: open step 10: steps follow each other, the next is 9", nil)
	f("plan retired", Leader, func(s *Scheduler) error { return s.SetPlan(6, plan) }, "sched: set the plan of step 6: the step has retired", ErrRetired)
	f("plan unopened", Leader, func(s *Scheduler) error { return s.SetPlan(9, plan) }, "sched: set the plan of step 9: the step is not open yet", ErrNotOpen)
	f("plan twice", Leader, func(s *Scheduler) error { return s.SetPlan(7, plan) }, "sched: set the plan of step 7: it has one; a step keeps its plan, give the new one to a later step", nil)
	f("plan nil", Leader, func(s *Scheduler) error { return s.SetPlan(8, nil) }, "sched: set the plan of step 8: no plan given; make one with NewPlan", nil)
	f("plan other", Leader, func(s *Scheduler) error { return s.SetPlan(8, mustPlan(other, c)) },
		fmt.Sprintf("sched: set the plan of step 8: it cuts layout %016x, this scheduler's is %016x", other.Hash(), l.Hash()), nil)
	f("ready twice", Leader, func(s *Scheduler) error { return s.Ready(7, 1) }, "sched: tensor 1 ready in step 7: it is already; a second gradient belongs to a later step", nil)
	f("ready range", Leader, func(s *Scheduler) error { return s.Ready(7, 2) }, "sched: tensor 2 ready in step 7: tensors are 0 to 1", nil)
	f("ready before close", Leader, func(s *Scheduler) error { return s.Ready(8, 1) }, "sched: tensor 1 ready in step 8: close step 7 first", nil)
	f("close before close", Leader, func(s *Scheduler) error { _, err := s.Close(nil, 8); return err }, "sched: close step 8: close step 7 first", nil)
	f("order", Leader, func(s *Scheduler) error { return s.Order(7, 0) }, "sched: order partition 0 of step 7: a leader chooses its own order", nil)
	f("order twice", Follower, func(s *Scheduler) error { return s.Order(7, 1) }, "sched: order partition 1 of step 7: it was ordered before", nil)
	f("order unplanned", Follower, func(s *Scheduler) error { return s.Order(8, 1) }, "sched: order partition 1 of step 8: the step has no plan yet", ErrNoPlan)
	f("order unopened", Follower, func(s *Scheduler) error { return s.Order(9, 1) }, "sched: order partition 1 of step 9: the step is not open yet", ErrNotOpen)
	f("sent range", Leader, func(s *Scheduler) error { return s.Sent(7, 2) }, "sched: partition 2 of step 7 sent: partitions are 0 to 1", nil)
	f("sent early", Leader, func(s *Scheduler) error { return s.Sent(7, 0) }, "sched: partition 0 of step 7 sent: it was not issued", nil)
	f("done early", Leader, func(s *Scheduler) error { _, err := s.Done(nil, 7, 0); return err }, "sched: partition 0 of step 7 done: it was not issued", nil)
	f("close retired", Leader, func(s *Scheduler) error { _, err := s.Close(nil, 6); return err }, "sched: close step 6: the step has retired", ErrRetired)
}

func TestErrorsAfterSentDoneAndClose(t *testing.T) {
	l, _ := NewLayout([]Tensor{{0, 64}, {0, 64}})
	s := New(l, Leader)
	f := func(err error, want string) {
		t.Helper()
		if got := fmt.Sprint(err); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	done := func(i int) error { _, err := s.Done(nil, 1, i); return err }
	f(s.Open(1), "<nil>")
	f(s.SetPlan(1, mustPlan(l, Config{Partition: 64, Credit: 64})), "<nil>")
	f(s.Ready(1, 0), "<nil>")
	if n := len(s.Next(nil)); n != 1 {
		t.Fatalf("%d issued", n)
	}
	f(s.Sent(1, 0), "<nil>")
	f(s.Sent(1, 0), "sched: partition 0 of step 1 sent: it was sent before")
	f(done(0), "<nil>")
	f(s.Sent(1, 0), "sched: partition 0 of step 1 sent: it is done, which gave its credit back")
	f(done(0), "sched: partition 0 of step 1 done: it was done before")
	absent, err := s.Close(nil, 1)
	f(err, "<nil>")
	if !reflect.DeepEqual(absent, []int{1}) {
		t.Errorf("absent %v", absent)
	}
	f(s.Ready(1, 1), "sched: tensor 1 ready in step 1: the step is closed; it belongs to a later step")
	_, err = s.Close(nil, 1)
	f(err, "sched: close step 1: it is closed already")
}
