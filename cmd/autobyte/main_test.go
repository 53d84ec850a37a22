package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

const runVariable = "AUTOBYTE_COMMAND_TEST"

func TestMain(m *testing.M) {
	if os.Getenv(runVariable) != "" {
		main()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func execute(args ...string) (string, error) {
	root := newRoot()
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&out)
	root.SetArgs(args)
	err := root.Execute()
	return out.String(), err
}

func TestErrorsSayWhatWasGivenAndWhatIsAllowed(t *testing.T) {
	f := func(args string, want ...string) {
		t.Helper()
		_, err := execute(strings.Fields(args)...)
		if err == nil {
			t.Errorf("autobyte %s: want an error", args)
			return
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("autobyte %s: %q does not say %q", args, err, w)
			}
		}
	}
	f("demo --rate 200", "--rate", `"200"`, "200mbit", "1gbit")
	f("demo --workers 1", "--workers is 1", "2 to 64")
	f("demo --python no-such-python", "--python", "no-such-python")
	f("demo --epochs 0", "--epochs 0")
	f("demo --steps 1", "--steps is 1")
	f("demo extra", "extra")
	f("bench --engine native", "native", "not in this version", "external")
	f("bench --engine warp", "warp", "external")
	f("bench --vs horovod", "horovod", "ddp")
	f("bench --policy random", "random", "priority or fifo")
	f("bench --partition 4megs", "--partition", "4megs", "4MiB")
	f("bench --credit -1", "--credit", "-1")
	f("bench --steps 0", "--steps is 0")
	f("bench --compute-ms -5", "--compute-ms is -5")
	f("bench --compute-ms nan", "--compute-ms is NaN")
	f("bench --model alexnet", "alexnet", "resnet50")
	f("bench --model no/such.json", "no/such.json")
	f("bench --rate 1parsec", "1parsec", "1gbit")
	f("launch", "launch")
}

func TestVersion(t *testing.T) {
	out, err := execute("version")
	if err != nil || !strings.HasPrefix(out, "autobyte ") {
		t.Errorf("autobyte version: %q, %v", out, err)
	}
	out, err = execute("version", "--json")
	var v map[string]string
	if err != nil || json.Unmarshal([]byte(out), &v) != nil || v["autobyte"] == "" || v["go"] == "" {
		t.Errorf("autobyte version --json: %q, %v", out, err)
	}
}

func TestWriteFileIsWholeOrNotThere(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "new")
	path := filepath.Join(folder, "result.json")
	if err := writeFile(path, map[string]int{"a": 1}); err != nil {
		t.Fatal(err)
	}
	if err := writeFile(path, func() {}); err == nil {
		t.Error("a function was written as JSON")
	}
	var got map[string]int
	data, err := os.ReadFile(path)
	if err != nil || json.Unmarshal(data, &got) != nil || got["a"] != 1 {
		t.Errorf("the file holds %q, %v after a failed write, want the first result", data, err)
	}
	if entries, err := os.ReadDir(folder); err != nil || len(entries) != 1 {
		t.Errorf("%d files in the folder, %v, want the result alone", len(entries), err)
	}
}

func TestPlainProgress(t *testing.T) {
	var out bytes.Buffer
	report, done := newProgress(&out)
	for range 2 { // the same part again, as in the rounds of a benchmark
		for step := 1; step <= 3; step++ {
			report("ddp", step, 3)
		}
	}
	done()
	if want := strings.Repeat("ddp: step 1 of 3\nddp: step 3 of 3\n", 2); out.String() != want {
		t.Errorf("progress is\n%swant\n%s", out.String(), want)
	}
}

// waitingPython is an interpreter whose workers say that they run and then wait.
func waitingPython(t *testing.T) (path, marks string) {
	t.Helper()
	folder := t.TempDir()
	path = filepath.Join(folder, "python")
	script := "#!/bin/sh\n: > " + folder + "/worker.$RANK\nsleep 120 &\nwait\n"
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return path, filepath.Join(folder, "worker.*")
}

// Whatever ends a run, no namespace and no worker is left.
func TestSignalsRemoveEverything(t *testing.T) {
	f := func(signal syscall.Signal) {
		t.Helper()
		python, marks := waitingPython(t)
		command := exec.Command(os.Args[0], "demo", "--rate", rateHere(), "--python", python, "--out", "")
		command.Env = append(os.Environ(), runVariable+"=1")
		var stderr bytes.Buffer
		command.Stderr = &stderr
		if err := command.Start(); err != nil {
			t.Fatal(err)
		}
		deadline := time.Now().Add(30 * time.Second)
		for {
			if running, _ := filepath.Glob(marks); len(running) == 2 {
				break
			}
			if time.Now().After(deadline) {
				_ = command.Process.Kill()
				_ = command.Wait()
				t.Fatalf("the workers did not start:\n%s", stderr.String())
			}
			time.Sleep(10 * time.Millisecond)
		}
		if err := command.Process.Signal(signal); err != nil {
			t.Fatal(err)
		}
		overdue := time.AfterFunc(30*time.Second, func() { _ = command.Process.Kill() })
		defer overdue.Stop()
		err := command.Wait()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != exitInterrupted {
			t.Errorf("%v: ended with %v, want exit code %d:\n%s", signal, err, exitInterrupted, stderr.String())
		}
		if left, _ := filepath.Glob("/run/autobyte/autobyte-*"); len(left) > 0 {
			for _, l := range left {
				if strings.Contains(l, "autobyte-"+strconv.Itoa(command.Process.Pid)+"-") {
					t.Errorf("%v left %s", signal, l)
				}
			}
		}
		if workers := processesNaming(t, python); len(workers) > 0 {
			t.Errorf("%v left workers %v", signal, workers)
		}
	}
	f(syscall.SIGINT)
	f(syscall.SIGTERM)
}

func rateHere() string {
	if os.Geteuid() == 0 {
		return "200mbit"
	}
	return "none"
}

// processesNaming lists the processes that live and have the text in their command line.
func processesNaming(t *testing.T, text string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, file := range files {
		if line, err := os.ReadFile(file); err == nil && bytes.Contains(line, []byte(text)) && !strings.Contains(file, "/"+strconv.Itoa(os.Getpid())+"/") {
			found = append(found, file)
		}
	}
	return found
}
