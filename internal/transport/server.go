package transport

import (
	"container/list"
	"errors"
	"io"
	"log/slog"
	"net"
	"runtime/debug"
	"sync"
	"time"

	"autobyte/internal/wire"
)

// ServerOptions says whom a Server admits and who gets the connections.
type ServerOptions struct {
	Self   Identity
	Secret []byte
	// Handshake is how long an opening may take in all; default DefaultHandshake.
	Handshake time.Duration
	// Pending is how many connections may be open that have not proved
	// anything; default 64, and never less than twice the world size. One more
	// and the oldest is dropped.
	Pending int
	// Admit has the last word on an authenticated peer of this job. It may
	// return a *Refused; the text of any error goes to the peer. After nil,
	// Serve is called with the same identity, always.
	Admit func(Identity) error
	// Serve gets the open connection and owns it. It must not block.
	Serve func(*Conn, Identity)
	Log   *slog.Logger // default: discard
}

// Server opens connections for whoever proves to be of the job.
type Server struct {
	o        ServerOptions
	listener net.Listener
	done     chan struct{}
	running  sync.WaitGroup

	mu      sync.Mutex
	pending list.List // of net.Conn, oldest first
	closed  bool
}

// NewServer starts to serve the listener, which it owns from then on.
func NewServer(l net.Listener, o ServerOptions) (*Server, error) {
	if err := checkSecret(o.Secret); err != nil {
		l.Close()
		return nil, err
	}
	if o.Handshake <= 0 {
		o.Handshake = DefaultHandshake
	}
	if o.Pending <= 0 {
		o.Pending = 64
	}
	o.Pending = max(o.Pending, 2*o.Self.World)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{o: o, listener: l, done: make(chan struct{})}
	s.running.Add(1)
	go s.accept()
	return s, nil
}

// Addr returns the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Close stops listening, drops the connections that are not open yet and waits
// for the server's goroutines. Open connections belong to Serve and stay.
func (s *Server) Close() error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.done)
		s.listener.Close()
		for e := s.pending.Front(); e != nil; e = e.Next() {
			e.Value.(net.Conn).Close()
		}
	}
	s.mu.Unlock()
	s.running.Wait()
	return nil
}

func (s *Server) accept() {
	defer s.running.Done()
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		nc, err := s.listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || s.isClosed() {
				return
			}
			// Out of file descriptors, say: others may free some.
			s.o.Log.Warn("can't accept a connection", "error", err)
			pause.Reset(50 * time.Millisecond)
			select {
			case <-pause.C:
			case <-s.done:
				return
			}
			continue
		}
		s.admitPending(nc)
	}
}

func (s *Server) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

func (s *Server) admitPending(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		nc.Close()
		return
	}
	if s.pending.Len() >= s.o.Pending {
		oldest := s.pending.Front()
		s.pending.Remove(oldest)
		oldest.Value.(net.Conn).Close()
		s.o.Log.Warn("too many connections that prove nothing; dropped the oldest",
			"from", oldest.Value.(net.Conn).RemoteAddr(), "limit", s.o.Pending)
	}
	place := s.pending.PushBack(nc)
	s.running.Add(1)
	go s.open(nc, place)
}

// forget takes a connection off the pending list; false: it was dropped.
func (s *Server) forget(place *list.Element) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.pending.Len()
	s.pending.Remove(place)
	return s.pending.Len() < before
}

// open takes one connection from its first byte to Serve or to its end. It
// stays on the pending list until then, so that Close and newer connections
// can end it.
func (s *Server) open(nc net.Conn, place *list.Element) {
	defer s.running.Done()
	defer func() {
		if r := recover(); r != nil { // in Admit or Serve: it ends this connection only
			s.o.Log.Error("internal error", "in", "connection", "panic", r, "stack", string(debug.Stack()))
			s.forget(place)
			nc.Close()
		}
	}()
	c := NewConn(nc)
	id, err := s.authenticate(c)
	if err == nil {
		if !s.forget(place) {
			nc.Close()
			return
		}
		if err = s.o.Admit(id); err == nil {
			// A failure to write shows at the first read of the new owner.
			_ = c.send(wire.TypeAccept, nil)
			nc.SetDeadline(time.Time{})
			s.o.Log.Debug("connection open", "rank", id.Rank, "from", c.RemoteAddr())
			s.o.Serve(c, id)
			return
		}
	}
	s.o.Log.Warn("refused a connection", "from", c.RemoteAddr(), "reason", describe(err))
	if r := refusalOf(err, s.o.Handshake); r != nil && !r.FromPeer {
		c.refuse(r)
	}
	s.forget(place)
	nc.Close()
}

// authenticate returns who the peer is once it has proved to be of this job.
func (s *Server) authenticate(c *Conn) (Identity, error) {
	if err := c.nc.SetDeadline(time.Now().Add(s.o.Handshake)); err != nil {
		return Identity{}, err
	}
	id, err := c.answer(s.o.Secret, s.o.Self)
	if err != nil {
		return id, err
	}
	if r := id.belongs(s.o.Self); r != nil {
		return id, r
	}
	return id, nil
}

// describe words the errors that a reader of the log would not understand.
func describe(err error) string {
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed):
		return "it ended before it was open"
	case isTimeout(err):
		return "it was silent or too slow"
	}
	return err.Error()
}
