package sched

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestNewLayout(t *testing.T) {
	f := func(tensors []Tensor, wantOffsets, wantSpaces []int64) {
		t.Helper()
		l, err := NewLayout(tensors)
		if err != nil {
			t.Fatalf("%v: %v", tensors, err)
		}
		var offsets, spaces []int64
		for i, x := range tensors {
			offsets = append(offsets, l.Offset(i))
			if l.Tensor(i) != x {
				t.Errorf("%v: tensor %d is %v", tensors, i, l.Tensor(i))
			}
		}
		for s := range l.Spaces() {
			spaces = append(spaces, l.SpaceBytes(s))
		}
		if l.Tensors() != len(tensors) || !cmp.Equal(offsets, wantOffsets) || !cmp.Equal(spaces, wantSpaces) {
			t.Errorf("%v: offsets %v in spaces of %v bytes, want %v in %v", tensors, offsets, spaces, wantOffsets, wantSpaces)
		}
	}
	f([]Tensor{{0, 1}}, []int64{0}, []int64{64})
	f([]Tensor{{0, 64}, {0, 65}, {0, 1}}, []int64{0, 64, 192}, []int64{256})
	f([]Tensor{{1, 10}, {0, 100}, {1, 200}, {0, 4}}, []int64{0, 0, 64, 128}, []int64{192, 320})
}

func TestNewLayoutRefuses(t *testing.T) {
	f := func(tensors []Tensor, want string) {
		t.Helper()
		if _, err := NewLayout(tensors); err == nil || err.Error() != want {
			t.Errorf("%v: error %v, want %s", tensors, err, want)
		}
	}
	f(nil, "sched: layout without tensors; give at least one")
	f([]Tensor{{0, 8}, {0, 0}}, "sched: tensor 1 has 0 bytes; a size must be positive and all together at most 1152921504606846976")
	f([]Tensor{{0, 1 << 60}, {0, 1}}, "sched: tensor 1 has 1 bytes; a size must be positive and all together at most 1152921504606846976")
	f([]Tensor{{0, 1 << 62}}, "sched: tensor 0 has 4611686018427387904 bytes; a size must be positive and all together at most 1152921504606846976")
	f([]Tensor{{-1, 8}}, "sched: tensor 0 is in space -1; 1 tensors have spaces 0 to 0 at most, without holes")
	f([]Tensor{{0, 8}, {2, 8}}, "sched: tensor 1 is in space 2; 2 tensors have spaces 0 to 1 at most, without holes")
	f([]Tensor{{0, 8}, {2, 8}, {0, 8}}, "sched: space 1 has no tensor, space 2 has; number the spaces 0 to k-1 without holes")
}

// text writes partitions as space[begin:end) of tensors first-last.
func text(p *Plan) string {
	var words []string
	for i := range p.Len() {
		q := p.Partition(i)
		words = append(words, fmt.Sprintf("%d[%d:%d)%d-%d", q.Space, q.Offset, q.Offset+q.Bytes, q.First, q.Last))
	}
	return strings.Join(words, " ")
}

func TestNewPlan(t *testing.T) {
	f := func(tensors []Tensor, partition, fusion int64, want string) {
		t.Helper()
		if got := text(mustPlan(mustLayout(tensors), Config{Partition: partition, Credit: 1, Fusion: fusion})); got != want {
			t.Errorf("%v partition %d fusion %d:\n%s, want\n%s", tensors, partition, fusion, got, want)
		}
	}
	// Equal pieces: 5 units in 3, none over two.
	f([]Tensor{{0, 300}}, 128, 0, "0[0:128)0-0 0[128:256)0-0 0[256:320)0-0")
	f([]Tensor{{0, 640}}, 512, 0, "0[0:320)0-0 0[320:640)0-0")
	// A partition size between two multiples is rounded down.
	f([]Tensor{{0, 256}}, 255, 0, "0[0:128)0-0 0[128:256)0-0")
	f([]Tensor{{0, 1}}, 64, 0, "0[0:64)0-0")
	// Joined up to the fusion size, padding included, and no further.
	f([]Tensor{{0, 10}, {0, 10}, {0, 10}}, 64, 128, "0[0:128)0-1 0[128:192)2-2")
	f([]Tensor{{0, 10}, {0, 10}, {0, 10}}, 64, 191, "0[0:128)0-1 0[128:192)2-2")
	f([]Tensor{{0, 10}, {0, 10}, {0, 10}}, 64, 192, "0[0:192)0-2")
	// Smaller than the fusion size counts without padding; alone it may exceed it.
	f([]Tensor{{0, 99}, {0, 1}}, 64, 100, "0[0:128)0-0 0[128:192)1-1")
	// As large as the fusion size is not smaller: it breaks the run and is cut.
	f([]Tensor{{0, 10}, {0, 256}, {0, 10}, {0, 10}}, 128, 256, "0[0:64)0-0 0[64:192)1-1 0[192:320)1-1 0[320:448)2-3")
	// Runs stay in their space; the first tensor decides the place in the order.
	f([]Tensor{{0, 10}, {1, 200}, {0, 10}, {1, 10}, {0, 10}}, 128, 192,
		"0[0:192)0-4 1[0:128)1-1 1[128:256)1-1 1[256:320)3-3")
}

func TestNewPlanRefuses(t *testing.T) {
	l := mustLayout([]Tensor{{0, 1 << 40}})
	f := func(l *Layout, c Config, want string) {
		t.Helper()
		if _, err := NewPlan(l, c); err == nil || err.Error() != want {
			t.Errorf("%+v: error %v, want %s", c, err, want)
		}
	}
	f(nil, Config{Partition: 64, Credit: 1}, "sched: plan without a layout; make one with NewLayout")
	f(l, Config{Partition: 64, Credit: 1}, "sched: partitions of 64 bytes cut this layout into more than 16777216; choose a larger partition size")
	f(l, Config{Partition: 63, Credit: 1}, "sched: partition is 63 bytes; it must be at least 64")
	f(l, Config{Partition: 63, Fusion: -1, Lanes: -2, Policy: 9}, "sched: partition is 63 bytes; it must be at least 64\n"+
		"sched: credit is 0 bytes; it must be at least 1\n"+
		"sched: fusion is -1 bytes; it must not be negative, and 0 joins nothing\n"+
		"sched: lanes is -2; it must not be negative, and 0 sets no limit\n"+
		"sched: policy is 9; it must be 0 (priority) or 1 (fifo)")
}

// TestPlanProperties states what every plan keeps.
func TestPlanProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, c := drawLayout(t), drawConfig(t)
		p := mustPlan(l, c)
		next := make([]int64, l.Spaces()) // where the space is not yet cut
		last := Partition{First: -1}
		owner := map[int]int{}
		for i := range p.Len() {
			q := p.Partition(i)
			if q.Offset != next[q.Space] || q.Bytes <= 0 || q.Bytes%Align != 0 {
				t.Fatalf("%v does not continue its space at %d in multiples of %d", q, next[q.Space], Align)
			}
			next[q.Space] += q.Bytes
			if q.First < last.First || q.First == last.First && q.Offset <= last.Offset {
				t.Fatalf("%v comes after %v", q, last)
			}
			last = q
			tensors := covers(p, i)
			if got := p.AppendTensors(nil, i); !cmp.Equal(got, tensors) || q.First != tensors[0] || q.Last != tensors[len(tensors)-1] {
				t.Fatalf("%v covers %v, says %v", q, tensors, got)
			}
			for _, x := range tensors {
				if first, n := p.Partitions(x); i < first || i >= first+n {
					t.Fatalf("tensor %d: partition %d is not among %d from %d", x, i, n, first)
				}
				owner[x]++
				small := l.Tensor(x).Bytes < c.Fusion
				if !small && (len(tensors) > 1 || q.Bytes > c.Partition) {
					t.Fatalf("%v covers tensor %d, which is to be cut alone", q, x)
				}
				if small && owner[x] > 1 {
					t.Fatalf("tensor %d is smaller than the fusion size and cut", x)
				}
			}
			if len(tensors) > 1 && q.Bytes > c.Fusion {
				t.Fatalf("%v is joined beyond the fusion size", q)
			}
		}
		for s, end := range next {
			if end != l.SpaceBytes(s) {
				t.Fatalf("space %d is cut up to %d of %d", s, end, l.SpaceBytes(s))
			}
		}
		for x, n := range owner {
			if _, count := p.Partitions(x); n != count {
				t.Fatalf("tensor %d lies in %d partitions, says %d", x, n, count)
			}
		}
		if again := mustPlan(l, c); again.Hash() != p.Hash() || text(again) != text(p) {
			t.Fatal("the same layout and configuration make another plan")
		}
	})
}

func TestHashesDiffer(t *testing.T) {
	two := []Tensor{{0, 64}, {0, 64}}
	base := Config{Partition: 64, Credit: 64}
	layouts, plans := map[uint64]bool{}, map[uint64]bool{}
	for _, tensors := range [][]Tensor{two, {{0, 64}, {0, 63}}, {{0, 64}, {1, 64}}, {{1, 64}, {0, 64}}, {{0, 64}, {0, 64}, {0, 64}}} {
		l := mustLayout(tensors)
		if layouts[l.Hash()] {
			t.Errorf("%v: the hash is another layout's", tensors)
		}
		layouts[l.Hash()] = true
		for _, c := range []Config{base, {128, 64, 0, 0, 0}, {64, 128, 0, 0, 0}, {64, 64, 64, 0, 0}, {64, 64, 0, 64, 0}, {64, 64, 0, 0, 1}} {
			p := mustPlan(l, c)
			if plans[p.Hash()] || p.Config() != c {
				t.Errorf("%v %+v: the hash is another plan's, or the configuration is %+v", tensors, c, p.Config())
			}
			plans[p.Hash()] = true
		}
	}
	// Ranks of different builds and machines compare hashes: they must not drift.
	const layoutHash, planHash = 0x55f83f732a6e02ee, 0x3c6429a6ed6a9977
	p := mustPlan(mustLayout(two), base)
	if p.Layout().Hash() != layoutHash || p.Hash() != planHash {
		t.Errorf("hashes are %#x and %#x, want %#x and %#x; if the definition changed, so must the protocol version",
			p.Layout().Hash(), p.Hash(), uint64(layoutHash), uint64(planHash))
	}
}

func TestConfigText(t *testing.T) {
	c := Config{Partition: 1 << 20, Credit: 4 << 20, Fusion: 65536, Lanes: 2, Policy: FIFO}
	const want = `{"partition":1048576,"credit":4194304,"fusion":65536,"lanes":2,"policy":"fifo"}`
	got, err := json.Marshal(c)
	if err != nil || string(got) != want {
		t.Errorf("%s, %v, want %s", got, err, want)
	}
	var back Config
	if err := json.Unmarshal(got, &back); err != nil || back != c {
		t.Errorf("%+v, %v, want %+v", back, err, c)
	}
	f := func(text string, want Policy, fails string) {
		t.Helper()
		p, err := ParsePolicy(text)
		if fails != "" {
			if err == nil || err.Error() != fails {
				t.Errorf("%q: error %v, want %s", text, err, fails)
			}
			return
		}
		if err != nil || p != want || p.String() != text {
			t.Errorf("%q: %v %v, want %v", text, p, err, want)
		}
	}
	f("priority", Priority, "")
	f("fifo", FIFO, "")
	f("FIFO", 0, `sched: unknown policy "FIFO"; allowed are "priority" and "fifo"`)
	if _, err := json.Marshal(Config{Policy: 7}); err == nil {
		t.Error("an unknown policy has a text")
	}
	if err := json.Unmarshal([]byte(`{"policy":"lifo"}`), &back); err == nil || back.Policy != FIFO {
		t.Errorf("unknown policy: %v, policy now %v", err, back.Policy)
	}
}

// TestMinSet compares with a map at sizes around the words of each level.
func TestMinSet(t *testing.T) {
	var m minSet // one for all, as a slot reuses its own
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.OneOf(rapid.IntRange(1, 130), rapid.IntRange(4090, 4100), rapid.IntRange(262100, 262200)).Draw(t, "limit")
		m.reset(n)
		in := map[int32]bool{}
		for _, i := range rapid.SliceOfN(rapid.Int32Range(0, int32(n)-1), 1, 60).Draw(t, "members") {
			if in[i] {
				m.remove(i)
				delete(in, i)
			} else {
				m.add(i)
				in[i] = true
			}
			least := int32(n)
			for k := range in {
				least = min(least, k)
			}
			if m.n != len(in) || m.n > 0 && m.min() != least {
				t.Fatalf("%d members, least %d; want %d, %d", m.n, m.min(), len(in), least)
			}
		}
	})
}
