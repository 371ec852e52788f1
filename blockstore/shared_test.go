package blockstore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/posixio"
)

// ledger has the owner of each store, as etcd has it. The test decides when an ownership ends.
type ledger struct {
	mu     sync.Mutex
	owner  map[string]*claim
	fences map[string]uint32
}

// claim is one process's view of a ledger.
type claim struct {
	*ledger
	store string
}

func newLedger() *ledger {
	return &ledger{owner: make(map[string]*claim), fences: make(map[string]uint32)}
}

func (c *claim) Acquire(_ context.Context, store string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.owner[store] != nil {
		return errors.New("owned by another")
	}
	c.owner[store], c.store = c, store
	return nil
}

func (c *claim) Fence(_ context.Context, last uint32) (uint32, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fences[c.store] = max(c.fences[c.store], last) + 1
	return c.fences[c.store], nil
}

func (c *claim) Held() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.owner[c.store] != c {
		return errors.New("the lease has ended")
	}
	return nil
}

// end ends the ownership, as the end of the lease does.
func (c *claim) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.owner[c.store] == c {
		delete(c.owner, c.store)
	}
}

// lateDevice keeps the writes that it gets while late is set, as a process does that was stopped
// between its decision to write and the write. release performs them.
type lateDevice struct {
	blockio.Device
	mu   sync.Mutex
	late bool
	kept chan struct{} // has one element for each kept batch
	free chan struct{}
	// skip is the number of bytes at the start of each late write that reached the disk earlier, and
	// are not written again.
	skip int64
}

func (d *lateDevice) Do(ctx context.Context, batch []blockio.Request) error {
	d.mu.Lock()
	late := d.late && slices.ContainsFunc(batch, func(r blockio.Request) bool { return r.Op == blockio.Write })
	d.mu.Unlock()
	if !late {
		return d.Device.Do(ctx, batch)
	}
	d.kept <- struct{}{}
	<-d.free
	rest := slices.Clone(batch)
	for i := range rest {
		skip := d.skip
		var bufs [][]byte
		for _, b := range rest[i].Bufs {
			n := min(skip, int64(len(b)))
			skip -= n
			if n < int64(len(b)) {
				bufs = append(bufs, b[n:])
			}
		}
		rest[i].Bufs, rest[i].Offset = bufs, rest[i].Offset+d.skip-skip
	}
	err := d.Device.Do(ctx, rest)
	for i := range batch {
		batch[i].Err = rest[i].Err
	}
	return err
}

func sharedDevice(t *testing.T, dir string) blockio.Device {
	t.Helper()
	d, err := posixio.Open(dir, posixio.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// openShared opens a store in dir for a new process, adopts the blocks of its index, and makes the
// store ready.
func openShared(t *testing.T, l *ledger, dev blockio.Device, index ...*block) (*Store, *claim) {
	t.Helper()
	c := &claim{ledger: l}
	s, err := Open(t.Context(), Options{Devices: []blockio.Device{dev}, CapacityBytes: 1 << 20, Owner: c})
	if err != nil {
		t.Fatal(errors.Join(err, dev.Close()))
	}
	for _, b := range index {
		if err := s.Adopt(b.ref, b.key.PayloadBytes, b.key.Layers); err != nil {
			t.Error(err)
		}
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	return s, c
}

// TestLateWrites: a write of an owner of a shared volume is a miss if another process has taken the volume
// over before. The late writes are those of a slot, whole or only its second part, of a catalogue,
// and of a superblock. The new owner's blocks and catalogue stay, and the next owner finds them.
func TestLateWrites(t *testing.T) {
	for _, skip := range []int64{0, ondisk.Page} {
		t.Run(fmt.Sprintf("from byte %d", skip), func(t *testing.T) {
			dir, l := t.TempDir(), newLedger()
			dev := &lateDevice{Device: sharedDevice(t, dir), kept: make(chan struct{}), free: make(chan struct{}), skip: skip}
			old, was := openShared(t, l, dev)
			var index []*block
			for i := range 4 {
				b := newBlock(fmt.Sprintf("early %d", i), 8000, 2)
				if err := put(t, old, nil, b); err != nil {
					t.Fatal(err)
				}
				index = append(index, b)
			}
			if err := errors.Join(old.SetCatalogue(t.Context(), []byte("early")), old.Sync(t.Context())); err != nil {
				t.Fatal(err)
			}

			// The old owner is stopped in the middle of a block and of a catalogue.
			dev.mu.Lock()
			dev.late = true
			dev.mu.Unlock()
			late := newBlock("late", 8000, 2)
			refs, err := reserve(t.Context(), old, nil, late)
			if err != nil {
				t.Fatal(err)
			}
			late.ref = refs[0]
			late.fill()
			write := []Write{late.write(t)}
			var stopped sync.WaitGroup
			stopped.Go(func() {
				if err := old.Write(t.Context(), write); err != nil {
					t.Errorf("the late write: %v", err)
				}
			})
			<-dev.kept
			stopped.Go(func() { _ = old.SetCatalogue(t.Context(), []byte("late")) }) // the store may fail meanwhile
			<-dev.kept

			was.end()
			next, held := openShared(t, l, sharedDevice(t, dir), index...)
			if old.Fence() != 1 || next.Fence() != 2 {
				t.Errorf("fencing numbers %d and %d; want 1 and 2", old.Fence(), next.Fence())
			}
			var reused *block
			for i := 0; reused == nil; i++ {
				// The same block, but with bytes of its own, so that only generation and checksums
				// distinguish it from the late one.
				b := newBlock("late", 8000, 2)
				if err := put(t, next, nil, b); err != nil {
					t.Fatalf("no block of the new owner got the slot %v after %d blocks: %v", late.ref, i, err)
				}
				if b.ref.Generation>>sequenceBits != 2 {
					t.Errorf("%v has a generation of another owner", b.ref)
				}
				if b.ref.Extent == late.ref.Extent {
					reused = b
				} else {
					index = append(index, b)
				}
			}
			if err := errors.Join(next.SetCatalogue(t.Context(), []byte("next")), next.Sync(t.Context()), get(t, next, reused, 0, 0)); err != nil {
				t.Fatal(err)
			}

			close(dev.free)
			stopped.Wait()
			dev.mu.Lock()
			dev.late = false
			dev.mu.Unlock()
			check := func(s *Store) {
				t.Helper()
				for _, r := range []Read{reused.read(t, 0, 0), reused.read(t, 1, 1)} {
					rs := []Read{r}
					if err := s.Read(t.Context(), rs); err != nil {
						t.Fatal(err)
					}
					if !errors.Is(rs[0].Err, ErrStale) && !errors.Is(rs[0].Err, ErrCorrupt) {
						t.Errorf("the block that was overwritten late: %v; want a miss", rs[0].Err)
					}
				}
				for _, b := range index {
					if err := get(t, s, b, 0, 0); err != nil {
						t.Errorf("block %s: %v", b.name, err)
					}
				}
				if got := string(s.Catalogue()); got != "next" {
					t.Errorf("catalogue %q; want that of the new owner", got)
				}
			}
			check(next)
			if err := put(t, old, nil, newBlock("refused", 8000, 2)); !errors.Is(err, ErrNotOwner) && !errors.Is(err, ErrFloor) {
				t.Errorf("a write after the end of the lease: %v", err)
			}
			if err := old.SetCatalogue(t.Context(), []byte("refused")); !errors.Is(err, ErrNotOwner) && !errors.Is(err, ErrFloor) {
				t.Errorf("a catalogue after the end of the lease: %v", err)
			}
			_ = old.Close(context.Background()) // its sync is refused
			if err := next.Close(context.Background()); err != nil {
				t.Error(err)
			}
			held.end()
			last, _ := openShared(t, l, sharedDevice(t, dir), append(index, reused)...)
			check(last)
			if last.Fence() != 3 {
				t.Errorf("fencing number %d; want 3", last.Fence())
			}
			if err := last.Close(context.Background()); err != nil {
				t.Error(err)
			}
			names, err := filepath.Glob(dir + "/*-0000000*")
			if err != nil {
				t.Fatal(err)
			}
			names = slices.DeleteFunc(names, func(n string) bool { return strings.Contains(n, "segment") })
			if want := []string{dir + "/catalogue-00000003", dir + "/superblock-00000003"}; !slices.Equal(names, want) {
				t.Errorf("the files of owners are %q; want %q", names, want)
			}
		})
	}
}

// TestLostOwnership: a store without its lease writes nothing to the volume, and writes again when the
// lease is back.
func TestLostOwnership(t *testing.T) {
	dir, l := t.TempDir(), newLedger()
	s, c := openShared(t, l, sharedDevice(t, dir))
	defer func() {
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	b := newBlock("b", 8000, 2)
	if err := errors.Join(put(t, s, nil, b), s.Sync(t.Context())); err != nil {
		t.Fatal(err)
	}
	before := contentOf(t, dir)
	c.end()
	if err := put(t, s, nil, newBlock("c", 8000, 2)); err == nil {
		t.Error("a write without the lease succeeded")
	}
	if err := s.SetCatalogue(t.Context(), []byte("c")); err == nil {
		t.Error("a catalogue without the lease was written")
	}
	if err := get(t, s, b, 0, 0); err != nil {
		t.Errorf("a read: %v", err)
	}
	if after := contentOf(t, dir); after != before {
		t.Error("the volume has changed")
	}
	if err := c.Acquire(t.Context(), c.store); err != nil {
		t.Fatal(err)
	}
	s.volumes[0].probe()
	awaitPuts(t, s)
}

// awaitPuts puts blocks, and probes the volume, until the store takes one.
func awaitPuts(t *testing.T, s *Store) {
	t.Helper()
	for range 1000 {
		if put(t, s, nil, newBlock("d", 8000, 2)) == nil {
			return
		}
		s.volumes[0].probe()
	}
	t.Error("the store takes no writes although the lease is back")
}

func contentOf(t *testing.T, dir string) string {
	t.Helper()
	names, err := filepath.Glob(dir + "/*")
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&all, "%s %d %x\n", name, len(b), ondisk.LayerSum(b))
	}
	return all.String()
}

// TestBecomesShared: a volume of version 1 becomes shared at its first start with an Owner, unless
// another process has locked it. After that, Open refuses it without an Owner.
func TestBecomesShared(t *testing.T) {
	dir, l := t.TempDir(), newLedger()
	plain := sharedDevice(t, dir)
	s, err := Open(t.Context(), Options{Devices: []blockio.Device{plain}, CapacityBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	b := newBlock("b", 8000, 2)
	if err := errors.Join(put(t, s, nil, b), s.SetCatalogue(t.Context(), []byte("plain"))); err != nil {
		t.Fatal(err)
	}
	dev := sharedDevice(t, dir)
	var owned *blockio.OwnedError
	if _, err := Open(t.Context(), Options{Devices: []blockio.Device{dev}, CapacityBytes: 1 << 20, Owner: &claim{ledger: l}}); !errors.As(err, &owned) {
		t.Errorf("a volume that a process has locked: %v; want an OwnedError", err)
	}
	if err := errors.Join(dev.Close(), s.Close(context.Background())); err != nil {
		t.Fatal(err)
	}
	shared, _ := openShared(t, l, sharedDevice(t, dir), b)
	if err := get(t, shared, b, 0, 0); err != nil {
		t.Error(err)
	}
	if got := string(shared.Catalogue()); got != "plain" || shared.Fence() != 2 {
		t.Errorf("catalogue %q, fencing number %d; want plain and 2, above the boot counter", got, shared.Fence())
	}
	if err := shared.Close(context.Background()); err != nil {
		t.Error(err)
	}
	dev = sharedDevice(t, dir)
	if _, err := Open(t.Context(), Options{Devices: []blockio.Device{dev}, CapacityBytes: 1 << 20}); !errors.Is(err, ErrShared) {
		t.Errorf("a shared volume without an Owner: %v; want ErrShared", err)
	}
	if store, fence, err := SharedStore(t.Context(), dev); err != nil || fence != 2 || store != shared.Node().String() {
		t.Errorf("SharedStore: %s, %d, %v", store, fence, err)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

// TestInterruptedOwner: the files of an owner that ended before its superblock was complete do not
// count.
func TestInterruptedOwner(t *testing.T) {
	dir, l := t.TempDir(), newLedger()
	s, c := openShared(t, l, sharedDevice(t, dir))
	b := newBlock("b", 8000, 2)
	if err := errors.Join(put(t, s, nil, b), s.SetCatalogue(t.Context(), []byte("complete")), s.Close(context.Background())); err != nil {
		t.Fatal(err)
	}
	c.end()
	for _, name := range []string{ondisk.SharedName(ondisk.SuperblockName, 2), ondisk.SharedName(ondisk.CatalogueName, 2)} {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, ondisk.SuperblockFileBytes), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, _ = openShared(t, l, sharedDevice(t, dir), b)
	if err := get(t, s, b, 0, 0); err != nil {
		t.Error(err)
	}
	if got := string(s.Catalogue()); got != "complete" || s.Fence() != 2 {
		t.Errorf("catalogue %q, fencing number %d; want complete and 2", got, s.Fence())
	}
	if err := s.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

// TestLateCreation: a segment file that an earlier owner creates late does not stop the writes of the new
// owner, and the next start removes or uses it.
func TestLateCreation(t *testing.T) {
	dir, l := t.TempDir(), newLedger()
	s, c := openShared(t, l, sharedDevice(t, dir))
	if err := os.WriteFile(filepath.Join(dir, ondisk.SegmentName(0)), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b := newBlock("b", 8000, 2)
	for i := 0; ; i++ { // a cut that meets the file fails
		err := put(t, s, nil, b)
		if err == nil {
			break
		}
		if !errors.Is(err, blockio.ErrExist) || i == 10 {
			t.Fatalf("put %d: %v", i, err)
		}
	}
	if b.ref.Extent.Segment() == 0 {
		t.Errorf("the block is in the segment of the earlier owner: %v", b.ref)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	c.end()
	s, _ = openShared(t, l, sharedDevice(t, dir), b)
	if err := errors.Join(get(t, s, b, 0, 0), put(t, s, nil, newBlock("c", 8000, 2)), s.Close(context.Background())); err != nil {
		t.Error(err)
	}
}

// TestFencesUsedUp: a fencing number above the largest boot counter is refused before it is written. A
// superblock with that number could not be read again.
func TestFencesUsedUp(t *testing.T) {
	dir, l := t.TempDir(), newLedger()
	s, c := openShared(t, l, sharedDevice(t, dir))
	l.fences[c.store] = ondisk.MaxBoot
	if _, err := s.raiseBoot(t.Context(), s.boot); !errors.Is(err, ErrFloor) {
		t.Errorf("a fencing number above the largest: %v; want ErrFloor", err)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Error(err)
	}
	dev := sharedDevice(t, dir)
	if _, fence, err := SharedStore(t.Context(), dev); err != nil || fence != 1 {
		t.Errorf("the fencing number on the volume is %d, %v; want 1", fence, err)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

// openMixed opens a store with a local and a shared volume for a new process, or only the shared one if
// local is "". It adopts the blocks of its index, and makes the store ready.
func openMixed(t *testing.T, l *ledger, local, shared string, index ...*block) (*Store, *claim) {
	t.Helper()
	c := &claim{ledger: l}
	opts := Options{CapacityBytes: 4 << 20, Owner: c, Devices: []blockio.Device{sharedDevice(t, shared)}, SharedOnly: true}
	if local != "" {
		opts.Devices, opts.Local, opts.SharedOnly = append(opts.Devices, sharedDevice(t, local)), []bool{false, true}, false
	}
	s, err := Open(t.Context(), opts)
	if err != nil {
		for _, d := range opts.Devices {
			err = errors.Join(err, d.Close())
		}
		t.Fatal(err)
	}
	for _, b := range index {
		if s.Missing(b.ref.Extent.Volume()) {
			continue
		}
		if err := s.Adopt(b.ref, b.key.PayloadBytes, b.key.Layers); err != nil {
			t.Error(err)
		}
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	return s, c
}

// TestLocalVolume: a store with a local and a shared volume opens without the local one on another host.
// The blocks of the shared volume are there, and the catalogue is certain. The local volume is locked,
// is not shared, and has its blocks when its own host opens the store again. The local volume has no vote:
// a catalogue that only the local volume stores is not acknowledged.
func TestLocalVolume(t *testing.T) {
	shared, local, l := t.TempDir(), t.TempDir(), newLedger()
	first, held := openMixed(t, l, local, shared)
	var index []*block
	on := make(map[uint32]int)
	for i := 0; len(on) < 2; i++ {
		b := newBlock(fmt.Sprintf("block %d", i), 8000, 2)
		if err := put(t, first, nil, b); err != nil {
			t.Fatal(err)
		}
		index = append(index, b)
		on[b.ref.Extent.Volume()]++
	}
	second := sharedDevice(t, local)
	var owned *blockio.OwnedError
	if err := second.Lock("another process"); !errors.As(err, &owned) {
		t.Errorf("a second lock of the local volume: %v", err)
	}
	if err := errors.Join(second.Close(), first.SetCatalogue(t.Context(), []byte("first")), first.Close(context.Background())); err != nil {
		t.Fatal(err)
	}
	held.end()
	if names, err := filepath.Glob(local + "/superblock*"); err != nil || !slices.Equal(names, []string{local + "/superblock"}) {
		t.Errorf("superblocks of the local volume: %q, %v", names, err)
	}

	guest, held := openMixed(t, l, "", shared, index...)
	if !guest.CatalogueCertain() || string(guest.Catalogue()) != "first" || guest.Fence() != 2 {
		t.Errorf("the adopted store has catalogue %q, certain %v, fencing number %d", guest.Catalogue(), guest.CatalogueCertain(), guest.Fence())
	}
	for _, b := range index {
		err := get(t, guest, b, 0, 0)
		if missing := guest.Missing(b.ref.Extent.Volume()); missing != (err != nil) {
			t.Errorf("block %s on volume %d, missing %v: %v", b.name, b.ref.Extent.Volume(), missing, err)
		}
	}
	late := newBlock("of the guest", 8000, 2)
	if err := errors.Join(put(t, guest, nil, late), guest.SetCatalogue(t.Context(), []byte("guest")), guest.Close(context.Background())); err != nil {
		t.Fatal(err)
	}
	held.end()

	again, held := openMixed(t, l, local, shared, append(index, late)...)
	if again.Fence() != 3 || string(again.Catalogue()) != "guest" {
		t.Errorf("the store has catalogue %q and the fencing number %d", again.Catalogue(), again.Fence())
	}
	for _, b := range append(index, late) {
		if err := get(t, again, b, 0, 0); err != nil {
			t.Errorf("block %s: %v", b.name, err)
		}
	}
	for _, v := range again.volumes {
		if !v.local {
			v.dev.lost(errors.New("the file system is gone"))
			if err := again.RemoveVolume(t.Context(), v.index, true); !errors.Is(err, ErrVolumeState) {
				t.Errorf("removal of the only shared volume: %v", err)
			}
		}
	}
	if err := again.SetCatalogue(t.Context(), []byte("local only")); !errors.Is(err, ErrFloor) {
		t.Errorf("a catalogue without the shared volume: %v", err)
	}
	_ = again.Close(context.Background()) // the shared volume has failed
	held.end()

	c := &claim{ledger: l}
	devices := []blockio.Device{sharedDevice(t, shared), sharedDevice(t, local)}
	if _, err := Open(t.Context(), Options{Devices: devices, Local: []bool{true, false}, CapacityBytes: 4 << 20, Owner: c}); !errors.Is(err, ErrShared) {
		t.Errorf("a shared volume as a local one: %v", err)
	}
	if err := errors.Join(devices[0].Close(), devices[1].Close()); err != nil {
		t.Error(err)
	}
}

// TestSharedVolumesBypassThePageCache: a device that goes through the page cache is refused as a shared volume, and opens as
// a local one beside a shared one.
func TestSharedVolumesBypassThePageCache(t *testing.T) {
	for _, isLocal := range []bool{false, true} {
		cached, err := posixio.Open(t.TempDir(), posixio.Options{Buffered: true})
		if err != nil {
			t.Fatal(err)
		}
		devices := []blockio.Device{sharedDevice(t, t.TempDir()), cached}
		s, err := Open(t.Context(), Options{Devices: devices, Local: []bool{false, isLocal}, CapacityBytes: 4 << 20, Owner: &claim{ledger: newLedger()}})
		refused := err != nil && strings.Contains(err.Error(), cached.Info().Path) && strings.Contains(err.Error(), "O_DIRECT")
		if refused == isLocal || isLocal && err != nil {
			t.Errorf("local %v: %v", isLocal, err)
		}
		if err != nil {
			err = errors.Join(devices[0].Close(), cached.Close())
		} else {
			err = s.Close(context.Background())
		}
		if err != nil {
			t.Error(err)
		}
	}
}

// TestAllVolumesOfSharedStore: a store with shared volumes opens degraded if a volume is absent, but not if
// a directory is not given. A process that adopts the store has the directories of its last owner, and takes each
// other volume for a local one without a vote. It would be certain of a catalogue that an unlisted shared
// volume may have a newer one of.
func TestAllVolumesOfSharedStore(t *testing.T) {
	dirs, l := []string{t.TempDir(), t.TempDir()}, newLedger()
	openThem := func(degraded bool, devices ...blockio.Device) error {
		c := &claim{ledger: l}
		defer c.end()
		s, err := Open(t.Context(), Options{Devices: devices, CapacityBytes: 4 << 20, Owner: c, Degraded: degraded})
		if err == nil {
			return errors.Join(s.Ready(), s.Close(context.Background()))
		}
		for _, d := range devices {
			err = errors.Join(err, d.Close())
		}
		return err
	}
	if err := openThem(false, sharedDevice(t, dirs[0]), sharedDevice(t, dirs[1])); err != nil {
		t.Fatal(err)
	}
	if err := openThem(true, sharedDevice(t, dirs[0]), Absent(dirs[1], errors.New("not mounted"))); err != nil {
		t.Errorf("with an absent volume: %v", err)
	}
	if err := openThem(true, sharedDevice(t, dirs[0])); !errors.Is(err, ErrForeign) || !strings.Contains(fmt.Sprint(err), "give all of them") {
		t.Errorf("with one of two directories: %v; want ErrForeign", err)
	}
}
