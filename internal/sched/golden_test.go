package sched

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite testdata/*.txt with what the scheduler does now")

// TestGolden runs the stories in testdata. A story is made of comments (#),
// commands, and after a line of four dashes those that printed something, each
// with what it printed.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) < 6 {
		t.Fatalf("%d stories, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got, err := retell(string(want))
			if err != nil {
				t.Fatal(err)
			}
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("-written +happened; go test -run Golden -update rewrites it:\n%s", diff)
			}
		})
	}
}

// retell runs a story and returns it with the output replaced.
func retell(script string) (string, error) {
	var out strings.Builder
	st := &story{plans: map[string]*Plan{}, using: map[uint64]*Plan{}}
	var said []string
	skip := false // in old output
	for number, line := range strings.Split(strings.TrimSuffix(script, "\n"), "\n") {
		switch {
		case line == "----":
			out.WriteString("----\n")
			for _, s := range said {
				out.WriteString(s + "\n")
			}
			said, skip = nil, true
			continue
		case line == "":
			skip = false
		case skip:
			continue
		case !strings.HasPrefix(line, "#"):
			lines, err := st.do(strings.Fields(line))
			if err != nil {
				return "", fmt.Errorf("line %d: %q: %w", number+1, line, err)
			}
			if len(lines) > 0 {
				said = append(said, line)
			}
			for _, l := range lines {
				said = append(said, "    "+l)
			}
		}
		out.WriteString(line + "\n")
	}
	if len(said) > 0 {
		return "", errors.New("the story ends without ---- after its last commands")
	}
	return out.String(), nil
}

// story is a rank in a script.
type story struct {
	l     *Layout
	s     *Scheduler
	plans map[string]*Plan
	using map[uint64]*Plan // by step
}

// do runs one command:
//
//	tensors [space:]bytes …      lay out
//	leader | follower            make the scheduler
//	plan NAME key=value …        make a plan and print its partitions
//	open STEP | use STEP NAME | ready STEP tensor … | close STEP
//	order STEP index … | next | sent STEP index … | done STEP index …
//	state                        print what can be seen from outside
func (st *story) do(words []string) ([]string, error) {
	var numbers []int
	for _, w := range words[1:] {
		if n, err := strconv.Atoi(w); err == nil {
			numbers = append(numbers, n)
		}
	}
	switch words[0] {
	case "tensors":
		return nil, st.layout(words[1:])
	case "leader":
		st.s = New(st.l, Leader)
	case "follower":
		st.s = New(st.l, Follower)
	case "plan":
		return st.plan(words[1], words[2:])
	case "next":
		return st.next(), nil
	case "state":
		return st.state(), nil
	default:
		if len(numbers) == 0 {
			return nil, errors.New("unknown command, or no step")
		}
		return st.call(words, uint64(numbers[0]), numbers[1:])
	}
	return nil, nil
}

func (st *story) layout(words []string) (err error) {
	var tensors []Tensor
	for _, w := range words {
		space, bytes, ok := strings.Cut(w, ":")
		if !ok {
			space, bytes = "0", w
		}
		var t Tensor
		if t.Space, err = strconv.Atoi(space); err != nil {
			return err
		}
		if t.Bytes, err = strconv.ParseInt(bytes, 10, 64); err != nil {
			return err
		}
		tensors = append(tensors, t)
	}
	st.l, err = NewLayout(tensors)
	return err
}

func (st *story) plan(name string, words []string) ([]string, error) {
	var c Config
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		n, err := strconv.ParseInt(value, 10, 64)
		switch key {
		case "partition":
			c.Partition = n
		case "credit":
			c.Credit = n
		case "fusion":
			c.Fusion = n
		case "lanes":
			c.Lanes = int(n)
		case "policy":
			c.Policy, err = ParsePolicy(value)
		default:
			err = fmt.Errorf("unknown key %q", key)
		}
		if err != nil {
			return nil, err
		}
	}
	p, err := NewPlan(st.l, c)
	if err != nil {
		return nil, err
	}
	st.plans[name] = p
	var lines []string
	for i := range p.Len() {
		q := p.Partition(i)
		lines = append(lines, fmt.Sprintf("%s %d: space %d bytes %d to %d, tensors %v", name, i, q.Space, q.Offset, q.Offset+q.Bytes, p.AppendTensors(nil, i)))
	}
	return lines, nil
}

// call makes one method call for each number, and prints errors as they are.
func (st *story) call(words []string, step uint64, numbers []int) (lines []string, err error) {
	if len(numbers) == 0 {
		numbers = []int{0}
	}
	for _, n := range numbers {
		var tensors []int
		var err error
		retired := st.s.StepDone(step)
		what := "done: tensors"
		switch words[0] {
		case "open":
			err = st.s.Open(step)
		case "use":
			p := st.plans[words[2]]
			if err = st.s.SetPlan(step, p); err == nil {
				st.using[step] = p
			}
		case "ready":
			err = st.s.Ready(step, n)
		case "close":
			what = "absent: tensors"
			tensors, err = st.s.Close(nil, step)
		case "order":
			err = st.s.Order(step, n)
		case "sent":
			err = st.s.Sent(step, n)
		case "done":
			tensors, err = st.s.Done(nil, step, n)
		default:
			return nil, errors.New("unknown command")
		}
		if err != nil {
			lines = append(lines, "error: "+err.Error())
		}
		if len(tensors) > 0 {
			lines = append(lines, fmt.Sprintf("step %d %s %v", step, what, tensors))
		}
		if !retired && st.using[step] != nil && st.s.StepDone(step) {
			lines = append(lines, fmt.Sprintf("step %d has retired", step))
		}
	}
	return lines, nil
}

func (st *story) next() (lines []string) {
	for _, op := range st.s.Next(nil) {
		tensors := st.using[op.Step].AppendTensors(nil, int(op.Index))
		lines = append(lines, fmt.Sprintf("issue step %d partition %d: %d bytes of tensors %v", op.Step, op.Index, op.Bytes, tensors))
	}
	op, why := st.s.Head()
	if why == Idle {
		return append(lines, "then idle")
	}
	return append(lines, fmt.Sprintf("then step %d partition %d waits: %v", op.Step, op.Index, why))
}

func (st *story) state() []string {
	lines := []string{fmt.Sprintf("alive %v, held %d bytes, in flight %d, in line %d",
		st.s.AliveSteps(nil), st.s.HeldBytes(), st.s.InFlight(), st.s.Queued())}
	for _, step := range st.s.AliveSteps(nil) {
		lines = append(lines, fmt.Sprintf("step %d pending: tensors %v", step, st.s.Pending(nil, step)))
	}
	return lines
}
