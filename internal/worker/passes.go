package worker

import (
	"errors"
	"fmt"
	"time"

	"autobyte/internal/control"
	"autobyte/internal/sched"
)

// Ready says that a tensor's gradient lies in its place. The first one of a
// pass opens it, which waits while two older ones are alive.
func (w *Worker) Ready(tensor int, wait time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.layout == nil {
		return errors.New("Ready before the layout is known")
	}
	if tensor < 0 || tensor >= len(w.forward) {
		return fmt.Errorf("tensor %d does not exist: there are %d", tensor, len(w.forward))
	}
	position := int(w.forward[tensor])
	if err := w.failureLocked(w.tensors[tensor].Name); err != nil {
		return err
	}
	if err := w.enterLocked(wait); err != nil {
		return err
	}
	if err := w.sched.Ready(w.pass, position); err != nil {
		return err
	}
	w.lastPass[position] = w.pass
	return w.pumpLocked()
}

// enterLocked makes sure that a pass is open here. It may give up the lock
// while it waits.
func (w *Worker) enterLocked(wait time.Duration) error {
	if w.inPass {
		return nil
	}
	if gone := w.goneLocked(); gone != nil {
		return w.lostErrorLocked(*gone, "")
	}
	err := w.openLocked(w.pass + 1)
	if errors.Is(err, sched.ErrBusy) && wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		for expired := false; errors.Is(err, sched.ErrBusy) && !expired; {
			changed := w.changed
			w.mu.Unlock()
			select {
			case <-changed:
			case <-timer.C:
				expired = true
			}
			w.mu.Lock()
			if err := w.failureLocked(""); err != nil {
				return err
			}
			err = w.openLocked(w.pass + 1)
		}
	}
	if errors.Is(err, sched.ErrBusy) {
		return ErrAgain
	}
	if err != nil {
		return err
	}
	w.pass++
	w.inPass = true
	w.stats.passes++
	s := w.spanLocked(w.pass)
	s.local, s.hasOwn = w.iteration, true
	return w.checkIterationLocked(s)
}

// openLocked opens a step in the scheduler unless the leader's announcement
// has done so already. The leader decides its plan and announces it.
func (w *Worker) openLocked(step uint64) error {
	if step <= w.opened {
		return nil
	}
	if err := w.sched.Open(step); err != nil {
		return err
	}
	w.opened = step
	if w.opt.Rank != leader {
		return nil
	}
	config := w.configLocked(step)
	plan, err := w.planLocked(config)
	if err != nil {
		return err
	}
	w.stats.partitionsInPlan = plan.Len()
	w.group.SendOpen(control.Open{
		Generation: w.generation, Step: step, Iteration: w.iteration, Config: config, PlanHash: plan.Hash(),
	})
	return w.sched.SetPlan(step, plan)
}

// spanLocked is the record of a step, fresh if the step is new.
func (w *Worker) spanLocked(step uint64) *span {
	s := &w.spans[step%spanRing]
	if s.step != step {
		*s = span{step: step}
	}
	return s
}

// checkIterationLocked refuses to sum gradients of different optimizer
// iterations, which ranks that don't run the same number of backward passes
// would otherwise do without a sign.
func (w *Worker) checkIterationLocked(s *span) error {
	if !s.hasOwn || !s.hasLead || s.local == s.leaders {
		return nil
	}
	err := fmt.Errorf("the ranks don't run the same backward passes: backward pass %d belongs to step %d on rank %d, to step %d on rank 0",
		s.step, s.local, w.opt.Rank, s.leaders)
	w.failLocked(err, true)
	return err
}

// Close ends the pass that is open, if there is one: the tensors that had no
// gradient take part with what lies in their place. With endOfIteration the
// optimizer's step ends too. It returns the number of the pass, 0 for none,
// and how many tensors had no gradient.
func (w *Worker) Close(endOfIteration bool) (pass uint64, absent int, err error) {
	w.mu.Lock()
	if endOfIteration {
		defer func() { w.mu.Lock(); w.iteration++; w.mu.Unlock() }()
	}
	if !w.inPass {
		w.mu.Unlock()
		return 0, 0, nil
	}
	pass = w.pass
	missing, err := w.sched.Close(nil, pass)
	if err != nil {
		w.mu.Unlock()
		return 0, 0, err
	}
	w.inPass = false
	w.spanLocked(pass).closed = true
	for _, t := range missing {
		w.lastPass[t] = pass
	}
	if len(missing) > 0 {
		w.verdicts[pass] = nil
	}
	if w.sched.StepDone(pass) { // nothing but absent tensors of an empty plan
		w.changedLocked()
	}
	err = w.pumpLocked()
	group := w.group
	w.mu.Unlock()
	group.SendClose(pass, missing)
	return pass, len(missing), err
}

// Absent waits until it is known which of the tensors that had no gradient
// here in the pass had none on any rank, and returns their registration
// indices. It may be asked once for a pass that Close reported absent tensors
// for.
func (w *Worker) Absent(pass uint64, wait time.Duration) ([]int32, error) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		w.mu.Lock()
		verdict, ok := w.verdicts[pass]
		if !ok {
			w.mu.Unlock()
			return nil, fmt.Errorf("pass %d had no absent tensors here, or was asked about before", pass)
		}
		if verdict != nil {
			delete(w.verdicts, pass)
			out := make([]int32, len(verdict))
			for i, t := range verdict {
				if t < 0 || t >= len(w.registered) {
					w.mu.Unlock()
					return nil, fmt.Errorf("rank 0's list of absent tensors names tensor %d of %d", t, len(w.registered))
				}
				out[i] = w.registered[t]
			}
			w.mu.Unlock()
			return out, nil
		}
		if err := w.failureLocked(""); err != nil {
			w.mu.Unlock()
			return nil, err
		}
		changed := w.changed
		w.mu.Unlock()
		select {
		case <-changed:
		case <-timer.C:
			return nil, ErrAgain
		}
	}
}

// Wait waits until a tensor's gradient of the last pass it took part in is
// reduced. It returns how many tensors are, counted from this one in forward
// order, up to limit: a caller that goes that way need not ask for each.
func (w *Worker) Wait(tensor, limit int, wait time.Duration) (run int, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.layout == nil || tensor < 0 || tensor >= len(w.forward) {
		return 0, fmt.Errorf("tensor %d does not exist: there are %d", tensor, len(w.forward))
	}
	position := int(w.forward[tensor])
	if run := w.reducedRunLocked(position, limit); run > 0 {
		return run, nil
	}
	if err := w.failureLocked(w.tensors[tensor].Name); err != nil {
		return 0, err
	}
	if wait <= 0 {
		return 0, ErrAgain
	}
	me := &waiter{tensor: position, step: w.lastPass[position], ch: make(chan struct{})}
	w.waiters = append(w.waiters, me)
	w.mu.Unlock()

	begin := time.Now()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-me.ch:
	case <-timer.C:
	}

	w.mu.Lock()
	w.stats.waited += time.Since(begin)
	if run := w.reducedRunLocked(position, limit); run > 0 {
		w.stats.waits++
		return run, nil
	}
	w.dropWaiterLocked(me)
	w.checkLeftBehindLocked()
	if err := w.failureLocked(w.tensors[tensor].Name); err != nil {
		return 0, err
	}
	return 0, ErrAgain
}

// reducedRunLocked counts the reduced tensors from a forward position on, up
// to limit, and looks at one at least.
func (w *Worker) reducedRunLocked(position, limit int) int {
	if w.sched == nil {
		return 0
	}
	end := min(position+max(limit, 1), len(w.lastPass))
	p := position
	for p < end && (w.lastPass[p] == 0 || w.sched.TensorDone(w.lastPass[p], p)) { // 0: it took part in none
		p++
	}
	return p - position
}

// Drain waits until every closed pass is reduced.
func (w *Worker) Drain(wait time.Duration) error {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		w.mu.Lock()
		if w.idleLocked() {
			w.mu.Unlock()
			return nil
		}
		w.checkLeftBehindLocked()
		if err := w.failureLocked(""); err != nil {
			w.mu.Unlock()
			return err
		}
		changed := w.changed
		w.mu.Unlock()
		select {
		case <-changed:
		case <-timer.C:
			return ErrAgain
		}
	}
}

// idleLocked reports whether every pass that this rank took part in is
// reduced. A step that only the leader has opened so far is not ours yet.
func (w *Worker) idleLocked() bool {
	if w.sched == nil {
		return true
	}
	return !w.inPass && w.reducedLocked(w.pass) && (w.pass == 0 || w.reducedLocked(w.pass-1))
}

// reducedLocked reports whether a pass that has begun here is reduced. Those
// of older layouts are, since a layout changes only while nothing is under way.
func (w *Worker) reducedLocked(pass uint64) bool {
	return pass <= w.older || w.sched.StepDone(pass)
}
