// Package wire holds the formats of everything that AutoByte puts on a
// connection: the frame header, the hello messages and the control messages.
// Encoders append to the caller's slice; decoders check every length against a
// limit before they use it and never panic, whatever the bytes. The package
// has no state: everything in it may be called concurrently.
package wire
