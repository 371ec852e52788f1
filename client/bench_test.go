package client_test

import (
	"fmt"
	"testing"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/storage"
)

// benchRig is a node that keeps the last reads in its arena, so that the benchmark measures the
// verified transfer from there to the caller's memory.
func benchRig(b *testing.B, g kv.Geometry, blocks int, edit func(*client.Options)) (*rig, kv.Namespace, []kv.BlockID, *client.Memory) {
	h := newLargeHost(b, 8<<20, func(so *storage.Options, o *server.Options) {
		so.LoadBytesMax, so.WriteBytesMax, so.HotBytes = 64<<20, 8<<20, 0
		o.Limits.ReadBytes, o.Limits.WriteBytes = 64<<20, 8<<20
	})
	r := newRig(b, edit, h)
	ns := r.namespace("m", g, kv.IndexTrie)
	ids := chain(ns, blocks, 1)
	mem := r.memory(int64(blocks) * g.PieceBytes(0))
	for i, id := range ids {
		fill(mem.Bytes()[int64(i)*g.PieceBytes(0):][:g.PieceBytes(0)], id, 0, 0)
	}
	if w, err := r.store.Write(b.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: mem}); err != nil || w.Stored != blocks {
		b.Fatalf("write: %v: %s, %v", w.Outcome, w.Detail, err)
	}
	return r, ns, ids, mem
}

// BenchmarkRead reads 8 MiB in blocks of several sizes.
func BenchmarkRead(b *testing.B) {
	for _, layers := range []int{1, 16, 64} {
		g := kv.SingleGroup(layers, 16, 4096) // 64 KiB a layer
		blocks := int(8 << 20 / g.PieceBytes(0))
		for _, task := range []int64{1 << 20, 4 << 20, 8 << 20} {
			b.Run(fmt.Sprintf("block=%dKiB/task=%dMiB", g.PieceBytes(0)>>10, task>>20), func(b *testing.B) {
				r, ns, ids, mem := benchRig(b, g, blocks, func(o *client.Options) { o.ReadTaskBytes = task })
				b.SetBytes(8 << 20)
				b.ReportAllocs()
				for b.Loop() {
					got, err := r.store.Read(b.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: mem})
					if err != nil || got.Blocks != blocks {
						b.Fatalf("read: %v: %s, %v", got.Outcome, got.Cut, err)
					}
				}
			})
		}
	}
}

// BenchmarkWrite stores blocks of 1 MiB over TCP, and over the unix socket of a node on this host.
func BenchmarkWrite(b *testing.B) {
	const block = 1 << 20
	for _, blocks := range []int{1, 4, 16} {
		for _, over := range []string{"tcp", "socket"} {
			b.Run(fmt.Sprintf("%dMiB/%s", blocks, over), func(b *testing.B) {
				h, _ := newLocalHost(b, 32<<20, func(so *storage.Options, o *server.Options) {
					so.WriteBytesMax, o.Limits.WriteBytes = 64<<20, 64<<20
				})
				r := newRig(b, func(o *client.Options) { o.NoLocal = over == "tcp" }, h)
				ns := r.namespace("m", kv.SingleGroup(16, 16, 4096), kv.IndexTrie)
				mem := r.memory(int64(blocks) * block)
				next := uint32(0)
				write := func() {
					next++
					w, err := r.store.Write(b.Context(), client.WriteRequest{Namespace: ns, IDs: chain(ns, blocks, next), From: mem})
					if err != nil || w.Stored != blocks {
						b.Fatalf("write: %v: %s, %v", w.Outcome, w.Detail, err)
					}
				}
				eventually(b, "a write over the unix socket", func() bool {
					write()
					return r.store.Stats().LocalWrites > 0 || over == "tcp"
				})
				b.SetBytes(int64(blocks) * block)
				b.ReportAllocs()
				for b.Loop() {
					write()
				}
			})
		}
	}
}

// BenchmarkCopy reads one block at a time over the unix socket of a node on this host.
func BenchmarkCopy(b *testing.B) {
	for _, size := range []int{64 << 10, 1 << 20, 4 << 20} {
		b.Run(fmt.Sprintf("block=%dKiB", size>>10), func(b *testing.B) {
			const blocks = 16
			h, _ := newLocalHost(b, int64(2*blocks*size), func(so *storage.Options, o *server.Options) {
				so.LoadBytesMax, so.WriteBytesMax, so.HotBytes = 4<<20, 4<<20, 0
				o.Limits.ReadBytes, o.Limits.WriteBytes = 4<<20, 4<<20
			})
			r := newRig(b, nil, h)
			ns := r.namespace("m", kv.SingleGroup(16, 16, size/16/16), kv.IndexFlat)
			mem := r.memory(int64(blocks * size))
			ids := chain(ns, blocks, 1)
			if w, err := r.store.Write(b.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: mem}); err != nil || w.Stored != blocks {
				b.Fatalf("write: %v: %s, %v", w.Outcome, w.Detail, err)
			}
			next := 0
			read := func() {
				next = (next + 1) % blocks
				got, err := r.store.Read(b.Context(), client.ReadRequest{Namespace: ns, IDs: ids[next : next+1], Into: mem, Base: int64(next * size)})
				if err != nil || got.Blocks != 1 {
					b.Fatalf("read: %v: %s, %v", got.Outcome, got.Cut, err)
				}
			}
			eventually(b, "a read over the unix socket", func() bool { read(); return r.store.Stats().LocalReads > 0 })
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				read()
			}
		})
	}
}

// BenchmarkMatch matches a chain of 512 blocks, over gRPC.
func BenchmarkMatch(b *testing.B) {
	r, ns, ids, _ := benchRig(b, kv.SingleGroup(1, 4, 1024), 512, nil)
	b.ReportAllocs()
	for b.Loop() {
		if m, err := r.store.Match(b.Context(), client.MatchRequest{Namespace: ns, IDs: ids}); err != nil || m.Blocks != 512 {
			b.Fatalf("match: %+v, %v", m, err)
		}
	}
}
