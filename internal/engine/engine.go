// Package engine defines what carries partitions and sums them over the ranks,
// so that the scheduler's shell can drive any engine the same way.
package engine

import "autobyte/internal/sched"

// Reports is told what became of the operations handed to an engine. An engine
// reports Done or Failed exactly once for each operation, from any goroutine.
type Reports interface {
	// Sent says that the engine no longer holds the operation's bytes.
	// It is optional: Done implies it.
	Sent(step uint64, index int)
	// Done says that the partition holds the reduced values on this rank.
	Done(step uint64, index int) error
	// Failed says that the operation will never be done.
	Failed(step uint64, index int, cause error)
}

// Engine carries partitions. Submit never blocks and takes the operations in
// the order in which this rank must issue them; the caller bounds how many are
// under way. After Close, nothing is taken and no report begins; Close can be
// called again.
type Engine interface {
	Submit(ops []sched.Op)
	Close() error
}
