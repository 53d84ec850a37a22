// Package autobyte holds what the whole project shares: its version.
package autobyte

// Version is the release, in the form of semantic versioning. The Python
// package reads it from this line.
const Version = "0.1.0"
