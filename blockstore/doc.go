// Package blockstore stores pieces of KV blocks in slots on the volumes of one storage node. A read
// returns exactly the bytes that were written, or an error. The package is neither a cache nor an
// index: it manages slots, headers, checksums, generations, free space and readers, but it has no
// prefixes, chooses no piece to evict, and finds no block by its id. It reaches storage only
// through blockio.Device, with any implementation.
//
//	             engine ── Reserve ─► Write ─► Commit ─► Read … ─► Free
//	                          │         │        │        │          │
//	slot table (DRAM)      free ─► writing ─► live ◄─── pins      live ─► free, or condemned until
//	                          ▲                                      │     the last reader has left
//	                          └──────────────────────────────────────┘
//	volume 0   superblock  catalogue  segment-00000000 [ header | slot | slot | … ]   one slot size each
//	volume 1   superblock  catalogue  segment-00000000 [ header | slot | slot | … ]
//
// Package ondisk defines the bytes. A Ref (extent and generation) is the only reference to a slot.
// A generation is never assigned twice, not even by another process after a crash. So a Ref to a
// slot that was reused is detected in the slot table (Pin), in the slot's header (Read), and at the
// next start (Adopt).
//
// # Lifecycle of a store
//
// Open formats empty volumes, or checks that the volumes belong to one store. It takes their owner
// locks, raises the boot counter and reads the segment headers. At that point every slot is free.
// The engine Adopts the slots that its index refers to and calls Ready. An engine without an index
// first calls Scan, which reads the blocks' ids from the slot headers.
//
// A store with Options.Degraded opens without missing volumes, and without volumes that fail during
// Open. Each missing volume gets a device that fails every request, and has the state failed. Half of the volumes must be present. If it is
// possible that no present volume has the newest superblock, the boot counter is raised by
// bootMargin.
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
//	    └────────────┬─────────────┘               │ header not written, or not readable at the start
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
// The columns are heaps, so a search for a run of free slots examines one segment only. I/O for a
// segment happens only while it is preparing or changing. One goroutine owns the segment at that
// time and does the I/O without the mutex. For each slot size at most one cut is in progress.
// Writers that need a segment of that size wait for the cut, until their context ends or the volume
// fails; other calls do not wait.
//
// Reserve places the n slots of one sequence next to each other if possible: right after the slot
// that the caller names, otherwise in the longest free run among the segments of that slot size,
// otherwise in a new segment. With several volumes, a sequence moves on to the next volume every
// StripeBytes, so that one long read uses all volumes. A segment has slots of one size. When all
// its slots are free, it may be cut to another size; the new header is synced before a slot is
// used. A segment whose header could not be written, or not be read by Open, may be cut again after
// the volume has recovered, but only if there is no other segment.
//
// # Guarantees
//
//   - exact-or-miss: Read returns the bytes only if the header names the requested block and every
//     layer has the writer's checksum. Otherwise it returns ErrStale (the slot was reused) or
//     ErrCorrupt (drop the block). Both are misses.
//   - data-before-index: Commit refuses a slot whose write has not completed.
//   - pinned-stays: a slot with a reader is not reused; a read checks the
//     generation again after the device is done.
//   - bounded: all files together stay within CapacityBytes. A full store returns ErrFull (evict);
//     below the free-space floor of the file system it returns ErrFloor (refuse writes).
//   - one-owner: Check compares the slot table with the index.
//
// The caller chooses when to Sync, and so the durability. After a failed sync the system may have
// dropped data that it could not write. Slots that were written and not committed then count as
// unwritten, and their Commit is refused.
//
// # Health
//
// Package health decides the state of each volume from the outcomes of its I/O, which watchedDevice
// reports. Stats and OnVolumeChange return the state. A failed volume gets no new blocks, no syncs
// and no newer catalogue. A request that uses no buffer of a caller returns ErrVolumeFailed as soon
// as the volume fails, even if the device has not completed the request.
//
// A change of the superblocks or of the catalogue is acknowledged when half of the volumes, rounded
// up, store it (metaQuorum); of two volumes, one is enough. A volume that does not store an
// acknowledged change fails. A probe of the failed volume writes the superblock and the newest
// catalogue and reads the catalogue back. If that succeeds, the volume is no longer failed. The
// probe holds the meta token, so that no change happens meanwhile.
//
// # Draining and removing a volume
//
//	ok ◄── UndrainVolume / DrainVolume ──► draining ── RemoveVolume ──► removed
//
// The membership is the set of draining volumes and the set of removed volumes, as the operator
// ordered them. Every superblock stores both sets with a version. A change of the membership is
// acknowledged like a change of the catalogue. A draining volume takes no new blocks, and is synced
// and read as before. The engine lists the slots of the volume with LiveFrom, copies the blocks to
// other volumes, and frees the slots. A removed volume is not used, and Open does not need it. The
// next new volume gets the index of the removed one.
//
// Open takes the catalogue with the highest sequence of all volumes. That catalogue is certainly
// the newest acknowledged one if the volumes that were not read are fewer than a quorum
// (CatalogueCertain). Otherwise a node may serve only an index that was not lost: an index rebuilt
// from an uncertain catalogue could match blocks of an epoch that was bumped.
//
// # Encryption
//
// With Options.Keys the payload and its checksums are encrypted with AES-256-GCM (packages crypt and
// ondisk). The encryption is in this package and not in a device, because a read of some layers must
// authenticate these layers alone: each layer has a tag, in the slot's header. The unkeyed checksums of
// the layers stay, encrypted, so that the writer's checksum is verified from end to end. AES-XTS with
// the checksum inside would need no tags, but is an eleventh as fast in Go, and does not authenticate.
//
// The generation is no nonce by itself. Reserve assigns no generation twice on the same volumes, not
// even after a crash, and TestNoncesAcrossCrashes tests that. But a slot whose write failed can be
// written again with other bytes, an image of a disk can be restored, and two stores can have one
// key. So each write has a random salt.
//
// The key of a slot follows from its generation: a new key begins with a new boot counter, and each
// superblock has the list of its volume (KeyPeriod). The slot table thus has the number of blocks of each
// key (KeyUse), without a read of a slot. The engine can move the blocks in slots of older keys (Outdated) to new
// slots, so that no block needs these keys. The header of a slot must name that key: a plain slot in place
// of an encrypted one is a miss. Write encrypts into a buffer of the volume's sealPool, because the
// caller's buffer may have readers; Read decrypts in place.
//
// The slots of a volume may stay plain in a store with keys (Options.Plain). Such a volume has no
// KeyPeriod, and its superblock has a flag, so that a process that adopts the store does not encrypt it.
//
// # Secrets of epochs
//
// With Options.EpochKeys the key of a new slot follows from the newest key and from a secret of the
// slot's epoch. When the epoch ends, the secret is erased, and no key decrypts its slots any more, on the
// volumes or in a copy of them. The catalogue has the secrets, in front of the engine's blob and encrypted
// with it. A KeyPeriod states whether its slots need secrets, so the choice can change at a start, and
// Outdated includes the slots without.
//
//	SetCatalogue(blob, live)   a secret for each live epoch that has none; removes none
//	                           the engine ends epochs in its index
//	EraseEpochs(live)          area A and area B of each volume without the other secrets; then which
//	                           volumes are left
//
// These hold:
//
//   - A secret is durable before the first slot that needs it is written. The volume of that slot has the
//     secret in its own catalogue: a volume that did not store an acknowledged catalogue has failed, and
//     takes no slot until a probe has written the newest one.
//   - Open merges the secrets of all volumes. So if two volumes were never present together when an epoch
//     began, and each has another secret of it, the slots of both can be read.
//   - Open keeps the secrets of ended epochs that it finds, also in the catalogue of a volume that was missing.
//     The engine's first EraseEpochs writes both areas of each volume, unless the store has no secrets.
//   - The catalogue names the volumes that may still have erased secrets (Erasures), and since when, until both of
//     their areas were written and the catalogues of earlier owners were removed. A probe does both.
//
// # Shared volumes
//
// A shared volume is on a file system that several hosts mount. Options.Owner, and not the device's
// lock, decides which process owns it. The owner stops writing before its lease ends (Owner.Held),
// but a write that it has begun, or a process that was stopped between the check and the write, can
// reach the volume after another process has become the owner. Such a late write is a miss:
//
//		etcd           owner 1 ──────────────────┤ lease ended      owner 2 ─────────────────────────►
//		superblock-1   boot 1                                       superblock-2   boot 2
//		catalogue-1    ◄─ late catalogue of 1: not read             catalogue-2
//		slot           generation 1.7 ◄──────── late write of 1 ──► generation 2.4 was expected: ErrStale
//
//	  - The boot counter is the owner's fencing number (Owner.Fence), which rises with each owner. It is
//	    the upper part of each generation, so it is in the header of each slot and segment. The number
//	    does not depend on the superblock, which an earlier owner could overwrite.
//	  - A late write of a whole slot leaves a header with a generation of the earlier owner. The index
//	    of the new owner has another generation, or no entry, for the slot. A late write of a part of a
//	    slot leaves layers without their checksums. Both are misses.
//	  - Each owner has files of its own for superblock and catalogue, so a late write of either goes to a
//	    file that is not read. The new owner removes the older files.
//	  - A late segment header, file creation or removal takes effect at the next start at most: the blocks of
//	    that segment are then misses. The owner does not use the number of a file that was created late.
//	  - The index is not on the volume's device. Package main copies it, so that each owner writes to a copy of its own.
//
// A store may have local volumes beside the shared ones (Options.Local). They keep their file lock, one
// superblock and one catalogue, and their boot counter is the fencing number too. They have no vote in
// metaQuorum, so the shared volumes alone have the newest catalogue. A process that adopts the store
// has only the shared volumes (Options.SharedOnly): the local ones are missing, as in a degraded store.
//
// A rebuild of the index from the slot headers cannot distinguish a late write of a whole slot from
// an earlier write. It accepts the block if the catalogue allows its namespace, epoch and generation;
// the bytes are then exactly those of the block's writer, as after a crash.
//
// # Lock order
//
// Two tokens (channels of capacity 1) serialise slow work and are taken before every mutex:
// Store.meta (superblocks and catalogue of all volumes), then volume.meta (superblock and catalogue
// of one volume). No goroutine holds two of these mutexes at once: space.mu (segment.mu points to
// it), Store.mu, generations.mu, syncer.mu, watchedDevice.mu. No I/O happens under a mutex.
package blockstore
