package wire

import "encoding/binary"

// NonceSize and ProofSize are the lengths of the random part and of the
// HMAC-SHA256 in the messages that open a connection.
const (
	NonceSize = 32
	ProofSize = 32
)

// Purpose says what a connection is for, so that a hello for one use is
// never accepted for another.
type Purpose uint8

// PurposeControl is the only use so far; data connections will add theirs.
const PurposeControl Purpose = 1

// Hello is the dialer's first message.
type Hello struct {
	Purpose     Purpose
	Job         string
	Rank, World uint32
	Incarnation uint64 // tells a restarted rank from its predecessor
	Connection  uint32 // number among the connections of this rank
	Nonce       [NonceSize]byte
}

// MarshalHello appends h.
func MarshalHello(dst []byte, h *Hello) []byte {
	dst = append(dst, byte(h.Purpose))
	dst = appendBytes(dst, cut(h.Job, MaxJob))
	dst = binary.LittleEndian.AppendUint32(dst, h.Rank)
	dst = binary.LittleEndian.AppendUint32(dst, h.World)
	dst = binary.LittleEndian.AppendUint64(dst, h.Incarnation)
	dst = binary.LittleEndian.AppendUint32(dst, h.Connection)
	return append(dst, h.Nonce[:]...)
}

// UnmarshalHello decodes a Hello.
func UnmarshalHello(src []byte) (Hello, error) {
	d := decoder{what: "hello", src: src}
	h := Hello{
		Purpose:     Purpose(d.uint8()),
		Job:         d.string("job", MaxJob),
		Rank:        d.uint32(),
		World:       d.uint32(),
		Incarnation: d.uint64(),
		Connection:  d.uint32(),
	}
	copy(h.Nonce[:], d.take(NonceSize))
	return h, d.end()
}

// Challenge is the listener's answer to a Hello: who it is, its nonce, and the
// proof that it knows the secret.
type Challenge struct {
	Rank        uint32
	Incarnation uint64
	Nonce       [NonceSize]byte
	Proof       [ProofSize]byte
}

// MarshalChallenge appends c.
func MarshalChallenge(dst []byte, c *Challenge) []byte {
	dst = MarshalChallengeClaim(dst, c)
	return append(dst, c.Proof[:]...)
}

// MarshalChallengeClaim appends the part of c that the proofs cover.
func MarshalChallengeClaim(dst []byte, c *Challenge) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, c.Rank)
	dst = binary.LittleEndian.AppendUint64(dst, c.Incarnation)
	return append(dst, c.Nonce[:]...)
}

// UnmarshalChallenge decodes a Challenge.
func UnmarshalChallenge(src []byte) (Challenge, error) {
	d := decoder{what: "challenge", src: src}
	c := Challenge{Rank: d.uint32(), Incarnation: d.uint64()}
	copy(c.Nonce[:], d.take(NonceSize))
	copy(c.Proof[:], d.take(ProofSize))
	return c, d.end()
}

// UnmarshalProof decodes the dialer's proof, which is the whole payload.
func UnmarshalProof(src []byte) (p [ProofSize]byte, err error) {
	d := decoder{what: "proof", src: src}
	copy(p[:], d.take(ProofSize))
	return p, d.end()
}

// RefuseCode is the machine-readable part of a refusal.
type RefuseCode uint8

// Codes below CodeIdentity are sent before the dialer has proved anything, and
// their reasons tell nothing but what the dialer sent itself.
const (
	CodeMalformed RefuseCode = 1 // not a hello, or too slow
	CodeVersion   RefuseCode = 2
	CodeSecret    RefuseCode = 3
	CodeIdentity  RefuseCode = 4 // job, world size, rank or purpose
	CodeTaken     RefuseCode = 5 // the rank is connected already
	CodeBusy      RefuseCode = 6 // no more members are wanted
)

// Refuse says why there will be no connection.
type Refuse struct {
	Code   RefuseCode
	Reason string
}

// MarshalRefuse appends r.
func MarshalRefuse(dst []byte, r *Refuse) []byte {
	return appendBytes(append(dst, byte(r.Code)), cut(r.Reason, MaxHelloReason))
}

// UnmarshalRefuse decodes a Refuse.
func UnmarshalRefuse(src []byte) (Refuse, error) {
	d := decoder{what: "refusal", src: src}
	r := Refuse{Code: RefuseCode(d.uint8()), Reason: d.string("reason", MaxHelloReason)}
	return r, d.end()
}
