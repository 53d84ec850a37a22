package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"
)

// DemoOptions says how RunDemo trains.
type DemoOptions struct {
	// Python is the interpreter of the workers.
	Python string
	// Epochs to train, or Steps if that is not 0.
	Epochs, Steps int
	Progress      Progress
}

// DemoRun is what training one way gave. Times are the slowest rank's, without the first steps.
type DemoRun struct {
	SamplesPerSecond  float64 `json:"samples_per_second"`
	FinalTrainingLoss float64 `json:"final_training_loss"`
	TestAccuracy      float64 `json:"test_accuracy"`
	StepMSMedian      float64 `json:"step_ms_median"`
	StepMSP95         float64 `json:"step_ms_p95"`
	Steps             int     `json:"steps"`
}

// DemoResult compares training with DistributedDataParallel and with AutoByte.
type DemoResult struct {
	DDP      DemoRun `json:"ddp"`
	AutoByte DemoRun `json:"autobyte"`
	// MaxParamDiff is the largest absolute difference between the two trained models, over all parameters
	// and buffers.
	MaxParamDiff float64 `json:"max_param_diff"`
	// Speedup is AutoByte's samples a second over DDP's.
	Speedup float64 `json:"speedup"`
	// BetweenRanks is, for each way, the largest difference of any rank's parameters from rank 0's.
	BetweenRanks   map[string]float64 `json:"max_param_diff_between_ranks"`
	Workers        int                `json:"workers"`
	BatchPerWorker int                `json:"batch_per_worker"`
	Parameters     int64              `json:"parameters"`
	Network        Network            `json:"network"`
	Versions       map[string]string  `json:"versions"`
}

// Network describes what lies between the workers.
type Network struct {
	Description string  `json:"description"`
	Limited     bool    `json:"limited"`
	Rate        string  `json:"rate"`
	Congestion  string  `json:"congestion,omitempty"`
	BytesPerS   float64 `json:"bytes_per_s"` // of a plain TCP flow
	Notice      string  `json:"notice,omitempty"`
}

// network describes the cluster's, with what one plain TCP flow carries.
func (c *Cluster) network(ctx context.Context) (Network, error) {
	n := Network{Description: c.Describe(), Limited: c.Limited(), Rate: c.options.Rate.String(), Congestion: c.options.Congestion}
	if len(c.nodes) < 2 {
		return n, nil
	}
	var err error
	n.BytesPerS, err = c.MeasureTCP(ctx, 0, 1, time.Second)
	return n, err
}

// demoReport is what a rank of autobyte.demo reports.
type demoReport struct {
	Batch        int       `json:"batch"`
	Ends         []float64 `json:"ends"`
	End          float64   `json:"end"`
	WarmUpSteps  int       `json:"warm_up_steps"`
	Loss         float64   `json:"final_training_loss"`
	TestAccuracy float64   `json:"test_accuracy"`
	Parameters   int64     `json:"parameters"`
	Torch        string    `json:"torch"`
}

// RunDemo trains the demo's model on the cluster with DDP, then with AutoByte, and compares what they learned.
func RunDemo(ctx context.Context, c *Cluster, options DemoOptions) (DemoResult, error) {
	folder, err := os.MkdirTemp("", "autobyte-demo-*")
	if err != nil {
		return DemoResult{}, fmt.Errorf("lab: %w", err)
	}
	defer os.RemoveAll(folder)
	result := DemoResult{Workers: len(c.nodes), Versions: map[string]string{}}
	if result.Network, err = c.network(ctx); err != nil {
		return DemoResult{}, err
	}
	for _, way := range []struct {
		mode string
		run  *DemoRun
	}{{"ddp", &result.DDP}, {"autobyte", &result.AutoByte}} {
		raw, err := c.runWorkers(ctx, options.Python, way.mode, options.Progress, "-m", "autobyte.demo", "--mode", way.mode,
			"--epochs", strconv.Itoa(options.Epochs), "--steps", strconv.Itoa(options.Steps), "--out", folder)
		if err != nil {
			return DemoResult{}, fmt.Errorf("training with %s: %w", way.mode, err)
		}
		reports, err := decodeAll[demoReport](raw)
		if err != nil {
			return DemoResult{}, err
		}
		if *way.run, err = demoRun(reports); err != nil {
			return DemoResult{}, err
		}
		result.BatchPerWorker, result.Parameters, result.Versions["torch"] = reports[0].Batch, reports[0].Parameters, reports[0].Torch
	}
	result.Speedup = result.AutoByte.SamplesPerSecond / result.DDP.SamplesPerSecond

	var compared struct {
		MaxParamDiff *float64           `json:"max_param_diff"`
		BetweenRanks map[string]float64 `json:"between_ranks"`
	}
	p, err := c.nodes[0].Start(ctx, Command{
		Name: "comparing the trained models", Path: options.Python, Env: environment("OMP_NUM_THREADS=1"),
		Args:   []string{"-m", "autobyte.demo", "--mode", "compare", "--out", folder},
		Stdout: func(line string) bool { return json.Unmarshal([]byte(line), &compared) == nil },
	})
	if err != nil {
		return DemoResult{}, err
	}
	if err := p.Wait(); err != nil {
		return DemoResult{}, err
	}
	if compared.MaxParamDiff == nil {
		return DemoResult{}, fmt.Errorf("lab: comparing the trained models printed no result")
	}
	result.MaxParamDiff, result.BetweenRanks = *compared.MaxParamDiff, compared.BetweenRanks
	return result, nil
}

func demoRun(reports []demoReport) (DemoRun, error) {
	var ends [][]float64
	end := 0.0
	for _, r := range reports {
		ends = append(ends, r.Ends)
		end = max(end, r.End)
	}
	warm := reports[0].WarmUpSteps
	steps, err := slowestSteps(ends, warm)
	if err != nil {
		return DemoRun{}, err
	}
	start := 0.0
	for _, e := range ends {
		start = max(start, e[warm])
	}
	return DemoRun{
		SamplesPerSecond:  float64(len(steps)*reports[0].Batch*len(reports)) / (end - start),
		FinalTrainingLoss: reports[0].Loss,
		TestAccuracy:      reports[0].TestAccuracy,
		StepMSMedian:      1e3 * quantile(steps, 0.5),
		StepMSP95:         1e3 * quantile(steps, 0.95),
		Steps:             len(ends[0]) - 1,
	}, nil
}

func decodeAll[T any](raw []json.RawMessage) ([]T, error) {
	decoded := make([]T, len(raw))
	for rank, r := range raw {
		if err := json.Unmarshal(r, &decoded[rank]); err != nil {
			return nil, fmt.Errorf("lab: the result of rank %d: %w", rank, err)
		}
	}
	return decoded, nil
}
