package storage_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// smallSlot is the size, in bytes, of the slot of a block with the geometry small.
const smallSlot = 12 << 10

// quotas sets quotas of tenants, in blocks of the geometry small.
func (r *rig) quotas(blocks map[string]int64) {
	var all []kv.TenantQuota
	for prefix, n := range blocks {
		all = append(all, kv.TenantQuota{Prefix: prefix, Bytes: n * smallSlot})
	}
	r.node.SetTenantQuotas(all)
}

// tenant returns the number of blocks of the geometry small that a tenant with a quota has.
func (r *rig) tenant(prefix string) int64 {
	r.t.Helper()
	for _, s := range r.node.Stats().Index.Tenants {
		if s.Prefix == prefix {
			return s.UsedBytes / smallSlot
		}
	}
	r.t.Fatalf("there is no tenant %q", prefix)
	return 0
}

// stored returns the number of pieces that a put stored, and the reasons for which it refused others.
func (r *rig) stored(ns kv.Namespace, ids []kv.BlockID) (n int, refused map[string]int) {
	r.t.Helper()
	pieces, err := r.put(ns, ids, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	refused = map[string]int{}
	for _, p := range pieces {
		if p.Stored {
			n++
		} else {
			refused[p.Reason]++
		}
	}
	return n, refused
}

// TestTenantQuota: the quota of a tenant holds for all namespaces whose names begin with its prefix, also
// for new ones, and a write evicts blocks of these namespaces only.
func TestTenantQuota(t *testing.T) {
	r := newRig(t, rigOptions{})
	beside := r.namespace("team-ab", small)
	other := r.namespace("team-b/m", small)
	r.quotas(map[string]int64{"team-a/": 20, "team-b/": 30})
	r.mustPut(beside, chain(beside, 25, 1))
	r.mustPut(other, chain(other, 25, 1))
	first := r.namespace("team-a/m", small)
	r.mustPut(first, chain(first, 15, 1))
	if got := r.tenant("team-a/"); got != 15 {
		t.Errorf("the tenant has %d blocks, want 15", got)
	}
	for i := range 8 {
		ns := r.namespace(fmt.Sprint("team-a/new", i), small)
		r.mustPut(ns, chain(ns, 8, i))
		if _, n := r.load(ns, chain(ns, 8, i)); n != 8 {
			t.Errorf("%s: %d of 8 blocks that were just put", ns.Name, n)
		}
		if got := r.tenant("team-a/"); got > 20 {
			t.Errorf("the tenant has %d blocks; its quota is 20", got)
		}
	}
	if got := r.tenant("team-a/"); got < 16 {
		t.Errorf("the tenant has %d blocks; its quota is 20, and each write needs 8", got)
	}
	if n, refused := r.stored(first, chain(first, 30, 7)); n == 0 || n > 20 {
		t.Errorf("a write of 30 blocks stored %d with a quota of 20, refused %v", n, refused)
	}
	for _, ns := range []kv.Namespace{beside, other} {
		if _, n := r.load(ns, chain(ns, 25, 1)); n != 25 {
			t.Errorf("%s: %d of 25 blocks; it is not of the tenant", ns.Name, n)
		}
	}
	ns := r.namespace("team-a/last", small)
	r.mustPut(ns, chain(ns, 8, 1))
	before := r.tenant("team-a/")
	if _, err := r.node.DeleteNamespace(t.Context(), "team-a/last", false); err != nil {
		t.Fatal(err)
	}
	r.mustPut(first, chain(first, 3, 9)) // its room is that of the deleted namespace
	if got := r.tenant("team-a/"); got > max(before, 20) {
		t.Errorf("the tenant has %d blocks, and had %d before a namespace of 8 was deleted and 3 were put", got, before)
	}
	r.node.SetTenantQuotas(nil)
	if n := len(r.node.Stats().Index.Tenants); n != 0 {
		t.Errorf("%d tenants have a quota, want none", n)
	}
	r.mustPut(first, chain(first, 40, 11))
}

// TestTenantQuotaBeside: the quotas of a namespace and of its tenant hold both.
func TestTenantQuotaBeside(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.quotas(map[string]int64{"a/": 20})
	limited := r.namespace("a/limited", small, func(ns *kv.Namespace) { ns.QuotaBytes = 6 * smallSlot })
	free := r.namespace("a/free", small)
	held := func(ns kv.Namespace) int64 {
		s, _ := r.trie.StatsOf(ns.ID)
		return s.Bytes / smallSlot
	}
	r.mustPut(free, chain(free, 14, 1))
	for i := range 5 {
		r.mustPut(limited, chain(limited, 6, i))
		if a, b := held(limited), held(free); a != 6 || b != 14 {
			t.Errorf("after write %d: %d and %d blocks; a namespace at its own quota evicts its own blocks", i, a, b)
		}
	}
	r.mustPut(free, chain(free, 10, 2))
	if a, b := held(limited), held(free); a > 6 || a+b > 20 || a+b < 14 {
		t.Errorf("%d and %d blocks with the quotas 6 and, for both, 20", a, b)
	}
	if n, refused := r.stored(limited, chain(limited, 9, 9)); n == 0 || n > 6 {
		t.Errorf("a write of 9 blocks stored %d with a quota of 6, refused %v", n, refused)
	}
}

// TestLowerQuota: a quota below what a namespace or a tenant has is in force with the next write, which
// evicts the excess.
func TestLowerQuota(t *testing.T) {
	for _, what := range []string{"namespace", "tenant"} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, rigOptions{})
			r.quotas(map[string]int64{"a/": 100})
			ns, beside := r.namespace("a/m", small), r.namespace("b", small)
			r.mustPut(ns, chain(ns, 60, 1))
			r.mustPut(beside, chain(beside, 20, 1))
			if what == "tenant" {
				r.quotas(map[string]int64{"a/": 10})
			} else if _, err := r.node.SetQuota(t.Context(), "a/m", 10*smallSlot); err != nil {
				t.Fatal(err)
			}
			if got := r.tenant("a/"); got != 60 {
				t.Errorf("%d blocks after the quota was lowered, want 60: it evicts nothing by itself", got)
			}
			if n, refused := r.stored(ns, chain(ns, 4, 2)); n != 4 {
				t.Errorf("the next write stored %d of 4 blocks, refused %v", n, refused)
			}
			if got := r.tenant("a/"); got > 10 || got < 8 {
				t.Errorf("%d blocks with a quota of 10", got)
			}
			if _, n := r.load(beside, chain(beside, 20, 1)); n != 20 {
				t.Errorf("%d of 20 blocks of the namespace beside it", n)
			}
		})
	}
}

// TestEvictTenantOverQuota: an eviction for the whole node takes from the tenants over their quota first,
// until they are within it.
func TestEvictTenantOverQuota(t *testing.T) {
	r := newRig(t, rigOptions{})
	a, b := r.namespace("a/m", small), r.namespace("b/m", small)
	r.mustPut(b, chain(b, 20, 1))
	r.mustPut(a, chain(a, 20, 1))
	r.quotas(map[string]int64{"a/": 5, "b/": 50})
	if _, err := r.node.Evict("", 15*smallSlot, false); err != nil {
		t.Fatal(err)
	}
	if r.tenant("a/") != 5 || r.tenant("b/") != 20 {
		t.Errorf("%d and %d blocks; want 5, the quota, and 20", r.tenant("a/"), r.tenant("b/"))
	}
	if _, err := r.node.Evict("", 10*smallSlot, false); err != nil {
		t.Fatal(err)
	}
	if got := r.tenant("a/") + r.tenant("b/"); got != 15 {
		t.Errorf("%d blocks, want 15", got)
	}
}

// TestTenantQuotaHeld: a write of a tenant at its quota is refused if leases hold all of the tenant's
// blocks, and is stored after they end.
func TestTenantQuotaHeld(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.quotas(map[string]int64{"a/": 10})
	x, y := r.namespace("a/x", small), r.namespace("a/y", small)
	var leases []trie.LeaseID
	for _, ns := range []kv.Namespace{x, y} {
		r.mustPut(ns, chain(ns, 5, 1))
		_, m, err := r.node.Match(storage.MatchRequest{Namespace: ns.Name, IDs: chain(ns, 5, 1), TTL: time.Hour})
		if err != nil || m.Lease == 0 || m.Blocks != 5 {
			t.Fatalf("match: %+v, %v", m, err)
		}
		leases = append(leases, m.Lease)
	}
	z := r.namespace("a/z", small)
	res, err := r.node.Reserve(t.Context(), storage.ReserveRequest{Namespace: "a/z", Geometry: small.Digest(), IDs: chain(z, 2, 1)})
	if err != nil || res.Granted != 0 || !res.Grants[0].Status.ByQuota() {
		t.Errorf("a write beside leased blocks: %+v, %v; want over_quota", res, err)
	}
	for _, ns := range []kv.Namespace{x, y} {
		if _, n := r.load(ns, chain(ns, 5, 1)); n != 5 {
			t.Errorf("%d of 5 leased blocks of %s", n, ns.Name)
		}
	}
	if err := r.node.Release(leases[0]); err != nil {
		t.Fatal(err)
	}
	r.mustPut(z, chain(z, 2, 1))
	if _, n := r.load(y, chain(y, 5, 1)); n != 5 {
		t.Errorf("%d of 5 blocks that are still leased", n)
	}
	if got := r.tenant("a/"); got > 10 {
		t.Errorf("%d blocks with a quota of 10", got)
	}
}

// counts returns the numbers of blocks that the node evicted and refused because of a tenant's quota.
func (r *rig) counts(prefix string) [2]int64 {
	r.t.Helper()
	for _, s := range r.node.Tenants() {
		if s.Prefix == prefix {
			if s.EvictedBytes != s.EvictedPieces*smallSlot {
				r.t.Errorf("%d blocks of %d bytes were evicted", s.EvictedPieces, s.EvictedBytes)
			}
			return [2]int64{s.EvictedPieces, s.RefusedPieces}
		}
	}
	r.t.Fatalf("there is no tenant %q", prefix)
	return [2]int64{}
}

// TestTenantCounts: the blocks that are evicted and refused because of a tenant's quota are counted, and no
// others.
func TestTenantCounts(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.quotas(map[string]int64{"a/": 10, "b/": 10})
	x, y, other := r.namespace("a/x", small), r.namespace("a/y", small), r.namespace("b/m", small)
	check := func(what string, evicted, refused int64) {
		t.Helper()
		if got := r.counts("a/"); got != [2]int64{evicted, refused} {
			t.Errorf("%s: %d evicted and %d refused; want %d and %d", what, got[0], got[1], evicted, refused)
		}
		if got := r.counts("b/"); got != [2]int64{} {
			t.Errorf("%s: the other tenant has %v", what, got)
		}
	}
	r.mustPut(other, chain(other, 8, 1))
	r.mustPut(x, chain(x, 8, 1))
	check("within the quota", 0, 0)
	r.mustPut(y, chain(y, 8, 1))
	check("a write of 8 beside 8 of 10", 6, 0)
	if n, _ := r.stored(y, chain(y, 14, 7)); n != 10 {
		t.Fatalf("a write of 14 blocks stored %d", n)
	}
	check("a write of 14 blocks, of which 3 are descendants of the refused one", 16, 4)

	// What the operator evicts or deletes, and what the quota of a namespace refuses, does not count.
	if _, err := r.node.Evict("a/y", 4*smallSlot, false); err != nil {
		t.Fatal(err)
	}
	if _, err := r.node.DeleteNamespace(t.Context(), "a/x", false); err != nil {
		t.Fatal(err)
	}
	if _, err := r.node.SetQuota(t.Context(), "a/y", smallSlot); err != nil {
		t.Fatal(err)
	}
	if n, _ := r.stored(y, chain(y, 3, 9)); n != 1 {
		t.Fatalf("%d blocks are stored with a quota of one", n)
	}
	check("operator and the quota of a namespace", 16, 4)

	// A write that was granted is refused at its commit, because another one has used the room and is leased.
	z := r.namespace("a/z", small)
	if _, err := r.node.Evict("", 100*smallSlot, false); err != nil {
		t.Fatal(err)
	}
	commit, err := r.reserve(z, chain(z, 6, 1), 0)
	if err != nil || commit == nil {
		t.Fatal(err)
	}
	r.mustPut(z, chain(z, 8, 2))
	if _, m, err := r.node.Match(storage.MatchRequest{Namespace: "a/z", IDs: chain(z, 8, 2), TTL: time.Hour}); err != nil || m.Blocks != 8 {
		t.Fatalf("match: %+v, %v", m, err)
	}
	pieces, err := commit()
	stored := 0
	for _, p := range pieces {
		if p.Stored {
			stored++
		}
	}
	if err != nil || stored != 2 {
		t.Fatalf("%d of 6 blocks are stored, %v; there is room for 2", stored, err)
	}
	check("a commit without room", 16, 8)

	// Evict of the node evicts the blocks above a lowered quota. A changed quota keeps the counts of the tenant.
	// The removal of the quota removes the counts.
	r.quotas(map[string]int64{"a/": 9, "b/": 10})
	if _, err := r.node.Evict("", smallSlot, false); err != nil {
		t.Fatal(err)
	}
	check("an eviction above a lowered quota", 17, 8)
	r.quotas(nil)
	r.quotas(map[string]int64{"a/": 10, "b/": 10})
	check("a quota that was removed meanwhile", 0, 0)
}

// TestTenantQuotaBelowABlock: a quota below one block is refused where it is set, and a namespace with a
// larger block where it is created. A quota that is in force nevertheless, because a node has read it at
// its start, refuses writes.
func TestTenantQuotaBelowABlock(t *testing.T) {
	var log testkit.Log
	r := newRig(t, rigOptions{edit: func(o *storage.Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) }})
	ns := r.namespace("a/m", small)
	for _, quotas := range [][]kv.TenantQuota{nil, {{Prefix: "a/", Bytes: smallSlot}}, {{Prefix: "b/", Bytes: 1}, {Prefix: "A/", Bytes: 1}}} {
		if err := r.node.CheckTenantQuotas(quotas); err != nil {
			t.Errorf("%v: %v", quotas, err)
		}
	}
	small1 := []kv.TenantQuota{{Prefix: "b/", Bytes: smallSlot}, {Prefix: "a/", Bytes: smallSlot - 1}}
	if err := r.node.CheckTenantQuotas(small1); !errors.Is(err, storage.ErrRequest) || !strings.Contains(err.Error(), `tenant a/*: a quota of 12287 bytes is too small for one block of namespace "a/m", which takes 12288`) {
		t.Errorf("a quota below one block: %v", err)
	}
	r.node.SetTenantQuotas(small1)
	if !strings.Contains(log.String(), "below one block") {
		t.Errorf("the log lacks the namespace without room:\n%s", log.String())
	}
	if n, _ := r.stored(ns, chain(ns, 1, 1)); n != 0 {
		t.Error("a block was stored above the quota")
	}
	if _, err := r.node.CreateNamespace(t.Context(), kv.Namespace{Name: "a/n", Geometry: small, Index: kv.IndexTrie}); !errors.Is(err, storage.ErrRequest) || !strings.Contains(err.Error(), "tenant a/*") {
		t.Errorf("a namespace with blocks above its tenant's quota: %v", err)
	}
	r.namespace("b/n", small)
	// A cluster has the namespace, so the node serves it, without room.
	if err := r.node.Follow(t.Context(), kv.Namespace{Name: "a/n", Geometry: small, Index: kv.IndexTrie, Epoch: 1}, nil); err != nil {
		t.Errorf("a namespace of the cluster: %v", err)
	}
}

// TestTenantQuotaRestart: after a restart, a crash and a rebuild of the index the blocks count for their
// tenant, and the quota is in force once it is set.
func TestTenantQuotaRestart(t *testing.T) {
	r := newRig(t, rigOptions{})
	quotas := map[string]int64{"a/": 20, "b/": 40}
	r.quotas(quotas)
	x, y, z := r.namespace("a/x", small), r.namespace("a/y", small), r.namespace("b/z", small)
	r.mustPut(x, chain(x, 9, 1))
	r.mustPut(y, chain(y, 9, 1))
	r.mustPut(z, chain(z, 9, 1))
	check := func(when string, exact bool) {
		t.Helper()
		r.quotas(quotas)
		held := func(ns kv.Namespace) int64 {
			s, _ := r.trie.StatsOf(ns.ID)
			return s.Bytes / smallSlot
		}
		if got, want := r.tenant("a/"), held(x)+held(y); got != want || exact && want != 18 {
			t.Errorf("%s: the tenant has %d blocks, its namespaces have %d", when, got, want)
		}
		if err := r.trie.Check(); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		r.mustPut(x, chain(x, 9, 1))
		r.mustPut(y, chain(y, 9, 1))
		new := r.namespace("a/"+strings.ReplaceAll(when, " ", "-"), small)
		r.mustPut(new, chain(new, 7, 1))
		if got := r.tenant("a/"); got > 20 {
			t.Errorf("%s: %d blocks with a quota of 20", when, got)
		}
		if _, err := r.node.DeleteNamespace(t.Context(), new.Name, false); err != nil {
			t.Fatal(err)
		}
		r.mustPut(x, chain(x, 9, 1))
		r.mustPut(y, chain(y, 9, 1))
		r.reclaimed() // so that nothing is reclaimed beside the next Check
		if err := r.node.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	r.close()
	r.reopenDevices()
	r.open()
	check("a restart", true)
	for seed := range uint64(5) {
		r.crash(seed)
		check(fmt.Sprintf("crash %d", seed), false)
	}
	r.close()
	r.reopenDevices()
	fresh := vfs.NewCrashableMem()
	store, index := r.offline(fresh)
	if _, err := storage.Rebuild(context.Background(), storage.RebuildOptions{Store: store, Index: index}); err != nil {
		t.Fatal(err)
	}
	r.online(store, index, fresh)
	check("a rebuild", false)
}

// TestTenantQuotaWriters: while many writers of several namespaces share a quota that changes, and
// namespaces come and go, the tenant never has more than the highest quota.
func TestTenantQuotaWriters(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 32 << 20})
	const most = 64
	r.quotas(map[string]int64{"a/": most})
	var spaces []kv.Namespace
	for i := range 4 {
		spaces = append(spaces, r.namespace(fmt.Sprint("a/", i), small))
	}
	outside := r.namespace("b", small)
	r.mustPut(outside, chain(outside, 30, 1))
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			if got := r.tenant("a/"); got > most {
				t.Errorf("%d blocks with a quota of at most %d", got, most)
				return
			}
			r.quotas(map[string]int64{"a/": []int64{most, most / 2}[i%2]})
		}
	})
	var writers sync.WaitGroup
	for w := range 6 {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 1))
			for i := range 60 {
				ns := spaces[rng.IntN(len(spaces))]
				if i%10 == 9 {
					name := fmt.Sprintf("a/own%d", w)
					var err error
					if ns, err = r.node.CreateNamespace(t.Context(), kv.Namespace{Name: name, Geometry: small, Index: kv.IndexTrie}); err != nil {
						t.Error(err)
						return
					}
					defer func() {
						if _, err := r.node.DeleteNamespace(context.Background(), name, false); err != nil && !errors.Is(err, trie.ErrNamespaceUnknown) {
							t.Error(err)
						}
					}()
				}
				if _, err := r.put(ns, chain(ns, 1+rng.IntN(6), rng.IntN(9), rng.IntN(9)), 0); err != nil && !errors.Is(err, storage.ErrBusy) {
					t.Error(err)
					return
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	wg.Wait()
	// Check must not run beside the reclaiming of the deleted namespaces.
	r.reclaimed()
	r.close()
	r.reopenDevices()
	r.open()
	if err := r.trie.Check(); err != nil {
		t.Error(err)
	}
	if _, n := r.load(outside, chain(outside, 30, 1)); n != 30 {
		t.Errorf("%d of 30 blocks of the namespace outside of the tenant", n)
	}
}

// TestQuotaCommit: of several writers that have reserved while the quota had room for each of them alone,
// every one stores its blocks. The later commits evict for them.
func TestQuotaCommit(t *testing.T) {
	for _, what := range []string{"namespace", "tenant"} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, rigOptions{})
			r.quotas(map[string]int64{"a/": 100})
			ns := r.namespace("a/m", small)
			if what == "tenant" {
				r.quotas(map[string]int64{"a/": 20})
			} else if _, err := r.node.SetQuota(t.Context(), "a/m", 20*smallSlot); err != nil {
				t.Fatal(err)
			}
			r.mustPut(ns, chain(ns, 12, 1))
			var commits []func() ([]storage.StoredPiece, error)
			for i := range 4 {
				commit, err := r.reserve(ns, chain(ns, 8, 10+i), 0)
				if err != nil || commit == nil {
					t.Fatalf("reservation %d: %v", i, err)
				}
				commits = append(commits, commit)
			}
			for i, commit := range commits {
				stored, err := commit()
				if err != nil || len(stored) != 8 {
					t.Fatalf("commit %d: %d pieces, %v", i, len(stored), err)
				}
				for _, s := range stored {
					if !s.Stored {
						t.Errorf("commit %d: block %d: %s", i, s.Block, s.Reason)
					}
				}
				if _, n := r.load(ns, chain(ns, 8, 10+i)); n != 8 {
					t.Errorf("%d of 8 blocks of commit %d", n, i)
				}
				if got := r.tenant("a/"); got > 20 {
					t.Errorf("%d blocks with a quota of 20", got)
				}
			}
		})
	}
}
