package lab

import (
	"context"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

func shell(name, script string) Command {
	return Command{Name: name, Path: "/bin/sh", Args: []string{"-c", script}, Env: os.Environ()}
}

func TestRunAllReportsTheLastLines(t *testing.T) {
	c := loopback(t, 2)
	err := c.RunAll(t.Context(), []Command{shell("rank 0", "exit 0"), shell("rank 1", "for i in $(seq 30); do echo line $i; done; echo oh no >&2; exit 3")})
	var failed *ProcessError
	if !errors.As(err, &failed) || failed.Name != "rank 1" {
		t.Fatalf("error is %v, want a ProcessError of rank 1", err)
	}
	text := err.Error()
	for _, want := range []string{"exit status 3", "rank 1 | line 30", "rank 1 | oh no"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q does not say %q", text, want)
		}
	}
	if len(failed.Tail) != tailLines || strings.Contains(text, "line 5\n") {
		t.Errorf("%d lines kept, want the last %d", len(failed.Tail), tailLines)
	}
}

func TestRunAllEndsThePeers(t *testing.T) {
	if testing.Short() {
		t.Skip("waits out the peers' grace")
	}
	c := loopback(t, 2)
	begin := time.Now()
	err := c.RunAll(t.Context(), []Command{shell("rank 0", "sleep 300"), shell("rank 1", "exit 1")})
	if err == nil || !strings.Contains(err.Error(), "rank 1") || strings.Contains(err.Error(), "rank 0") {
		t.Errorf("error is %v, want rank 1's alone", err)
	}
	if waited := time.Since(begin); waited > peerGrace+killGrace+20*time.Second {
		t.Errorf("waited %v for a peer that had nothing to say", waited)
	}
}

func TestStartErrors(t *testing.T) {
	c := loopback(t, 1)
	if _, err := c.nodes[0].Start(t.Context(), Command{Name: "rank 0", Path: "/no/such/python"}); err == nil || !strings.Contains(err.Error(), "/no/such/python") {
		t.Errorf("error is %v, want one that names the program", err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.nodes[0].Start(t.Context(), shell("rank 0", "true")); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("starting on a closed cluster: %v", err)
	}
}

// Whoever ends it, a process takes its whole group along.
func TestCancelKillsTheGroup(t *testing.T) {
	f := func(c *Cluster, stop func(cancel context.CancelFunc)) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		child := make(chan string, 1)
		command := shell("rank 0", "sleep 300 & echo $!; wait")
		command.Stdout = func(line string) bool { child <- line; return true }
		p, err := c.nodes[0].Start(ctx, command)
		if err != nil {
			t.Fatal(err)
		}
		pid := 0
		for _, digit := range <-child {
			pid = 10*pid + int(digit-'0')
		}
		stop(cancel)
		if err := p.Wait(); !errors.Is(err, context.Canceled) {
			t.Errorf("a cancelled process: %v", err)
		}
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			_, state, err := processStart(pid)
			if err != nil || state == 'Z' {
				break
			}
			if time.Now().After(deadline) {
				t.Errorf("the child %d of a cancelled process still lives, state %c", pid, state)
				_ = syscall.Kill(pid, syscall.SIGKILL)
				break
			}
		}
	}
	f(loopback(t, 1), func(cancel context.CancelFunc) { cancel() })
	c := loopback(t, 1)
	f(c, func(context.CancelFunc) {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	if os.Geteuid() == 0 {
		c := create(t, Options{Workers: 1})
		f(c, func(context.CancelFunc) {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestLinesAreCut(t *testing.T) {
	f := func(writes []string, want ...string) {
		t.Helper()
		var got []string
		l := &lines{call: func(line string) bool { got = append(got, line); return true }}
		for _, w := range writes {
			if n, err := l.Write([]byte(w)); n != len(w) || err != nil {
				t.Errorf("Write(%q) = %d, %v", w, n, err)
			}
		}
		l.flush()
		if strings.Join(got, "|") != strings.Join(want, "|") {
			t.Errorf("%q gave %q, want %q", writes, got, want)
		}
	}
	f([]string{"a\nb", "c\r\n", "\n", "d"}, "a", "bc", "d")
	f([]string{"", "\n"})
	long := strings.Repeat("x", maxLine)
	f([]string{long, "yyy\nz\n"}, long, "z")
}

func TestFlowOnLoopback(t *testing.T) {
	c := loopback(t, 2)
	if c.Limited() {
		t.Error("loopback says that it is limited")
	}
	rate, err := c.MeasureTCP(t.Context(), 0, 1, 100*time.Millisecond)
	if err != nil || rate < 1e6 {
		t.Errorf("loopback carries %v bytes/s, error %v", rate, err)
	}
	if _, err := c.MeasureTCP(t.Context(), 0, 0, time.Second); err == nil {
		t.Error("a flow from a worker to itself: want an error")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.MeasureTCP(ctx, 0, 1, time.Hour); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a flow under a short context: %v", err)
	}
}
