// Package faultio wraps a blockio.Device and injects faults into it, according to rules in a small
// language. It counts the faults, so that a test can assert that each fault surfaced as an error or
// was repaired. Without rules it changes nothing.
//
// The package does not model crashes; memio does. It changes the timing of calls only by Delay
// and Stall.
//
//	rules, err := faultio.Parse(`
//		(Err EIO (And Reads (File "seg-*") (Offset 0 1048576) (After 3) (Count 2)))
//		(Flip (And Writes (Prob 0.01 7)))
//	`)
//	dev := faultio.Wrap(inner, rules)
//	…                                     // work, passing each error to dev.Counter().Surfaced
//	if left := dev.Counter().Pending(); len(left) > 0 { t.Errorf("unnoticed: %v", left) }
//
// # Actions
//
//	(Err ERRNO p)     the call fails with ERRNO (EIO, EROFS, …); nothing is transferred
//	(ENOSPC p)        the same as (Err ENOSPC p): the error is also blockio.ErrNoSpace
//	(Short p)         the first half is transferred, then io.ErrUnexpectedEOF
//	(Torn p)          success is reported, but some 512-byte sectors of a write keep
//	                  their old content, or some of a read are returned as zeroes
//	(Flip p)          success is reported, but one bit of the data is wrong: on the
//	(Flip BIT p)      disk for a write, in the buffer for a read; which one is
//	                  drawn, or BIT counted from the first of the request
//	(Delay 5ms p)     the call waits first; then the later rules are tried
//	(Stall p)         the call waits until SetRules replaces the rules; then the later of
//	                  the old rules are tried
//
// Err, ENOSPC, Delay and Stall apply to every call, and the other actions only to transfers. The
// rules are tried in order, and only the first rule that applies has an effect. If that rule is a
// Delay or a Stall, the later rules are tried too.
//
// # Predicates
//
//	Reads Writes Syncs Creates Opens Removes    the kind of call
//	Any                      every call; the same as leaving p out
//	(File "seg-*")           the file's name, as path.Match does; any of a Sync's files
//	(Offset FROM TO)         a transfer that touches bytes FROM to TO-1
//	(After N)                false for the first N calls that it tests, then true
//	(Count N)                true for the first N calls that it tests, then false
//	(Prob P SEED)            true with probability P; the same SEED, the same draws
//	(And p …) (Or p …)       left to right, until the result is certain
//	(Not p)
//
// So (And Reads (After 3) (Count 2)) selects the fourth and the fifth read.
//
// # Below the device
//
// A Device resumes short transfers itself, so a Short above a device is an error that the caller
// must see. To test the resumption, Hook makes a blockio.ResultHook from Err, Short and Delay
// rules, which posixio and uring accept in their options. Below the device, the device must repair
// a Short and retry after an Err EINTR.
//
//	            faultio.Wrap            faultio.Hook
//	blockstore ──── ▼ ──── posixio, uring ──── ▼ ──── kernel
//
// Lock order: program.mu (the state of the rules), then Counter.mu.
package faultio
