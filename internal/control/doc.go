// Package control connects the ranks of one job to rank 0, which leads: who is
// a member, which partition comes next, which plan holds at a step, which
// tensors have no gradient anywhere, and who is gone.
//
// A Group is one rank's end and may be used concurrently. Send methods never
// block: they append to a buffer for each peer, which a goroutine empties; a
// peer that lets too much pile up is lost. What is sent from rank 0 reaches
// every follower in the same order. Events are delivered one at a time, in
// order, under no lock of this package, and only once Await has succeeded.
package control
