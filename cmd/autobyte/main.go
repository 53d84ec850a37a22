// Command autobyte runs AutoByte's demo and benchmarks. `autobyte help` lists what it can do.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/spf13/cobra"

	"autobyte"
	"autobyte/internal/lab"
)

// Exit codes besides 0.
const (
	exitFailed      = 1
	exitInterrupted = 130
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second signal ends the process the usual way, should cleaning up hang.
	context.AfterFunc(ctx, stop)
	err := newRoot().ExecuteContext(ctx)
	switch {
	case err == nil:
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		fmt.Fprintln(os.Stderr, "autobyte: interrupted; everything that was started has been removed")
		os.Exit(exitInterrupted)
	default:
		fmt.Fprintln(os.Stderr, "autobyte:", err)
		os.Exit(exitFailed)
	}
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "autobyte",
		Short:         "A communication scheduler for data-parallel training",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(command *cobra.Command, err error) error {
		return fmt.Errorf("%w; see `%s --help`", err, command.CommandPath())
	})
	root.AddCommand(newDemo(), newBench(), newVersion())
	return root
}

func newVersion() *cobra.Command {
	var asJSON bool
	command := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			if asJSON {
				return writeJSON(command.OutOrStdout(), versions())
			}
			v := versions()
			_, err := fmt.Fprintf(command.OutOrStdout(), "autobyte %s (%s, %s)\n", v["autobyte"], v["go"], v["platform"])
			return err
		},
	}
	command.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return command
}

func versions() map[string]string {
	return map[string]string{"autobyte": autobyte.Version, "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH}
}

// networkFlags are the flags of every command that makes a cluster.
type networkFlags struct {
	rate       string
	workers    int
	congestion string
	python     string
}

func (f *networkFlags) add(command *cobra.Command, rate string) {
	flags := command.Flags()
	flags.StringVar(&f.rate, "rate", rate, "rate of every worker's link, each way: kbit, mbit or gbit, or none (needs root)")
	flags.IntVar(&f.workers, "workers", 2, "number of workers")
	flags.StringVar(&f.congestion, "congestion", "", "TCP congestion control, such as cubic or bbr (needs root; default: this machine's)")
	flags.StringVar(&f.python, "python", "", "Python interpreter of the workers, one that has torch (default: AUTOBYTE_PYTHON, the one that make has set up, or python3)")
}

// cluster checks the flags and makes the cluster, which the caller must close.
func (f *networkFlags) cluster(command *cobra.Command) (c *lab.Cluster, notice string, err error) {
	rate, err := lab.ParseRate(f.rate)
	if err != nil {
		return nil, "", fmt.Errorf("--rate: %w", err)
	}
	if f.workers < 2 || f.workers > lab.MaxWorkers {
		return nil, "", fmt.Errorf("--workers is %d: want 2 to %d", f.workers, lab.MaxWorkers)
	}
	if err := usePackage(); err != nil {
		return nil, "", err
	}
	if f.python, err = lab.FindPython(cmp.Or(f.python, defaultPython())); err != nil {
		return nil, "", fmt.Errorf("--python: %w", err)
	}
	logger := slog.New(slog.NewTextHandler(command.ErrOrStderr(), nil))
	c, notice, err = lab.CreateOrLoopback(command.Context(), lab.Options{Workers: f.workers, Rate: rate, Congestion: f.congestion, Logger: logger})
	if err != nil {
		return nil, "", err
	}
	if notice == "" {
		fmt.Fprintf(command.ErrOrStderr(), "%d workers in %s\n", f.workers, c.Describe())
	} else {
		fmt.Fprintln(command.ErrOrStderr(), notice)
		for _, name := range []string{"rate", "congestion"} {
			if command.Flags().Changed(name) {
				fmt.Fprintf(command.ErrOrStderr(), "--%s has no effect without root\n", name)
			}
		}
	}
	return c, notice, nil
}

func writeJSON(to io.Writer, value any) error {
	encoder := json.NewEncoder(to)
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}

// checkWritable says now what writing a file would say after minutes of work.
func checkWritable(path string) error {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return fmt.Errorf("%s is a folder, the name of a file is wanted", path)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	probe, err := os.CreateTemp(filepath.Dir(path), ".result-*")
	if err != nil {
		return err
	}
	return errors.Join(probe.Close(), os.Remove(probe.Name()))
}

// writeFile writes the value's JSON to a file that is either whole or as it was before.
func writeFile(path string, value any) (err error) {
	folder := filepath.Dir(path)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	temporary, err := os.CreateTemp(folder, ".result-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(temporary.Name()))
		}
	}()
	err = errors.Join(writeJSON(temporary, value), temporary.Chmod(0o644), temporary.Close())
	if err != nil {
		return err
	}
	return os.Rename(temporary.Name(), path)
}
