package transport

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"autobyte/internal/wire"
)

// Dialer opens connections to a Server of the same job.
type Dialer struct {
	Self   Identity
	Secret []byte
	// Handshake is how long one attempt may take, connecting and opening each;
	// default DefaultHandshake.
	Handshake time.Duration
	Network   Network // default TCP
}

// opened is a connection whose listener has proved itself, or why there is none.
type opened struct {
	conn      *Conn
	addr      string
	hello     wire.Hello
	challenge wire.Challenge
	err       error
}

// Dial tries all addresses at once. The first whose listener proves that it
// knows the secret gets this side's proof; so several addresses of one server
// don't join it twice. The error names each address and what was wrong there,
// and wraps a *Refused where a listener gave one.
func (d Dialer) Dial(ctx context.Context, addrs []string) (*Conn, error) {
	if err := checkSecret(d.Secret); err != nil {
		return nil, err
	}
	if len(addrs) == 0 {
		return nil, errors.New("no address to connect to")
	}
	if d.Handshake <= 0 {
		d.Handshake = DefaultHandshake
	}
	if d.Network == nil {
		d.Network = TCP{}
	}
	ctx, cancel := context.WithCancel(ctx)
	results := make(chan opened)
	for _, addr := range addrs {
		go func() {
			results <- d.try(ctx, addr)
		}()
	}
	var winner *Conn
	var failures failures
	for range addrs {
		r := <-results
		if r.err == nil && winner == nil && !failures.final() {
			if r.err = d.finish(ctx, r); r.err == nil {
				winner = r.conn
				cancel()
				continue
			}
		}
		if r.conn != nil {
			r.conn.Close()
		}
		if r.err != nil {
			failures = append(failures, attempt{r.addr, r.err})
			if failures.final() {
				cancel()
			}
		}
	}
	cancel()
	if winner != nil {
		return winner, nil
	}
	return nil, failures
}

// try connects and lets the listener prove itself.
func (d Dialer) try(ctx context.Context, addr string) opened {
	r := opened{addr: addr}
	dialing, cancel := context.WithTimeout(ctx, d.Handshake)
	nc, err := d.Network.Dial(dialing, addr)
	cancel()
	if err != nil {
		r.err = err
		return r
	}
	c := NewConn(nc)
	nc.SetDeadline(time.Now().Add(d.Handshake))
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	r.hello, r.challenge, r.err = c.challenge(d.Secret, d.Self)
	if !stop() && r.err == nil {
		r.err = context.Cause(ctx)
	}
	if r.err != nil {
		nc.Close()
		return r
	}
	r.conn = c
	return r
}

// finish proves this side to the listener and waits for its answer.
func (d Dialer) finish(ctx context.Context, r opened) error {
	nc := r.conn.nc
	nc.SetDeadline(time.Now().Add(d.Handshake))
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	err := r.conn.prove(d.Secret, &r.hello, &r.challenge)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	return nc.SetDeadline(time.Time{})
}

type attempt struct {
	addr string
	err  error
}

// failures is the error of a Dial: one attempt for each address.
type failures []attempt

func (f failures) Error() string {
	var b strings.Builder
	for i, a := range f {
		if i > 0 {
			b.WriteString("; ")
		}
		if strings.Contains(a.err.Error(), a.addr) {
			b.WriteString(a.err.Error())
		} else {
			fmt.Fprintf(&b, "%s: %s", a.addr, describe(a.err))
		}
	}
	return b.String()
}

// Unwrap gives the attempts' errors, an authentic refusal first.
func (f failures) Unwrap() []error {
	errs := make([]error, 0, len(f))
	for _, authentic := range []bool{true, false} {
		for _, a := range f {
			if isAuthentic(a.err) == authentic {
				errs = append(errs, a.err)
			}
		}
	}
	return errs
}

// final says that the right server has refused: no other address will do.
func (f failures) final() bool {
	for _, a := range f {
		if isAuthentic(a.err) {
			return true
		}
	}
	return false
}

func isAuthentic(err error) bool {
	var r *Refused
	return errors.As(err, &r) && r.Authentic
}
