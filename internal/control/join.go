package control

import (
	"context"
	"errors"
	"fmt"
	"time"

	"autobyte/internal/transport"
	"autobyte/internal/wire"
)

// Pauses between attempts to reach rank 0.
const (
	firstPause = 50 * time.Millisecond
	longPause  = time.Second
)

// refusedRounds is how often addresses may refuse this rank, without any of
// them proving to be rank 0, before it gives up: one may be another program.
const refusedRounds = 3

// Join connects to rank 0 at the first of the addresses that proves to know
// the secret, and goes on trying until ctx or the timeout ends.
func Join(ctx context.Context, o Options, r Rendezvous) (*Group, error) {
	o, err := o.validate()
	if err != nil {
		return nil, err
	}
	if o.Rank == Leader {
		return nil, fmt.Errorf("control: rank %d can't join, it leads; use Listen", Leader)
	}
	conn, err := dial(ctx, o, r)
	if err != nil {
		return nil, fmt.Errorf("control: rank %d can't join rank 0: %w", o.Rank, err)
	}
	g := newGroup(o)
	g.mu.Lock()
	defer g.mu.Unlock()
	p := newPeer(Leader, conn, o.Timeout)
	p.send(wire.TypeRegister, wire.MarshalRegister(nil, toWire(o.Tensors)))
	g.attachLocked(p)
	g.run("heartbeat", g.heartbeat)
	return g, nil
}

func dial(ctx context.Context, o Options, r Rendezvous) (*transport.Conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout, fmt.Errorf("not reached within %v", o.Timeout))
	defer cancel()
	d := transport.Dialer{
		Self: o.identity(), Secret: r.Secret, Network: o.Network,
		Handshake: min(5*time.Second, max(500*time.Millisecond, o.Timeout/4)),
	}
	pause := firstPause
	for refused := 0; ; {
		conn, err := d.Dial(ctx, r.Addrs)
		if err == nil {
			return conn, nil
		}
		var refusal *transport.Refused
		if errors.As(err, &refusal) {
			if refused++; refusal.Authentic || refused == refusedRounds {
				return nil, err
			}
		}
		if len(r.Addrs) == 0 || len(r.Secret) < transport.MinSecret {
			return nil, fmt.Errorf("the rendezvous is incomplete: %w", err)
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%w (last attempt: %v)", context.Cause(ctx), err)
		}
		o.Log.Debug("rank 0 is not reached yet", "rank", o.Rank, "error", err)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, fmt.Errorf("%w (last attempt: %v)", context.Cause(ctx), err)
		}
		pause = min(2*pause, longPause)
	}
}
