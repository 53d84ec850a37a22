package worker

import (
	"fmt"
	"runtime/debug"
	"strings"
	"time"

	"autobyte/internal/control"
)

// leftBehindAfter is how long a pass may make no progress after a rank has
// said goodbye. That rank had finished its own passes, so what we share with
// it ends within moments; anything else will never end.
const leftBehindAfter = 2 * time.Second

// fail records the first failure, wakes everyone and, with tell, informs the
// other ranks.
func (w *Worker) fail(err error, tell bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failLocked(err, tell)
}

func (w *Worker) failLocked(err error, tell bool) {
	if w.err != nil || w.stopped {
		return
	}
	w.err = err
	w.opt.Log.Error("autobyte stops", "rank", w.opt.Rank, "error", err)
	if group := w.group; tell && group != nil {
		go func() {
			defer w.recoverAsFailure("telling the others")
			group.Fail(err.Error())
		}()
	}
	w.wakeAllLocked()
}

// recoverAsFailure turns a panic of one of our goroutines into an error for
// the user; an uncaught one would end the host program.
func (w *Worker) recoverAsFailure(where string) {
	if r := recover(); r != nil {
		err := fmt.Errorf("internal error in %s: %v\n%s", where, r, debug.Stack())
		go w.fail(err, true) // the panic may have left our lock held by this goroutine
	}
}

// failureLocked is the error that ends this rank's work, if there is one.
// context names the tensor that asks.
func (w *Worker) failureLocked(context string) error {
	if w.err != nil {
		return w.err
	}
	for _, lost := range w.lost {
		if !lost.Clean {
			w.err = w.lostErrorLocked(lost, context)
			return w.err
		}
	}
	if w.stopped {
		return ErrStopped
	}
	return nil
}

// goneLocked is a rank that is no longer there, lost or gone with a goodbye.
func (w *Worker) goneLocked() *control.Lost {
	for i := range w.lost {
		return &w.lost[i]
	}
	return nil
}

// checkLeftBehindLocked fails when a rank said goodbye and a pass that it
// has no part in can never end.
func (w *Worker) checkLeftBehindLocked() {
	gone := w.goneLocked()
	if gone == nil || w.idleLocked() || time.Since(w.progress) < leftBehindAfter {
		return
	}
	w.failLocked(w.lostErrorLocked(*gone, ""), false)
}

// Check says whether this rank's work can go on: it returns the error that
// ended it, if any, and when a rank left so long ago that nothing more can come
// from it, an error that says who. what waits, where no tensor does.
func (w *Worker) Check(what string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.failureLocked(what); err != nil {
		return err
	}
	if gone := w.goneLocked(); gone != nil && time.Since(w.goneSince) >= leftBehindAfter {
		return w.lostErrorLocked(*gone, what)
	}
	return nil
}

// lostErrorLocked says who is gone, why, and what waits for it.
func (w *Worker) lostErrorLocked(lost control.Lost, context string) error {
	how := "is lost"
	if lost.Clean {
		how = "has left the job"
	}
	reason := ""
	if lost.Reason != "" {
		reason = " (" + lost.Reason + ")"
	}
	return fmt.Errorf("rank %d %s%s at step %d%s", lost.Rank, how, reason, w.iterationOfLocked(w.oldestLocked()), w.waitingForLocked(context))
}

// oldestLocked is the oldest pass that is not reduced, or the current one.
func (w *Worker) oldestLocked() uint64 {
	if w.sched != nil && w.pass > 1 && !w.reducedLocked(w.pass-1) {
		return w.pass - 1
	}
	return w.pass
}

// iterationOfLocked is the optimizer iteration of a pass, counted from 0.
func (w *Worker) iterationOfLocked(step uint64) uint64 {
	if s := &w.spans[step%spanRing]; s.step == step && s.hasOwn {
		return s.local
	}
	return w.iteration
}

// maxNamed is how many tensors a message names.
const maxNamed = 5

// waitingForLocked names the tensors that are not reduced, or the one that
// asks when none is under way.
func (w *Worker) waitingForLocked(context string) string {
	var names []string
	count := 0
	if w.sched != nil && w.pass > 0 {
		for _, position := range w.sched.Pending(nil, w.oldestLocked()) {
			if count++; count <= maxNamed {
				names = append(names, w.tensors[w.registered[position]].Name)
			}
		}
	}
	if count == 0 && context != "" {
		names, count = []string{context}, 1
	}
	if count == 0 {
		return "; no tensor was under way"
	}
	text := "; waiting for it: " + strings.Join(names, ", ")
	if count > maxNamed {
		text += fmt.Sprintf(" and %d more", count-maxNamed)
	}
	return text
}

// WaitingFor is one line that says what this rank waits for, for warnings.
func (w *Worker) WaitingFor() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := fmt.Sprintf("step %d%s", w.iterationOfLocked(w.oldestLocked()), w.waitingForLocked(""))
	if w.group == nil {
		return text
	}
	for _, p := range w.group.Alive() {
		if p.Rank != w.opt.Rank {
			text += fmt.Sprintf("; rank %d was heard %.1f s ago", p.Rank, p.SinceHeard.Seconds())
		}
	}
	return text
}
