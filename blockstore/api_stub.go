package blockstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
)

var errNotYet = fmt.Errorf("blockstore: not built yet: %w", errors.ErrUnsupported)

// Store is the set of volumes of one storage node. All methods may be called
// concurrently.
type Store struct{}

// Open opens, or formats if they are empty, the volumes of opts and locks them
// for this process. Another owner is a *blockio.OwnedError. If it fails the
// devices stay the caller's, which should close them.
func Open(ctx context.Context, opts Options) (*Store, error) { return nil, errNotYet }

// Close waits for calls that are in flight, syncs, and closes the devices. It
// may be called twice. If ctx ends first, Close goes on in the background and
// returns ctx's error.
func (s *Store) Close(ctx context.Context) error { return errNotYet }

// SlotLayout returns the shape of the slot that holds a piece: the payload lies
// HeaderBytes into a buffer of SlotBytes. It fails with ErrLayout for a piece
// that cannot be, and with ErrTooLarge for one that no segment can hold.
func (s *Store) SlotLayout(pieceBytes int64, layers int) (ondisk.Layout, error) {
	return ondisk.Layout{}, errNotYet
}

// Adopt makes the slot of an index entry live, before Ready. It fails with
// ErrStale if the slot cannot hold such a piece of that generation any more, and
// with ErrState if another entry has claimed it: drop the entry.
func (s *Store) Adopt(ref kv.Ref, pieceBytes int64, layers int) error { return errNotYet }

// Ready ends the time of Adopt: every other slot is free, and Reserve works.
func (s *Store) Ready() error { return errNotYet }

// Reserve takes n free slots for the consecutive pieces of one sequence and
// returns them in order, in the state writing, each with a new generation. If
// hasAfter is set it tries to go on right after that extent. It takes all n or
// none. It may create or cut a segment, which is I/O. It fails with ErrFull (a
// *FullError), ErrFloor, ErrTooLarge.
func (s *Store) Reserve(ctx context.Context, pieceBytes int64, layers, n int, after kv.Extent, hasAfter bool) ([]kv.Ref, error) {
	return nil, errNotYet
}

// Cheapest returns the live slots of the segment that could be emptied, and cut
// to slots for such pieces, at the least loss: the one of another slot size that
// has the fewest live bytes. It is for an engine that got ErrFull although it
// evicted enough bytes, of another size. None if there is no such segment.
func (s *Store) Cheapest(pieceBytes int64, layers int) []kv.Ref { return nil }

// Write is one slot to be written.
type Write struct {
	// Ref is a reserved slot.
	Ref kv.Ref
	// Header describes the block. Its Ref is set by Store.Write, LayerSums are
	// the writer's and have been verified.
	Header ondisk.SlotHeader
	// Buf is Layout.SlotBytes of aligned memory with the payload at
	// Layout.HeaderBytes. Store.Write fills in the header and clears the
	// padding; the buffer is its own until it returns.
	Buf []byte
	// Err is the outcome of this slot: nil means that the device completed it.
	Err error
}

// Write writes the slots as one batch for each volume and returns when every
// one has completed, with the outcome in its Err. The error is that of the first
// slot that failed, or nil. A slot that failed should be Abandoned.
func (s *Store) Write(ctx context.Context, batch []Write) error { return errNotYet }

// Commit makes a written slot live. It fails with ErrState if its write has not
// completed (data-before-index).
func (s *Store) Commit(ref kv.Ref) error { return errNotYet }

// Abandon frees a slot that was reserved and not committed.
func (s *Store) Abandon(ref kv.Ref) error { return errNotYet }

// Free frees a live slot: at once, or when its last reader has left. It fails
// with ErrStale if the slot is not live in that generation.
func (s *Store) Free(ref kv.Ref) error { return errNotYet }

// Pin counts a reader in: the slot is not reused until Unpin. It fails with
// ErrStale if the slot is not live in that generation, and with ErrBusy at
// MaxReaders.
func (s *Store) Pin(ref kv.Ref) error { return errNotYet }

// Unpin counts a reader out.
func (s *Store) Unpin(ref kv.Ref) error { return errNotYet }

// Read is one piece, or a range of its layers, to be read.
type Read struct {
	Ref kv.Ref
	// Want is what the slot must hold.
	Want ondisk.SlotKey
	// FirstLayer and Layers choose the layers; Layers 0 means all.
	FirstLayer, Layers int
	// Buf is aligned memory. For all layers it is Layout.SlotBytes long and gets
	// the whole slot, payload at Layout.HeaderBytes. For a range it is as long as
	// the bytes result of Layout.Range says, and the first layer starts at its
	// skip. It is the store's until Read returns; unless Err is nil its content
	// means nothing.
	Buf []byte
	// LayerSums gets the checksums of the chosen layers, as the writer made
	// them; its capacity is reused.
	LayerSums []uint64
	// Class, Parent and Depth are as in the slot's header.
	Class  ondisk.Class
	Parent kv.BlockID
	Depth  uint32
	// Err is the outcome: nil means that the bytes are those that were written.
	// ErrStale and ErrCorrupt are misses; another error is the device's.
	Err error
}

// Read reads and verifies the pieces, as one batch for each volume, and returns
// when every one has its outcome in Err. The error is ctx's or the device's if
// the batch was not admitted, or ErrClosed; outcomes of single pieces are not
// errors of the call. Each slot is pinned meanwhile; the caller need not.
func (s *Store) Read(ctx context.Context, batch []Read) error { return errNotYet }

// Sync returns once every Write that had returned before is durable, on the
// volumes of refs, or on all volumes if there are none. Concurrent calls share
// the device's syncs.
func (s *Store) Sync(ctx context.Context, refs ...kv.Ref) error { return errNotYet }

// SetCatalogue replaces the catalogue, an opaque blob, on every volume. When it
// returns nil the new one is durable; if it fails or the process dies, either
// the old or the new one is found at the next Open.
func (s *Store) SetCatalogue(ctx context.Context, blob []byte) error { return errNotYet }

// Catalogue returns a copy of the newest catalogue, empty if none was set.
func (s *Store) Catalogue() []byte { return nil }

// ScanOptions configure a Scan.
type ScanOptions struct {
	// Verify reads the payloads as well and passes on only slots whose every
	// layer has its checksum.
	Verify bool
}

// ScanStats counts what a Scan saw.
type ScanStats struct {
	// Segments and Slots were looked at; Found were passed on.
	Segments, Slots, Found int64
	// Blank slots never held a block in this cut; Damaged ones had a header or,
	// with Verify, a layer with a wrong checksum; Unreadable ones an I/O error.
	Blank, Damaged, Unreadable int64
	Bytes                      int64
}

// Scan reads the header of every slot of every segment, whatever its state, and
// calls fn for each that holds an intact header that belongs there. Volumes are
// read in parallel; fn is called from one goroutine at a time, and an error from
// it ends the scan. The same block may be found several times: the highest
// generation is the newest. The header is fn's only during the call. Freed slots
// are found as well, until they are reused.
func (s *Store) Scan(ctx context.Context, opts ScanOptions, fn func(ref kv.Ref, h *ondisk.SlotHeader) error) (ScanStats, error) {
	return ScanStats{}, errNotYet
}

// ScrubOptions configure a Scrub.
type ScrubOptions struct {
	// BytesPerSecond limits the reading; 0 means no limit.
	BytesPerSecond int64
	// From is where to start: the Next of an earlier result, or 0.
	From kv.Extent
	// MaxBytes ends the call after that many bytes; 0 means at the end.
	MaxBytes int64
	// Report is called for each live slot that is corrupt or unreadable. It may
	// Free it.
	Report func(ref kv.Ref, err error)
}

// ScrubResult says how far a Scrub came.
type ScrubResult struct {
	// Next is where to go on; Done says that the end was reached and Next is 0.
	Next kv.Extent
	Done bool
	// Slots and Bytes were read, Corrupt and Unreadable were reported.
	Slots, Bytes, Corrupt, Unreadable int64
}

// Scrub reads live slots in order and verifies header and every layer. It ends
// at the end, at MaxBytes, or with ctx (and its error).
func (s *Store) Scrub(ctx context.Context, opts ScrubOptions) (ScrubResult, error) {
	return ScrubResult{}, errNotYet
}

// Finding is one violation of an invariant.
type Finding struct {
	// Invariant is its name in DESIGN.md, section 2.
	Invariant string
	Ref       kv.Ref
	Detail    string
}

// Check compares the slot table with all references of the index (one-owner):
// each reference names a live slot of that generation, no slot is referenced
// twice, each live slot is referenced. The store should be quiet meanwhile.
func (s *Store) Check(refs iter.Seq[kv.Ref]) []Finding { return nil }

// Stats describes the store at one moment.
type Stats struct {
	Volumes []VolumeStats
}

// VolumeStats describes one volume.
type VolumeStats struct{}

// Stats returns counters and gauges.
func (s *Store) Stats() Stats { return Stats{} }

// InspectVolume prints the superblock, the catalogue's areas and one line a
// segment of a volume that no store needs to have open. It takes no lock.
func InspectVolume(ctx context.Context, dev blockio.Device, w io.Writer) error { return errNotYet }

// InspectSegment prints the header of a segment and one line for each slot that
// holds one.
func InspectSegment(ctx context.Context, dev blockio.Device, segment uint32, w io.Writer) error {
	return errNotYet
}

// InspectSlot prints the header of a slot and verifies its layers.
func InspectSlot(ctx context.Context, dev blockio.Device, segment, slot uint32, w io.Writer) error {
	return errNotYet
}
