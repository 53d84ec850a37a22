package transport

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"autobyte/internal/wire"
)

// pair is both ends of a stream without authentication.
func pair(t *testing.T, n Network) (near, far net.Conn) {
	t.Helper()
	l, err := n.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if near, err = n.Dial(t.Context(), l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if far, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close(); far.Close() })
	return near, far
}

// TestStreams: what both networks do alike, so that a test in memory says
// something about TCP.
func TestStreams(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		near, far := pair(t, n)
		near.SetDeadline(time.Now().Add(20 * time.Second))
		far.SetWriteDeadline(time.Now().Add(20 * time.Second))

		// A deadline ends a read; a later one lets it read again.
		far.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if _, err := far.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read of nothing: %v, want the deadline", err)
		}
		far.SetReadDeadline(time.Now().Add(20 * time.Second))

		// Much more than the buffers hold, in odd pieces.
		sent := make([]byte, 3<<20)
		for i := range sent {
			sent[i] = byte(rand.Uint32())
		}
		failed := make(chan error, 1)
		go func() {
			for rest := sent; len(rest) > 0; {
				k := min(len(rest), 1+rand.IntN(100_000))
				if _, err := near.Write(rest[:k]); err != nil {
					failed <- err
					return
				}
				rest = rest[k:]
			}
			failed <- near.(interface{ CloseWrite() error }).CloseWrite()
		}()
		got, err := io.ReadAll(far)
		if err != nil || !bytes.Equal(got, sent) {
			t.Errorf("%d bytes of %d, error %v", len(got), len(sent), err)
		}
		if err := <-failed; err != nil {
			t.Errorf("write: %v", err)
		}

		// The other direction is still open, and near can no longer write.
		if _, err := far.Write([]byte("answer")); err != nil {
			t.Errorf("write to a side that only reads: %v", err)
		}
		buf := make([]byte, 10)
		if k, err := near.Read(buf); err != nil || string(buf[:k]) != "answer" {
			t.Errorf("read %q, %v", buf[:k], err)
		}
		if _, err := near.Write([]byte("more")); err == nil {
			t.Error("write after CloseWrite: no error")
		}

		// A writer that nobody reads from is ended by its deadline.
		far.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
		var writeErr error
		for i := 0; writeErr == nil && i < 10_000; i++ {
			_, writeErr = far.Write(make([]byte, 1<<16))
		}
		if !errors.Is(writeErr, os.ErrDeadlineExceeded) {
			t.Errorf("write that nobody reads: %v, want the deadline", writeErr)
		}

		// Close wakes a read on this side.
		ended := make(chan error, 1)
		go func() {
			_, err := far.Read(make([]byte, 1)) // EOF was read; it stays
			ended <- err
		}()
		if err := <-ended; !errors.Is(err, io.EOF) {
			t.Errorf("read after the end: %v, want EOF", err)
		}
	})
}

func TestCloseWakesRead(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		near, far := pair(t, n)
		started, ended := make(chan struct{}), make(chan error, 1)
		go func() {
			close(started)
			_, err := near.Read(make([]byte, 1))
			ended <- err
		}()
		<-started
		near.Close()
		if err := <-ended; !errors.Is(err, net.ErrClosed) {
			t.Errorf("own read: %v, want net.ErrClosed", err)
		}
		far.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := far.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("the other's read: %v, want EOF", err)
		}
	})
}

func TestFrames(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		a, b := pair(t, n)
		near, far := NewConn(a), NewConn(b)
		big := bytes.Repeat([]byte("0123456789abcdef"), wire.MaxPayload/16)
		failed := make(chan error, 1)
		go func() {
			for i := range 1000 {
				if err := near.WriteFrame(wire.Type(i%200), big[:i], 20*time.Second); err != nil {
					failed <- err
					return
				}
			}
			failed <- near.WriteFrame(1, big, 20*time.Second)
		}()
		for i := range 1000 {
			typ, payload, err := far.ReadFrame(20 * time.Second)
			if err != nil || typ != wire.Type(i%200) || !bytes.Equal(payload, big[:i]) {
				t.Fatalf("frame %d: type %d, %d bytes, error %v", i, typ, len(payload), err)
			}
		}
		if _, payload, err := far.ReadFrame(20 * time.Second); err != nil || !bytes.Equal(payload, big) {
			t.Fatalf("the largest frame: %d bytes, error %v", len(payload), err)
		}
		if err := <-failed; err != nil {
			t.Fatal(err)
		}
		if err := near.WriteFrame(1, append(big, 0), time.Second); !errors.Is(err, wire.ErrTooLong) {
			t.Errorf("a frame too long: %v", err)
		}
		if _, _, err := far.ReadFrame(20 * time.Millisecond); !isTimeout(err) {
			t.Errorf("no frame: %v, want a timeout", err)
		}
	})
}

// TestTornFrame: half a frame and the end is not a frame, nor a clean end.
func TestTornFrame(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		a, b := pair(t, n)
		frame := wire.MarshalFrame(nil, wire.TypeFail, []byte("a reason"))
		a.Write(frame[:len(frame)-3])
		a.Close()
		if _, _, err := NewConn(b).ReadFrame(20 * time.Second); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("torn frame: %v, want io.ErrUnexpectedEOF", err)
		}
	})
}

// FuzzServer gives a server arbitrary first bytes: it must survive and admit
// nobody.
func FuzzServer(f *testing.F) {
	hello := rank(1).hello()
	frame := wire.MarshalFrame(nil, wire.TypeHello, wire.MarshalHello(nil, &hello))
	f.Add(frame)
	f.Add(wire.MarshalFrame(frame, wire.TypeProof, make([]byte, wire.ProofSize)))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	var admitted atomic.Bool
	n := &Memory{}
	l, err := n.Listen("")
	if err != nil {
		f.Fatal(err)
	}
	s, err := NewServer(l, ServerOptions{Self: rank(0), Secret: theSecret,
		Admit: func(Identity) error { admitted.Store(true); return nil },
		Serve: func(c *Conn, _ Identity) { c.Close() }})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { s.Close() })
	f.Fuzz(func(t *testing.T, first []byte) {
		nc, err := n.Dial(t.Context(), l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		nc.SetDeadline(time.Now().Add(10 * time.Second))
		nc.Write(first)
		nc.(interface{ CloseWrite() error }).CloseWrite()
		c := NewConn(nc)
		for {
			h, err := c.read(wire.MaxHelloPayload)
			if h.Type == wire.TypeAccept || admitted.Load() {
				t.Fatal("admitted without the secret")
			}
			if err != nil {
				return
			}
		}
	})
}
