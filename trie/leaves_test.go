package trie

import (
	"testing"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

// tenantAmong returns an index with slots of one byte. A tenant has one chain of 64 blocks, and
// another namespace has chains before and after that chain.
func tenantAmong(t *testing.T, chains int) (tr *Trie, tenant kv.Namespace, ids []kv.BlockID) {
	tr = openTest(t, Options{SlotBytes: func(kv.Geometry, int) int64 { return 1 }})
	other := benchNamespace(t, tr)
	tenant, err := tr.Create(kv.Namespace{Name: "tenant", Index: kv.IndexTrie, Geometry: kv.SingleGroup(61, 64, 656), Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	fillFrom(t, tr, other, 0, chains/2)
	ids = benchIDs(-1)[:64]
	if _, err := tr.Put(nil, tenant.ID, tenant.Epoch, benchEntries(ids, chains*benchChain), false); err != nil {
		t.Fatal(err)
	}
	fillFrom(t, tr, other, chains/2, chains)
	return tr, tenant, ids
}

// TestEvictTenantLooks: the cost of an eviction from one namespace does not grow with the number of
// pieces of the others.
func TestEvictTenantLooks(t *testing.T) {
	for _, chains := range []int{2, 64} {
		tr, tenant, ids := tenantAmong(t, chains)
		for range 4 {
			before := tr.looks
			gone, err := tr.Evict(nil, 8, tenant.ID, epoch0)
			if err != nil || len(gone) != 8 {
				t.Fatalf("%d evicted, %v; want 8", len(gone), err)
			}
			for i, g := range gone {
				if want := ids[len(ids)-1-i]; g.ID != want {
					t.Errorf("victim %d is %v; want the leaf %v", i, g.ID, want)
				}
			}
			if looks := tr.looks - before; looks != 8 {
				t.Errorf("%d chains beside: 8 victims took %d visits; want 8", chains, looks)
			}
			ids = ids[:len(ids)-8]
		}
		closeTest(t, tr)
	}
}

// TestEvictTouchedTenant: eviction skips a touched leaf once for each recorded touch. A leased leaf
// costs one look in total, not one per call.
func TestEvictTouchedTenant(t *testing.T) {
	tr, tenant, ids := tenantAmong(t, 2)
	defer closeTest(t, tr)
	m, err := tr.Match(tenant.ID, ids, MatchOptions{Lease: true, TTL: time.Minute, Now: epoch0})
	if err != nil || m.Lease == 0 {
		t.Fatal(m, err)
	}
	for i := range 3 {
		if gone, err := tr.Evict(nil, 1, tenant.ID, epoch0); err != nil || len(gone) != 0 {
			t.Fatalf("call %d: %d evicted below a lease, %v", i, len(gone), err)
		}
	}
	if tr.looks > 1 {
		t.Errorf("3 calls visited a leased leaf %d times; want 1", tr.looks)
	}
	if err := tr.Release(m.Lease); err != nil {
		t.Fatal(err)
	}
	before := tr.looks
	if gone, err := tr.Evict(nil, 1, tenant.ID, epoch0); err != nil || len(gone) != 1 {
		t.Fatalf("%d evicted, %v; want 1", len(gone), err)
	}
	if looks := tr.looks - before; looks != 2 {
		t.Errorf("%d visits for a leaf that was used once; want 2", looks)
	}
}

// TestEvictAfterAllWasLeased: after the leases end, eviction from the namespace finds its pieces
// again, also if an earlier call found nothing evictable.
func TestEvictAfterAllWasLeased(t *testing.T) {
	tr, tenant, ids := tenantAmong(t, 64)
	defer closeTest(t, tr)
	for round := range 3 {
		m, err := tr.Match(tenant.ID, ids, MatchOptions{Lease: true, TTL: time.Minute, Now: epoch0})
		if err != nil || m.Lease == 0 {
			t.Fatal(m, err)
		}
		for range 8 {
			if gone, err := tr.Evict(nil, 8, tenant.ID, epoch0); err != nil || len(gone) != 0 {
				t.Fatalf("%d evicted below a lease, %v", len(gone), err)
			}
		}
		if err := tr.Release(m.Lease); err != nil {
			t.Fatal(err)
		}
		if gone, err := tr.Evict(nil, 8, tenant.ID, epoch0); err != nil || len(gone) != 8 {
			t.Fatalf("round %d: %d evicted after the lease ended, %v; want 8", round, len(gone), err)
		}
		ids = ids[:len(ids)-8]
	}
}
