// Package blockio is the contract between the block store and whatever moves
// its bytes: aligned buffers to and from the files of one volume, in batches.
// It is not a file system: no paths below the volume, no append, no partial
// results, no caching.
//
//	blockstore ── Batch{Read f@0 4 MiB, Write g@8 MiB 1 MiB, …} ──► Device ──► one volume directory
//	               │                                                  │
//	               └── buffers: arena memory, Align-ed ───────────────┘ the device's until Do returns
//
// Four packages implement it: uring (io_uring, O_DIRECT), posixio (preadv and
// pwritev, O_DIRECT), memio (memory, with crash semantics) and faultio (wraps
// another and injects faults). blockiotest.Run is the conformance suite that
// all four pass: every sentence on Device and File below has a case there.
//
// What all backends need is here as well, so that they agree: the checks of
// names, sizes and requests; Gate, which a Close waits at; Counters behind Stats;
// and Budget, the bytes in flight, which follows the device (tuner.go has the rule):
//
//	throughput
//	    │         ╭──────────────────  more in flight only waits inside the device
//	    │       ╱ └ the knee: where the limit settles
//	    │     ╱
//	    └───────────────────────────► bytes in flight
//
// Alignment is by type and by check: offsets, lengths and addresses of a
// Request are multiples of Align, and a Request that is not is refused with
// ErrAlign before anything is submitted.
//
// Lock order: Gate.mu and Budget.mu are leaves; nothing is called under them.
package blockio
