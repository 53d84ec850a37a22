package transport

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// pipeBuffer is how many bytes one direction of a Pipe holds before a writer
// waits, like a socket's buffer.
const pipeBuffer = 256 << 10

// Pipe returns two ends of a buffered stream in memory, with deadlines and
// CloseWrite, that behaves as a TCP connection does.
func Pipe() (net.Conn, net.Conn) { return namedPipe("memory:dialer", "memory:listener") }

func namedPipe(a, b string) (net.Conn, net.Conn) {
	ab, ba := newStream(), newStream()
	return &pipeEnd{in: ba, out: ab, local: memoryAddr(a), remote: memoryAddr(b)},
		&pipeEnd{in: ab, out: ba, local: memoryAddr(b), remote: memoryAddr(a)}
}

type memoryAddr string

func (memoryAddr) Network() string  { return "memory" }
func (a memoryAddr) String() string { return string(a) }

// stream is one direction: bytes between a writer and a reader.
type stream struct {
	mu       sync.Mutex
	changed  chan struct{} // closed and replaced at every change that a wait may be for
	data     []byte
	finished bool // the writer is done: the reader gets EOF after the data
	broken   bool // the reader is gone: reads and writes fail
}

func newStream() *stream { return &stream{changed: make(chan struct{})} }

func (s *stream) changedLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *stream) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.finished = true
	s.changedLocked()
}

func (s *stream) breakOff() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = true
	s.data = nil
	s.changedLocked()
}

type pipeEnd struct {
	in, out       *stream
	local, remote memoryAddr
	read, write   deadline
}

// wait returns once the stream changes, or with the error that ends the wait.
func (p *pipeEnd) wait(changed <-chan struct{}, d *deadline) error {
	timeout, moved, stop := d.wait()
	defer stop()
	select {
	case <-changed:
	case <-moved:
	case <-timeout:
		return os.ErrDeadlineExceeded
	}
	return nil
}

func (p *pipeEnd) Read(b []byte) (int, error) {
	for {
		if p.read.passed() {
			return 0, os.ErrDeadlineExceeded
		}
		p.in.mu.Lock()
		if len(p.in.data) > 0 || len(b) == 0 {
			n := copy(b, p.in.data)
			p.in.data = p.in.data[n:]
			p.in.changedLocked()
			p.in.mu.Unlock()
			return n, nil
		}
		finished, broken, changed := p.in.finished, p.in.broken, p.in.changed
		p.in.mu.Unlock()
		if broken {
			return 0, net.ErrClosed
		}
		if finished {
			return 0, io.EOF
		}
		if err := p.wait(changed, &p.read); err != nil {
			return 0, err
		}
	}
}

func (p *pipeEnd) Write(b []byte) (int, error) {
	written := 0
	for {
		if p.write.passed() {
			return written, os.ErrDeadlineExceeded
		}
		p.out.mu.Lock()
		if p.out.broken || p.out.finished {
			p.out.mu.Unlock()
			return written, net.ErrClosed
		}
		if n := min(len(b), pipeBuffer-len(p.out.data)); n > 0 || len(b) == 0 {
			p.out.data = append(p.out.data, b[:n]...)
			b, written = b[n:], written+n
			p.out.changedLocked()
		}
		changed := p.out.changed
		p.out.mu.Unlock()
		if len(b) == 0 {
			return written, nil
		}
		if err := p.wait(changed, &p.write); err != nil {
			return written, err
		}
	}
}

func (p *pipeEnd) CloseWrite() error {
	p.out.finish()
	return nil
}

func (p *pipeEnd) Close() error {
	p.out.finish()
	p.in.breakOff()
	return nil
}

func (p *pipeEnd) LocalAddr() net.Addr  { return p.local }
func (p *pipeEnd) RemoteAddr() net.Addr { return p.remote }

func (p *pipeEnd) SetDeadline(t time.Time) error {
	p.read.set(t)
	p.write.set(t)
	return nil
}
func (p *pipeEnd) SetReadDeadline(t time.Time) error  { p.read.set(t); return nil }
func (p *pipeEnd) SetWriteDeadline(t time.Time) error { p.write.set(t); return nil }

// deadline is a point in time that can be moved while somebody waits for it.
type deadline struct {
	mu    sync.Mutex
	at    time.Time
	moved chan struct{} // closed when at changes; nil until somebody waits
}

func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at = t
	if d.moved != nil {
		close(d.moved)
		d.moved = nil
	}
}

func (d *deadline) passed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.at.IsZero() && !time.Now().Before(d.at)
}

func (d *deadline) wait() (timeout <-chan time.Time, moved <-chan struct{}, stop func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.moved == nil {
		d.moved = make(chan struct{})
	}
	stop = func() {}
	if !d.at.IsZero() {
		timer := time.NewTimer(time.Until(d.at))
		timeout, stop = timer.C, func() { timer.Stop() }
	}
	return timeout, d.moved, stop
}

// Memory is a Network inside the process. Its zero value is ready.
type Memory struct {
	mu        sync.Mutex
	next      int
	listeners map[string]*memoryListener
}

var _ Network = (*Memory)(nil)

// Listen makes a new address; addr is not looked at.
func (m *Memory) Listen(addr string) (net.Listener, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.next++
	l := &memoryListener{
		network: m,
		addr:    memoryAddr(fmt.Sprintf("memory:%d", m.next)),
		backlog: make(chan net.Conn, 128),
		done:    make(chan struct{}),
	}
	if m.listeners == nil {
		m.listeners = make(map[string]*memoryListener)
	}
	m.listeners[string(l.addr)] = l
	return l, nil
}

// Dial connects to a listener's address.
func (m *Memory) Dial(ctx context.Context, addr string) (net.Conn, error) {
	m.mu.Lock()
	l := m.listeners[addr]
	m.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("dial %s: nobody listens", addr)
	}
	near, far := namedPipe("memory:dialer", addr)
	select {
	case l.backlog <- far:
		select {
		case <-l.done: // it may have emptied its backlog before
			far.Close()
		default:
		}
		return near, nil
	case <-l.done:
		return nil, fmt.Errorf("dial %s: the listener was closed", addr)
	case <-ctx.Done():
		return nil, fmt.Errorf("dial %s: %w", addr, context.Cause(ctx))
	}
}

type memoryListener struct {
	network *Memory
	addr    memoryAddr
	backlog chan net.Conn
	done    chan struct{}
	once    sync.Once
}

func (l *memoryListener) Accept() (net.Conn, error) {
	select {
	case <-l.done:
		return nil, net.ErrClosed
	default:
	}
	select {
	case c := <-l.backlog:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *memoryListener) Close() error {
	l.once.Do(func() {
		close(l.done)
		l.network.mu.Lock()
		delete(l.network.listeners, string(l.addr))
		l.network.mu.Unlock()
		for {
			select {
			case c := <-l.backlog:
				c.Close()
			default:
				return
			}
		}
	})
	return nil
}

func (l *memoryListener) Addr() net.Addr { return l.addr }
