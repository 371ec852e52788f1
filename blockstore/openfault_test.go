package blockstore

import (
	"errors"
	"fmt"
	"testing"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
)

// filled makes a closed store with blocks in several segments of each of three volumes.
func filled(t *testing.T) (devs []*memio.Device, blocks []*block) {
	t.Helper()
	for _, path := range []string{"a", "b", "c"} {
		devs = append(devs, memio.New(memio.Options{Path: path}))
	}
	s, err := open(t, Options{SegmentBytes: 32 << 10}, devs...)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	for i := range 60 {
		b := newBlock(fmt.Sprint(i), 3000, 3)
		if err := put(t, s, nil, b); err != nil {
			t.Fatal(err)
		}
		blocks = append(blocks, b)
	}
	if err := errors.Join(s.SetCatalogue(t.Context(), []byte("c")), s.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	return devs, blocks
}

// adopted opens the store and adopts the blocks. It returns the numbers of adopted blocks by volume.
func adopted(t *testing.T, degraded bool, blocks []*block, devs ...blockio.Device) (*Store, map[uint32]int, error) {
	t.Helper()
	s, err := Open(t.Context(), Options{Devices: devs, CapacityBytes: 1 << 20, Degraded: degraded})
	if err != nil {
		return nil, nil, err
	}
	hits := map[uint32]int{}
	for _, b := range blocks {
		if s.Adopt(b.ref, 3000, 3) == nil {
			hits[b.ref.Extent.Volume()]++
		}
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	return s, hits, nil
}

// TestDegradedOpenFaults makes one of three volumes fail once, or from then on, at each call of a
// degraded Open. The store opens and has the blocks of the other volumes. The next Open without
// a fault has all blocks.
func TestDegradedOpenFaults(t *testing.T) {
	for _, rule := range []string{`(Err EIO (After %d))`, `(Err EIO (And Any (After %d) (Count 1)))`} {
		devs, blocks := filled(t)
		again := func(bad blockio.Device) []blockio.Device {
			devs[0], devs[2] = devs[0].Reopen(), devs[2].Reopen()
			return []blockio.Device{devs[0], bad, devs[2]}
		}
		for n := 0; ; n++ {
			devs[1] = devs[1].Reopen()
			bad := faultio.Wrap(devs[1], rules(t, fmt.Sprintf(rule, n)))
			s, hits, err := adopted(t, true, blocks, again(bad)...)
			if err != nil {
				t.Fatalf(rule+": a degraded store does not open: %v", n, err)
			}
			injected := bad.Counter().Injected()
			bad.SetRules(nil)
			if hits[0] == 0 || hits[2] == 0 || hits[0]+hits[1]+hits[2] < len(blocks) && len(injected) == 0 {
				t.Errorf(rule+": blocks by volume %v", n, hits)
			}
			if s.Missing(1) && (s.volumes[1].dev.health().State != health.Failed || hits[1] != 0) {
				t.Errorf(rule+": the missing volume is %v and has %d blocks", n, s.volumes[1].dev.health().State, hits[1])
			}
			if b := newBlock("new", 3000, 3); string(s.Catalogue()) != "c" || put(t, s, nil, b) != nil || get(t, s, b, 0, 0) != nil {
				t.Errorf(rule+": the store takes no blocks; catalogue %q", n, s.Catalogue())
			}
			if err := s.Close(t.Context()); err != nil {
				t.Errorf(rule+": close: %v", n, err)
			}
			if len(injected) == 0 {
				break
			}
			devs[1] = devs[1].Reopen()
			s, hits, err = adopted(t, false, blocks, again(devs[1])...)
			if err != nil {
				t.Fatalf(rule+": open without the fault: %v", n, err)
			}
			if got := hits[0] + hits[1] + hits[2]; got != len(blocks) {
				t.Errorf(rule+": %d of %d blocks after the fault: %v", n, got, len(blocks), hits)
			}
			if err := s.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestUnreadableSegmentHeader: a store opens although a bad sector is under the header of one segment.
// The blocks of that segment are lost, the blocks of the others are not. A disk of which no segment
// can be read is refused.
func TestUnreadableSegmentHeader(t *testing.T) {
	devs, blocks := filled(t)
	lost := 0
	for _, b := range blocks {
		if b.ref.Extent.Volume() == 1 && b.ref.Extent.Segment() == 1 {
			lost++
		}
	}
	if lost == 0 {
		t.Fatal("no block is in segment 1 of volume 1")
	}
	bad := faultio.Wrap(devs[1].Reopen(), rules(t, fmt.Sprintf(`(Err EIO (And Reads (File %q) (Offset 0 4096)))`, ondisk.SegmentName(1))))
	devs[0], devs[2] = devs[0].Reopen(), devs[2].Reopen()
	s, hits, err := adopted(t, false, blocks, devs[0], bad, devs[2])
	if err != nil {
		t.Fatal(err)
	}
	if got := hits[0] + hits[1] + hits[2]; got != len(blocks)-lost {
		t.Errorf("%d of %d blocks, %d of them in the segment: %v", got, len(blocks), lost, hits)
	}
	if vs := s.Stats().Volumes[1]; vs.Bad != 1 {
		t.Errorf("%d bad segments; want 1", vs.Bad)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	all := rules(t, `(Err EIO (And Reads (File "segment-*")))`)
	devs[0], devs[2] = devs[0].Reopen(), devs[2].Reopen()
	devs[1] = devs[1].Reopen()
	if s, hits, err := adopted(t, false, blocks, devs[0], faultio.Wrap(devs[1], all), devs[2]); err == nil {
		t.Errorf("the store opens with blocks %v although no segment of a volume can be read", hits)
		_ = s.Close(t.Context())
	}
	for i, d := range devs {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		devs[i] = d.Reopen()
	}
	s, hits, err = adopted(t, false, blocks, devs[0], devs[1], devs[2])
	if err != nil {
		t.Fatal(err)
	}
	if got := hits[0] + hits[1] + hits[2]; got != len(blocks) {
		t.Errorf("%d of %d blocks when the disk is read again: %v", got, len(blocks), hits)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
