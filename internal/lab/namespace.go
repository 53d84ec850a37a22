package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	workerInterface = "ab0"
	bridgeName      = "hub"
	subnetBits      = 24
)

// clusterCount tells apart the clusters of one process.
var clusterCount atomic.Int64

// Create makes a cluster of network namespaces and removes the remains of clusters whose owner has died. The
// caller must Close it. Without the rights that this needs, the error wraps ErrNotPermitted.
func Create(ctx context.Context, options Options) (_ *Cluster, err error) {
	if err := options.validate(); err != nil {
		return nil, err
	}
	c := newCluster(options)
	defer func() {
		if err != nil {
			err = errors.Join(permission(err), c.Close())
		}
	}()
	if os.Geteuid() != 0 {
		return nil, unix.EPERM
	}
	if err := RemoveRemains(c.options.Logger); err != nil {
		return nil, err
	}
	owner, err := selfOwner()
	if err != nil {
		return nil, err
	}
	prefix := fmt.Sprintf("%s-%d", owner, clusterCount.Add(1))
	if c.hub, err = c.newNamespace(prefix + "-hub"); err != nil {
		return nil, err
	}
	hub, err := netlink.NewHandleAt(c.hub)
	if err != nil {
		return nil, fmt.Errorf("lab: netlink in the hub: %w", err)
	}
	defer hub.Close()
	attributes := netlink.NewLinkAttrs()
	attributes.Name = bridgeName
	bridge := &netlink.Bridge{LinkAttrs: attributes}
	if err := errors.Join(hub.LinkAdd(bridge), hub.LinkSetUp(bridge)); err != nil {
		return nil, fmt.Errorf("lab: making the bridge: %w", err)
	}
	for i := range options.Workers {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		node := &Node{Rank: i, Address: netip.AddrFrom4([4]byte{10, 77, 0, byte(i + 1)}), Interface: workerInterface, cluster: c}
		if node.namespace, err = c.newNamespace(fmt.Sprintf("%s-w%d", prefix, i)); err != nil {
			return nil, err
		}
		c.nodes = append(c.nodes, node)
		if err := c.join(hub, bridge, node); err != nil {
			return nil, fmt.Errorf("lab: network of worker %d: %w", i, err)
		}
	}
	if options.Congestion != "" {
		if err := c.setCongestion(options.Congestion); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// permission marks errors that mean missing rights.
func permission(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("lab: %w: %w", ErrNotPermitted, err)
	}
	return err
}

// newNamespace makes a named namespace with a working loopback and without IPv6, whose neighbour discovery and
// link-local addresses would only make runs differ.
func (c *Cluster) newNamespace(name string) (netns.NsHandle, error) {
	handle := netns.None()
	err := onThread(func() error {
		// Named before it is made: what fails half-way is removed too.
		c.namespaces = append(c.namespaces, name)
		var err error
		if handle, err = mountNamespace(name); err != nil {
			return fmt.Errorf("lab: making namespace %s: %w", name, err)
		}
		for path, value := range map[string]string{
			"/proc/sys/net/ipv6/conf/all/disable_ipv6":     "1",
			"/proc/sys/net/ipv6/conf/default/disable_ipv6": "1",
			// One contender's connections must not teach the next one's.
			"/proc/sys/net/ipv4/tcp_no_metrics_save": "1",
		} {
			if err := os.WriteFile(path, []byte(value), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("lab: namespace %s: %w", name, err)
			}
		}
		loopback, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(loopback)
		}
		if err != nil {
			return fmt.Errorf("lab: loopback of namespace %s: %w", name, err)
		}
		return nil
	})
	return handle, err
}

// mountNamespace moves the calling thread into a new namespace and gives it a name, as a file it is mounted on.
func mountNamespace(name string) (netns.NsHandle, error) {
	path := filepath.Join(namespaceFolder, name)
	for attempt := 0; ; attempt++ {
		if err := os.MkdirAll(namespaceFolder, 0o755); err != nil {
			return netns.None(), err
		}
		file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o444)
		if errors.Is(err, os.ErrNotExist) && attempt < 10 {
			continue // another run removed the empty folder in between
		}
		if err != nil {
			return netns.None(), err
		}
		if err := file.Close(); err != nil {
			return netns.None(), err
		}
		break
	}
	handle, err := netns.New()
	if err != nil {
		return netns.None(), err
	}
	thread := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
	if err := unix.Mount(thread, path, "bind", unix.MS_BIND, ""); err != nil {
		return netns.None(), errors.Join(fmt.Errorf("mounting it on %s: %w", path, err), handle.Close())
	}
	return handle, nil
}

// join connects a node's namespace with the bridge and shapes both ends.
func (c *Cluster) join(hub *netlink.Handle, bridge *netlink.Bridge, node *Node) error {
	attributes := netlink.NewLinkAttrs()
	attributes.Name = fmt.Sprintf("w%d", node.Rank)
	attributes.MasterIndex = bridge.Index
	err := hub.LinkAdd(&netlink.Veth{LinkAttrs: attributes, PeerName: workerInterface, PeerNamespace: netlink.NsFd(node.namespace)})
	if err != nil {
		return fmt.Errorf("adding the veth pair: %w", err)
	}
	worker, err := netlink.NewHandleAt(node.namespace)
	if err != nil {
		return err
	}
	defer worker.Close()
	for _, end := range []struct {
		handle *netlink.Handle
		name   string
	}{{hub, attributes.Name}, {worker, workerInterface}} {
		link, err := end.handle.LinkByName(end.name)
		if err != nil {
			return fmt.Errorf("finding %s: %w", end.name, err)
		}
		if end.handle == worker {
			address := &netlink.Addr{IPNet: &net.IPNet{IP: node.Address.AsSlice(), Mask: net.CIDRMask(subnetBits, 32)}}
			if err := worker.AddrAdd(link, address); err != nil {
				return fmt.Errorf("adding address %s: %w", node.Address, err)
			}
		}
		if err := end.handle.LinkSetUp(link); err != nil {
			return fmt.Errorf("starting %s: %w", end.name, err)
		}
		if c.options.Rate == 0 {
			continue
		}
		if err := end.handle.QdiscAdd(shaper(link, c.options.Rate)); err != nil {
			return fmt.Errorf("shaping %s to %s with tbf: %w", end.name, c.options.Rate, err)
		}
	}
	return nil
}

func shaper(link netlink.Link, rate Rate) *netlink.Tbf {
	bytesPerSecond := uint64(rate.BytesPerSecond())
	return &netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       bytesPerSecond,
		Limit:      rate.queue(),
		Buffer:     netlink.Xmittime(bytesPerSecond, rate.burst()),
	}
}

const (
	availablePath = "/proc/sys/net/ipv4/tcp_available_congestion_control"
	allowedPath   = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
	currentPath   = "/proc/sys/net/ipv4/tcp_congestion_control"
)

// setCongestion sets the congestion control of every worker. A namespace may only choose what the machine
// allows to everyone, so the machine's list is widened for that moment and put back.
func (c *Cluster) setCongestion(name string) (err error) {
	available, err := os.ReadFile(availablePath)
	if err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	if !slices.Contains(strings.Fields(string(available)), name) {
		return fmt.Errorf("lab: congestion control %q: this kernel has %s", name, strings.Join(strings.Fields(string(available)), ", "))
	}
	// The folder, which is there as long as any cluster is, serialises the processes that change the machine's list.
	lock, err := os.Open(namespaceFolder)
	if err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	defer lock.Close() // and with it the lock ends
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lab: locking %s: %w", namespaceFolder, err)
	}
	allowed, err := os.ReadFile(allowedPath)
	if err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	if !slices.Contains(strings.Fields(string(allowed)), name) {
		if err := os.WriteFile(allowedPath, []byte(strings.TrimSpace(string(allowed))+" "+name), 0); err != nil {
			return fmt.Errorf("lab: allowing congestion control %s: %w", name, err)
		}
		defer func() {
			if restore := os.WriteFile(allowedPath, allowed, 0); restore != nil {
				err = errors.Join(err, fmt.Errorf("lab: putting back %s: %w", allowedPath, restore))
			}
		}()
	}
	for _, n := range c.nodes {
		if err := n.inside(func() error { return os.WriteFile(currentPath, []byte(name), 0) }); err != nil {
			return fmt.Errorf("lab: congestion control %s for worker %d: %w", name, n.Rank, err)
		}
	}
	return nil
}

// inside runs f on a thread in the node's namespace and waits for it. Sockets that f makes stay there.
func (n *Node) inside(f func() error) error {
	return onThread(func() error {
		if err := n.enter(); err != nil {
			return err
		}
		return f()
	})
}

// enter moves the calling thread, which must be about to end with its goroutine, into the namespace.
func (n *Node) enter() error {
	if !n.namespace.IsOpen() {
		return nil
	}
	if err := netns.Set(n.namespace); err != nil {
		return fmt.Errorf("lab: entering the namespace of worker %d: %w", n.Rank, err)
	}
	return nil
}

// onThread runs f on a thread of its own, which ends after it and so takes along what f did to it.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go ownThread(func() { done <- f() })
	return <-done
}

// ownThread runs f locked to a thread that ends with the calling goroutine. The main thread never ends, so it is
// held while another is found.
func ownThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		began := make(chan struct{})
		go ownThread(func() { close(began); f() })
		<-began
		runtime.UnlockOSThread()
		return
	}
	f()
}
