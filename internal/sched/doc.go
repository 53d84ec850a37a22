// Package sched is the scheduling core: it decides which partition of which
// gradient is communicated next, and nothing else. It has no goroutine, clock,
// I/O, callback or logging. Events go in as method calls, operations come out
// of [Scheduler.Next], so the worker, the simulator and the property tests
// drive the same code.
//
// # Words
//
// A [Layout] lays tensors end to end in spaces, in forward order. A [Config]
// says how they are cut and how much may be under way, and the two make a
// [Plan]: a list of partitions in priority order. A step is one pass of
// gradients over all spaces. It is usually one optimizer iteration, but a
// second backward pass before the optimizer's step takes a step of its own.
// A plan belongs to a step, so the next step can use another one while this
// one still drains.
//
// # The life of a step
//
//	Open → SetPlan, Ready…, Close → Next, Sent, Done… → retired
//
// Gradients may become ready before the plan is known. At most two steps are
// alive, and a step retires as soon as it is closed and all its partitions are
// done. Its memory is then used again: a steady run allocates nothing.
//
// # Rules
//
//   - A partition is issued once, and only when all its tensors are ready.
//   - A [Leader] under [Priority] always takes the lowest (step, forward
//     position, offset) that is ready; if that one has to wait for credit or
//     for a lane, all wait behind it. Under [FIFO] it takes what became ready
//     first.
//   - Plans and gradients come in the order of the steps: a step takes gradients
//     once the one before it is closed.
//   - A [Follower] issues exactly in the order that it is told.
//   - Bytes that the engine holds (issued and not sent) never exceed the credit
//     of the plan of the partition issued last, except that a partition larger
//     than the credit goes when nothing is held. Operations in flight (issued
//     and not done) never exceed its lanes. Both count over all alive steps and
//     hold for leaders and followers alike.
//   - Every partition is done exactly once.
//   - A call that breaks a rule returns an error and changes nothing.
//
// # Why nobody waits for ever
//
// Take ranks that share an issue order, and an engine that completes an
// operation once every rank has issued it. The rank that has issued the fewest
// has only issued what all have issued, so it comes to hold nothing and to have
// nothing in flight, and then neither credit nor lanes can refuse its next
// partition: it waits for gradients only. Those come, since whatever a rank waits
// for before it gives them lies earlier in the order: gradients of a step are
// given after the one before was closed, so a leader has put all of that one in
// front. It remains for whoever drives a rank to wait for tensors of a step only
// after closing it, and to close step s before waiting to open s+2.
//
// Ranks that each choose their own order (all leaders) need an engine that
// calls Sent without waiting for other ranks, and no limit on lanes: with one
// lane each, two ranks that begin with different partitions would wait for each
// other.
//
// A Scheduler is not safe for concurrent use. Layouts and plans never change
// once made and may be shared.
package sched
