package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

const helperVariable = "AUTOBYTE_LAB_TEST_HELPER"

func TestMain(m *testing.M) {
	if os.Getenv(helperVariable) != "" {
		leaveRemains()
	}
	goleak.VerifyTestMain(m)
}

// leaveRemains makes a cluster with a process inside that outlives its parent, says so, and waits to be killed.
func leaveRemains() {
	c, err := Create(context.Background(), Options{Workers: 2, Rate: 1e8})
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	fmt.Println("owner", strings.Join(c.namespaces, " "))
	_, err = c.nodes[0].Start(context.Background(), Command{Name: "parent", Path: "/bin/sh",
		Args: []string{"-c", "setsid sleep 300 & echo orphan $!; wait"}, Env: os.Environ(), Stdout: func(line string) bool { fmt.Println(line); return true }})
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	time.Sleep(time.Minute)
	os.Exit(1)
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
}

func create(t *testing.T, options Options) *Cluster {
	t.Helper()
	needRoot(t)
	c, err := Create(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
		for _, name := range c.namespaces {
			if _, err := os.Stat(filepath.Join(namespaceFolder, name)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("namespace %s is still there after Close: %v", name, err)
			}
		}
	})
	return c
}

func loopback(t *testing.T, workers int) *Cluster {
	t.Helper()
	c, err := Loopback(Options{Workers: workers})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
	})
	return c
}

func TestRate(t *testing.T) {
	f := func(text string, want Rate) {
		t.Helper()
		if got, err := ParseRate(text); err != nil || got != want {
			t.Errorf("ParseRate(%q) = %v, %v, want %d", text, uint64(got), err, uint64(want))
		}
	}
	f("200mbit", 200e6)
	f("1gbit", 1e9)
	f("2.5Gbit", 2.5e9)
	f(" 1500 kbit", 1.5e6)
	f("none", 0)
	f("0", 0)
	bad := func(text string) {
		t.Helper()
		got, err := ParseRate(text)
		if err == nil {
			t.Errorf("ParseRate(%q) = %v, want an error", text, got)
		} else if !strings.Contains(err.Error(), strconv.Quote(text)) || !strings.Contains(err.Error(), "200mbit") {
			t.Errorf("ParseRate(%q): %q does not say what was given and what is allowed", text, err)
		}
	}
	for _, text := range []string{"", "fast", "200", "200mb", "-1mbit", "1kbit", "100gbit", "nanmbit", "infgbit", "1e400gbit", "mbit"} {
		bad(text)
	}
}

func TestRateReadsWhatItWrites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := Rate(rapid.Uint64Range(uint64(MinRate), uint64(MaxRate)).Draw(t, "rate"))
		back, err := ParseRate(r.String())
		if err != nil || back != r {
			t.Fatalf("%d is written as %s and read as %d, %v", uint64(r), r, uint64(back), err)
		}
	})
}

func FuzzParseRate(f *testing.F) {
	f.Add("200mbit")
	f.Add("1.5 GBIT")
	f.Fuzz(func(t *testing.T, text string) {
		if r, err := ParseRate(text); err == nil && r != 0 && (r < MinRate || r > MaxRate) {
			t.Fatalf("ParseRate(%q) = %d", text, r)
		}
	})
}

func TestOwner(t *testing.T) {
	self, err := selfOwner()
	if err != nil {
		t.Fatal(err)
	}
	f := func(name string, wantOurs, wantAlive bool) {
		t.Helper()
		pid, start, ours := parseOwner(name)
		if alive := ours && ownerLives(pid, start); ours != wantOurs || alive != wantAlive {
			t.Errorf("%q: ours %v, owner alive %v, want %v, %v", name, ours, alive, wantOurs, wantAlive)
		}
	}
	f(self+"-1-hub", true, true)
	f(fmt.Sprintf("autobyte-%d-1-1-hub", os.Getpid()), true, false) // an earlier process with our id
	f("autobyte-999999999-1-1-w0", true, false)
	f("autobyte-1", false, false)
	f("autobyte-x-1-1-hub", false, false)
	f("someone-1-1-1-hub", false, false)
}

func TestFlowOverShapedLink(t *testing.T) {
	if testing.Short() {
		t.Skip("measures for seconds")
	}
	f := func(rate Rate, congestion string) {
		t.Helper()
		c := create(t, Options{Workers: 2, Rate: rate, Congestion: congestion})
		if !c.Limited() {
			t.Error("a shaped cluster says that it is not limited")
		}
		got, err := c.MeasureTCP(t.Context(), 0, 1, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		both, err := c.MeasureTCPBothWays(t.Context(), 0, 1, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		share := func(r float64) float64 { return r / rate.BytesPerSecond() }
		t.Logf("%s %s: one way %.4f of the rate, both ways %.4f and %.4f", rate, congestion, share(got), share(both[0]), share(both[1]))
		// 1448 of 1514 bytes are payload. Above it would mean that the link is not shaped.
		if s := share(got); s > 0.965 || s < 0.5 {
			t.Errorf("a flow carries %.3f of the rate, want at most 0.956 and most of it", s)
		}
	}
	f(200e6, "cubic")
	f(200e6, "bbr")
	f(1e9, "cubic")
}

func TestCongestionControl(t *testing.T) {
	needRoot(t)
	before, err := os.ReadFile(allowedPath)
	if err != nil {
		t.Skip("this kernel does not list congestion controls: ", err)
	}
	f := func(name string) {
		t.Helper()
		available, _ := os.ReadFile(availablePath)
		if !strings.Contains(string(available), name) {
			t.Logf("this kernel has no %s", name)
			return
		}
		c := create(t, Options{Workers: 2, Congestion: name})
		for _, n := range c.Nodes() {
			var got []byte
			if err := n.inside(func() (err error) { got, err = os.ReadFile(currentPath); return err }); err != nil {
				t.Fatal(err)
			}
			if strings.TrimSpace(string(got)) != name {
				t.Errorf("worker %d uses %q, want %q", n.Rank, got, name)
			}
		}
	}
	f("cubic")
	f("reno")
	f("bbr")
	if _, err := Create(t.Context(), Options{Workers: 1, Congestion: "warp"}); err == nil || !strings.Contains(err.Error(), "warp") {
		t.Errorf("an unknown congestion control: error %v does not name it", err)
	}
	if after, _ := os.ReadFile(allowedPath); string(after) != string(before) {
		t.Errorf("the machine allows %q, before %q", after, before)
	}
}

func TestNamespacesAreApart(t *testing.T) {
	c := create(t, Options{Workers: 2})
	var out [2]string
	var commands []Command
	for i := range out {
		commands = append(commands, Command{Name: fmt.Sprint("rank ", i), Path: "/bin/sh", Args: []string{"-c", "cat /proc/net/fib_trie"},
			Env: os.Environ(), Stdout: func(line string) bool { out[i] += line + "\n"; return true }})
	}
	if err := c.RunAll(t.Context(), commands); err != nil {
		t.Fatal(err)
	}
	for i, n := range c.Nodes() {
		if !strings.Contains(out[i], n.Address.String()+"\n") || strings.Contains(out[i], c.Nodes()[1-i].Address.String()+"\n") {
			t.Errorf("worker %d does not have exactly its address %s:\n%s", i, n.Address, out[i])
		}
	}
	if own, err := os.ReadFile("/proc/net/fib_trie"); err == nil && strings.Contains(string(own), "10.77.0.") {
		t.Error("an address of the lab is on the machine itself")
	}
}

func TestCreateErrors(t *testing.T) {
	f := func(o Options, want string) {
		t.Helper()
		if _, err := Create(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Create(%+v): error %v does not say %q", o, err, want)
		}
		if _, err := Loopback(o); err == nil {
			t.Errorf("Loopback(%+v): want an error", o)
		}
	}
	f(Options{Workers: 0}, "0 workers")
	f(Options{Workers: 65}, "1 to 64")
	f(Options{Workers: 2, Rate: 5}, "5")
	if _, err := Loopback(Options{Workers: 2, Rate: 1e9}); !errors.Is(err, ErrNotPermitted) {
		t.Errorf("a limited loopback: error %v, want ErrNotPermitted", err)
	}
}

func TestCreateGivesUpWhenCancelled(t *testing.T) {
	needRoot(t)
	before := countOurs(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if c, err := Create(ctx, Options{Workers: 2}); !errors.Is(err, context.Canceled) {
		t.Errorf("Create under a cancelled context: %v, %v", c, err)
	}
	if after := countOurs(t); after != before {
		t.Errorf("%d of our namespaces, before %d", after, before)
	}
}

func countOurs(t *testing.T) int {
	t.Helper()
	self, err := selfOwner()
	if err != nil {
		t.Fatal(err)
	}
	matches, err := filepath.Glob(filepath.Join(namespaceFolder, self+"-*"))
	if err != nil {
		t.Fatal(err)
	}
	return len(matches)
}

// A run that was killed with SIGKILL leaves namespaces and processes; the next Create removes both.
func TestRemainsOfAKilledRun(t *testing.T) {
	needRoot(t)
	helper := exec.Command(os.Args[0])
	helper.Env = append(os.Environ(), helperVariable+"=1")
	out, err := helper.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := helper.Start(); err != nil {
		t.Fatal(err)
	}
	var names []string
	orphan := 0
	for scanner := bufio.NewScanner(out); orphan == 0 && scanner.Scan(); {
		what, rest, _ := strings.Cut(scanner.Text(), " ")
		switch what {
		case "owner":
			names = strings.Fields(rest)
		case "orphan":
			if orphan, err = strconv.Atoi(rest); err != nil {
				t.Fatal(err)
			}
		case "error":
			t.Fatal(rest)
		}
	}
	if err := helper.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = helper.Wait() // killed
	if len(names) != 3 || orphan == 0 {
		t.Fatalf("the helper made namespaces %v and orphan %d", names, orphan)
	}
	for _, name := range names {
		if _, err := os.Stat(filepath.Join(namespaceFolder, name)); err != nil {
			t.Errorf("the killed helper's namespace should still be there: %v", err)
		}
	}
	if syscall.Kill(orphan, 0) != nil {
		t.Error("the process inside should still live")
	}
	create(t, Options{Workers: 1})
	for _, name := range names {
		if _, err := os.Stat(filepath.Join(namespaceFolder, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("namespace %s outlived the next run: %v", name, err)
		}
	}
	if _, state, err := processStart(orphan); err == nil && state != 'Z' && state != 'X' {
		t.Errorf("process %d inside the killed run's namespace still lives, state %c", orphan, state)
	}
}

// An owner killed between naming a namespace and mounting it leaves a plain file.
func TestRemainsThatArePlainFiles(t *testing.T) {
	needRoot(t)
	if err := os.MkdirAll(namespaceFolder, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(namespaceFolder, "autobyte-999999999-1-1-hub")
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := RemoveRemains(slog.New(slog.DiscardHandler)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", path, err)
	}
}

func TestThreadsEndOutsideNamespaces(t *testing.T) {
	c := create(t, Options{Workers: 1})
	for range 50 {
		if err := c.nodes[0].inside(func() error {
			if unix.Gettid() == unix.Getpid() {
				return errors.New("on the main thread, which never ends")
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	var own, node unix.Stat_t
	if err := errors.Join(unix.Stat("/proc/self/ns/net", &own), unix.Fstat(int(c.nodes[0].namespace), &node)); err != nil {
		t.Fatal(err)
	}
	if own.Ino == node.Ino {
		t.Error("the process's main thread is in a worker's namespace")
	}
}
