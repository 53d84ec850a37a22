package wire

import "testing"

func BenchmarkMarshalOrderFrame(b *testing.B) {
	b.ReportAllocs()
	b.SetBytes(OrderFrameSize)
	var room [OrderFrameSize]byte
	for i := range b.N {
		MarshalOrderFrame(room[:0], Order{Step: 1, Index: int32(i)})
	}
}

func BenchmarkUnmarshalOrderFrame(b *testing.B) {
	b.ReportAllocs()
	b.SetBytes(OrderFrameSize)
	frame := MarshalOrderFrame(nil, Order{Step: 1, Index: 2})
	for b.Loop() {
		h, err := UnmarshalHeader(frame, MaxPayload)
		if err == nil {
			err = h.CheckPayload(frame[HeaderSize:])
		}
		if err == nil {
			_, err = UnmarshalOrder(frame[HeaderSize:])
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}
