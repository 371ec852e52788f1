package storage_test

import (
	"runtime"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/server/storage"
)

// TestRemovalsSayWhy: consumers and metrics are told why a block is gone, and so
// are those that hung on it: deleted, corrupt, evicted, or a part of an epoch or a
// namespace that ended.
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
			v, err := r.node.Verify(t.Context(), ns.Name, ids[1:2])
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
			_, _, err := r.node.BumpEpoch(t.Context(), ns.Name, 0)
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
		// The slots come back in the background; it tells consumers, then it counts.
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
				named += want.blocks // all of them, without names
			}
		}
		if got := int(testutil.ToFloat64(counter) - before); got != want.blocks || named != want.blocks {
			t.Errorf("%s: %d blocks counted, %d in events; want %d", want.why, got, named, want.blocks)
		}
	}
}
