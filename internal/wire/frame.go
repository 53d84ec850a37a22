package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// Version is the protocol that this build speaks. The layout of the header and
// of Refuse is the same in every version, so that sides of different versions
// can tell each other so.
const Version = 1

// HeaderSize is the length of a frame's header. All integers are little endian:
//
//	0  magic, 0xAB
//	1  version
//	2  type
//	3  zero
//	4  length of the payload, uint32
//	8  CRC32C of the payload
//	12 CRC32C of the 12 bytes before
const HeaderSize = 16

const magic = 0xAB

// Limits on what a decoder accepts and an encoder should be given.
const (
	MaxPayload      = 8 << 20 // of a frame on an authenticated connection
	MaxHelloPayload = 1 << 10 // of a frame before authentication
	MaxTensors      = 1 << 18
	MaxName         = 4 << 10 // bytes of a tensor's name
	MaxDType        = 64
	MaxDims         = 64
	MaxJob          = 255
	MaxReason       = 2 << 10 // longer reasons are cut when they are encoded
	MaxHelloReason  = 512
	MaxSettings     = 1 << 20
)

// Type says what a frame's payload is. Types from 64 on are of
// data streams.
type Type uint8

// The types of frames. Hello to Refuse open a connection; the rest is control.
const (
	TypeHello     Type = 1 // dialer: who it is, and its nonce
	TypeChallenge Type = 2 // listener: its nonce, and the proof that it knows the secret
	TypeProof     Type = 3 // dialer: the same proof in the other direction
	TypeAccept    Type = 4 // listener: the connection is open
	TypeRefuse    Type = 5 // either side: why there will be no connection

	TypeRegister Type = 16 // follower: its tensors
	TypeStart    Type = 17 // leader: all have joined, or why the job can't start
	TypeLayout   Type = 18 // leader: forward order
	TypeOpen     Type = 19 // leader: a step and its configuration
	TypeOrder    Type = 20 // leader: the next partition to issue
	TypeClose    Type = 21 // follower: a step is closed, and which tensors never came
	TypeVerdict  Type = 22 // leader: tensors that are absent on every rank
	TypeLost     Type = 23 // leader: a rank is gone
	TypeFail     Type = 24 // either side: the sender stops because of an error
	TypeGoodbye  Type = 25 // either side: the sender is finished
	TypePing     Type = 26
	TypePong     Type = 27
)

// Errors of ReadHeader and CheckPayload. They are wrapped with what was found.
var (
	ErrMagic    = errors.New("not an AutoByte frame")
	ErrVersion  = errors.New("another protocol version")
	ErrChecksum = errors.New("checksum differs")
	ErrTooLong  = errors.New("frame too long")
	ErrPayload  = errors.New("malformed message")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Header is a decoded frame header.
type Header struct {
	Version uint8
	Type    Type
	Length  int
	Sum     uint32 // CRC32C of the payload
}

// BeginFrame appends room for a header, to which the payload is then appended
// before EndFrame is given the position where the frame begins.
func BeginFrame(dst []byte) []byte {
	return append(dst, make([]byte, HeaderSize)...)
}

// EndFrame fills in the header of the frame that begins at start and ends with
// dst. The payload must not exceed MaxPayload; the sender checks what it builds.
func EndFrame(dst []byte, start int, t Type) []byte {
	h := dst[start : start+HeaderSize]
	payload := dst[start+HeaderSize:]
	h[0], h[1], h[2], h[3] = magic, Version, byte(t), 0
	binary.LittleEndian.PutUint32(h[4:], uint32(len(payload)))
	binary.LittleEndian.PutUint32(h[8:], crc32.Checksum(payload, castagnoli))
	binary.LittleEndian.PutUint32(h[12:], crc32.Checksum(h[:12], castagnoli))
	return dst
}

// MarshalFrame appends a whole frame.
func MarshalFrame(dst []byte, t Type, payload []byte) []byte {
	start := len(dst)
	return EndFrame(append(BeginFrame(dst), payload...), start, t)
}

// UnmarshalHeader decodes the first HeaderSize bytes of src. With ErrVersion it
// returns the header too: a Refuse of another version is still understood.
func UnmarshalHeader(src []byte, maxPayload int) (Header, error) {
	if len(src) < HeaderSize {
		return Header{}, fmt.Errorf("%w: header of %d bytes, want %d", ErrPayload, len(src), HeaderSize)
	}
	if src[0] != magic {
		return Header{}, fmt.Errorf("%w: it begins with 0x%02x, want 0x%02x", ErrMagic, src[0], magic)
	}
	if got, want := crc32.Checksum(src[:12], castagnoli), binary.LittleEndian.Uint32(src[12:]); got != want {
		return Header{}, fmt.Errorf("%w: header sums to %08x and says %08x", ErrChecksum, got, want)
	}
	length := binary.LittleEndian.Uint32(src[4:])
	if uint64(length) > uint64(maxPayload) {
		return Header{}, fmt.Errorf("%w: payload of %d bytes, at most %d are allowed", ErrTooLong, length, maxPayload)
	}
	h := Header{Version: src[1], Type: Type(src[2]), Length: int(length), Sum: binary.LittleEndian.Uint32(src[8:])}
	if h.Version != Version {
		return h, fmt.Errorf("%w: the peer speaks %d, this side %d; install the same AutoByte on all ranks", ErrVersion, h.Version, Version)
	}
	if src[3] != 0 {
		return Header{}, fmt.Errorf("%w: reserved header byte is %d, want 0", ErrPayload, src[3])
	}
	return h, nil
}

// CheckPayload compares the payload with the header's checksum.
func (h Header) CheckPayload(payload []byte) error {
	if len(payload) != h.Length {
		return fmt.Errorf("%w: payload of %d bytes, header says %d", ErrPayload, len(payload), h.Length)
	}
	if got := crc32.Checksum(payload, castagnoli); got != h.Sum {
		return fmt.Errorf("%w: payload sums to %08x, header says %08x", ErrChecksum, got, h.Sum)
	}
	return nil
}
