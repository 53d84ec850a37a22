package lab

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"autobyte/internal/model"
)

// testPython is the project's Python environment, with autobyte importable and its library built.
func testPython(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("starts Python workers, which takes more than ten seconds")
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(root, "python/autobyte/libautobyte.so")); err != nil {
		t.Skip("the library is not built: run make build first")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, filepath.Join(root, "tools/venv")).Output()
	if err != nil {
		t.Fatalf("tools/venv: %v", err)
	}
	t.Setenv("PYTHONPATH", filepath.Join(root, "python"))
	return filepath.Join(strings.TrimSpace(string(out)), "bin/python")
}

// anyCluster is shaped where the test may do that.
func anyCluster(t *testing.T) *Cluster {
	t.Helper()
	if os.Geteuid() == 0 {
		return create(t, Options{Workers: 2, Rate: 1e9})
	}
	return loopback(t, 2)
}

func TestDemoTrainsTheSameModelTwice(t *testing.T) {
	python := testPython(t)
	c := anyCluster(t)
	seen := map[string]int{}
	r, err := RunDemo(t.Context(), c, DemoOptions{Python: python, Epochs: 1, Steps: 9,
		Progress: func(part string, done, total int) {
			if done != seen[part]+1 || total != 9 {
				t.Errorf("progress of %s: step %d of %d after %d", part, done, total, seen[part])
			}
			seen[part] = done
		}})
	if err != nil {
		t.Fatal(err)
	}
	if seen["ddp"] != 9 || seen["autobyte"] != 9 {
		t.Errorf("progress ended at %v, want 9 for both", seen)
	}
	if r.MaxParamDiff != 0 || r.BetweenRanks["ddp"] != 0 || r.BetweenRanks["autobyte"] != 0 {
		t.Errorf("trained models differ by %v, between ranks %v", r.MaxParamDiff, r.BetweenRanks)
	}
	if r.DDP.FinalTrainingLoss != r.AutoByte.FinalTrainingLoss || r.DDP.TestAccuracy != r.AutoByte.TestAccuracy {
		t.Errorf("learned differently: %+v, %+v", r.DDP, r.AutoByte)
	}
	for _, run := range []DemoRun{r.DDP, r.AutoByte} {
		if !(run.SamplesPerSecond > 0) || !(run.StepMSMedian > 0) || run.StepMSP95 < run.StepMSMedian || run.Steps != 9 {
			t.Errorf("implausible figures %+v", run)
		}
	}
	if want := r.AutoByte.SamplesPerSecond / r.DDP.SamplesPerSecond; r.Speedup != want {
		t.Errorf("speedup %v, want %v", r.Speedup, want)
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"ddp", "autobyte", "max_param_diff", "speedup", "network", "versions", "samples_per_second", "final_training_loss", "test_accuracy", "step_ms_median"} {
		if !strings.Contains(string(text), `"`+key+`":`) {
			t.Errorf("no key %s in %s", key, text)
		}
	}
}

func TestBenchIsNeverFasterThanItsComputation(t *testing.T) {
	python := testPython(t)
	c := anyCluster(t)
	p, err := model.Bundled("resnet50")
	if err != nil {
		t.Fatal(err)
	}
	p.Layers = p.Layers[:20] // 0.9 MB
	if p, err = p.Scaled(0.05); err != nil {
		t.Fatal(err)
	}
	r, err := RunBench(t.Context(), c, BenchOptions{Python: python, Profile: p, Steps: 5, Rounds: 1, Contenders: []Contender{
		{Name: "ddp", Mode: "ddp"}, {Name: "plain", Mode: "plain"},
		{Name: "autobyte", Mode: "autobyte", Args: []string{"--partition", "128KiB", "--credit", "256KiB"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Runs) != 3 {
		t.Errorf("%d runs, want 3", len(r.Runs))
	}
	for name, run := range r.Runs {
		if run.StepMSMedian < 50 || run.Steps != 5 || len(run.BlockMedians) != 1 {
			t.Errorf("%s: %+v, want 5 steps in 1 block, and no step shorter than its 50 ms of computation", name, run)
		}
		if !(run.CPUSeconds > 0) || run.PeakRSSBytes < 1<<20 || run.LowerBoundMS != 1e3*r.Bound.Step || run.BytesPerS != r.BytesPerS() {
			t.Errorf("%s: implausible figures %+v", name, run)
		}
		if want := run.StepMSMedian / run.LowerBoundMS; math.Abs(run.RatioToBound-want) > 1e-12 {
			t.Errorf("%s: ratio %v, want %v", name, run.RatioToBound, want)
		}
	}
}

func TestBlocksAddUp(t *testing.T) {
	var run BenchRun
	f := func(reports []replayReport, wantSteps int, wantCPU float64, wantRSS int64) {
		t.Helper()
		if _, err := addBlock(&run, reports); err != nil {
			t.Fatal(err)
		}
		if run.Steps != wantSteps || math.Abs(run.CPUSeconds-wantCPU) > 1e-12 || run.PeakRSSBytes != wantRSS {
			t.Errorf("after %+v: %+v, want %d steps, %v s, %d bytes", reports, run, wantSteps, wantCPU, wantRSS)
		}
	}
	// Two workers, 2 steps after one of warm-up: 4 and 8 s of CPU are 3 s a worker and step.
	f([]replayReport{{Starts: []float64{0, 1, 2, 3}, WarmUpSteps: 1, CPUSeconds: 4, PeakRSSBytes: 10}, {Starts: []float64{0, 1, 2, 3}, CPUSeconds: 8, PeakRSSBytes: 20}}, 2, 3, 20)
	// One more step with 9 s: (2*3 + 9) / 3.
	f([]replayReport{{Starts: []float64{0, 1}, CPUSeconds: 9, PeakRSSBytes: 5}, {Starts: []float64{0, 1}, CPUSeconds: 9}}, 3, 5, 20)
	if _, err := addBlock(&run, []replayReport{{Starts: []float64{0, 1}}, {Starts: []float64{0}}}); err == nil {
		t.Error("a rank that lost a step: want an error")
	}
	if len(run.BlockMedians) != 2 || run.BlockMedians[0] != 1000 {
		t.Errorf("medians of the blocks are %v", run.BlockMedians)
	}
}

func TestWorkerFailureIsShown(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 here")
	}
	t.Setenv("PYTHONPATH", "")
	c := loopback(t, 2)
	_, err = c.runWorkers(t.Context(), python, "ddp", nil, "-m", "autobyte_is_not_here")
	if err == nil || !strings.Contains(err.Error(), "No module named autobyte_is_not_here") || !strings.Contains(err.Error(), "ddp rank") {
		t.Errorf("error is %v, want the worker's own words and its rank", err)
	}
	_, err = c.runWorkers(t.Context(), python, "ddp", nil, "-c", "print('{}')")
	if err == nil || !strings.Contains(err.Error(), "without a result") {
		t.Errorf("error is %v, want one about the missing result", err)
	}
}

func TestFindPython(t *testing.T) {
	if _, err := FindPython("no-such-python"); err == nil || !strings.Contains(err.Error(), "no-such-python") {
		t.Errorf("error %v does not name what was looked for", err)
	}
}

func TestEnvironmentSetsOnce(t *testing.T) {
	t.Setenv("RANK", "7")
	count := 0
	for _, variable := range environment("RANK=1", "RANKED=2") {
		if strings.HasPrefix(variable, "RANK=") {
			count++
			if variable != "RANK=1" {
				t.Errorf("the environment has %s", variable)
			}
		}
	}
	if count != 1 {
		t.Errorf("RANK is set %d times", count)
	}
}

func TestSlowestSteps(t *testing.T) {
	f := func(ends [][]float64, warm int, want ...float64) {
		t.Helper()
		got, err := slowestSteps(ends, warm)
		if (err == nil) != (len(want) > 0) || len(got) != len(want) {
			t.Fatalf("slowestSteps(%v, %d) = %v, %v, want %v", ends, warm, got, err, want)
		}
		for i := range want {
			if math.Abs(got[i]-want[i]) > 1e-12 {
				t.Errorf("slowestSteps(%v, %d) = %v, want %v", ends, warm, got, want)
			}
		}
	}
	f([][]float64{{0, 1, 3, 6}}, 0, 1, 2, 3)
	f([][]float64{{0, 1, 3, 6}}, 1, 2, 3)
	f([][]float64{{0, 1, 2, 3}, {0.5, 1.5, 1.75, 4}}, 0, 1, 0.5, 2)
	f([][]float64{{0, 1}, {0, 1, 2}}, 0) // a rank that lost a step
	f([][]float64{{0, 1, 2}}, 2)         // nothing but warm-up
}

func TestQuantile(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.Float64Range(-1e6, 1e6), 1, 50).Draw(t, "values")
		q := rapid.Float64Range(0, 1).Draw(t, "q")
		got := quantile(values, q)
		below, above := 0, 0
		for _, v := range values {
			if v < got-1e-6 {
				below++
			}
			if v > got+1e-6 {
				above++
			}
		}
		n := float64(len(values))
		if float64(below) > q*(n-1)+1 || float64(above) > (1-q)*(n-1)+1 {
			t.Fatalf("%v of %v: %v has %d values below and %d above", q, values, got, below, above)
		}
	})
}
