package control

import (
	"context"
	"encoding/json"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"autobyte/internal/transport"
)

func TestJoin(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		for _, world := range []int{1, 2, 5} {
			g := rig{network: n}
			for rank, m := range g.start(t, world) {
				if got := string(m.LeaderSettings()); got != `{"rank":0}` {
					t.Errorf("world %d: rank %d has settings %s, want rank 0's", world, rank, got)
				}
				want := 1
				if rank == 0 {
					want = world - 1
				}
				if got := len(m.Alive()); got != want {
					t.Errorf("world %d: rank %d sees %d peers alive, want %d", world, rank, got, want)
				}
			}
			for _, m := range g.ranks {
				if err := m.Close(); err != nil {
					t.Error(err)
				}
			}
		}
	})
}

// TestRendezvousTravels: a store keeps text.
func TestRendezvousTravels(t *testing.T) {
	g := rig{network: transport.TCP{}}
	g.listen(t, 2)
	text, err := json.Marshal(g.r)
	if err != nil {
		t.Fatal(err)
	}
	g.r = Rendezvous{}
	if err := json.Unmarshal(text, &g.r); err != nil {
		t.Fatal(err)
	}
	if _, err := g.join(t, 1); err != nil {
		t.Fatal(err)
	}
	for rank, err := range g.await(t) {
		if err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
}

// TestTensorsDiffer: every rank of three gets the same words, which name the
// rank and the tensor.
func TestTensorsDiffer(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		f := func(change func([]Tensor) []Tensor, want ...string) {
			t.Helper()
			g := rig{network: n, options: func(rank int, o *Options) {
				if rank == 2 {
					o.Tensors = change(slices.Clone(someTensors))
				}
			}}
			g.listen(t, 3)
			for rank := 1; rank < 3; rank++ {
				if _, err := g.join(t, rank); err != nil {
					t.Fatal(err)
				}
			}
			for rank, err := range g.await(t) {
				if err == nil {
					t.Errorf("rank %d: no error", rank)
					continue
				}
				for _, w := range append(want, "rank 2 and rank 0") {
					if !strings.Contains(err.Error(), w) {
						t.Errorf("rank %d: error %q does not say %q", rank, err, w)
					}
				}
			}
		}
		f(func(t []Tensor) []Tensor { return t[:2] },
			"3 tensors on rank 0 and 2 on rank 2", `tensor 2, "fc.weight" with shape [10 8]`)
		f(func(t []Tensor) []Tensor {
			return append(t, Tensor{Name: "fc.bias", DType: "float32", Shape: []int64{10}})
		},
			"3 tensors on rank 0 and 4 on rank 2", `tensor 3, "fc.bias"`)
		f(func(t []Tensor) []Tensor { t[1].Name = "norm.weight"; return t },
			`tensor 1 is "bn.weight"`, `"norm.weight"`)
		f(func(t []Tensor) []Tensor { t[2].Shape = []int64{11, 8}; return t },
			`tensor 2 is "fc.weight" with shape [10 8]`, `shape [11 8] and dtype float32 on rank 2`)
		f(func(t []Tensor) []Tensor { t[0].DType = "bfloat16"; return t },
			`tensor 0 is "conv.weight"`, "dtype float32 on rank 0", "dtype bfloat16 on rank 2")
		f(func(t []Tensor) []Tensor { t[0], t[1] = t[1], t[0]; return t },
			`tensor 0 is "conv.weight"`, `and "bn.weight"`)
	})
}

// TestMissingRanks: those who came are told who did not, and a late one why.
func TestMissingRanks(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		g := rig{network: n, options: func(rank int, o *Options) {
			if rank == 0 {
				o.Timeout = 2 * time.Second
			}
		}}
		g.listen(t, 4)
		if _, err := g.join(t, 2); err != nil {
			t.Fatal(err)
		}
		for rank, err := range g.await(t) {
			if g.ranks[rank] != nil && (err == nil || !strings.Contains(err.Error(), "ranks 1, 3") || !strings.Contains(err.Error(), "2s")) {
				t.Errorf("rank %d: %v, want one that names ranks 1, 3 and the time", rank, err)
			}
		}
		if _, err := g.join(t, 1); err == nil || !strings.Contains(err.Error(), "the job can't start") || !strings.Contains(err.Error(), "ranks 1, 3") {
			t.Errorf("the late rank: %v", err)
		}
	})
}

// TestNobodyLeads: ranks without rank 0 give up within the timeout.
func TestNobodyLeads(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		g := rig{network: n, options: func(rank int, o *Options) { o.Timeout = 300 * time.Millisecond }}
		g.listen(t, 2)
		g.ranks[0].Close()
		if _, err := g.join(t, 1); err == nil || !strings.Contains(err.Error(), "rank 1 can't join rank 0: not reached within 300ms") {
			t.Errorf("%v", err)
		}
	})
}

func TestRefusedRanks(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		var change func(*Options)
		g := rig{network: n, options: func(rank int, o *Options) {
			if rank == 2 && change != nil {
				change(o)
			}
		}}
		g.listen(t, 3)
		f := func(f func(*Options), want string) {
			t.Helper()
			change = f
			if _, err := g.join(t, 2); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want an error with %q", err, want)
			}
		}
		if _, err := g.join(t, 1); err != nil {
			t.Fatal(err)
		}
		f(func(o *Options) { o.Rank = 1 }, "rank 1 has joined already")
		f(func(o *Options) { o.World = 4 }, "world size of 4")
		f(func(o *Options) { o.Job = "other" }, `job "other"`)
		secret := g.r.Secret
		g.r.Secret = slices.Repeat([]byte{1}, 32)
		f(nil, "the secrets of the two sides differ")
		g.r.Secret = secret
		f(func(o *Options) { o.Rank = 0 }, "it leads; use Listen")
		change = nil
		if _, err := g.join(t, 2); err != nil {
			t.Fatal(err)
		}
		for rank, err := range g.await(t) {
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
		f(nil, "rank 2 has joined already")
		g.ranks[2].Leave()
		g.ranks[0].untilLost(t, 2)
		f(nil, "the job runs already")
	})
}

// TestLostWhileJoining: a rank that had registered and goes ends the start for all.
func TestLostWhileJoining(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		f := func(end func(*member), want string) {
			t.Helper()
			g := rig{network: n}
			g.listen(t, 3)
			for rank := 1; rank < 3; rank++ {
				if _, err := g.join(t, rank); err != nil {
					t.Fatal(err)
				}
				if rank == 1 {
					end(g.ranks[1])
				}
				if rank == 1 {
					g.ranks[1] = nil
					break
				}
			}
			errs := g.await(t)
			if errs[0] == nil || !strings.Contains(errs[0].Error(), want) {
				t.Errorf("rank 0: %v, want an error with %q", errs[0], want)
			}
		}
		f(func(m *member) { m.Leave() }, "rank 1 was lost before the job could start: it left")
		f(func(m *member) { m.Fail("no memory") }, "rank 1 was lost before the job could start: no memory")
		f(func(m *member) {
			for start := time.Now(); time.Since(start) < patience && len(m.Alive()) == 0; {
				time.Sleep(time.Millisecond)
			}
			m.Close()
		}, "rank 1 was lost before the job could start: its connection ended")
	})
}

// TestAwaitIsCancelled: whoever stops waiting says so to the others.
func TestAwaitIsCancelled(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		f := func(canceller int, want string) {
			t.Helper()
			g := rig{network: n}
			g.listen(t, 3)
			if _, err := g.join(t, 1); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := g.ranks[canceller].Await(ctx); err == nil || !strings.Contains(err.Error(), "canceled") {
				t.Errorf("rank %d: %v", canceller, err)
			}
			other := 1 - canceller
			if err := g.ranks[other].Await(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("rank %d: %v, want an error with %q", other, err, want)
			}
		}
		f(0, "canceled")
		f(1, "rank 1 stopped waiting")
	})
}

func TestOptionsAreChecked(t *testing.T) {
	f := func(change func(*Options), want string) {
		t.Helper()
		o := Options{World: 2, Tensors: someTensors}
		change(&o)
		group, _, err := Listen(o)
		if err == nil {
			group.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want an error with %q", err, want)
		}
	}
	f(func(o *Options) { o.World = 0 }, "world size 0, want 1 to")
	f(func(o *Options) { o.Rank = 2 }, "rank 2, want 0 to 1")
	f(func(o *Options) { o.Rank = 1 }, "use Join")
	f(func(o *Options) { o.Timeout = -1 }, "timeout")
	f(func(o *Options) { o.Port = 70000 }, "port 70000, want 1 to 65535")
	f(func(o *Options) { o.Job = strings.Repeat("j", 256) }, "at most 255")
	f(func(o *Options) { o.Settings = make([]byte, 2<<20) }, "settings of 2097152 bytes")
	f(func(o *Options) { o.Tensors = []Tensor{{Name: "w", Shape: []int64{-2}}} }, "negative dimension")
	f(func(o *Options) { o.Interface = "nosuch0" }, `no interface "nosuch0" that is up and has an address; there are `)
}

// TestAddresses: loopback comes last, and an interface may be chosen.
func TestAddresses(t *testing.T) {
	all, err := interfaces()
	if err != nil || len(all) == 0 {
		t.Fatalf("%v, %v", all, err)
	}
	g, r, err := Listen(Options{World: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	loopbackSeen := false
	for _, addr := range r.Addrs {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			t.Fatal(err)
		}
		loopback := net.ParseIP(host).IsLoopback()
		if loopbackSeen && !loopback {
			t.Errorf("loopback is not last in %v", r.Addrs)
		}
		loopbackSeen = loopbackSeen || loopback
	}
	last := all[len(all)-1]
	chosen, r2, err := Listen(Options{World: 2, Interface: last.name})
	if err != nil {
		t.Fatal(err)
	}
	defer chosen.Close()
	if host, _, _ := net.SplitHostPort(r2.Addrs[0]); len(r2.Addrs) != 1 || host != last.hosts[0] {
		t.Errorf("on interface %s: %v, want %s only", last.name, r2.Addrs, last.hosts[0])
	}
}
