package blockstore

import (
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
)

// The sentinel errors differ in the reaction that they require of the caller.
var (
	// ErrFull: no slot of that size is free. Evict, Free, and try again. The error is a *FullError.
	ErrFull = errors.New("store is full")
	// ErrVolumeFailed: the volume of the slot has failed or was removed. Write to another volume,
	// or treat the read as a miss.
	ErrVolumeFailed = errors.New("volume has failed")
	// ErrFloor: no volume can take a write. Each volume has failed, or its file system is below the
	// free-space floor. Refuse writes; reads still work.
	ErrFloor = errors.New("no volume takes writes")
	// ErrTooLarge: a segment is smaller than a slot of that size, an encrypted slot cannot have that many
	// layers, or the volumes have no room for the catalogue. Refuse the namespace.
	ErrTooLarge = errors.New("too large for the volumes")
	// ErrStale: the slot is free or has other content by now. The read is a miss; remove an index
	// entry that still has this Ref.
	ErrStale = errors.New("stale reference")
	// ErrCorrupt: the slot's bytes differ from the written ones. The read is a miss; drop the
	// block from the index.
	ErrCorrupt = errors.New("slot is corrupt")
	// ErrState: the state of the slot or of the store does not allow the call. Fix the caller.
	ErrState = errors.New("wrong state")
	// ErrBusy: the slot has MaxReaders readers. Try again.
	ErrBusy = errors.New("too many readers")
	// ErrForeign: the directories are volumes of different stores, or some volumes of the store are
	// not given. Fix the configuration.
	ErrForeign = errors.New("foreign volume")
	// ErrShared: the volume is shared, and Open was called without an Owner. Give the settings of the
	// cluster.
	ErrShared = errors.New("shared volume")
	// ErrNotOwner: this process may not own the shared volume any more. Nothing was written.
	ErrNotOwner = errors.New("this process does not own the volume")
	// ErrKey: a key of an encrypted volume is missing, or is another key. Give the key.
	ErrKey = errors.New("missing or wrong encryption key")
	// ErrErased: the epoch of the block has ended, and its secret was erased, so the slot can neither be read
	// nor written. It is a case of ErrStale: the read is a miss, and the block is not stored.
	ErrErased = fmt.Errorf("the secret of the epoch was erased: %w", ErrStale)
	// ErrVersion: a volume has another format version. Use the binary of that version, or an empty
	// directory.
	ErrVersion = ondisk.ErrVersion
	// ErrDamaged: the superblock of a volume cannot be read. Restore the directory, or start with
	// an empty one.
	ErrDamaged = ondisk.ErrDamaged
	// ErrClosed: the store is closed. The caller stops.
	ErrClosed = errors.New("blockstore is closed")
)

// FullError is the error for a request that does not fit into the store. errors.Is matches it with
// ErrFull.
type FullError struct {
	// SlotBytes is the slot size, Slots the number of requested slots, FreeSlots the number of free
	// slots of that size.
	SlotBytes        int64
	Slots, FreeSlots int
}

// Error states the request and the free slots.
func (e *FullError) Error() string {
	return fmt.Sprintf("blockstore: %d slots of %d bytes wanted, %d free, and no room for another segment: %v", e.Slots, e.SlotBytes, e.FreeSlots, ErrFull)
}

// Is makes errors.Is(err, ErrFull) true.
func (e *FullError) Is(target error) bool { return target == ErrFull }
