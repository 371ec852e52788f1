package blockstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
)

// Owner decides which process of a cluster owns the volumes of a store. The methods may be called
// concurrently. Package membership has the implementation by leases in etcd.
type Owner interface {
	// Acquire returns nil when this process owns the store, whose id is given in hexadecimal. It
	// waits if another process owns the store, but not without limit.
	Acquire(ctx context.Context, store string) error
	// Fence returns a number above last and above every number that it has returned to any process
	// for this store. Only the owner gets one.
	Fence(ctx context.Context, last uint32) (uint32, error)
	// Held returns nil if this process certainly owns the store at this moment. It does no I/O.
	Held() error
}

// acquire acquires the ownership of the store on the devices, and returns the store's id, a new one
// if all devices are empty. It also locks the local volumes, and the devices that are not shared
// volumes yet: a process without an Owner may own them, and another process may be about to format
// them.
func acquire(ctx context.Context, opts Options) (ondisk.UUID, error) {
	var node ondisk.UUID
	for _, d := range opts.Devices {
		c, err := probe(ctx, d)
		if err != nil && !opts.Degraded {
			return node, fmt.Errorf("blockstore: volume %s: %w", d.Info().Path, err)
		}
		if !c.superblock.Shared && err == nil {
			if err := d.Lock(opts.Identity); err != nil {
				return node, fmt.Errorf("blockstore: %w", err)
			}
		}
		if c.formatted && node == (ondisk.UUID{}) {
			node = c.superblock.Node
		}
	}
	if node == (ondisk.UUID{}) {
		var err error
		if node, err = ondisk.NewUUID(opts.Rand); err != nil {
			return node, err
		}
	}
	if err := opts.Owner.Acquire(ctx, node.String()); err != nil {
		return node, fmt.Errorf("blockstore: %w", err)
	}
	return node, nil
}

// newestOwner returns the newest valid superblock of a shared volume, and the name of its file. base
// is the superblock in the file SuperblockName.
func newestOwner(ctx context.Context, dev blockio.Device, names []string, base ondisk.Superblock) (ondisk.Superblock, string) {
	best, file := base, ondisk.SuperblockName
	for _, name := range names {
		if of, _, ok := ondisk.ParseSharedName(name); !ok || of != ondisk.SuperblockName {
			continue
		}
		// A file that an owner began and did not complete has no valid superblock, and nothing
		// depends on it.
		sb, err := readSuperblock(ctx, dev, name)
		if err != nil || sb.Volume != base.Volume {
			continue
		}
		if c := cmp.Or(cmp.Compare(sb.Boot, best.Boot), cmp.Compare(sb.Sequence, best.Sequence)); c > 0 || file == ondisk.SuperblockName && c == 0 {
			best, file = sb, name
		}
	}
	return best, file
}

// catalogueOf returns the name of the catalogue that belongs to the superblock's file.
func catalogueOf(superName string) string {
	return ondisk.CatalogueName + strings.TrimPrefix(superName, ondisk.SuperblockName)
}

// beginOwnership makes the boot counter the owner's fencing number. last is the highest boot counter
// of the volumes.
func (s *Store) beginOwnership(ctx context.Context, last uint32) error {
	var err error
	if s.boot, err = s.fenceAbove(ctx, last); err != nil {
		return err
	}
	s.fence = s.boot
	// The catalogues of this owner have higher sequence numbers than any catalogue of an earlier
	// owner, including one that an earlier owner writes late.
	s.mu.Lock()
	s.catalogueSequence = max(s.catalogueSequence, uint64(s.fence)<<sequenceBits)
	s.mu.Unlock()
	return nil
}

// fenceAbove returns a fencing number above last that fits into a generation.
func (s *Store) fenceAbove(ctx context.Context, last uint32) (uint32, error) {
	fence, err := s.opts.Owner.Fence(ctx, last)
	if err != nil {
		return 0, fmt.Errorf("blockstore: %w", err)
	}
	if fence > ondisk.MaxBoot {
		return 0, fmt.Errorf("blockstore: all %d fencing numbers of this store are used up; begin with an empty directory: %w", ondisk.MaxBoot, ErrFloor)
	}
	return fence, nil
}

// ownFiles makes the superblock and the catalogue of this owner, if the volume is shared and does
// not have them yet. A local volume has one superblock and one catalogue for all owners: they are
// processes of one host, and the file lock admits one at a time. Earlier owners have the older files open, and their late writes cannot reach
// the new files. The new superblock is blank. The caller writes it, which makes the new files count.
func (v *volume) ownFiles(ctx context.Context) (created bool, err error) {
	s := v.store
	name := ondisk.SharedName(ondisk.SuperblockName, s.fence)
	if s.fence == 0 || v.local || v.superName == name {
		return false, nil
	}
	if !v.superblock.Shared {
		if err := v.share(ctx); err != nil {
			return false, fmt.Errorf("mark the volume as shared: %w", err)
		}
	}
	catalogue, err := v.createAnew(ondisk.SharedName(ondisk.CatalogueName, s.fence), v.catalogue.Size())
	if err != nil {
		return false, err
	}
	s.mu.Lock()
	s.catalogueSequence++
	seq, blob, t := s.catalogueSequence, s.catalogue, s.epochs.Load()
	s.mu.Unlock()
	old, oldArea := v.catalogue, v.catArea
	v.useCatalogue(catalogue, 1)
	header, sealed, err := s.sealCatalogue(seq, blob, t)
	if err == nil {
		err = v.writeCatalogue(ctx, header, sealed, t.wipe)
	}
	if err == nil {
		var super blockio.File
		if super, err = v.createAnew(name, ondisk.SuperblockFileBytes); err == nil {
			err = errors.Join(v.super.Close(), old.Close())
			v.super, v.superName = super, name
			return true, err
		}
	}
	v.useCatalogue(old, oldArea)
	return false, errors.Join(err, catalogue.Close())
}

// useCatalogue makes f the catalogue of the volume, whose newest area is area.
func (v *volume) useCatalogue(f blockio.File, area int) {
	v.store.mu.Lock()
	defer v.store.mu.Unlock()
	v.catalogue, v.catArea = f, area
}

// catalogueFile returns the catalogue for a caller without the token meta.
func (v *volume) catalogueFile() blockio.File {
	v.store.mu.Lock()
	defer v.store.mu.Unlock()
	return v.catalogue
}

// createAnew creates a file, in place of one that an interrupted start left.
func (v *volume) createAnew(name string, sizeBytes int64) (blockio.File, error) {
	f, err := v.dev.Create(name, sizeBytes)
	if errors.Is(err, blockio.ErrExist) {
		if err := v.dev.Remove(name); err != nil {
			return nil, err
		}
		return v.dev.Create(name, sizeBytes)
	}
	return f, err
}

// share marks a volume as shared in both copies of its superblock. After that, a process without an
// Owner, and a program that has no shared volumes, refuse the volume.
func (v *volume) share(ctx context.Context) error {
	for range 2 {
		sb := v.superblock
		sb.Shared = true
		sb.Sequence++
		if err := v.writePage(ctx, v.super, int64(sb.Sequence%2)*ondisk.Page, sb.Encode(), &v.metaPending); err != nil {
			return err
		}
		v.superblock = sb
	}
	return nil
}

// removeOutlived removes the superblocks and catalogues that the files of this owner replace: the files of earlier
// owners, and the catalogue that the volume had before it was shared. A file that cannot be removed is
// never read, because the files of this owner have a higher fencing number, but it may have secrets of epochs
// that are erased later: then v.outlived is set. written reports whether the volume has the files of this owner;
// without them the older files stay until a probe has written them. The caller holds Store.meta, or the store
// is not in use yet.
func (v *volume) removeOutlived(written bool) {
	fence, left := v.store.fence, false
	if fence == 0 || v.local {
		return
	}
	for _, name := range v.names {
		if _, of, ok := ondisk.ParseSharedName(name); name != ondisk.CatalogueName && (!ok || of >= fence) {
			continue
		}
		if !written {
			left = true
			continue
		}
		if err := v.dev.Remove(name); err != nil && !errors.Is(err, blockio.ErrNotExist) {
			v.log.Warn("could not remove a file of the volume's previous owner", "file", name, "err", err)
			left = true
		}
	}
	v.outlived.Store(left)
}

// Fence returns the fencing number under which this process owns the store, or 0 if the store is not
// shared.
func (s *Store) Fence() uint32 { return s.fence }

// SharedStore returns the id of the store, in hexadecimal, and the newest fencing number of the
// shared volume on a device. It takes no ownership and writes nothing.
func SharedStore(ctx context.Context, dev blockio.Device) (store string, fence uint32, err error) {
	c, err := probe(ctx, dev)
	switch {
	case err != nil:
		return "", 0, fmt.Errorf("blockstore: volume %s: %w", dev.Info().Path, err)
	case !c.formatted:
		return "", 0, fmt.Errorf("blockstore: %s is not a volume: %w", dev.Info().Path, blockio.ErrNotExist)
	case !c.superblock.Shared:
		return "", 0, fmt.Errorf("blockstore: volume %s is not shared: its node does not list it in shared_data: %w", dev.Info().Path, ErrForeign)
	}
	return c.superblock.Node.String(), c.superblock.Boot, nil
}

// sharedFile reports whether the file of that name belongs to an owner of a shared volume.
func sharedFile(name string) bool {
	_, _, ok := ondisk.ParseSharedName(name)
	return ok
}
