package blockstore

import (
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
)

// Sentinels, by what the caller should do.
var (
	// ErrFull: no slot of that size is free; evict, Free, and try again. The
	// error is a *FullError.
	ErrFull = errors.New("store is full")
	// ErrVolumeFailed: the volume of the slot has failed, or is removed; write
	// elsewhere, or take it for a miss.
	ErrVolumeFailed = errors.New("volume has failed")
	// ErrFloor: the file system is below the free-space floor, or a volume
	// cannot be written any more; refuse writes, go on reading.
	ErrFloor = errors.New("no volume takes writes")
	// ErrTooLarge: no segment can hold such a slot; refuse the namespace.
	ErrTooLarge = errors.New("slot does not fit a segment")
	// ErrStale: the slot holds something else by now, or nothing; a miss, and an
	// index entry that still has this Ref should be dropped.
	ErrStale = errors.New("stale reference")
	// ErrCorrupt: the slot's bytes are not what was written; a miss, and the
	// block should be dropped from the index.
	ErrCorrupt = errors.New("slot is corrupt")
	// ErrState: the call does not fit the state of the slot or the store; fix
	// the caller.
	ErrState = errors.New("wrong state")
	// ErrBusy: a slot has as many readers as can be counted; try again.
	ErrBusy = errors.New("too many readers")
	// ErrForeign: the directories are not the volumes of one store, or not all
	// of them; fix the configuration.
	ErrForeign = errors.New("foreign volume")
	// ErrVersion: a volume of another format version; use that version's
	// binary, or an empty directory.
	ErrVersion = ondisk.ErrVersion
	// ErrDamaged: a volume whose superblock cannot be read; restore the
	// directory or start with an empty one.
	ErrDamaged = ondisk.ErrDamaged
	// ErrClosed: the store is closed; stop.
	ErrClosed = errors.New("blockstore is closed")
)

// FullError says how much was asked for when the store was full. It is
// ErrFull.
type FullError struct {
	// SlotBytes is the slot size, Slots how many were wanted, FreeSlots how
	// many of that size were free.
	SlotBytes        int64
	Slots, FreeSlots int
}

// Error says what was wanted and what there was.
func (e *FullError) Error() string {
	return fmt.Sprintf("blockstore: %d slots of %d bytes wanted, %d free, and no room for another segment: %v", e.Slots, e.SlotBytes, e.FreeSlots, ErrFull)
}

// Is makes errors.Is(err, ErrFull) true.
func (e *FullError) Is(target error) bool { return target == ErrFull }
