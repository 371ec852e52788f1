package blockstore

import (
	"errors"
	"runtime"
	"testing"

	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
)

// spacious returns a store of one volume with the given number of segments of 512 slots of 8 KiB,
// all of them live.
func spacious(tb testing.TB, segments int) (*Store, []kv.Ref) {
	const slots, slotBytes = 512, 8 << 10
	s, err := open(tb, Options{
		CapacityBytes: int64(segments)*(slots*slotBytes+4096) + 64<<10, SegmentBytes: slots*slotBytes + 4096, CatalogueBytes: 4096,
	}, memio.New(memio.Options{}))
	if err != nil {
		tb.Fatal(err)
	}
	if err := s.Ready(); err != nil {
		tb.Fatal(err)
	}
	var refs []kv.Ref
	for {
		got, err := s.Reserve(tb.Context(), 4096, 1, slots, 0, false)
		if err != nil {
			if !errors.Is(err, ErrFull) {
				tb.Fatal(err)
			}
			break
		}
		refs = append(refs, got...)
	}
	if len(refs) != segments*slots {
		tb.Fatalf("%d slots in %d segments", len(refs), segments)
	}
	for _, r := range refs {
		g, err := s.segmentOf(r)
		if err != nil {
			tb.Fatal(err)
		}
		g.written(r)
		if err := s.Commit(r); err != nil {
			tb.Fatal(err)
		}
	}
	return s, refs
}

// BenchmarkSpace measures one Reserve in a store of 4 M live slots in 8192 segments: when no slot
// is free, and when one was just freed.
func BenchmarkSpace(b *testing.B) {
	s, refs := spacious(b, 8192)
	defer s.Close(b.Context())
	b.Run("full", func(b *testing.B) {
		for b.Loop() {
			if _, err := s.Reserve(b.Context(), 4096, 1, 1, 0, false); !errors.Is(err, ErrFull) {
				b.Fatal(err)
			}
		}
	})
	b.Run("one-free", func(b *testing.B) {
		if err := s.Free(refs[len(refs)/2]); err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			got, err := s.Reserve(b.Context(), 4096, 1, 1, 0, false)
			if err != nil {
				b.Fatal(err)
			}
			if err := s.Abandon(got[0]); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("scrub-next", func(b *testing.B) {
		at := kv.Extent(0)
		for b.Loop() {
			ref, _, ok := s.nextLive(at)
			if at = ref.Extent + 1; !ok {
				at = 0
			}
		}
	})
}

// TestSpaceSteps counts the heap entries that a Reserve reads in volumes of 16 and of 2048 full
// segments, when it fails and when one slot is free. The count grows with the logarithm of the
// number of segments. A scrub reads each slot once.
func TestSpaceSteps(t *testing.T) {
	steps := func(segments int) (full, one uint64) {
		s, refs := spacious(t, segments)
		defer s.Close(t.Context())
		v := s.volumes[0]
		count := func() uint64 { return v.space.steps + v.space.segment(refs[len(refs)/2].Extent.Segment()).free.Steps() }
		before := count()
		if _, err := s.Reserve(t.Context(), 4096, 1, 1, 0, false); !errors.Is(err, ErrFull) {
			t.Fatal(err)
		}
		full = count() - before
		// A slot is freed in every second segment, so that the heap has entries.
		for i := 0; i < len(refs); i += 1024 {
			if err := s.Free(refs[i]); err != nil {
				t.Fatal(err)
			}
		}
		before = count()
		got, err := s.Reserve(t.Context(), 4096, 1, 1, 0, false)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Abandon(got[0]); err != nil {
			t.Fatal(err)
		}
		one = count() - before
		var at kv.Extent
		for {
			ref, _, ok := s.nextLive(at)
			if !ok {
				break
			}
			at = ref.Extent + 1
		}
		var looks uint64
		for _, g := range v.space.sorted() {
			looks += g.looks
		}
		if looks > uint64(len(refs)) {
			t.Errorf("%d segments: a scrub visits %d slots of %d", segments, looks, len(refs))
		}
		return full, one
	}
	fullFew, oneFew := steps(16)
	fullMany, oneMany := steps(2048)
	// 2048 is 16 doubled seven times, and a heap operation compares two entries per level.
	if fullMany > fullFew || oneMany > oneFew+4*7 {
		t.Errorf("a Reserve that fails takes %d steps at 16 segments and %d at 2048, one that succeeds %d and %d", fullFew, fullMany, oneFew, oneMany)
	}
}

// checkSpace compares the counts and heaps of a volume's space with the state of every
// slot.
func checkSpace(t *testing.T, v *volume) {
	t.Helper()
	s := &v.space
	s.mu.Lock()
	defer s.mu.Unlock()
	type summary struct {
		segments   int
		counts     slotCounts
		free       int64
		open, last uint32
		empty      int
	}
	want := map[int64]summary{}
	var uses [useBad + 1]int
	bytes := v.metaBytes
	for _, g := range s.sorted() {
		uses[g.use]++
		bytes += g.sizeBytes
		if blank := g.use == useBlank || g.use == usePreparing; blank != (s.blank[g.number] == g) || g.retiring != (s.surplus[g.number] == g) {
			t.Fatalf("segment %d of use %d, retiring %v, is in the wrong sets", g.number, g.use, g.retiring)
		}
		if g.use != useCut {
			continue
		}
		c := want[g.header.SlotBytes]
		c.segments++
		run, longest, free := uint32(0), uint32(0), int64(0)
		for _, w := range g.words {
			*c.counts.of(w.state())++
			if run++; w.state() != slotFree {
				run = 0
			} else {
				free++
			}
			longest = max(longest, run)
		}
		switch {
		case g.retiring:
		case g.draining:
			c.free, c.last = c.free+free, max(c.last, longest)
		default:
			c.free, c.open = c.free+free, max(c.open, longest)
		}
		if !g.retiring && free == int64(g.header.Slots) {
			c.empty++
		}
		want[g.header.SlotBytes] = c
	}
	if uses != s.uses || bytes != s.fileBytes {
		t.Fatalf("%v segments of each use and %d bytes of files; want %v and %d", s.uses, s.fileBytes, uses, bytes)
	}
	for size, c := range s.classes {
		got := summary{segments: c.segments, counts: c.counts, free: c.free, empty: len(c.empty.list)}
		if g := c.open.first(); g != nil {
			got.open = g.free.Longest()
		}
		if g := c.last.first(); g != nil {
			got.last = g.free.Longest()
		}
		if got != want[size] {
			t.Fatalf("slots of %d bytes: %+v; want %+v", size, got, want[size])
		}
		delete(want, size)
	}
	if len(want) > 0 {
		t.Fatalf("the space lacks the classes %+v", want)
	}
}

// TestTableBytes compares TableBytes with the growth of the Go heap when a store is
// opened, for segments of few and of many slots.
func TestTableBytes(t *testing.T) {
	for _, c := range []struct{ segments, slots int }{{4096, 7}, {4096, 100}, {1024, 512}, {512, 4096}, {16, 131071}, {5, 300001}} {
		const slotBytes = 8 << 10
		segmentBytes := int64(c.slots)*slotBytes + 4096
		opts := Options{CapacityBytes: int64(c.segments)*segmentBytes + 64<<10, SegmentBytes: segmentBytes, CatalogueBytes: 4096}
		dev := memio.New(memio.Options{})
		s, err := open(t, opts, dev)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Ready(); err != nil {
			t.Fatal(err)
		}
		for range c.segments {
			if _, err := s.Reserve(t.Context(), 4096, 1, c.slots, 0, false); err != nil {
				t.Fatal(err)
			}
		}
		says := s.Stats().TableBytes
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		s, dev = nil, dev.Reopen()
		before := heapBytesNow()
		if s, err = open(t, opts, dev); err != nil {
			t.Fatal(err)
		}
		if err := s.Ready(); err != nil {
			t.Fatal(err)
		}
		grown := heapBytesNow() - before
		if again := s.Stats().TableBytes; again != says {
			t.Errorf("%d segments of %d slots: TableBytes is %d, and %d when opened again", c.segments, c.slots, says, again)
		}
		const fixed = 256 << 10 // heap of a store without segments
		t.Logf("%d segments of %d slots: %d B of heap, %.2f B a slot; TableBytes %d", c.segments, c.slots, grown, float64(grown)/float64(c.segments*c.slots), says)
		if grown > says+fixed || grown < says/2 {
			t.Errorf("%d segments of %d slots: the heap grew by %d B, TableBytes is %d", c.segments, c.slots, grown, says)
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// heapBytesNow returns the size of the reachable heap.
func heapBytesNow() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // a sync.Pool keeps its objects through one collection
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
