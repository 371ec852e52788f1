// Package memio is a blockio.Device in memory whose power can fail. Tests of
// everything above blockio run on it, thousands of crashes a second.
//
// It is not fast storage for production, and not a simulation of time: every
// operation completes at once.
//
// # Fault model
//
// A cache may lose anything except return wrong bytes; memio does its worst
// inside what blockio.Device leaves open, and nothing beyond:
//
//   - A write that no later Sync of its file covered may survive a crash, vanish,
//     or tear: each 512-byte sector of it on its own. A sector written
//     several times since then holds any one of those writes, not always the last.
//   - A write under way when the power failed may have reached any of its sectors.
//   - A created file may vanish, or be there with a smaller size (also 0), until a
//     Sync of that file; a removed file may come back, with its content, until any
//     Sync.
//   - A Sync that returned nil is believed: what it covered survives every crash.
//   - The lock is released: its owner is dead.
//   - Nothing decays, moves or flips: that is faultio's part.
//
// Each choice is drawn from the seed given to Crash, so a seed replays a crash.
//
//	d := memio.New(memio.Options{})
//	…            write, sync, write
//	e := d.Crash(7)     d is dead; e holds one of the states that d could have left
//
//	          ┌ durable ┐┌── written since the last Sync ──┐
//	page 12:  │ old     ││ a b a…  │ b b b…  │ (current)    │   one sector, one draw
//	          └─────────┘└─────────────────────────────────┘
//
// PowerOffAfter(n) fails the power by itself at the n-th mutation from now, in
// the middle of a batch if that is where it falls: count the mutations of a run
// with Mutations, and run it again for every n.
//
// Pages that hold zeroes take no memory, so a preallocated or zero-filled
// segment costs nothing.
//
// Lock order: Device.mu, medium.mu, inode.mu.
package memio
