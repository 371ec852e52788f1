// Package storage is the storage node without its network: it joins the prefix
// index (trie), the block store and the arena, and keeps the invariants that need
// all three. It contains neither gRPC nor the transfer engine. It passes verified
// bytes, which stay in the arena, to a deliver function. Bytes to be written are in
// the arena when Commit is called.
//
//	Load     trie.Match ─► Pin slots ─► arena ─► device read ─► verify header and layers ─► deliver(part)
//	                                      ▲                                                    │
//	                                      └──────────────── part.Done() ◄──────────────────────┘
//	Reserve  known? ─► arena ─► Reservation (the writer fills its pieces)
//	Commit   verify layers ─► slots (evict if none is free) ─► device write ─► [sync] ─► trie.Put ─► ack
//
//	drain    slots of a draining volume ─► device read, verified ─► slots elsewhere ─► sync ─► trie.Move, synced ─► free
//	remove   volume ─► closed; if the index is in its directory: trie.Relocate ─► another volume
//
// Order of effects, by invariant:
//
//   - data-before-index: trie.Put comes after the device completed the write,
//     and with durability sync after it was made durable.
//   - pinned-stays: Load pins a slot and compares its generation before it
//     reads, and the block store compares the header's after.
//     Load reads a piece that was moved after the match from the new slot.
//   - prefix-closed: eviction is the trie's, leaf first. The trie forgets a
//     piece before its slot is freed, never the other way round.
//   - A deletion reaches the catalogue on the volumes before it is acknowledged
//     (deletions), so that no rebuild of the index brings a deleted block back.
//   - A change of the live epochs reaches the catalogue before the index. At the next
//     start an epoch is live if it is live in both, so a retired epoch stays retired
//     wherever a crash interrupts the change. A start ends all pins, and the epochs that
//     only a pin kept live.
//   - bounded: the arena bounds bytes in flight, a gate bounds calls, and a call
//     that waits longer than QueueWait is Busy. Each volume has a lane, which
//     bounds the Loads that read from the volume and the memory that its device
//     holds. A read that the device does not complete within ReadWait is a miss,
//     and its Load continues; its memory and its part of the lane's budget are
//     released when the device completes. So a volume that hangs uses up its own
//     lane only. A write that the device does not complete within WriteWait is
//     repeated on another volume from a copy; the first memory belongs to the
//     writers' share until the device completes.
//
// Events of one block come in the order in which the index changed. The index notes its
// changes in that order, and a call that changed it publishes all that are noted before
// it returns (changes).
//
// Locks: Node.nsMu orders namespace changes and is held across the catalogue's
// I/O; no data path takes it. Node.mu guards the table of reservations only. No call
// into trie, blockstore or arena is made under Node.mu.
package storage
