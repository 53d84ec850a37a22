package wire

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestRoundTrip encodes each message, decodes it and compares.
func TestRoundTrip(t *testing.T) {
	for name, c := range codecs {
		f := func(payload []byte) {
			t.Helper()
			again, err := c.recode(payload)
			if err != nil {
				t.Errorf("%s: %v", name, err)
			} else if !bytes.Equal(again, payload) {
				t.Errorf("%s: decoded and encoded again it differs:\n%x\n%x", name, payload, again)
			}
		}
		for _, sample := range c.samples {
			f(sample)
		}
	}
}

func TestFieldsSurvive(t *testing.T) {
	l := Layout{Generation: 7, Tensors: []Tensor{{Name: "a.weight", DType: "float32", Shape: []int64{3, 4}}, {Name: "b"}}, Order: []int32{1, 0}}
	got, err := UnmarshalLayout(MarshalLayout(nil, &l))
	if err != nil || cmp.Diff(l, got) != "" {
		t.Errorf("layout: %v %s", err, cmp.Diff(l, got))
	}
	o := Open{Generation: 1, Step: 2, Iteration: 3, Partition: 4, Credit: 5, Fusion: 6, Lanes: 7, Policy: 8, PlanHash: 9}
	gotOpen, err := UnmarshalOpen(MarshalOpen(nil, &o))
	if err != nil || gotOpen != o {
		t.Errorf("open: %v %+v, want %+v", err, gotOpen, o)
	}
	h := Hello{Purpose: PurposeControl, Job: "job", Rank: 1, World: 2, Incarnation: 3, Connection: 4, Nonce: [NonceSize]byte{5}}
	gotHello, err := UnmarshalHello(MarshalHello(nil, &h))
	if err != nil || gotHello != h {
		t.Errorf("hello: %v %+v, want %+v", err, gotHello, h)
	}
	lost := Lost{Rank: 3, Clean: true, Reason: "why"}
	gotLost, err := UnmarshalLost(MarshalLost(nil, &lost))
	if err != nil || gotLost != lost {
		t.Errorf("lost: %v %+v, want %+v", err, gotLost, lost)
	}
}

// TestTruncated cuts every sample at every length: each cut is an error.
func TestTruncated(t *testing.T) {
	for name, c := range codecs {
		for _, sample := range c.samples {
			for n := range sample {
				if _, err := c.recode(sample[:n]); !errors.Is(err, ErrPayload) {
					t.Errorf("%s of %d bytes cut to %d: error %v, want ErrPayload", name, len(sample), n, err)
				}
			}
			if _, err := c.recode(append(bytes.Clone(sample), 0)); !errors.Is(err, ErrPayload) {
				t.Errorf("%s with a byte too many: error %v, want ErrPayload", name, err)
			}
		}
	}
}

func TestRefusedMessages(t *testing.T) {
	f := func(codec string, payload []byte, want string) {
		t.Helper()
		_, err := codecs[codec].recode(payload)
		if !errors.Is(err, ErrPayload) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", codec, err, want)
		}
	}
	two := []Tensor{{Name: "a"}, {Name: "b"}}
	f("layout", MarshalLayout(nil, &Layout{Tensors: two, Order: []int32{0, 0}}), "breaks at entry 1")
	f("layout", MarshalLayout(nil, &Layout{Tensors: two, Order: []int32{0}}), "has 1 entries")
	f("layout", MarshalLayout(nil, &Layout{Tensors: two, Order: []int32{0, 2}}), "want one below 2")
	f("register", MarshalRegister(nil, []Tensor{{Name: "w", Shape: []int64{-1}}}), "dimension of -1")
	f("register", []byte{0, 0, 4, 0}, "don't fit") // a quarter million tensors in no bytes
	f("register", []byte{0xff, 0xff, 0xff, 0xff}, "allowed")
	f("open", MarshalOpen(nil, &Open{Credit: -1}), "none may be negative")
	f("order", MarshalOrderFrame(nil, Order{Index: -1})[HeaderSize:], "index")
	f("absence", MarshalAbsence(nil, &Absence{Absent: []int32{2, 1}}), "ascending")
	f("absence", MarshalAbsence(nil, &Absence{Absent: []int32{2, 2}}), "ascending")
	f("lost", []byte{0, 0, 0, 0, 2, 0, 0, 0, 0}, "flag")
}

func TestReasonsAreCut(t *testing.T) {
	got, err := UnmarshalFail(MarshalFail(nil, strings.Repeat("é", MaxReason)))
	if err != nil || len(got) > MaxReason || strings.Trim(got, "é") != "" {
		t.Errorf("a long reason: error %v, %d bytes, rest %q", err, len(got), strings.Trim(got, "é"))
	}
}

func TestHeader(t *testing.T) {
	frame := MarshalFrame([]byte("before"), TypeFail, []byte("payload"))[len("before"):]
	h, err := UnmarshalHeader(frame, MaxPayload)
	if err != nil || h.Type != TypeFail || h.Length != 7 {
		t.Fatalf("header %+v, error %v", h, err)
	}
	if err := h.CheckPayload(frame[HeaderSize:]); err != nil {
		t.Errorf("payload: %v", err)
	}
	for i := range frame {
		for bit := range 8 {
			bad := bytes.Clone(frame)
			bad[i] ^= 1 << bit
			h, err := UnmarshalHeader(bad, MaxPayload)
			if err == nil {
				err = h.CheckPayload(bad[HeaderSize:])
			}
			if err == nil {
				t.Errorf("bit %d of byte %d flipped: no error", bit, i)
			}
		}
	}
	if _, err := UnmarshalHeader(frame, 6); !errors.Is(err, ErrTooLong) {
		t.Errorf("limit 6: error %v, want ErrTooLong", err)
	}
	if _, err := UnmarshalHeader(otherVersion(frame), MaxPayload); !errors.Is(err, ErrVersion) {
		t.Errorf("other version: error %v, want ErrVersion", err)
	}
	if _, err := UnmarshalHeader([]byte("GET / HTTP/1.1\r\n"), MaxPayload); !errors.Is(err, ErrMagic) {
		t.Errorf("http: error %v, want ErrMagic", err)
	}
}
