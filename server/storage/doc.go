// Package storage is the storage node without its network. It joins the prefix index (trie), the
// block store and the arena, and keeps the invariants that need all three. It contains neither gRPC
// nor the transfer engine. For a read it passes verified bytes in the arena to a deliver function.
// For a write the bytes are in the arena when Commit is called.
//
//	Load     trie.Match ─► Pin slots ─► arena ─► device read ─► verify header and layers ─► deliver(part)
//	                                      ▲                                                    │
//	                                      └──────────────── part.Done() ◄──────────────────────┘
//	Reserve  index has it? ─► arena ─► Reservation (the writer fills its pieces)
//	Commit   verify layers ─► slots (evict if none is free) ─► device write ─► [sync] ─► trie.Put ─► ack
//
//	drain    slots of a draining volume ─► device read, verified ─► slots elsewhere ─► sync ─► trie.Move, synced ─► free
//	remove   volume ─► closed; if the index is in its directory: trie.Relocate ─► another volume
//
// Order of effects, by invariant:
//
//   - data-before-index: trie.Put follows the completion of the device write, and
//     with durability sync the sync of the device.
//   - pinned-stays: Load pins a slot and compares the slot's generation before the
//     read. The block store compares the header's generation after the read. Load
//     reads a piece that was moved after the match from the new slot.
//   - prefix-closed: the trie chooses the victims of eviction, leaf first. The trie
//     removes a piece before the slot of the piece is freed.
//   - A deletion is in the catalogue on the volumes before it is acknowledged
//     (deletions), so that a rebuild of the index does not restore a deleted block.
//   - A change of the live epochs reaches the catalogue before the index. At the next
//     start an epoch is live if it is live in both, so a retired epoch stays retired
//     wherever a crash interrupts the change. A start ends all pins, and the epochs that
//     only a pin kept live.
//   - bounded: the arena limits the bytes in flight, a gate limits the calls, and a
//     call that waits longer than QueueWait is Busy. Each volume has a lane. A lane
//     limits the Loads that read from the volume, and the memory that the volume's
//     device may hold. Gate, lane and arena divide reads among the principals by their
//     weights (fair.Queue), and the arena divides writes. Gate, arena and the places of
//     the lane are divided among the tenants. If the device does not complete a read
//     within ReadWait, the read is a miss and the Load continues. The memory of the
//     read stays part of the lane until the device completes, so a volume that hangs exhausts only its own
//     lane. If the device does not complete a write within WriteWait, the write is
//     repeated on another volume from a copy. The memory of the first write stays in
//     the writers' share of the arena until the device completes.
//
// Quotas: the index refuses a piece above the quota of its namespace or of its tenant, the namespaces
// whose names begin with a prefix (SetTenantQuotas). Before a Reserve grants pieces, and before a Commit
// gives up pieces for which other writers have used up the room meanwhile, it evicts from the namespace
// or from the tenant (roomMaker.inQuota). A quota of a tenant is for this node, as that of a namespace is.
//
// Events of one block come in the order in which the index changed. The index notes its
// changes in that order, and a call that changed the index publishes all noted changes
// before it returns (changes).
//
// Locks: the token Node.nsTurn orders namespace changes and is held across the catalogue's
// I/O; no data path takes it, and a caller stops waiting for it when its context ends. Node.mu guards only the table of reservations. No call
// into trie, blockstore or arena is made under Node.mu. hotPrefixes.mu and prefixHits.mu are leaves.
package storage
