package transport

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"autobyte/internal/wire"
)

const readBuffer = 64 << 10

// Conn is an open, authenticated connection.
type Conn struct {
	nc     net.Conn
	in     *bufio.Reader
	header [wire.HeaderSize]byte
	body   []byte // of the last frame; reused
}

// NewConn makes frames of a stream that needs no authentication, such as one
// end of Pipe in a test.
func NewConn(nc net.Conn) *Conn {
	return &Conn{nc: nc, in: bufio.NewReaderSize(nc, readBuffer)}
}

// ReadFrame returns the next frame. The whole frame must arrive within the
// timeout. The payload is valid until the next call.
func (c *Conn) ReadFrame(timeout time.Duration) (wire.Type, []byte, error) {
	if err := c.nc.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return 0, nil, err
	}
	h, err := c.read(wire.MaxPayload)
	return h.Type, c.body, err
}

// read returns the header of the next frame and leaves its payload in c.body.
// The caller has set a deadline.
func (c *Conn) read(maxPayload int) (wire.Header, error) {
	if _, err := io.ReadFull(c.in, c.header[:]); err != nil {
		return wire.Header{}, err
	}
	h, err := wire.UnmarshalHeader(c.header[:], maxPayload)
	if err != nil && !errors.Is(err, wire.ErrVersion) {
		return h, err
	}
	if cap(c.body) < h.Length {
		c.body = make([]byte, h.Length)
	}
	c.body = c.body[:h.Length]
	if _, err := io.ReadFull(c.in, c.body); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return h, err
	}
	if sumErr := h.CheckPayload(c.body); sumErr != nil {
		return h, sumErr
	}
	return h, err
}

// Write sends frames that are marshalled already, all within the timeout.
// After an error the stream is torn and only Close is left to do.
func (c *Conn) Write(frames []byte, timeout time.Duration) error {
	if err := c.nc.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	_, err := c.nc.Write(frames)
	return err
}

// WriteFrame sends one frame.
func (c *Conn) WriteFrame(t wire.Type, payload []byte, timeout time.Duration) error {
	if len(payload) > wire.MaxPayload {
		return fmt.Errorf("%w: payload of %d bytes, at most %d are allowed", wire.ErrTooLong, len(payload), wire.MaxPayload)
	}
	return c.Write(wire.MarshalFrame(nil, t, payload), timeout)
}

// CloseWrite tells the peer that nothing more comes, and goes on reading. A
// side that has said its last word calls it and reads to the end before Close:
// a TCP socket closed with unread input takes back what it sent last.
func (c *Conn) CloseWrite() error {
	if half, ok := c.nc.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// Close ends both directions and every read and write that waits.
func (c *Conn) Close() error { return c.nc.Close() }

// RemoteAddr returns the peer's address.
func (c *Conn) RemoteAddr() string { return c.nc.RemoteAddr().String() }
