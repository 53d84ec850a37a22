package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"testing"
)

// codec decodes a payload and encodes what it got; every encoding is
// canonical, so what decodes without error encodes to the same bytes.
type codec struct {
	recode  func([]byte) ([]byte, error)
	samples [][]byte
}

func of[T any](unmarshal func([]byte) (T, error), marshal func([]byte, *T) []byte, samples ...T) codec {
	c := codec{recode: func(b []byte) ([]byte, error) {
		v, err := unmarshal(b)
		if err != nil {
			return nil, err
		}
		return marshal(nil, &v), nil
	}}
	for i := range samples {
		c.samples = append(c.samples, marshal(nil, &samples[i]))
	}
	return c
}

var someTensors = []Tensor{{Name: "conv.weight", DType: "float32", Shape: []int64{64, 3, 7, 7}}, {Name: "scale", DType: "bfloat16"}}

var codecs = map[string]codec{
	"hello":     of(UnmarshalHello, MarshalHello, Hello{}, Hello{Purpose: 1, Job: "a job", Rank: 1, World: 2, Incarnation: 3, Connection: 4}),
	"challenge": of(UnmarshalChallenge, MarshalChallenge, Challenge{}, Challenge{Rank: 1, Incarnation: 2, Nonce: [NonceSize]byte{1}}),
	"proof": of(UnmarshalProof, func(dst []byte, p *[ProofSize]byte) []byte { return append(dst, p[:]...) },
		[ProofSize]byte{}),
	"refuse": of(UnmarshalRefuse, MarshalRefuse, Refuse{}, Refuse{Code: CodeSecret, Reason: "why"}),
	"register": of(UnmarshalRegister, func(dst []byte, t *[]Tensor) []byte { return MarshalRegister(dst, *t) },
		nil, someTensors),
	"start":  of(UnmarshalStart, MarshalStart, Start{}, Start{Error: "why"}, Start{Settings: []byte("{}")}),
	"layout": of(UnmarshalLayout, MarshalLayout, Layout{}, Layout{Generation: 1, Tensors: someTensors, Order: []int32{1, 0}}),
	"open":   of(UnmarshalOpen, MarshalOpen, Open{Step: 1, Iteration: 2, Partition: 1 << 20, Credit: 1 << 30, Fusion: 1, Lanes: 4, Policy: 1, PlanHash: 99}),
	"order": of(UnmarshalOrder, func(dst []byte, o *Order) []byte {
		return append(dst, MarshalOrderFrame(nil, *o)[HeaderSize:]...)
	}, Order{Step: 1 << 40, Index: 7}),
	"absence": of(UnmarshalAbsence, MarshalAbsence, Absence{Step: 1}, Absence{Step: 2, Absent: []int32{1, 5}}),
	"lost":    of(UnmarshalLost, MarshalLost, Lost{Rank: 1}, Lost{Rank: 2, Clean: true, Reason: "why"}),
	"fail":    of(UnmarshalFail, func(dst []byte, s *string) []byte { return MarshalFail(dst, *s) }, "", "why"),
	"stamp":   of(UnmarshalStamp, func(dst []byte, n *int64) []byte { return MarshalStamp(dst, *n) }, 0, -1),
}

func fuzz(f *testing.F, name string) {
	c := codecs[name]
	for _, s := range c.samples {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		again, err := c.recode(payload)
		if err != nil {
			if !errors.Is(err, ErrPayload) {
				t.Fatalf("error %v, want one of ErrPayload", err)
			}
			return
		}
		if !bytes.Equal(again, payload) {
			t.Fatalf("decoded and encoded again it differs:\n%x\n%x", payload, again)
		}
	})
}

func FuzzHello(f *testing.F)     { fuzz(f, "hello") }
func FuzzChallenge(f *testing.F) { fuzz(f, "challenge") }
func FuzzProof(f *testing.F)     { fuzz(f, "proof") }
func FuzzRefuse(f *testing.F)    { fuzz(f, "refuse") }
func FuzzRegister(f *testing.F)  { fuzz(f, "register") }
func FuzzStart(f *testing.F)     { fuzz(f, "start") }
func FuzzLayout(f *testing.F)    { fuzz(f, "layout") }
func FuzzOpen(f *testing.F)      { fuzz(f, "open") }
func FuzzOrder(f *testing.F)     { fuzz(f, "order") }
func FuzzAbsence(f *testing.F)   { fuzz(f, "absence") }
func FuzzLost(f *testing.F)      { fuzz(f, "lost") }
func FuzzFail(f *testing.F)      { fuzz(f, "fail") }
func FuzzStamp(f *testing.F)     { fuzz(f, "stamp") }

// otherVersion makes a frame of the next protocol version.
func otherVersion(frame []byte) []byte {
	frame = bytes.Clone(frame)
	frame[1] = Version + 1
	binary.LittleEndian.PutUint32(frame[12:], crc32.Checksum(frame[:12], castagnoli))
	return frame
}

// FuzzFrame repairs the header's checksum, or nothing would get past it.
func FuzzFrame(f *testing.F) {
	f.Add(MarshalFrame(nil, TypePing, MarshalStamp(nil, 1)), 100)
	f.Add(otherVersion(MarshalFrame(nil, TypeRefuse, nil)), 0)
	f.Fuzz(func(t *testing.T, frame []byte, limit int) {
		if len(frame) >= HeaderSize {
			frame = bytes.Clone(frame)
			binary.LittleEndian.PutUint32(frame[12:], crc32.Checksum(frame[:12], castagnoli))
		}
		limit = max(0, limit%MaxPayload)
		h, err := UnmarshalHeader(frame, limit)
		if err != nil {
			return
		}
		if h.Length > limit || h.Version != Version {
			t.Fatalf("header %+v accepted with limit %d", h, limit)
		}
		payload := frame[HeaderSize:]
		if h.CheckPayload(payload) != nil {
			return
		}
		if again := MarshalFrame(nil, h.Type, payload); !bytes.Equal(again, frame) {
			t.Fatalf("frame differs when it is made again:\n%x\n%x", frame, again)
		}
	})
}
