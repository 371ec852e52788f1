package storage_test

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// TestRemovalsSayWhy: events and metrics have the reason for the removal of a block and of its
// descendants: deleted, corrupt, evicted, or the end of an epoch or a namespace.
func TestRemovalsSayWhy(t *testing.T) {
	r, dev := faulty(t, rigOptions{})
	ns := r.namespace("m", small)
	after := r.node.Events().Last()
	for _, want := range []struct {
		why    string
		blocks int
		remove func() error
	}{
		{"corrupt", 2, func() error {
			ids := chain(ns, 3, 1)
			r.mustPut(ns, ids)
			dev.SetRules(faultio.MustParse("(Flip (And Reads (Prob 1 1)))"))
			defer dev.SetRules(nil)
			v, err := r.node.Verify(t.Context(), ns.Name, 0, ids[1:2])
			if err == nil && v[0].State != storage.Corrupt {
				t.Errorf("verify: %v, %v", v[0].State, v[0].Err)
			}
			return err
		}},
		{"deleted", 3, func() error {
			ids := chain(ns, 4, 2)
			r.mustPut(ns, ids)
			_, err := r.node.DeleteBlocks(ns.Name, ids[1], false)
			return err
		}},
		{"evicted", 6, func() error {
			r.mustPut(ns, chain(ns, 4, 3))
			_, err := r.node.Evict(ns.Name, 1<<40, false)
			return err
		}},
		{"epoch", 2, func() error {
			r.mustPut(ns, chain(ns, 2, 4))
			_, err := r.node.BumpEpoch(t.Context(), ns.Name, 0, 1)
			return err
		}},
		{"deleted", 2, func() error {
			other := r.namespace("other", small)
			r.mustPut(other, chain(other, 2, 5))
			_, err := r.node.DeleteNamespace(t.Context(), "other", false)
			return err
		}},
	} {
		counter := r.stats.RemovedBlocks.WithLabelValues(want.why)
		before := testutil.ToFloat64(counter)
		if err := want.remove(); err != nil {
			t.Fatalf("%s: %v", want.why, err)
		}
		// The slots are freed in the background. The node publishes the event before it counts.
		for testutil.ToFloat64(counter)-before < float64(want.blocks) {
			runtime.Gosched()
		}
		named := 0
		events, err := r.node.Events().After(t.Context(), after, 100)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			after = e.Sequence
			if e.Kind == storage.BlockStored {
				continue
			}
			if e.Reason != want.why {
				t.Errorf("%s: an event says %q", want.why, e.Reason)
			}
			if e.Kind == storage.BlockRemoved {
				named += len(e.IDs)
			} else {
				named += want.blocks // the event covers all blocks without naming them
			}
		}
		if got := int(testutil.ToFloat64(counter) - before); got != want.blocks || named != want.blocks {
			t.Errorf("%s: %d blocks counted, %d in events; want %d", want.why, got, named, want.blocks)
		}
	}
}

// mirror is the node's content as a consumer of events derives it.
type mirror struct {
	t     *testing.T
	node  *storage.Node
	after uint64
	holds map[string]map[kv.BlockID]bool
}

// follow applies the events published so far.
func (m *mirror) follow() {
	m.t.Helper()
	for last := m.node.Events().Last(); m.after < last; {
		events, err := m.node.Events().After(m.t.Context(), m.after, 256)
		if err != nil {
			m.t.Fatal(err)
		}
		for _, e := range events {
			m.after = e.Sequence
			ids := m.holds[e.Namespace]
			switch e.Kind {
			case storage.BlockStored:
				if ids == nil {
					ids = make(map[kv.BlockID]bool)
					m.holds[e.Namespace] = ids
				}
				for _, id := range e.IDs {
					ids[id] = true
				}
			case storage.BlockRemoved:
				for _, id := range e.IDs {
					delete(ids, id)
				}
			case storage.AllBlocksCleared:
				clear(ids)
			case storage.Gap:
				m.t.Fatalf("events up to %d are lost", e.Sequence)
			}
		}
	}
}

// compare reports each block of a namespace in which mirror and node differ.
func (m *mirror) compare(namespace string, ids []kv.BlockID) {
	m.t.Helper()
	m.follow()
	present, _, err := m.node.Exists(namespace, 0, ids, false)
	if err != nil {
		m.t.Fatal(err)
	}
	for i, id := range ids {
		if m.holds[namespace][id] != present[i].Has(0) {
			m.t.Errorf("%s: block %d %v is stored: %v; the events have %v", namespace, i, id, present[i].Has(0), !present[i].Has(0))
		}
	}
}

// reclaimed waits until the index has no unmatchable piece left. It deletes a block that does not
// exist, because a deletion starts the reclaiming.
func (r *rig) reclaimed() {
	r.t.Helper()
	for r.trie.Stats().Unmatchable > 0 {
		if _, err := r.node.Delete(r.node.Namespaces()[0].Name, 0, []kv.BlockID{{1}}); err != nil {
			r.t.Fatal(err)
		}
		runtime.Gosched()
	}
}

// TestStoredAgainBeforeReclaim: a block is deleted while a reader has a lease on its
// descendants, and is stored again. When the lease ends and the old pieces leave the index,
// no event reports the block as removed.
func TestStoredAgainBeforeReclaim(t *testing.T) {
	for _, remove := range []struct {
		name string
		call func(r *rig, ns kv.Namespace, ids []kv.BlockID) error
	}{
		{"DeleteBlocks", func(r *rig, ns kv.Namespace, ids []kv.BlockID) error {
			_, err := r.node.DeleteBlocks(ns.Name, ids[1], false)
			return err
		}},
		{"Delete", func(r *rig, ns kv.Namespace, ids []kv.BlockID) error {
			_, err := r.node.Delete(ns.Name, 0, ids[1:2])
			return err
		}},
		{"BumpEpoch", func(r *rig, ns kv.Namespace, _ []kv.BlockID) error {
			_, err := r.node.BumpEpoch(t.Context(), ns.Name, 0, 1)
			return err
		}},
	} {
		t.Run(remove.name, func(t *testing.T) {
			r := newRig(t, rigOptions{})
			m := &mirror{t: t, node: r.node, holds: make(map[string]map[kv.BlockID]bool)}
			ns := r.namespace("m", small)
			ids := chain(ns, 4, 1)
			r.mustPut(ns, ids)
			m.compare("m", ids)
			_, match, err := r.node.Match(storage.MatchRequest{Namespace: "m", IDs: ids, TTL: time.Hour})
			if err != nil || match.Lease == 0 {
				t.Fatalf("%+v, %v", match, err)
			}
			if err := remove.call(r, ns, ids); err != nil {
				t.Fatal(err)
			}
			if ns, err = r.node.Namespace("m"); err != nil {
				t.Fatal(err)
			}
			r.mustPut(ns, ids)
			m.compare("m", ids)
			if err := r.node.Release(match.Lease); err != nil {
				t.Fatal(err)
			}
			r.reclaimed()
			m.compare("m", ids)
		})
	}
}

// TestEventsFollowTheIndex runs writers, deletions, evictions and epoch bumps in several namespaces
// concurrently. At the end, a mirror built from the events equals the node's index.
func TestEventsFollowTheIndex(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 4 << 20})
	m := &mirror{t: t, node: r.node, holds: make(map[string]map[kv.BlockID]bool)}
	const chains = 6
	names := []string{"a", "b", "flat"}
	ids := make(map[string][][]kv.BlockID)
	for _, name := range names {
		ns := r.namespace(name, small, func(ns *kv.Namespace) {
			if name == "flat" {
				ns.Index = kv.IndexFlat
			}
		})
		for i := range chains {
			ids[name] = append(ids[name], chain(ns, 4, 1, i/2, i))
		}
	}
	var workers sync.WaitGroup
	for seed := range 4 {
		workers.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(seed)))
			for range 150 {
				name := names[rng.IntN(len(names))]
				blocks := ids[name][rng.IntN(chains)]
				ns, err := r.node.Namespace(name)
				if err != nil {
					t.Error(err)
					return
				}
				switch rng.IntN(12) {
				case 0:
					_, err = r.node.DeleteBlocks(name, blocks[rng.IntN(len(blocks))], false)
				case 1:
					_, err = r.node.Delete(name, 0, blocks[rng.IntN(len(blocks)):])
				case 2:
					_, err = r.node.Evict(name, 64<<10, false)
				case 3:
					_, err = r.node.BumpEpoch(t.Context(), name, 0, 1)
				default:
					_, err = r.put(ns, blocks, rng.IntN(2)*rng.IntN(len(blocks)))
				}
				if err != nil && !errors.Is(err, trie.ErrAbsent) && !errors.Is(err, trie.ErrEpoch) && !errors.Is(err, storage.ErrBusy) {
					t.Error(err)
					return
				}
			}
		})
	}
	workers.Wait()
	r.reclaimed()
	for _, name := range names {
		for _, blocks := range ids[name] {
			m.compare(name, blocks)
		}
	}
}
