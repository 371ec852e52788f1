package blockstore

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/kv"
)

var (
	// ErrVolumeUnknown: the store has no such volume. Stats lists the volumes.
	ErrVolumeUnknown = errors.New("no such volume")
	// ErrVolumeState: the volume is not in a state that allows the operation.
	ErrVolumeState = errors.New("refused in this state of the volume")
)

// VolumeNamed returns the index of a volume. name is the index in decimal digits, or
// the path. VolumeNamed fails with ErrVolumeUnknown.
func (s *Store) VolumeNamed(name string) (uint32, error) {
	for _, v := range s.volumes {
		if strconv.Itoa(int(v.index)) == name || filepath.Clean(v.dev.Info().Path) == filepath.Clean(name) {
			return v.index, nil
		}
	}
	return 0, fmt.Errorf("blockstore: volume %q: %w: want an index from 0 to %d, or the directory of a volume", name, ErrVolumeUnknown, len(s.volumes)-1)
}

// DrainVolume marks a volume as draining, durably. A draining volume takes no new blocks, so that
// the engine can move its blocks to other volumes; its blocks can be read as before. DrainVolume
// fails with ErrVolumeState if no other volume could take blocks, or if the volume was removed.
// After any other error the next Open may find the volume draining or not.
func (s *Store) DrainVolume(ctx context.Context, volume uint32) error {
	return s.changeMembers(ctx, volume, func(v *volumeOrder) error {
		switch {
		case v.is(health.Removed):
			return fmt.Errorf("%v was removed: %w", v, ErrVolumeState)
		case !s.othersPlace(v.volume):
			return fmt.Errorf("%v is the only one that may take new blocks: %w", v, ErrVolumeState)
		}
		v.members.draining.add(int(volume))
		return v.commit(ctx, health.Draining)
	})
}

// UndrainVolume ends the draining of a volume, which may then take new blocks again. It fails with
// ErrVolumeState if the volume was removed.
func (s *Store) UndrainVolume(ctx context.Context, volume uint32) error {
	return s.changeMembers(ctx, volume, func(v *volumeOrder) error {
		if v.is(health.Removed) {
			return fmt.Errorf("%v was removed: %w", v, ErrVolumeState)
		}
		v.members.draining.drop(int(volume))
		return v.commit(ctx, health.OK)
	})
}

// RemoveVolume ends the use of a volume permanently: the device is closed, and later Opens do not
// need the volume. Without force it fails with ErrVolumeState unless the volume is present,
// draining and empty. With force, the blocks on the volume are lost, and the engine has to remove
// them from its index. The change succeeds only if a quorum of the other volumes stores it.
//
// When RemoveVolume returns nil, the volume's files are closed, so that its disk can be unmounted.
// There is one exception: if the device does not close within Health.HungAfter or before ctx ends,
// because a request hangs, RemoveVolume returns nil all the same. The device is then closed in the
// background, and the log reports both the delay and the close.
func (s *Store) RemoveVolume(ctx context.Context, volume uint32, force bool) error {
	if err := s.removeVolume(ctx, volume, force); err != nil {
		return err
	}
	s.volumes[volume].awaitClosed(ctx)
	return nil
}

func (s *Store) removeVolume(ctx context.Context, volume uint32, force bool) error {
	return s.changeMembers(ctx, volume, func(v *volumeOrder) error {
		switch {
		case v.is(health.Removed):
			return nil
		case !s.othersPlace(v.volume):
			return fmt.Errorf("%v is the only one that may take new blocks: %w", v, ErrVolumeState)
		case v.volume.votes() && s.voterCount() == 1:
			return fmt.Errorf("%v is the only shared one: %w", v, ErrVolumeState)
		case !force && !v.members.draining.has(int(volume)):
			return fmt.Errorf("%v is not draining: drain it first: %w", v, ErrVolumeState)
		case !force && v.volume.missing:
			return fmt.Errorf("%v is missing, so it may hold blocks: mount it and restart the node, or force the removal to lose them: %w", v, ErrVolumeState)
		}
		// Reserve takes no slot of a draining volume, so the volume stays empty once it is empty.
		if used := v.volume.space.used(); used > 0 && !force {
			return fmt.Errorf("%v still holds %d bytes of blocks: wait until it is drained, or force the removal to lose them: %w", v, used, ErrVolumeState)
		}
		v.members.draining.drop(int(volume))
		v.members.removed.add(int(volume))
		was := v.volume.dev.health().Duty
		// After this order the store neither reserves, writes nor reads slots of the volume.
		v.volume.dev.order(health.Removed)
		if err := v.commit(ctx, health.Removed); err != nil {
			v.volume.dev.order(was)
			return err
		}
		v.volume.closeRemoved()
		return nil
	})
}

// closeRemoved closes the device of a volume that was removed, in the background. Store.meta
// is held.
func (v *volume) closeRemoved() {
	closed := make(chan struct{})
	v.closed.Store(&closed)
	v.store.background.Go(func() {
		defer close(closed)
		if err := v.dev.Close(); err != nil {
			v.log.Warn("close the removed volume", "err", err)
			return
		}
		v.log.Info("the removed volume is closed")
	})
}

// awaitClosed waits for closeRemoved, until ctx ends, and at most Health.HungAfter.
func (v *volume) awaitClosed(ctx context.Context) {
	closed := v.closed.Load()
	if closed == nil {
		return // the volume was removed before the store was opened
	}
	hung := time.NewTimer(v.store.opts.Health.HungAfter)
	defer hung.Stop()
	select {
	case <-*closed:
		return
	case <-ctx.Done():
	case <-hung.C:
	}
	v.log.Warn("the removed volume is still open, because a request has not completed: its disk cannot be unmounted until the log reports that the volume is closed, or the node has stopped")
}

// volumeOrder is an operator's order to use, drain or remove one volume. members is the membership
// with that change. Store.meta is held.
type volumeOrder struct {
	store   *Store
	volume  *volume
	members membership
}

// String names the volume in errors.
func (o *volumeOrder) String() string {
	return fmt.Sprintf("volume %d (%s)", o.volume.index, o.volume.dev.Info().Path)
}

func (o *volumeOrder) is(duty health.State) bool { return o.volume.dev.health().Duty == duty }

// changeMembers calls change with a copy of the membership that has the next version number.
func (s *Store) changeMembers(ctx context.Context, volume uint32, change func(*volumeOrder) error) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.gate.Leave()
	if int(volume) >= len(s.volumes) {
		return fmt.Errorf("blockstore: volume %d of %d: %w", volume, len(s.volumes), ErrVolumeUnknown)
	}
	if err := s.takeMeta(ctx); err != nil {
		return err
	}
	defer s.giveMeta()
	o := &volumeOrder{store: s, volume: s.volumes[volume], members: s.members}
	o.members.version++
	if err := change(o); err != nil {
		return fmt.Errorf("blockstore: %w", err)
	}
	return nil
}

// commit writes the membership to the superblocks, and then sets the volume's duty.
func (o *volumeOrder) commit(ctx context.Context, duty health.State) error {
	was := o.store.members
	if was.draining == o.members.draining && was.removed == o.members.removed {
		return nil
	}
	o.store.members = o.members
	if err := o.store.writeSuperblocks(ctx); err != nil {
		// Some superblocks may have stored the new membership with its version. The old membership
		// gets a still higher version, so that the next write of superblocks replaces the new
		// membership.
		was.version = o.members.version + 1
		o.store.members = was
		return err
	}
	o.volume.dev.order(duty)
	return nil
}

// othersPlace reports whether some volume other than v is present and neither draining nor removed,
// so that it may take new blocks.
func (s *Store) othersPlace(v *volume) bool {
	for _, other := range s.volumes {
		if other != v && !other.missing && other.dev.health().Duty == health.OK {
			return true
		}
	}
	return false
}

// LiveFrom returns up to n live slots of a volume, in order, starting at the slot from. All of them
// are in one segment and have the size slotBytes, in bytes. next is the slot to continue from. ok
// is false if there are no more live slots.
func (s *Store) LiveFrom(from kv.Extent, n int) (refs []kv.Ref, slotBytes int64, next kv.Extent, ok bool) {
	v := s.volume(from)
	if v == nil {
		return nil, 0, from, false
	}
	table := *v.space.table.Load()
	for number := from.Segment(); number < uint32(len(table)); number++ {
		slot := uint32(0)
		if number == from.Segment() {
			slot = from.Slot()
		}
		if g := table[number]; g != nil {
			if refs, slotBytes = g.liveFrom(slot, n); len(refs) > 0 {
				return refs, slotBytes, refs[len(refs)-1].Extent + 1, true
			}
		}
	}
	return nil, 0, from, false
}

func (g *segment) liveFrom(slot uint32, n int) (refs []kv.Ref, slotBytes int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for ; slot < uint32(len(g.words)) && len(refs) < n; slot++ {
		g.looks++
		if w := g.words[slot]; w.state() == slotLive {
			refs = append(refs, kv.Ref{Extent: g.extent(slot), Generation: w.generation()})
		}
	}
	return refs, g.header.SlotBytes
}
