package trie

import (
	"fmt"
	"strings"

	"github.com/penstock-kv/penstock/kv"
)

// EpochStats are the figures of one live epoch.
type EpochStats struct {
	Epoch kv.Epoch
	// Kept is set if the epoch is one of the namespace's newest Keep epochs, which stay live
	// without a pin.
	Kept bool
	// Blocks, Pieces and Bytes count as in NamespaceStats, for this epoch only.
	Blocks, Pieces, Bytes int64
	// GroupPieces is the number of matchable pieces of each layer group.
	GroupPieces [kv.MaxGroups]int64
	// Matches is the number of matches with MatchOptions.Count that this epoch answered since Open,
	// and Hits the number of blocks that they matched.
	Matches, Hits int64
	// Leases counts the open leases on the epoch's pieces, and Pins the leases that keep the epoch
	// live.
	Leases, Pins int64
}

// NamespaceStats are the figures of one namespace.
type NamespaceStats struct {
	ID    kv.NamespaceID
	Name  string
	Epoch kv.Epoch
	// Live has the figures of the live epochs, the newest first.
	Live []EpochStats
	// Blocks counts the blocks with a matchable piece of layer group 0, and Pieces the matchable
	// pieces of every group.
	Blocks, Pieces int64
	// Unmatchable counts the pieces that cannot be matched any more and wait for ReclaimStep.
	Unmatchable int64
	// Bytes is the size of the slots of all pieces, unmatchable ones included. QuotaBytes is the
	// quota in bytes; 0 means none.
	Bytes, QuotaBytes int64
	// Leases counts the open leases on the namespace's pieces, the leases of Hold included.
	Leases int64
}

// TenantStats are the figures of a tenant with a quota.
type TenantStats struct {
	kv.TenantQuota
	// UsedBytes is the size of the slots of all pieces of the tenant's namespaces, unmatchable ones and
	// those of deleted namespaces included.
	UsedBytes int64
	// Namespaces is the number of the tenant's namespaces, announced ones included.
	Namespaces int64
	// EvictedPieces and EvictedBytes count the pieces that were evicted to keep the tenant within its
	// quota, and the sizes of their slots. RefusedPieces is the sum of CountRefused. They count since the
	// tenant has a quota in this process.
	EvictedPieces, EvictedBytes, RefusedPieces int64
}

// Stats are the figures of an index.
type Stats struct {
	// Blocks counts the blocks with a matchable piece of layer group 0 in all namespaces, and
	// Pieces the matchable pieces of every group. Bytes is the size of the slots of all pieces,
	// also of unmatchable pieces.
	Blocks, Pieces, Bytes int64
	// Unmatchable counts the pieces that wait for ReclaimStep, also in deleted namespaces.
	Unmatchable int64
	// Leases counts the open leases, and Pins the pins of pieces by these leases.
	Leases, Pins int64
	Policy       string
	// NodeBytes, TableBytes, PolicyBytes and LeaseBytes are the bytes of DRAM of the nodes, the
	// hash table, the eviction policy and the leases.
	NodeBytes, TableBytes, PolicyBytes, LeaseBytes int64
	// DiskBytes is the size of Pebble's files. MemTableBytes and CacheBytes are Pebble's memory.
	DiskBytes, MemTableBytes, CacheBytes int64
	// Load counts the records that Open dropped or hid.
	Load LoadStats
	// Namespaces are the namespaces with a record, sorted by name.
	Namespaces []NamespaceStats
	// Tenants are the tenants with a quota, sorted by prefix.
	Tenants []TenantStats
	// Announced is the number of announced namespaces, which Namespaces leaves out.
	Announced int64
}

// noteGrowthLocked calls Options.Grew if the DRAM has grown by growthStep since the last call of
// Grew. It runs after a chunk of nodes was added, and after evictions, because an eviction may
// enlarge the policy's table of evicted content. The DRAM of leases is not counted: it is bounded
// and small in comparison.
func (t *Trie) noteGrowthLocked() {
	if t.opts.Grew == nil {
		return
	}
	bytes := t.nodes.bytes() + t.table.bytes() + t.policy.Bytes()
	if bytes >= t.reportedBytes+growthStep {
		t.reportedBytes = bytes
		t.opts.Grew(bytes)
	}
}

// Stats returns the current figures.
func (t *Trie) Stats() Stats {
	s, open := t.indexStats()
	// Relocate may have closed this database meanwhile. Its figures are then 0.
	if d := t.disk.Load(); open && d.use() {
		defer d.unuse()
		m := d.db.Metrics()
		s.DiskBytes, s.MemTableBytes, s.CacheBytes = int64(m.DiskSpaceUsage()), int64(m.MemTable.Size), m.BlockCache.Size
	}
	return s
}

// indexStats returns the figures of the index in DRAM. open is false if the index is closed.
func (t *Trie) indexStats() (s Stats, open bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	s = Stats{
		Policy: t.opts.Policy.String(), Load: t.load,
		Bytes: t.bytes, Unmatchable: int64(t.garbage), Announced: int64(len(t.byName) - len(t.recorded)),
		NodeBytes: t.nodes.bytes(), TableBytes: t.table.bytes(),
		PolicyBytes: t.policy.Bytes(), LeaseBytes: t.leases.bytes(),
	}
	t.leases.mu.Lock()
	defer t.leases.mu.Unlock()
	s.Leases, s.Pins = int64(len(t.leases.heap)), int64(t.leases.pins)
	for _, ns := range sorted(t.recorded) {
		n := ns.stats()
		s.Blocks += n.Blocks
		s.Pieces += n.Pieces
		s.Namespaces = append(s.Namespaces, n)
	}
	s.Tenants = t.tenantStatsLocked()
	return s, !t.closed
}

// StatsOf returns the figures of one namespace; false if there is none with this id.
func (t *Trie) StatsOf(id kv.NamespaceID) (NamespaceStats, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, ok := t.namespaces[id]
	if !ok {
		return NamespaceStats{}, false
	}
	t.leases.mu.Lock()
	defer t.leases.mu.Unlock()
	return ns.stats(), true
}

// stats are the figures of ns. Trie.mu and Trie.leases.mu are held.
func (ns *namespace) stats() NamespaceStats {
	s := NamespaceStats{
		ID: ns.def.ID, Name: ns.def.Name, Epoch: ns.def.Epoch,
		Unmatchable: int64(ns.garbage), Bytes: ns.bytes, QuotaBytes: ns.def.QuotaBytes,
		Leases: ns.leases,
	}
	for i, sp := range ns.live {
		e := EpochStats{
			Epoch: sp.epoch, Kept: i < max(1, ns.def.Keep), Blocks: sp.pieces[0], Bytes: sp.bytes, GroupPieces: sp.pieces,
			Matches: sp.matches.Load(), Hits: sp.hits.Load(), Leases: sp.leases, Pins: sp.pins,
		}
		for _, n := range sp.pieces {
			e.Pieces += n
		}
		s.Live = append(s.Live, e)
		s.Blocks += e.Blocks
		s.Pieces += e.Pieces
	}
	return s
}

// String prints the figures as the CLI does. It leaves out the sizes of memory and disk, which
// differ between runs.
func (s Stats) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "blocks %d  pieces %d  bytes %d  unmatchable %d  leases %d  pins %d  policy %s\n",
		s.Blocks, s.Pieces, s.Bytes, s.Unmatchable, s.Leases, s.Pins, s.Policy)
	for _, n := range s.Namespaces {
		fmt.Fprintf(&b, "  %s (id %d, epoch %d): blocks %d  pieces %d  bytes %d", n.Name, n.ID, n.Epoch, n.Blocks, n.Pieces, n.Bytes)
		if n.QuotaBytes != 0 {
			fmt.Fprintf(&b, " of %d", n.QuotaBytes)
		}
		fmt.Fprintf(&b, "  unmatchable %d\n", n.Unmatchable)
		for _, e := range n.Live[1:] {
			fmt.Fprintf(&b, "    epoch %d: blocks %d  pieces %d  bytes %d\n", e.Epoch, e.Blocks, e.Pieces, e.Bytes)
		}
	}
	for _, tn := range s.Tenants {
		fmt.Fprintf(&b, "  %s*: namespaces %d  bytes %d of %d\n", tn.Prefix, tn.Namespaces, tn.UsedBytes, tn.Bytes)
	}
	return b.String()
}

// String prints the counts on one line.
func (s LoadStats) String() string {
	return fmt.Sprintf("loaded %d  stale epoch %d  orphans %d  duplicates %d  corrupt %d", s.Loaded, s.StaleEpoch, s.Orphans, s.Duplicates, s.Corrupt)
}
