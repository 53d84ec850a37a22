package worker

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"autobyte/internal/control"
	"autobyte/internal/sched"
)

// handle takes what the control plane reports. It never blocks.
func (w *Worker) handle(e control.Event) {
	defer w.recoverAsFailure("control event")
	w.mu.Lock()
	defer w.mu.Unlock()
	switch e := e.(type) {
	case control.Layout:
		w.layouts = append(w.layouts, e)
		w.changedLocked()
	case control.Open, control.Order:
		w.events = append(w.events, e)
		_ = w.pumpLocked()
	case control.Verdict:
		if _, waiting := w.verdicts[e.Step]; waiting {
			w.verdicts[e.Step] = append([]int{}, e.Absent...)
			w.changedLocked()
		}
	case control.Lost:
		if len(w.lost) == 0 {
			w.goneSince = time.Now()
		}
		w.lost = append(w.lost, e)
		w.wakeAllLocked()
	}
}

// pumpLocked applies what the leader has said as far as it can be, and hands
// the engine every operation that may be issued now.
func (w *Worker) pumpLocked() error {
	if w.sched == nil || w.stopped || w.err != nil {
		return nil
	}
	if err := w.applyEventsLocked(); err != nil {
		w.failLocked(err, true)
		return err
	}
	w.ops = w.sched.Next(w.ops[:0])
	if len(w.ops) == 0 {
		return nil
	}
	for _, op := range w.ops {
		w.stats.partitions++
		w.stats.bytes += op.Bytes
		if w.opt.Rank == leader {
			w.group.SendOrder(op.Step, int(op.Index))
		}
	}
	w.engine.Submit(w.ops)
	return nil
}

// applyEventsLocked takes the leader's events in their order, and stops at the
// first that has to wait: for the layout of its generation, or for a place
// among the steps that are alive.
func (w *Worker) applyEventsLocked() error {
	for i, event := range w.events {
		var err error
		switch e := event.(type) {
		case control.Open:
			if e.Generation > w.generation {
				err = sched.ErrBusy
			} else {
				err = w.applyOpenLocked(e)
			}
		case control.Order:
			err = w.sched.Order(e.Step, e.Index)
		}
		if errors.Is(err, sched.ErrBusy) {
			w.events = slices.Delete(w.events, 0, i)
			return nil
		}
		if err != nil {
			return fmt.Errorf("rank 0's order can't be followed: %w", err)
		}
	}
	w.events = w.events[:0]
	return nil
}

func (w *Worker) applyOpenLocked(e control.Open) error {
	if e.Generation != w.generation {
		return fmt.Errorf("step %d belongs to layout %d, this rank has %d", e.Step, e.Generation, w.generation)
	}
	if err := w.openLocked(e.Step); err != nil {
		return err
	}
	plan, err := w.planLocked(e.Config)
	if err != nil {
		return err
	}
	if plan.Hash() != e.PlanHash {
		return fmt.Errorf("step %d: this rank's plan %#x differs from rank 0's %#x (do all ranks run the same version?)", e.Step, plan.Hash(), e.PlanHash)
	}
	w.stats.partitionsInPlan = plan.Len()
	w.settings = settingsOf(e.Config)
	s := w.spanLocked(e.Step)
	s.leaders, s.hasLead = e.Iteration, true
	if err := w.checkIterationLocked(s); err != nil {
		return err
	}
	return w.sched.SetPlan(e.Step, plan)
}

// settingsOf is the settings that give a configuration.
func settingsOf(c sched.Config) Settings {
	return Settings{Partition: &c.Partition, Credit: &c.Credit, Fusion: &c.Fusion, Lanes: &c.Lanes, Policy: &c.Policy}
}

// reports takes the engine's reports: what became of the operations that it
// was given. It is not Worker itself, whose methods of these names are the
// carrier's answers to the engine.
type reports struct{ w *Worker }

// Sent implements engine.Reports.
func (r reports) Sent(step uint64, index int) {
	w := r.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.sched == nil {
		return
	}
	if err := w.sched.Sent(step, index); err != nil {
		w.failLocked(err, true)
		return
	}
	_ = w.pumpLocked()
}

// Done implements engine.Reports.
func (r reports) Done(step uint64, index int) error {
	w := r.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.sched == nil {
		return fmt.Errorf("partition %d of step %d is done, and there is no layout", index, step)
	}
	var err error
	w.done, err = w.sched.Done(w.done[:0], step, index)
	if err != nil {
		return err
	}
	w.progress = time.Now()
	for _, tensor := range w.done {
		w.wakeTensorLocked(tensor, step)
	}
	if w.sched.StepDone(step) {
		w.changedLocked()
	}
	return w.pumpLocked()
}

// Failed implements engine.Reports. The engine's own words seldom say which
// rank is at fault, so the control plane is given a moment to name it.
func (r reports) Failed(step uint64, index int, cause error) {
	w := r.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil || len(w.lost) > 0 || w.stopped {
		return
	}
	err := fmt.Errorf("step %d: the engine could not reduce partition %d: %w%s", w.iterationOfLocked(step), index, cause, w.waitingForLocked(""))
	grace := min(graceForLost, w.opt.timeout)
	time.AfterFunc(grace, func() {
		defer w.recoverAsFailure("engine failure")
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.goneLocked() == nil {
			w.failLocked(err, true)
		}
	})
}

// graceForLost is how long an engine's failure waits for the control plane to
// name the rank that caused it.
const graceForLost = 3 * time.Second

func (w *Worker) wakeTensorLocked(tensor int, step uint64) {
	for i := 0; i < len(w.waiters); {
		if me := w.waiters[i]; me.tensor == tensor && me.step == step {
			close(me.ch)
			w.waiters = slices.Delete(w.waiters, i, i+1)
		} else {
			i++
		}
	}
}

func (w *Worker) dropWaiterLocked(me *waiter) {
	if i := slices.Index(w.waiters, me); i >= 0 {
		w.waiters = slices.Delete(w.waiters, i, i+1)
	}
}

// changedLocked wakes whoever waits for something other than a tensor.
func (w *Worker) changedLocked() {
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *Worker) wakeAllLocked() {
	for _, me := range w.waiters {
		close(me.ch)
	}
	w.waiters = w.waiters[:0]
	w.changedLocked()
}
