// Package memio is a blockio.Device in memory whose power can fail. Tests of the packages above
// blockio run on it, with thousands of crashes per second.
//
// The package is not fast storage for production, and does not simulate time: every operation
// completes at once.
//
// # Fault model
//
// A cache may lose data but must never return wrong bytes. memio produces the worst states that the
// contract of blockio.Device allows, and no other states:
//
//   - A write that no later Sync of its file covered may survive a crash, vanish, or tear: each of
//     its 512-byte sectors is decided separately. A sector written several times since the last
//     Sync holds any one of those writes, not always the last.
//   - A write in progress at the power failure may have changed any of its sectors.
//   - A created file may vanish, or have a smaller size (also 0), until a Sync of that file. A
//     removed file may return, with its content, until any Sync.
//   - After a Sync that returned nil, the data that it covered survives every crash.
//   - The lock is released, because its owner is dead.
//   - No data decays, moves or flips: faultio injects such faults.
//
// Each choice is drawn from the seed that Crash receives, so the same seed repeats a crash.
//
//	d := memio.New(memio.Options{})
//	…            write, sync, write
//	e := d.Crash(7)     d is dead; e holds one of the states that d could have left
//
//	          ┌ durable ┐┌── written since the last Sync ──┐
//	page 12:  │ old     ││ a b a…  │ b b b…  │ (current)    │   one sector, one draw
//	          └─────────┘└─────────────────────────────────┘
//
// After PowerOffAfter(n) the power fails at the mutation that follows n further mutations, possibly
// in the middle of a batch. A test counts the mutations of a run with Mutations, and repeats the
// run for every n.
//
// Pages that hold zeroes take no memory, so a preallocated or zero-filled
// segment costs nothing.
//
// Lock order: Device.mu, medium.mu, inode.mu.
package memio
