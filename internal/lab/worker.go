package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// CreateOrLoopback is Create, but without the rights for namespaces it makes a loopback cluster, and the notice
// says that its network is not limited. The notice is empty otherwise.
func CreateOrLoopback(ctx context.Context, options Options) (c *Cluster, notice string, err error) {
	c, err = Create(ctx, options)
	if !errors.Is(err, ErrNotPermitted) {
		return c, "", err
	}
	options.Rate, options.Congestion = 0, ""
	if c, err = Loopback(options); err != nil {
		return nil, "", err
	}
	return c, ErrNotPermitted.Error() + " (the workers use plain loopback)", nil
}

// FindPython returns the path of a Python interpreter; name may be a path or a name in PATH.
func FindPython(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("python %q: %w; name an interpreter that has torch, or a virtual environment's bin/python", name, err)
	}
	return path, nil
}

// Progress is told how far a part of the work has come; it is never called concurrently.
type Progress func(part string, done, total int)

// event is one line that a worker prints.
type event struct {
	Event string `json:"event"`
	Step  int    `json:"step"`
	Steps int    `json:"steps"`
}

// firstPort is where rendezvous ports begin; every run takes the next, so that none meets a predecessor's socket.
const firstPort = 29500

var nextPort atomic.Int64

// freePort returns a port for rank 0 to listen on. In a namespace of its own any will do.
func (c *Cluster) freePort() (int, error) {
	if len(c.namespaces) > 0 {
		return firstPort + int(nextPort.Add(1)%1000), nil
	}
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("lab: looking for a free port: %w", err)
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil
}

// runWorkers runs a Python module on every node as torch.distributed expects it, and returns the JSON object of
// each rank's "result" event. Rank 0's "step" events go to progress.
func (c *Cluster) runWorkers(ctx context.Context, python, part string, progress Progress, args ...string) ([]json.RawMessage, error) {
	port, err := c.freePort()
	if err != nil {
		return nil, err
	}
	results := make([]json.RawMessage, len(c.nodes))
	var mu sync.Mutex // guards results and orders calls of progress
	var commands []Command
	for _, n := range c.nodes {
		commands = append(commands, Command{
			Name: fmt.Sprintf("%s rank %d", part, n.Rank),
			Path: python,
			Args: args,
			Env: environment(
				"RANK="+strconv.Itoa(n.Rank), "WORLD_SIZE="+strconv.Itoa(len(c.nodes)), "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1",
				"MASTER_ADDR="+c.nodes[0].Address.String(), "MASTER_PORT="+strconv.Itoa(port),
				"GLOO_SOCKET_IFNAME="+n.Interface, "OMP_NUM_THREADS=1", "PYTHONUNBUFFERED=1",
			),
			Stdout: func(line string) bool {
				var e event
				if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &e) != nil {
					return false
				}
				mu.Lock()
				defer mu.Unlock()
				switch {
				case e.Event == "result":
					results[n.Rank] = json.RawMessage(line)
				case e.Event == "step" && n.Rank == 0 && progress != nil:
					progress(part, e.Step, e.Steps)
				}
				return e.Event != ""
			},
		})
	}
	if err := c.RunAll(ctx, commands); err != nil {
		if missing := missingModule.FindStringSubmatch(err.Error()); missing != nil {
			err = fmt.Errorf("%w\n%s has no module %q: `make venv` sets up an environment that has all, "+
				"or install the package (pip install './python[torch]') and name that interpreter with --python", err, python, missing[1])
		}
		return nil, err
	}
	mu.Lock()
	defer mu.Unlock()
	for rank, r := range results {
		if r == nil {
			return nil, fmt.Errorf("lab: %s rank %d ended without an error and without a result", part, rank)
		}
	}
	return results, nil
}

// missingModule finds the module that a Python program could not import.
var missingModule = regexp.MustCompile(`No module named '([^']+)'`)

// environment is this process's, with the given variables set.
func environment(set ...string) []string {
	env := slices.DeleteFunc(os.Environ(), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		return slices.ContainsFunc(set, func(s string) bool { return strings.HasPrefix(s, name+"=") })
	})
	return append(env, set...)
}

// slowestSteps returns the time of each step of the slowest rank, from the times (one clock for all ranks) at
// which every rank finished each step: a step ends when the last rank has ended it. The first warm steps
// are left out.
func slowestSteps(ends [][]float64, warm int) ([]float64, error) {
	count := len(ends[0])
	for rank, e := range ends {
		if len(e) != count {
			return nil, fmt.Errorf("lab: rank %d reports %d times, rank 0 %d", rank, len(e), count)
		}
	}
	if warm < 0 || warm+2 > count {
		return nil, fmt.Errorf("lab: %d times are too few for %d steps of warm-up", count, warm)
	}
	last := make([]float64, count)
	for i := range last {
		for _, e := range ends {
			last[i] = max(last[i], e[i])
		}
	}
	var steps []float64
	for i := warm + 1; i < count; i++ {
		steps = append(steps, last[i]-last[i-1])
	}
	return steps, nil
}

// quantile of unsorted values, by linear interpolation.
func quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	below := int(math.Floor(at))
	above := min(below+1, len(sorted)-1)
	return sorted[below] + (at-float64(below))*(sorted[above]-sorted[below])
}
