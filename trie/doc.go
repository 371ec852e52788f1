// Package trie is the prefix index of a storage node. It finds the longest stored prefix of a chain
// of block ids, the slots of its pieces and the reason why the match ended, and it chooses the
// pieces to evict.
//
// It is not a store: it never touches a block device, holds no bytes of any block, and does not
// free slots. It returns Refs, and the owner of the slots (blockstore, through server/storage)
// frees them. It has no goroutine and no clock: time is an argument, and background work is a step
// that the caller runs. There are two exceptions: Pebble's compactions, and the repair of the index
// after its drive failed.
//
//	               ids of a prompt ─► Match ─► pieces + lease + cut
//	                                   │ read lock only
//	┌──────────────────────────────────▼───────────────────────────────┐
//	│ DRAM: complete                                                   │
//	│   table   (space, group, id) ─► node number   extendible hashing │
//	│   nodes   48 B each, in chunks, no pointers                      │
//	│             n     n+1    n+2    n+3     n+4                      │
//	│           ┌─────┬──────┬──────┬──────┬───────┐                   │
//	│     root ◄┤ id0 ◄ id1  ◄ id2  │ id2' ├─► id1 │  parent numbers   │
//	│           └─────┴──────┴──────┴──────┴───────┘                   │
//	│   policy  order of eviction over node numbers (package evict)    │
//	│   leaves  what a space alone would give up next, in a list       │
//	│   leases  slot ─► pinned node numbers, or a pinned epoch         │
//	└──────────────────────────────────┬───────────────────────────────┘
//	                                   │ one batch per Put, Evict, bump
//	┌──────────────────────────────────▼───────────────────────────────┐
//	│ Pebble: durable truth                                            │
//	│   'b' extent ─► namespace, epoch, id, parent, group, generation  │
//	│   'n' namespace id ─► definition with live epochs                │
//	│   'm' name ─► format version, highest namespace id               │
//	└──────────────────────────────────────────────────────────────────┘
//
// A match walks the chain from its first block, or with MatchOptions.Suffix from any block whose
// ancestors are stored. A sequence is put in order, so the child of node n is nearly always node
// n+1. The walk tries that node first, which reads memory sequentially, and looks in the table only
// if the node is another one.
//
// The key of a block's record is its Extent, so a slot has one owner (invariant one-owner), and a
// sequence in consecutive slots is inserted in key order.
//
// # Pieces, spaces, reachability
//
// A space is one (namespace, epoch). The index holds pieces: a piece is one layer group of one
// block. The pieces of the full group form the tree. A piece of a window or state group is a child
// of the full piece of its block. Where the geometry has no full group, and in a flat namespace,
// every piece is a root.
//
// Pieces on a missing volume (Options.Absent), and their descendants, are not loaded. Their records
// stay in Pebble for the next Open with that volume.
//
// Deleting a block dooms it: the block is unlinked at once, so no descendant can be matched
// (invariant prefix-closed), and ReclaimStep collects its descendants, leaf first. Open drops the
// descendants that were not collected before a restart. There is one exception: if the deleted
// block was put again before the restart, its old descendants are matchable again until Redo dooms
// them, with the deletions that the owner of the slots recorded.
//
// OnChange reports each block that is added or removed, and each space that ends, in the order in
// which DRAM changed. Consumers that mirror the index rely on that order: a block may be put again
// while its old piece still waits for ReclaimStep.
//
// Move assigns a piece another slot, to which the owner has copied the bytes. The node keeps its
// number, its leases, its children and its place in the order of eviction. One batch deletes the
// record under the key of the old slot and adds it under the new key.
//
//	slots   … │ a │ b │ c │ …            … │ b' │ …
//	records     b: parent in the slot before    b': parent a, by its id
//	            c: parent in the slot before    c:  parent b, by its id
//
// Relocate moves the index to another directory. It writes the new Pebble database from
// DRAM, so the old drive need not work.
//
// A lease pins the deepest piece of a prefix; its ancestors are safe because eviction, reclaiming
// and deletion go leaf first (invariant pinned-stays). Leases exist in DRAM only: a restart ends
// all leases, also those without an expiry.
//
// # Live epochs
//
// A namespace has a space for each live epoch (kv.Namespace.Live). A node belongs to one space, and
// the space is part of its key in the table, so a walk never crosses epochs, and a parent and its
// children have one epoch.
//
//	namespace glm   live  ┌ 8 ┐ ┌ 7 ┐ ┌ 4, pinned ┐    retired  ┌ 6 ┐  ┌ 5 ┐
//	                      │ ▲ │ │ ▲ │ │     ▲     │             │   │  │   │
//	                      └─┼─┘ └─┼─┘ └─────┼─────┘             └─┬─┘  └─┬─┘
//	Match{Epoch 8, Oldest 7}┴─────┘         │                     ▼      ▼
//	Match{Epoch 4} ─────────────────────────┘                    ReclaimStep
//	Evict  5, 6, then 4, then 7, then 8 and the newest epochs of the others by policy
//
// A bump and a retirement are one synced write of the definition and a change of the list of live
// spaces, whatever the number of nodes: PlanBump and PlanRetire return the new definition, and
// SetEpochs applies it. A space that is no longer live is dead: its nodes cannot be matched,
// ReclaimStep returns them, and eviction takes them first. A node of a dead space that a lease
// holds stays until the lease ends, so reads in progress are not disturbed. A Put that was staged
// before its epoch was retired returns StaleEpoch.
//
// A match of a range descends into each live epoch of the range, the newest first, and returns the
// longest match; among matches of equal length, the one of the newest epoch. A match never mixes
// blocks of two epochs, unless the caller sets MatchOptions.Mix. It stops at the first complete
// match; k epochs cost at most k+1 descents. With Mix each block is of the newest epoch of the
// range that has all the pieces of the block that the match needs, and the match names the epoch of
// each block. A lease on the match pins nodes of each epoch in it.
//
// A lease of PinEpoch is counted in its space. A pinned epoch survives bumps that do not keep it,
// up to kv.MaxLive epochs in all; Unsettled names the epochs whose pins have ended. Pins hold no
// pieces. Pins end with the process, so Open and Restore retire the epochs that needed a pin.
//
// The quota of a namespace covers all of its epochs. Eviction for the quota takes from the oldest
// live epoch first. Eviction for the whole index takes first from all epochs that are not the
// newest of their namespace, over all namespaces in the order in which the epochs began, and then
// from the newest epochs.
//
// # Losses in a crash
//
// A Put that was not durable, and any eviction, may be undone by a crash. Open drops the records of
// blocks that lost an ancestor. The record of an evicted piece may return although its slot was
// reused. The record then has an old generation, which the store recognises as stale: the read is a
// miss and never returns wrong bytes.
//
// # Lock order
//
//	Trie.relocating  →  Trie.defMu  →  Trie.records  →  Trie.mu  →  leases.mu
//
// Match, Known, Stat, List, Stats take Trie.mu for reading; updates of the policy and of pins are
// atomic and need no other lock. Put, Evict, Delete, ReclaimStep take Trie.mu for writing in short
// steps. No Pebble call is made under Trie.mu. Calls that change the records of nodes in the index
// hold Trie.records for reading until the records are written. Move, which changes the keys of
// records, holds Trie.records for writing, and so does each step of Relocate. Namespace definitions
// have their own mutex, Trie.defMu, which is taken before Trie.records and is held across the one
// synced write of a create, bump or delete. Relocate holds both while it replaces the index. Calls
// of Relocate and Close exclude each other by Trie.relocating, which is taken before all others.
//
// # Example
//
//	t, err := trie.Open(trie.Options{Dir: "/var/lib/penstock/index"})
//	ns, err := t.Create(kv.Namespace{Name: "glm", Index: kv.IndexTrie, Geometry: g})
//	status, err := t.Put(ns.ID, ns.Epoch, []trie.Entry{{ID: a, Ref: ra}, {ID: b, Parent: a, Ref: rb}}, true)
//	m, err := t.Match(ns.ID, []kv.BlockID{a, b, c}, trie.MatchOptions{Epoch: ns.Epoch, Lease: true, TTL: time.Minute, Now: now})
//	// m.Blocks == 2, m.Cut == trie.CutAbsent, m.Pieces names ra and rb
//	t.Release(m.Lease, now)
package trie
