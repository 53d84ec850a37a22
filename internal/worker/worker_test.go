package worker

import (
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// contains fails unless an error has all the words.
func contains(t *testing.T, err error, words ...string) {
	t.Helper()
	for _, word := range words {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("got %v, want an error with %q", err, word)
		}
	}
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for i, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", i, err)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	f := func(words string, change func(*Options)) {
		t.Helper()
		o := options(0, 2, tensorsOf(1, 4))
		change(&o)
		w, err := Open(o)
		if err == nil {
			_ = w.Shutdown("")
		}
		contains(t, err, words)
	}
	f("world size is 1", func(o *Options) { o.World = 1 })
	f("rank is 2; it must be from 0 to 1", func(o *Options) { o.Rank = 2 })
	f("rank is -1", func(o *Options) { o.Rank = -1 })
	f("timeout is -1 s", func(o *Options) { o.TimeoutS = -1 })
	f("timeout is NaN s", func(o *Options) { o.TimeoutS = math.NaN() })
	f("port 70000", func(o *Options) { o.Port = 70000 })
	f("artition", func(o *Options) { tooSmall := int64(1); o.Settings.Partition = &tooSmall })
	f("redit", func(o *Options) { none := int64(0); o.Settings.Credit = &none })
}

func TestCallsOutOfTurnAreErrors(t *testing.T) {
	t.Parallel()
	tensors := tensorsOf(1, 4, 4)
	w, err := Open(options(0, 2, tensors))
	must(t, err)
	_, _, err = w.Close(true) // ends no pass, and is no error: a step without a gradient
	must(t, err)
	contains(t, w.Ready(0, 0), "before the layout")
	contains(t, w.SetTensors(tensors, inOrder(tensors)), "before Joined")
	_, err = w.LayoutReady(0)
	contains(t, err, "before SetTensors")
	_, err = w.Wait(0, 1, 0)
	contains(t, err, "does not exist")
	_, err = w.Absent(1, 0)
	contains(t, err, "pass 1 had no absent tensors")
	contains(t, w.Join(&Rendezvous{}), "every rank but rank 0")
	if err := w.Joined(0); !errors.Is(err, ErrAgain) {
		t.Errorf("Joined: %v, want ErrAgain", err)
	}
	if _, err := w.Take(0); !errors.Is(err, ErrAgain) {
		t.Errorf("Take: %v, want ErrAgain", err)
	}
	contains(t, w.Done(1, 0), "not under way")
	contains(t, w.Failed(1, 0, errors.New("x")), "not under way")
	contains(t, w.Sent(1, 0), "not under way")
	must(t, w.Drain(0), w.Join(nil))
	contains(t, w.Join(nil), "called before")
	must(t, w.Shutdown(""), w.Shutdown("")) // twice
	if _, err := w.Take(0); !errors.Is(err, ErrStopped) {
		t.Errorf("Take after Shutdown: %v, want ErrStopped", err)
	}
}

func TestTensorsThatDoNotFit(t *testing.T) {
	t.Parallel()
	r := ready(t, 2, small)
	defer r.close()
	leader, tensors := r.ranks[0], r.ranks[0].tensors
	contains(t, leader.Ready(len(tensors), 0), "does not exist")
	contains(t, leader.Ready(-1, 0), "does not exist")
	contains(t, leader.SetTensors(tensors, []int32{0}), "forward order has 1 entries")
	contains(t, leader.SetTensors(tensors, []int32{0, 1, 2, 3, 4, 4}), "not a permutation")
	contains(t, leader.SetTensors(tensors, []int32{0, 1, 2, 3, 4, -1}), "not a permutation")
	must(t, leader.SetTensors(tensors, inOrder(tensors)))
	must(t, leader.Ready(0, 0))
	contains(t, leader.SetTensors(tensors, inOrder(tensors)), "while gradients are under way")
	contains(t, leader.Ready(0, 0), "ready") // twice in a pass
}

func TestOneRankIsSlow(t *testing.T) {
	t.Parallel()
	r := ready(t, 3, small)
	defer r.close()
	must(t, r.each(func(m *rank) error {
		if m.number == 1 {
			time.Sleep(300 * time.Millisecond)
		}
		if err := m.pass(float32(m.number + 1)); err != nil {
			return err
		}
		if _, _, err := m.Close(true); err != nil {
			return err
		}
		for tensor := range m.tensors {
			if err := m.check(tensor, 6); err != nil {
				return err
			}
		}
		return nil
	})...)
	if s := r.ranks[0].Stats(); s.Iterations != 1 || s.Passes != 1 || s.Bytes == 0 || s.Partitions == 0 || s.PeersAlive != 2 || s.HeldBytes != 0 || s.InFlight != 0 {
		t.Errorf("statistics of rank 0: %+v", s)
	}
}

// step1 brings all ranks through step 0 and into the middle of step 1's pass.
func step1(t *testing.T, r *rig) {
	t.Helper()
	must(t, r.each(func(m *rank) error {
		if err := m.pass(1); err != nil {
			return err
		}
		if _, _, err := m.Close(true); err != nil {
			return err
		}
		for tensor := range m.tensors { // or what happens next would meet step 0 half done
			if err := m.wait(tensor); err != nil {
				return err
			}
		}
		return m.pass(1, 0, 1) // the first two tensors are still to come
	})...)
}

func TestALostRankIsNamed(t *testing.T) {
	t.Parallel()
	f := func(world, lost int, how func(m *rank), words ...string) {
		t.Run(words[0], func(t *testing.T) {
			t.Parallel()
			r := ready(t, world, small)
			defer r.close()
			step1(t, r)
			how(r.ranks[lost])
			r.carrier.Lose(lost)
			for i, err := range r.each(func(m *rank) error {
				if m.number == lost {
					return nil
				}
				if err := m.pass(1, 2, 3, 4, 5); err != nil { // gives the first two
					return err
				}
				if _, _, err := m.Close(true); err != nil {
					return err
				}
				return m.wait(0)
			}) {
				if i != lost {
					contains(t, err, words...)
				}
			}
		})
	}
	vanish := func(m *rank) { m.Stop(); _ = m.group.Close() } // as a killed process: no goodbye
	fail := func(m *rank) { _ = m.Shutdown("its training stopped: ValueError: sample 17") }
	leave := func(m *rank) { _ = m.Shutdown("") }
	for world := 2; world <= 3; world++ {
		for lost := range world {
			who := "rank " + string(rune('0'+lost))
			f(world, lost, vanish, who+" is lost (its connection ended without goodbye)", "at step 1", "waiting for it: layer0.weight, layer1.weight")
			f(world, lost, fail, who+" is lost (its training stopped: ValueError: sample 17)", "at step 1", "waiting for it: layer0.weight")
			f(world, lost, leave, who+" has left the job", "at step 1", "waiting for it: layer0.weight")
		}
	}
}

func TestCheckSaysWhoIsGone(t *testing.T) {
	t.Parallel()
	f := func(reason string, words ...string) {
		t.Helper()
		r := ready(t, 2, nil)
		defer r.close()
		must(t, r.ranks[0].Check("the model's buffers"))
		_ = r.ranks[1].Shutdown(reason)
		var err error
		for begin := time.Now(); err == nil && time.Since(begin) < patience; time.Sleep(slice) {
			err = r.ranks[0].Check("the model's buffers")
		}
		contains(t, err, append(words, "waiting for it: the model's buffers")...)
	}
	f("no more data", "rank 1 is lost (no more data)")
	f("", "rank 1 has left the job")
}

// A rank that finished first may leave while another still waits for its last
// sums: what it shares with it is complete.
func TestARankMayLeaveWhenItIsDone(t *testing.T) {
	t.Parallel()
	r := ready(t, 2, small)
	defer r.close()
	r.carrier.Pause = func(rank int) {
		if rank == 1 {
			time.Sleep(5 * time.Millisecond) // it hears of every sum late
		}
	}
	must(t, r.each(func(m *rank) error {
		if err := m.pass(2); err != nil {
			return err
		}
		if _, _, err := m.Close(true); err != nil {
			return err
		}
		if m.number == 0 {
			if err := m.again(func() error { return m.Drain(slice) }); err != nil {
				return err
			}
			return m.Shutdown("")
		}
		for tensor := range m.tensors {
			if err := m.check(tensor, 4); err != nil {
				return err
			}
		}
		return nil
	})...)
}

func TestAnotherNumberOfPassesIsAnErrorEverywhere(t *testing.T) {
	t.Parallel()
	for _, more := range []int{0, 1} {
		r := ready(t, 2, small)
		errs := r.each(func(m *rank) error {
			for step := range 3 {
				passes := 1
				if m.number == more && step == 1 {
					passes = 2
				}
				for p := range passes {
					if err := m.pass(1); err != nil {
						return err
					}
					if _, _, err := m.Close(p == passes-1); err != nil {
						return err
					}
				}
			}
			return m.wait(0)
		})
		for _, err := range errs {
			contains(t, err, "the ranks don't run the same backward passes")
		}
		r.close()
	}
}

// An operation that fails while every rank lives is an error of its own.
func TestAnEngineFailureWithoutALostRank(t *testing.T) {
	t.Parallel()
	r := ready(t, 2, func(o *Options) { o.TimeoutS = 2 })
	defer r.close()
	r.carrier.Lose(1) // its connections broke, and it lives
	errs := r.each(func(m *rank) error {
		if m.number == 1 {
			return nil
		}
		if err := m.pass(1); err != nil {
			return err
		}
		return m.wait(0)
	})
	contains(t, errs[0], "step 0", "could not reduce partition", "connection closed by peer", "layer0.weight")
	var err error
	for begin := time.Now(); err == nil && time.Since(begin) < patience; time.Sleep(slice) {
		err = r.ranks[1].Check("")
	}
	contains(t, err, "rank 0 is lost", "could not reduce partition") // it was told
}

func TestRanksThatDiffer(t *testing.T) {
	t.Parallel()
	var workers []*Worker
	for i := range 3 {
		tensors := tensorsOf(1, 4, 4)
		if i == 2 {
			tensors[1].Shape = []int64{2, 2}
		}
		w, err := Open(options(i, 3, tensors))
		must(t, err)
		workers = append(workers, w)
	}
	rendezvous := workers[0].Rendezvous()
	must(t, workers[0].Join(nil), workers[1].Join(&rendezvous), workers[2].Join(&rendezvous))
	for _, w := range workers {
		err := ErrAgain
		for errors.Is(err, ErrAgain) {
			err = w.Joined(slice)
		}
		contains(t, err, "rank 2 and rank 0 don't have the same", "layer1.weight")
	}
	for _, w := range workers {
		_ = w.Shutdown("")
	}
}

func TestARankThatDoesNotComeIsNamed(t *testing.T) {
	t.Parallel()
	var workers []*Worker
	for i := range 2 {
		o := options(i, 3, tensorsOf(1, 4))
		o.TimeoutS = 1
		w, err := Open(o)
		must(t, err)
		workers = append(workers, w)
	}
	rendezvous := workers[0].Rendezvous()
	must(t, workers[0].Join(nil), workers[1].Join(&rendezvous))
	for _, w := range workers {
		err := ErrAgain
		for errors.Is(err, ErrAgain) {
			err = w.Joined(slice)
		}
		contains(t, err, "not all ranks joined within 1s", "missing: rank 2")
		_ = w.Shutdown("")
	}
}

func TestRankZerosSettingsWin(t *testing.T) {
	t.Parallel()
	r := ready(t, 2, func(o *Options) {
		partition := int64(1024 * (o.Rank + 1))
		o.Settings.Partition = &partition
	})
	defer r.close()
	for _, m := range r.ranks {
		if got := *m.CurrentSettings().Partition; got != 1024 {
			t.Errorf("rank %d uses partitions of %d B, want rank 0's 1024", m.number, got)
		}
	}
	bad := int64(1)
	contains(t, r.ranks[0].Configure(Settings{Partition: &bad}, 0), "artition")
}

// Stop, from another goroutine, ends whatever waits.
func TestStopEndsEveryWait(t *testing.T) {
	t.Parallel()
	r := ready(t, 2, small)
	defer r.close()
	m := r.ranks[0]
	must(t, m.Ready(5, slice))
	_, absent, err := m.Close(true)
	must(t, err)
	if absent != 5 {
		t.Fatalf("%d absent, want 5", absent)
	}
	waits := map[string]func() error{
		"Wait":   func() error { _, err := m.Wait(0, 1, patience); return err },
		"Drain":  func() error { return m.Drain(patience) },
		"Absent": func() error { _, err := m.Absent(1, patience); return err },
	}
	var ended sync.WaitGroup
	for name, wait := range waits {
		ended.Go(func() {
			if err := wait(); !errors.Is(err, ErrStopped) {
				t.Errorf("%s: %v, want ErrStopped", name, err)
			}
		})
	}
	time.Sleep(slice)
	m.Stop()
	ended.Wait()
}

func TestWaitReturnsARun(t *testing.T) {
	t.Parallel()
	r := ready(t, 2, small)
	defer r.close()
	must(t, r.each(func(m *rank) error {
		if err := m.pass(1); err != nil {
			return err
		}
		if _, _, err := m.Close(true); err != nil {
			return err
		}
		return m.again(func() error { return m.Drain(slice) })
	})...)
	var runs []int
	for _, limit := range []int{0, 1, 3, 100} {
		run, err := r.ranks[1].Wait(1, limit, 0)
		must(t, err)
		runs = append(runs, run)
	}
	if want := []int{1, 1, 3, 5}; !slices.Equal(runs, want) {
		t.Errorf("runs from tensor 1 on: %v, want %v", runs, want)
	}
}

// Before a layout's first pass there is nothing to wait for, whatever ran
// under an older one.
func TestAFreshLayoutHasNothingToWaitFor(t *testing.T) {
	t.Parallel()
	r := ready(t, 2, small)
	defer r.close()
	idle := func(m *rank) error {
		if err := m.Drain(0); err != nil {
			return err
		}
		_, err := m.Wait(2, 1, 0)
		return err
	}
	must(t, r.each(idle)...)
	step1(t, r)
	must(t, r.each(func(m *rank) error {
		if _, _, err := m.Close(true); err != nil {
			return err
		}
		if err := m.again(func() error { return m.Drain(slice) }); err != nil {
			return err
		}
		if err := m.lay(m.tensors, inOrder(m.tensors)); err != nil {
			return err
		}
		return idle(m)
	})...)
}
