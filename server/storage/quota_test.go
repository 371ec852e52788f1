package storage_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// TestQuotas: a quota that would have no effect, or has no room for one block, is refused.
func TestQuotas(t *testing.T) {
	r := newRig(t, rigOptions{})
	const slot = 12 << 10 // of a block of geometry small
	create := func(quota int64) (kv.Namespace, error) {
		return r.node.CreateNamespace(t.Context(), kv.Namespace{Name: "m", Geometry: small, Index: kv.IndexTrie, QuotaBytes: quota})
	}
	if ns, err := create(slot - 1); !errors.Is(err, storage.ErrRequest) || !strings.Contains(err.Error(), "12288") {
		t.Errorf("a quota below one block: %v, %v; want a refusal with the size of a block", ns, err)
	}
	if _, err := r.node.Namespace("m"); !errors.Is(err, trie.ErrNamespaceUnknown) {
		t.Errorf("the refused namespace is there: %v", err)
	}
	if ns, err := create(slot); err != nil || ns.QuotaBytes != slot {
		t.Fatalf("a quota of one block: %v, %v", ns, err)
	}
	if ns, err := create(slot); err != nil || ns.QuotaBytes != slot {
		t.Errorf("the same definition again: %v, %v", ns, err)
	}
	if ns, err := create(0); err != nil || ns.QuotaBytes != slot {
		t.Errorf("the same definition without a quota: %v, %v; want the namespace as it is", ns, err)
	}
	if ns, err := create(2 * slot); !errors.Is(err, trie.ErrNamespaceExists) || !strings.Contains(err.Error(), "penstock ns quota m 24576") {
		t.Errorf("another quota: %v, %v; want a refusal that names the way to change it", ns, err)
	}
	for _, quota := range []int64{-1, 1, slot - 1} {
		if ns, err := r.node.SetQuota(t.Context(), "m", quota); !errors.Is(err, storage.ErrRequest) {
			t.Errorf("quota set to %d: %v, %v; want ErrRequest", quota, ns, err)
		}
	}
	for _, quota := range []int64{slot, 0} {
		if ns, err := r.node.SetQuota(t.Context(), "m", quota); err != nil || ns.QuotaBytes != quota {
			t.Errorf("quota set to %d: %v, %v", quota, ns, err)
		}
	}
}
