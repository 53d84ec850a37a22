package control

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"autobyte/internal/sched"
	"autobyte/internal/transport"
	"autobyte/internal/wire"
)

// Leader is the rank that leads.
const Leader = 0

// DefaultTimeout is how long a peer may be silent before it is lost.
const DefaultTimeout = 60 * time.Second

// ErrClosed is returned by Await of a group that was closed.
var ErrClosed = errors.New("control: the group is closed")

// Tensor is one trainable parameter.
type Tensor struct {
	Name  string
	DType string
	Shape []int64
}

// Options say who this rank is and what it has.
type Options struct {
	Rank, World int
	Job         string // the same on all ranks
	Incarnation uint64 // tells a restarted rank from its predecessor

	// Timeout is how long a peer may be silent before it is lost, and how long
	// ranks have to join. Heartbeats are independent of steps, so this need
	// not cover a slow step. Below 2 s it must be the same on all ranks.
	// Default DefaultTimeout.
	Timeout time.Duration

	Tensors  []Tensor // what this rank has, in registration order
	Settings []byte   // the user's settings as JSON; rank 0's win

	// Handle gets the events, one at a time, from one goroutine. It must not
	// block and must not call Leave or Close.
	Handle func(Event)
	Log    *slog.Logger // default: discard

	// Port and Interface say where rank 0 listens: 0 is any free port, "" is
	// every interface.
	Port      int
	Interface string

	Network transport.Network // default TCP
}

// Rendezvous is what the other ranks need to find rank 0 and to be let in.
// Rank 0 hands it to them through a store that they share; it holds the job's
// secret.
type Rendezvous struct {
	Addrs  []string `json:"addrs"`
	Secret []byte   `json:"secret"`
}

// Event is one of Layout, Open, Order, Verdict and Lost. Rank 0 gets Verdict
// and Lost only.
type Event interface{ event() }

// Layout is the tensors and their forward order, from a generation on.
type Layout struct {
	Generation uint32
	Tensors    []Tensor
	Order      []int32 // forward order: indices into Tensors, each exactly once
}

// Open opens a step under a configuration.
type Open struct {
	Generation      uint32
	Step, Iteration uint64
	Config          sched.Config
	PlanHash        uint64
}

// Order is the next partition to issue. Whether the plan has it is for the
// receiver to check.
type Order struct {
	Step  uint64
	Index int
}

// Verdict names the tensors that were absent on every rank in a step. It comes
// when all ranks have closed the step and at least one had absent tensors.
type Verdict struct {
	Step   uint64
	Absent []int // ascending
}

// Lost says that a rank is gone. It comes once for each lost rank.
type Lost struct {
	Rank   int
	Reason string
	Clean  bool // it said goodbye
}

func (Layout) event()  {}
func (Open) event()    {}
func (Order) event()   {}
func (Verdict) event() {}
func (Lost) event()    {}

// PeerStatus is what is known of a connected peer.
type PeerStatus struct {
	Rank       int
	SinceHeard time.Duration // since its last byte
	RoundTrip  time.Duration // smoothed; 0 before the first heartbeat came back
}

// validate returns the options with defaults filled in.
func (o Options) validate() (Options, error) {
	if o.World < 1 || o.World > maxWorld {
		return o, fmt.Errorf("control: world size %d, want 1 to %d", o.World, maxWorld)
	}
	if o.Rank < 0 || o.Rank >= o.World {
		return o, fmt.Errorf("control: rank %d, want 0 to %d", o.Rank, o.World-1)
	}
	if len(o.Job) > wire.MaxJob {
		return o, fmt.Errorf("control: job name of %d bytes, at most %d are allowed", len(o.Job), wire.MaxJob)
	}
	if o.Timeout < 0 {
		return o, fmt.Errorf("control: timeout %v, want a positive one or 0 for %v", o.Timeout, DefaultTimeout)
	}
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	if len(o.Settings) > wire.MaxSettings {
		return o, fmt.Errorf("control: settings of %d bytes, at most %d are allowed", len(o.Settings), wire.MaxSettings)
	}
	if o.Port < 0 || o.Port > 65535 {
		return o, fmt.Errorf("control: port %d, want 1 to 65535, or 0 for any", o.Port)
	}
	if err := checkTensors(o.Tensors); err != nil {
		return o, err
	}
	if o.Handle == nil {
		o.Handle = func(Event) {}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Network == nil {
		o.Network = transport.TCP{}
	}
	return o, nil
}

const maxWorld = 1 << 16
