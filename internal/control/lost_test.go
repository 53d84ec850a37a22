package control

import (
	"strings"
	"sync"
	"testing"
	"time"

	"autobyte/internal/transport"
)

// TestLost ends one rank of four in each way, and looks at what the others get.
func TestLost(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		// The ranks that are ended from outside go through a proxy.
		f := func(rank int, end func(*member, *proxy), clean bool, want string) {
			t.Helper()
			var p *proxy
			g := rig{network: n, options: func(_ int, o *Options) { o.Timeout = 2 * time.Second }}
			g.via = func(r int) (string, error) {
				if rank != 0 && r != rank {
					return "", nil
				}
				if p == nil {
					p = newProxy(t, n, g.r.Addrs[len(g.r.Addrs)-1])
				}
				return p.l.Addr().String(), nil
			}
			members := g.start(t, 4)
			end(members[rank], p)
			for _, m := range members {
				if m.rank == rank {
					continue
				}
				l := m.untilLost(t, rank)
				if l.Clean != clean || !strings.Contains(l.Reason, want) {
					t.Errorf("rank %d got %+v, want clean %v and %q", m.rank, l, clean, want)
				}
				// The other followers are not lost with it.
				if got := lostOf(m.seen()); rank != 0 && len(got) != 1 {
					t.Errorf("rank %d lost more than rank %d: %v", m.rank, rank, got)
				}
			}
			for _, m := range members {
				m.Close()
			}
		}
		for _, rank := range []int{3, 0} {
			f(rank, func(m *member, p *proxy) { p.cut() }, false, "its connection")
			f(rank, func(m *member, p *proxy) { p.freeze() }, false, "nothing was heard from it for 2s")
			f(rank, func(m *member, p *proxy) { m.Leave() }, true, "")
			f(rank, func(m *member, p *proxy) { m.Fail("CUDA out of memory") }, false, "CUDA out of memory")
			f(rank, func(m *member, p *proxy) { m.Fail("first"); m.Fail("second"); m.Leave() }, false, "first")
			f(rank, func(m *member, p *proxy) { m.Close() }, false, "ended without goodbye")
		}
	})
}

// TestEachLossOnce: all but one go, in every way at once, and the one left
// hears of each exactly once (lostOf panics on a second).
func TestEachLossOnce(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		g := rig{network: n}
		members := g.start(t, 8)
		var wg sync.WaitGroup
		for rank := 2; rank < 8; rank++ {
			m := members[rank]
			wg.Go(func() {
				switch m.rank % 3 {
				case 0:
					m.Leave()
				case 1:
					m.Fail("error")
					m.Close()
				case 2:
					m.Close()
				}
			})
		}
		wg.Wait()
		for _, m := range members[:2] {
			m.until(t, "six losses", func(e []Event) bool { return count[Lost](e) >= 6 })
		}
		for _, m := range []*member{members[1], members[0]} {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
			if got := lostOf(m.seen()); m.rank == 1 && len(got) != 6 {
				t.Errorf("rank %d: %v", m.rank, got)
			}
		}
	})
}

// TestLastWordsArrive: a goodbye is read although its sender closes at once
// while the other side goes on sending.
func TestLastWordsArrive(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		for range 20 {
			g := rig{network: n}
			members := g.start(t, 2)
			stop := make(chan struct{})
			var wg sync.WaitGroup
			wg.Go(func() {
				for i := 0; ; i++ {
					select {
					case <-stop:
						return
					default:
						members[0].SendOrder(1, i%1000)
					}
					if i%1000 == 0 {
						time.Sleep(time.Millisecond)
					}
				}
			})
			members[1].until(t, "an order", func(e []Event) bool { return len(e) > 0 })
			members[1].Leave()
			if l := members[0].untilLost(t, 1); !l.Clean {
				t.Errorf("%+v, want a clean one", l)
			}
			close(stop)
			wg.Wait()
			members[0].Close()
		}
	})
}

// TestBacklog: a follower that takes nothing is lost when too much waits for
// it, and the others never notice.
func TestBacklog(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		var p *proxy
		g := rig{network: n, options: func(_ int, o *Options) { o.Timeout = patience }}
		g.via = func(r int) (string, error) {
			if r != 2 {
				return "", nil
			}
			p = newProxy(t, n, g.r.Addrs[len(g.r.Addrs)-1])
			return p.l.Addr().String(), nil
		}
		members := g.start(t, 3)
		p.freeze()
		big := Layout{} // about 400 KiB
		for i := range int32(100) {
			big.Tensors = append(big.Tensors, Tensor{Name: strings.Repeat("n", 4<<10)})
			big.Order = append(big.Order, i)
		}
		sent := 0
		for ; sent < 1000 && count[Lost](members[0].seen()) == 0; sent++ {
			members[0].SendLayout(big)
			members[1].until(t, "all layouts but ten", func(e []Event) bool { return count[Layout](e) >= sent-10 })
		}
		if l := members[0].untilLost(t, 2); !strings.Contains(l.Reason, "more than 16 MiB wait") {
			t.Errorf("after %d layouts: %+v", sent, l)
		}
		members[1].untilLost(t, 2)
		members[1].until(t, "all layouts", func(e []Event) bool { return count[Layout](e) == sent })
	})
}

// TestHeartbeats: peers that say nothing live longer than the timeout, and the
// round trip is measured.
func TestHeartbeats(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		const timeout = time.Second
		g := rig{network: n, options: func(_ int, o *Options) { o.Timeout = timeout }}
		members := g.start(t, 3)
		time.Sleep(2 * timeout)
		for _, m := range members {
			if events := m.seen(); len(events) > 0 {
				t.Errorf("rank %d saw %v", m.rank, events)
			}
			for _, s := range m.Alive() {
				if s.RoundTrip <= 0 || s.SinceHeard >= timeout {
					t.Errorf("rank %d: %+v", m.rank, s)
				}
			}
		}
	})
}

// TestCloseIsBounded: with a frozen peer, with a handler that hangs, and twice
// at once.
func TestCloseIsBounded(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		release := make(chan struct{})
		var p *proxy
		g := rig{network: n, options: func(rank int, o *Options) {
			if rank == 1 {
				o.Handle = func(Event) { <-release }
			}
		}}
		g.via = func(r int) (string, error) {
			if p == nil {
				p = newProxy(t, n, g.r.Addrs[len(g.r.Addrs)-1])
			}
			return p.l.Addr().String(), nil
		}
		members := g.start(t, 2)
		for i := range 100_000 { // more than a mailbox holds
			members[0].SendOrder(1, i)
		}
		p.freeze()
		closed := make(chan error, 4)
		for _, m := range members {
			for range 2 {
				go func() { closed <- m.Close() }()
			}
		}
		complaints := 0
		for range 4 {
			select {
			case err := <-closed:
				if err != nil {
					complaints++
				}
			case <-time.After(patience):
				t.Fatal("Close hangs")
			}
		}
		if complaints > 1 {
			t.Errorf("%d calls of Close complained, want one at most: that of the handler that hangs", complaints)
		}
		close(release)
		g.ranks[1].Fail("after the end") // nothing happens
		g.ranks[1].SendClose(1, nil)
		g.ranks[0].SendOrder(1, 1)
	})
}

// TestHandlerPanics: it is this rank's failure, not the program's end.
func TestHandlerPanics(t *testing.T) {
	g := rig{network: &transport.Memory{}, options: func(rank int, o *Options) {
		if rank == 1 {
			o.Handle = func(Event) { panic("oops") }
		}
	}}
	members := g.start(t, 2)
	members[0].SendOrder(1, 1)
	if l := members[0].untilLost(t, 1); l.Clean || !strings.Contains(l.Reason, "oops") {
		t.Errorf("%+v", l)
	}
}
