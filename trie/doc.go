// Package trie is the prefix index of a storage node. For a chain of block ids it finds the longest
// stored prefix, the slots of the prefix's pieces and the reason why the match ended. It also
// chooses the pieces to evict.
//
// The index is not a store: it never touches a block device, holds no bytes of any block, and does
// not free slots. It returns Refs, and the owner of the slots (blockstore, through server/storage)
// frees them. The package starts no goroutine and reads no clock: time is an argument, and the
// caller runs background work in steps. There are two exceptions: Pebble's compactions, and the
// repair of the index after its drive failed.
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
//	│   leaves  order of eviction within one space, a linked list      │
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
// A match walks the chain from its first block or, with MatchOptions.Suffix, from any block whose
// ancestors are stored. The blocks of a sequence are put in order, so the child of node n is nearly
// always node n+1. The walk tries that node first, which reads memory sequentially, and searches
// the table only if the child has another number.
//
// The key of a block's record is its Extent. So each slot has at most one owner (invariant
// one-owner), and a sequence in consecutive slots is inserted in key order.
//
// # Pieces, spaces, reachability
//
// A space is one (namespace, epoch). The index holds pieces: a piece is one layer group of one
// block. The pieces of the full group form the tree. A piece of a window or state group is a child
// of the full piece of its block. If the geometry has no full group, or the namespace is flat,
// every piece is a root.
//
// Pieces on a missing volume (Options.Absent), and their descendants, are not loaded. Their records
// stay in Pebble for the next Open with that volume.
//
// Deleting a block dooms its node: the node is removed from the table at once, so neither the node
// nor a descendant can be matched (invariant prefix-closed). ReclaimStep later removes the node and
// its descendants, leaf first. After a restart, Open drops the descendants that are left. There is
// one exception: if the deleted block was put again before the restart, its old descendants become
// matchable again. The owner of the slots records each deletion and passes the records to Redo,
// which dooms these descendants.
//
// OnChange reports each block that is added or removed, and each space that ends, in the order of
// the changes in DRAM. Consumers that mirror the index rely on that order, because a block may be
// put again while its old piece still waits for ReclaimStep.
//
// Move assigns a new slot to a piece, after the owner of the slots has copied the bytes there. The
// node keeps its number, its leases, its children and its position in the order of eviction. One
// batch deletes the record under the key of the old slot and adds it under the new key.
//
//	slots   … │ a │ b │ c │ …            … │ b' │ …
//	records     b: parent in the slot before    b': parent a, by its id
//	            c: parent in the slot before    c:  parent b, by its id
//
// Relocate moves the index to another directory. It writes the new Pebble database from DRAM, so it
// does not need the old drive.
//
// A lease pins the deepest piece of a prefix. The ancestors of that piece stay too, because
// eviction, reclaiming and deletion go leaf first (invariant pinned-stays). Leases exist in DRAM
// only: a restart ends all leases, also leases without an expiry.
//
// # Live epochs
//
// A namespace has one space for each live epoch (kv.Namespace.Live). The space of a node is part of
// its key in the table. So a parent and its children have one epoch, and a walk never crosses
// epochs.
//
//	namespace glm   live  ┌ 8 ┐ ┌ 7 ┐ ┌ 4, pinned ┐    retired  ┌ 6 ┐  ┌ 5 ┐
//	                      │ ▲ │ │ ▲ │ │     ▲     │             │   │  │   │
//	                      └─┼─┘ └─┼─┘ └─────┼─────┘             └─┬─┘  └─┬─┘
//	Match{Epoch 8, Oldest 7}┴─────┘         │                     ▼      ▼
//	Match{Epoch 4} ─────────────────────────┘                    ReclaimStep
//	Evict  5, 6, then 4, then 7, then 8 and the newest epochs of other namespaces by policy
//
// A bump or a retirement is one synced write of the definition and one change of the list of live
// spaces, whatever the number of nodes. PlanBump and PlanRetire return the new definition, and
// SetEpochs applies it. A space that is no longer live is dead: its nodes cannot be matched,
// ReclaimStep removes them, and eviction takes them first. A node of a dead space stays while a
// lease holds it, so reads in progress are not disturbed. A Put that was staged before its epoch
// was retired returns StaleEpoch.
//
// A match of a range walks the chain in each live epoch of the range, the newest first, and returns
// the longest match; if several have that length, the match of the newest epoch among them. It
// stops at the first complete match; k epochs cost at most k+1 walks. A match has blocks of one
// epoch only, unless the caller sets MatchOptions.Mix. With Mix each block is taken from the newest
// epoch of the range that has all pieces of the block that the match needs. The result names the
// epoch of each block. A lease on such a match pins nodes of each of these epochs.
//
// A lease of PinEpoch keeps an epoch live across bumps that would retire it, up to kv.MaxLive live
// epochs in all. Unsettled finds the epochs whose pins have ended. Pins of epochs protect no pieces
// from eviction. They end with the process, so Open and Restore retire the epochs that were live
// because of a pin.
//
// The quota of a namespace covers all of its epochs. Eviction for the quota takes from the oldest
// live epoch first. Eviction for the whole index takes first from the epochs that are not the
// newest of their namespace: from those of all namespaces, in the order in which they began. Then
// it takes from the newest epochs.
//
// # Tenants
//
// A tenant is the set of namespaces whose names begin with a prefix (SetTenantQuotas). Its quota holds
// for all of them together, beside the quotas of the namespaces: Put refuses a piece that one of the
// two does not admit. Prefixes do not overlap, so a namespace has at most one tenant.
//
//	quotas  a/: 100   b/: 50
//	          │         └──────────────┐
//	   ┌──────┴──────┐                 ▼
//	 a/x, quota 10  a/y, no quota     b/z      c, no tenant
//
// A namespace points to its tenant, and each change of its bytes changes those of the tenant. So the
// check of a quota takes constant time. A new namespace finds its tenant by a binary search for its
// name. A deleted namespace counts until ReclaimStep has removed its pieces. Quotas of tenants are not
// stored; SetTenantQuotas sums up the bytes of the namespaces, and examines no node.
//
// EvictTenant evicts unmatchable pieces, then from namespaces over their own quota, then from epochs
// that are not the newest of their namespace, then from the newest epochs. There is no order by age
// over the namespaces of a tenant: the policy's order is over the nodes of all tenants, and a list of
// leaves is over those of one space. So EvictTenant takes the oldest leaves of a space, and chooses the
// space in proportion to the bytes (lottery). A namespace that is read keeps its touched leaves by their
// second chance, and the blocks of a namespace that is not used any more are evicted gradually. A
// victim costs a walk over the tenant's namespaces for every 16 leaves, and none over blocks.
//
// A tenant counts the pieces that EvictTenant evicts from it, and the pieces that Evict evicts from it while
// the tenant is over its quota. CountRefused counts the pieces that writers could not store because of the
// quota. The caller of Put calls CountRefused, because the caller may evict pieces and call Put again.
//
// # Losses in a crash
//
// A crash may undo a Put that was not durable, and any eviction. Open drops the records of blocks
// that lost an ancestor. The record of an evicted piece may return although its slot was reused.
// That record has an old generation, which the store recognises as stale: the read is a miss and
// never returns wrong bytes.
//
// # Lock order
//
//	Trie.relocating  →  Trie.defMu  →  Trie.records  →  Trie.mu  →  leases.mu
//
// Match, Known, Stat, List, Stats take Trie.mu for reading; updates of the policy and of pins are
// atomic and need no other lock. Put, Evict, Delete, ReclaimStep take Trie.mu for writing in short
// steps. No call of Pebble is made under Trie.mu. A call that changes the record of a node in the
// index holds Trie.records for reading until the record is written. Move, which changes the keys of
// records, holds Trie.records for writing, and so does each step of Relocate. Namespace definitions
// have their own mutex, Trie.defMu. It is taken before Trie.records and is held during the one
// synced write of a create, bump or delete. Relocate holds both locks while it replaces the index.
// Relocate and Close exclude each other by Trie.relocating, which is taken before all other locks.
//
// # Example
//
//	t, err := trie.Open(trie.Options{Dir: "/var/lib/penstock/index"})
//	ns, err := t.Create(kv.Namespace{Name: "glm", Index: kv.IndexTrie, Geometry: g})
//	status, err := t.Put(ns.ID, ns.Epoch, []trie.Entry{{ID: a, Ref: ra}, {ID: b, Parent: a, Ref: rb}}, true)
//	m, err := t.Match(ns.ID, []kv.BlockID{a, b, c}, trie.MatchOptions{Epoch: ns.Epoch, Lease: true, TTL: time.Minute, Now: now})
//	// m.Blocks == 2, m.Cut == trie.CutAbsent, m.Pieces names ra and rb
//	t.Release(m.Lease)
package trie
