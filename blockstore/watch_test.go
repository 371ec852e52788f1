package blockstore

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
)

// TestHungRequest: a request that has not completed changes the state of its volume only.
func TestHungRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bad := faultio.Wrap(memio.New(memio.Options{Path: "bad"}), rules(t, ""))
		var mu sync.Mutex
		var seen []string
		s := mustOpenBroken(t, Options{SegmentBytes: 64 << 10, StripeBytes: 16 << 10}, bad, memio.New(memio.Options{Path: "good"}))
		s.OnVolumeChange(func(c VolumeChange) {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, fmt.Sprintf("%s: %v to %v", c.Path, c.Was, c.Is.State))
		})
		var onBad *block
		for _, name := range []string{"0", "1"} {
			b := newBlock(name, 12000, 3)
			if err := put(t, s, nil, b); err != nil {
				t.Fatal(err)
			}
			if s.Stats().Volumes[b.ref.Extent.Volume()].Path == "bad" {
				onBad = b
			}
		}
		volume := onBad.ref.Extent.Volume()
		bad.SetRules(rules(t, `(Delay 60s Any)`))
		done := make(chan error)
		go func() { done <- get(t, s, onBad, 0, 0) }()
		state := func() health.Status { return s.Stats().Volumes[volume].Health }
		for _, want := range []struct {
			after time.Duration
			state health.State
		}{{2 * time.Second, health.OK}, {2 * time.Second, health.Suspect}, {7 * time.Second, health.Failed}} {
			time.Sleep(want.after)
			if got := state(); got.State != want.state {
				t.Errorf("after another %v: %v, want %v", want.after, got.State, want.state)
			}
		}
		if got := state(); got.Reads() || !strings.Contains(got.Cause.Error(), "10s") {
			t.Errorf("a hung volume: reads %v, cause %v", got.Reads(), got.Cause)
		}
		if other := s.Stats().Volumes[1-volume].Health; other.State != health.OK {
			t.Errorf("the other volume: %v: %v", other.State, other.Cause)
		}
		if err := <-done; err != nil {
			t.Errorf("the read that hung: %v", err)
		}
		mu.Lock()
		if got := strings.Join(seen, ", "); got != "bad: ok to suspect, bad: suspect to failed" {
			t.Errorf("reported: %q", got)
		}
		mu.Unlock()
		if err := s.Close(context.Background()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
}

// TestScrubPassesHungVolume: the scrubber skips a volume whose reads hang and verifies
// the others. The slot and the memory of the read that hangs are not reused until the
// device has completed the read.
func TestScrubPassesHungVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lent atomic.Int32
		opts := Options{SegmentBytes: 64 << 10, StripeBytes: 16 << 10}
		opts.Alloc = func(ctx context.Context, n int) ([]byte, func(), error) {
			lent.Add(1)
			b, release, err := heapAlloc(ctx, n)
			return b, func() { lent.Add(-1); release() }, err
		}
		bad := faultio.Wrap(memio.New(memio.Options{Path: "bad"}), rules(t, ""))
		s := mustOpenBroken(t, opts, bad, memio.New(memio.Options{Path: "good"}))
		var onBad, onGood int64
		var hung kv.Ref
		for i := range 8 {
			b := newBlock(strconv.Itoa(i), 12000, 3)
			if err := put(t, s, nil, b); err != nil {
				t.Fatal(err)
			}
			if b.ref.Extent.Volume() != 0 {
				onGood++
				continue
			}
			if onBad++; hung == (kv.Ref{}) || b.ref.Extent < hung.Extent {
				hung = b.ref
			}
		}
		if onBad == 0 || onGood == 0 {
			t.Fatalf("%d blocks on one volume, %d on the other", onBad, onGood)
		}
		kept := lent.Load() // allocated by Open and not released
		bad.SetRules(rules(t, `(Delay 60s (And Reads (File "segment-*")))`))
		began := time.Now()
		res, err := s.Scrub(t.Context(), ScrubOptions{})
		if took := time.Since(began); err != nil || !res.Done || res.Slots != onGood || took > 15*time.Second {
			t.Errorf("scrub: %+v, %v after %v; want %d slots", res, err, took, onGood)
		}
		if n := lent.Load(); n != kept+1 {
			t.Errorf("%d pieces of memory are lent while the read hangs; want 1", n-kept)
		}
		if err := s.Free(hung); err != nil {
			t.Error(err)
		}
		if n := s.Stats().Slots.CondemnedBytes; n == 0 {
			t.Errorf("%d condemned bytes; want the slot that is being read", n)
		}
		bad.SetRules(rules(t, ""))
		time.Sleep(5 * time.Minute)
		if n, condemned := lent.Load(), s.Stats().Slots.CondemnedBytes; n != kept || condemned != 0 {
			t.Errorf("%d pieces of memory and %d condemned bytes after the read", n-kept, condemned)
		}
		if res, err := s.Scrub(t.Context(), ScrubOptions{}); err != nil || res.Slots != onGood+onBad-1 {
			t.Errorf("scrub after the fault: %+v, %v; want %d slots", res, err, onGood+onBad-1)
		}
		if err := s.Close(context.Background()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
}

// twoVolumes is a store on two volumes, the first of which fails by rules.
type twoVolumes struct {
	*Store
	bad *faultio.Device
	dev [2]*memio.Device
}

func openTwo(t *testing.T) *twoVolumes {
	w := &twoVolumes{dev: [2]*memio.Device{memio.New(memio.Options{Path: "bad"}), memio.New(memio.Options{Path: "good"})}}
	w.bad = faultio.Wrap(w.dev[0], rules(t, ""))
	w.Store = mustOpenBroken(t, Options{SegmentBytes: 64 << 10, StripeBytes: 16 << 10}, w.bad, w.dev[1])
	return w
}

// awaitState waits until a volume has the state. It fails the test if that takes longer
// than limit. It replaces the function of OnVolumeChange.
func awaitState(t *testing.T, s *Store, volume uint32, want health.State, limit time.Duration) {
	t.Helper()
	changed := make(chan struct{}, 1)
	s.OnVolumeChange(func(VolumeChange) {
		select {
		case changed <- struct{}{}:
		default:
		}
	})
	end := time.After(limit)
	for {
		is := s.Stats().Volumes[volume].Health
		if is.State == want {
			return
		}
		select {
		case <-changed:
		case <-end:
			t.Fatalf("volume %d is %v after %v: %v; want %v", volume, is.State, limit, is.Cause, want)
		}
	}
}

func (w *twoVolumes) state(path string) health.Status {
	for _, v := range w.Stats().Volumes {
		if v.Path == path {
			return v.Health
		}
	}
	return health.Status{}
}

// TestOneOfTwoVolumesFails: while one volume cannot be written, new blocks go to the other, and
// syncs and changes of the catalogue succeed. When the volume works again, the newest state is
// written to it before it counts. A readable volume is read throughout.
func TestOneOfTwoVolumesFails(t *testing.T) {
	for _, fault := range []string{`(Err EIO Writes)`, `(Err EIO Syncs)`, `(Err EIO Any)`, `(Delay 3600s Writes)`, `(Delay 3600s Syncs)`, `(Delay 3600s Any)`} {
		t.Run(fault, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { oneOfTwoFails(t, fault) })
		})
	}
}

func oneOfTwoFails(t *testing.T, fault string) {
	w := openTwo(t)
	if err := w.SetCatalogue(t.Context(), []byte("one")); err != nil {
		t.Fatal(err)
	}
	var before [2]*block
	for i := range before {
		before[i] = newBlock(fmt.Sprint("before ", i), 12000, 3)
		if err := put(t, w.Store, nil, before[i]); err != nil {
			t.Fatal(err)
		}
	}
	if before[0].ref.Extent.Volume() == before[1].ref.Extent.Volume() {
		t.Fatal("both blocks are on one volume")
	}
	if err := w.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.bad.SetRules(rules(t, fault))
	began := time.Now()
	if err := w.SetCatalogue(t.Context(), []byte("two")); err != nil {
		t.Fatalf("catalogue while one of two volumes fails: %v", err)
	}
	if took := time.Since(began); took > 10*time.Second+watchEvery {
		t.Errorf("the catalogue took %v", took)
	}
	if got := w.state("bad"); got.State != health.Failed {
		t.Errorf("a volume that missed a catalogue is %v", got.State)
	}
	if !strings.Contains(fault, "Any") {
		for _, b := range before {
			if err := get(t, w.Store, b, 0, 0); err != nil {
				t.Errorf("read of a volume that only fails to write: %v", err)
			}
		}
	}
	for i := range 20 {
		b := newBlock(fmt.Sprint(i), 12000, 3)
		if err := put(t, w.Store, nil, b); err != nil {
			t.Fatalf("put %d: %v", i, err)
		}
		if err := w.Sync(t.Context()); err != nil {
			t.Fatalf("sync %d: %v", i, err)
		}
		if err := w.Free(b.ref); err != nil {
			t.Fatal(err)
		}
	}
	// After a restart with both volumes the newest catalogue is found.
	if s := reopen(t, w.dev[0].Clone(), w.dev[1].Clone()); string(s.Catalogue()) != "two" || !s.CatalogueCertain() {
		t.Errorf("both volumes are back with catalogue %q, certain %v", s.Catalogue(), s.CatalogueCertain())
	}
	// The volume works again.
	w.bad.SetRules(rules(t, ""))
	bad, err := w.VolumeNamed("bad")
	if err != nil {
		t.Fatal(err)
	}
	awaitState(t, w.Store, bad, health.OK, 2*time.Hour)
	if h, blob := newestCatalogue(t, w.dev[0].Clone()); string(blob) != "two" {
		t.Errorf("the volume is ok again with catalogue %q of version %d", blob, h.Sequence)
	}
	if err := w.Close(context.Background()); err != nil {
		t.Errorf("close: %v", err)
	}
}

// reopen opens copies of volumes as a store.
func reopen(t *testing.T, devs ...*memio.Device) *Store {
	opts := Options{CapacityBytes: 1 << 20}
	for _, d := range devs {
		opts.Devices = append(opts.Devices, d)
	}
	s, err := Open(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(context.Background()) })
	return s
}

// newestCatalogue reads the newest catalogue of one volume.
func newestCatalogue(t *testing.T, d *memio.Device) (ondisk.CatalogueHeader, []byte) {
	defer d.Close()
	f, err := d.Open(ondisk.CatalogueName)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var newest ondisk.CatalogueHeader
	var blob []byte
	for area := range 2 {
		h, b, err := readCatalogueArea(t.Context(), d, f, area, f.Size()/2-ondisk.Page)
		if err == nil && h.Sequence > newest.Sequence {
			newest, blob = h, b
		}
	}
	return newest, blob
}

// TestCatalogueQuorum: for every number of volumes that acknowledged a change, a start that is
// certain of the catalogue has at least one of these volumes.
func TestCatalogueQuorum(t *testing.T) {
	for count := 1; count <= kv.MaxVolumes; count++ {
		for present := 0; present <= count; present++ {
			sees := metaQuorum(count) > count-present
			if got := catalogueCertain(present, count); got != sees {
				t.Errorf("%d of %d volumes: certain %v; the newest change is on one of them: %v", present, count, got, sees)
			}
		}
		if q := metaQuorum(count); q < 1 || count > 1 && q > count-1 {
			t.Errorf("a quorum of %d of %d volumes: one that fails must not stop changes", q, count)
		}
	}
}
