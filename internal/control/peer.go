package control

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"autobyte/internal/transport"
	"autobyte/internal/wire"
)

const (
	// maxBacklog is how much a peer may let pile up.
	maxBacklog = 16 << 20
	// keptBuffer is the largest write buffer that is kept for reuse.
	keptBuffer = 1 << 20
)

// peer is a connection to another rank: what waits to be sent, and when it was
// heard. Its reader and writer are goroutines of the group.
type peer struct {
	rank    int
	conn    *transport.Conn
	timeout time.Duration
	gone    chan struct{} // closed by stop
	once    sync.Once
	wake    chan struct{} // capacity 1: something for the writer

	heard     atomic.Int64 // nanoseconds on the group's clock
	roundTrip atomic.Int64 // nanoseconds

	// Under the group's lock.
	lost       bool
	registered bool
	tensors    []Tensor

	mu        sync.Mutex
	pending   []byte
	finishing bool // the writer flushes, closes its direction and ends
}

func newPeer(rank int, conn *transport.Conn, timeout time.Duration) *peer {
	return &peer{rank: rank, conn: conn, timeout: timeout, gone: make(chan struct{}), wake: make(chan struct{}, 1)}
}

// push appends frames to what the writer sends next. It returns false when too
// much is waiting already.
func (p *peer) push(frames []byte) bool {
	p.mu.Lock()
	if p.finishing {
		p.mu.Unlock()
		return true
	}
	if len(p.pending)+len(frames) > maxBacklog {
		p.mu.Unlock()
		return false
	}
	p.pending = append(p.pending, frames...)
	p.mu.Unlock()
	signal(p.wake)
	return true
}

func (p *peer) send(t wire.Type, payload []byte) bool {
	return p.push(wire.MarshalFrame(nil, t, payload))
}

// finish lets the writer send what waits and then close its direction.
func (p *peer) finish() {
	p.mu.Lock()
	p.finishing = true
	p.mu.Unlock()
	signal(p.wake)
}

// stop ends the reader and the writer at once.
func (p *peer) stop() {
	p.once.Do(func() {
		close(p.gone)
		p.conn.Close()
	})
}

// write sends until the peer is stopped or finished, or until an error.
func (p *peer) write() error {
	var spare []byte
	for {
		p.mu.Lock()
		batch, finishing := p.pending, p.finishing
		p.pending = spare[:0]
		p.mu.Unlock()
		spare = batch
		if len(batch) > 0 {
			if err := p.conn.Write(batch, p.timeout); err != nil {
				return err
			}
			if cap(spare) > keptBuffer {
				spare = nil
			}
			continue
		}
		if finishing {
			return p.conn.CloseWrite()
		}
		select {
		case <-p.wake:
		case <-p.gone:
			return net.ErrClosed
		}
	}
}

// heardBack takes the time that a heartbeat took to come back.
func (p *peer) heardBack(took time.Duration) {
	old := p.roundTrip.Load()
	if old == 0 {
		p.roundTrip.Store(max(1, int64(took)))
		return
	}
	p.roundTrip.Store(max(1, old+(int64(took)-old)/8))
}

// lossReason words the error that ended a connection.
func (p *peer) lossReason(err error) string {
	var timeout interface{ Timeout() bool }
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed):
		return "its connection ended without goodbye"
	case errors.As(err, &timeout) && timeout.Timeout():
		return fmt.Sprintf("nothing was heard from it for %v", p.timeout)
	case errors.Is(err, errMisbehaved), errors.Is(err, wire.ErrPayload), errors.Is(err, wire.ErrMagic),
		errors.Is(err, wire.ErrChecksum), errors.Is(err, wire.ErrTooLong), errors.Is(err, wire.ErrVersion):
		return "it sent what it must not: " + err.Error()
	}
	return "its connection broke: " + err.Error()
}

// errMisbehaved is wrapped by errors about messages that decode and make no
// sense.
var errMisbehaved = errors.New("unexpected message")

func misbehaved(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errMisbehaved, fmt.Sprintf(format, args...))
}
