package main

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync"

	"autobyte/internal/worker"
)

// The codes of autobyte.h.
const (
	codeOK      = 0
	codeAgain   = 1
	codeStopped = 2
	codeError   = -1
)

// instance is what a handle stands for.
type instance struct {
	worker *worker.Worker
	mu     sync.Mutex
	err    string // last error
}

// table maps handles to instances. Handles are never used twice, so that a
// stale one is an error and not somebody else's model.
type table struct {
	mu        sync.Mutex
	next      int
	instances map[int]*instance
	openErr   string
	pid       int // of the process that opened the first handle
}

var handles = table{next: 1, instances: make(map[int]*instance)}

var errForked = errors.New("this process was forked from the one that started AutoByte: " +
	"a child (a DataLoader worker, say) must not use the model's gradients or the optimizer; start it with spawn or leave training to the parent")

func (t *table) add(w *worker.Worker) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.next
	t.next++
	t.pid = os.Getpid()
	t.instances[h] = &instance{worker: w}
	return h
}

// forked returns an error in a child of the process that opened the first
// handle: the runtime's threads were not forked with it.
func (t *table) forked() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pid != 0 && t.pid != os.Getpid() {
		return errForked
	}
	return nil
}

func (t *table) get(h int) (*instance, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	in := t.instances[h]
	if in == nil {
		return nil, fmt.Errorf("handle %d is not open", h)
	}
	if t.pid != os.Getpid() {
		return in, errForked
	}
	return in, nil
}

func (t *table) remove(h int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.instances, h)
}

// fail stores an error where ab_errmsg finds it and returns its code.
func (t *table) fail(h int, err error) int {
	switch {
	case errors.Is(err, worker.ErrAgain):
		return codeAgain
	case errors.Is(err, worker.ErrStopped):
		return codeStopped
	}
	t.mu.Lock()
	in := t.instances[h]
	if in == nil {
		t.openErr = err.Error()
	}
	t.mu.Unlock()
	if in != nil {
		in.mu.Lock()
		in.err = err.Error()
		in.mu.Unlock()
	}
	return codeError
}

func (t *table) message(h int) string {
	t.mu.Lock()
	in, open := t.instances[h], t.openErr
	t.mu.Unlock()
	if in == nil {
		return open
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.err
}

// call runs f on a handle's worker, and turns its error, a bad handle or a
// panic into a code: nothing may unwind into C.
func call(h int, f func(*worker.Worker) error) (code int) {
	defer func() {
		if r := recover(); r != nil {
			code = handles.fail(h, fmt.Errorf("internal error: %v\n%s", r, debug.Stack()))
		}
	}()
	in, err := handles.get(h)
	if err == nil {
		err = f(in.worker)
	}
	if err != nil {
		return handles.fail(h, err)
	}
	return codeOK
}
