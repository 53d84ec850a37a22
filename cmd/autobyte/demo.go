package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"autobyte/internal/lab"
)

func newDemo() *cobra.Command {
	var network networkFlags
	var epochs, steps int
	var out string
	var asJSON bool
	command := &cobra.Command{
		Use:   "demo",
		Short: "Train a real model with plain DDP and with AutoByte over a slow network, and compare",
		Long: `Trains a convolutional network on scikit-learn's digits on every worker, once with
DistributedDataParallel and once with AutoByte, from the same seed and in the same order.

As root the workers run in network namespaces of their own, joined by links of the given rate, which are
removed whatever happens. Without root they share loopback, and the network is not limited.

Samples a second leave out the first steps and include all communication and updates of the last. max_param_diff
is the largest difference between the two trained models, over all parameters and buffers.`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) (err error) {
			if steps < 0 || steps == 1 || epochs < 1 {
				return fmt.Errorf("--steps is %d and --epochs %d: want at least 2 steps (or 0 for whole epochs) and 1 epoch", steps, epochs)
			}
			if out != "" {
				if err := checkWritable(out); err != nil {
					return fmt.Errorf("--out: %w", err)
				}
			}
			c, notice, err := network.cluster(command)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, c.Close()) }()
			report, done := newProgress(command.ErrOrStderr())
			result, err := lab.RunDemo(command.Context(), c, lab.DemoOptions{Python: network.python, Epochs: epochs, Steps: steps, Progress: report})
			done()
			if err != nil {
				return err
			}
			result.Network.Notice = notice
			maps.Copy(result.Versions, versions())
			if out != "" {
				if err := writeFile(out, result); err != nil {
					return fmt.Errorf("--out: %w", err)
				}
			}
			if asJSON {
				return writeJSON(command.OutOrStdout(), result)
			}
			return printDemo(command.OutOrStdout(), result, out)
		},
	}
	network.add(command, "200mbit")
	flags := command.Flags()
	flags.IntVar(&epochs, "epochs", 14, "how many times to go through the training images")
	flags.IntVar(&steps, "steps", 0, "train for this many steps instead of whole epochs")
	flags.StringVar(&out, "out", "demo/result.json", "file for the result, empty for none")
	flags.BoolVar(&asJSON, "json", false, "print the result as JSON")
	return command
}

func printDemo(to io.Writer, r lab.DemoResult, out string) error {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w)
	fmt.Fprintln(w, "\tDDP\tAutoByte\t")
	row := func(name, format string, ddp, autobyte any) {
		fmt.Fprintf(w, "%s\t"+format+"\t"+format+"\t\n", name, ddp, autobyte)
	}
	row("samples a second", "%.0f", r.DDP.SamplesPerSecond, r.AutoByte.SamplesPerSecond)
	row("step, median (ms)", "%.1f", r.DDP.StepMSMedian, r.AutoByte.StepMSMedian)
	row("final training loss", "%.6f", r.DDP.FinalTrainingLoss, r.AutoByte.FinalTrainingLoss)
	row("test accuracy", "%.2f%%", 100*r.DDP.TestAccuracy, 100*r.AutoByte.TestAccuracy)
	if err := w.Flush(); err != nil {
		return err
	}
	learned := "the two trained models are equal bit for bit"
	if r.MaxParamDiff != 0 {
		learned = "the two trained models DIFFER"
	}
	_, err := fmt.Fprintf(to, "\nmax_param_diff %g: %s\nspeedup %.2f over %s\n", r.MaxParamDiff, learned, r.Speedup, r.Network.Description)
	if err == nil && r.Network.Notice != "" {
		_, err = fmt.Fprintln(to, r.Network.Notice)
	}
	if err == nil && out != "" {
		_, err = fmt.Fprintln(to, "written to", out)
	}
	return err
}
