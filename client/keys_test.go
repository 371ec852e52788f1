package client_test

import (
	"encoding/hex"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// TestExistsAndDelete calls Exists and Delete for blocks on several nodes, in a flat
// namespace and in one with chained ids.
func TestExistsAndDelete(t *testing.T) {
	a, b := newHost(t, nil), newHost(t, nil)
	r := newRig(t, nil, a, b)
	flat := r.namespace("flat", geometry, kv.IndexFlat)
	all := keys(68, 1)
	r.mustPut(flat, all[:64])
	del, err := r.store.Delete(t.Context(), client.KeysRequest{Namespace: flat, IDs: []kv.BlockID{all[3], all[66], all[7]}})
	if want := []client.Presence{client.Present, client.Absent, client.Present}; err != nil || !slices.Equal(del, want) {
		t.Fatalf("delete: %v, %v; want %v", del, err, want)
	}
	got, err := r.store.Exists(t.Context(), client.KeysRequest{Namespace: flat, IDs: all}, true)
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range got {
		if want := i < 64 && i != 3 && i != 7; want != (p == client.Present) {
			t.Errorf("key %d: %v; want present: %v", i, p, want)
		}
	}

	tree := r.namespace("tree", geometry, kv.IndexTrie)
	ids := chain(tree, 6, 1)
	r.mustPut(tree, ids)
	if del, err = r.store.Delete(t.Context(), client.KeysRequest{Namespace: tree, IDs: ids[4:5]}); err != nil {
		t.Fatal(err)
	}
	got, err = r.store.Exists(t.Context(), client.KeysRequest{Namespace: tree, IDs: ids}, false)
	if want := []client.Presence{1, 1, 1, 1, 0, 0}; err != nil || !slices.Equal(got, want) {
		t.Errorf("delete of block 4 of 6 returned %v; then exists: %v, %v; want %v", del, got, err, want)
	}

	// The keys of a node that is down are Unknown. Those of the other node are Present.
	down := 0
	a.kill()
	if got, err = r.store.Exists(t.Context(), client.KeysRequest{Namespace: flat, IDs: all[8:64]}, false); err != nil {
		t.Fatal(err)
	}
	for _, p := range got {
		switch p {
		case client.Unknown:
			down++
		case client.Absent:
			t.Errorf("one of two nodes is down: %v; want no Absent", got)
		}
	}
	if down == 0 || down == 56 {
		t.Errorf("one of two nodes is down: %v; want some Unknown and some Present", got)
	}
}

// TestEnsureNamespace: the first call creates the namespace. A second call with the same
// definition returns it. A call with another definition fails with an error that has both
// definitions, but no salt.
func TestEnsureNamespace(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil), newHost(t, nil))
	def := kv.Namespace{Name: "m", Geometry: geometry, Index: kv.IndexFlat}
	first, err := r.store.EnsureNamespace(t.Context(), def)
	if err != nil {
		t.Fatal(err)
	}
	again, err := r.store.EnsureNamespace(t.Context(), def)
	if err != nil || again.Epoch != first.Epoch {
		t.Fatalf("again: %+v, %v", again, err)
	}
	other := def
	other.Geometry.Groups = slices.Clone(geometry.Groups)
	other.Geometry.Groups[0].Layers = 77
	other.Geometry.DType = "fp8"
	if _, err = r.store.EnsureNamespace(t.Context(), other); !errors.Is(err, client.ErrMismatch) {
		t.Fatalf("another geometry: %v", err)
	}
	for _, word := range []string{"full 4×512 B", "full 77×512 B", `"fp8"`} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q lacks %s", err, word)
		}
	}
	salted := def
	salted.Salt = []byte("s3cret")
	_, err = r.store.EnsureNamespace(t.Context(), salted)
	if !errors.Is(err, client.ErrMismatch) || !strings.Contains(err.Error(), "salts differ") {
		t.Errorf("another salt: %v", err)
	}
	for _, secret := range []string{"s3cret", hex.EncodeToString(salted.Salt)} {
		if strings.Contains(err.Error(), secret) {
			t.Errorf("%q contains the salt", err)
		}
	}
	if _, err = r.store.EnsureNamespace(t.Context(), kv.Namespace{Name: "a b"}); !errors.Is(err, client.ErrRequest) {
		t.Errorf("a bad name: %v", err)
	}
}

// TestBumpEpoch: BumpEpoch reaches every node, and may be repeated with the same epoch.
func TestBumpEpoch(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil), newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexFlat)
	all := keys(8, 1)
	r.mustPut(ns, all)
	for range 2 {
		if epoch, err := r.store.BumpEpoch(t.Context(), "m", ns.Epoch+1, 1); err != nil || epoch != ns.Epoch+1 {
			t.Fatalf("bump: %d, %v", epoch, err)
		}
	}
	next, err := r.store.Namespace(t.Context(), "m")
	if err != nil || next.Epoch != ns.Epoch+1 {
		t.Fatalf("epoch %d, %v", next.Epoch, err)
	}
	for _, of := range []kv.Namespace{ns, next} {
		got, err := r.store.Exists(t.Context(), client.KeysRequest{Namespace: of, IDs: all}, false)
		if err != nil || slices.Contains(got, client.Present) {
			t.Errorf("epoch %d: %v, %v", of.Epoch, got, err)
		}
	}
	if _, err := r.store.BumpEpoch(t.Context(), "m", ns.Epoch, 1); !errors.Is(err, client.ErrMismatch) {
		t.Errorf("bump to an older epoch: %v; want ErrMismatch", err)
	}
	for _, bad := range []struct {
		to   kv.Epoch
		keep int
	}{{math.MaxUint64, 1}, {0, kv.MaxLive + 1}, {0, -1}} {
		if _, err := r.store.BumpEpoch(t.Context(), "m", bad.to, bad.keep); !errors.Is(err, client.ErrRequest) {
			t.Errorf("bump to %d, %d kept: %v; want ErrRequest", bad.to, bad.keep, err)
		}
	}
}

// TestRetireEpoch: a bump that keeps an epoch, a pin and a retirement reach every node.
func TestRetireEpoch(t *testing.T) {
	r := newRig(t, nil, newHost(t, nil), newHost(t, nil))
	ns := r.namespace("m", geometry, kv.IndexFlat)
	all := keys(8, 1)
	r.mustPut(ns, all)
	next, err := r.store.BumpEpoch(t.Context(), "m", 0, 2)
	if err != nil || next != ns.Epoch+1 {
		t.Fatalf("bump: %d, %v", next, err)
	}
	stored := func(want client.Presence) {
		t.Helper()
		got, err := r.store.Exists(t.Context(), client.KeysRequest{Namespace: ns, IDs: all}, false)
		if err != nil || slices.ContainsFunc(got, func(p client.Presence) bool { return p != want }) {
			t.Errorf("keys of epoch %d: %v, %v; want %v", ns.Epoch, got, err, want)
		}
	}
	stored(client.Present)
	pin, err := r.store.PinEpoch(t.Context(), ns, ns.Epoch, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.store.RetireEpoch(t.Context(), "m", ns.Epoch, false); !errors.Is(err, client.ErrMismatch) {
		t.Errorf("retire a pinned epoch: %v; want ErrMismatch", err)
	}
	stored(client.Present)
	if err := pin.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second finds nothing to retire
		if err := r.store.RetireEpoch(t.Context(), "m", ns.Epoch, false); err != nil {
			t.Fatal(err)
		}
		stored(client.Absent)
	}
	if err := r.store.RetireEpoch(t.Context(), "m", next, false); !errors.Is(err, client.ErrRequest) {
		t.Errorf("retire the newest epoch: %v; want ErrRequest", err)
	}
}

// TestOlderNode: a node of an older version has no Exists call and cannot read into
// fragments. Both return an error that has the node's version.
func TestOlderNode(t *testing.T) {
	f := newFake(t)
	f.describe = func(d *pb.DescribeResponse) { d.Version = "v0.0.1" }
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	store, err := client.Open(t.Context(), client.Options{Servers: []string{f.addr}, Engine: engine})
	if err != nil {
		t.Fatal(errors.Join(err, engine.Close()))
	}
	defer func() {
		if err := errors.Join(store.Close(), engine.Close()); err != nil {
			t.Error(err)
		}
	}()
	m, err := store.Register(make([]byte, 8<<10))
	if err != nil {
		t.Fatal(err)
	}
	ns := kv.Namespace{Name: "m", Geometry: geometry, Index: kv.IndexFlat, Epoch: 1}
	_, exists := store.Exists(t.Context(), client.KeysRequest{Namespace: ns, IDs: keys(1, 1)}, false)
	_, read := store.Read(t.Context(), client.ReadRequest{
		Namespace: ns, IDs: keys(1, 1), Pieces: []client.Piece{{}}, Fragments: [][]client.Fragment{{{Memory: m, Layers: 4}}},
	})
	for _, err := range []error{exists, read} {
		if !errors.Is(err, client.ErrVersion) || !strings.Contains(err.Error(), "v0.0.1") {
			t.Errorf("%v; want ErrVersion with the version", err)
		}
	}
}
