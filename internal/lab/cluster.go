package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"

	"github.com/vishvananda/netns"
)

// MaxWorkers bounds a cluster: all of it runs on one machine.
const MaxWorkers = 64

// Options says what cluster Create makes.
type Options struct {
	// Workers is the number of nodes, 1 to MaxWorkers.
	Workers int
	// Rate limits every link in each direction; 0 leaves the links unshaped.
	Rate Rate
	// Congestion is the TCP congestion control inside the namespaces (cubic, bbr, reno, ...). Empty leaves
	// the machine's own.
	Congestion string
	// Logger gets a line for each remains removed. Nil discards.
	Logger *slog.Logger
}

func (o Options) validate() error {
	if o.Workers < 1 || o.Workers > MaxWorkers {
		return fmt.Errorf("lab: %d workers: want 1 to %d", o.Workers, MaxWorkers)
	}
	if o.Rate != 0 && (o.Rate < MinRate || o.Rate > MaxRate) {
		return fmt.Errorf("lab: rate of %d bit/s: want 0, or %d to %d", o.Rate, MinRate, MaxRate)
	}
	return nil
}

// ErrNotPermitted is what Create returns, wrapped, where namespaces need rights that the process lacks.
var ErrNotPermitted = errors.New("network is not limited: needs root")

// Cluster is a set of nodes that reach each other by TCP.
type Cluster struct {
	options    Options
	nodes      []*Node
	namespaces []string // named namespaces that Close removes, the hub among them
	hub        netns.NsHandle

	close     sync.Once
	closeErr  error
	context   context.Context // ends with Close, and every process with it
	cancel    context.CancelFunc
	processes sync.WaitGroup
	starting  sync.Mutex // orders Start's processes.Add before Close's cancel, or after it
}

// Node is one machine of a cluster.
type Node struct {
	// Rank is the node's index.
	Rank int
	// Address is where the other nodes reach it, Interface the interface that has this address.
	Address   netip.Addr
	Interface string

	cluster   *Cluster
	namespace netns.NsHandle // closed (-1) on an unlimited cluster
}

// Loopback returns a cluster without namespaces: every node is this machine, its network loopback. Anyone may
// make one. Rate and Congestion must be unset.
func Loopback(options Options) (*Cluster, error) {
	if err := options.validate(); err != nil {
		return nil, err
	}
	if options.Rate != 0 || options.Congestion != "" {
		return nil, fmt.Errorf("lab: loopback cannot have rate %s or congestion control %q: %w", options.Rate, options.Congestion, ErrNotPermitted)
	}
	c := newCluster(options)
	for i := range options.Workers {
		c.nodes = append(c.nodes, &Node{Rank: i, Address: netip.AddrFrom4([4]byte{127, 0, 0, 1}), Interface: "lo", cluster: c, namespace: netns.None()})
	}
	return c, nil
}

func newCluster(options Options) *Cluster {
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	c := &Cluster{options: options, hub: netns.None()}
	c.context, c.cancel = context.WithCancel(context.Background())
	return c
}

// Nodes returns the nodes by rank.
func (c *Cluster) Nodes() []*Node { return c.nodes }

// Limited says whether the links are shaped.
func (c *Cluster) Limited() bool { return len(c.namespaces) > 0 && c.options.Rate != 0 }

// Describe says in a few words what network the nodes have.
func (c *Cluster) Describe() string {
	if len(c.namespaces) == 0 {
		return "loopback, not limited"
	}
	congestion := c.options.Congestion
	if congestion == "" {
		congestion = "this machine's congestion control"
	}
	if c.options.Rate == 0 {
		return "network namespaces, not limited, " + congestion
	}
	return fmt.Sprintf("network namespaces, %s each way (tbf at both ends of every link), %s", c.options.Rate, congestion)
}

// Close ends every process of the cluster and removes its namespaces. It may be called more than once.
func (c *Cluster) Close() error {
	c.close.Do(func() {
		c.starting.Lock()
		c.cancel()
		c.starting.Unlock()
		c.processes.Wait() // bounded: cancelled processes are killed, and their output is given up after killGrace
		for _, n := range c.nodes {
			if n.namespace.IsOpen() {
				c.closeErr = errors.Join(c.closeErr, n.namespace.Close())
			}
		}
		if c.hub.IsOpen() {
			c.closeErr = errors.Join(c.closeErr, c.hub.Close())
		}
		for _, name := range c.namespaces {
			c.closeErr = errors.Join(c.closeErr, removeNamespace(name, c.options.Logger))
		}
	})
	return c.closeErr
}
