// Package blockstore keeps pieces of KV blocks in slots on the volumes of one
// storage node and gives back exactly the bytes that were written, or says that
// it cannot. It is not a cache and not an index: it knows slots, headers,
// checksums, generations, free space and readers, but no prefixes, it never
// chooses a victim, and it finds nothing by name. It reaches storage only
// through blockio.Device and does not know which one.
//
//	             engine ── Reserve ─► Write ─► Commit ─► Read … ─► Free
//	                          │         │        │        │          │
//	slot table (DRAM)      free ─► writing ─► live ◄─── pins      live ─► free, or condemned until
//	                          ▲                                      │     the last reader has left
//	                          └──────────────────────────────────────┘
//	volume 0   superblock  catalogue  segment-00000000 [ header | slot | slot | … ]   one slot size each
//	volume 1   superblock  catalogue  segment-00000000 [ header | slot | slot | … ]
//
// Package ondisk draws the bytes. A Ref (extent and generation) is the only way
// to remember a slot: generations are never given out twice, not even by
// another process after a crash, so a Ref to a reused slot is recognised in the
// table (Pin), in the slot's header (Read), and at the next start (Adopt).
//
// # Life of a store
//
// Open formats empty volumes or checks that the volumes are those of one store,
// takes their owner locks, raises the boot counter and reads the segment
// headers. Every slot is free then. The engine Adopts the slots that its index
// refers to and calls Ready. Without an index it Scans first: headers name the
// blocks.
//
// A store that may be Degraded opens without volumes that are missing: a device
// that fails every request stands for each, and its volume has failed. Half of the
// volumes must be there. If those that are there might not have the newest
// superblock, the boot counter jumps.
//
// # Placement
//
// Each volume has one allocator, its space. To cut a segment is to write a header that
// divides the segment into slots of one size. One mutex guards the segments, their
// slots, and the free runs (internal/runs) by slot size:
//
//	           created and zeroed by the keeper
//	preparing ─────────────────► blank ◄───────── bad    a probe of the volume succeeded
//	    │                          │               ▲
//	    └────────────┬─────────────┘               │ header not written
//	no segment ──────┤ claimed for a slot size     │
//	                 ▼                             │
//	no segment ◄── changing ───────────────────────┘
//	   file removed  │   ▲
//	  header durable ▼   │ empty, and wanted for another slot size or surplus
//	                cut ─┘
//
//	cut segments of  8 KiB   open  ▼ by longest free run │ being emptied ▼ │ empty
//	cut segments of 64 KiB   open  ▼ by longest free run │ being emptied ▼ │ empty
//
// The columns are heaps, so a search for a run of free slots reads one segment only. I/O
// happens only while a segment is preparing or changing, and without the mutex: one
// goroutine owns the segment then. For each slot size at most one cut runs at a time.
// Writers that need a segment of that size wait for the cut, until their context ends or
// the volume fails; other calls do not wait.
//
// Reserve puts the n slots of one sequence next to each other where it can:
// right after the slot the caller names, else into the longest free run of the
// segments of that slot size, else into a fresh segment. With several volumes a
// sequence changes the volume every StripeBytes, so that one long read uses all
// of them. A segment is cut to one slot size; when all its slots are free it may
// be cut to another, with the new header synced before a slot of it is used. A
// segment whose header could not be written may be cut again after the volume has
// recovered, but only when there is no other.
//
// # What is promised
//
//   - exact-or-miss: Read returns bytes whose header names the wanted block and
//     whose every layer has the checksum that the writer gave, or ErrStale
//     (reused) or ErrCorrupt (drop the block). Both are misses.
//   - data-before-index: Commit is refused for a slot whose write has not
//     completed.
//   - pinned-stays: a slot with a reader is not reused; a read checks the
//     generation again after the device is done.
//   - bounded: all files together stay within CapacityBytes. Full is ErrFull
//     (evict), a file system below the floor is ErrFloor (refuse writes).
//   - one-owner: Check compares the slot table with the index.
//
// Durability is the caller's choice of when to Sync. After a failed sync the system
// may have dropped what it could not write: the slots that were written and not
// committed are unwritten again, and their Commit is refused.
//
// # Health
//
// Package health decides the state of each volume from its I/O. watchedDevice reports
// every request to package health. Stats and OnVolumeChange return the state. A failed
// volume gets no new blocks, no syncs and no newer catalogue. Requests without a
// caller's buffer return ErrVolumeFailed as soon as their volume fails, even if the
// device has not completed them.
//
// A change of superblocks or catalogue is acknowledged when half of the volumes
// hold it (metaQuorum), so one of two is enough. A volume that misses an
// acknowledged change fails. A probe of the failed volume writes superblock and newest
// catalogue and reads the catalogue back; after that the volume is no longer failed. The
// probe holds the meta token, so that no change happens meanwhile.
//
// # Draining and removing a volume
//
//	ok ◄── UndrainVolume / DrainVolume ──► draining ── RemoveVolume ──► removed
//
// The membership is the set of draining and of removed volumes, as ordered by the
// operator. Every superblock holds it, with a version. A change is acknowledged like a
// change of the catalogue. A draining volume takes no new blocks; it is synced and read
// as before. The engine finds its slots with LiveFrom, copies the blocks, and frees the
// slots. A removed volume is not used, and Open does not need it. The next new volume
// gets its index.
//
// Open takes the newest catalogue of all volumes by its sequence. It is certain to
// be the newest acknowledged one if more volumes are read than a quorum leaves out
// (CatalogueCertain). Otherwise only an index that knows the epochs by itself may
// be served: one rebuilt from an uncertain catalogue could match blocks of an epoch
// that was bumped.
//
// # Lock order
//
// Two tokens (channels of capacity 1) serialise slow work and are taken before every
// lock: Store.meta (superblocks and catalogue of all volumes), then volume.meta (those
// of one volume). No lock is taken under another lock: space.mu, to which segment.mu
// points, Store.mu, generations.mu, syncer.mu, watchedDevice.mu. No I/O happens under a
// lock.
package blockstore
