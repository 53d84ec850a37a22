package model

import (
	"fmt"
	"math"
)

// Bound is T* and what it is made of, in seconds.
type Bound struct {
	// Step is T*: no schedule on one serial communication resource has a shorter steady step.
	Step float64
	// Compute is the step without communication, Communication all of a step's communication; neither is
	// ever more than Step.
	Compute       float64
	Communication float64
	// Layer is the forward position that decides Step, or -1 if computation alone does.
	Layer int
}

// LowerBound computes T* for all-reduce or co-located reducers among equal workers, where a link carries
// bytesPerSecond in each direction. With f, b, c the forward, backward and communication times of the
// layers in forward order,
//
//	T* = max( Σ(f+b), max over m of [ Σ_{j≥m}(f_j+b_j) + Σ_{i≤m} c_i ] )
//
// since between two starts of layer m's forward pass lie its own and all later layers' computation, after
// which the gradients of layers up to m have yet to be reduced. bytesPerSecond is what a TCP flow
// carries, not the nominal rate.
func LowerBound(p Profile, workers int, bytesPerSecond float64) (Bound, error) {
	if err := p.Validate(); err != nil {
		return Bound{}, err
	}
	if workers < 1 {
		return Bound{}, fmt.Errorf("model: lower bound for %d workers: want at least 1", workers)
	}
	if !(bytesPerSecond > 0) || math.IsInf(bytesPerSecond, 0) {
		return Bound{}, fmt.Errorf("model: lower bound at %v bytes a second: want a positive, finite number", bytesPerSecond)
	}
	n := float64(workers)
	secondsPerByte := 2 * (n - 1) / n / bytesPerSecond
	compute := p.ComputeSeconds()
	bound := Bound{Step: compute, Compute: compute, Layer: -1}
	later := compute // Σ_{j≥m}(f_j+b_j)
	for m, l := range p.Layers {
		bound.Communication += float64(l.Bytes()) * secondsPerByte // Σ_{i≤m} c_i
		if step := later + bound.Communication; workers > 1 && l.Bytes() > 0 && step > bound.Step {
			bound.Step, bound.Layer = step, m
		}
		later -= l.Forward + l.Backward
	}
	return bound, nil
}
