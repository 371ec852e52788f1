package blockstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

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
	// turn rotates the volume that is preferred among equals.
	turn atomic.Uint32

	// gate admits calls; Close closes it.
	gate blockio.Gate
	// meta is the token of whoever writes superblocks or catalogues.
	meta chan struct{}
	// keepers are the volumes' goroutines, which stop ends; background are the
	// syncs under way.
	keepers, background sync.WaitGroup
	stop                context.CancelFunc
	life                context.Context
	closing             sync.Once
	closed              chan struct{} // closed when closeErr is set
	closeErr            error

	mu                sync.Mutex
	catalogue         []byte
	catalogueSequence uint64
}

// Node is the identity that all volumes of the store share, drawn when they were
// formatted: what belongs to the store, such as its index, is known by it.
func (s *Store) Node() ondisk.UUID { return s.node }

// enter admits a call, until Leave.
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
		if g := v.segment(ref.Extent.Segment()); g != nil {
			return g, nil
		}
	}
	return nil, fmt.Errorf("blockstore: %v: no such segment: %w", ref, ErrStale)
}

// SlotLayout returns the shape of the slot that holds a piece: the payload lies
// HeaderBytes into a buffer of SlotBytes. It fails with ondisk.ErrLayout for a
// piece that cannot be, and with ErrTooLarge for one that no segment can hold.
func (s *Store) SlotLayout(pieceBytes int64, layers int) (ondisk.Layout, error) {
	l, err := ondisk.NewLayout(pieceBytes, layers)
	if err != nil {
		return l, err
	}
	if n := l.SlotBytes(); n > s.slotBytesMax {
		return l, fmt.Errorf("blockstore: slot of %d bytes; segments of this store hold at most %d; format a store with larger segments (more capacity, or --segment): %w", n, s.slotBytesMax, ErrTooLarge)
	}
	return l, nil
}

// Adopt makes the slot of an index entry live, before Ready. It fails with
// ErrStale if the slot cannot hold such a piece of that generation any more, and
// with ErrState if another entry has claimed it: drop the entry.
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
	// This start's generations are not in any index yet.
	if boot := s.generations.newest() >> sequenceBits; ref.Generation>>sequenceBits >= boot {
		return fmt.Errorf("blockstore: adopt %v: generation of start %d, this is start %d: %w", ref, ref.Generation>>sequenceBits, boot, ErrStale)
	}
	return g.adopt(ref, l.SlotBytes())
}

// Ready ends the time of Adopt: every other slot is free, and Reserve works.
func (s *Store) Ready() error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.gate.Leave()
	if s.ready.Swap(true) {
		return fmt.Errorf("blockstore: Ready twice: %w", ErrState)
	}
	for _, v := range s.volumes {
		v.markSurplus()
		s.keepers.Go(func() { v.keep(s.life) })
	}
	return nil
}

// Commit makes a written slot live. It fails with ErrState if its write has not
// completed (data-before-index).
func (s *Store) Commit(ref kv.Ref) error {
	g, err := s.segmentOf(ref)
	if err != nil {
		return err
	}
	return g.commit(ref)
}

// Abandon frees a slot that was reserved and not committed; at once, or when a
// Write of it that is going on has returned.
func (s *Store) Abandon(ref kv.Ref) error {
	g, err := s.segmentOf(ref)
	if err != nil {
		return err
	}
	return g.release(ref, false)
}

// Free frees a live slot: at once, or when its last reader has left. It fails
// with ErrStale if the slot is not live in that generation.
func (s *Store) Free(ref kv.Ref) error {
	g, err := s.segmentOf(ref)
	if err != nil {
		return err
	}
	return g.release(ref, true)
}

// Pin counts a reader in: the slot is not reused until Unpin. It fails with
// ErrStale if the slot is not live in that generation, and with ErrBusy at
// MaxReaders.
func (s *Store) Pin(ref kv.Ref) error {
	g, err := s.segmentOf(ref)
	if err != nil {
		return err
	}
	return g.pin(ref)
}

// Unpin counts a reader out.
func (s *Store) Unpin(ref kv.Ref) error {
	g, err := s.segmentOf(ref)
	if err != nil {
		return err
	}
	return g.unpin(ref)
}

// Sync returns once every Write that had returned before is durable, on the
// volumes of refs, or on all volumes if there are none. Concurrent calls share
// the device's syncs. ErrFloor wraps the failure of a volume that takes no more
// writes.
func (s *Store) Sync(ctx context.Context, refs ...kv.Ref) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.gate.Leave()
	volumes := s.volumes
	if len(refs) > 0 && len(s.volumes) > 1 {
		volumes = s.volumesOf(refs)
	}
	if len(volumes) == 1 {
		return volumes[0].sync(ctx)
	}
	return onVolumes(volumes, func(v *volume) error { return v.sync(ctx) })
}

func (v *volume) sync(ctx context.Context) error {
	if err := v.syncer.sync(ctx); err != nil {
		return fmt.Errorf("blockstore: sync volume %d: %w", v.index, err)
	}
	return nil
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

// Close waits for calls that are in flight, syncs, and closes the devices. It
// may be called twice. If ctx ends first, Close goes on in the background and
// returns ctx's error.
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
		return fmt.Errorf("blockstore: close goes on in the background: %w", context.Cause(ctx))
	}
}

// shut does Close's work.
func (s *Store) shut() error {
	s.stop()
	s.gate.Close()
	s.keepers.Wait()
	s.background.Wait()
	return onVolumes(s.volumes, func(v *volume) error {
		var err error
		if v.syncer.failure() == nil {
			err = v.dev.Sync(context.Background())
		}
		return errors.Join(err, v.dev.Close())
	})
}
