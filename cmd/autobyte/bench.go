package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"autobyte/internal/lab"
	"autobyte/internal/model"
)

// benchFlags are the flags of `autobyte bench`.
type benchFlags struct {
	network                   networkFlags
	model, engine, vs, policy string
	partition, credit, fusion string
	steps, rounds             int
	computeMS                 float64
	checkDDP                  bool
	asJSON                    bool
}

// benchResult is what `autobyte bench --json` prints.
type benchResult struct {
	DDP      *lab.BenchRun `json:"ddp,omitempty"`
	DDPPlain *lab.BenchRun `json:"ddp_plain,omitempty"`
	AutoByte *lab.BenchRun `json:"autobyte"`
	// Speedup is DDP's median step over AutoByte's.
	Speedup           float64           `json:"speedup,omitempty"`
	Model             string            `json:"model"`
	GradientBytes     int64             `json:"gradient_bytes"`
	Workers           int               `json:"workers"`
	Engine            string            `json:"engine"`
	Options           map[string]string `json:"options"`
	ComputeMS         float64           `json:"compute_ms"`
	CommunicationMS   float64           `json:"communication_ms"`
	LowerBoundMS      float64           `json:"lower_bound_ms"`
	BytesPerS         float64           `json:"bytes_per_s"`
	BytesPerSBefore   float64           `json:"bytes_per_s_before"`
	BytesPerSAfter    float64           `json:"bytes_per_s_after"`
	BytesPerSBothWays [2]float64        `json:"bytes_per_s_both_ways"`
	Network           string            `json:"network"`
	Limited           bool              `json:"limited"`
	Notice            string            `json:"notice,omitempty"`
	Versions          map[string]string `json:"versions"`
}

var sizePattern = regexp.MustCompile(`^(?i)(\d+(?:\.\d+)?) ?(B|KiB|MiB|GiB|KB|MB|GB)?$`)

func newBench() *cobra.Command {
	var f benchFlags
	command := &cobra.Command{
		Use:   "bench",
		Short: "Time training steps with replayed computation over real sockets, beside T*",
		Long: `Runs training steps of a model whose layers hold its real parameters and gradients but sleep for as
long as a profile says instead of computing. Communication, copies, hooks and the optimizer are real.

Contenders alternate in the same namespaces. A step is timed at its slowest rank: it ends when the last rank
has ended it. T* (lower_bound_ms) is the time that no schedule can beat, from the same layer times and from what
a plain TCP flow carries before or after the contenders, whichever is more. cpu_s is the CPU time of one worker
in one step.

DDP runs as a user would run it: all defaults. --check-ddp adds a contender ddp_plain: DDP again, on a model
of the same sizes in which nothing of the replaying harness is used but plain sleeps.

What is not set (--partition, --credit, --fusion, --policy) is left to AutoByte's own defaults.`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error { return f.run(command) },
	}
	f.network.add(command, "1gbit")
	flags := command.Flags()
	flags.StringVar(&f.model, "model", "resnet50", "model profile to replay, or a profile's file (*.json)")
	flags.StringVar(&f.engine, "engine", "external", "engine that carries partitions: external")
	flags.StringVar(&f.vs, "vs", "ddp", "what to compare with: ddp or none")
	flags.StringVar(&f.policy, "policy", "", "order of partitions: priority or fifo")
	flags.StringVar(&f.partition, "partition", "", "partition size, such as 1MiB")
	flags.StringVar(&f.credit, "credit", "", "bytes that may be in flight, such as 4MiB")
	flags.StringVar(&f.fusion, "fusion", "", "size up to which small tensors are joined, such as 256KiB")
	flags.IntVar(&f.steps, "steps", 20, "steps to time for each contender")
	flags.IntVar(&f.rounds, "rounds", 2, "how often the contenders alternate")
	flags.Float64Var(&f.computeMS, "compute-ms", 850, "computation of one step, to which the profile is scaled; 0 leaves it as it is")
	flags.BoolVar(&f.checkDDP, "check-ddp", false, "also run DDP on a model without the harness's clock")
	flags.BoolVar(&f.asJSON, "json", false, "print the result as JSON")
	return command
}

func (f *benchFlags) validate() error {
	switch f.engine {
	case "external":
	case "native":
		return errors.New("--engine native: the native engine is not in this version; there is external")
	default:
		return fmt.Errorf("--engine is %q: want external", f.engine)
	}
	if f.vs != "ddp" && f.vs != "none" {
		return fmt.Errorf("--vs is %q: want ddp or none", f.vs)
	}
	if f.policy != "" && f.policy != "priority" && f.policy != "fifo" {
		return fmt.Errorf("--policy is %q: want priority or fifo", f.policy)
	}
	for _, size := range []struct {
		flag, value string
		minimum     float64 // bytes, as autobyte.torch.wrap has it
	}{{"partition", f.partition, 64}, {"credit", f.credit, 1}, {"fusion", f.fusion, 0}} {
		if size.value != "" && !(bytesOf(size.value) >= size.minimum) {
			return fmt.Errorf("--%s is %q: want at least %g bytes, as a number or with B, KiB, MiB, GiB, KB, MB or GB, such as 4MiB",
				size.flag, size.value, size.minimum)
		}
	}
	if f.steps < 1 || f.rounds < 1 || f.steps < f.rounds {
		return fmt.Errorf("--steps is %d and --rounds %d: want at least one step in each of at least one round", f.steps, f.rounds)
	}
	if !(f.computeMS >= 0 && f.computeMS <= 1e6) {
		return fmt.Errorf("--compute-ms is %v: want 0 to 1000000", f.computeMS)
	}
	return nil
}

// bytesOf is the size that a text names, NaN if it names none.
func bytesOf(text string) float64 {
	parts := sizePattern.FindStringSubmatch(text)
	if parts == nil {
		return math.NaN()
	}
	number, err := strconv.ParseFloat(parts[1], 64)
	if err != nil {
		return math.NaN()
	}
	return number * sizeUnits[strings.ToUpper(parts[2])]
}

var sizeUnits = map[string]float64{
	"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 1e3, "MB": 1e6, "GB": 1e9,
}

func (f *benchFlags) profile() (model.Profile, error) {
	load := model.Bundled
	if len(f.model) > 5 && f.model[len(f.model)-5:] == ".json" {
		load = model.Load
	}
	p, err := load(f.model)
	if err != nil {
		return model.Profile{}, fmt.Errorf("--model: %w", err)
	}
	if f.computeMS == 0 {
		return p, nil
	}
	return p.Scaled(f.computeMS / 1e3)
}

// options are the options of autobyte.torch.wrap that are set.
func (f *benchFlags) options() map[string]string {
	set := map[string]string{}
	for name, value := range map[string]string{"policy": f.policy, "partition": f.partition, "credit": f.credit, "fusion": f.fusion} {
		if value != "" {
			set[name] = value
		}
	}
	return set
}

func (f *benchFlags) run(command *cobra.Command) (err error) {
	if err := f.validate(); err != nil {
		return err
	}
	profile, err := f.profile()
	if err != nil {
		return err
	}
	autobyte := lab.Contender{Name: "autobyte", Mode: "autobyte", Args: []string{"--engine", f.engine}}
	for name, value := range f.options() {
		autobyte.Args = append(autobyte.Args, "--"+name, value)
	}
	var contenders []lab.Contender
	if f.vs == "ddp" {
		contenders = append(contenders, lab.Contender{Name: "ddp", Mode: "ddp"})
	}
	if f.checkDDP {
		contenders = append(contenders, lab.Contender{Name: "ddp_plain", Mode: "plain"})
	}
	contenders = append(contenders, autobyte)

	c, notice, err := f.network.cluster(command)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	report, done := newProgress(command.ErrOrStderr())
	outcome, err := lab.RunBench(command.Context(), c, lab.BenchOptions{Python: f.network.python, Profile: profile,
		Contenders: contenders, Steps: f.steps, Rounds: f.rounds, Progress: report})
	done()
	if err != nil {
		return err
	}
	result := benchResult{
		Model: profile.Name, GradientBytes: profile.Bytes(), Workers: f.network.workers, Engine: f.engine, Options: f.options(),
		ComputeMS: 1e3 * outcome.Bound.Compute, CommunicationMS: 1e3 * outcome.Bound.Communication, LowerBoundMS: 1e3 * outcome.Bound.Step,
		BytesPerS: outcome.BytesPerS(), BytesPerSBefore: outcome.BytesPerSBefore, BytesPerSAfter: outcome.BytesPerSAfter,
		BytesPerSBothWays: outcome.BytesPerSBothWays,
		Network:           c.Describe(), Limited: c.Limited(), Notice: notice, Versions: versions(),
	}
	result.Versions["torch"] = outcome.Torch
	for name, place := range map[string]**lab.BenchRun{"ddp": &result.DDP, "ddp_plain": &result.DDPPlain, "autobyte": &result.AutoByte} {
		if run, ran := outcome.Runs[name]; ran {
			*place = &run
		}
	}
	if result.DDP != nil {
		result.Speedup = result.DDP.StepMSMedian / result.AutoByte.StepMSMedian
	}
	if f.asJSON {
		return writeJSON(command.OutOrStdout(), result)
	}
	return printBench(command.OutOrStdout(), result)
}

func printBench(to io.Writer, r benchResult) error {
	fmt.Fprintf(to, "\n%s, %.1f MB of gradients, %d workers, %s\n", r.Model, float64(r.GradientBytes)/1e6, r.Workers, r.Network)
	fmt.Fprintf(to, "computation %.1f ms, communication %.1f ms at %.2f MB/s (a plain TCP flow; both ways at once %.2f and %.2f)\n\n",
		r.ComputeMS, r.CommunicationMS, r.BytesPerS/1e6, r.BytesPerSBothWays[0]/1e6, r.BytesPerSBothWays[1]/1e6)
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\tstep, median (ms)\tp95 (ms)\tover T*\tCPU (s/step)\tpeak memory (MB)\t")
	for _, row := range []struct {
		name string
		run  *lab.BenchRun
	}{{"DDP", r.DDP}, {"DDP, plain sleeps", r.DDPPlain}, {"AutoByte", r.AutoByte}} {
		if row.run != nil {
			fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%.3f\t%.3f\t%.0f\t\n", row.name, row.run.StepMSMedian, row.run.StepMSP95, row.run.RatioToBound, row.run.CPUSeconds, float64(row.run.PeakRSSBytes)/1e6)
		}
	}
	fmt.Fprintf(w, "T*\t%.1f\t\t1.000\t\t\t\n", r.LowerBoundMS)
	if err := w.Flush(); err != nil {
		return err
	}
	if r.Speedup > 0 {
		fmt.Fprintf(to, "\nspeedup over DDP %.3f; DDP over T* %.3f\n", r.Speedup, r.DDP.RatioToBound)
	}
	if r.Notice != "" {
		fmt.Fprintln(to, r.Notice)
	}
	return nil
}
