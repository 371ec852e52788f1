package blockstore

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/io/posixio"
	"github.com/penstock-kv/penstock/kv"
)

// benchStore is a store on a real file system, full of blocks of one size.
type benchStore struct {
	*Store
	dev    *posixio.Device
	mem    *arena.Arena
	blocks []*block
	layout ondisk.Layout
}

// newBenchStore writes totalBytes of blocks. Benchmarks run in a directory on
// the disk to be measured: $PENSTOCK_BENCH_DIR, else the temporary one.
func newBenchStore(b *testing.B, pieceBytes int64, layers int, totalBytes int64) *benchStore {
	dir, err := os.MkdirTemp(os.Getenv("PENSTOCK_BENCH_DIR"), "blockstore")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	dev, err := posixio.Open(dir, posixio.Options{})
	if err != nil {
		b.Fatal(err)
	}
	mem, err := arena.New(arena.Options{SizeBytes: 128 << 20})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { mem.Close() })
	s := &benchStore{Store: mustOpen(b, Options{CapacityBytes: 2*totalBytes + 64<<20, SegmentBytes: 256 << 20}, dev), dev: dev, mem: mem}
	w := s.buffer(b, newBlock("", pieceBytes, layers).layout(b).SlotBytes())
	for i := range int(totalBytes / pieceBytes) {
		blk := newBlock(fmt.Sprint(i), pieceBytes, layers)
		var after *block
		if i > 0 {
			after = s.blocks[i-1]
		}
		got, err := reserve(b.Context(), s.Store, after, blk)
		if err != nil {
			b.Fatal(err)
		}
		blk.ref = got[0]
		s.layout = blk.layout(b)
		copy(w[s.layout.HeaderBytes():], blk.name)
		payload := w[s.layout.HeaderBytes():][:pieceBytes]
		if err := s.Write(b.Context(), []Write{{Ref: blk.ref, Buf: w, Header: ondisk.SlotHeader{
			SlotKey: blk.key, Class: ondisk.ClassPrefix, LayerSums: ondisk.AppendLayerSums(nil, payload, layers),
		}}}); err != nil {
			b.Fatal(err)
		}
		if err := s.Commit(blk.ref); err != nil {
			b.Fatal(err)
		}
		s.blocks = append(s.blocks, blk)
	}
	if err := s.Sync(b.Context()); err != nil {
		b.Fatal(err)
	}
	return s
}

func (s *benchStore) buffer(b *testing.B, sizeBytes int64) []byte {
	buf, err := s.mem.Alloc(context.Background(), int(sizeBytes))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(buf.Release)
	return buf.Bytes()
}

// BenchmarkRead compares verified reads of the store with the same requests
// given to the device without it. Run with -count and benchstat: the store's
// share of the device's rate is what the design has a goal for.
func BenchmarkRead(b *testing.B) {
	for _, c := range []struct {
		piece  int64
		layers int
		batch  int
	}{{64 << 10, 16, 16}, {1 << 20, 16, 8}, {4 << 20, 64, 4}} {
		b.Run(fmt.Sprintf("%dKiB", c.piece>>10), func(b *testing.B) {
			s := newBenchStore(b, c.piece, c.layers, 512<<20)
			reads := make([]Read, c.batch)
			for i := range reads {
				reads[i].Buf = s.buffer(b, s.layout.SlotBytes())
			}
			next := 0
			pick := func() *block {
				next = (next + 7919) % len(s.blocks)
				return s.blocks[next]
			}
			b.Run("store", func(b *testing.B) {
				b.SetBytes(int64(c.batch) * c.piece)
				for b.Loop() {
					for i := range reads {
						blk := pick()
						reads[i].Ref, reads[i].Want = blk.ref, blk.key
					}
					if err := s.Read(b.Context(), reads); err != nil {
						b.Fatal(err)
					}
					for i := range reads {
						if reads[i].Err != nil {
							b.Fatal(reads[i].Err)
						}
					}
				}
			})
			b.Run("device", func(b *testing.B) {
				b.SetBytes(int64(c.batch) * c.piece)
				batch := make([]blockio.Request, c.batch)
				for b.Loop() {
					for i := range batch {
						g, err := s.segmentOf(pick().ref)
						if err != nil {
							b.Fatal(err)
						}
						batch[i] = blockio.Request{Op: blockio.Read, File: g.file, Offset: g.header.SlotOffset(s.blocks[next].ref.Extent.Slot()), Bufs: [][]byte{reads[i].Buf}}
					}
					if err := s.dev.Do(b.Context(), batch); err != nil {
						b.Fatal(err)
					}
				}
			})
		})
	}
}

// BenchmarkPinUnpin is the cost of a lease on a slot.
func BenchmarkPinUnpin(b *testing.B) {
	s := mustOpen(b, Options{}, memio.New(memio.Options{}))
	blk := newBlock("b", 12000, 3)
	if err := put(b, s, nil, blk); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := s.Pin(blk.ref); err != nil {
			b.Fatal(err)
		}
		if err := s.Unpin(blk.ref); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkReserve is the cost of placing a sequence of 16 in a full store in
// which single sequences come and go.
func BenchmarkReserve(b *testing.B) {
	s := mustOpen(b, Options{CapacityBytes: 8 << 30, SegmentBytes: 256 << 20}, memio.New(memio.Options{}))
	const piece, layers, n = 60 << 10, 16, 16
	var held [][]kv.Ref
	for {
		refs, err := s.Reserve(b.Context(), piece, layers, n, 0, false)
		if err != nil {
			break
		}
		held = append(held, refs)
	}
	i := 0
	for b.Loop() {
		i = (i + 7919) % len(held)
		for _, r := range held[i] {
			if err := s.Abandon(r); err != nil {
				b.Fatal(err)
			}
		}
		var err error
		if held[i], err = s.Reserve(b.Context(), piece, layers, n, 0, false); err != nil {
			b.Fatal(err)
		}
	}
}
