package client_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
)

// TestNamespaceMadeAgain: a namespace is deleted and made again with another geometry, whose blocks have the same ids
// and the same size, while engines read with the old definition and with the new one. No engine gets
// blocks of the other geometry.
func TestNamespaceMadeAgain(t *testing.T) {
	for _, index := range []kv.IndexKind{kv.IndexFlat, kv.IndexTrie} {
		t.Run(index.String(), func(t *testing.T) {
			h := newHost(t, nil)
			r := newRig(t, nil, h)
			geometries := []kv.Geometry{geometry, kv.SingleGroup(2, 4, 1024)}
			ids := keys(8, 1)
			size := geometry.PieceBytes(0)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var epoch atomic.Uint64 // of the newest namespace
			epoch.Store(1)
			var engines sync.WaitGroup
			for g, of := range geometries {
				for range 2 {
					engines.Go(func() {
						ns := kv.Namespace{Name: "m", Geometry: of, Index: index}
						m := r.memory(8 * size)
						defer m.Close(context.Background())
						for ctx.Err() == nil {
							ns.Epoch = kv.Epoch(epoch.Load())
							for i, id := range ids {
								fill(m.Bytes()[int64(i)*size:][:size], id, g, 1)
							}
							_, err := r.store.Write(ctx, client.WriteRequest{Namespace: ns, IDs: ids, From: m})
							if err != nil && !errors.Is(err, client.ErrMismatch) && !errors.Is(err, client.ErrNotFound) && ctx.Err() == nil {
								t.Errorf("write: %v", err)
							}
							clear(m.Bytes())
							got, err := r.store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: ids, Into: m})
							if err != nil && !errors.Is(err, client.ErrMismatch) && !errors.Is(err, client.ErrNotFound) && ctx.Err() == nil {
								t.Errorf("read: %v", err)
							}
							for i := range got.Blocks {
								if err := check(m.Bytes()[int64(i)*size:][:size], ids[i], g, 1); err != nil {
									t.Errorf("geometry %d: %v", g, err)
								}
							}
						}
					})
				}
			}
			for turn := range 60 {
				h.admin(func(ctx context.Context, c pb.AdminClient) error {
					made, err := c.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(kv.Namespace{Name: "m", Geometry: geometries[turn%2], Index: index})})
					epoch.Store(made.GetEpoch())
					return err
				})
				before := r.store.Stats().ReadBytes
				eventually(t, "reads of the geometry", func() bool { return r.store.Stats().ReadBytes >= before+uint64(8*size) })
				h.admin(func(ctx context.Context, c pb.AdminClient) error {
					_, err := c.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: "m"})
					return err
				})
			}
			cancel()
			engines.Wait()
		})
	}
}

// TestOldHandle: a namespace is deleted and made again with the same definition, as for other weights under the same name.
// A client that still has the old handle reads nothing and stores nothing, and one with the new handle gets its own blocks only,
// whether or not the node or the connection was new meanwhile.
func TestOldHandle(t *testing.T) {
	for _, restart := range []bool{false, true} {
		for _, index := range []kv.IndexKind{kv.IndexFlat, kv.IndexTrie} {
			t.Run(fmt.Sprintf("%v,restart=%v", index, restart), func(t *testing.T) {
				h := newHost(t, nil)
				r := newRig(t, nil, h)
				def := kv.Namespace{Name: "m", Geometry: geometry, Index: index}
				ids := keys(4, 1)
				size := geometry.PieceBytes(0)
				m := r.memory(4 * size)
				defer m.Close(context.Background())
				weights := func(ns kv.Namespace) int { return int(ns.Epoch) } // each handle is of an engine with weights of its own
				write := func(ns kv.Namespace) (client.WriteResult, error) {
					for i, id := range ids {
						fill(m.Bytes()[int64(i)*size:][:size], id, weights(ns), 1)
					}
					return r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: m})
				}
				var all []kv.Namespace
				for range 3 {
					ns, err := r.store.EnsureNamespace(t.Context(), def)
					h.must(err)
					all = append(all, ns)
					for _, old := range all[:len(all)-1] {
						if got, err := write(old); err == nil && got.Stored > 0 {
							t.Errorf("the handle of epoch %d stores %+v", old.Epoch, got)
						}
					}
					if got, err := r.store.Match(t.Context(), client.MatchRequest{Namespace: ns, IDs: ids}); err != nil || got.Blocks != 0 {
						t.Errorf("epoch %d begins with %d blocks, %v", ns.Epoch, got.Blocks, err)
					}
					_, err = write(ns)
					h.must(err)
					for _, handle := range all {
						clear(m.Bytes())
						got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: handle, IDs: ids, Into: m})
						if want := map[bool]int{true: len(ids), false: 0}[handle.Epoch == ns.Epoch]; err != nil || got.Blocks != want {
							t.Errorf("the handle of epoch %d reads %d blocks of epoch %d, %v; want %d", handle.Epoch, got.Blocks, ns.Epoch, err, want)
						}
						for i := range got.Blocks {
							if err := check(m.Bytes()[int64(i)*size:][:size], ids[i], weights(handle), 1); err != nil {
								t.Errorf("the handle of epoch %d: %v", handle.Epoch, err)
							}
						}
					}
					h.admin(func(ctx context.Context, c pb.AdminClient) error {
						_, err := c.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: "m"})
						return err
					})
					if restart {
						h.restart()
					}
				}
				if _, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: all[2], IDs: ids, Into: m}); !errors.Is(err, client.ErrNotFound) {
					t.Errorf("a read with a handle of the deleted namespace: %v; want ErrNotFound", err)
				}
			})
		}
	}
}

// TestEpochsAgree: nodes without etcd have different last epochs of a deleted name. A namespace that is made on all of
// them has one epoch, and so has a node that is added to the list later.
func TestEpochsAgree(t *testing.T) {
	hosts := []*host{newHost(t, nil), newHost(t, nil), newHost(t, nil)}
	def := kv.Namespace{Name: "m", Geometry: geometry, Index: kv.IndexTrie}
	epochs := func() (all []kv.Epoch) {
		for _, h := range hosts {
			ns, err := h.node.Namespace("m")
			h.must(err)
			all = append(all, ns.Epoch)
		}
		return all
	}
	for i, h := range hosts[:2] {
		ns := def
		ns.Epoch = kv.Epoch(4 * (i + 1))
		_, err := h.node.CreateNamespace(t.Context(), ns)
		h.must(err)
		_, err = h.node.DeleteNamespace(t.Context(), "m", false)
		h.must(err)
	}
	for _, salt := range []string{"", "salt"} {
		def.Salt = []byte(salt)
		before := hosts[:2]
		r := newRig(t, nil, before...)
		made, err := r.store.EnsureNamespace(t.Context(), def)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := newRig(t, nil, hosts...).store.EnsureNamespace(t.Context(), def); err != nil || again.Epoch != made.Epoch {
			t.Errorf("with a node that was added: epoch %d, %v; want %d", again.Epoch, err, made.Epoch)
		}
		if all := epochs(); made.Epoch < 9 || all[0] != made.Epoch || all[1] != made.Epoch || all[2] != made.Epoch {
			t.Errorf("salt %q: epochs %d, and the client has %d; want equal ones, at least 9", salt, all, made.Epoch)
		}
		for _, h := range hosts {
			_, err := h.node.DeleteNamespace(t.Context(), "m", false)
			h.must(err)
		}
	}
}
