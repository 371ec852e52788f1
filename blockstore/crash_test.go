package blockstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
)

// crashRun runs random operations on a store until a power failure, and records the references
// that an index could hold afterwards.
type crashRun struct {
	rng  *rand.Rand
	devs []*memio.Device
	live []*block
	// synced has the blocks that a Sync covered before they were freed: they must be there after
	// the crash. possible has all blocks to which an index could refer, if any suffix of its
	// updates was lost.
	synced   map[*block]bool
	possible []*block
	// catalogue is the last catalogue that was set, next one that was being set.
	catalogue, next []byte
	// tune, if not nil, changes the options of each Open.
	tune func(*Options)
}

func newCrashRun(seed uint64) *crashRun {
	c := &crashRun{rng: rand.New(rand.NewPCG(seed, 7)), synced: make(map[*block]bool)}
	for i := range 1 + c.rng.IntN(2) {
		c.devs = append(c.devs, memio.New(memio.Options{Path: fmt.Sprint("mem", i), Seed: seed}))
	}
	return c
}

var storySizes = []struct {
	piece  int64
	layers int
}{{3000, 3}, {4096, 1}, {12000, 4}}

func (c *crashRun) open(t *testing.T) (*Store, error) {
	opts := Options{CapacityBytes: 400_000, SegmentBytes: 32 << 10, CatalogueBytes: 4096, StripeBytes: 16 << 10}
	return openTuned(t, opts, c.tune, c.devs...)
}

// run runs the store until the power fails or the story ends. It returns the error that ended the
// story, if any.
func (c *crashRun) run(t *testing.T, steps int) error {
	s, err := c.open(t)
	if err != nil {
		return err
	}
	defer s.Close(context.Background())
	if err := s.Ready(); err != nil {
		return err
	}
	for range steps {
		if err := c.step(t, s); err != nil {
			return err
		}
	}
	return nil
}

func (c *crashRun) step(t *testing.T, s *Store) error {
	switch p := c.rng.IntN(100); {
	case p < 55:
		return c.putSome(t, s)
	case p < 75:
		return c.freeSome(s, 1+c.rng.IntN(4))
	case p < 90:
		if err := s.Sync(t.Context()); err != nil {
			return err
		}
		for _, b := range c.live {
			c.synced[b] = true
		}
		return nil
	case p < 95:
		c.next = fmt.Appendf(nil, "catalogue %d", c.rng.Uint32())
		if err := s.SetCatalogue(t.Context(), c.next); err != nil {
			return err
		}
		c.catalogue = c.next
		return nil
	default:
		return c.readSome(t, s)
	}
}

func (c *crashRun) putSome(t *testing.T, s *Store) error {
	size := storySizes[c.rng.IntN(len(storySizes))]
	var blocks []*block
	for range 1 + c.rng.IntN(5) {
		// Names are reused with other bytes: an old slot of the same block must not be accepted for
		// a newer one.
		blocks = append(blocks, newBlock(fmt.Sprint("b", c.rng.IntN(12)), size.piece, size.layers))
	}
	var after *block
	if n := len(c.live); n > 0 && c.live[n-1].key.PayloadBytes == size.piece {
		after = c.live[n-1]
	}
	err := put(t, s, after, blocks...)
	if errors.Is(err, ErrFull) {
		return c.freeSome(s, 6)
	}
	for _, b := range blocks {
		if b.ref.Generation != 0 {
			c.live = append(c.live, b)
			c.possible = append(c.possible, b)
		}
	}
	return err
}

func (c *crashRun) freeSome(s *Store, n int) error {
	for range min(n, len(c.live)) {
		i := c.rng.IntN(len(c.live))
		b := c.live[i]
		c.live = slices.Delete(c.live, i, i+1)
		delete(c.synced, b) // the free may be durable, so the block may be missing
		if err := s.Free(b.ref); err != nil {
			return err
		}
	}
	return nil
}

func (c *crashRun) readSome(t *testing.T, s *Store) error {
	for _, b := range c.live {
		if c.rng.IntN(4) == 0 {
			if err := get(t, s, b, 0, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// crash fails the power and replaces the devices by their content after the failure.
func (c *crashRun) crash(seed uint64) {
	for i, d := range c.devs {
		c.devs[i] = d.Crash(seed + uint64(i))
	}
}

// verify opens the remaining volumes and reads every block to which an index could refer: each read
// is exact or a miss, and reads of synced blocks are exact.
func (c *crashRun) verify(t *testing.T) {
	s, err := c.open(t)
	if err != nil {
		t.Fatalf("open after the crash: %v", err)
	}
	defer func() {
		if err := s.Close(context.Background()); err != nil {
			t.Errorf("close: %v", err)
		}
	}()
	// An index has one entry for each extent: any of the entries that the extent ever had.
	byExtent := make(map[kv.Extent]*block)
	for _, b := range c.possible {
		if old := byExtent[b.ref.Extent]; old == nil || (!c.synced[old] && (c.synced[b] || c.rng.IntN(2) == 0)) {
			byExtent[b.ref.Extent] = b
		}
	}
	adopted := make(map[string]*block)
	for _, e := range slices.Sorted(maps.Keys(byExtent)) {
		b := byExtent[e]
		if err := s.Adopt(b.ref, b.key.PayloadBytes, b.key.Layers); err == nil {
			adopted[b.ref.String()] = b
		} else if c.synced[b] {
			t.Fatalf("block %s was synced, and cannot be adopted: %v", b.name, err)
		} else if !errors.Is(err, ErrStale) {
			t.Fatalf("adopt %s: %v", b.name, err)
		}
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	for _, b := range adopted {
		err := get(t, s, b, 0, 0)
		switch {
		case err == nil:
		case c.synced[b]:
			t.Fatalf("block %s was synced, and is lost: %v", b.name, err)
		case errors.Is(err, ErrCorrupt), errors.Is(err, ErrStale):
			if err := s.Free(b.ref); err != nil {
				t.Fatal(err)
			}
			delete(adopted, b.ref.String())
		default:
			t.Fatalf("read %s: %v", b.name, err)
		}
	}
	if got := s.Catalogue(); !bytes.Equal(got, c.catalogue) && !bytes.Equal(got, c.next) {
		t.Fatalf("catalogue %q; want %q, or %q which was being set", got, c.catalogue, c.next)
	}
	c.goOn(t, s, adopted)
}

// goOn writes into the recovered store: new blocks must not damage old ones.
func (c *crashRun) goOn(t *testing.T, s *Store, adopted map[string]*block) {
	for i := range 3 {
		b := newBlock(fmt.Sprint("new", i), 3000, 3)
		if err := put(t, s, nil, b); err == nil {
			adopted[b.name] = b
		} else if !errors.Is(err, ErrFull) {
			t.Fatalf("put after recovery: %v", err)
		}
	}
	for _, b := range adopted {
		if err := get(t, s, b, 0, 0); err != nil {
			t.Fatalf("read %s after new writes: %v", b.name, err)
		}
	}
	if f := s.Check(slices.Values(refs(adopted))); len(f) != 0 {
		t.Fatalf("%d findings, the first: %v", len(f), f[0])
	}
}

// TestCrashPoints fails the power at every mutation of many random stories.
func TestCrashPoints(t *testing.T) {
	const steps = 40
	want := testkit.Rounds(10_000, 1000)
	switch {
	case testing.Short():
		want = 1000
	case invariants.Enabled:
		want = min(want, 2500) // the plain build runs all crash points
	}
	points := 0
	for seed := uint64(1); points < want; seed++ {
		whole := newCrashRun(seed)
		if err := whole.run(t, steps); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		mutations := int64(0)
		for _, d := range whole.devs {
			mutations = max(mutations, d.Mutations())
			d.Close()
		}
		for at := range mutations {
			c := newCrashRun(seed)
			// Both volumes lose power together, when the first has completed that many mutations.
			c.devs[c.rng.IntN(len(c.devs))].PowerOffAfter(at)
			c.rng = rand.New(rand.NewPCG(seed, 7))
			c.rng.IntN(2) // as newCrashRun drew the value
			err := c.run(t, steps)
			if err != nil && !errors.Is(err, memio.ErrPowerLost) {
				t.Fatalf("seed %d, power off after %d: %v", seed, at, err)
			}
			old := slices.Clone(c.devs)
			c.crash(seed<<20 + uint64(at))
			if !t.Run(fmt.Sprintf("seed=%d,at=%d", seed, at), c.verify) {
				return
			}
			for _, d := range append(old, c.devs...) {
				d.Close()
			}
			points++
		}
	}
	t.Logf("%d crash points", points)
}

// TestBootCounterNeverGoesBack: whatever value one damaged superblock copy holds, no generation is
// assigned twice.
func TestBootCounterNeverGoesBack(t *testing.T) {
	d := memio.New(memio.Options{})
	seen := make(map[kv.Generation]string)
	for i := range 40 {
		d = d.Reopen()
		s, err := open(t, Options{}, d)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Ready(); err != nil {
			t.Fatal(err)
		}
		b := newBlock(fmt.Sprint(i), 3000, 3)
		if err := put(t, s, nil, b); err != nil {
			t.Fatal(err)
		}
		if other := seen[b.ref.Generation]; other != "" {
			t.Fatalf("start %d issued generation %d again, which start %s had issued", i, b.ref.Generation, other)
		}
		seen[b.ref.Generation] = b.name
		newest := int64(s.volumes[0].superblock.Sequence % 2)
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if i%3 == 0 { // the newest copy, any byte of it
			r := d.Reopen()
			f, err := r.Open("superblock")
			if err != nil {
				t.Fatal(err)
			}
			page, err := readPages(t.Context(), r, f, newest*4096, 4096)
			if err != nil {
				t.Fatal(err)
			}
			page[(i*37)%200] ^= 0x10
			if err := doOne(t.Context(), r, blockio.Request{Op: blockio.Write, File: f, Offset: newest * 4096, Bufs: [][]byte{page}}); err != nil {
				t.Fatal(err)
			}
			r.Close()
		}
	}
}
