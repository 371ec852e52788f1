package blockstore

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
)

// naiveOwner is the simplest model of a store's space: the owner of each page of each file.
type naiveOwner map[naivePage]kv.Generation

type naivePage struct {
	volume, segment uint32
	page            int64
}

func (n naiveOwner) pages(s *Store, ref kv.Ref, f func(naivePage)) {
	g, err := s.segmentOf(ref)
	if err != nil {
		panic(err)
	}
	from := g.header.SlotOffset(ref.Extent.Slot())
	if from+g.header.SlotBytes > g.file.Size() {
		panic("a slot beyond the end of its file")
	}
	for p := from / 4096; p < (from+g.header.SlotBytes)/4096; p++ {
		f(naivePage{ref.Extent.Volume(), ref.Extent.Segment(), p})
	}
}

// FuzzReserve reserves and frees sequences of several slot sizes, in segments that are cut
// repeatedly. No page has two owners, a freed page can be reserved again, generations increase, and
// the files stay within the capacity. Each pair of bytes is one call.
func FuzzReserve(f *testing.F) {
	f.Add([]byte{0, 5, 1, 7, 2, 3, 4, 0, 0, 30})
	f.Add([]byte{0, 200, 4, 0, 1, 200, 4, 0, 2, 200, 4, 0, 0, 1})
	f.Add([]byte{3, 9, 3, 9, 5, 1, 3, 4, 5, 0, 1, 1, 6, 0, 6, 1, 0, 90, 6, 2})
	sizes := []int64{3000, 4096, 20000, 60000}
	f.Fuzz(func(t *testing.T, ops []byte) {
		opts := Options{CapacityBytes: 900_000, SegmentBytes: 128 << 10, CatalogueBytes: 4096, StripeBytes: 32 << 10}
		opts.Devices = []blockio.Device{memio.New(memio.Options{}), memio.New(memio.Options{})}
		s, err := Open(t.Context(), opts)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close(context.Background())
		if err := s.Ready(); err != nil {
			t.Fatal(err)
		}
		owner := make(naiveOwner)
		var held []kv.Ref
		var newest kv.Generation
		for i := 0; i+1 < len(ops); i += 2 {
			arg := int(ops[i+1])
			switch op := ops[i] % 7; {
			case op < 4:
				var after kv.Extent
				if len(held) > 0 {
					after = held[arg%len(held)].Extent
				}
				refs, err := s.Reserve(t.Context(), sizes[op], 1, arg%40+1, after, len(held) > 0)
				if errors.Is(err, ErrFull) {
					continue
				}
				if err != nil || len(refs) != arg%40+1 {
					t.Fatalf("reserve: %d slots, %v", len(refs), err)
				}
				for _, r := range refs {
					if r.Generation <= newest {
						t.Fatalf("generation %d after %d", r.Generation, newest)
					}
					newest = r.Generation
					owner.pages(s, r, func(p naivePage) {
						if g := owner[p]; g != 0 {
							t.Fatalf("%v and generation %d both own page %+v (one-owner)", r, g, p)
						}
						owner[p] = r.Generation
					})
				}
				held = append(held, refs...)
			case op < 6:
				for n := 0; n < 1+int(op-4)*20 && len(held) > 0; n++ {
					i := (arg + n*13) % len(held)
					r := held[i]
					owner.pages(s, r, func(p naivePage) { delete(owner, p) })
					if err := s.Abandon(r); err != nil {
						t.Fatal(err)
					}
					held = slices.Delete(held, i, i+1)
				}
			default:
				if e := s.Emptiable(sizes[arg%4], 1); len(e) > 0 {
					s.DrainSegment(e[0].First)
				}
			}
			for _, v := range s.volumes {
				checkSpace(t, v)
			}
			if st := s.Stats(); st.FileBytes > st.CapacityBytes {
				t.Fatalf("files of %d bytes, capacity %d (bounded)", st.FileBytes, st.CapacityBytes)
			}
		}
		var used int64
		for range owner {
			used += 4096
		}
		if got := s.Stats().Slots.ReservedBytes; got != used {
			t.Fatalf("%d bytes reserved; the model has %d", got, used)
		}
	})
}

// BenchmarkAdopt measures the store's part of a start, in ns per index entry.
func BenchmarkAdopt(b *testing.B) {
	s, err := open(b, Options{CapacityBytes: 64 << 30, SegmentBytes: 1 << 30}, memio.New(memio.Options{}))
	if err != nil {
		b.Fatal(err)
	}
	defer func() { s.Close(context.Background()) }()
	if err := s.Ready(); err != nil {
		b.Fatal(err)
	}
	const piece = 60 << 10
	var held []kv.Ref
	for {
		refs, err := s.Reserve(b.Context(), piece, 16, 1024, 0, false)
		if err != nil {
			break
		}
		held = append(held, refs...)
	}
	dev := s.volumes[0].dev.Device.(*memio.Device)
	b.ResetTimer()
	for done := 0; done < b.N; done += len(held) {
		b.StopTimer()
		if err := s.Close(b.Context()); err != nil {
			b.Fatal(err)
		}
		dev = dev.Reopen()
		if s, err = open(b, Options{CapacityBytes: 64 << 30}, dev); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		for _, r := range held[:min(len(held), b.N-done)] {
			if err := s.Adopt(r, piece, 16); err != nil {
				b.Fatal(err)
			}
		}
	}
}
