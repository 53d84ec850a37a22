package sched

import (
	"errors"
	"fmt"
)

// Policy is the order in which a leader issues partitions that are ready.
type Policy uint8

const (
	// Priority issues the lowest (step, forward position, offset) first, so
	// that the next forward pass waits as little as possible.
	Priority Policy = iota
	// FIFO issues in the order of readiness, as engines without a scheduler do.
	// It is there to compare with.
	FIFO
)

// String returns "priority" or "fifo".
func (p Policy) String() string {
	switch p {
	case Priority:
		return "priority"
	case FIFO:
		return "fifo"
	}
	return fmt.Sprintf("policy(%d)", uint8(p))
}

// ParsePolicy is the inverse of String.
func ParsePolicy(s string) (Policy, error) {
	switch s {
	case "priority":
		return Priority, nil
	case "fifo":
		return FIFO, nil
	}
	return 0, fmt.Errorf("sched: unknown policy %q; allowed are \"priority\" and \"fifo\"", s)
}

// MarshalText returns the policy's name.
func (p Policy) MarshalText() ([]byte, error) {
	if p > FIFO {
		return nil, fmt.Errorf("sched: unknown policy %d; allowed are %d (priority) and %d (fifo)", uint8(p), Priority, FIFO)
	}
	return []byte(p.String()), nil
}

// UnmarshalText accepts the policy's name.
func (p *Policy) UnmarshalText(text []byte) error {
	v, err := ParsePolicy(string(text))
	if err == nil {
		*p = v
	}
	return err
}

// Config says how gradients are cut and how much of them may be under way. It
// is in force for whole steps.
type Config struct {
	// Partition is the largest size in bytes of the equal pieces that a tensor
	// is cut into, at least Align; rounded down to a multiple of it. Smaller
	// pieces let an urgent tensor overtake sooner and overlap better; larger
	// ones cost less where every operation costs something beyond its bytes.
	Partition int64 `json:"partition"`

	// Credit is the number of bytes that the engine may hold, at least 1: those
	// of partitions that were issued and not yet given back by Sent. More keeps
	// a link with a long delay, or an engine that works on several operations
	// at once, busy; less leaves less in front of an urgent partition. A
	// partition larger than the credit goes alone.
	Credit int64 `json:"credit"`

	// Fusion is the size in bytes up to which tensors smaller than it, and next
	// to each other in a space, are joined into one partition, which Partition
	// then does not cut. 0 joins nothing. More saves operations where a model
	// has many small tensors; less lets each go as soon as it is ready.
	Fusion int64 `json:"fusion"`

	// Lanes is the number of operations that may be in flight: issued and not
	// yet Done. 0 sets no limit. An engine that loses rate with many operations
	// at once wants few, one with a long delay per operation wants more. A
	// limit needs ranks that share an issue order: ranks that each choose their
	// own could fill their lanes with different partitions and wait for ever.
	Lanes int `json:"lanes"`

	// Policy is the order in which a leader issues: Priority unless one wants
	// to compare. A follower issues in its leader's order whatever it says.
	Policy Policy `json:"policy"`
}

// Validate returns an error that names every field that is out of range.
func (c Config) Validate() error {
	var errs []error
	if c.Partition < Align {
		errs = append(errs, fmt.Errorf("sched: partition is %d bytes; it must be at least %d", c.Partition, Align))
	}
	if c.Credit < 1 {
		errs = append(errs, fmt.Errorf("sched: credit is %d bytes; it must be at least 1", c.Credit))
	}
	if c.Fusion < 0 {
		errs = append(errs, fmt.Errorf("sched: fusion is %d bytes; it must not be negative, and 0 joins nothing", c.Fusion))
	}
	if c.Lanes < 0 {
		errs = append(errs, fmt.Errorf("sched: lanes is %d; it must not be negative, and 0 sets no limit", c.Lanes))
	}
	if c.Policy > FIFO {
		errs = append(errs, fmt.Errorf("sched: policy is %d; it must be %d (priority) or %d (fifo)", uint8(c.Policy), Priority, FIFO))
	}
	return errors.Join(errs...)
}
