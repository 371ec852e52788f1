package blockstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/zeebo/xxh3"
)

func rules(t testing.TB, text string) *faultio.Rules {
	t.Helper()
	r, err := faultio.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// faulty is a store on a device that fails by rules.
type faulty struct {
	*Store
	dev *faultio.Device
}

func openFaulty(t testing.TB, opts Options) *faulty {
	d := faultio.Wrap(memio.New(memio.Options{}), rules(t, ""))
	opts.SegmentBytes, opts.CatalogueBytes = 64<<10, 4096
	return &faulty{mustOpen(t, opts, d), d}
}

// settle accounts for the faults during a read of b: after an exact read they count as harmless,
// after a miss as detected, and any other error must be the fault's own.
func (f *faulty) settle(b *block, err error) {
	g, e := f.segmentOf(b.ref)
	if e == nil && (err == nil || errors.Is(err, ErrCorrupt) || errors.Is(err, ErrStale)) {
		f.dev.Counter().Repaired(g.file.Name(), g.header.SlotOffset(b.ref.Extent.Slot()), g.header.SlotBytes)
	}
	f.dev.Counter().Surfaced(err)
}

func (f *faulty) pending(t testing.TB) {
	t.Helper()
	if left := f.dev.Counter().Pending(); len(left) > 0 {
		t.Errorf("%d of %d faults went unnoticed, the first: %v", len(left), len(f.dev.Counter().Injected()), left[0])
	}
}

// TestTransientReadError: a read that fails once is retried in the same call.
func TestTransientReadError(t *testing.T) {
	f := openFaulty(t, Options{})
	b := newBlock("b", 12000, 3)
	if err := put(t, f.Store, nil, b); err != nil {
		t.Fatal(err)
	}
	f.dev.SetRules(rules(t, `(Err EIO (And Reads (Count 1)))`))
	f.settle(b, get(t, f.Store, b, 0, 0))
	f.pending(t)
	if st := f.Stats().Counters; st.ReadFailures != 0 || st.ReadBytes == 0 {
		t.Errorf("%d reads failed, %d bytes were read", st.ReadFailures, st.ReadBytes)
	}
}

// TestReadFaults: each kind of fault in a read causes an error or a miss, and the right counter
// counts it.
func TestReadFaults(t *testing.T) {
	for _, c := range []struct {
		rule          string
		first, layers int
		corrupt       bool
	}{
		{`(Err EIO (And Reads (File "segment-*") (Count 4)))`, 0, 0, false},
		{`(Err EIO (And Reads (File "segment-*") (Count 4)))`, 1, 1, false},
		{`(Short (And Reads (File "segment-*") (Count 4)))`, 0, 0, false},
		{`(Short (And Reads (File "segment-*") (Count 4)))`, 2, 1, false},
		{`(Flip 0 (And Reads (Count 1)))`, 0, 0, true},        // the header's magic
		{`(Flip 1000 (And Reads (Count 1)))`, 0, 0, true},     // a layer sum
		{`(Flip 40000 (And Reads (Count 1)))`, 0, 0, true},    // layer 0
		{`(Flip 40000 (And Reads (Count 1)))`, 0, 2, true},    // layer 0, header in the same request
		{`(Flip 10 (And Reads (Offset 0 8192)))`, 1, 2, true}, // the header of a range
		{`(Torn (And Reads (File "segment-*")))`, 0, 0, true},
	} {
		t.Run(fmt.Sprintf("%s %d+%d", c.rule, c.first, c.layers), func(t *testing.T) {
			f := openFaulty(t, Options{})
			b := newBlock("b", 12000, 3)
			if err := put(t, f.Store, nil, b); err != nil {
				t.Fatal(err)
			}
			f.dev.SetRules(rules(t, c.rule))
			err := get(t, f.Store, b, c.first, c.layers)
			if err == nil || errors.Is(err, ErrCorrupt) != c.corrupt {
				t.Fatalf("read: %v; corrupt should be %v", err, c.corrupt)
			}
			f.settle(b, err)
			f.pending(t)
			st := f.Stats().Counters
			if got := [2]uint64{st.ReadCorrupt, st.ReadFailures}; (got == [2]uint64{1, 0}) != c.corrupt || got[0]+got[1] != 1 {
				t.Errorf("counted corrupt %d, failed %d", st.ReadCorrupt, st.ReadFailures)
			}
			f.dev.SetRules(rules(t, ""))
			if err := get(t, f.Store, b, 0, 0); err != nil {
				t.Errorf("read after the fault: %v", err)
			}
			if err := f.Free(b.ref); err != nil {
				t.Errorf("a failed read still holds its pin: %v", err)
			}
			if st := f.Stats().Slots; st.CondemnedBytes != 0 {
				t.Errorf("a failed read still holds its pin: %d bytes condemned", st.CondemnedBytes)
			}
		})
	}
}

// TestMergedReadFault: a fault in one slot of a merged request affects that slot only.
func TestMergedReadFault(t *testing.T) {
	f := openFaulty(t, Options{})
	blocks := []*block{newBlock("a", 3000, 3), newBlock("b", 3000, 3), newBlock("c", 3000, 3)}
	if err := put(t, f.Store, nil, blocks...); err != nil {
		t.Fatal(err)
	}
	g, _ := f.segmentOf(blocks[1].ref)
	at := g.header.SlotOffset(blocks[1].ref.Extent.Slot())
	f.dev.SetRules(rules(t, fmt.Sprintf(`(Err EIO (And Reads (Offset %d %d)))`, at, at+1)))
	var rs []Read
	for _, b := range blocks {
		rs = append(rs, b.read(t, 0, 0))
	}
	if err := f.Read(t.Context(), rs); err != nil {
		t.Fatal(err)
	}
	if rs[0].Err != nil || rs[1].Err == nil || rs[2].Err != nil {
		t.Errorf("outcomes %v, %v, %v; only the second should fail", rs[0].Err, rs[1].Err, rs[2].Err)
	}
	f.dev.Counter().Surfaced(rs[1].Err)
	if n := f.dev.Counter().Repaired(g.file.Name(), g.header.SlotOffset(0), 3*g.header.SlotBytes); n != 1 {
		t.Errorf("%d faults were repaired by trying alone; want the merged request's", n)
	}
	f.pending(t)
}

// TestFaultSoak runs random operations on a device that fails now and then: no read is wrong, and
// every fault is accounted for.
func TestFaultSoak(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { soak(t, seed) })
		})
	}
}

func soak(t *testing.T, seed uint64) {
	f := openFaulty(t, Options{CapacityBytes: 400_000})
	f.dev.SetRules(rules(t, fmt.Sprintf(`
		(Err EIO (And Reads (Prob 0.03 %[1]d)))
		(Short (And Reads (Prob 0.02 %[1]d)))
		(Torn (And Reads (Offset 4096 1000000) (Prob 0.02 %[1]d)))
		(Flip (And Reads (Offset 4096 1000000) (Prob 0.03 %[1]d)))
		(Err EIO (And Writes (Prob 0.03 %[1]d)))
		(Short (And Writes (Prob 0.02 %[1]d)))
		(ENOSPC (And Creates (Prob 0.2 %[1]d)))
		(Torn (And Writes (Offset 4096 1000000) (Not (Offset 0 4096)) (Prob 0.03 %[1]d)))
		(Flip (And Writes (Offset 4096 1000000) (Not (Offset 0 4096)) (Prob 0.03 %[1]d)))
	`, seed)))
	rng := rand.New(rand.NewPCG(seed, 11))
	live := make(map[string]*block)
	var misses, reads uint64
	for i := range 300 {
		switch p := rng.IntN(10); {
		case p < 4:
			b := newBlock(fmt.Sprint(i), 12000, 3)
			err := put(t, f.Store, nil, b)
			f.dev.Counter().Surfaced(err)
			if b.ref.Generation != 0 {
				live[b.name] = b
			}
			if errors.Is(err, ErrFull) {
				freeOne(t, f, live)
				time.Sleep(2 * keeperInterval) // virtual time: the keeper probes whether the full file system has room again
			}
		case p < 5:
			freeOne(t, f, live)
		default:
			for _, b := range live { // any one of them
				reads++
				count := rng.IntN(3)
				err := get(t, f.Store, b, min(count, 1), count)
				if f.settle(b, err); err != nil {
					misses++
				}
				break
			}
		}
	}
	f.dev.SetRules(rules(t, ""))
	st := f.Stats().Counters
	if st.Reads != reads || st.ReadStale+st.ReadCorrupt+st.ReadFailures != misses {
		t.Errorf("%d reads counted, %d stale, %d corrupt, %d failed; want %d with %d misses", st.Reads, st.ReadStale, st.ReadCorrupt, st.ReadFailures, reads, misses)
	}
	found := make(map[kv.Ref]bool)
	if _, err := f.Scrub(t.Context(), ScrubOptions{Report: func(ref kv.Ref, err error) { found[ref] = true }}); err != nil {
		t.Fatal(err)
	}
	for _, b := range live {
		err := get(t, f.Store, b, 0, 0)
		if (err != nil) != found[b.ref] {
			t.Errorf("block %s: read returns %v, the scrubber found it corrupt: %v", b.name, err, found[b.ref])
		}
		f.settle(b, err)
	}
	f.settleFree(live)
	f.settleProbes(t)
	f.pending(t)
	if f.dev.Counter().Count(faultio.Flip) == 0 || misses == 0 {
		t.Errorf("a soak without faults: %d injected, %d misses", len(f.dev.Counter().Injected()), misses)
	}
}

func freeOne(t *testing.T, f *faulty, live map[string]*block) {
	for name, b := range live {
		if err := f.Free(b.ref); err != nil {
			t.Fatal(err)
		}
		delete(live, name)
		return
	}
}

// settleFree accounts for faults in bytes that no call reads: free slots, and segment files that
// could not be created or cut.
func (f *faulty) settleFree(live map[string]*block) {
	used := make(map[kv.Extent]bool)
	for _, b := range live {
		used[b.ref.Extent] = true
	}
	for _, g := range f.volumes[0].space.sorted() {
		for slot := range g.header.Slots {
			if !used[g.extent(slot)] {
				f.dev.Counter().Repaired(g.file.Name(), g.header.SlotOffset(slot), g.header.SlotBytes)
			}
		}
	}
	for _, i := range f.dev.Counter().Injected() {
		if i.Kind == faultio.Create {
			f.dev.Counter().Surfaced(&faultio.Error{Injection: i})
		}
	}
}

// settleProbes waits until the volume has recovered, and then counts the faults that
// its probes met as repaired.
func (f *faulty) settleProbes(t *testing.T) {
	awaitState(t, f.Store, 0, health.OK, 2*time.Minute)
	for _, name := range []string{ondisk.SuperblockName, ondisk.CatalogueName} {
		f.dev.Counter().Repaired(name, 0, 1<<40)
	}
}

// TestOpenFaults makes each single call of an Open fail: the error names the fault, unless Open has
// repeated the read of a segment's header. The volumes are undamaged.
func TestOpenFaults(t *testing.T) {
	for _, fresh := range []bool{true, false} {
		for n := 0; ; n++ {
			m := memio.New(memio.Options{})
			b := newBlock("b", 3000, 3)
			if !fresh {
				s, err := open(t, Options{}, m)
				if err != nil {
					t.Fatal(err)
				}
				if err := errors.Join(s.Ready(), put(t, s, nil, b), s.SetCatalogue(t.Context(), []byte("c")), s.Close(t.Context())); err != nil {
					t.Fatal(err)
				}
				m = m.Reopen()
			}
			d := faultio.Wrap(m, rules(t, fmt.Sprintf(`(Err EIO (And Any (After %d) (Count 1)))`, n)))
			s, err := Open(t.Context(), Options{Devices: []blockio.Device{d}, CapacityBytes: 1 << 20})
			if len(d.Counter().Injected()) == 0 {
				if err != nil {
					t.Fatalf("open without a fault: %v", err)
				}
				s.Close(t.Context())
				break
			}
			if err == nil && d.Counter().Repaired(ondisk.SegmentName(0), 0, ondisk.Page) == 1 {
				if err := errors.Join(s.Adopt(b.ref, 3000, 3), s.Close(t.Context())); err != nil {
					t.Fatal(err)
				}
				continue
			}
			if err == nil {
				t.Fatalf("fresh %v: Open ignored %v", fresh, d.Counter().Injected()[0])
			}
			if d.Counter().Surfaced(err) != 1 {
				t.Fatalf("fresh %v: Open returned %[3]v instead of %[2]v", fresh, d.Counter().Injected()[0], err)
			}
			d.Close()
			s, err = open(t, Options{}, m.Reopen())
			if err != nil {
				t.Fatalf("open after %v: %v", d.Counter().Injected()[0], err)
			}
			if !fresh {
				if err := errors.Join(s.Adopt(b.ref, 3000, 3), get(t, s, b, 0, 0)); err != nil || string(s.Catalogue()) != "c" {
					t.Fatalf("after %v: %v, catalogue %q", d.Counter().Injected()[0], err, s.Catalogue())
				}
			}
			s.Close(t.Context())
		}
	}
}

// TestSyncFailure: a volume whose sync failed takes no more writes, reports its state, and is read
// as before. The other volume works as before.
func TestSyncFailure(t *testing.T) {
	bad := faultio.Wrap(memio.New(memio.Options{Path: "bad"}), rules(t, ""))
	s := mustOpenBroken(t, Options{SegmentBytes: 64 << 10, StripeBytes: 16 << 10}, bad, memio.New(memio.Options{Path: "good"}))
	var blocks []*block
	for i := range 4 { // a stripe is one slot, so each volume gets two
		blocks = append(blocks, newBlock(fmt.Sprint(i), 12000, 3))
	}
	if err := put(t, s, nil, blocks...); err != nil {
		t.Fatal(err)
	}
	late := newBlock("late", 12000, 3)
	held, err := reserve(t.Context(), s, blocks[1], late)
	if err != nil {
		t.Fatal(err)
	}
	late.ref = held[0]
	bad.SetRules(rules(t, `(Err EIO (And Syncs (Count 1)))`))
	err = s.Sync(t.Context())
	if bad.Counter().Surfaced(err) != 1 {
		t.Fatalf("sync: %v", err)
	}
	var onBad, onGood kv.Ref
	for _, b := range blocks {
		if v := s.volume(b.ref.Extent); v.dev.Device == blockio.Device(bad) {
			onBad = b.ref
		} else {
			onGood = b.ref
		}
		if err := get(t, s, b, 0, 0); err != nil {
			t.Errorf("read after the failure: %v", err)
		}
	}
	if err := s.Sync(t.Context(), onBad); !errors.Is(err, ErrVolumeFailed) {
		t.Errorf("second sync of the failed volume: %v; want ErrVolumeFailed", err)
	}
	if err := s.Sync(t.Context(), onGood); err != nil {
		t.Errorf("sync of the other volume: %v", err)
	}
	late.fill()
	if err := s.Write(t.Context(), []Write{late.write(t)}); (s.volume(late.ref.Extent).dev.Device == blockio.Device(bad)) != errors.Is(err, ErrVolumeFailed) {
		t.Errorf("write of a slot on volume %d: %v", late.ref.Extent.Volume(), err)
	}
	for i := range 3 {
		b := newBlock(fmt.Sprint("new", i), 12000, 3)
		if err := put(t, s, nil, b); err != nil {
			t.Fatal(err)
		}
		if s.volume(b.ref.Extent).dev.Device == blockio.Device(bad) {
			t.Errorf("a new block was put on the failed volume")
		}
	}
	if err := s.SetCatalogue(t.Context(), []byte("on one volume")); err != nil {
		t.Errorf("catalogue: %v", err)
	}
	if !strings.Contains(s.Stats().String(), ", failed: a sync failed: faultio") {
		t.Errorf("the stats do not report the failed volume:\n%v", s.Stats())
	}
}

// TestSyncReportsLostSlots: a Sync of all volumes returns nil only if every committed slot is
// durable, or an earlier Sync has reported the slot's volume. That holds for every cause of the
// volume's failure, and also if the volume has recovered since.
func TestSyncReportsLostSlots(t *testing.T) {
	const syncsFail = `(Err EIO Syncs)`
	// failByCatalogue makes a volume fail without a sync of its blocks: the other volume is enough
	// for a quorum.
	failByCatalogue := func(t *testing.T, s *Store, bad *faultio.Device) {
		bad.SetRules(rules(t, `(Err EIO (And Writes (File "catalogue")))`))
		if err := s.SetCatalogue(t.Context(), []byte("c")); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name string
		// fail makes the volume fail when blocks on both volumes are committed.
		fail func(t *testing.T, s *Store, bad *faultio.Device)
		want []bool // for each call of Sync: whether it must report the volume
	}{
		{"catalogue", failByCatalogue, []bool{true, false}},
		{"sync", func(t *testing.T, s *Store, bad *faultio.Device) { bad.SetRules(rules(t, syncsFail)) }, []bool{true, false}},
		{"nothing unsynced", func(t *testing.T, s *Store, bad *faultio.Device) {
			if err := s.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			failByCatalogue(t, s, bad)
		}, []bool{false, false}},
		{"caller of the sync was not of all volumes", func(t *testing.T, s *Store, bad *faultio.Device) {
			bad.SetRules(rules(t, syncsFail))
			if err := s.Sync(t.Context(), onVolume(t, s, bad)); !errors.Is(err, syscall.EIO) {
				t.Fatalf("sync of the volume: %v", err)
			}
		}, []bool{true, false}},
		{"caller had gone, volume recovered", func(t *testing.T, s *Store, bad *faultio.Device) {
			bad.SetRules(rules(t, "(Delay 1s Syncs)\n(Err EIO Syncs)"))
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			if err := s.Sync(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("sync with a deadline: %v", err)
			}
			awaitState(t, s, 0, health.Failed, 2*time.Second)
			recoverVolume(t, s, bad)
		}, []bool{true, false}},
		{"recovered after failed writes", func(t *testing.T, s *Store, bad *faultio.Device) {
			failByCatalogue(t, s, bad)
			recoverVolume(t, s, bad) // the system has all writes of the blocks
		}, []bool{false, false}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				bad := faultio.Wrap(memio.New(memio.Options{Path: "bad"}), rules(t, ""))
				s := mustOpenBroken(t, Options{SegmentBytes: 64 << 10, StripeBytes: 16 << 10}, bad, memio.New(memio.Options{Path: "good"}))
				var blocks []*block
				for i := range 4 { // a stripe is one slot, so each volume gets two
					blocks = append(blocks, newBlock(fmt.Sprint(i), 12000, 3))
				}
				if err := put(t, s, nil, blocks...); err != nil {
					t.Fatal(err)
				}
				c.fail(t, s, bad)
				for i, want := range c.want {
					err := s.Sync(t.Context())
					var failed *SyncError
					if errors.As(err, &failed) != want || (err != nil) != want {
						t.Errorf("sync %d: %v; want an error: %v", i, err, want)
					} else if want && (len(failed.Volumes) != 1 || failed.Volumes[0] == nil) {
						t.Errorf("sync %d: %v; want volume 0 alone", i, err)
					}
				}
			})
		})
	}
}

// onVolume returns the ref of a live slot on the device.
func onVolume(t *testing.T, s *Store, dev blockio.Device) kv.Ref {
	for _, v := range s.volumes {
		if v.dev.Device != dev {
			continue
		}
		for _, g := range v.space.sorted() {
			for i, w := range g.words {
				if w.state() == slotLive {
					return kv.Ref{Extent: g.extent(uint32(i)), Generation: w.generation()}
				}
			}
		}
	}
	t.Fatal("no live slot on the device")
	return kv.Ref{}
}

// recoverVolume ends the faults and waits until volume 0 is OK.
func recoverVolume(t *testing.T, s *Store, bad *faultio.Device) {
	bad.SetRules(nil)
	awaitState(t, s, 0, health.OK, 2*time.Minute)
}

// mustOpenBroken is mustOpen for a store whose Close returns an error.
func mustOpenBroken(t *testing.T, opts Options, devs ...blockio.Device) *Store {
	opts.CapacityBytes, opts.Devices = 1<<20, devs
	s, err := Open(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(context.Background()) })
	return s
}

// TestCutFailure: a segment whose header could not be written is not used, and the same call takes
// another one.
func TestCutFailure(t *testing.T) {
	f := openFaulty(t, Options{})
	f.dev.SetRules(rules(t, `(Err EIO (And Writes (File "segment-*") (Offset 0 4096) (Count 1)))`))
	b := newBlock("b", 12000, 3)
	if err := put(t, f.Store, nil, b); err != nil {
		t.Fatalf("put: %v", err)
	}
	if n := f.dev.Counter().Repaired("segment-00000000", 0, 4096); n != 1 {
		t.Errorf("%d faults were met; want 1", n)
	}
	if err := get(t, f.Store, b, 0, 0); err != nil || b.ref.Extent.Segment() == 0 {
		t.Errorf("block %v: %v", b.ref, err)
	}
	if st := f.Stats().Volumes[0]; st.Bad != 1 {
		t.Errorf("%d bad segments; want 1", st.Bad)
	}
}

// TestCatalogueFailure: after a failed SetCatalogue the next one succeeds, and a reopened store has
// one of the catalogues that were set.
func TestCatalogueFailure(t *testing.T) {
	m := memio.New(memio.Options{})
	d := faultio.Wrap(m, rules(t, ""))
	s := mustOpenBroken(t, Options{}, d)
	set := func(text, rule string) error {
		d.SetRules(rules(t, rule))
		return s.SetCatalogue(t.Context(), []byte(text))
	}
	if err := set("one", ""); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if err := set("bad", `(Short (And Writes (File "catalogue") (Count 1)))`); d.Counter().Surfaced(err) != 1 {
			t.Fatalf("try %d: %v; want the fault", i, err)
		}
		if got := string(s.Catalogue()); got != "one" {
			t.Fatalf("catalogue %q after a failure; want the old one", got)
		}
	}
	s.Close(t.Context())
	s, err := open(t, Options{}, m.Reopen())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(context.Background())
	if got := string(s.Catalogue()); got != "one" && got != "bad" {
		t.Errorf("catalogue %q after reopening", got)
	}
}

// TestOtherVersion: a volume of another format version is refused with ErrVersion, and not changed.
func TestOtherVersion(t *testing.T) {
	for _, c := range []struct {
		file   string
		offset int64
	}{
		{ondisk.SuperblockName, 0}, {ondisk.SuperblockName, 4096}, {ondisk.CatalogueName, 4096 + 64<<10}, {ondisk.SegmentName(0), 0},
	} {
		m := memio.New(memio.Options{Path: "old"})
		s, err := open(t, Options{CatalogueBytes: 64 << 10}, m)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(s.Ready(), put(t, s, nil, newBlock("b", 3000, 3)), s.SetCatalogue(t.Context(), []byte("c")), s.Close(t.Context())); err != nil {
			t.Fatal(err)
		}
		makeVersion(t, m.Reopen(), c.file, c.offset, 9)
		d := m.Reopen()
		_, err = open(t, Options{}, d)
		if !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), "version 9") || !strings.Contains(err.Error(), "old") || !strings.Contains(err.Error(), "take the binary that wrote it") {
			t.Errorf("%s of version 9: %v; want ErrVersion that names volume and version", c.file, err)
		}
		d.Close()
	}
}

// TestFormatKeepsForeignFiles: formatting replaces the files of an earlier attempt, and never a
// file with content.
func TestFormatKeepsForeignFiles(t *testing.T) {
	for _, name := range []string{ondisk.SuperblockName, ondisk.CatalogueName} {
		for _, text := range []string{"", "of somebody else"} {
			m := memio.New(memio.Options{Path: "theirs"})
			f, err := m.Create(name, ondisk.Page)
			if err != nil {
				t.Fatal(err)
			}
			buf, release, err := heapAlloc(t.Context(), ondisk.Page)
			if err != nil {
				t.Fatal(err)
			}
			copy(buf, text)
			if err := doOne(t.Context(), m, blockio.Request{Op: blockio.Write, File: f, Bufs: [][]byte{buf}}); err != nil {
				t.Fatal(err)
			}
			release()
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			s, err := Open(t.Context(), Options{Devices: []blockio.Device{m}, CapacityBytes: 1 << 20})
			if err == nil {
				s.Close(t.Context())
			} else {
				m.Close()
			}
			if errors.Is(err, ErrForeign) != (text != "") {
				t.Errorf("%s with %q: %v", name, text, err)
			}
			if text == "" {
				continue
			}
			d := m.Reopen()
			if f, err := d.Open(name); err != nil {
				t.Errorf("%s is gone: %v", name, err)
			} else if page, err := readPages(t.Context(), d, f, 0, ondisk.Page); err != nil || !strings.HasPrefix(string(page), text) {
				t.Errorf("%s was changed (%v)", name, err)
			}
			d.Close()
		}
	}
}

// makeVersion turns a record into an intact record of another version.
func makeVersion(t *testing.T, d *memio.Device, file string, offset int64, version byte) {
	defer d.Close()
	f, err := d.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	page, err := readPages(t.Context(), d, f, offset, ondisk.Page)
	if err != nil {
		t.Fatal(err)
	}
	page[16] = version
	sum := xxh3.Hash(page[16:])
	for i := range 8 {
		page[8+i] = byte(sum >> (8 * i))
	}
	if err := doOne(t.Context(), d, blockio.Request{Op: blockio.Write, File: f, Offset: offset, Bufs: [][]byte{page}}); err != nil {
		t.Fatal(err)
	}
}

// TestClaimWhileZeroing: a writer claims a segment while the keeper is zeroing it. The writer does
// not wait for the end of the zeroing, and no byte is lost.
func TestClaimWhileZeroing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := faultio.Wrap(memio.New(memio.Options{}), rules(t, `(Delay 100ms (And Writes (File "segment-*")))`))
		s := mustOpen(t, Options{CapacityBytes: 80 << 20, SegmentBytes: 64 << 20, Prewrite: true}, d)
		time.Sleep(time.Second) // virtual time: the keeper has written about 10 of the first segment's chunks, each of which takes 100 ms
		start := time.Now()
		var blocks []*block
		for i := range 20 {
			blocks = append(blocks, newBlock(fmt.Sprint(i), 12000, 3))
		}
		if err := put(t, s, nil, blocks...); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took > time.Second {
			t.Errorf("the first write waited %v for the zeroing of 64 segments' chunks of 100 ms", took)
		}
		time.Sleep(time.Minute)
		for _, b := range blocks {
			if err := get(t, s, b, 0, 0); err != nil {
				t.Errorf("block %s after the zeroing: %v", b.name, err)
			}
		}
	})
}

// TestSyncIsShared: concurrent callers share the device's syncs, and none returns before a sync
// that began after its write.
func TestSyncIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := faultio.Wrap(memio.New(memio.Options{}), rules(t, ""))
		s := mustOpen(t, Options{CapacityBytes: 16 << 20}, d)
		before := d.Stats().Syncs
		d.SetRules(rules(t, `(Delay 1s (And Syncs (File "segment-*")))`))
		b := newBlock("first", 3000, 3)
		if err := put(t, s, nil, b); err != nil { // cuts a segment, which takes one sync
			t.Fatal(err)
		}
		const callers = 50
		errs := make(chan error, callers)
		for i := range callers {
			go func() {
				time.Sleep(time.Duration(i) * 10 * time.Millisecond) // virtual time: all begin within the first sync, which takes 1 s
				if err := put(t, s, nil, newBlock(fmt.Sprint(i), 3000, 3)); err != nil {
					errs <- err
					return
				}
				start := time.Now()
				err := s.Sync(t.Context())
				if took := time.Since(start); err == nil && took < time.Second {
					err = fmt.Errorf("caller %d waited only %v", i, took)
				}
				errs <- err
			}()
		}
		for range callers {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		if n := d.Stats().Syncs - before; n > 4 {
			t.Errorf("%d syncs for %d callers", n, callers)
		}
	})
}

// TestUnacknowledgedCatalogues: a volume has catalogues that were not acknowledged, because the other volumes had
// failed. It is missing at the next start, at which a catalogue is acknowledged. When it comes back, the
// acknowledged catalogue is the newest.
func TestUnacknowledgedCatalogues(t *testing.T) {
	devs := []*memio.Device{memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"}), memio.New(memio.Options{Path: "c"})}
	s, err := open(t, Options{}, devs...)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Ready(), s.SetCatalogue(t.Context(), []byte("first"))); err != nil {
		t.Fatal(err)
	}
	for _, v := range s.volumes[1:] {
		v.dev.lost(errors.New("the cable is out"))
	}
	for range 3 {
		if err := s.SetCatalogue(t.Context(), []byte("not acknowledged")); !errors.Is(err, ErrFloor) {
			t.Fatalf("a catalogue on one of three volumes: %v; want ErrFloor", err)
		}
	}
	_ = s.Close(t.Context()) // two volumes have failed
	reopen := func(devs ...*memio.Device) *Store {
		t.Helper()
		for i := range devs {
			devs[i] = devs[i].Reopen()
		}
		s, err := open(t, Options{Degraded: true}, devs...)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Ready(); err != nil {
			t.Fatal(err)
		}
		return s
	}
	s = reopen(devs[1], devs[2])
	if err := errors.Join(s.SetCatalogue(t.Context(), []byte("acknowledged")), s.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	s = reopen(devs...)
	if got := string(s.Catalogue()); got != "acknowledged" {
		t.Errorf("the newest catalogue is %q", got)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}
