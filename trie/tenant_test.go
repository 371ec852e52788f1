package trie

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/penstock-kv/penstock/kv"
)

// tenantSpaces returns an index with slots of one byte, a quota for the prefix "a/" and namespaces with the
// given names. A namespace has chains of 16 blocks, as many as its value.
func tenantSpaces(t *testing.T, quota int64, chains map[string]int) (tr *Trie, ids map[string]kv.NamespaceID) {
	t.Helper()
	tr = openTest(t, Options{SlotBytes: func(kv.Geometry, int) int64 { return 1 }})
	tr.SetTenantQuotas([]kv.TenantQuota{{Prefix: "a/", Bytes: quota}})
	ids = make(map[string]kv.NamespaceID)
	for name, n := range chains {
		ns, err := tr.Create(kv.Namespace{Name: name, Index: kv.IndexTrie, Geometry: kv.SingleGroup(61, 64, 656), Epoch: 1})
		if err != nil {
			t.Fatal(err)
		}
		ids[name] = ns.ID
		for c := range n {
			if _, err := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(benchIDs(c)[:16], int(ns.ID)*1_000_000+c*16), false); err != nil {
				t.Fatal(err)
			}
		}
	}
	return tr, ids
}

// TestEvictTenantShares: an eviction from a tenant takes the same part of each of its namespaces, also if it
// is made in many small calls, and nothing of others. It examines no piece of others.
func TestEvictTenantShares(t *testing.T) {
	for _, each := range []int64{1, 7, 1000} {
		tr, ids := tenantSpaces(t, 1<<20, map[string]int{"a/large": 200, "a/small": 20, "a/middle": 80, "b": 50})
		before, total := tr.looks, int64(0)
		for total < 2400 { // half of the tenant's 4800 blocks
			gone, err := tr.EvictTenant(nil, min(each, 2400-total), "a/", epoch0)
			if err != nil || len(gone) == 0 {
				t.Fatal(len(gone), err)
			}
			total += int64(len(gone))
		}
		if looks := tr.looks - before; looks != total {
			t.Errorf("in steps of %d: %d victims took %d visits", each, total, looks)
		}
		for name, was := range map[string]int64{"a/large": 3200, "a/small": 320, "a/middle": 1280, "b": 800} {
			s, _ := tr.StatsOf(ids[name])
			want, slack := was/2, was/8+tenantRun
			if name == "b" {
				want, slack = was, 0
			}
			if s.Bytes < want-slack || s.Bytes > want+slack {
				t.Errorf("in steps of %d: %s has %d of %d bytes, want about %d", each, name, s.Bytes, was, want)
			}
		}
		closeTest(t, tr)
	}
}

// TestEvictTenantTouched: an eviction from a tenant ends although matches touch its leaves meanwhile, and
// untouched blocks go before touched ones of other namespaces.
func TestEvictTenantTouched(t *testing.T) {
	tr, ids := tenantSpaces(t, 1<<20, map[string]int{"a/cold": 40, "a/hot": 40})
	defer closeTest(t, tr)
	for c := range 40 {
		if m, err := tr.Match(ids["a/hot"], benchIDs(c)[:16], MatchOptions{}); err != nil || m.Blocks != 16 {
			t.Fatal(m, err)
		}
	}
	if gone, err := tr.EvictTenant(nil, 640, "a/", epoch0); err != nil || len(gone) != 640 {
		t.Fatal(len(gone), err)
	}
	cold, _ := tr.StatsOf(ids["a/cold"])
	hot, _ := tr.StatsOf(ids["a/hot"])
	if cold.Bytes >= hot.Bytes {
		t.Errorf("%d bytes are left of the namespace that was never read, and %d of the one that was", cold.Bytes, hot.Bytes)
	}
	if gone, err := tr.EvictTenant(nil, 1000, "a/", epoch0); err != nil || len(gone) != 640 {
		t.Errorf("%d evicted of the 640 that are left, %v", len(gone), err)
	}
}

// TestTenantNamespaces: random puts, deletions of blocks and namespaces, bumps and changes of the quotas
// keep the counts of tenants equal to the sums over their namespaces (Check), and no Put passes a quota.
func TestTenantNamespaces(t *testing.T) {
	prefixes := [][]kv.TenantQuota{
		{{Prefix: "a/", Bytes: 40}, {Prefix: "b", Bytes: 30}},
		{{Prefix: "a/", Bytes: 12}},
		{{Prefix: "a", Bytes: 60}, {Prefix: "b/x", Bytes: 9}, {Prefix: "c", Bytes: 1}},
		nil,
	}
	names := []string{"a/x", "a/y", "ab", "b/x", "b/y", "d"}
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 3))
		tr := openTest(t, Options{SlotBytes: func(kv.Geometry, int) int64 { return 1 }})
		slot := 0
		for range 120 {
			name := names[rng.IntN(len(names))]
			ns, err := tr.Namespace(name)
			if err != nil {
				ns, err = tr.Create(kv.Namespace{Name: name, Index: kv.IndexTrie, Geometry: kv.SingleGroup(61, 64, 656), Epoch: 1})
				if err != nil {
					t.Fatal(err)
				}
			}
			was := make(map[string]int64)
			for _, s := range tr.Tenants() {
				was[s.Prefix] = s.UsedBytes
			}
			switch op := rng.IntN(12); op {
			case 0:
				err = tr.DeleteNamespace(name)
			case 1:
				_, err = bumpEpoch(tr, name, 0, 1+rng.IntN(2))
			case 2:
				tr.SetTenantQuotas(prefixes[rng.IntN(len(prefixes))])
				for _, s := range tr.Tenants() {
					was[s.Prefix] = s.UsedBytes
				}
			case 3:
				_, _, err = tr.ReclaimStep(nil, 1+rng.IntN(20))
			case 4:
				err = tr.DeleteAll(ns.ID)
			case 5:
				if s := tr.Tenants(); len(s) > 0 {
					tn := s[rng.IntN(len(s))]
					var gone []Evicted
					gone, err = tr.EvictTenant(nil, 1<<40, tn.Prefix, epoch0)
					now := tr.Tenants()
					for _, n := range now {
						if n.Prefix == tn.Prefix && n.UsedBytes != 0 {
							t.Errorf("seed %d: %d bytes of tenant %s are left of %d, %d pieces were evicted", seed, n.UsedBytes, n.Prefix, tn.UsedBytes, len(gone))
						}
					}
				}
			default:
				n := 1 + rng.IntN(16)
				slot += 16
				_, err = tr.Put(nil, ns.ID, ns.Epoch, benchEntries(benchIDs(rng.IntN(4))[:n], slot), false)
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range tr.Tenants() {
				if s.UsedBytes > max(s.Bytes, was[s.Prefix]) {
					t.Errorf("seed %d: tenant %s grew from %d to %d bytes; its quota is %d", seed, s.Prefix, was[s.Prefix], s.UsedBytes, s.Bytes)
				}
			}
			if err := tr.Check(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		closeTest(t, tr)
	}
}

// TestTenantOf: a namespace belongs to the tenant whose prefix its name begins with.
func TestTenantOf(t *testing.T) {
	tr := openTest(t, Options{})
	defer closeTest(t, tr)
	tr.SetTenantQuotas([]kv.TenantQuota{{Prefix: "b", Bytes: 1}, {Prefix: "a/", Bytes: 2}, {Prefix: "a-", Bytes: 3}, {Prefix: "c/x", Bytes: 4}})
	for name, want := range map[string]string{
		"a": "", "a-": "a-", "a-x": "a-", "a.": "", "a/": "a/", "a/b": "a/", "a0": "", "b": "b", "bc": "b", "c": "", "c/": "", "c/w": "", "c/x": "c/x", "c/y": "", "A/": "", "zzz": "",
	} {
		if q, ok := tr.TenantQuota(name); q.Prefix != want || ok != (want != "") {
			t.Errorf("%s is of tenant %q, %v; want %q", name, q.Prefix, ok, want)
		}
	}
	if got := fmt.Sprint(tr.Tenants()); got != "[{{a- 3} 0 0 0 0 0} {{a/ 2} 0 0 0 0 0} {{b 1} 0 0 0 0 0} {{c/x 4} 0 0 0 0 0}]" {
		t.Errorf("tenants: %s", got)
	}
	if gone, err := tr.EvictTenant(nil, 1, "a", epoch0); err != nil || len(gone) != 0 {
		t.Errorf("a prefix without a quota: %v, %v", gone, err)
	}
}
