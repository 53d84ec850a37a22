package lab

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// namespaceFolder is not ip netns's /run/netns: ip netns add may mount that folder anew over itself, and
	// with it everything in it, so that an unmount no longer reaches what it should.
	namespaceFolder = "/run/autobyte"
	namePrefix      = "autobyte-"
	// endWithin bounds the wait for killed processes to be gone.
	endWithin = 5 * time.Second
)

// selfOwner is the prefix of the names that this process owns: its id and, since ids are used again, when it
// started.
func selfOwner() (string, error) {
	pid := os.Getpid()
	start, _, err := processStart(pid)
	if err != nil {
		return "", fmt.Errorf("lab: %w", err)
	}
	return fmt.Sprintf("%s%d-%d", namePrefix, pid, start), nil
}

// processStart returns when a process started, in clock ticks since boot, and its state letter.
func processStart(pid int) (start uint64, state byte, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	// The command's name stands in parentheses and may hold anything, so fields count from the last ')'.
	text := string(stat)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	const stateField, startField = 0, 19
	if len(fields) <= startField {
		return 0, 0, fmt.Errorf("/proc/%d/stat has %d fields after the name", pid, len(fields))
	}
	start, err = strconv.ParseUint(fields[startField], 10, 64)
	return start, fields[stateField][0], err
}

// parseOwner reads the owner out of a namespace's name. ok is false for names that are not ours.
func parseOwner(name string) (pid int, start uint64, ok bool) {
	rest, found := strings.CutPrefix(name, namePrefix)
	parts := strings.Split(rest, "-")
	if !found || len(parts) < 3 {
		return 0, 0, false
	}
	pid, err1 := strconv.Atoi(parts[0])
	start, err2 := strconv.ParseUint(parts[1], 10, 64)
	return pid, start, err1 == nil && err2 == nil && pid > 0
}

func ownerLives(pid int, start uint64) bool {
	now, state, err := processStart(pid)
	return err == nil && now == start && state != 'Z' && state != 'X'
}

// RemoveRemains removes the namespaces of clusters whose owner is dead, with the processes inside them.
func RemoveRemains(logger *slog.Logger) error {
	entries, err := os.ReadDir(namespaceFolder)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("lab: looking for remains: %w", err)
	}
	var errs error
	for _, e := range entries {
		pid, start, ours := parseOwner(e.Name())
		if !ours || ownerLives(pid, start) {
			continue
		}
		if err := removeNamespace(e.Name(), logger); err != nil {
			errs = errors.Join(errs, err)
			continue
		}
		logger.Info("removed a network namespace that a killed run left", "namespace", e.Name(), "owner", pid)
	}
	return errs
}

// removeNamespace ends the processes inside a named namespace and removes it. One that is not there is no error.
func removeNamespace(name string, logger *slog.Logger) error {
	path := filepath.Join(namespaceFolder, name)
	var ours, root unix.Stat_t
	if err := unix.Stat(path, &ours); errors.Is(err, unix.ENOENT) {
		return nil
	} else if err != nil {
		return fmt.Errorf("lab: removing %s: %w", path, err)
	}
	if err := unix.Stat(namespaceFolder, &root); err != nil {
		return fmt.Errorf("lab: removing %s: %w", path, err)
	}
	// On the folder's own device it is a plain file: its owner died before it mounted the namespace there.
	if ours.Dev != root.Dev {
		if err := endProcesses(path, ours, logger); err != nil {
			return err
		}
		// EINVAL, ENOENT: another run that cleans up was faster.
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("lab: unmounting %s: %w", path, err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("lab: removing %s: %w", path, err)
	}
	_ = os.Remove(namespaceFolder) // fails while another cluster has namespaces there
	return nil
}

// endProcesses kills what runs in the namespace until nothing does.
func endProcesses(path string, namespace unix.Stat_t, logger *slog.Logger) error {
	deadline := time.Now().Add(endWithin)
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		inside, err := processesIn(namespace)
		if err != nil {
			return err
		}
		if len(inside) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("lab: processes %v in %s live %v after SIGKILL", inside, path, endWithin)
		}
		for _, pid := range inside {
			if err := kill(pid, namespace); err != nil {
				logger.Warn("cannot end a process in a namespace to be removed", "pid", pid, "namespace", path, "error", err)
			}
		}
		time.Sleep(pause)
	}
}

// processesIn lists the other processes whose network namespace it is. Zombies have none.
func processesIn(namespace unix.Stat_t) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	var inside []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err == nil && pid != os.Getpid() && isIn(pid, namespace) {
			inside = append(inside, pid)
		}
	}
	return inside, nil
}

func isIn(pid int, namespace unix.Stat_t) bool {
	var s unix.Stat_t
	err := unix.Stat(fmt.Sprintf("/proc/%d/ns/net", pid), &s)
	return err == nil && s.Dev == namespace.Dev && s.Ino == namespace.Ino
}

// kill ends the process if it is still in the namespace: the descriptor keeps a successor with the same id safe.
func kill(pid int, namespace unix.Stat_t) error {
	descriptor, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(descriptor)
	if !isIn(pid, namespace) {
		return nil
	}
	if err := unix.PidfdSendSignal(descriptor, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}
