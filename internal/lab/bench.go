package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"autobyte/internal/model"
)

const (
	// flowTime is how long a plain TCP flow is measured before and after the contenders.
	flowTime = 2 * time.Second
	// benchWarmUp steps of every block are not counted: connections, DDP's bucket rebuild, first touches.
	benchWarmUp = 4
)

// Contender is one way to run the steps.
type Contender struct {
	// Name is the key of its result.
	Name string
	// Mode and Args are given to autobyte.replay.
	Mode string
	Args []string
}

// BenchOptions says what RunBench runs.
type BenchOptions struct {
	Python     string
	Profile    model.Profile // its times are replayed as they are
	Contenders []Contender
	// Steps counted for each contender, over all rounds.
	Steps int
	// Rounds is how many times the contenders alternate.
	Rounds   int
	Progress Progress
}

// BenchRun is what one contender took. A step is timed at its slowest rank.
type BenchRun struct {
	StepMSMedian float64 `json:"step_ms_median"`
	StepMSP95    float64 `json:"step_ms_p95"`
	// LowerBoundMS is T*, RatioToBound the median step over it.
	LowerBoundMS float64 `json:"lower_bound_ms"`
	RatioToBound float64 `json:"ratio_to_bound"`
	// BytesPerS is what a plain TCP flow carried in the same run: the better of before and after.
	BytesPerS float64 `json:"bytes_per_s"`
	// CPUSeconds of one worker in one step, on average; PeakRSSBytes of the largest worker.
	CPUSeconds   float64 `json:"cpu_s"`
	PeakRSSBytes int64   `json:"peak_rss_bytes"`
	Steps        int     `json:"steps"`
	// BlockMedians are the median steps of each round, in ms: how steady the machine was.
	BlockMedians []float64 `json:"block_ms_medians"`
	// Stats is what rank 0's scheduler reported in the last round.
	Stats any `json:"stats,omitempty"`
}

// BenchResult is the outcome of RunBench.
type BenchResult struct {
	Runs map[string]BenchRun
	// Bound is T* at BytesPerS; BytesPerSBefore and After are the flows measured around the contenders, and
	// BytesPerSBothWays two flows at once, one each way.
	Bound             model.Bound
	BytesPerSBefore   float64
	BytesPerSAfter    float64
	BytesPerSBothWays [2]float64
	Torch             string
}

// BytesPerS is the rate that T* is computed from: the better flow, so the lower bound.
func (r BenchResult) BytesPerS() float64 { return max(r.BytesPerSBefore, r.BytesPerSAfter) }

// replayReport is what a rank of autobyte.replay reports.
type replayReport struct {
	Starts       []float64 `json:"starts"`
	WarmUpSteps  int       `json:"warm_up_steps"`
	CPUSeconds   float64   `json:"cpu_s"`
	PeakRSSBytes int64     `json:"peak_rss_bytes"`
	Torch        string    `json:"torch"`
	Stats        any       `json:"stats"`
}

// RunBench replays the profile's steps on the cluster with each contender in turn, round after round, so that
// all meet the same network and the same moods of the machine.
func RunBench(ctx context.Context, c *Cluster, options BenchOptions) (BenchResult, error) {
	if options.Steps < 1 || options.Rounds < 1 || len(options.Contenders) == 0 || len(c.nodes) < 2 {
		return BenchResult{}, fmt.Errorf("lab: %d steps in %d rounds of %d contenders on %d workers: want at least 1, 1, 1 and 2",
			options.Steps, options.Rounds, len(options.Contenders), len(c.nodes))
	}
	folder, err := os.MkdirTemp("", "autobyte-bench-*")
	if err != nil {
		return BenchResult{}, fmt.Errorf("lab: %w", err)
	}
	defer os.RemoveAll(folder)
	profile := filepath.Join(folder, "profile.json")
	if err := model.Save(profile, options.Profile); err != nil {
		return BenchResult{}, err
	}
	result := BenchResult{Runs: map[string]BenchRun{}}
	if result.BytesPerSBefore, err = c.MeasureTCP(ctx, 0, 1, flowTime); err != nil {
		return BenchResult{}, err
	}
	if result.BytesPerSBothWays, err = c.MeasureTCPBothWays(ctx, 0, 1, flowTime); err != nil {
		return BenchResult{}, err
	}
	stepsPerRound := (options.Steps + options.Rounds - 1) / options.Rounds
	steps := map[string][]float64{}
	for range options.Rounds {
		for _, contender := range options.Contenders {
			args := append([]string{"-m", "autobyte.replay", "--mode", contender.Mode, "--profile", profile,
				"--steps", strconv.Itoa(stepsPerRound), "--warm-up", strconv.Itoa(benchWarmUp)}, contender.Args...)
			raw, err := c.runWorkers(ctx, options.Python, contender.Name, options.Progress, args...)
			if err != nil {
				return BenchResult{}, fmt.Errorf("running %s: %w", contender.Name, err)
			}
			reports, err := decodeAll[replayReport](raw)
			if err != nil {
				return BenchResult{}, err
			}
			run := result.Runs[contender.Name]
			block, err := addBlock(&run, reports)
			if err != nil {
				return BenchResult{}, err
			}
			steps[contender.Name] = append(steps[contender.Name], block...)
			result.Runs[contender.Name], result.Torch = run, reports[0].Torch
		}
	}
	if result.BytesPerSAfter, err = c.MeasureTCP(ctx, 0, 1, flowTime); err != nil {
		return BenchResult{}, err
	}
	if result.Bound, err = model.LowerBound(options.Profile, len(c.nodes), result.BytesPerS()); err != nil {
		return BenchResult{}, err
	}
	for name, run := range result.Runs {
		run.StepMSMedian, run.StepMSP95 = 1e3*quantile(steps[name], 0.5), 1e3*quantile(steps[name], 0.95)
		run.LowerBoundMS, run.BytesPerS = 1e3*result.Bound.Step, result.BytesPerS()
		run.RatioToBound = run.StepMSMedian / run.LowerBoundMS
		result.Runs[name] = run
	}
	return result, nil
}

// addBlock adds a block's figures to the contender's and returns the times of its steps.
func addBlock(run *BenchRun, reports []replayReport) ([]float64, error) {
	var starts [][]float64
	var cpu float64
	for _, r := range reports {
		starts = append(starts, r.Starts)
		cpu += r.CPUSeconds
		run.PeakRSSBytes = max(run.PeakRSSBytes, r.PeakRSSBytes)
	}
	block, err := slowestSteps(starts, reports[0].WarmUpSteps)
	if err != nil {
		return nil, err
	}
	total := run.CPUSeconds*float64(run.Steps) + cpu/float64(len(reports))
	run.Steps += len(block)
	run.CPUSeconds = total / float64(run.Steps)
	run.BlockMedians = append(run.BlockMedians, 1e3*quantile(block, 0.5))
	run.Stats = reports[0].Stats
	return block, nil
}
