package client_test

import (
	"context"
	"errors"
	"sync"
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
			var engines sync.WaitGroup
			for g, of := range geometries {
				for range 2 {
					engines.Go(func() {
						ns := kv.Namespace{Name: "m", Geometry: of, Index: index, Epoch: 1}
						m := r.memory(8 * size)
						defer m.Close(context.Background())
						for ctx.Err() == nil {
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
					_, err := c.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(kv.Namespace{Name: "m", Geometry: geometries[turn%2], Index: index})})
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
