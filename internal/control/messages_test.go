package control

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"autobyte/internal/sched"
	"autobyte/internal/transport"
	"autobyte/internal/wire"
)

var someConfig = sched.Config{Partition: 4 << 20, Credit: 16 << 20, Fusion: 1 << 20, Lanes: 4, Policy: sched.FIFO}

// TestOrderStream: 100,000 orders with steps and layouts among them reach every
// follower complete and in order, whatever else goes on.
func TestOrderStream(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		g := rig{network: n}
		members := g.start(t, 3)
		const orders = 100_000
		var want []Event
		for i := range orders {
			if i%1000 == 0 {
				step := uint64(i / 1000)
				if i%20_000 == 0 {
					l := Layout{Generation: uint32(step), Tensors: someTensors, Order: []int32{2, 0, 1}}
					members[0].SendLayout(l)
					want = append(want, l)
				}
				o := Open{Generation: 1, Step: step, Iteration: step + 1, Config: someConfig, PlanHash: step * 77}
				members[0].SendOpen(o)
				want = append(want, o)
				for _, m := range members {
					m.SendClose(step, nil) // nothing absent: no verdict
				}
			}
			members[0].SendOrder(uint64(i/1000), i)
			want = append(want, Order{Step: uint64(i / 1000), Index: i})
		}
		for _, m := range members[1:] {
			m.until(t, "all orders", func(e []Event) bool { return len(e) >= len(want) })
			got := m.seen()
			for i := range want {
				if !cmp.Equal(got[i], want[i]) {
					t.Fatalf("rank %d: event %d is %v, want %v", m.rank, i, got[i], want[i])
				}
			}
			if len(got) > len(want) {
				t.Errorf("rank %d: more than was sent: %v", m.rank, got[len(want):])
			}
		}
	})
}

// TestOneOrderForAll: whichever goroutines send, followers see the same order.
func TestOneOrderForAll(t *testing.T) {
	g := rig{network: &transport.Memory{}}
	members := g.start(t, 4)
	var wg sync.WaitGroup
	for sender := range 8 {
		wg.Go(func() {
			for i := range 1000 {
				members[0].SendOrder(uint64(sender), i)
			}
		})
	}
	wg.Wait()
	for _, m := range members[1:] {
		m.until(t, "all orders", func(e []Event) bool { return len(e) == 8000 })
	}
	for _, m := range members[2:] {
		if !slices.Equal(m.seen(), members[1].seen()) {
			t.Errorf("ranks 1 and %d saw different orders", m.rank)
		}
	}
}

// dumbVerdict is the rule in its own words.
func dumbVerdict(tensors int, absent [][]int) (verdict []int, due bool) {
	for tensor := range tensors {
		everywhere := true
		for _, a := range absent {
			if !slices.Contains(a, tensor) {
				everywhere = false
			} else {
				due = true
			}
		}
		if everywhere {
			verdict = append(verdict, tensor)
		}
	}
	return verdict, due
}

// TestTally compares with the dumb rule, over random absences and interleavings.
func TestTally(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const tensors = 6
		world := rapid.IntRange(1, 5).Draw(t, "world")
		steps := rapid.IntRange(1, 6).Draw(t, "steps")
		absent := make([][][]int, steps) // by step and rank
		for step := range absent {
			absent[step] = make([][]int, world)
			for rank := range absent[step] {
				bits := rapid.IntRange(0, 1<<tensors-1).Draw(t, "absent")
				if rapid.Bool().Draw(t, "none") {
					bits = 0
				}
				for tensor := range tensors {
					if bits>>tensor&1 == 1 {
						absent[step][rank] = append(absent[step][rank], tensor)
					}
				}
			}
		}
		tally := newTally(world)
		next := make([]int, world)
		verdicts := 0
		for range steps * world {
			var can []int
			for rank, step := range next {
				if step < steps {
					can = append(can, rank)
				}
			}
			rank := rapid.SampledFrom(can).Draw(t, "who closes")
			step := next[rank]
			next[rank]++
			var list []int32
			for _, tensor := range absent[step][rank] {
				list = append(list, int32(tensor))
			}
			got, due, err := tally.close(rank, uint64(step), list)
			if err != nil {
				t.Fatal(err)
			}
			want, wantDue := dumbVerdict(tensors, absent[step])
			if wantDue = wantDue && slices.Min(next) > step; due != wantDue {
				t.Fatalf("step %d: verdict due %v, want %v", step, due, wantDue)
			}
			if due {
				verdicts++
				if fmt.Sprint(got) != fmt.Sprint(want) {
					t.Fatalf("step %d: verdict %v, want %v", step, got, want)
				}
			}
			if _, _, err := tally.close(rank, uint64(step), nil); err == nil {
				t.Fatalf("rank %d closed step %d twice", rank, step)
			}
		}
		if len(tally.open) != 0 {
			t.Fatalf("%d steps are left over", len(tally.open))
		}
	})
}

func TestTallyIsBounded(t *testing.T) {
	tally := newTally(2)
	var err error
	step := uint64(0)
	for ; err == nil && step < 1<<20; step++ {
		_, _, err = tally.close(1, step, nil)
	}
	if len(tally.open) != maxOpenSteps || err == nil {
		t.Errorf("%d steps are open after %d, error %v", len(tally.open), step, err)
	}
	if _, _, err := tally.close(0, 1<<64-1, nil); err == nil {
		t.Error("the last step of all can be closed, and none after it")
	}
}

// TestVerdicts: the same rule through the whole stack: all ranks get the same.
func TestVerdicts(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		g := rig{network: n}
		const world, steps = 4, 200
		members := g.start(t, world)
		absent := make([][][]int, steps)
		var want []Event
		for step := range absent {
			absent[step] = make([][]int, world)
			for rank := range absent[step] {
				for tensor := range someTensors {
					if rand.IntN(2) == 0 && step%3 != 0 {
						absent[step][rank] = append(absent[step][rank], tensor)
					}
				}
				rand.Shuffle(len(absent[step][rank]), func(i, j int) {
					a := absent[step][rank]
					a[i], a[j] = a[j], a[i]
				})
			}
			if v, due := dumbVerdict(len(someTensors), absent[step]); due {
				want = append(want, Verdict{Step: uint64(step), Absent: append([]int{}, v...)})
			}
		}
		var wg sync.WaitGroup
		for rank, m := range members {
			wg.Go(func() {
				for step := range absent {
					m.SendClose(uint64(step), append(absent[step][rank], absent[step][rank]...))
				}
			})
		}
		wg.Wait()
		for _, m := range members {
			m.until(t, "all verdicts", func(e []Event) bool { return len(e) >= len(want) })
			if diff := cmp.Diff(want, m.seen()); diff != "" {
				t.Errorf("rank %d: %s", m.rank, diff)
			}
		}
	})
}

// TestMisuse: what this rank must not send is not sent, and logged.
func TestMisuse(t *testing.T) {
	g := rig{network: &transport.Memory{}}
	members := g.start(t, 2)
	leader, follower := members[0], members[1]
	follower.SendOrder(1, 1)
	follower.SendLayout(Layout{})
	follower.SendOpen(Open{Config: someConfig})
	leader.SendOrder(1, -1)
	leader.SendOpen(Open{})
	leader.SendLayout(Layout{Tensors: someTensors, Order: []int32{0, 0, 1}})
	leader.SendLayout(Layout{Tensors: []Tensor{{Shape: []int64{-1}}}, Order: []int32{0}})
	leader.SendClose(5, []int{-1, 3})
	leader.SendClose(5, nil)
	leader.SendOrder(7, 7)
	follower.until(t, "the one good order", func(e []Event) bool {
		return slices.Equal(e, []Event{Order{Step: 7, Index: 7}})
	})
	for _, m := range members {
		if m.log.String() == "" {
			t.Errorf("rank %d logged nothing", m.rank)
		}
	}
	leader.SendClose(6, []int{0})
	follower.SendClose(5, nil)
	follower.SendClose(6, []int{0, 1})
	follower.until(t, "a verdict", func(e []Event) bool { return count[Verdict](e) == 1 })
}

// stranger is an authenticated peer that does not keep to the rules.
func (g *rig) stranger(t *testing.T, rank int) *transport.Conn {
	t.Helper()
	o, _ := g.option(rank, len(g.ranks))
	c, err := transport.Dialer{Self: o.identity(), Secret: g.r.Secret, Network: g.network}.Dial(t.Context(), g.r.Addrs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.WriteFrame(wire.TypeRegister, wire.MarshalRegister(nil, toWire(o.Tensors)), time.Second); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestHostileFollower: it is lost with a reason, and the others go on.
func TestHostileFollower(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		f := func(typ wire.Type, payload []byte, want string) {
			t.Helper()
			g := rig{network: n}
			g.listen(t, 3)
			if _, err := g.join(t, 1); err != nil {
				t.Fatal(err)
			}
			c := g.stranger(t, 2)
			for rank, err := range g.await(t) {
				if err != nil {
					t.Fatalf("rank %d: %v", rank, err)
				}
			}
			if err := c.WriteFrame(typ, payload, time.Second); err != nil {
				t.Fatal(err)
			}
			for _, m := range g.ranks[:2] {
				if l := m.untilLost(t, 2); !cmp.Equal(l, Lost{Rank: 2, Reason: "it sent what it must not: " + want}) {
					t.Errorf("rank %d: %+v", m.rank, l)
				}
			}
			g.ranks[0].SendOrder(1, 1)
			g.ranks[1].until(t, "an order", func(e []Event) bool { return count[Order](e) == 1 })
			for _, m := range g.ranks[:2] {
				m.Close()
			}
		}
		f(wire.TypeOrder, wire.MarshalOrderFrame(nil, wire.Order{})[wire.HeaderSize:], "unexpected message: a message of type 20, which rank 0 does not take")
		f(wire.TypeClose, wire.MarshalAbsence(nil, &wire.Absence{Step: 4, Absent: []int32{3}}), "unexpected message: absent tensor 3 of 3 in step 4")
		f(wire.TypeClose, []byte{1}, "malformed message: absent tensors: ends 7 bytes too early")
		f(wire.TypeRegister, wire.MarshalRegister(nil, nil), "unexpected message: it registered twice")
		f(200, nil, "unexpected message: a message of type 200, which rank 0 does not take")
		f(wire.TypePing, nil, "malformed message: heartbeat: ends 8 bytes too early")
	})
}

// TestHostileLeader: the follower loses it with a reason.
func TestHostileLeader(t *testing.T) {
	networks(t, func(t *testing.T, n transport.Network) {
		f := func(typ wire.Type, payload []byte, want string) {
			t.Helper()
			g := rig{network: n, ranks: make([]*member, 2), r: Rendezvous{Secret: make([]byte, 32)}}
			l, err := n.Listen("127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			g.r.Addrs = []string{l.Addr().String()}
			o, _ := g.option(0, 2)
			conns := make(chan *transport.Conn, 1)
			s, err := transport.NewServer(l, transport.ServerOptions{Self: o.identity(), Secret: g.r.Secret,
				Admit: func(transport.Identity) error { return nil },
				Serve: func(c *transport.Conn, _ transport.Identity) { conns <- c }})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			m, err := g.join(t, 1)
			if err != nil {
				t.Fatal(err)
			}
			c := <-conns
			defer c.Close()
			if err := c.WriteFrame(wire.TypeStart, wire.MarshalStart(nil, &wire.Start{}), time.Second); err != nil {
				t.Fatal(err)
			}
			if err := m.Await(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := c.WriteFrame(typ, payload, time.Second); err != nil {
				t.Fatal(err)
			}
			if l := m.untilLost(t, 0); !cmp.Equal(l, Lost{Reason: "it sent what it must not: " + want}) {
				t.Errorf("%+v", l)
			}
			m.Close()
		}
		f(wire.TypeStart, wire.MarshalStart(nil, &wire.Start{}), "unexpected message: the job started twice")
		f(wire.TypeClose, nil, "unexpected message: a message of type 21, which only rank 0 takes")
		f(wire.TypeLost, wire.MarshalLost(nil, &wire.Lost{Rank: 1}), "unexpected message: rank 1 was reported lost to rank 1 of 2")
		f(wire.TypeLost, wire.MarshalLost(nil, &wire.Lost{Rank: 1 << 31}), "unexpected message: rank 2147483648 was reported lost to rank 1 of 2")
		f(wire.TypeVerdict, wire.MarshalAbsence(nil, &wire.Absence{Absent: []int32{99}}), "unexpected message: absent tensor 99 of 3 in step 0")
		f(wire.TypeOpen, wire.MarshalOpen(nil, &wire.Open{Step: 3, Credit: 1, Partition: 64, Policy: 9}), "unexpected message: step 3: sched: policy is 9; it must be 0 (priority) or 1 (fifo)")
		f(wire.TypeOrder, make([]byte, 11), "malformed message: order: 11 bytes, want 12")
	})
}

// FuzzReceive gives both roles arbitrary messages of an authenticated peer.
func FuzzReceive(f *testing.F) {
	f.Add(uint8(wire.TypeClose), wire.MarshalAbsence(nil, &wire.Absence{Step: 1, Absent: []int32{1}}))
	f.Add(uint8(wire.TypeRegister), wire.MarshalRegister(nil, toWire(someTensors)))
	f.Add(uint8(wire.TypeOpen), wire.MarshalOpen(nil, &wire.Open{Partition: 64, Credit: 1}))
	f.Add(uint8(wire.TypeLost), wire.MarshalLost(nil, &wire.Lost{Rank: 2}))
	f.Add(uint8(wire.TypeStart), wire.MarshalStart(nil, &wire.Start{Error: "no"}))
	f.Add(uint8(wire.TypePing), wire.MarshalStamp(nil, 1))
	f.Add(uint8(wire.TypeGoodbye), []byte(nil))
	for t := range 256 {
		f.Add(uint8(t), make([]byte, 12))
	}
	f.Fuzz(func(t *testing.T, typ uint8, payload []byte) {
		for rank := range 2 {
			o, err := Options{Rank: rank, World: 3, Tensors: someTensors}.validate()
			if err != nil {
				t.Fatal(err)
			}
			for _, ph := range []phase{joining, started} {
				g := newGroup(o)
				near, far := transport.Pipe()
				defer far.Close()
				p := newPeer(1-rank, transport.NewConn(near), time.Second)
				g.peers[p.rank] = p
				if ph == started {
					g.settleLocked(started, nil)
				}
				if err := g.receive(p, wire.Type(typ), payload); err != nil && p.lossReason(err) == "" {
					t.Fatal("an error without a reason")
				}
				p.stop()
			}
		}
	})
}
