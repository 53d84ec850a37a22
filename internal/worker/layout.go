package worker

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"autobyte/internal/control"
	"autobyte/internal/sched"
)

// LayoutInfo says where each tensor's gradient lies.
type LayoutInfo struct {
	Offsets    []int64 // bytes from the start of its space, by registration index
	SpaceBytes []int64 // size of each space's flat buffer
	Order      []int32 // registration indices in forward order
}

// SetTensors begins a new generation of the layout: the tensors of this rank
// in registration order and, at the leader, their registration indices in
// forward order. Nothing may be under way. LayoutReady tells the outcome.
func (w *Worker) SetTensors(tensors []Tensor, order []int32) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.failureLocked(""); err != nil {
		return err
	}
	select {
	case <-w.joined:
	default: // what rank 0 announced now would reach nobody
		return errors.New("SetTensors before Joined")
	}
	if w.inPass || (w.sched != nil && w.sched.Alive() > 0) {
		return errors.New("the layout can't change while gradients are under way: close the pass and drain first")
	}
	w.tensors = slices.Clone(tensors)
	w.generation++
	w.layout, w.sched = nil, nil
	clear(w.plans)
	if w.opt.Rank != leader {
		return nil
	}
	if err := checkOrder(order, len(tensors)); err != nil {
		return err
	}
	if err := w.installLocked(order); err != nil {
		return err
	}
	w.group.SendLayout(control.Layout{Generation: w.generation, Tensors: controlTensors(tensors), Order: order})
	return nil
}

// checkOrder demands a permutation of 0..n-1.
func checkOrder(order []int32, n int) error {
	if len(order) != n {
		return fmt.Errorf("forward order has %d entries for %d tensors", len(order), n)
	}
	seen := make([]bool, n)
	for _, i := range order {
		if i < 0 || int(i) >= n || seen[i] {
			return fmt.Errorf("forward order is not a permutation of the tensors: %d", i)
		}
		seen[i] = true
	}
	return nil
}

// LayoutReady waits for the layout of the current generation. On a follower
// that takes the leader's first gradient.
func (w *Worker) LayoutReady(wait time.Duration) (LayoutInfo, error) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		w.mu.Lock()
		if err := w.failureLocked(""); err != nil {
			w.mu.Unlock()
			return LayoutInfo{}, err
		}
		if w.generation == 0 {
			w.mu.Unlock()
			return LayoutInfo{}, errors.New("LayoutReady before SetTensors")
		}
		if w.layout == nil {
			if err := w.takeLayoutLocked(); err != nil {
				w.mu.Unlock()
				w.fail(err, true)
				return LayoutInfo{}, err
			}
		}
		if w.layout != nil {
			info := w.infoLocked()
			w.pumpLocked()
			w.mu.Unlock()
			return info, nil
		}
		changed := w.changed
		w.mu.Unlock()
		select {
		case <-changed:
		case <-timer.C:
			return LayoutInfo{}, ErrAgain
		}
	}
}

// takeLayoutLocked installs the leader's layout of this generation, if it has
// been announced.
func (w *Worker) takeLayoutLocked() error {
	for i, l := range w.layouts {
		if l.Generation != w.generation {
			continue
		}
		w.layouts = slices.Delete(w.layouts, i, i+1)
		if diff := control.FirstDifference(l.Tensors, controlTensors(w.tensors)); diff != "" {
			return fmt.Errorf("rank %d and rank 0 don't have the same trainable parameters: %s", w.opt.Rank, diff)
		}
		if err := checkOrder(l.Order, len(w.tensors)); err != nil {
			return fmt.Errorf("rank 0's layout is wrong: %w", err)
		}
		return w.installLocked(l.Order)
	}
	return nil
}

func (w *Worker) installLocked(order []int32) error {
	tensors := make([]sched.Tensor, len(order))
	w.forward = make([]int32, len(order))
	w.registered = slices.Clone(order)
	for position, i := range order {
		tensors[position] = sched.Tensor{Space: w.tensors[i].Space, Bytes: w.tensors[i].Bytes}
		w.forward[i] = int32(position)
	}
	layout, err := sched.NewLayout(tensors)
	if err != nil {
		return err
	}
	role := sched.Follower
	if w.opt.Rank == leader {
		role = sched.Leader
	}
	w.layout = layout
	w.sched = sched.New(layout, role)
	w.plans = make(map[sched.Config]*sched.Plan)
	w.lastPass = make([]uint64, len(order))
	w.opened, w.older = w.pass, w.pass
	return nil
}

func (w *Worker) infoLocked() LayoutInfo {
	info := LayoutInfo{
		Offsets:    make([]int64, len(w.forward)),
		SpaceBytes: make([]int64, w.layout.Spaces()),
		Order:      slices.Clone(w.registered),
	}
	for i, position := range w.forward {
		info.Offsets[i] = w.layout.Offset(int(position))
	}
	for s := range info.SpaceBytes {
		info.SpaceBytes[s] = w.layout.SpaceBytes(s)
	}
	return info
}

// maxPlans bounds the plans that are kept for configurations used before.
const maxPlans = 8

func (w *Worker) planLocked(c sched.Config) (*sched.Plan, error) {
	if p := w.plans[c]; p != nil {
		return p, nil
	}
	p, err := sched.NewPlan(w.layout, c)
	if err != nil {
		return nil, err
	}
	if len(w.plans) >= maxPlans {
		clear(w.plans)
	}
	w.plans[c] = p
	return p, nil
}
