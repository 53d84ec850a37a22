// Package transport opens authenticated connections and reads and writes
// frames on them, each within a deadline. Both sides prove that they know the
// job's secret, by an HMAC-SHA256 over role, both nonces, protocol version,
// purpose, job, rank, world size, incarnation and connection number, so that
// no message of the opening can be reflected or replayed. What follows is
// neither encrypted nor signed. A server bounds the connections that have not
// proved anything yet, and drops the oldest of them for a new one.
//
// Server, Network and Memory may be used concurrently. A Conn takes one reader
// and one writer at a time; Close and CloseWrite may come from anywhere.
package transport
