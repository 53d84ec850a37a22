package worker

import (
	"encoding/json"
	"fmt"

	"autobyte/internal/sched"
)

// Settings are the knobs as the user gave them; a nil one was left to us.
type Settings struct {
	Partition *int64        `json:"partition,omitempty"` // bytes
	Credit    *int64        `json:"credit,omitempty"`    // bytes
	Fusion    *int64        `json:"fusion,omitempty"`    // bytes
	Lanes     *int          `json:"lanes,omitempty"`     // operations in flight
	Policy    *sched.Policy `json:"policy,omitempty"`
}

// Bounds of the default partition size, and how many partitions of that size
// a model should have at least.
const (
	minDefaultPartition = 256 << 10
	maxDefaultPartition = 1 << 20
	minPartitions       = 16
)

// Defaults is the configuration of the external engine where the user sets
// nothing, for a model with so many bytes of gradients. A partition must be
// long enough to cover the fixed cost of an operation and short enough to let
// an urgent one pass; docs/external-engine.md has the measurements. A small
// model gets smaller ones, or there would be nothing to put in order.
func Defaults(gradientBytes int64) sched.Config {
	partition := min(max(gradientBytes/minPartitions, minDefaultPartition), maxDefaultPartition)
	partition -= partition % sched.Align
	return sched.Config{
		Partition: partition,
		Credit:    creditPartitions * partition,
		Fusion:    partition,
		Lanes:     creditPartitions,
		Policy:    sched.Priority,
	}
}

// creditPartitions is how many partitions are under way by default: gloo works
// on two at a time, one is on its way to the others, and one covers the delay
// of a completion.
const creditPartitions = 4

// withDefaults fills what the user left open, for a model with so many bytes
// of gradients, and checks the whole.
func (s Settings) withDefaults(gradientBytes int64) (Settings, error) {
	d := Defaults(gradientBytes)
	if s.Credit != nil {
		d.Partition = min(d.Partition, max(*s.Credit, sched.Align))
	}
	if s.Partition == nil {
		s.Partition = &d.Partition
	}
	if s.Credit == nil {
		d.Credit = creditPartitions * *s.Partition
		s.Credit = &d.Credit
	}
	// Fusing up to more than a partition would defeat the partition size.
	d.Fusion = *s.Partition
	if s.Fusion == nil {
		s.Fusion = &d.Fusion
	}
	if s.Lanes == nil {
		s.Lanes = &d.Lanes
	}
	if s.Policy == nil {
		s.Policy = &d.Policy
	}
	if err := s.config().Validate(); err != nil {
		return s, err
	}
	return s, nil
}

// config is the configuration of settings without a nil.
func (s Settings) config() sched.Config {
	return sched.Config{Partition: *s.Partition, Credit: *s.Credit, Fusion: *s.Fusion, Lanes: *s.Lanes, Policy: *s.Policy}
}

// over returns s with what is set in change put over it.
func (s Settings) over(change Settings) Settings {
	if change.Partition != nil {
		s.Partition = change.Partition
	}
	if change.Credit != nil {
		s.Credit = change.Credit
	}
	if change.Fusion != nil {
		s.Fusion = change.Fusion
	}
	if change.Lanes != nil {
		s.Lanes = change.Lanes
	}
	if change.Policy != nil {
		s.Policy = change.Policy
	}
	return s
}

func (s Settings) marshal() []byte {
	b, err := json.Marshal(s)
	if err != nil { // plain numbers and a valid policy always marshal
		return []byte("{}")
	}
	return b
}

// retune is a change of settings that waits for its step.
type retune struct {
	change    Settings
	firstStep uint64
}

// Configure changes the given knobs from a pass on: firstStep, or the next one
// to begin when that is later. What was decided for passes under way stays.
// Only rank 0's call has an effect; the others follow what it announces.
func (w *Worker) Configure(change Settings, firstStep uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := w.settings
	for _, r := range w.retunes {
		next = next.over(r.change)
	}
	if err := next.over(change).config().Validate(); err != nil {
		return err
	}
	if w.opt.Rank == leader {
		w.retunes = append(w.retunes, retune{change, firstStep})
	}
	return nil
}

// configLocked applies the changes that are due and returns the configuration
// of a pass.
func (w *Worker) configLocked(step uint64) sched.Config {
	left := w.retunes[:0]
	for _, r := range w.retunes {
		if r.firstStep <= step {
			w.settings = w.settings.over(r.change)
		} else {
			left = append(left, r)
		}
	}
	w.retunes = left
	return w.settings.config()
}

// adoptSettings takes rank 0's settings in place of this rank's own.
func (w *Worker) adoptSettings(text []byte) error {
	var s Settings
	if err := json.Unmarshal(text, &s); err != nil {
		return fmt.Errorf("rank 0's settings can't be read: %w", err)
	}
	s, err := s.withDefaults(gradientBytes(w.opt.Tensors))
	if err != nil {
		return fmt.Errorf("rank 0's settings are wrong: %w", err)
	}
	w.mu.Lock()
	w.settings = s
	w.mu.Unlock()
	return nil
}

// CurrentSettings are the knobs that the next pass will use, as far as this
// rank knows.
func (w *Worker) CurrentSettings() Settings {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.settings
}

// gradientBytes is the size of all gradients of a model.
func gradientBytes(tensors []Tensor) int64 {
	var sum int64
	for _, t := range tensors {
		sum += max(t.Bytes, 0)
	}
	return sum
}
