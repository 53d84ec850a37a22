package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

const (
	// flowWarm is how long a flow runs before its bytes count: slow start and the links' bursts.
	flowWarm = 300 * time.Millisecond
	// flowSlack is how much longer than planned a measurement may take before it is an error.
	flowSlack = 10 * time.Second
	flowBlock = 256 << 10
)

// MeasureTCP sends from one node to another at full speed over a plain TCP connection and returns the bytes a
// second that arrived during the given time. It is what T* is computed from.
func (c *Cluster) MeasureTCP(ctx context.Context, from, to int, during time.Duration) (float64, error) {
	rates, err := c.measure(ctx, [][2]int{{from, to}}, during)
	if err != nil {
		return 0, err
	}
	return rates[0], nil
}

// MeasureTCPBothWays sends between two nodes both ways at once, on two connections, and returns what arrived
// at b and at a.
func (c *Cluster) MeasureTCPBothWays(ctx context.Context, a, b int, during time.Duration) ([2]float64, error) {
	rates, err := c.measure(ctx, [][2]int{{a, b}, {b, a}}, during)
	if err != nil {
		return [2]float64{}, err
	}
	return [2]float64(rates), nil
}

func (c *Cluster) measure(ctx context.Context, flows [][2]int, during time.Duration) ([]float64, error) {
	ctx, cancel := context.WithTimeout(ctx, flowWarm+during+flowSlack)
	defer cancel()
	for _, f := range flows {
		if f[0] == f[1] || min(f[0], f[1]) < 0 || max(f[0], f[1]) >= len(c.nodes) {
			return nil, fmt.Errorf("lab: flow from worker %d to %d: want two of 0 to %d", f[0], f[1], len(c.nodes)-1)
		}
	}
	type result struct {
		flow int
		rate float64
		err  error
	}
	results := make(chan result, len(flows))
	for i, f := range flows {
		go func() {
			rate, err := runFlow(ctx, c.nodes[f[0]], c.nodes[f[1]], during)
			results <- result{i, rate, err}
		}()
	}
	rates := make([]float64, len(flows))
	var errs error
	for range flows {
		r := <-results
		rates[r.flow] = r.rate
		errs = errors.Join(errs, r.err)
	}
	if errs != nil {
		return nil, fmt.Errorf("lab: measuring TCP: %w", errs)
	}
	return rates, nil
}

// runFlow makes the sockets on threads inside the namespaces, where they stay, and uses them from here.
func runFlow(ctx context.Context, from, to *Node, during time.Duration) (float64, error) {
	var listener net.Listener
	err := to.inside(func() (err error) {
		listener, err = net.Listen("tcp4", net.JoinHostPort(to.Address.String(), "0"))
		return err
	})
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	deadline, _ := ctx.Deadline()
	var sending net.Conn
	err = from.inside(func() (err error) {
		sending, err = net.DialTimeout("tcp4", listener.Addr().String(), time.Until(deadline))
		return err
	})
	if err != nil {
		return 0, err
	}
	defer sending.Close()
	if err := listener.(*net.TCPListener).SetDeadline(deadline); err != nil {
		return 0, err
	}
	receiving, err := listener.Accept()
	if err != nil {
		return 0, err
	}
	defer receiving.Close()
	stop := context.AfterFunc(ctx, func() { sending.Close(); receiving.Close() })
	defer stop()

	sent := make(chan struct{})
	go func() {
		defer close(sent)
		block := make([]byte, flowBlock)
		for {
			if _, err := sending.Write(block); err != nil {
				return // the receiver has what it wants, or ctx ended
			}
		}
	}()
	rate, err := receive(receiving, during)
	receiving.Close()
	sending.Close()
	<-sent
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return rate, err
}

// receive counts between the first arrivals after the warm-up and after the measured time, both exact.
func receive(from io.Reader, during time.Duration) (float64, error) {
	block := make([]byte, flowBlock)
	begin := time.Now()
	var start time.Time
	var bytes int64
	for {
		n, err := from.Read(block)
		if err != nil {
			return 0, err
		}
		now := time.Now()
		if start.IsZero() {
			if now.Sub(begin) >= flowWarm {
				start = now
			}
			continue
		}
		bytes += int64(n)
		if elapsed := now.Sub(start); elapsed >= during {
			return float64(bytes) / elapsed.Seconds(), nil
		}
	}
}
