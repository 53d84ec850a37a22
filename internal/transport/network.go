package transport

import (
	"context"
	"net"
	"time"
)

// Network makes the streams below a connection: TCP, or Memory in tests of
// what is above.
type Network interface {
	Listen(addr string) (net.Listener, error)
	Dial(ctx context.Context, addr string) (net.Conn, error)
}

// TCP is the real Network.
type TCP struct{}

var _ Network = TCP{}

// keepAlive lets the kernel notice a dead host below the heartbeats.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// Listen listens on host:port; an empty host is every address of this machine.
func (TCP) Listen(addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	return tcpListener{l.(*net.TCPListener)}, nil
}

// Dial connects to host:port.
func (TCP) Dial(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{KeepAlive: -1}
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return tuned(c.(*net.TCPConn))
}

type tcpListener struct{ *net.TCPListener }

func (l tcpListener) Accept() (net.Conn, error) {
	c, err := l.AcceptTCP()
	if err != nil {
		return nil, err
	}
	return tuned(c)
}

// tuned sets what every connection of ours has: small messages leave at once,
// and a dead host is noticed.
func tuned(c *net.TCPConn) (net.Conn, error) {
	// An error here is a connection that is gone already: the first read says so.
	_ = c.SetNoDelay(true)
	_ = c.SetKeepAliveConfig(keepAlive)
	return c, nil
}
