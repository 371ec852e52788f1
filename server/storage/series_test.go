package storage_test

import (
	"testing"

	"github.com/penstock-kv/penstock/server/storage"
)

// TestDeletedNamespaceLeavesNoSeries: no metric has the name of a deleted namespace, even if calls
// end after the deletion.
func TestDeletedNamespaceLeavesNoSeries(t *testing.T) {
	r := newRig(t, rigOptions{})
	count := func() (n int) {
		families, err := r.registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				for _, l := range m.GetLabel() {
					if l.GetName() == "namespace" {
						n++
					}
				}
			}
		}
		return n
	}
	for range 3 {
		ns := r.namespace("m", small)
		ids := chain(ns, 4, 1)
		r.mustPut(ns, ids)
		if _, _, err := r.node.Match(storage.MatchRequest{Namespace: "m", IDs: ids}); err != nil {
			t.Fatal(err)
		}
		if n := count(); n == 0 {
			t.Error("nothing is counted by namespace")
		}
		late, err := r.reserve(ns, chain(ns, 4, 2), 0)
		if err != nil || late == nil {
			t.Fatal("no reservation", err)
		}
		if _, err := r.node.DeleteNamespace(t.Context(), "m", false); err != nil {
			t.Fatal(err)
		}
		if stored, err := late(); err == nil && len(stored) > 0 && stored[0].Stored {
			t.Errorf("%+v stored in a deleted namespace", stored[0])
		}
		if n := count(); n != 0 {
			t.Errorf("%d series of a deleted namespace", n)
		}
	}
}
