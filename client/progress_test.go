package client_test

import (
	"testing"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
)

// TestReadProgress: a Read of several tasks reports its progress, one call at a time. It never
// reports more blocks than the result has, and the last report has all delivered blocks. Bytes
// arrive before their task is verified.
func TestReadProgress(t *testing.T) {
	r := newRig(t, func(o *client.Options) { o.ReadTaskBytes = 8 * 8192 }, newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexTrie)
	const stored, size = 28, 8192
	ids := chain(ns, 32, 1)
	r.mustPut(ns, ids[:stored])
	for _, asked := range []int{1, stored, len(ids)} {
		var reports []client.ReadProgress
		got, err := r.store.Read(t.Context(), client.ReadRequest{
			Namespace: ns, IDs: ids[:asked], Into: r.memory(int64(asked) * size),
			Progress: func(p client.ReadProgress) { reports = append(reports, p) },
		})
		if err != nil {
			t.Fatal(err)
		}
		var last client.ReadProgress
		early := false
		for _, p := range reports {
			if p.Blocks < last.Blocks || p.Bytes < last.Bytes || p == last || p.Blocks > got.Blocks {
				t.Errorf("%d blocks: reported %+v after %+v; the read ended with %d", asked, p, last, got.Blocks)
			}
			early = early || p.Bytes > int64(p.Blocks)*size
			last = p
		}
		if want := min(asked, stored); last.Blocks != want || got.Blocks != want || last.Bytes != int64(want)*size {
			t.Errorf("%d blocks: reported %+v last; the read ended with %d", asked, last, got.Blocks)
		}
		if !early {
			t.Errorf("%d blocks: no bytes were reported before they were verified: %v", asked, reports)
		}
	}
}
