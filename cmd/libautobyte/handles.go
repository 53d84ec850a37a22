package main

import (
	"errors"
	"fmt"
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
}

var handles = table{next: 1, instances: make(map[int]*instance)}

func (t *table) add(w *worker.Worker) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.next
	t.next++
	t.instances[h] = &instance{worker: w}
	return h
}

func (t *table) get(h int) (*instance, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	in := t.instances[h]
	if in == nil {
		return nil, fmt.Errorf("handle %d is not open", h)
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
