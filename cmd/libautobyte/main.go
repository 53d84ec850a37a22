// Command libautobyte is the C interface, built with -buildmode=c-shared. What
// each function does is said in autobyte.h, which is written by hand; the test
// in this folder compiles a C program against it. ab_x of the header is in
// guard.c, which keeps a forked child out, and calls go_x here.
package main

// #define AUTOBYTE_TYPES_ONLY
// #include "autobyte.h"
import "C"

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"time"
	"unsafe"

	"autobyte"
	"autobyte/internal/worker"
)

func main() {} // required by -buildmode=c-shared, never run

func millis(ms C.int) time.Duration { return time.Duration(ms) * time.Millisecond }

// maxText bounds a text that C hands us; a profile of a model with 10,000
// tensors is about 1 MB.
const maxText = 1 << 28

// putText fills a C buffer as autobyte.h says and returns the text's length.
func putText(text string, buf *C.char, size C.int) C.int {
	if buf != nil && size > 0 {
		dst := unsafe.Slice((*byte)(unsafe.Pointer(buf)), int(size))
		n := copy(dst[:size-1], text)
		dst[n] = 0
	}
	return C.int(len(text))
}

// textOf runs f and puts what it returns into a C buffer.
func textOf(h C.int, buf *C.char, size C.int, f func(*worker.Worker) (string, error)) C.int {
	var text string
	code := call(int(h), func(w *worker.Worker) (err error) {
		text, err = f(w)
		return err
	})
	if code != codeOK {
		return C.int(code)
	}
	return putText(text, buf, size)
}

// errNull says which argument of a call may not be NULL. It is returned before
// the call has any effect.
func errNull(name string) error { return fmt.Errorf("%s: NULL given", name) }

func parse(text *C.char, into any, what string) error {
	if text == nil {
		return fmt.Errorf("%s: NULL given, JSON expected", what)
	}
	s := C.GoString(text)
	if len(s) > maxText {
		return fmt.Errorf("%s: %d bytes of JSON given, at most %d allowed", what, len(s), maxText)
	}
	if err := json.Unmarshal([]byte(s), into); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

//export go_version
func go_version(buf *C.char, size C.int) C.int { return putText(autobyte.Version, buf, size) }

//export go_open
func go_open(options *C.char, handle *C.int) (code C.int) {
	defer func() {
		if r := recover(); r != nil {
			code = C.int(handles.fail(0, fmt.Errorf("internal error: %v\n%s", r, debug.Stack())))
		}
	}()
	var o struct {
		worker.Options
		Log bool `json:"log"`
	}
	if handle == nil {
		return C.int(handles.fail(0, errNull("handle")))
	}
	if err := parse(options, &o, "options"); err != nil {
		return C.int(handles.fail(0, err))
	}
	if o.Log {
		o.Options.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	w, err := worker.Open(o.Options)
	if err != nil {
		return C.int(handles.fail(0, err))
	}
	*handle = C.int(handles.add(w))
	return codeOK
}

//export go_rendezvous
func go_rendezvous(h C.int, buf *C.char, size C.int) C.int {
	return textOf(h, buf, size, func(w *worker.Worker) (string, error) {
		text, err := json.Marshal(w.Rendezvous())
		return string(text), err
	})
}

//export go_join
func go_join(h C.int, rendezvous *C.char) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error {
		if rendezvous == nil {
			return w.Join(nil)
		}
		var r worker.Rendezvous
		if err := parse(rendezvous, &r, "rendezvous"); err != nil {
			return err
		}
		return w.Join(&r)
	}))
}

//export go_joined
func go_joined(h, waitMS C.int) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error { return w.Joined(millis(waitMS)) }))
}

//export go_check
func go_check(h C.int, what *C.char) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error {
		if what == nil {
			return w.Check("")
		}
		return w.Check(C.GoString(what))
	}))
}

//export go_settings
func go_settings(h C.int, buf *C.char, size C.int) C.int {
	return textOf(h, buf, size, func(w *worker.Worker) (string, error) {
		text, err := json.Marshal(w.CurrentSettings())
		return string(text), err
	})
}

//export go_set_tensors
func go_set_tensors(h C.int, tensors *C.char, order *C.int32_t, orderLen C.int) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error {
		var list []worker.Tensor
		if err := parse(tensors, &list, "tensors"); err != nil {
			return err
		}
		var forward []int32
		if order != nil && orderLen > 0 {
			forward = append(forward, unsafe.Slice((*int32)(unsafe.Pointer(order)), int(orderLen))...)
		}
		return w.SetTensors(list, forward)
	}))
}

//export go_layout
func go_layout(h, waitMS C.int, offsets *C.int64_t, order *C.int32_t, tensors C.int, spaceBytes *C.int64_t, spaces C.int) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error {
		if offsets == nil || order == nil || spaceBytes == nil {
			return errNull("offsets, order or space_bytes")
		}
		info, err := w.LayoutReady(millis(waitMS))
		if err != nil {
			return err
		}
		if int(tensors) != len(info.Offsets) || int(spaces) != len(info.SpaceBytes) {
			return fmt.Errorf("room for %d tensors and %d spaces given, the layout has %d and %d",
				tensors, spaces, len(info.Offsets), len(info.SpaceBytes))
		}
		copy(unsafe.Slice((*int64)(unsafe.Pointer(offsets)), int(tensors)), info.Offsets)
		copy(unsafe.Slice((*int32)(unsafe.Pointer(order)), int(tensors)), info.Order)
		copy(unsafe.Slice((*int64)(unsafe.Pointer(spaceBytes)), int(spaces)), info.SpaceBytes)
		return nil
	}))
}

//export go_ready
func go_ready(h, tensor, waitMS C.int) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error { return w.Ready(int(tensor), millis(waitMS)) }))
}

//export go_close_pass
func go_close_pass(h, endOfStep C.int, pass *C.uint64_t, absent *C.int) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error {
		if pass == nil || absent == nil {
			return errNull("pass or absent")
		}
		p, n, err := w.Close(endOfStep != 0)
		*pass, *absent = C.uint64_t(p), C.int(n)
		return err
	}))
}

//export go_absent
func go_absent(h C.int, pass C.uint64_t, waitMS C.int, tensors *C.int32_t, limit C.int, count *C.int) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error {
		if count == nil || tensors == nil && limit > 0 {
			return errNull("tensors or count")
		}
		absent, err := w.Absent(uint64(pass), millis(waitMS))
		if err != nil {
			return err
		}
		*count = C.int(len(absent))
		if limit > 0 {
			copy(unsafe.Slice((*int32)(unsafe.Pointer(tensors)), int(limit)), absent)
		}
		return nil
	}))
}

//export go_wait
func go_wait(h, tensor, limit, waitMS C.int, run *C.int) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error {
		n, err := w.Wait(int(tensor), int(limit), millis(waitMS))
		if run != nil {
			*run = C.int(n)
		}
		return err
	}))
}

//export go_drain
func go_drain(h, waitMS C.int) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error { return w.Drain(millis(waitMS)) }))
}

//export go_next
func go_next(h, waitMS C.int, op *C.ab_op) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error {
		if op == nil {
			return errNull("op")
		}
		next, err := w.Take(millis(waitMS))
		if err != nil {
			return err
		}
		op.step, op.index, op.space = C.uint64_t(next.Step), C.int32_t(next.Index), C.int32_t(next.Space)
		op.offset, op.bytes = C.int64_t(next.Offset), C.int64_t(next.Bytes)
		return nil
	}))
}

//export go_sent
func go_sent(h C.int, step C.uint64_t, index C.int) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error { return w.Sent(uint64(step), int(index)) }))
}

//export go_done
func go_done(h C.int, step C.uint64_t, index C.int) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error { return w.Done(uint64(step), int(index)) }))
}

//export go_failed
func go_failed(h C.int, step C.uint64_t, index C.int, why *C.char) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error {
		cause := "no reason given"
		if why != nil {
			cause = C.GoString(why)
		}
		return w.Failed(uint64(step), int(index), errors.New(cause))
	}))
}

//export go_configure
func go_configure(h C.int, settings *C.char, firstPass C.uint64_t) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error {
		var change worker.Settings
		if err := parse(settings, &change, "settings"); err != nil {
			return err
		}
		return w.Configure(change, uint64(firstPass))
	}))
}

//export go_stats
func go_stats(h C.int, buf *C.char, size C.int) C.int {
	return textOf(h, buf, size, func(w *worker.Worker) (string, error) {
		text, err := json.Marshal(w.Stats())
		return string(text), err
	})
}

//export go_waiting_for
func go_waiting_for(h C.int, buf *C.char, size C.int) C.int {
	return textOf(h, buf, size, func(w *worker.Worker) (string, error) { return w.WaitingFor(), nil })
}

//export go_stop
func go_stop(h C.int) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error {
		w.Stop()
		return nil
	}))
}

//export go_wait_idle
func go_wait_idle(h, waitMS C.int, left *C.int) C.int {
	return C.int(call(int(h), func(w *worker.Worker) error {
		if left == nil {
			return errNull("left")
		}
		*left = C.int(w.WaitIdle(millis(waitMS)))
		return nil
	}))
}

//export go_shutdown
func go_shutdown(h C.int, reason *C.char) C.int {
	why := ""
	if reason != nil {
		why = C.GoString(reason)
	}
	return C.int(call(int(h), func(w *worker.Worker) error {
		defer handles.remove(int(h)) // its error, if any, is found under the handle that is gone
		return w.Shutdown(why)
	}))
}

//export go_errmsg
func go_errmsg(h C.int, buf *C.char, size C.int) C.int {
	return putText(handles.message(int(h)), buf, size)
}
