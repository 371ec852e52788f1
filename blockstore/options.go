package blockstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
)

// Options configure a Store. Devices and CapacityBytes are required; the zero
// value of every other field is its default.
type Options struct {
	// Devices are the volumes, in any order. Open takes them over if it
	// succeeds: Close closes them.
	Devices []blockio.Device
	// Identity is the owner line of the volumes' locks: one line that tells a
	// person which process holds them.
	Identity string
	// CapacityBytes caps the bytes of all files of all volumes together. It may
	// change from one Open to the next; surplus segments are given back as they
	// become free.
	CapacityBytes int64
	// SegmentBytes is the size of a segment file, a multiple of 4096, fixed when
	// a volume is formatted. Default 1 GiB, or a sixteenth of a volume's share
	// of the capacity if that is less, but no less than 16 MiB or a quarter of
	// the share. 0 accepts whatever the volumes have.
	SegmentBytes int64
	// CatalogueBytes is the room for the catalogue blob, fixed when a volume is
	// formatted. Default 1 MiB, or less if the capacity is small.
	CatalogueBytes int64
	// FreeFloorBytes is the free space of a volume's file system below which no
	// write is accepted and no segment created. Default 0: no floor.
	FreeFloorBytes int64
	// StripeBytes is how much of a sequence is put on one volume before the
	// next one takes over, if there are several. Default 64 MiB.
	StripeBytes int64
	// Prewrite keeps one segment ahead of need filled with zeroes on each
	// volume: first writes into merely allocated space cost twice.
	Prewrite bool
	// AddVolumes accepts empty volumes next to formatted ones: an added disk,
	// or the replacement of a lost one. Otherwise an empty directory is taken
	// for a disk that is not mounted, and refused.
	AddVolumes bool
	// Health are the limits by which a volume's state is decided.
	Health health.Options
	// Degraded opens the store although volumes are missing, as long as one is
	// there: an absent device, an empty directory (unless AddVolumes), or one that
	// was not given. Otherwise all must be there.
	Degraded bool
	// CapacityOfPresent says that CapacityBytes is for the volumes that are there,
	// not for missing and removed ones as well.
	CapacityOfPresent bool
	// Alloc gives scratch memory that starts at a multiple of 4096, for scans,
	// scrubbing and zeroing; release gives it back. Default: the Go heap. An
	// arena makes them faster.
	Alloc func(ctx context.Context, sizeBytes int) (buf []byte, release func(), err error)
	// Logger gets what a person should act on. Default: none.
	Logger *slog.Logger
	// Rand gives the random bytes of uuids. Default: crypto/rand.
	Rand io.Reader
}

const (
	defaultSegmentBytes   = 1 << 30
	smallSegmentBytes     = 16 << 20
	defaultCatalogueBytes = 1 << 20
	defaultStripeBytes    = 64 << 20
)

// EnsureDefaults returns o with every zero field that has a default filled in.
// SegmentBytes and CatalogueBytes stay 0: their defaults are applied when a
// volume is formatted.
func (o Options) EnsureDefaults() Options {
	if o.Identity == "" {
		o.Identity = "a penstock block store"
	}
	o.Health.EnsureDefaults()
	if o.StripeBytes == 0 {
		o.StripeBytes = defaultStripeBytes
	}
	if o.Alloc == nil {
		o.Alloc = heapAlloc
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// Validate reports the first thing that is wrong with o, or nil.
func (o Options) Validate() error {
	switch n := len(o.Devices); {
	case n < 1 || n > kv.MaxVolumes:
		return fmt.Errorf("blockstore: %d volumes; want 1 to %d", n, kv.MaxVolumes)
	case o.CapacityBytes < 1:
		return fmt.Errorf("blockstore: capacity of %d bytes; want some", o.CapacityBytes)
	case o.SegmentBytes < 0 || o.SegmentBytes%ondisk.Page != 0 || o.SegmentBytes > ondisk.MaxSegmentBytes || o.SegmentBytes == ondisk.Page:
		return fmt.Errorf("blockstore: segments of %d bytes; want a multiple of %d from %d to %d", o.SegmentBytes, ondisk.Page, 2*ondisk.Page, int64(ondisk.MaxSegmentBytes))
	case o.CatalogueBytes < 0 || o.CatalogueBytes%ondisk.Page != 0 || o.CatalogueBytes > ondisk.MaxCatalogueBytes:
		return fmt.Errorf("blockstore: %d bytes of catalogue; want a multiple of %d up to %d", o.CatalogueBytes, ondisk.Page, ondisk.MaxCatalogueBytes)
	case o.FreeFloorBytes < 0:
		return fmt.Errorf("blockstore: free-space floor of %d bytes", o.FreeFloorBytes)
	case o.StripeBytes < 0:
		return fmt.Errorf("blockstore: stripe of %d bytes", o.StripeBytes)
	}
	for i, d := range o.Devices {
		if d == nil {
			return fmt.Errorf("blockstore: device %d is nil", i)
		}
	}
	return o.Health.Validate()
}

// Durability says when a write is acknowledged, relative to the sync that makes
// it survive a power loss. The engine acts on it; it is defined here so that
// every layer uses the same words.
type Durability uint8

const (
	// DurabilityBatch, the default: acknowledged at once, data and index are
	// synced together at least each second.
	DurabilityBatch Durability = iota
	// DurabilityAsync: acknowledged at once, synced when the system pleases.
	DurabilityAsync
	// DurabilitySync: acknowledged after data and index are synced.
	DurabilitySync
)

// String returns batch, async or sync.
func (d Durability) String() string {
	switch d {
	case DurabilityBatch:
		return "batch"
	case DurabilityAsync:
		return "async"
	case DurabilitySync:
		return "sync"
	}
	return fmt.Sprintf("Durability(%d)", uint8(d))
}

var errDurability = errors.New("want async, batch or sync")

// ParseDurability is the inverse of Durability.String.
func ParseDurability(s string) (Durability, error) {
	for _, d := range []Durability{DurabilityBatch, DurabilityAsync, DurabilitySync} {
		if d.String() == s {
			return d, nil
		}
	}
	return 0, fmt.Errorf("blockstore: durability %q: %w", s, errDurability)
}

// MarshalText encodes the durability as String does.
func (d Durability) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (d *Durability) UnmarshalText(text []byte) error {
	v, err := ParseDurability(string(text))
	if err != nil {
		return err
	}
	*d = v
	return nil
}

// heapAlloc cuts an aligned slice out of a larger one. The Go heap does not
// move, and the device returns before the slice can be collected.
func heapAlloc(_ context.Context, sizeBytes int) ([]byte, func(), error) {
	b := make([]byte, sizeBytes+blockio.Align)
	for off := range blockio.Align {
		if blockio.Aligned(b[off:]) {
			b = b[off : off+sizeBytes : off+sizeBytes]
			break
		}
	}
	return b, func() {}, nil
}
