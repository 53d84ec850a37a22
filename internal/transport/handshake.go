package transport

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"autobyte/internal/wire"
)

// MinSecret is the shortest secret that is accepted, in bytes.
const MinSecret = 16

// DefaultHandshake is how long the opening of a connection may take in all.
const DefaultHandshake = 10 * time.Second

// Identity is who a peer is, as it proved with the secret.
type Identity struct {
	Purpose     wire.Purpose
	Job         string
	Rank, World int
	Incarnation uint64
	Connection  uint32
}

func (id Identity) hello() wire.Hello {
	return wire.Hello{
		Purpose: id.Purpose, Job: id.Job, Rank: uint32(id.Rank), World: uint32(id.World),
		Incarnation: id.Incarnation, Connection: id.Connection,
	}
}

func identityOf(h *wire.Hello) Identity {
	return Identity{
		Purpose: h.Purpose, Job: h.Job, Rank: int(h.Rank), World: int(h.World),
		Incarnation: h.Incarnation, Connection: h.Connection,
	}
}

// Refused is the error of a connection that one side did not want.
type Refused struct {
	wire.Refuse
	FromPeer  bool // the other side refused
	Authentic bool // it had proved by then that it knows the secret
}

func (e *Refused) Error() string {
	if e.FromPeer {
		return "refused by the peer: " + e.Reason
	}
	return e.Reason
}

func refusal(code wire.RefuseCode, format string, args ...any) *Refused {
	return &Refused{Refuse: wire.Refuse{Code: code, Reason: fmt.Sprintf(format, args...)}}
}

func checkSecret(secret []byte) error {
	if len(secret) < MinSecret {
		return fmt.Errorf("secret of %d bytes, want at least %d", len(secret), MinSecret)
	}
	return nil
}

// The two roles are part of what is signed: neither side's proof is ever good
// as the other's.
const (
	roleDialer   = "autobyte dialer"
	roleListener = "autobyte listener"
)

func proof(secret []byte, role string, h *wire.Hello, c *wire.Challenge) [wire.ProofSize]byte {
	mac := hmac.New(sha256.New, secret)
	signed := append([]byte(role), 0, wire.Version)
	signed = wire.MarshalHello(signed, h)
	signed = wire.MarshalChallengeClaim(signed, c)
	mac.Write(signed)
	var sum [wire.ProofSize]byte
	mac.Sum(sum[:0])
	return sum
}

// expect reads a frame of the opening. The deadline is on the connection.
func (c *Conn) expect(want wire.Type) ([]byte, error) {
	h, err := c.read(wire.MaxHelloPayload)
	if h.Type == wire.TypeRefuse && (err == nil || errors.Is(err, wire.ErrVersion)) {
		r, err := wire.UnmarshalRefuse(c.body)
		if err != nil {
			return nil, err
		}
		return nil, &Refused{Refuse: r, FromPeer: true}
	}
	if err != nil {
		return nil, err
	}
	if h.Type != want {
		return nil, fmt.Errorf("%w: frame of type %d, want %d", wire.ErrPayload, h.Type, want)
	}
	return c.body, nil
}

func (c *Conn) send(t wire.Type, payload []byte) error {
	_, err := c.nc.Write(wire.MarshalFrame(nil, t, payload))
	return err
}

// challenge is the dialer's first half: it says who it is and makes the other
// side prove that it knows the secret. It has promised nothing by then.
func (c *Conn) challenge(secret []byte, self Identity) (h wire.Hello, ch wire.Challenge, err error) {
	h = self.hello()
	rand.Read(h.Nonce[:])
	if err := c.send(wire.TypeHello, wire.MarshalHello(nil, &h)); err != nil {
		return h, ch, err
	}
	payload, err := c.expect(wire.TypeChallenge)
	if err != nil {
		return h, ch, err
	}
	if ch, err = wire.UnmarshalChallenge(payload); err != nil {
		return h, ch, err
	}
	want := proof(secret, roleListener, &h, &ch)
	if !hmac.Equal(want[:], ch.Proof[:]) {
		r := refusal(wire.CodeSecret, "the secrets of the two sides differ")
		c.refuse(r)
		return h, ch, r
	}
	return h, ch, nil
}

// prove is the dialer's second half: its own proof, and the answer.
func (c *Conn) prove(secret []byte, h *wire.Hello, ch *wire.Challenge) error {
	p := proof(secret, roleDialer, h, ch)
	if err := c.send(wire.TypeProof, p[:]); err != nil {
		return err
	}
	_, err := c.expect(wire.TypeAccept)
	var refused *Refused
	if errors.As(err, &refused) {
		refused.Authentic = true
	}
	return err
}

// answer is the listener's part up to the dialer's proof. The peer is told
// nothing but what it sent, until it has proved that it knows the secret.
func (c *Conn) answer(secret []byte, self Identity) (Identity, error) {
	payload, err := c.expect(wire.TypeHello)
	if err != nil {
		return Identity{}, err
	}
	h, err := wire.UnmarshalHello(payload)
	if err != nil {
		return Identity{}, err
	}
	ch := wire.Challenge{Rank: uint32(self.Rank), Incarnation: self.Incarnation}
	rand.Read(ch.Nonce[:])
	ch.Proof = proof(secret, roleListener, &h, &ch)
	if err := c.send(wire.TypeChallenge, wire.MarshalChallenge(nil, &ch)); err != nil {
		return Identity{}, err
	}
	if payload, err = c.expect(wire.TypeProof); err != nil {
		return Identity{}, err
	}
	got, err := wire.UnmarshalProof(payload)
	if err != nil {
		return Identity{}, err
	}
	want := proof(secret, roleDialer, &h, &ch)
	if !hmac.Equal(want[:], got[:]) {
		return Identity{}, refusal(wire.CodeSecret, "the secrets of the two sides differ")
	}
	return identityOf(&h), nil
}

// belongs says whether an authenticated peer is of the listener's job.
func (id Identity) belongs(self Identity) *Refused {
	switch {
	case id.Purpose != self.Purpose:
		return refusal(wire.CodeIdentity, "connection of purpose %d, this listener takes %d", id.Purpose, self.Purpose)
	case id.Job != self.Job:
		return refusal(wire.CodeIdentity, "rank %d belongs to job %q, rank %d to job %q", id.Rank, id.Job, self.Rank, self.Job)
	case id.World != self.World:
		return refusal(wire.CodeIdentity, "rank %d was started for a world size of %d, rank %d for %d", id.Rank, id.World, self.Rank, self.World)
	case id.Rank < 0 || id.Rank >= self.World || id.Rank == self.Rank:
		return refusal(wire.CodeIdentity, "rank %d: want a rank below %d other than %d", id.Rank, self.World, self.Rank)
	}
	return nil
}

// refuse tells the peer why, if it still listens, and lets it read that before
// the connection goes: what it has sent is read for a moment.
func (c *Conn) refuse(r *Refused) {
	deadline := time.Now().Add(refuseLinger)
	c.nc.SetDeadline(deadline)
	if c.send(wire.TypeRefuse, wire.MarshalRefuse(nil, &r.Refuse)) != nil {
		return
	}
	c.CloseWrite()
	var scrap [512]byte
	for total := 0; total < readBuffer; {
		n, err := c.nc.Read(scrap[:])
		if err != nil {
			return
		}
		total += n
	}
}

// refuseLinger bounds what a refused peer can cost.
const refuseLinger = 500 * time.Millisecond

// refusalOf says in the peer's words what was wrong with its opening, or nil
// when there is nobody to tell.
func refusalOf(err error, limit time.Duration) *Refused {
	var refused *Refused
	switch {
	case errors.As(err, &refused):
		return refused
	case err == nil:
		return nil
	case errors.Is(err, wire.ErrVersion):
		return refusal(wire.CodeVersion, "this side speaks protocol version %d and refuses others; install the same AutoByte on all ranks", wire.Version)
	case errors.Is(err, wire.ErrMagic), errors.Is(err, wire.ErrChecksum), errors.Is(err, wire.ErrTooLong), errors.Is(err, wire.ErrPayload):
		return refusal(wire.CodeMalformed, "this is not how AutoByte opens a connection")
	case isTimeout(err):
		return refusal(wire.CodeMalformed, "the opening of the connection was not finished within %v", limit)
	}
	var other net.Error
	if errors.As(err, &other) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) {
		return nil // there is nobody to tell
	}
	return refusal(wire.CodeBusy, "%s", err) // of Admit
}

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}
