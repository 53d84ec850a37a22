// Package lab makes small clusters on one machine and runs programs on them: a network namespace for each
// worker, links of a set rate between them, worker processes, plain TCP flows to measure what a link
// carries, and on top of these the demo and the benchmark of emulated computation.
//
// # The emulated network
//
// A hub namespace holds a bridge. Each worker has a namespace of its own, joined to the bridge by a veth pair
// that is shaped by tbf at both ends: the worker's end limits what it sends, the bridge's end what it
// receives. Addresses are from 10.77.0.0/24 and exist inside these namespaces only; the machine's own
// interfaces, routes and settings stay as they are.
//
// tbf's burst is the time for which a link that was idle may exceed its rate, so it hides latency, and one
// too small for the kernel's timers costs rate: it is 1.7 ms of the rate (about 200 KB at 1 Gbit/s, 1 MB at
// 5), at least 32 KiB. The queue before it is 20 ms of the rate and at least 256 KiB, about that of a switch
// port: enough for cubic to fill a link whose round trip is far below a millisecond, and small
// enough to drop when several workers send to one.
//
// # What is left behind
//
// Nothing, after success, error or cancellation. A namespace is a file in /run/autobyte (nsenter --net=FILE enters
// it) while it exists. Names carry the owner's process id and start time, so after
// a kill -9 the next Create finds the namespaces whose owner is dead, ends the processes that are
// still inside and removes them.
//
// Nothing here installs signal handlers or exits; a Cluster may be used concurrently.
package lab
