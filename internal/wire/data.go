package wire

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// The types of frames on a data stream, beside Fail, Goodbye and Ping.
const (
	TypeContribution Type = 64 // a rank's part of a piece, to its reducer
	TypeResult       Type = 65 // the reduced piece, to a rank
	TypeSpaces       Type = 66 // the flat buffers that pieces are of
	TypeBegin        Type = 67 // a step and how it is cut
)

// PieceSize is the length of what Piece adds in front of the bytes of a
// contribution or result.
const PieceSize = 24

// MaxBlock is the most bytes that a piece has.
const MaxBlock = 1 << 20

// Limits of Spaces and Begin.
const (
	MaxSpaces  = 1 << 10
	MaxWeights = 1 << 10
	MaxWeight  = 1 << 20
)

// Piece says which bytes a data frame carries. It stands in front of them in
// the payload:
//
//	0  step, uint64
//	8  offset in the space, uint48, and the space, uint16
//	16 index of the piece in the plan, uint32
//	20 the plan's hash, folded to uint32
//
// Where sender and receiver share memory, nothing follows.
type Piece struct {
	Step   uint64
	Space  uint16
	Offset uint64 // bytes, below 1<<48
	Index  uint32
	Plan   uint32
}

// PutPiece writes the header of a data frame and p into dst, which has
// HeaderSize+PieceSize bytes. data is what follows on the stream; its checksum
// continues that of p.
func PutPiece(dst []byte, t Type, p Piece, data []byte) {
	_ = dst[HeaderSize+PieceSize-1]
	body := dst[HeaderSize:]
	binary.LittleEndian.PutUint64(body, p.Step)
	binary.LittleEndian.PutUint64(body[8:], p.Offset|uint64(p.Space)<<48)
	binary.LittleEndian.PutUint32(body[16:], p.Index)
	binary.LittleEndian.PutUint32(body[20:], p.Plan)
	sum := crc32.Update(crc32.Checksum(body[:PieceSize], castagnoli), castagnoli, data)
	dst[0], dst[1], dst[2], dst[3] = magic, Version, byte(t), 0
	binary.LittleEndian.PutUint32(dst[4:], uint32(PieceSize+len(data)))
	binary.LittleEndian.PutUint32(dst[8:], sum)
	binary.LittleEndian.PutUint32(dst[12:], crc32.Checksum(dst[:12], castagnoli))
}

// UnmarshalPiece decodes the first PieceSize bytes of src.
func UnmarshalPiece(src []byte) (Piece, error) {
	if len(src) < PieceSize {
		return Piece{}, fmt.Errorf("%w: data frame of %d bytes, want at least %d", ErrPayload, len(src), PieceSize)
	}
	where := binary.LittleEndian.Uint64(src[8:])
	return Piece{
		Step:   binary.LittleEndian.Uint64(src),
		Space:  uint16(where >> 48),
		Offset: where & (1<<48 - 1),
		Index:  binary.LittleEndian.Uint32(src[16:]),
		Plan:   binary.LittleEndian.Uint32(src[20:]),
	}, nil
}

// CheckData compares a data frame, which came as its first PieceSize bytes and
// the rest, with the header's checksum.
func (h Header) CheckData(piece, data []byte) error {
	if len(piece)+len(data) != h.Length {
		return fmt.Errorf("%w: payload of %d bytes, header says %d", ErrPayload, len(piece)+len(data), h.Length)
	}
	if got := crc32.Update(crc32.Checksum(piece, castagnoli), castagnoli, data); got != h.Sum {
		return fmt.Errorf("%w: payload sums to %08x, header says %08x", ErrChecksum, got, h.Sum)
	}
	return nil
}

// Spaces tells a reducer which tensors there are, so that it can make the same
// plans. It comes before the first step that uses them.
type Spaces struct {
	Generation uint32
	Op         uint8
	DTypes     []uint8  // of each space
	Space      []uint16 // of each tensor, in forward order
	Bytes      []uint64 // of each tensor, without padding
	Mapped     bool     // a descriptor of each space's memory comes with the frame
}

// MarshalSpaces appends the payload.
func MarshalSpaces(dst []byte, m *Spaces) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, m.Generation)
	dst = append(dst, m.Op)
	dst = appendBool(dst, m.Mapped)
	dst = appendBytes(dst, m.DTypes)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(m.Space)))
	for i, space := range m.Space {
		dst = binary.LittleEndian.AppendUint16(dst, space)
		dst = binary.LittleEndian.AppendUint64(dst, m.Bytes[i])
	}
	return dst
}

// UnmarshalSpaces decodes the payload.
func UnmarshalSpaces(src []byte) (*Spaces, error) {
	d := decoder{what: "spaces", src: src}
	m := &Spaces{Generation: d.uint32(), Op: d.uint8(), Mapped: d.bool()}
	m.DTypes = append(m.DTypes, d.bytes("spaces", MaxSpaces)...)
	n := d.count("tensors", MaxTensors, 10)
	m.Space, m.Bytes = make([]uint16, n), make([]uint64, n)
	for i := range n {
		m.Space[i] = d.uint16()
		m.Bytes[i] = d.uint64()
		if int(m.Space[i]) >= len(m.DTypes) {
			d.fail("tensor %d lies in space %d of %d", i, m.Space[i], len(m.DTypes))
		}
	}
	return m, d.end()
}

// Begin says that the sender's contributions to a step follow, and how the
// step is cut. All ranks must send the same.
type Begin struct {
	Step       uint64
	Generation uint32
	Partition  uint64
	Credit     uint64
	Fusion     uint64
	Lanes      uint32
	Policy     uint8
	Block      uint32   // bytes
	Weights    []uint32 // of each reducer; empty means equal ones
	Plan       uint64   // hash of all that
}

// MarshalBegin appends the payload.
func MarshalBegin(dst []byte, m *Begin) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, m.Step)
	dst = binary.LittleEndian.AppendUint32(dst, m.Generation)
	dst = binary.LittleEndian.AppendUint64(dst, m.Partition)
	dst = binary.LittleEndian.AppendUint64(dst, m.Credit)
	dst = binary.LittleEndian.AppendUint64(dst, m.Fusion)
	dst = binary.LittleEndian.AppendUint32(dst, m.Lanes)
	dst = append(dst, m.Policy)
	dst = binary.LittleEndian.AppendUint32(dst, m.Block)
	dst = binary.LittleEndian.AppendUint64(dst, m.Plan)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(m.Weights)))
	for _, w := range m.Weights {
		dst = binary.LittleEndian.AppendUint32(dst, w)
	}
	return dst
}

// UnmarshalBegin decodes the payload.
func UnmarshalBegin(src []byte) (*Begin, error) {
	d := decoder{what: "begin", src: src}
	m := &Begin{
		Step: d.uint64(), Generation: d.uint32(),
		Partition: d.uint64(), Credit: d.uint64(), Fusion: d.uint64(),
		Lanes: d.uint32(), Policy: d.uint8(), Block: d.uint32(), Plan: d.uint64(),
	}
	for range d.count("weights", MaxWeights, 4) {
		w := d.uint32()
		if w > MaxWeight {
			d.fail("a weight is %d, at most %d are allowed", w, MaxWeight)
		}
		m.Weights = append(m.Weights, w)
	}
	return m, d.end()
}
