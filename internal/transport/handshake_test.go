package transport

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"autobyte/internal/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var theSecret = bytes.Repeat([]byte{7}, 32)

func rank(r int) Identity {
	return Identity{Purpose: wire.PurposeControl, Job: "job", Rank: r, World: 3, Incarnation: 1}
}

// networks runs a test on TCP over loopback and in memory.
func networks(t *testing.T, f func(t *testing.T, n Network)) {
	t.Run("tcp", func(t *testing.T) { t.Parallel(); f(t, TCP{}) })
	t.Run("memory", func(t *testing.T) { t.Parallel(); f(t, &Memory{}) })
}

// served is a server of rank 0 that keeps what it opens and what it logs.
type served struct {
	*Server
	network Network
	addr    string
	opened  chan *Conn
	log     *lockedBuffer

	mu    sync.Mutex
	taken map[int]bool
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func serve(t *testing.T, n Network, o ServerOptions) *served {
	t.Helper()
	l, err := n.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &served{network: n, addr: l.Addr().String(), opened: make(chan *Conn, 16), log: &lockedBuffer{}, taken: map[int]bool{}}
	o.Self, o.Secret, o.Log = rank(0), theSecret, slog.New(slog.NewTextHandler(s.log, nil))
	o.Admit = func(id Identity) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.taken[id.Rank] {
			return &Refused{Refuse: wire.Refuse{Code: wire.CodeTaken, Reason: "the rank has joined already"}}
		}
		s.taken[id.Rank] = true
		return nil
	}
	o.Serve = func(c *Conn, id Identity) {
		t.Cleanup(func() { c.Close() })
		s.opened <- c
	}
	if s.Server, err = NewServer(l, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func (s *served) dial(t *testing.T, id Identity, secret []byte) (*Conn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, err := Dialer{Self: id, Secret: secret, Network: s.network}.Dial(ctx, []string{s.addr})
	if err == nil {
		t.Cleanup(func() { c.Close() })
	}
	return c, err
}

// mustOpen checks that an honest rank is let in and that bytes pass.
func (s *served) mustOpen(t *testing.T, r int) {
	t.Helper()
	near, err := s.dial(t, rank(r), theSecret)
	if err != nil {
		t.Fatalf("rank %d: %v", r, err)
	}
	var far *Conn
	select {
	case far = <-s.opened:
	case <-time.After(20 * time.Second):
		t.Fatalf("rank %d is open here and never was there", r)
	}
	for _, way := range [][2]*Conn{{near, far}, {far, near}} {
		if err := way[0].WriteFrame(wire.TypeFail, []byte("hello"), 10*time.Second); err != nil {
			t.Fatal(err)
		}
		typ, payload, err := way[1].ReadFrame(10 * time.Second)
		if err != nil || typ != wire.TypeFail || string(payload) != "hello" {
			t.Fatalf("got type %d, %q, error %v", typ, payload, err)
		}
	}
}

// mustLog waits for a line of the server's log, since both sides say why.
func (s *served) mustLog(t *testing.T, want string) {
	t.Helper()
	for range 2000 {
		if strings.Contains(s.log.String(), want) {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Errorf("the server's log has no %q:\n%s", want, s.log)
}

func TestOpens(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		s := serve(t, n, ServerOptions{})
		s.mustOpen(t, 1)
		s.mustOpen(t, 2)
	})
}

// TestRefused: whoever is of another kind is told why, and the server says it.
func TestRefused(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		s := serve(t, n, ServerOptions{})
		f := func(change func(*Identity), secret []byte, code wire.RefuseCode, authentic bool, want, logged string) {
			t.Helper()
			id := rank(2)
			change(&id)
			_, err := s.dial(t, id, secret)
			var r *Refused
			if !errors.As(err, &r) || r.Code != code || r.Authentic != authentic || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v (%+v), want code %d with %q", err, r, code, want)
			}
			s.mustLog(t, logged)
		}
		same := func(*Identity) {}
		f(same, bytes.Repeat([]byte{8}, 32), wire.CodeSecret, false, "secrets of the two sides differ", "secrets of the two sides differ")
		f(func(id *Identity) { id.Job = "other" }, theSecret, wire.CodeIdentity, true, `belongs to job "other"`, `belongs to job`)
		f(func(id *Identity) { id.World = 4 }, theSecret, wire.CodeIdentity, true, "world size of 4", "world size of 4")
		f(func(id *Identity) { id.Rank = 3 }, theSecret, wire.CodeIdentity, true, "rank 3: want a rank below 3", "rank 3: want")
		f(func(id *Identity) { id.Rank = 0 }, theSecret, wire.CodeIdentity, true, "rank 0: want", "rank 0: want")
		f(func(id *Identity) { id.Purpose = 9 }, theSecret, wire.CodeIdentity, true, "purpose 9", "purpose 9")
		s.mustOpen(t, 1)
		f(func(id *Identity) { id.Rank = 1 }, theSecret, wire.CodeTaken, true, "joined already", "joined already")
		if _, err := s.dial(t, rank(2), []byte("short")); err == nil || !strings.Contains(err.Error(), "at least 16") {
			t.Errorf("a short secret: %v", err)
		}
		s.mustOpen(t, 2)
	})
}

// raw is a connection of a client that does not keep to the rules.
func (s *served) raw(t *testing.T) *Conn {
	t.Helper()
	nc, err := s.network.Dial(t.Context(), s.addr)
	if err != nil {
		t.Fatal(err)
	}
	nc.SetDeadline(time.Now().Add(20 * time.Second))
	t.Cleanup(func() { nc.Close() })
	return NewConn(nc)
}

// mustBeRefused reads the server's refusal and the end of the connection.
func mustBeRefused(t *testing.T, c *Conn, code wire.RefuseCode) {
	t.Helper()
	_, err := c.expect(0)
	var r *Refused
	if !errors.As(err, &r) || r.Code != code {
		t.Errorf("got %v, want a refusal with code %d", err, code)
		return
	}
	if strings.Contains(r.Reason, "job") || strings.Contains(r.Reason, string(theSecret)) {
		t.Errorf("the refusal tells too much: %q", r.Reason)
	}
	if _, err := c.expect(0); !errors.Is(err, io.EOF) {
		t.Errorf("after the refusal: %v, want EOF", err)
	}
}

func TestGarbage(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		s := serve(t, n, ServerOptions{Handshake: 300 * time.Millisecond})
		hello := rank(1).hello()
		frame := wire.MarshalFrame(nil, wire.TypeHello, wire.MarshalHello(nil, &hello))
		f := func(sent []byte, code wire.RefuseCode, logged string) {
			t.Helper()
			c := s.raw(t)
			if _, err := c.nc.Write(sent); err != nil {
				t.Fatal(err)
			}
			mustBeRefused(t, c, code)
			s.mustLog(t, logged)
		}
		f([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), wire.CodeMalformed, "not an AutoByte frame")
		f(nil, wire.CodeMalformed, "silent or too slow")
		f(frame[:len(frame)-1], wire.CodeMalformed, "silent or too slow")
		f(wire.MarshalFrame(nil, wire.TypeOrder, nil), wire.CodeMalformed, "frame of type 20, want 1")
		f(wire.MarshalFrame(nil, wire.TypeHello, []byte("short")), wire.CodeMalformed, "malformed message: hello")
		f(wire.MarshalFrame(nil, wire.TypeHello, make([]byte, wire.MaxHelloPayload+1)), wire.CodeMalformed, "frame too long")
		f(wire.MarshalFrame(nil, wire.TypeProof, make([]byte, wire.ProofSize)), wire.CodeMalformed, "frame of type 3, want 1")
		old := bytes.Clone(frame)
		old[1] = wire.Version + 1
		binary.LittleEndian.PutUint32(old[12:], crc32.Checksum(old[:12], crc32.MakeTable(crc32.Castagnoli)))
		f(old, wire.CodeVersion, "another protocol version")
		s.mustOpen(t, 1)
	})
}

// TestOldServer: a client learns of a server of another version why it is not
// wanted, although all its frames have that version.
func TestOldServer(t *testing.T) {
	n := &Memory{}
	l, err := n.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		nc.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := NewConn(nc).expect(wire.TypeHello); err != nil {
			t.Errorf("the client's hello: %v", err)
		}
		r := wire.Refuse{Code: wire.CodeVersion, Reason: "this side speaks protocol version 2"}
		frame := wire.MarshalFrame(nil, wire.TypeRefuse, wire.MarshalRefuse(nil, &r))
		frame[1] = wire.Version + 1
		binary.LittleEndian.PutUint32(frame[12:], crc32.Checksum(frame[:12], crc32.MakeTable(crc32.Castagnoli)))
		nc.Write(frame)
	}()
	_, err = Dialer{Self: rank(1), Secret: theSecret, Network: n}.Dial(t.Context(), []string{l.Addr().String()})
	var r *Refused
	if !errors.As(err, &r) || r.Code != wire.CodeVersion || !strings.Contains(err.Error(), "speaks protocol version 2") {
		t.Errorf("got %v", err)
	}
}

// TestReflection sends the server's own proof back to it.
func TestReflection(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		s := serve(t, n, ServerOptions{})
		c := s.raw(t)
		hello := rank(1).hello()
		if err := c.send(wire.TypeHello, wire.MarshalHello(nil, &hello)); err != nil {
			t.Fatal(err)
		}
		payload, err := c.expect(wire.TypeChallenge)
		if err != nil {
			t.Fatal(err)
		}
		ch, err := wire.UnmarshalChallenge(payload)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.send(wire.TypeProof, ch.Proof[:]); err != nil {
			t.Fatal(err)
		}
		mustBeRefused(t, c, wire.CodeSecret)
		s.mustOpen(t, 1)
	})
}

// recorder keeps what the dialer wrote.
type recorder struct {
	Network
	sent *bytes.Buffer
}

type recordedConn struct {
	net.Conn
	sent *bytes.Buffer
}

func (r recorder) Dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := r.Network.Dial(ctx, addr)
	return recordedConn{c, r.sent}, err
}

func (c recordedConn) Write(b []byte) (int, error) {
	c.sent.Write(b)
	return c.Conn.Write(b)
}

// TestReplay sends an honest rank's opening, byte for byte, a second time.
func TestReplay(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		s := serve(t, n, ServerOptions{})
		var sent bytes.Buffer
		honest, err := Dialer{Self: rank(1), Secret: theSecret, Network: recorder{n, &sent}}.Dial(t.Context(), []string{s.addr})
		if err != nil {
			t.Fatal(err)
		}
		honest.Close()
		c := s.raw(t)
		if _, err := c.nc.Write(sent.Bytes()); err != nil {
			t.Fatal(err)
		}
		if _, err := c.expect(wire.TypeChallenge); err != nil {
			t.Fatal(err)
		}
		mustBeRefused(t, c, wire.CodeSecret)
	})
}

// TestEveryFieldIsSigned: a proof is good for exactly one identity, in one role.
func TestEveryFieldIsSigned(t *testing.T) {
	h, ch := rank(1).hello(), wire.Challenge{Rank: 0, Incarnation: 1}
	seen := map[[wire.ProofSize]byte]string{}
	f := func(what, role string, secret []byte, h wire.Hello, ch wire.Challenge) {
		t.Helper()
		p := proof(secret, role, &h, &ch)
		if before, ok := seen[p]; ok {
			t.Errorf("%s and %s have the same proof", what, before)
		}
		seen[p] = what
	}
	change := func(what string, f1 func(*wire.Hello, *wire.Challenge)) {
		t.Helper()
		h, ch := h, ch
		f1(&h, &ch)
		f(what, roleDialer, theSecret, h, ch)
	}
	f("listener", roleListener, theSecret, h, ch)
	f("other secret", roleDialer, bytes.Repeat([]byte{8}, 32), h, ch)
	change("itself", func(h *wire.Hello, ch *wire.Challenge) {})
	change("purpose", func(h *wire.Hello, ch *wire.Challenge) { h.Purpose++ })
	change("job", func(h *wire.Hello, ch *wire.Challenge) { h.Job = "j0b" })
	change("rank", func(h *wire.Hello, ch *wire.Challenge) { h.Rank++ })
	change("world", func(h *wire.Hello, ch *wire.Challenge) { h.World++ })
	change("incarnation", func(h *wire.Hello, ch *wire.Challenge) { h.Incarnation++ })
	change("connection", func(h *wire.Hello, ch *wire.Challenge) { h.Connection++ })
	change("dialer's nonce", func(h *wire.Hello, ch *wire.Challenge) { h.Nonce[31]++ })
	change("listener's rank", func(h *wire.Hello, ch *wire.Challenge) { ch.Rank++ })
	change("listener's incarnation", func(h *wire.Hello, ch *wire.Challenge) { ch.Incarnation++ })
	change("listener's nonce", func(h *wire.Hello, ch *wire.Challenge) { ch.Nonce[0]++ })
}
