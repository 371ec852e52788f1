package blockiotest

import (
	"slices"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
)

// Volume is one empty volume under test.
type Volume struct {
	// Open opens the volume. It is called several times, also while an earlier Device is still
	// open, as a second process would do.
	Open func() (blockio.Device, error)
}

// Run runs every case, each on a new volume, and checks that the case leaves no goroutines and no
// file descriptors behind. Other tests of the caller must not run in parallel.
func Run(t *testing.T, newVolume func(t *testing.T) Volume) {
	for _, c := range slices.Concat(fileCases, doCases, volumeCases) {
		t.Run(c.name, func(t *testing.T) {
			testkit.VerifyNone(t)
			c.run(&rig{T: t, vol: newVolume(t)})
		})
	}
}

type testCase struct {
	name string
	run  func(b *rig)
}

// rig is what one case uses: its test and its volume.
type rig struct {
	*testing.T
	vol Volume
}

// open opens the volume again; the device is closed when the case ends.
func (b *rig) open() blockio.Device {
	b.Helper()
	d, err := b.vol.Open()
	if err != nil {
		b.Fatalf("open volume: %v", err)
	}
	b.Cleanup(func() {
		if err := d.Close(); err != nil {
			b.Errorf("close device: %v", err)
		}
	})
	return d
}

// create makes a file of the given number of pages.
func (b *rig) create(d blockio.Device, name string, pages int64) blockio.File {
	b.Helper()
	f, err := d.Create(name, pages*blockio.Align)
	if err != nil {
		b.Fatalf("create %s of %d pages: %v", name, pages, err)
	}
	return f
}

// buffer returns aligned memory of the given number of pages.
func (b *rig) buffer(pages int) []byte {
	b.Helper()
	return testkit.AlignedBuffer(b, pages*blockio.Align)
}

// filled returns a buffer whose bytes depend on seed and on their position, so that no two pages
// are equal.
func (b *rig) filled(pages int, seed uint64) []byte {
	b.Helper()
	buf := b.buffer(pages)
	fill(buf, seed)
	return buf
}

func fill(buf []byte, seed uint64) {
	x := seed*0x9e3779b97f4a7c15 + 1
	for i := range buf {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		buf[i] = byte(x >> 32)
	}
}

// do runs a batch and fails the case unless the batch and each of its requests succeed.
func (b *rig) do(d blockio.Device, batch ...blockio.Request) {
	b.Helper()
	if err := d.Do(b.Context(), batch); err != nil {
		b.Fatalf("do: %v", err)
	}
	for i, r := range batch {
		if r.Err != nil {
			b.Fatalf("request %d of %d (%v at %d): %v", i, len(batch), r.Op, r.Offset, r.Err)
		}
	}
}

func (b *rig) write(d blockio.Device, f blockio.File, page int64, bufs ...[]byte) {
	b.Helper()
	b.do(d, blockio.Request{Op: blockio.Write, File: f, Offset: page * blockio.Align, Bufs: bufs})
}

func (b *rig) read(d blockio.Device, f blockio.File, page int64, bufs ...[]byte) {
	b.Helper()
	b.do(d, blockio.Request{Op: blockio.Read, File: f, Offset: page * blockio.Align, Bufs: bufs})
}

// expect reads pages at page and compares them with want.
func (b *rig) expect(d blockio.Device, f blockio.File, page int64, want []byte) {
	b.Helper()
	got := b.filled(len(want)/blockio.Align, 0xbad)
	b.read(d, f, page, got)
	b.same(got, want)
}

func (b *rig) same(got, want []byte) {
	b.Helper()
	for i := range want {
		if got[i] != want[i] {
			b.Fatalf("byte %d of %d (page %d) is %#02x, want %#02x", i, len(want), i/blockio.Align, got[i], want[i])
		}
	}
}
