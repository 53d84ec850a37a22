package external

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"autobyte/internal/engine"
	"autobyte/internal/engine/enginetest"
	"autobyte/internal/sched"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	enginetest.Run(t, func(t *testing.T, memory [][][]float32, reports []engine.Reports) []engine.Engine {
		carrier := enginetest.NewAllReduce(len(reports), func(rank, space int) []float32 { return memory[rank][space] })
		var engines []engine.Engine
		var drains sync.WaitGroup
		for rank, r := range reports {
			e := New(r)
			engines = append(engines, e)
			drains.Go(func() {
				if err := carrier.Drain(rank, e, ErrTimeout); !errors.Is(err, ErrStopped) {
					t.Errorf("rank %d: Take ended with %v, want ErrStopped", rank, err)
				}
			})
		}
		t.Cleanup(func() { // the suite has closed the engines by then
			drains.Wait()
			carrier.Wait()
			if err := carrier.Err(); err != nil {
				t.Error(err)
			}
		})
		return engines
	})
}

// ear counts what an engine reports.
type ear struct {
	mu                 sync.Mutex
	sent, done, failed []sched.Op // only Step and Index
	cause              error
	refuse             error
}

func (r *ear) Sent(step uint64, index int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sent = append(r.sent, sched.Op{Step: step, Index: int32(index)})
}

func (r *ear) Done(step uint64, index int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done = append(r.done, sched.Op{Step: step, Index: int32(index)})
	return r.refuse
}

func (r *ear) Failed(step uint64, index int, cause error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = append(r.failed, sched.Op{Step: step, Index: int32(index)})
	r.cause = cause
}

func op(step uint64, index int32) sched.Op { return sched.Op{Step: step, Index: index} }

func TestTakeKeepsTheOrderOfSubmit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := New(&ear{})
		defer e.Close()
		var want, got []sched.Op
		most := 0 // that waited at once
		for range rapid.IntRange(1, 200).Draw(t, "turns") {
			if rapid.Bool().Draw(t, "submit") {
				var ops []sched.Op
				for range rapid.IntRange(0, 6).Draw(t, "ops") {
					ops = append(ops, op(1, int32(len(want)+len(ops))))
				}
				want = append(want, ops...)
				e.Submit(ops)
			} else if o, err := e.Take(0); err == nil {
				got = append(got, o)
			} else if !errors.Is(err, ErrTimeout) || len(got) != len(want) {
				t.Fatalf("Take: %v with %d of %d taken", err, len(got), len(want))
			}
			most = max(most, len(want)-len(got))
		}
		for len(got) < len(want) {
			o, err := e.Take(0)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, o)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("took %v, want %v", got, want)
		}
	})
}

// A queue that always holds something must not remember what was taken.
func TestQueueStaysAsLongAsWhatWaits(t *testing.T) {
	e := New(&ear{})
	defer e.Close()
	next := int32(0)
	const waiting = 8
	for ; next < waiting; next++ {
		e.Submit([]sched.Op{op(1, next)})
	}
	for range 100_000 {
		e.Submit([]sched.Op{op(1, next)})
		next++
		if o, err := e.Take(0); err != nil || o.Index != next-waiting-1 {
			t.Fatalf("took %v, %v, want %d", o, err, next-waiting-1)
		}
	}
	if c := cap(e.queue); c > 8*waiting {
		t.Errorf("room for %d operations is held for %d that wait", c, waiting)
	}
}

func TestAnswers(t *testing.T) {
	r := &ear{}
	e := New(r)
	defer e.Close()
	e.Submit([]sched.Op{op(1, 0), op(1, 1), op(2, 0)})
	notUnderWay := func(err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "not under way") {
			t.Errorf("got %v, want that it is not under way", err)
		}
	}
	notUnderWay(e.Done(1, 0)) // not taken yet
	notUnderWay(e.Sent(1, 0))
	for range 3 {
		if _, err := e.Take(0); err != nil {
			t.Fatal(err)
		}
	}
	if left := e.WaitIdle(0); left != 3 {
		t.Errorf("%d are left, want 3", left)
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	check(e.Sent(1, 0))
	check(e.Done(1, 0))
	notUnderWay(e.Done(1, 0)) // once only
	notUnderWay(e.Sent(1, 0))
	notUnderWay(e.Failed(1, 0, errors.New("late")))
	notUnderWay(e.Done(1, 1<<32)) // an index that only seems to fit
	cause := errors.New("connection closed by peer")
	check(e.Failed(1, 1, cause))
	r.refuse = errors.New("no such partition")
	if err := e.Done(2, 0); !errors.Is(err, r.refuse) {
		t.Errorf("Done returned %v, want what the report returned", err)
	}
	if left := e.WaitIdle(0); left != 0 {
		t.Errorf("%d are left, want none", left)
	}
	if !slices.Equal(r.sent, []sched.Op{op(1, 0)}) || !slices.Equal(r.done, []sched.Op{op(1, 0), op(2, 0)}) ||
		!slices.Equal(r.failed, []sched.Op{op(1, 1)}) || r.cause != cause {
		t.Errorf("reported: sent %v, done %v, failed %v (%v)", r.sent, r.done, r.failed, r.cause)
	}
}

func TestTakeWaits(t *testing.T) {
	e := New(&ear{})
	defer e.Close()
	if _, err := e.Take(time.Millisecond); !errors.Is(err, ErrTimeout) {
		t.Errorf("Take of an empty queue: %v, want ErrTimeout", err)
	}
	took := make(chan error, 1)
	go func() {
		_, err := e.Take(time.Minute)
		took <- err
	}()
	e.Submit([]sched.Op{op(1, 0)})
	if err := <-took; err != nil {
		t.Errorf("Take: %v", err)
	}
}

func TestCloseEndsTakeAndKeepsAnswersQuiet(t *testing.T) {
	r := &ear{}
	e := New(r)
	e.Submit([]sched.Op{op(1, 0), op(1, 1)})
	if _, err := e.Take(0); err != nil {
		t.Fatal(err)
	}
	idle := make(chan int, 1)
	go func() { idle <- e.WaitIdle(time.Minute) }()
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Take(time.Minute); !errors.Is(err, ErrStopped) {
		t.Errorf("Take after Close: %v, want ErrStopped", err)
	}
	if err := e.Done(1, 0); err != nil {
		t.Errorf("an answer after Close: %v", err)
	}
	if left := <-idle; left != 0 {
		t.Errorf("%d operations are left, want none", left)
	}
	if len(r.done) != 0 {
		t.Errorf("reported after Close: %v", r.done)
	}

	waiting := New(r)
	took := make(chan error, 1)
	go func() {
		_, err := waiting.Take(time.Minute)
		took <- err
	}()
	time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond)
	_ = waiting.Close()
	if err := <-took; !errors.Is(err, ErrStopped) {
		t.Errorf("Take during Close: %v, want ErrStopped", err)
	}
}
