package transport

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"autobyte/internal/wire"
)

// TestSilentCrowd: hundreds of connections that say nothing, and some that
// drip, keep no rank from joining, although the limit is far lower.
func TestSilentCrowd(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		s := serve(t, n, ServerOptions{Pending: 16, Handshake: 30 * time.Second})
		hello := rank(1).hello()
		frame := wire.MarshalFrame(nil, wire.TypeHello, wire.MarshalHello(nil, &hello))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for i := range 300 {
			c := s.raw(t)
			if i%10 == 0 {
				go func() {
					for _, b := range frame {
						if _, err := c.nc.Write([]byte{b}); err != nil {
							return
						}
						select {
						case <-time.After(20 * time.Millisecond):
						case <-ctx.Done():
							return
						}
					}
				}()
			}
		}
		s.mustOpen(t, 1)
		s.mustOpen(t, 2)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.Server.mu.Lock()
		defer s.Server.mu.Unlock()
		if got := s.Server.pending.Len(); got > 16 {
			t.Errorf("%d connections are pending, at most 16 are allowed", got)
		}
	})
}

// TestDripIsCutOff: one byte at a time does not prolong the opening.
func TestDripIsCutOff(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		s := serve(t, n, ServerOptions{Handshake: 200 * time.Millisecond})
		c := s.raw(t)
		hello := rank(1).hello()
		frame := wire.MarshalFrame(nil, wire.TypeHello, wire.MarshalHello(nil, &hello))
		done := make(chan struct{})
		go func() {
			defer close(done)
			for _, b := range frame {
				if _, err := c.nc.Write([]byte{b}); err != nil {
					return
				}
				time.Sleep(20 * time.Millisecond)
			}
		}()
		mustBeRefused(t, c, wire.CodeMalformed)
		c.Close()
		<-done
	})
}

// TestCloseEndsEverything: no goroutine and no pending connection outlives it.
func TestCloseEndsEverything(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		s := serve(t, n, ServerOptions{Handshake: time.Hour})
		silent := s.raw(t)
		s.mustOpen(t, 1)
		s.Close()
		if _, err := silent.expect(0); err == nil || isTimeout(err) {
			t.Errorf("the pending connection: %v, want its end", err)
		}
		if _, err := s.dial(t, rank(2), theSecret); err == nil {
			t.Error("rank 2 joined a closed server")
		}
	})
}

// TestManyAddresses: all are tried at once; a dead one, a stranger and a server
// of another job don't hide the right one, and it is joined once.
func TestManyAddresses(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		s := serve(t, n, ServerOptions{})
		stranger, err := n.Listen("127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer stranger.Close()
		dead, err := n.Listen("127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		dead.Close()
		l, err := n.Listen("127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		other, err := NewServer(l, ServerOptions{Self: rank(0), Secret: []byte("another job's secret"),
			Admit: func(Identity) error { t.Error("the other job admitted us"); return errors.New("no") },
			Serve: func(c *Conn, _ Identity) { c.Close() }})
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		wrong := []string{dead.Addr().String(), stranger.Addr().String(), other.Addr().String()}
		c, err := Dialer{Self: rank(1), Secret: theSecret, Network: n, Handshake: 5 * time.Second}.
			Dial(t.Context(), append(wrong, s.addr, s.addr, s.addr))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		<-s.opened
		_, err = Dialer{Self: rank(2), Secret: theSecret, Network: n, Handshake: 200 * time.Millisecond}.Dial(t.Context(), wrong)
		if err == nil {
			t.Fatal("joined nobody")
		}
		for _, addr := range wrong {
			if !strings.Contains(err.Error(), addr) {
				t.Errorf("%q does not name %s", err, addr)
			}
		}
		s.mustOpen(t, 2)
		if strings.Contains(s.log.String(), "joined already") {
			t.Errorf("one rank came by several addresses of one server:\n%s", s.log)
		}
	})
}

func TestDialEndsWithItsContext(t *testing.T) {
	networks(t, func(t *testing.T, n Network) {
		silent, err := n.Listen("127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer silent.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := (Dialer{Self: rank(1), Secret: theSecret, Network: n, Handshake: time.Hour}).Dial(ctx, []string{silent.Addr().String()}); err == nil {
			t.Error("no error from a listener that says nothing")
		}
	})
}

func TestNewServerNeedsASecret(t *testing.T) {
	l, err := (&Memory{}).Listen("")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewServer(l, ServerOptions{}); err == nil {
		t.Error("a server without a secret")
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener is still open: %v", err)
	}
}
