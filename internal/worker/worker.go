// Package worker assembles one rank: it joins the scheduler, the engine and
// the control plane, and is the only place that owns their goroutines and
// their shutdown. All methods of Worker may be called concurrently, except
// that Ready, Close and SetTensors belong to the one thread that trains.
//
// Nothing here waits longer than it is told: a method that takes a wait
// returns ErrAgain when the time is over, so that the host program can look at
// its signals and call again.
package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"autobyte/internal/control"
	"autobyte/internal/engine/external"
	"autobyte/internal/sched"
)

// ErrAgain says that what was waited for has not happened yet.
var ErrAgain = errors.New("not yet")

// ErrStopped says that the worker was shut down.
var ErrStopped = errors.New("this rank has shut AutoByte down")

// DefaultTimeout is how long a peer may be silent before it counts as lost.
const DefaultTimeout = 60 * time.Second

// leader is the rank that decides the order.
const leader = 0

// Tensor is one trainable parameter, as this rank has it.
type Tensor struct {
	Name  string  `json:"name"`
	DType string  `json:"dtype"`
	Shape []int64 `json:"shape"`
	Bytes int64   `json:"bytes"`
	Space int     `json:"space"` // which flat buffer its gradient lives in
}

// Options configure one rank.
type Options struct {
	Rank        int           `json:"rank"`
	World       int           `json:"world"`
	Job         string        `json:"job"`         // equal on all ranks of one wrapped model
	Incarnation uint64        `json:"incarnation"` // grows when the job is restarted
	TimeoutS    float64       `json:"timeout_s"`   // seconds; 0 means DefaultTimeout
	Port        int           `json:"port"`        // rank 0: 0 means any free port
	Interface   string        `json:"interface"`   // rank 0: "" means all
	Settings    Settings      `json:"settings"`    // rank 0's win
	Tensors     []Tensor      `json:"tensors"`     // registration order
	Log         *slog.Logger  `json:"-"`           // nil discards
	timeout     time.Duration // TimeoutS, checked
}

func (o *Options) validate() error {
	if o.World < 2 {
		return fmt.Errorf("world size is %d; a worker needs at least 2 ranks (with 1 there is nothing to communicate)", o.World)
	}
	if o.Rank < 0 || o.Rank >= o.World {
		return fmt.Errorf("rank is %d; it must be from 0 to %d", o.Rank, o.World-1)
	}
	if !(o.TimeoutS >= 0 && o.TimeoutS <= 1e7) {
		return fmt.Errorf("timeout is %g s; it must be above 0 (0 means %s)", o.TimeoutS, DefaultTimeout)
	}
	o.timeout = time.Duration(o.TimeoutS * float64(time.Second))
	if o.TimeoutS == 0 {
		o.timeout = DefaultTimeout
	}
	if o.Log == nil {
		o.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	return nil
}

// Worker is one rank of one wrapped model.
type Worker struct {
	opt        Options
	engine     *external.Engine
	rendezvous Rendezvous
	cancel     context.CancelFunc
	ctx        context.Context
	joining    atomic.Bool   // Join was called
	joined     chan struct{} // closed when joining ended, well or badly

	mu      sync.Mutex
	group   *control.Group // nil until connected
	changed chan struct{}  // closed and replaced at every change that someone may wait for
	waiters []*waiter

	settings Settings // in force from the next pass on, at the leader
	retunes  []retune

	generation uint32
	layouts    []control.Layout // announced by the leader, not yet used
	layout     *sched.Layout
	tensors    []Tensor // registration order
	forward    []int32  // registration index -> forward position
	registered []int32  // forward position -> registration index
	plans      map[sched.Config]*sched.Plan

	sched     *sched.Scheduler
	events    []control.Event  // follower: what the leader said and can't be applied yet
	pass      uint64           // number of the last pass that began here; 0 before the first
	older     uint64           // the last pass that began under an older layout
	opened    uint64           // highest step that sched has opened
	inPass    bool             // gradients of pass may still come
	lastPass  []uint64         // by forward position: the pass it last took part in
	iteration uint64           // optimizer iterations ended here
	spans     [spanRing]span   // by step modulo: what is known of it
	verdicts  map[uint64][]int // by pass with absent tensors here: those absent everywhere; nil until it is known

	lost      []control.Lost
	goneSince time.Time // when the first of them went
	err       error     // first failure; everything after it fails alike
	stopped   bool
	progress  time.Time // when something was last done

	ops   []sched.Op // scratch
	done  []int      // scratch
	stats counters
}

// spanRing is more than the number of steps that can be alive or announced.
const spanRing = 8

// span is what is known about one step (pass) while it lives.
type span struct {
	step            uint64
	local, leaders  uint64 // optimizer iteration, here and at the leader
	hasOwn, hasLead bool
	closed          bool
}

type waiter struct {
	tensor int
	step   uint64
	ch     chan struct{}
}

// Open makes a worker. Rank 0 listens at once; see Rendezvous and Join.
func Open(o Options) (*Worker, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	settings, err := o.Settings.withDefaults(gradientBytes(o.Tensors))
	if err != nil {
		return nil, err
	}
	w := &Worker{
		opt:      o,
		joined:   make(chan struct{}),
		changed:  make(chan struct{}),
		settings: settings,
		verdicts: make(map[uint64][]int),
		progress: time.Now(),
	}
	w.engine = external.New(reports{w})
	w.ctx, w.cancel = context.WithCancel(context.Background())
	if o.Rank == leader {
		w.group, w.rendezvous, err = control.Listen(w.controlOptions())
		if err != nil {
			w.cancel()
			return nil, err
		}
	}
	return w, nil
}

func (w *Worker) controlOptions() control.Options {
	return control.Options{
		Rank: w.opt.Rank, World: w.opt.World, Job: w.opt.Job, Incarnation: w.opt.Incarnation,
		Timeout: w.opt.timeout, Tensors: controlTensors(w.opt.Tensors), Settings: w.settings.marshal(),
		Handle: w.handle, Log: w.opt.Log, Port: w.opt.Port, Interface: w.opt.Interface,
	}
}

func controlTensors(tensors []Tensor) []control.Tensor {
	out := make([]control.Tensor, len(tensors))
	for i, t := range tensors {
		out[i] = control.Tensor{Name: t.Name, DType: t.DType, Shape: t.Shape}
	}
	return out
}

// Rendezvous is what a rank needs to find rank 0 and to be let in. It holds
// the job's secret.
type Rendezvous = control.Rendezvous

// Rendezvous is what rank 0 hands to the others through a store they share.
func (w *Worker) Rendezvous() Rendezvous { return w.rendezvous }

// Join starts to meet the other ranks; r is nil on rank 0. Call it once, then
// Joined.
func (w *Worker) Join(r *Rendezvous) error {
	if (r == nil) != (w.opt.Rank == leader) {
		return fmt.Errorf("rank %d: the rendezvous is given to every rank but rank 0", w.opt.Rank)
	}
	if w.joining.Swap(true) {
		return errors.New("Join was called before")
	}
	go func() {
		defer close(w.joined)
		defer w.recoverAsFailure("join")
		// The control plane keeps the time limit, and says at its end who is missing.
		group := w.group
		if r != nil {
			var err error
			if group, err = control.Join(w.ctx, w.controlOptions(), *r); err != nil {
				w.fail(err, false)
				return
			}
			w.mu.Lock()
			w.group = group
			w.mu.Unlock()
		}
		if err := group.Await(w.ctx); err != nil {
			w.fail(err, false)
			return
		}
		if err := w.adoptSettings(group.LeaderSettings()); err != nil {
			w.fail(err, true)
		}
	}()
	return nil
}

// Joined waits until every rank has joined and all have the same tensors.
func (w *Worker) Joined(wait time.Duration) error {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-w.joined:
	case <-timer.C:
		return ErrAgain
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failureLocked("")
}

// Stop ends the issuing: Take returns ErrStopped, waits return an
// error. It can be called more than once.
func (w *Worker) Stop() {
	w.mu.Lock()
	w.stopped = true
	w.wakeAllLocked()
	w.mu.Unlock()
	_ = w.engine.Close()
}

// Shutdown leaves the job and frees everything, within a few seconds. With
// reason == "" it says goodbye; otherwise it tells the other ranks that this
// one stops in the middle of something, and why.
func (w *Worker) Shutdown(reason string) error {
	w.Stop()
	w.cancel()
	w.mu.Lock()
	group := w.group
	w.mu.Unlock()
	var err error
	if group != nil {
		if reason == "" {
			group.Leave()
		} else {
			group.Fail(reason)
		}
		err = group.Close()
	}
	if w.joining.Load() {
		select {
		case <-w.joined:
		case <-time.After(time.Second): // stuck in the kernel
		}
	}
	w.mu.Lock()
	if late := w.group; late != nil && late != group { // joined while we were leaving
		w.mu.Unlock()
		return late.Close()
	}
	w.mu.Unlock()
	return err
}
