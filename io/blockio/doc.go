// Package blockio is the contract between the block store and its I/O backends. A backend moves
// aligned buffers to and from the files of one volume, in batches. The package is not a file
// system: it has no paths below the volume, no append, no partial results and no caching.
//
//	blockstore ── Batch{Read f@0 4 MiB, Write g@8 MiB 1 MiB, …} ──► Device ──► one volume directory
//	               │                                                  │
//	               └── buffers: arena memory, Align-ed ───────────────┘ the device's until Do returns
//
// Five packages implement it: uring (io_uring, O_DIRECT), posixio (preadv and pwritev, O_DIRECT),
// usrbio (3FS's user-space I/O), memio (memory, with crash semantics) and faultio (wraps another and
// injects faults). blockiotest.Run is the conformance suite that all five pass: it has a case for
// every sentence on Device and File below.
//
// This package also has the parts that all backends share: the checks of names, sizes and requests;
// Gate, on which Close waits; Counters behind Stats; and Budget, which bounds the bytes in flight
// and adapts to the device (tuner.go has the rule):
//
//	throughput
//	    │         ╭──────────────────  more in flight only waits inside the device
//	    │       ╱ └ the knee: where the limit settles
//	    │     ╱
//	    └───────────────────────────► bytes in flight
//
// Checks enforce the alignment: the offsets, lengths and addresses of a Request must be multiples
// of Align. Any other Request is refused with ErrAlign before anything is submitted.
//
// Lock order: Gate.mu and Budget.mu are leaves; no lock is taken under them.
package blockio
