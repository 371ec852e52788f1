package blockstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/io/posixio"
	"github.com/penstock-kv/penstock/kv"
)

// TestConcurrent runs all operations at once over two volumes: no read is wrong, no slot has two
// owners, and no slot leaks.
func TestConcurrent(t *testing.T) {
	s := mustOpen(t, Options{CapacityBytes: 2 << 20, SegmentBytes: 64 << 10, StripeBytes: 32 << 10, Prewrite: true},
		memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"}))
	shared := &shelf{live: make(map[string]*block)}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() { worker(t, s, shared, uint64(i)) })
	}
	done := make(chan struct{})
	var side sync.WaitGroup
	side.Go(func() { // operations that run concurrently with reads and writes
		for {
			select {
			case <-done:
				return
			default:
			}
			if _, err := s.Scrub(t.Context(), ScrubOptions{Report: func(ref kv.Ref, err error) { t.Errorf("scrub: %v", err) }}); err != nil {
				t.Errorf("scrub: %v", err)
			}
			if _, err := s.Scan(t.Context(), ScanOptions{}, func(kv.Ref, *ondisk.SlotHeader) error { return nil }); err != nil {
				t.Errorf("scan: %v", err)
			}
			if err := errors.Join(s.Sync(t.Context()), s.SetCatalogue(t.Context(), []byte("x"))); err != nil {
				t.Error(err)
			}
			_ = s.Stats()
		}
	})
	wg.Wait()
	close(done)
	side.Wait()
	for _, f := range s.Check(slices.Values(refs(shared.live))) {
		t.Error(f)
	}
	st := s.Stats()
	if st.Slots.ReservedBytes != 0 || st.Slots.CondemnedBytes != 0 || st.FileBytes > st.CapacityBytes {
		t.Errorf("left behind:\n%v", st)
	}
	if st.Counters.ReadCorrupt != 0 {
		t.Errorf("%d corrupt reads", st.Counters.ReadCorrupt)
	}
}

// shelf has the blocks that the workers share.
type shelf struct {
	mu   sync.Mutex
	live map[string]*block
}

// pinned returns any block, pinned.
func (h *shelf) pinned(s *Store) *block {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, b := range h.live {
		if s.Pin(b.ref) == nil {
			return b
		}
	}
	return nil
}

// drop takes any block off the shelf and frees it, even if others have pinned it.
func (h *shelf) drop(s *Store) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for name, b := range h.live {
		delete(h.live, name)
		return s.Free(b.ref)
	}
	return nil
}

func worker(t *testing.T, s *Store, h *shelf, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 3))
	for i := range 150 {
		switch p := rng.IntN(10); {
		case p < 4:
			size := storySizes[rng.IntN(len(storySizes))]
			var blocks []*block
			for j := range 1 + rng.IntN(6) {
				blocks = append(blocks, newBlock(fmt.Sprintf("%d.%d.%d", seed, i, j), size.piece, size.layers))
			}
			err := put(t, s, nil, blocks...)
			if errors.Is(err, ErrFull) {
				if err := h.drop(s); err != nil {
					t.Error(err)
				}
				continue
			}
			if err != nil {
				t.Error(err)
				return
			}
			h.mu.Lock()
			for _, b := range blocks {
				h.live[b.name] = b
			}
			h.mu.Unlock()
		case p < 6:
			if err := h.drop(s); err != nil {
				t.Error(err)
			}
		default:
			b := h.pinned(s)
			if b == nil {
				continue
			}
			// The block is pinned, so it stays exact even if another worker frees it.
			if err := get(t, s, b, 0, rng.IntN(2)); err != nil {
				t.Errorf("read of a pinned block: %v", err)
			}
			if err := s.Unpin(b.ref); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestSequenceRunsOut: the boot counter is raised when a start has assigned all its generations,
// and the store stops when there are no more boot counters.
func TestSequenceRunsOut(t *testing.T) {
	d := memio.New(memio.Options{})
	s := mustOpen(t, Options{}, d)
	b := newBlock("b", 3000, 3)
	if err := put(t, s, nil, b); err != nil {
		t.Fatal(err)
	}
	s.generations.next = 1 << sequenceBits
	c := newBlock("c", 3000, 3)
	if err := put(t, s, nil, c); err != nil {
		t.Fatal(err)
	}
	if c.ref.Generation <= b.ref.Generation || c.ref.Generation>>sequenceBits != 2 {
		t.Errorf("generation %d after %d; want one of start 2", c.ref.Generation, b.ref.Generation)
	}
	if err := errors.Join(get(t, s, b, 0, 0), get(t, s, c, 0, 0)); err != nil {
		t.Error(err)
	}
	sb, err := readSuperblock(t.Context(), d.Reopen(), ondisk.SuperblockName)
	if err != nil || sb.Boot != 2 {
		t.Errorf("boot counter on disk is %d, %v; want 2", sb.Boot, err)
	}
	s.volumes[0].superblock.Boot = ondisk.MaxBoot
	s.generations.boot, s.generations.next = ondisk.MaxBoot, 1<<sequenceBits
	if err := put(t, s, nil, newBlock("d", 3000, 3)); !errors.Is(err, ErrFloor) {
		t.Errorf("put without generations: %v; want ErrFloor", err)
	}
	if st := s.Stats().Slots; st.ReservedBytes != 0 {
		t.Errorf("%d bytes stay reserved", st.ReservedBytes)
	}
}

func TestAdopt(t *testing.T) {
	d := memio.New(memio.Options{})
	s, err := open(t, Options{SegmentBytes: 64 << 10}, d)
	if err != nil {
		t.Fatal(err)
	}
	b := newBlock("b", 3000, 3)
	if err := errors.Join(s.Ready(), put(t, s, nil, b), s.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	s, err = open(t, Options{}, d.Reopen())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(context.Background())
	ref := b.ref
	for _, c := range []struct {
		name   string
		ref    kv.Ref
		piece  int64
		layers int
		want   error
	}{
		{"another volume", kv.Ref{Extent: kv.MakeExtent(1, 0, 0), Generation: ref.Generation}, 3000, 3, ErrStale},
		{"another segment", kv.Ref{Extent: kv.MakeExtent(0, 9, 0), Generation: ref.Generation}, 3000, 3, ErrStale},
		{"a slot beyond the end", kv.Ref{Extent: kv.MakeExtent(0, 0, 7), Generation: ref.Generation}, 3000, 3, ErrStale},
		{"another size", ref, 9000, 3, ErrStale},
		{"an impossible size", ref, 3001, 3, ErrStale},
		{"from before the cut", kv.Ref{Extent: ref.Extent, Generation: 1}, 3000, 3, ErrStale},
		{"from this start", kv.Ref{Extent: ref.Extent, Generation: 2<<sequenceBits | 1}, 3000, 3, ErrStale},
		{"the block", ref, 3000, 3, nil},
		{"a second owner", ref, 3000, 3, ErrState},
	} {
		if err := s.Adopt(c.ref, c.piece, c.layers); !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%s: %v; want %v", c.name, err, c.want)
		}
	}
	if _, err := reserve(t.Context(), s, nil, b); !errors.Is(err, ErrState) {
		t.Errorf("Reserve before Ready: %v", err)
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	if err := s.Ready(); !errors.Is(err, ErrState) {
		t.Errorf("Ready twice: %v", err)
	}
	if err := s.Adopt(ref, 3000, 3); !errors.Is(err, ErrState) {
		t.Errorf("Adopt after Ready: %v", err)
	}
	if err := get(t, s, b, 0, 0); err != nil {
		t.Error(err)
	}
}

// TestCheckFindings produces each finding of Check.
func TestCheckFindings(t *testing.T) {
	s := mustOpen(t, Options{SegmentBytes: 64 << 10}, memio.New(memio.Options{}))
	a, b, c := newBlock("a", 3000, 3), newBlock("b", 3000, 3), newBlock("c", 3000, 3)
	if err := put(t, s, nil, a, b, c); err != nil {
		t.Fatal(err)
	}
	if err := s.Free(c.ref); err != nil {
		t.Fatal(err)
	}
	got := s.Check(slices.Values([]kv.Ref{a.ref, a.ref, c.ref,
		{Extent: kv.MakeExtent(0, 5, 0), Generation: 1}, {Extent: kv.MakeExtent(0, 0, 50), Generation: 1}}))
	var text strings.Builder
	for _, f := range got {
		fmt.Fprintln(&text, f.Detail)
	}
	want := `referenced twice
referenced, but the slot is free at generation 4294967300
referenced, but there is no such segment
referenced, but the segment has 7 slots
live, but not referenced
`
	if text.String() != want {
		t.Errorf("findings:\n%swant:\n%s", text.String(), want)
	}
	if f := got[len(got)-1]; f.Ref != b.ref || f.Invariant != "one-owner" {
		t.Errorf("the last finding is %v", f)
	}
}

func TestMaxReaders(t *testing.T) {
	s := mustOpen(t, Options{}, memio.New(memio.Options{}))
	b := newBlock("b", 3000, 3)
	if err := put(t, s, nil, b); err != nil {
		t.Fatal(err)
	}
	for range MaxReaders {
		if err := s.Pin(b.ref); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Pin(b.ref); !errors.Is(err, ErrBusy) {
		t.Errorf("one reader too many: %v; want ErrBusy", err)
	}
	if err := get(t, s, b, 0, 0); !errors.Is(err, ErrBusy) {
		t.Errorf("read with one reader too many: %v; want ErrBusy", err)
	}
	if err := s.Free(b.ref); err != nil {
		t.Fatal(err)
	}
	for range MaxReaders {
		if err := s.Unpin(b.ref); err != nil {
			t.Fatal(err)
		}
	}
	if st := s.Stats().Slots; st.UsedBytes() != 0 {
		t.Errorf("%d bytes used after the last reader left", st.UsedBytes())
	}
}

// TestReadRefuses: malformed reads are errors of the caller, and change nothing.
func TestReadRefuses(t *testing.T) {
	s := mustOpen(t, Options{}, memio.New(memio.Options{}))
	b := newBlock("b", 12000, 3)
	if err := put(t, s, nil, b); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		spoil func(r *Read)
		want  error
	}{
		{"short buffer", func(r *Read) { r.Buf = r.Buf[:4096] }, ErrState},
		{"negative layers", func(r *Read) { r.Layers = -1 }, ErrState},
		{"layers beyond the end", func(r *Read) { r.FirstLayer, r.Layers = 1, 3 }, ErrState},
		{"huge first layer", func(r *Read) { r.FirstLayer, r.Layers = 1<<62, 1 }, ErrState},
		{"a first layer alone", func(r *Read) { r.FirstLayer = 1 }, ErrState},
		{"impossible piece", func(r *Read) { r.Want.PayloadBytes = 1 }, ondisk.ErrLayout},
		{"another slot size", func(r *Read) { r.Want.PayloadBytes = 30000; r.Buf = aligned(4096 + 32768) }, ErrStale},
		{"another namespace", func(r *Read) { r.Want.Namespace++ }, ErrCorrupt},
		{"another epoch", func(r *Read) { r.Want.Epoch++ }, ErrCorrupt},
		{"another block", func(r *Read) { r.Want.ID[0]++ }, ErrCorrupt},
		{"another group", func(r *Read) { r.Want.Group++ }, ErrCorrupt},
		{"another geometry", func(r *Read) { r.Want.Geometry[0]++ }, ErrCorrupt},
		{"another payload in the same slot", func(r *Read) { r.Want.PayloadBytes = 11997 }, ErrCorrupt},
		{"other layers", func(r *Read) { r.Want.Layers = 4 }, ErrCorrupt},
		{"another generation", func(r *Read) { r.Ref.Generation++ }, ErrStale},
		{"no generation", func(r *Read) { r.Ref.Generation = 0 }, ErrStale},
		{"another volume", func(r *Read) { r.Ref.Extent = kv.MakeExtent(200, 0, 0) }, ErrStale},
	} {
		r := b.read(t, 0, 0)
		c.spoil(&r)
		rs := []Read{r}
		if err := s.Read(t.Context(), rs); err != nil || !errors.Is(rs[0].Err, c.want) {
			t.Errorf("%s: %v, %v; want %v", c.name, err, rs[0].Err, c.want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	rs := []Read{b.read(t, 0, 0)}
	if err := s.Read(ctx, rs); !errors.Is(err, context.Canceled) || !errors.Is(rs[0].Err, context.Canceled) {
		t.Errorf("canceled: %v, %v", err, rs[0].Err)
	}
	if err := s.Free(b.ref); err != nil {
		t.Fatal(err)
	}
	if st := s.Stats().Slots; st.UsedBytes() != 0 {
		t.Errorf("a refused read still holds its pin: %v", s.Stats())
	}
}

// TestWriteRefuses: malformed writes are errors of the caller.
func TestWriteRefuses(t *testing.T) {
	s := mustOpen(t, Options{}, memio.New(memio.Options{}))
	for name, spoil := range map[string]func(w *Write){
		"short buffer": func(w *Write) { w.Buf = w.Buf[:4096] },
		"long buffer":  func(w *Write) { w.Buf = aligned(int64(len(w.Buf)) + 4096) },
		"no namespace": func(w *Write) { w.Header.Namespace = 0 },
		"too few sums": func(w *Write) { w.Header.LayerSums = w.Header.LayerSums[:1] },
		"another size": func(w *Write) {
			w.Header.PayloadBytes, w.Buf = 30000, aligned(4096+32768)
			w.Header.LayerSums = ondisk.AppendLayerSums(nil, w.Buf[4096:][:30000], 3)
		},
		"not reserved":  func(w *Write) { w.Ref.Generation += 99 },
		"no such place": func(w *Write) { w.Ref.Extent = kv.MakeExtent(3, 3, 3) },
		"misaligned": func(w *Write) {
			b := aligned(int64(len(w.Buf)) + 4096)
			w.Buf = b[8 : 8+len(w.Buf)]
			w.Header.LayerSums = ondisk.AppendLayerSums(nil, w.Buf[4096:][:12000], 3)
		},
	} {
		b := newBlock("b", 12000, 3)
		got, err := reserve(t.Context(), s, nil, b)
		if err != nil {
			t.Fatal(err)
		}
		b.ref = got[0]
		b.fill()
		w := b.write(t)
		spoil(&w)
		ws := []Write{w}
		if err := s.Write(t.Context(), ws); err == nil || ws[0].Err == nil {
			t.Errorf("%s: accepted", name)
		}
		if err := s.Commit(b.ref); !errors.Is(err, ErrState) {
			t.Errorf("%s: commit of a slot whose write failed: %v (data-before-index)", name, err)
		}
		if err := s.Abandon(b.ref); err != nil {
			t.Errorf("%s: abandon: %v", name, err)
		}
	}
	if st := s.Stats().Slots; st.UsedBytes() != 0 {
		t.Errorf("slots stay reserved: %v", s.Stats())
	}
}

// TestClosed: every call after Close returns ErrClosed. Close may be called twice, and
// concurrently.
func TestClosed(t *testing.T) {
	d := memio.New(memio.Options{})
	s, err := open(t, Options{}, d)
	if err != nil {
		t.Fatal(err)
	}
	b := newBlock("b", 3000, 3)
	if err := errors.Join(s.Ready(), put(t, s, nil, b)); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := s.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	_, reserveErr := reserve(t.Context(), s, nil, b)
	_, scanErr := s.Scan(t.Context(), ScanOptions{}, nil)
	_, scrubErr := s.Scrub(t.Context(), ScrubOptions{})
	for name, err := range map[string]error{
		"Reserve": reserveErr, "Write": s.Write(t.Context(), []Write{b.write(t)}), "Read": get(t, s, b, 0, 0), "Sync": s.Sync(t.Context()),
		"SetCatalogue": s.SetCatalogue(t.Context(), nil), "Scan": scanErr, "Scrub": scrubErr, "Ready": s.Ready(),
	} {
		if !errors.Is(err, ErrClosed) {
			t.Errorf("%s after Close: %v; want ErrClosed", name, err)
		}
	}
	if _, err := d.Reopen().List(); err != nil {
		t.Error(err)
	}
	r := d.Reopen()
	defer r.Close()
	if err := r.Lock("next"); err != nil {
		t.Errorf("Close did not release the lock: %v", err)
	}
}

// TestManyLayers: slots with headers of more than one page are written, read in ranges, scanned and
// scrubbed.
func TestManyLayers(t *testing.T) {
	d := memio.New(memio.Options{})
	s := mustOpen(t, Options{CapacityBytes: 64 << 20, SegmentBytes: 4 << 20}, d)
	b := newBlock("b", 2000*100, 2000) // small layers, 5 pages of header
	c := newBlock("c", 64<<10, 16)
	if err := errors.Join(put(t, s, nil, b), put(t, s, nil, c)); err != nil {
		t.Fatal(err)
	}
	for _, r := range [][2]int{{0, 0}, {0, 1}, {0, 2000}, {1999, 1}, {777, 100}} {
		if err := get(t, s, b, r[0], r[1]); err != nil {
			t.Errorf("layers %d+%d: %v", r[0], r[1], err)
		}
	}
	for _, verify := range []bool{false, true} {
		var found []kv.Ref
		if _, err := s.Scan(t.Context(), ScanOptions{Verify: verify}, func(ref kv.Ref, h *ondisk.SlotHeader) error {
			found = append(found, ref)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(found, []kv.Ref{b.ref, c.ref}) {
			t.Errorf("scan with verify %v found %v; want %v, %v", verify, found, b.ref, c.ref)
		}
	}
	stop := errors.New("enough")
	if _, err := s.Scan(t.Context(), ScanOptions{}, func(kv.Ref, *ondisk.SlotHeader) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("scan ended by its caller: %v", err)
	}
	if res, err := s.Scrub(t.Context(), ScrubOptions{}); err != nil || res.Slots != 2 || res.Corrupt != 0 {
		t.Errorf("scrub: %+v, %v", res, err)
	}
}

// TestOnDisk runs the same operations on a real file system.
func TestOnDisk(t *testing.T) {
	dir := t.TempDir()
	dev := func() blockio.Device {
		d, err := posixio.Open(dir, posixio.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	opts := Options{CapacityBytes: 64 << 20, SegmentBytes: 8 << 20, Prewrite: true, Devices: []blockio.Device{dev()}, Identity: "first"}
	s, err := Open(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	second := dev()
	defer second.Close()
	var owned *blockio.OwnedError
	if _, err := Open(t.Context(), Options{CapacityBytes: 64 << 20, Devices: []blockio.Device{second}}); !errors.As(err, &owned) || !strings.Contains(err.Error(), "first") {
		t.Errorf("a second store on one directory: %v; want one that names the owner", err)
	}
	var blocks []*block
	for i := range 40 {
		blocks = append(blocks, newBlock(fmt.Sprint(i), 61*7000, 61))
	}
	if err := errors.Join(s.Ready(), put(t, s, nil, blocks[:20]...), put(t, s, blocks[19], blocks[20:]...), s.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	opts.Devices = []blockio.Device{dev()}
	if s, err = Open(t.Context(), opts); err != nil {
		t.Fatal(err)
	}
	defer s.Close(context.Background())
	found := 0
	if _, err := s.Scan(t.Context(), ScanOptions{}, func(ref kv.Ref, h *ondisk.SlotHeader) error {
		found++
		return s.Adopt(ref, h.PayloadBytes, h.Layers)
	}); err != nil || found != len(blocks) {
		t.Fatalf("the scan found %d of %d blocks: %v", found, len(blocks), err)
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	var rs []Read
	for _, b := range blocks {
		rs = append(rs, b.read(t, 0, 0))
	}
	if err := s.Read(t.Context(), rs); err != nil {
		t.Fatal(err)
	}
	for i, b := range blocks {
		got, want := b.got(t, &rs[i])
		if rs[i].Err != nil || !slices.Equal(got, want) {
			t.Errorf("block %s: %v", b.name, rs[i].Err)
		}
		if err := get(t, s, b, 30, 7); err != nil {
			t.Errorf("layers of %s: %v", b.name, err)
		}
	}
}

// TestReadAllocatesNothing: a read makes no garbage. A submission that is not reused, an escaping
// header, or an unused error would make some.
func TestReadAllocatesNothing(t *testing.T) {
	if invariants.Enabled || testkit.Race {
		t.Skip("the claim is about builds without the tag invariants and without -race, which drops pooled objects on purpose")
	}
	s := mustOpen(t, Options{}, memio.New(memio.Options{}))
	b := newBlock("b", 12000, 3)
	if err := put(t, s, nil, b); err != nil {
		t.Fatal(err)
	}
	for _, layers := range []int{0, 1, 2} {
		rs := []Read{b.read(t, layers/2, layers)}
		rs[0].LayerSums = make([]uint64, 0, 3)
		if n := testing.AllocsPerRun(200, func() {
			if err := s.Read(t.Context(), rs); err != nil || rs[0].Err != nil {
				t.Fatal(err, rs[0].Err)
			}
		}); n != 0 {
			t.Errorf("%v allocations in a read of %d layers; want 0", n, layers)
		}
	}
}

func TestDurabilityText(t *testing.T) {
	for _, d := range []Durability{DurabilityAsync, DurabilityBatch, DurabilitySync} {
		var back Durability
		text, err := d.MarshalText()
		if err != nil || back.UnmarshalText(text) != nil || back != d {
			t.Errorf("%v became %q, then %v", d, text, back)
		}
	}
	if _, err := ParseDurability("always"); err == nil || !strings.Contains(err.Error(), `"always"`) {
		t.Errorf("parse: %v; want an error that quotes the word", err)
	}
}

func TestOptionsRefused(t *testing.T) {
	d := memio.New(memio.Options{})
	defer d.Close()
	good := Options{Devices: []blockio.Device{d}, CapacityBytes: 1 << 20}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*Options){
		"no devices":       func(o *Options) { o.Devices = nil },
		"nil device":       func(o *Options) { o.Devices = []blockio.Device{nil} },
		"too many devices": func(o *Options) { o.Devices = make([]blockio.Device, kv.MaxVolumes+1) },
		"no capacity":      func(o *Options) { o.CapacityBytes = 0 },
		"odd segment":      func(o *Options) { o.SegmentBytes = 10000 },
		"tiny segment":     func(o *Options) { o.SegmentBytes = 4096 },
		"huge segment":     func(o *Options) { o.SegmentBytes = 1 << 50 },
		"odd catalogue":    func(o *Options) { o.CatalogueBytes = 1 },
		"negative floor":   func(o *Options) { o.FreeFloorBytes = -1 },
		"negative stripe":  func(o *Options) { o.StripeBytes = -1 },
	} {
		o := good
		spoil(&o)
		if _, err := Open(t.Context(), o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
