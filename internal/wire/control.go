package wire

import (
	"encoding/binary"
	"math"
)

// Tensor is one trainable parameter.
type Tensor struct {
	Name  string
	DType string
	Shape []int64
}

const minTensor = 12 // three empty fields

func appendTensors(dst []byte, tensors []Tensor) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(tensors)))
	for i := range tensors {
		t := &tensors[i]
		dst = appendBytes(dst, t.Name)
		dst = appendBytes(dst, t.DType)
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(t.Shape)))
		for _, n := range t.Shape {
			dst = binary.LittleEndian.AppendUint64(dst, uint64(n))
		}
	}
	return dst
}

func (d *decoder) tensors() []Tensor {
	n := d.count("tensors", MaxTensors, minTensor)
	if n == 0 {
		return nil
	}
	tensors := make([]Tensor, 0, n)
	for range n {
		t := Tensor{Name: d.string("tensor name", MaxName), DType: d.string("tensor dtype", MaxDType)}
		if dims := d.count("tensor dimensions", MaxDims, 8); dims > 0 {
			t.Shape = make([]int64, dims)
			for i := range t.Shape {
				t.Shape[i] = int64(d.uint64())
				if t.Shape[i] < 0 {
					d.fail("tensor %q has a dimension of %d", t.Name, t.Shape[i])
				}
			}
		}
		if d.err != nil {
			return nil
		}
		tensors = append(tensors, t)
	}
	return tensors
}

// indices reads a list of indices that are all below limit.
func (d *decoder) indices(name string, limit int) []int32 {
	n := d.count(name, MaxTensors, 4)
	if n == 0 {
		return nil
	}
	out := make([]int32, n)
	for i := range out {
		v := d.uint32()
		if uint64(v) >= uint64(limit) {
			d.fail("%s: index %d, want one below %d", name, v, limit)
			return nil
		}
		out[i] = int32(v)
	}
	return out
}

func appendIndices(dst []byte, indices []int32) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(indices)))
	for _, v := range indices {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(v))
	}
	return dst
}

// MarshalRegister appends the tensors of a rank in registration order.
func MarshalRegister(dst []byte, tensors []Tensor) []byte {
	return appendTensors(dst, tensors)
}

// UnmarshalRegister decodes what MarshalRegister appended.
func UnmarshalRegister(src []byte) ([]Tensor, error) {
	d := decoder{what: "register", src: src}
	tensors := d.tensors()
	return tensors, d.end()
}

// Start ends the joining: with an error, or with the leader's settings.
type Start struct {
	Error    string // why the job can't start; empty when it does
	Settings []byte
}

// MarshalStart appends s.
func MarshalStart(dst []byte, s *Start) []byte {
	return appendBytes(appendBytes(dst, cut(s.Error, MaxReason)), s.Settings)
}

// UnmarshalStart decodes a Start. The settings are a copy.
func UnmarshalStart(src []byte) (Start, error) {
	d := decoder{what: "start", src: src}
	s := Start{Error: d.string("error", MaxReason)}
	s.Settings = append(s.Settings, d.bytes("settings", MaxSettings)...)
	return s, d.end()
}

// Layout is the tensors and their forward order, in force from Generation on.
type Layout struct {
	Generation uint32
	Tensors    []Tensor
	Order      []int32 // indices into Tensors, each exactly once
}

// MarshalLayout appends l.
func MarshalLayout(dst []byte, l *Layout) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, l.Generation)
	return appendIndices(appendTensors(dst, l.Tensors), l.Order)
}

// UnmarshalLayout decodes a Layout and checks that Order is a permutation.
func UnmarshalLayout(src []byte) (Layout, error) {
	d := decoder{what: "layout", src: src}
	l := Layout{Generation: d.uint32(), Tensors: d.tensors()}
	l.Order = d.indices("forward order", len(l.Tensors))
	if d.err == nil {
		if i := FirstNotPermuted(l.Order, len(l.Tensors)); i >= 0 {
			d.fail("forward order of %d tensors has %d entries and breaks at entry %d", len(l.Tensors), len(l.Order), i)
		}
	}
	return l, d.end()
}

// FirstNotPermuted returns the position of the first entry that keeps order
// from being a permutation of 0 to n-1 (len(order) when it is too short), or -1.
func FirstNotPermuted(order []int32, n int) int {
	seen := make([]bool, n)
	for i, v := range order {
		if v < 0 || int(v) >= n || seen[v] {
			return i
		}
		seen[v] = true
	}
	if len(order) != n {
		return len(order)
	}
	return -1
}

// Open opens a step under a configuration.
type Open struct {
	Generation      uint32
	Step, Iteration uint64
	Partition       int64
	Credit          int64
	Fusion          int64
	Lanes           uint32
	Policy          uint8
	PlanHash        uint64
}

// MarshalOpen appends o.
func MarshalOpen(dst []byte, o *Open) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, o.Generation)
	dst = binary.LittleEndian.AppendUint64(dst, o.Step)
	dst = binary.LittleEndian.AppendUint64(dst, o.Iteration)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(o.Partition))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(o.Credit))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(o.Fusion))
	dst = binary.LittleEndian.AppendUint32(dst, o.Lanes)
	dst = append(dst, o.Policy)
	return binary.LittleEndian.AppendUint64(dst, o.PlanHash)
}

// UnmarshalOpen decodes an Open. Sizes are not negative; what else a
// configuration must hold is for the scheduler to say.
func UnmarshalOpen(src []byte) (Open, error) {
	d := decoder{what: "open", src: src}
	o := Open{
		Generation: d.uint32(),
		Step:       d.uint64(),
		Iteration:  d.uint64(),
		Partition:  int64(d.uint64()),
		Credit:     int64(d.uint64()),
		Fusion:     int64(d.uint64()),
		Lanes:      d.uint32(),
		Policy:     d.uint8(),
		PlanHash:   d.uint64(),
	}
	if o.Partition < 0 || o.Credit < 0 || o.Fusion < 0 {
		d.fail("partition %d, credit %d, fusion %d: none may be negative", o.Partition, o.Credit, o.Fusion)
	}
	if o.Lanes > math.MaxInt32 {
		d.fail("%d lanes", o.Lanes)
	}
	return o, d.end()
}

// Order is the next partition to issue.
type Order struct {
	Step  uint64
	Index int32
}

// OrderFrameSize is the length of a framed Order.
const OrderFrameSize = HeaderSize + 12

// MarshalOrderFrame appends o with its header. Orders are the messages that
// are sent by the thousand, so they have no step in between.
func MarshalOrderFrame(dst []byte, o Order) []byte {
	start := len(dst)
	dst = BeginFrame(dst)
	dst = binary.LittleEndian.AppendUint64(dst, o.Step)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(o.Index))
	return EndFrame(dst, start, TypeOrder)
}

// UnmarshalOrder decodes an Order. The index is not negative; whether the plan
// has such a partition is for the receiver to check.
func UnmarshalOrder(src []byte) (Order, error) {
	if len(src) != 12 {
		return Order{}, (&decoder{what: "order", src: src}).wrongSize(12)
	}
	index := binary.LittleEndian.Uint32(src[8:])
	if index > math.MaxInt32 {
		d := decoder{what: "order"}
		d.fail("index %d", index)
		return Order{}, d.err
	}
	return Order{Step: binary.LittleEndian.Uint64(src), Index: int32(index)}, nil
}

func (d *decoder) wrongSize(want int) error {
	d.fail("%d bytes, want %d", len(d.src), want)
	return d.err
}

// Absence is a step and indices of tensors, ascending and without repetition:
// the payload of Close (absent on the sender) and Verdict (absent everywhere).
type Absence struct {
	Step   uint64
	Absent []int32
}

// MarshalAbsence appends a.
func MarshalAbsence(dst []byte, a *Absence) []byte {
	return appendIndices(binary.LittleEndian.AppendUint64(dst, a.Step), a.Absent)
}

// UnmarshalAbsence decodes an Absence.
func UnmarshalAbsence(src []byte) (Absence, error) {
	d := decoder{what: "absent tensors", src: src}
	a := Absence{Step: d.uint64()}
	a.Absent = d.indices("absent tensors", MaxTensors)
	for i := 1; i < len(a.Absent); i++ {
		if a.Absent[i] <= a.Absent[i-1] {
			d.fail("index %d follows %d, want them ascending", a.Absent[i], a.Absent[i-1])
			break
		}
	}
	return a, d.end()
}

// Lost says that a rank is gone.
type Lost struct {
	Rank   uint32
	Clean  bool // it said goodbye
	Reason string
}

// MarshalLost appends l.
func MarshalLost(dst []byte, l *Lost) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, l.Rank)
	return appendBytes(appendBool(dst, l.Clean), cut(l.Reason, MaxReason))
}

// UnmarshalLost decodes a Lost.
func UnmarshalLost(src []byte) (Lost, error) {
	d := decoder{what: "lost rank", src: src}
	l := Lost{Rank: d.uint32(), Clean: d.bool(), Reason: d.string("reason", MaxReason)}
	return l, d.end()
}

// MarshalFail appends why the sender stops.
func MarshalFail(dst []byte, reason string) []byte {
	return appendBytes(dst, cut(reason, MaxReason))
}

// UnmarshalFail decodes what MarshalFail appended.
func UnmarshalFail(src []byte) (string, error) {
	d := decoder{what: "failure", src: src}
	reason := d.string("reason", MaxReason)
	return reason, d.end()
}

// MarshalStamp appends the sender's clock, the payload of Ping and, sent back
// unchanged, of Pong.
func MarshalStamp(dst []byte, nanoseconds int64) []byte {
	return binary.LittleEndian.AppendUint64(dst, uint64(nanoseconds))
}

// UnmarshalStamp decodes what MarshalStamp appended.
func UnmarshalStamp(src []byte) (int64, error) {
	d := decoder{what: "heartbeat", src: src}
	stamp := int64(d.uint64())
	return stamp, d.end()
}
