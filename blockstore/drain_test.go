package blockstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
)

var drainOptions = Options{CapacityBytes: 3 << 20, SegmentBytes: 64 << 10, StripeBytes: 16 << 10}

// reopened opens the devices as a store, adopts the blocks and reads them.
func reopened(t *testing.T, opts Options, blocks []*block, devs ...*memio.Device) *Store {
	t.Helper()
	for i, d := range devs {
		devs[i] = d.Reopen()
	}
	s, err := open(t, opts, devs...)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		if err := s.Adopt(b.ref, b.key.PayloadBytes, b.key.Layers); err != nil {
			t.Errorf("adopt %s at %v: %v", b.name, b.ref, err)
		}
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		if err := get(t, s, b, 0, 0); err != nil {
			t.Errorf("read %s: %v", b.name, err)
		}
	}
	return s
}

func shut(t *testing.T, s *Store) {
	t.Helper()
	if err := s.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// putMany puts n blocks, one sequence each.
func putMany(t *testing.T, s *Store, name string, n int) (blocks []*block) {
	t.Helper()
	for i := range n {
		b := newBlock(fmt.Sprint(name, i), 12000, 3)
		if err := put(t, s, nil, b); err != nil {
			t.Fatal(err)
		}
		blocks = append(blocks, b)
	}
	return blocks
}

func duty(s *Store, volume uint32) health.State { return s.Stats().Volumes[volume].Health.Duty }

// TestDrainAndRemove: a draining volume takes no new blocks and can be read, also after a restart.
// An empty draining volume can be removed. The store then opens without that volume and has all
// other blocks.
func TestDrainAndRemove(t *testing.T) {
	const gone = 1
	devs := []*memio.Device{memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"}), memio.New(memio.Options{Path: "c"})}
	s, err := open(t, drainOptions, devs...)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Ready(), s.SetCatalogue(t.Context(), []byte("c"))); err != nil {
		t.Fatal(err)
	}
	blocks := putMany(t, s, "old", 9)
	if err := s.RemoveVolume(t.Context(), gone, false); !errors.Is(err, ErrVolumeState) {
		t.Fatalf("remove a volume that is not draining: %v", err)
	}
	if n, err := s.VolumeNamed(s.Stats().Volumes[gone].Path); n != gone || err != nil {
		t.Fatalf("the volume by its path: %d, %v", n, err)
	}
	if _, err := s.VolumeNamed("7"); !errors.Is(err, ErrVolumeUnknown) {
		t.Fatalf("a volume that is not there: %v", err)
	}
	for range 2 { // draining a draining volume changes nothing
		if err := s.DrainVolume(t.Context(), gone); err != nil {
			t.Fatal(err)
		}
	}
	shut(t, s)
	s = reopened(t, drainOptions, blocks, devs...)
	if duty(s, gone) != health.Draining {
		t.Fatalf("after a restart: %v", duty(s, gone))
	}
	for _, b := range putMany(t, s, "new", 9) {
		if b.ref.Extent.Volume() == gone {
			t.Errorf("a new block is on the draining volume: %v", b.ref)
		}
		if err := s.Free(b.ref); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.UndrainVolume(t.Context(), gone); err != nil || duty(s, gone) != health.OK {
		t.Fatalf("undrain: %v, %v", err, duty(s, gone))
	}
	if err := errors.Join(s.DrainVolume(t.Context(), gone), s.RemoveVolume(t.Context(), gone, false)); !errors.Is(err, ErrVolumeState) {
		t.Fatalf("remove a volume with blocks: %v", err)
	}
	if duty(s, gone) != health.Draining {
		t.Fatalf("after a refused removal: %v", duty(s, gone))
	}
	var kept []*block
	from := kv.MakeExtent(gone, 0, 0)
	for {
		refs, slotBytes, next, ok := s.LiveFrom(from, 2)
		if !ok {
			break
		}
		from = next
		for _, ref := range refs {
			if ref.Extent.Volume() != gone || slotBytes != 16384 {
				t.Fatalf("live slot %v of %d bytes", ref, slotBytes)
			}
			if err := s.Free(ref); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, b := range blocks {
		if b.ref.Extent.Volume() != gone {
			kept = append(kept, b)
		}
	}
	if len(kept) != 6 {
		t.Fatalf("%d blocks are on the other volumes; want 6", len(kept))
	}
	for range 2 {
		if err := s.RemoveVolume(t.Context(), gone, false); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.DrainVolume(t.Context(), gone); !errors.Is(err, ErrVolumeState) {
		t.Errorf("drain a removed volume: %v", err)
	}
	putMany(t, s, "later", 3)
	shut(t, s)

	var removed int
	for i, d := range devs {
		if d.Info().Path == s.Stats().Volumes[gone].Path {
			removed = i
		}
	}
	others := append(append([]*memio.Device(nil), devs[:removed]...), devs[removed+1:]...)
	for name, given := range map[string][]*memio.Device{
		"without it": others, "with it": devs, "with an empty directory": append([]*memio.Device{memio.New(memio.Options{Path: "empty"})}, others...),
	} {
		s := reopened(t, drainOptions, kept, given...)
		if duty(s, gone) != health.Removed || !s.CatalogueCertain() || string(s.Catalogue()) != "c" || len(s.MissingVolumes()) > 0 {
			t.Errorf("%s: volume is %v, catalogue %q, certain: %v, missing %v", name, duty(s, gone), s.Catalogue(), s.CatalogueCertain(), s.MissingVolumes())
		}
		shut(t, s)
		for i, d := range given {
			for j := range others {
				if others[j].Info().Path == d.Info().Path {
					others[j] = given[i]
				}
			}
			for j := range devs {
				if devs[j].Info().Path == d.Info().Path {
					devs[j] = given[i]
				}
			}
		}
	}
	if _, err := open(t, drainOptions, devs[removed].Reopen()); !errors.Is(err, ErrForeign) {
		t.Errorf("the removed volume alone: %v", err)
	}
	add := drainOptions
	add.AddVolumes = true
	s = reopened(t, add, kept, append([]*memio.Device{memio.New(memio.Options{Path: "fresh"})}, others...)...)
	if duty(s, gone) != health.OK || s.Volumes() != 3 {
		t.Errorf("a new disk in its place: %v, %d volumes", duty(s, gone), s.Volumes())
	}
	shut(t, s)
}

// TestLastVolumeStays: the last volume that takes blocks is neither drained nor
// removed.
func TestLastVolumeStays(t *testing.T) {
	s := mustOpen(t, drainOptions, memio.New(memio.Options{}), memio.New(memio.Options{}))
	if err := s.DrainVolume(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"drain":  s.DrainVolume(t.Context(), 1),
		"remove": s.RemoveVolume(t.Context(), 1, true),
	} {
		if !errors.Is(err, ErrVolumeState) {
			t.Errorf("%s the last volume: %v", name, err)
		}
	}
	if err := s.RemoveVolume(t.Context(), 5, true); !errors.Is(err, ErrVolumeUnknown) {
		t.Errorf("remove volume 5: %v", err)
	}
	putMany(t, s, "b", 2)
}

// TestRemoveNeedsQuorum: a removal fails if too few other volumes can write their superblocks. The
// volume is then draining as before, and its blocks can be read.
func TestRemoveNeedsQuorum(t *testing.T) {
	var devs []blockio.Device
	var bad []*faultio.Device
	for i := range 3 {
		d := faultio.Wrap(memio.New(memio.Options{Path: fmt.Sprint(i)}), rules(t, ""))
		devs, bad = append(devs, d), append(bad, d)
	}
	s := mustOpenBroken(t, drainOptions, devs...)
	blocks := putMany(t, s, "b", 6)
	if err := s.DrainVolume(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	for _, v := range s.volumes[1:] {
		for _, d := range bad {
			if d.Info().Path == v.dev.Info().Path {
				d.SetRules(rules(t, `(Err EIO (And Writes (File "superblock")))`))
			}
		}
	}
	if err := s.RemoveVolume(t.Context(), 0, true); !errors.Is(err, ErrFloor) {
		t.Fatalf("remove without a quorum: %v", err)
	}
	if duty(s, 0) != health.Draining {
		t.Errorf("after a removal that failed: %v", duty(s, 0))
	}
	for _, b := range blocks {
		if err := get(t, s, b, 0, 0); err != nil {
			t.Errorf("read %s: %v", b.name, err)
		}
	}
	for _, d := range bad {
		d.SetRules(rules(t, ""))
	}
	if err := s.RemoveVolume(t.Context(), 0, true); err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		if err := get(t, s, b, 0, 0); (b.ref.Extent.Volume() == 0) != errors.Is(err, ErrVolumeFailed) {
			t.Errorf("read %s on volume %d: %v", b.name, b.ref.Extent.Volume(), err)
		}
	}
}

// slowClose is a device whose Close waits until hang has ended.
type slowClose struct {
	blockio.Device
	hang context.Context
}

func (d *slowClose) Close() error {
	<-d.hang.Done()
	return d.Device.Close()
}

// TestRemoveAwaitsClose: RemoveVolume returns when the device is closed. It waits no longer than
// HungAfter for a device that hangs, and not after its context has ended. The log reports that the
// volume is still open, and later that it is closed.
func TestRemoveAwaitsClose(t *testing.T) {
	for _, c := range []struct {
		name           string
		close, timeout time.Duration
		want           time.Duration
		logs           string
	}{
		{"slow", 3 * time.Second, time.Hour, 3 * time.Second, "the removed volume is closed"},
		{"hangs", time.Hour, 2 * time.Hour, 10 * time.Second, "is still open"},
		{"canceled", time.Hour, time.Second, time.Second, "is still open"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log testkit.Log
				opts := drainOptions
				opts.Logger = slog.New(slog.NewTextHandler(&log, nil))
				hang, end := context.WithTimeout(context.Background(), c.close)
				defer end()
				s := mustOpen(t, opts, &slowClose{memio.New(memio.Options{}), hang}, memio.New(memio.Options{Path: "other"}))
				if err := s.DrainVolume(t.Context(), 0); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), c.timeout)
				defer cancel()
				began := time.Now()
				if err := s.RemoveVolume(ctx, 0, false); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(began); took != c.want {
					t.Errorf("RemoveVolume took %v; want %v", took, c.want)
				}
				if got := log.Take(); !strings.Contains(got, c.logs) {
					t.Errorf("the log does not contain %q:\n%s", c.logs, got)
				}
				putMany(t, s, "later", 3)
				if c.logs == "is still open" {
					log.Await("the removed volume is closed")
				}
				if err := s.RemoveVolume(t.Context(), 0, false); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// sizeOne is a sizer that bounds every run to one slot.
type sizeOne struct{}

func (sizeOne) upTo(uint32) uint32 { return 1 }

// TestNoSlotOnceOrdered: a Reserve has chosen a volume, and then the volume is ordered draining or
// removed. The Reserve takes no slot of the volume and starts no cut. Its error is neither ErrFull
// nor a failure of the volume.
func TestNoSlotOnceOrdered(t *testing.T) {
	s := mustOpen(t, drainOptions, memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"}))
	blocks := putMany(t, s, "b", 4)
	for _, duty := range []health.State{health.Draining, health.Removed} {
		for _, v := range s.volumes {
			v.dev.order(duty)
			used := v.space.used()
			for _, slotBytes := range []int64{16384, 8192} { // of a size with free slots, and of a size without
				if _, _, err := v.take(t.Context(), slotBytes, sizeOne{}); !errors.Is(err, errNoRoom) {
					t.Errorf("a %v volume gave a slot of %d bytes: %v", duty, slotBytes, err)
				}
			}
			for _, b := range blocks {
				if _, r := v.space.takeAfter(16384, b.ref.Extent, 1); b.ref.Extent.Volume() == v.index && r.N != 0 {
					t.Errorf("a %v volume gave the slot behind %v", duty, b.ref)
				}
			}
			if now := v.space.used(); now != used {
				t.Errorf("a %v volume had %d bytes in use, and has %d", duty, used, now)
			}
			v.dev.order(health.OK)
		}
	}
}

// TestRemoveMissing: a missing volume can only be removed by force, even if it was draining,
// because it may hold blocks.
func TestRemoveMissing(t *testing.T) {
	devs := []*memio.Device{memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"}), memio.New(memio.Options{Path: "c"})}
	s, err := open(t, drainOptions, devs...)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	putMany(t, s, "b", 6)
	gone, err := s.VolumeNamed("c")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.DrainVolume(t.Context(), gone); err != nil {
		t.Fatal(err)
	}
	shut(t, s)
	degraded := drainOptions
	degraded.Degraded = true
	s = reopened(t, degraded, nil, devs[:2]...)
	if err := s.RemoveVolume(t.Context(), gone, false); !errors.Is(err, ErrVolumeState) {
		t.Errorf("remove a missing volume that was draining: %v", err)
	}
	if err := s.RemoveVolume(t.Context(), gone, true); err != nil {
		t.Errorf("by force: %v", err)
	}
	shut(t, s)
}
