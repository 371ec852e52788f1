package blockstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
)

// Store is the set of volumes of one storage node. All methods may be called
// concurrently.
type Store struct {
	opts    Options
	log     *slog.Logger
	node    ondisk.UUID
	volumes []*volume // by index
	// slotBytesMax is the largest slot that a full segment holds.
	slotBytesMax int64

	generations generations
	ready       atomic.Bool
	submissions submissionPool
	headers     headerPool
	// freeFloorBytes is Options.FreeFloorBytes; SetFreeFloor changes it.
	freeFloorBytes atomic.Int64
	// turn is a counter that rotates the first choice among volumes with equally many used bytes.
	turn atomic.Uint32

	// gate counts the calls in progress. Close closes it, and later calls fail.
	gate blockio.Gate
	// meta is the token for writing superblocks or catalogues. boot is the boot counter of this
	// start, and changes only under the token.
	meta chan struct{}
	boot uint32
	// fence is the fencing number of this start, 0 if the store is not shared. It names the files of
	// superblock and catalogue. Set by Open.
	fence uint32
	// members has the operator's orders for the volumes; it changes under the meta token.
	members membership
	// keepers waits for the goroutines of the volumes, which end when stop is called. background
	// waits for the syncs, and for the segments that are being divided into slots.
	keepers, background sync.WaitGroup
	stop                context.CancelFunc
	life                context.Context
	closing             sync.Once
	closed              chan struct{} // closed when closeErr is set
	closeErr            error

	// catalogueCertain is the result of CatalogueCertain, set by Open.
	catalogueCertain bool
	// resealing: Open has found a catalogue that is not encrypted with the newest key. A process that ended
	// between the superblocks with a new key and the catalogue leaves one.
	resealing bool
	// wiping: Open has found a catalogue with secrets of epochs.
	wiping bool

	// epochs are the secrets of epochs that a quorum stores. It changes under meta and mu, together with
	// the catalogue.
	epochs atomic.Pointer[epochTable]
	// erasing is the table of an EraseEpochs that no quorum stores yet, because it runs or has failed.
	erasing atomic.Pointer[epochTable]

	mu sync.Mutex
	// keys are the current keys, nil without encryption.
	keys *crypt.Keyring
	// catalogue is the newest acknowledged catalogue. catalogueSequence is the highest sequence
	// number that a write of a catalogue has used, whether or not it succeeded.
	catalogue         []byte
	catalogueSequence uint64
}

// Node returns the identity of the store, which all its volumes share. It was chosen at random when
// they were formatted. Data that belongs to the store, such as its index, is labelled with the
// identity.
func (s *Store) Node() ondisk.UUID { return s.node }

// Volumes returns the number of volumes. Extents number them from 0.
func (s *Store) Volumes() int { return len(s.volumes) }

// enter admits a call until gate.Leave. It fails with ErrClosed after Close.
func (s *Store) enter() error {
	if !s.gate.Enter() {
		return ErrClosed
	}
	return nil
}

// volume returns the volume of an extent, or nil.
func (s *Store) volume(e kv.Extent) *volume {
	if i := int(e.Volume()); i < len(s.volumes) {
		return s.volumes[i]
	}
	return nil
}

// segmentOf returns the segment of a ref. It fails with ErrStale.
func (s *Store) segmentOf(ref kv.Ref) (*segment, error) {
	if v := s.volume(ref.Extent); v != nil {
		if g := v.space.segment(ref.Extent.Segment()); g != nil {
			return g, nil
		}
	}
	return nil, fmt.Errorf("blockstore: %v: no such segment: %w", ref, ErrStale)
}

// SlotLayout returns the shape of the slot that holds a piece. The slot has Layout.SlotBytes bytes,
// and the payload begins at Layout.HeaderBytes. SlotLayout fails with ondisk.ErrLayout for an
// impossible piece, and with ErrTooLarge for a piece that no segment can hold or that has too many layers
// to be encrypted.
func (s *Store) SlotLayout(pieceBytes int64, layers int) (ondisk.Layout, error) {
	l, err := ondisk.NewLayout(pieceBytes, layers)
	if err != nil {
		return l, err
	}
	if s.opts.Keys != nil && layers > ondisk.MaxSealedLayers {
		return l, fmt.Errorf("blockstore: block of %d layers; encrypted volumes hold blocks of at most %d: %w", layers, ondisk.MaxSealedLayers, ErrTooLarge)
	}
	if n := l.SlotBytes(); n > s.slotBytesMax {
		return l, fmt.Errorf("blockstore: slot of %d bytes; segments of this store hold at most %d; format a store with larger segments (more capacity, or --segment): %w", n, s.slotBytesMax, ErrTooLarge)
	}
	return l, nil
}

// Adopt makes the slot of an index entry live. It may be called only before Ready. It fails with
// ErrStale if the slot cannot hold such a piece of that generation, and with ErrState if another
// entry has the same slot. After an error the caller drops the entry.
func (s *Store) Adopt(ref kv.Ref, pieceBytes int64, layers int) error {
	if s.ready.Load() {
		return fmt.Errorf("blockstore: adopt %v after Ready: %w", ref, ErrState)
	}
	l, err := ondisk.NewLayout(pieceBytes, layers)
	if err != nil {
		return fmt.Errorf("blockstore: adopt %v: %w: %w", ref, err, ErrStale)
	}
	g, err := s.segmentOf(ref)
	if err != nil {
		return err
	}
	// No generation of this start is assigned before Ready, so no entry of an index can have one.
	if boot := s.generations.newest() >> sequenceBits; ref.Generation>>sequenceBits >= boot {
		return fmt.Errorf("blockstore: adopt %v: generation of start %d, this is start %d: %w", ref, ref.Generation>>sequenceBits, boot, ErrStale)
	}
	return g.adopt(ref, l.SlotBytes())
}

// Ready ends the phase of Adopt: every slot that was not adopted becomes free, and Reserve works. It
// fails with ErrKey if an adopted slot is encrypted with a key that Options.Keys does not have.
func (s *Store) Ready() error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.gate.Leave()
	if err := s.dropUnused(); err != nil {
		return err
	}
	if s.ready.Swap(true) {
		return fmt.Errorf("blockstore: Ready twice: %w", ErrState)
	}
	for _, v := range s.present() {
		for _, g := range v.space.sorted() {
			g.findFree()
		}
		v.space.markSurplus()
		s.keepers.Go(func() { v.keep(s.life) })
	}
	return nil
}

// Commit makes a written slot live. It fails with ErrState if the write of the slot has not
// completed (data-before-index).
func (s *Store) Commit(ref kv.Ref) error {
	g, err := s.segmentOf(ref)
	if err != nil {
		return err
	}
	if err := g.commit(ref); err != nil {
		return err
	}
	g.volume.syncer.committed(g.file)
	return nil
}

// Abandon frees a slot that was reserved and not committed. If a Write of the slot is in progress,
// the slot becomes free when that Write returns.
func (s *Store) Abandon(ref kv.Ref) error {
	g, err := s.segmentOf(ref)
	if err != nil {
		return err
	}
	return g.release(ref, false)
}

// Free frees a live slot. If the slot has readers, it becomes free when the last reader leaves.
// Free fails with ErrStale if the slot is not live with that generation.
func (s *Store) Free(ref kv.Ref) error {
	g, err := s.segmentOf(ref)
	if err != nil {
		return err
	}
	return g.release(ref, true)
}

// Pin adds a reader: the slot is not reused until Unpin. It fails with ErrStale if the slot is not
// live with that generation, and with ErrBusy at MaxReaders.
func (s *Store) Pin(ref kv.Ref) error {
	g, err := s.segmentOf(ref)
	if err != nil {
		return err
	}
	return g.pin(ref)
}

// Unpin removes a reader.
func (s *Store) Unpin(ref kv.Ref) error {
	g, err := s.segmentOf(ref)
	if err != nil {
		return err
	}
	return g.unpin(ref)
}

// Sync with refs makes slots durable before they are committed. It syncs the volumes of refs: every
// Write to these volumes that returned before the call is then durable. It returns an error if one
// of these volumes has failed. After a failed sync, Commit refuses the slots of that volume that
// were written before.
//
// Sync without refs syncs all volumes that have not failed. If it returns nil, every slot committed
// before the call is durable, except slots for which an earlier Sync without refs returned an
// error. If a volume fails while committed slots on it may not be durable, exactly one Sync without
// refs returns an error for the volume, even if the volume has recovered by then.
//
// Concurrent calls share the syncs of a device. The error is ctx's, or a *SyncError. A *SyncError
// names each volume with writes that may not be durable; the other volumes are synced.
func (s *Store) Sync(ctx context.Context, refs ...kv.Ref) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.gate.Leave()
	volumes, sync := s.volumes, (*syncer).syncAll
	if len(refs) > 0 {
		volumes, sync = s.volumesOf(refs), (*syncer).sync
	}
	failed := &SyncError{Volumes: make(map[uint32]error)}
	for i, err := range eachVolume(volumes, func(v *volume) error { return sync(&v.syncer, ctx) }) {
		if err != nil {
			failed.Volumes[volumes[i].index] = err
		}
	}
	if ctx.Err() != nil {
		return fmt.Errorf("blockstore: sync: %w", context.Cause(ctx))
	}
	if len(failed.Volumes) == 0 {
		return nil
	}
	return failed
}

// SyncError has the volumes that were not synced, with the reasons.
type SyncError struct{ Volumes map[uint32]error }

// Error names each volume with its error.
func (e *SyncError) Error() string {
	var b strings.Builder
	b.WriteString("blockstore: sync")
	for _, i := range slices.Sorted(maps.Keys(e.Volumes)) {
		fmt.Fprintf(&b, ": volume %d: %v", i, e.Volumes[i])
	}
	return b.String()
}

// Unwrap returns the errors of the volumes.
func (e *SyncError) Unwrap() []error { return slices.Collect(maps.Values(e.Volumes)) }

// Of returns the error of the ref's volume, or nil if the volume was synced.
func (e *SyncError) Of(ref kv.Ref) error { return e.Volumes[ref.Extent.Volume()] }

// syncing returns the volumes that are synced and store superblock and catalogue.
func (s *Store) syncing() []*volume {
	var volumes []*volume
	for _, v := range s.volumes {
		if v.dev.health().Syncs() {
			volumes = append(volumes, v)
		}
	}
	return volumes
}

func (s *Store) volumesOf(refs []kv.Ref) []*volume {
	var wanted [kv.MaxVolumes]bool
	for _, r := range refs {
		wanted[r.Extent.Volume()] = true
	}
	var volumes []*volume
	for _, v := range s.volumes {
		if wanted[v.index] {
			volumes = append(volumes, v)
		}
	}
	return volumes
}

// Close waits for calls that are in flight, syncs the volumes that have not failed, and closes the
// devices. It may be called twice. If ctx ends first, Close continues in the background and returns
// ctx's error.
func (s *Store) Close(ctx context.Context) error {
	s.closing.Do(func() {
		go func() {
			s.closeErr = s.shut()
			close(s.closed)
		}()
	})
	select {
	case <-s.closed:
		return s.closeErr
	case <-ctx.Done():
		return fmt.Errorf("blockstore: close continues in the background: %w", context.Cause(ctx))
	}
}

// shut performs Close.
func (s *Store) shut() error {
	s.stop()
	s.gate.Close()
	s.keepers.Wait()
	s.background.Wait()
	synced := onVolumes(s.syncing(), func(v *volume) error { return v.dev.Sync(context.Background()) })
	s.background.Wait()
	return errors.Join(synced, onVolumes(s.volumes, func(v *volume) error { return v.dev.Close() }))
}
