package control

import (
	"fmt"
	"slices"

	"autobyte/internal/wire"
)

// checkTensors keeps to what the wire can carry, so that what one rank accepts
// every rank does.
func checkTensors(tensors []Tensor) error {
	if len(tensors) > wire.MaxTensors {
		return fmt.Errorf("control: %d tensors, at most %d are allowed", len(tensors), wire.MaxTensors)
	}
	size := 0
	for i, t := range tensors {
		if len(t.Name) > wire.MaxName || len(t.DType) > wire.MaxDType || len(t.Shape) > wire.MaxDims {
			return fmt.Errorf("control: tensor %d has a name of %d bytes, a dtype of %d and %d dimensions, at most %d, %d and %d are allowed",
				i, len(t.Name), len(t.DType), len(t.Shape), wire.MaxName, wire.MaxDType, wire.MaxDims)
		}
		for _, n := range t.Shape {
			if n < 0 {
				return fmt.Errorf("control: tensor %d, %q, has a negative dimension in its shape %v", i, t.Name, t.Shape)
			}
		}
		size += 16 + len(t.Name) + len(t.DType) + 8*len(t.Shape)
	}
	if size+64 > wire.MaxPayload {
		return fmt.Errorf("control: %d tensors take %d bytes to describe, at most %d are allowed", len(tensors), size, wire.MaxPayload)
	}
	return nil
}

func toWire(tensors []Tensor) []wire.Tensor {
	out := make([]wire.Tensor, len(tensors))
	for i, t := range tensors {
		out[i] = wire.Tensor(t)
	}
	return out
}

func fromWire(tensors []wire.Tensor) []Tensor {
	out := make([]Tensor, len(tensors))
	for i, t := range tensors {
		out[i] = Tensor(t)
	}
	return out
}

func (t Tensor) equal(u Tensor) bool {
	return t.Name == u.Name && t.DType == u.DType && slices.Equal(t.Shape, u.Shape)
}

// FirstDifference says in words how rank 0's tensors differ from ours, or
// returns "" when they don't.
func FirstDifference(leaders, ours []Tensor) string {
	return firstDifference(leaders, ours, "here")
}

func firstDifference(leaders, others []Tensor, where string) string {
	for i := range min(len(leaders), len(others)) {
		a, b := leaders[i], others[i]
		if !a.equal(b) {
			return fmt.Sprintf("tensor %d is %q with shape %v and dtype %s on rank 0, and %q with shape %v and dtype %s %s",
				i, a.Name, a.Shape, a.DType, b.Name, b.Shape, b.DType, where)
		}
	}
	extra := func(t []Tensor, n int) string {
		if len(t) > n {
			return fmt.Sprintf("; the first more is tensor %d, %q with shape %v and dtype %s", n, t[n].Name, t[n].Shape, t[n].DType)
		}
		return ""
	}
	if len(leaders) != len(others) {
		return fmt.Sprintf("there are %d tensors on rank 0 and %d %s%s%s", len(leaders), len(others), where,
			extra(leaders, len(others)), extra(others, len(leaders)))
	}
	return ""
}
