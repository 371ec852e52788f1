// Package storage is the storage node without its network: it joins the prefix
// index (trie), the block store and the arena, and keeps the promises that need
// all three. It knows neither gRPC nor the transfer engine: bytes that were read
// are handed, verified and still in the arena, to a deliver function, and bytes
// to be written are found in the arena, wherever they came from.
//
//	Load     trie.Match ─► Pin slots ─► arena ─► device read ─► verify header and layers ─► deliver(part)
//	                                      ▲                                                    │
//	                                      └──────────────── part.Done() ◄──────────────────────┘
//	Reserve  known? ─► arena ─► Reservation (the writer fills its pieces)
//	Commit   verify layers ─► slots (evict if none is free) ─► device write ─► [sync] ─► trie.Put ─► ack
//
//	drain    slots of a draining volume ─► device read, verified ─► slots elsewhere ─► sync ─► trie.Move, synced ─► free
//
// Order of effects, by invariant:
//
//   - data-before-index: trie.Put comes after the device completed the write,
//     and with durability sync after it was made durable.
//   - pinned-stays: Load pins a slot and compares its generation before it
//     reads, and the block store compares the header's after.
//     A piece that was moved since it was matched is read from its new slot.
//   - prefix-closed: eviction is the trie's, leaf first. The trie forgets a
//     piece before its slot is freed, never the other way round.
//   - A deletion reaches the catalogue on the volumes before it is acknowledged
//     (deletions), so that no rebuild of the index brings a deleted block back.
//   - bounded: the arena bounds bytes in flight, a gate bounds calls, and what
//     waits longer than QueueWait is Busy. Each volume has a lane, which bounds
//     the Loads that read from it and the memory that its device holds. A read
//     that the device has not completed within ReadWait is a miss and its Load
//     goes on; the memory stays the device's, and the lane's budget with it,
//     until the device completes. So a volume that hangs fills its own lane and
//     no other. A write that is not completed within WriteWait is repeated on
//     another volume from a copy; its memory counts as the writers' until the
//     device completes.
//
// Locks: Node.nsMu orders namespace changes and is held across the catalogue's
// I/O, which no data path touches. Node.mu guards the table of reservations and nothing else. It is taken
// alone: no call into trie, blockstore or arena is made under it.
package storage
