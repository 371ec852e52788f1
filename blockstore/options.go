package blockstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"

	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
)

// Options configure a Store. Devices and CapacityBytes are required; the zero
// value of every other field is its default.
type Options struct {
	// Devices are the volumes, in any order. If Open succeeds, the store owns them, and Close
	// closes them.
	Devices []blockio.Device
	// Identity is the text of the volumes' lock files. It shows an operator which process owns the
	// volumes.
	Identity string
	// Owner, if not nil, decides which process owns the volumes, in place of the devices' locks. It
	// is for volumes on a file system that several hosts mount (shared volumes).
	Owner Owner
	// Local has an element for each of Devices, or is nil. It is for a store with an Owner. A true
	// element marks a local volume, which only this host has and which keeps its file lock. All other
	// volumes are shared, and at least one must be.
	Local []bool
	// SharedOnly is set by a process that adopts a store. Devices are then all shared volumes of the
	// store. The local volumes of the store are on another host, and are missing.
	SharedOnly bool
	// Plain has an element for each of Devices, or is nil. It is for a store with Keys. A true element marks
	// a volume whose slots are not encrypted, for good unless a later Open has false. Open fails with
	// ErrKey if the volume has encrypted slots. nil keeps what the superblocks say; new volumes are then
	// encrypted.
	Plain []bool
	// CapacityBytes is the maximum size of all files of all volumes together. It may differ between
	// two Opens; segments that exceed it are removed when they become empty.
	CapacityBytes int64
	// SegmentBytes is the size of a segment file, a multiple of 4096, fixed when a volume is
	// formatted. Default: 1 GiB or a sixteenth of a volume's share of the capacity, whichever is
	// less, but at least 16 MiB or a quarter of that share, whichever is less. 0 accepts the size
	// that the volumes have.
	SegmentBytes int64
	// CatalogueBytes is the maximum size of the catalogue blob, fixed when a volume is formatted.
	// Default 1 MiB, less if the capacity is small.
	CatalogueBytes int64
	// FreeFloorBytes is the free space of a volume's file system, in bytes, below which no write is
	// accepted and no segment is created. Default 0: no limit.
	FreeFloorBytes int64
	// StripeBytes is the number of bytes of a sequence that are placed on one volume before the
	// next volume is used, if there are several. Default 64 MiB.
	StripeBytes int64
	// Prewrite makes each volume keep one spare segment filled with zeroes. Without it, the first
	// write to each part of a new segment takes twice as long, because the file system has
	// allocated that part but never written it.
	Prewrite bool
	// AddVolumes accepts empty volumes next to formatted ones, for an added disk or for the
	// replacement of a lost one. If it is not set, Open assumes that an empty directory is a disk
	// that is not mounted, and refuses it.
	AddVolumes bool
	// Health has the limits that decide a volume's state.
	Health health.Options
	// Degraded opens the store although volumes are missing, if at least one is present. A volume
	// is missing if its device is absent or fails during Open, its directory is empty (unless AddVolumes
	// is set), or it was not given, which a store with an Owner refuses. Without Degraded all volumes must be present.
	Degraded bool
	// CapacityOfPresent is set if CapacityBytes is divided among the present volumes only.
	// Otherwise it is divided among all volumes, and the shares of missing and removed volumes are
	// not used.
	CapacityOfPresent bool
	// Alloc allocates scratch memory that starts at a multiple of 4096, for scans, scrubbing and
	// zeroing; release frees it. Default: the Go heap. Memory of an arena makes these tasks faster.
	Alloc func(ctx context.Context, sizeBytes int) (buf []byte, release func(), err error)
	// Logger receives messages on which an operator should act. Default: none.
	Logger *slog.Logger
	// Keys encrypts the volumes: the newest key encrypts new blocks and the catalogue. Volumes may have
	// blocks of the other keys and blocks that are not encrypted. nil: no encryption; encrypted volumes are
	// then refused. An encrypted block has at most ondisk.MaxSealedLayers layers.
	Keys *crypt.Keyring
	// EpochKeys, if not nil, decides whether the slots that are written from now on need the secret of
	// their epoch beside the newest key, so that EraseEpochs makes them unreadable. It needs Keys. nil
	// keeps the choice that the superblocks have. The engine then names its live epochs to SetCatalogue,
	// and calls EraseEpochs after epochs have ended, and once after Ready.
	EpochKeys *bool
	// Rand is the source of the random bytes of uuids. Default: crypto/rand.
	Rand io.Reader

	// salts is the source of salts; nil: crypto/rand. Tests make it constant.
	salts io.Reader
	// secrets is the source of the secrets of epochs; nil: crypto/rand. Tests make it constant.
	secrets io.Reader
	// node is the id that a new store gets; zero: a random one.
	node ondisk.UUID
}

const (
	defaultSegmentBytes   = 1 << 30
	smallSegmentBytes     = 16 << 20
	defaultCatalogueBytes = 1 << 20
	defaultStripeBytes    = 64 << 20
)

// EnsureDefaults returns o with defaults in the zero fields. SegmentBytes and CatalogueBytes stay
// 0: their defaults are applied when a volume is formatted.
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
		return fmt.Errorf("blockstore: capacity of %d bytes; want more than 0", o.CapacityBytes)
	case o.SegmentBytes < 0 || o.SegmentBytes%ondisk.Page != 0 || o.SegmentBytes > ondisk.MaxSegmentBytes || o.SegmentBytes == ondisk.Page:
		return fmt.Errorf("blockstore: segments of %d bytes; want a multiple of %d from %d to %d", o.SegmentBytes, ondisk.Page, 2*ondisk.Page, int64(ondisk.MaxSegmentBytes))
	case o.CatalogueBytes < 0 || o.CatalogueBytes%ondisk.Page != 0 || o.CatalogueBytes > ondisk.MaxCatalogueBytes:
		return fmt.Errorf("blockstore: %d bytes of catalogue; want a multiple of %d up to %d", o.CatalogueBytes, ondisk.Page, ondisk.MaxCatalogueBytes)
	case o.FreeFloorBytes < 0:
		return fmt.Errorf("blockstore: free-space floor of %d bytes", o.FreeFloorBytes)
	case o.Owner == nil && (o.Local != nil || o.SharedOnly):
		return errors.New("blockstore: local and shared volumes need an Owner")
	case o.Local != nil && (len(o.Local) != len(o.Devices) || !slices.Contains(o.Local, false)):
		return fmt.Errorf("blockstore: %d of %d volumes are marked as local or shared; want all, at least one of them shared", len(o.Local), len(o.Devices))
	case o.Plain != nil && (len(o.Plain) != len(o.Devices) || o.Keys == nil):
		return fmt.Errorf("blockstore: %d of %d volumes are marked as plain or encrypted; want all, and keys", len(o.Plain), len(o.Devices))
	case o.EpochKeys != nil && *o.EpochKeys && o.Keys == nil:
		return errors.New("blockstore: the secrets of epochs need keys")
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

// Durability decides whether a write is acknowledged before or after the sync that protects it from
// a power loss. The store's user, server/storage, implements it; the type is defined here so that
// all packages use the same names.
type Durability uint8

const (
	// DurabilityBatch, the default: a write is acknowledged at once; data and index are synced
	// together at least once per second.
	DurabilityBatch Durability = iota
	// DurabilityAsync: a write is acknowledged at once, and synced when the system decides.
	DurabilityAsync
	// DurabilitySync: a write is acknowledged after data and index are synced.
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

// local reports whether Devices[i] is a local volume of a store with shared volumes.
func (o *Options) local(i int) bool { return o.Local != nil && o.Local[i] }

// heapAlloc returns an aligned part of a larger slice. That is safe: the Go heap does not move
// objects, and the device completes its request before the slice can be collected.
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
