package storage_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// keyring makes a keyring whose keys have the given ids.
func keyring(t testing.TB, ids ...string) *crypt.Keyring {
	t.Helper()
	var keys []*crypt.Key
	for _, id := range ids {
		k, err := crypt.NewKey(id, bytes.Repeat([]byte(id[:1]), crypt.KeyBytes))
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, k)
	}
	r, err := crypt.NewKeyring(keys...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestTooManyLayersToEncrypt: a namespace whose blocks have too many layers to be encrypted is refused. If it
// exists when the node gets keys, its plain blocks stay readable, the log names it, and new blocks of it are
// refused as a bad request.
func TestTooManyLayersToEncrypt(t *testing.T) {
	log := &testkit.Log{}
	r := newRig(t, rigOptions{edit: func(o *storage.Options) { o.Logger = slog.New(slog.NewTextHandler(log, nil)) }})
	deep := kv.SingleGroup(163, 16, 4)
	ns := r.namespace("deep", deep)
	ids := chain(ns, 1, 1, 2)
	r.mustPut(ns, ids[:1])
	r.close()
	r.reopenDevices()
	r.opts.keys = keyring(t, "k")
	r.open()
	const want = "block of 163 layers; encrypted volumes hold blocks of at most 162"
	if text := log.String(); !strings.Contains(text, "new blocks of a namespace are refused") || !strings.Contains(text, "namespace=deep") || !strings.Contains(text, want) {
		t.Errorf("the log does not name the namespace:\n%s", text)
	}
	if _, n := r.load(ns, ids[:1]); n != 1 {
		t.Errorf("%d plain blocks delivered; want 1", n)
	}
	if _, err := r.put(ns, ids, 1); !errors.Is(err, storage.ErrRequest) || !strings.Contains(err.Error(), want) {
		t.Errorf("a new block: %v; want ErrRequest", err)
	}
	if _, err := r.node.CreateNamespace(t.Context(), kv.Namespace{Name: "other", Geometry: deep, Index: kv.IndexTrie}); !errors.Is(err, storage.ErrRequest) || !strings.Contains(err.Error(), want) {
		t.Errorf("a new namespace: %v; want ErrRequest", err)
	}
}

// TestRebuildWithoutKey: an index is not rebuilt without the blocks of a key that is not given. With all
// keys, the rebuilt index has the blocks of each key.
func TestRebuildWithoutKey(t *testing.T) {
	r := newRig(t, rigOptions{keys: keyring(t, "a")})
	ns := r.namespace("m", kv.SingleGroup(2, 16, 4))
	ids := chain(ns, 1, 1, 2)
	r.mustPut(ns, ids[:1])
	if err := r.node.SetKeys(t.Context(), keyring(t, "a", "b")); err != nil {
		t.Fatal(err)
	}
	r.mustPut(ns, ids)
	r.close()
	for _, given := range []*crypt.Keyring{keyring(t, "b"), keyring(t, "a", "b")} {
		r.reopenDevices()
		r.opts.keys = given
		fs := vfs.NewMem()
		store, index := r.offline(fs)
		report, err := storage.Rebuild(context.Background(), storage.RebuildOptions{Store: store, Index: index})
		if given.Find("a") == nil {
			if !errors.Is(err, blockstore.ErrKey) {
				t.Errorf("rebuild without a key: %+v, %v; want ErrKey", report, err)
			}
			if err := errors.Join(index.Close(), store.Close(context.Background())); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err != nil || report.Indexed != 2 {
			t.Fatalf("rebuild: %+v, %v", report, err)
		}
		r.online(store, index, fs)
	}
	if _, n := r.load(ns, ids); n != 2 {
		t.Errorf("%d blocks delivered; want 2", n)
	}
}
