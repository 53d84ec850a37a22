package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// tailLines of what a process printed last are kept for the error that reports its failure.
	tailLines = 20
	// maxLine is where a longer line is cut.
	maxLine = 1 << 20
	// killGrace is how long a killed process's output is waited for: a descendant may hold the pipe.
	killGrace = 2 * time.Second
	// peerGrace is how long the others may go on once one process of a group has failed, so that they
	// can say what they saw of it.
	peerGrace = 5 * time.Second
)

// Command is a program to run on a node.
type Command struct {
	// Name is what errors and output call it, such as "rank 0".
	Name string
	// Path and Args are the program and its arguments, without the program's name.
	Path string
	Args []string
	// Env is the whole environment; Dir the working directory, empty for this process's own.
	Env []string
	Dir string
	// Stdout is called with each line of standard output, never concurrently, and returns whether it was
	// meant for it. All other lines, and those of standard error, are kept for the error.
	Stdout func(line string) bool
}

// Process is a running Command.
type Process struct {
	name string
	done chan struct{}
	err  error // set before done is closed
	tail tail
}

// ProcessError is how a process failed, with what it printed last.
type ProcessError struct {
	Name string
	Err  error
	Tail []string
}

func (e *ProcessError) Error() string {
	text := fmt.Sprintf("%s: %v", e.Name, e.Err)
	if len(e.Tail) == 0 {
		return text + "; it printed nothing"
	}
	return text + "; it printed last:\n  " + e.Name + " | " + strings.Join(e.Tail, "\n  "+e.Name+" | ")
}

func (e *ProcessError) Unwrap() error { return e.Err }

// Start runs a command in the node's namespace. Cancelling ctx or closing the cluster kills it and
// everything in its process group, as does the death of this process.
func (n *Node) Start(ctx context.Context, command Command) (*Process, error) {
	n.cluster.starting.Lock()
	if n.cluster.context.Err() != nil {
		n.cluster.starting.Unlock()
		return nil, fmt.Errorf("lab: starting %s: the cluster is closed", command.Name)
	}
	n.cluster.processes.Add(1)
	n.cluster.starting.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(n.cluster.context, cancel)
	p := &Process{name: command.Name, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		defer n.cluster.processes.Done()
		defer close(p.done)
		defer cancel()
		defer stop()
		finished := make(chan struct{})
		go ownThread(func() {
			defer close(finished)
			// The thread must outlive the child: Pdeathsig is sent when the thread that started it ends.
			p.run(ctx, n, command, started)
		})
		<-finished
	}()
	if err := <-started; err != nil {
		<-p.done
		return nil, fmt.Errorf("lab: starting %s: %w", command.Name, err)
	}
	return p, nil
}

func (p *Process) run(ctx context.Context, n *Node, command Command, started chan<- error) {
	if err := n.enter(); err != nil {
		started <- err
		return
	}
	stdout := &lines{keep: &p.tail, call: command.Stdout}
	stderr := stdout // one pipe, so that the order of the lines is kept
	if command.Stdout != nil {
		stderr = &lines{keep: &p.tail}
	}
	cmd := exec.CommandContext(ctx, command.Path, command.Args...)
	cmd.Env, cmd.Dir = command.Env, command.Dir
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = killGrace
	if err := cmd.Start(); err != nil {
		started <- err
		return
	}
	started <- nil
	err := cmd.Wait()
	// What the process left in its group ends with it; ESRCH is the usual answer.
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	stdout.flush()
	stderr.flush()
	if ctx.Err() != nil && err != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		p.err = &ProcessError{Name: command.Name, Err: err, Tail: p.tail.lines()}
	}
}

// Wait returns once the process has ended: nil, or a *ProcessError.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// RunAll runs one command on each node, by rank, and waits for all. If one fails, the others have a few
// seconds to end by themselves and are then killed; the errors come in the order of failing, without those
// that only the killing caused.
func (c *Cluster) RunAll(ctx context.Context, commands []Command) error {
	if len(commands) != len(c.nodes) {
		return fmt.Errorf("lab: %d commands for %d nodes", len(commands), len(c.nodes))
	}
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, len(commands))
	begun := 0
	var errs error
	for i, command := range commands {
		p, err := c.nodes[i].Start(running, command)
		if err != nil {
			errs = err
			cancel()
			break
		}
		begun++
		go func() { ended <- p.Wait() }()
	}
	var grace *time.Timer
	for range begun {
		err := <-ended
		if err == nil {
			continue
		}
		if errs == nil {
			grace = time.AfterFunc(peerGrace, cancel)
			defer grace.Stop()
		} else if errors.Is(err, context.Canceled) {
			continue
		}
		errs = errors.Join(errs, err)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errs
}

// tail keeps the last lines of both outputs in the order of their arrival.
type tail struct {
	mu   sync.Mutex
	last []string
}

func (t *tail) add(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.last) == tailLines {
		t.last = append(t.last[:0], t.last[1:]...)
	}
	t.last = append(t.last, line)
}

func (t *tail) lines() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.last...)
}

// lines cuts what is written to it into lines. exec calls Write from one goroutine, for both outputs if they share
// one.
type lines struct {
	keep    *tail
	call    func(string) bool
	partial []byte
}

func (l *lines) Write(data []byte) (int, error) {
	written := len(data)
	for {
		line, rest, found := bytes.Cut(data, []byte("\n"))
		l.partial = append(l.partial, line[:min(len(line), maxLine-len(l.partial))]...)
		if !found {
			return written, nil
		}
		l.flush()
		data = rest
	}
}

func (l *lines) flush() {
	if len(l.partial) == 0 {
		return
	}
	line := strings.TrimRight(string(l.partial), "\r")
	l.partial = l.partial[:0]
	if l.call == nil || !l.call(line) {
		l.keep.add(line)
	}
}
