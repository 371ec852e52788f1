package blockstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
)

// takeMeta takes the store's meta token, which serialises writes of superblocks and catalogues. It
// waits for the token until ctx ends.
func (s *Store) takeMeta(ctx context.Context) error {
	select {
	case s.meta <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("blockstore: waiting to write superblock or catalogue: %w", context.Cause(ctx))
	}
}

func (s *Store) giveMeta() { <-s.meta }

// onVolumes runs f for every volume, concurrently, and joins the errors.
func onVolumes(volumes []*volume, f func(v *volume) error) error {
	return errors.Join(eachVolume(volumes, f)...)
}

// eachVolume runs f for every volume, concurrently, and returns the errors in the order of the
// volumes.
func eachVolume(volumes []*volume, f func(v *volume) error) []error {
	errs := make([]error, len(volumes))
	if len(volumes) == 1 {
		errs[0] = f(volumes[0])
		return errs
	}
	var wg sync.WaitGroup
	for i, v := range volumes {
		wg.Go(func() { errs[i] = f(v) })
	}
	wg.Wait()
	return errs
}

// metaQuorum returns the number of voters (volume.votes), out of count, that must store a change of superblock or
// catalogue before the change is acknowledged: half of them. So a node with two volumes continues
// when one of them has failed.
func metaQuorum(count int) int { return (count + 1) / 2 }

// catalogueCertain reports whether present voters, of count in all, are enough to find the newest
// acknowledged catalogue. They are enough if the missing volumes are fewer than a quorum.
func catalogueCertain(present, count int) bool { return present > count-metaQuorum(count) }

// CatalogueCertain reports whether the catalogue that Open found is certainly the newest
// acknowledged one. If it returns false, too few volumes could be read, and an epoch in the
// catalogue may have been bumped since. A node must not rebuild its index from such a catalogue. An
// index that was not lost has every acknowledged epoch.
func (s *Store) CatalogueCertain() bool { return s.catalogueCertain }

// onQuorum makes a change of superblock or catalogue on every volume that has not failed, and
// returns nil if a quorum stores the change. A volume that does not store an acknowledged change
// becomes failed, until a probe has written the newest superblock and catalogue to it. The caller
// holds the store's meta token, or the store is not open yet.
func (s *Store) onQuorum(what string, change func(v *volume) error) error {
	errs := eachVolume(s.volumes, func(v *volume) error {
		if h := v.dev.health(); !h.Syncs() {
			return fmt.Errorf("volume %d (%s) is %v: %w", v.index, v.dev.Info().Path, h.State, causeOf(h))
		}
		if err := v.holdMeta(change); err != nil {
			return fmt.Errorf("volume %d (%s): %s: %w", v.index, v.dev.Info().Path, what, err)
		}
		return nil
	})
	held := 0
	for i, err := range errs {
		if err == nil && s.volumes[i].votes() {
			held++
		}
	}
	if count := s.voterCount(); held < metaQuorum(count) {
		return fmt.Errorf("blockstore: %s: written to %d of %d volumes%s, want at least %d: %w: %w", what, held, count, s.votersNote(), metaQuorum(count), ErrFloor, errors.Join(errs...))
	}
	for i, err := range errs {
		if err != nil && s.volumes[i].dev.health().Syncs() {
			s.volumes[i].dev.lost(err)
		}
	}
	return nil
}

// Quorate returns nil if enough volumes are healthy for a change of the catalogue. Else
// it returns ErrVolumeFailed with the cause of each failed volume.
func (s *Store) Quorate() error {
	count, healthy := s.voterCount(), 0
	for _, v := range s.syncing() {
		if v.votes() {
			healthy++
		}
	}
	if healthy >= metaQuorum(count) {
		return nil
	}
	var why []error
	for _, v := range s.volumes {
		if h := v.dev.health(); h.State == health.Failed {
			why = append(why, fmt.Errorf("volume %d: %w", v.index, causeOf(h)))
		}
	}
	return fmt.Errorf("blockstore: of %d volumes%s, %d must be healthy: %w: %w", count, s.votersNote(), metaQuorum(count), ErrVolumeFailed, errors.Join(why...))
}

// votes reports whether the volume counts in the quorum of superblocks and catalogue: it was not
// removed, and it is not a local volume of a store with shared volumes. An adopter of that store has
// the shared volumes only, and must find the newest catalogue on them.
func (v *volume) votes() bool { return !v.local && v.dev.health().State != health.Removed }

// voterCount returns the number of volumes that count in the quorum.
func (s *Store) voterCount() int {
	n := 0
	for _, v := range s.volumes {
		if v.votes() {
			n++
		}
	}
	return n
}

// votersNote follows the number of voters in errors.
func (s *Store) votersNote() string {
	if slices.ContainsFunc(s.volumes, func(v *volume) bool { return v.local }) {
		return " that are shared"
	}
	return ""
}

// errMetaHangs: an earlier write of the volume's superblock or catalogue has not
// completed.
var errMetaHangs = errors.New("an earlier write of superblock or catalogue has not completed")

// holdMeta makes a change under the volume's meta token. It fails while an earlier change has not
// completed, because that change could overwrite the new one.
func (v *volume) holdMeta(change func(v *volume) error) error {
	select {
	case v.meta <- struct{}{}:
	default:
		return errMetaHangs
	}
	defer func() { <-v.meta }()
	if v.metaPending.Load() > 0 {
		return errMetaHangs
	}
	return change(v)
}

// writeSuperblocks writes boot counter, number of volumes and membership to the superblocks,
// durably.
func (s *Store) writeSuperblocks(ctx context.Context) error {
	return s.onQuorum("superblock", func(v *volume) error { return v.writeSuperblock(context.WithoutCancel(ctx)) })
}

func (v *volume) writeSuperblock(ctx context.Context) error {
	created, err := v.ownFiles(ctx)
	if err != nil {
		return err
	}
	if created { // both copies are blank
		if err := v.writeSuperblockCopy(ctx); err != nil {
			return err
		}
	}
	return v.writeSuperblockCopy(ctx)
}

// writeSuperblockCopy replaces the older of the two copies. If the write is torn, the newest copy
// still exists.
func (v *volume) writeSuperblockCopy(ctx context.Context) error {
	sb := v.superblock
	sb.Boot, sb.Count = v.store.boot, uint32(len(v.store.volumes))
	v.store.members.put(&sb)
	sb.Keys = v.keyPeriods().onDisk()
	sb.Sequence++
	copyOffset := int64(sb.Sequence%2) * ondisk.Page
	if err := v.writePage(ctx, v.super, copyOffset, sb.Encode(), &v.metaPending); err != nil {
		return err
	}
	v.superblock = sb
	return nil
}

// SetCatalogue replaces the catalogue, an opaque blob, on every volume that has not failed. When it
// returns nil, a quorum stores the new blob durably. If it fails or the process dies, the next Open
// finds either the old or the new blob.
//
// live are the epochs whose blocks may be written after the call. If new slots need the secrets of their
// epochs (Options.EpochKeys), each of these epochs has a secret then, which is in the same catalogue.
// SetCatalogue removes no secret; EraseEpochs does.
func (s *Store) SetCatalogue(ctx context.Context, blob []byte, live ...EpochID) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.gate.Leave()
	if err := s.takeMeta(ctx); err != nil {
		return err
	}
	defer s.giveMeta()
	next, err := s.withSecrets(live)
	if err != nil {
		return err
	}
	if room := s.catalogueRoom() - next.sizeBytes(); int64(len(blob)) > room {
		return fmt.Errorf("blockstore: catalogue of %d bytes; the volumes have room for %d: %w", len(blob), room, ErrTooLarge)
	}
	if err := s.writeCatalogues(ctx, blob, next); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.catalogue = append([]byte(nil), blob...)
	s.epochs.Store(next)
	return nil
}

// writeCatalogues writes a catalogue with a table of secrets to every volume that has not failed.
// Store.meta is held, or the store is not open yet.
func (s *Store) writeCatalogues(ctx context.Context, blob []byte, t *epochTable) error {
	// A sequence number is never used twice, not even after a failure: a failed attempt may have
	// written an area, and a later attempt must have a higher number than that area.
	s.mu.Lock()
	s.catalogueSequence++
	seq := s.catalogueSequence
	s.mu.Unlock()
	header, sealed, err := s.sealCatalogue(seq, blob, t)
	if err != nil {
		return err
	}
	return s.onQuorum("catalogue", func(v *volume) error {
		return v.writeCatalogue(context.WithoutCancel(ctx), header, sealed, t.wipe)
	})
}

// sufficeWithout returns health.OK if the store can do without v and without the volumes that are not
// OK, health.Suspect if it can do without v, and otherwise health.Failed (health.Others).
func (s *Store) sufficeWithout(v *volume) health.State {
	for _, worst := range []health.State{health.OK, health.Suspect} {
		writes, voters := false, 0
		for _, other := range s.volumes {
			// A volume that is OK has no cause; a draining one that is not OK has one.
			h := other.dev.health()
			if other == v || !h.Syncs() || worst == health.OK && h.Cause != nil {
				continue
			}
			writes = writes || other.takesWrites()
			if other.votes() {
				voters++
			}
		}
		if writes && voters >= metaQuorum(s.voterCount()) {
			return worst
		}
	}
	return health.Failed
}

// probe tests a volume that is not OK: it writes the newest superblock and catalogue to the volume
// and reads the catalogue back. It holds the store's meta token until the health machine has the
// outcome, so that no catalogue or superblock changes in between. If the probe takes too long, it is
// late, and the token is released: the limit is HungAfter for each step, but SlowAfter
// for all of them if the volume has failed and the store can do without it. In all other cases a
// change would wait for the volume anyway, or would not be acknowledged without it.
func (v *volume) probe() {
	ctx := v.store.life
	started := time.Now()
	if err := v.store.takeMeta(ctx); err != nil {
		v.dev.probed(started, false, err)
		return
	}
	started = time.Now()
	limit, step := v.store.opts.Health.SlowAfter, func() {}
	waits := v.dev.health().Syncs() || v.store.sufficeWithout(v) == health.Failed
	if waits {
		limit = v.store.opts.Health.HungAfter
	}
	late := time.NewTimer(limit)
	defer late.Stop()
	if waits {
		step = func() { late.Reset(limit) }
	}
	done := make(chan error, 1)
	go func() { done <- v.holdMeta(func(v *volume) error { return v.refresh(ctx, step) }) }()
	select {
	case err := <-done:
		if err == nil {
			v.space.retryBad()
		}
		v.dev.probed(started, false, err)
		v.store.giveMeta()
	case <-late.C:
		v.store.giveMeta()
		v.dev.probed(started, true, <-done)
	}
}

// refresh writes the current superblock and catalogue, and reads the catalogue back. If the volume may have
// erased secrets of epochs, files of earlier owners are removed, and both areas of the catalogue are written. It
// calls step after each write.
func (v *volume) refresh(ctx context.Context, step func()) error {
	if err := v.writeSuperblock(ctx); err != nil {
		return fmt.Errorf("superblock: %w", err)
	}
	if v.outlived.Load() {
		v.removeOutlived(true)
	}
	step()
	header, wipe, err := v.refreshCatalogue(ctx)
	if err == nil && !v.wiped(wipe) {
		step()
		header, _, err = v.refreshCatalogue(ctx)
	}
	if err != nil {
		return err
	}
	step()
	page, err := readPages(ctx, v.dev, v.catalogue, ondisk.CatalogueOffset(v.catArea, v.catalogueBytes), ondisk.Page)
	if err != nil {
		return fmt.Errorf("catalogue: %w", err)
	}
	if h, err := ondisk.DecodeCatalogueHeader(page); err != nil || h != header {
		return fmt.Errorf("catalogue: %w: read back %+v, wrote %+v: %w", ErrCorrupt, h, header, err)
	}
	return nil
}

// refreshCatalogue writes the current catalogue to one area. It returns the number of its table of secrets.
func (v *volume) refreshCatalogue(ctx context.Context) (ondisk.CatalogueHeader, uint64, error) {
	v.store.mu.Lock()
	// The catalogue gets a new sequence number, because a failed attempt to write a catalogue may
	// have left an area with a higher number than that of the newest acknowledged catalogue.
	v.store.catalogueSequence++
	seq, blob, t := v.store.catalogueSequence, v.store.catalogue, v.store.epochs.Load()
	v.store.mu.Unlock()
	header, sealed, err := v.store.sealCatalogue(seq, blob, t)
	if err != nil {
		return header, 0, err
	}
	return header, t.wipe, v.writeCatalogue(ctx, header, sealed, t.wipe)
}

// Catalogue returns a copy of the newest catalogue, empty if none was set.
func (s *Store) Catalogue() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]byte(nil), s.catalogue...)
}

// catalogueRoom returns the size, in bytes, of the largest catalogue blob that every volume can
// hold.
func (s *Store) catalogueRoom() int64 {
	room := s.volumes[0].catalogueBytes
	for _, v := range s.volumes {
		room = min(room, v.catalogueBytes)
	}
	if s.opts.Keys != nil {
		room -= sealedCatalogueExtra
	}
	return room
}

// writeCatalogue writes header and blob, as one request, to the area that does not hold the newest
// durable catalogue. wipe is the number of the table of secrets in the blob.
func (v *volume) writeCatalogue(ctx context.Context, h ondisk.CatalogueHeader, blob []byte, wipe uint64) error {
	if room := v.catalogueBytes; int64(len(blob)) > room {
		return fmt.Errorf("blockstore: volume %d: catalogue of %d bytes; the volume has room for %d: %w", v.index, len(blob), room, ErrTooLarge)
	}
	area := 1 - v.catArea
	n := ondisk.Page + (len(blob)+ondisk.Page-1)/ondisk.Page*ondisk.Page
	buf, release, err := heapAlloc(ctx, n)
	if err != nil {
		return err
	}
	defer release()
	copy(buf, h.Encode())
	copy(buf[ondisk.Page:], blob)
	offset := ondisk.CatalogueOffset(area, v.catalogueBytes)
	if err := v.writePage(ctx, v.catalogue, offset, buf, &v.metaPending); err != nil {
		return fmt.Errorf("blockstore: volume %d: catalogue: %w", v.index, err)
	}
	v.catArea = area
	v.areaWipes[area].Store(wipe)
	return nil
}

// lockedCatalogue is the newest catalogue of a volume whose key is missing. err names the key.
type lockedCatalogue struct {
	sequence uint64
	err      error
}

// readCatalogue finds the newest valid catalogue of the volume and records its area. It skips the areas
// whose key is missing, of which locked is the newest.
func (v *volume) readCatalogue(ctx context.Context) (newest openedCatalogue, locked lockedCatalogue, err error) {
	for area := range 2 {
		ah, ab, err := readCatalogueArea(ctx, v.dev, v.catalogue, area, v.catalogueBytes)
		switch {
		case errors.Is(err, ErrVersion):
			return newest, locked, fmt.Errorf("blockstore: volume %s: %w", v.dev.Info().Path, err)
		case errors.Is(err, ondisk.ErrBlank), errors.Is(err, ondisk.ErrDamaged):
			continue
		case err != nil:
			return newest, locked, err
		}
		v.store.resealing = v.store.resealing || !v.store.hasNewestKey(ah, ab)
		v.store.wiping = v.store.wiping || ah.Epochs
		c, err := openCatalogue(v.store.keys, v.store.node, ah, ab)
		switch {
		case errors.Is(err, ErrKey):
			if ah.Sequence > locked.sequence {
				locked = lockedCatalogue{ah.Sequence, fmt.Errorf("volume %s: %w", v.dev.Info().Path, err)}
			}
		case err != nil:
			v.log.Warn("an area of the catalogue cannot be decrypted", "area", area, "err", err)
		case ah.Sequence > newest.header.Sequence:
			newest, v.catArea = c, area
		}
	}
	return newest, locked, nil
}

// readCatalogueArea reads and verifies one area.
func readCatalogueArea(ctx context.Context, dev blockio.Device, f blockio.File, area int, room int64) (ondisk.CatalogueHeader, []byte, error) {
	offset := ondisk.CatalogueOffset(area, room)
	page, err := readPages(ctx, dev, f, offset, ondisk.Page)
	if err != nil {
		return ondisk.CatalogueHeader{}, nil, err
	}
	h, err := ondisk.DecodeCatalogueHeader(page)
	if err != nil {
		return h, nil, err
	}
	if h.BlobBytes > room {
		return h, nil, fmt.Errorf("blockstore: catalogue blob of %d bytes in an area of %d: %w", h.BlobBytes, room, ErrDamaged)
	}
	if h.BlobBytes == 0 {
		return h, nil, h.VerifyBlob(nil)
	}
	blob, err := readPages(ctx, dev, f, offset+ondisk.Page, int((h.BlobBytes+ondisk.Page-1)/ondisk.Page*ondisk.Page))
	if err != nil {
		return h, nil, err
	}
	blob = blob[:h.BlobBytes]
	return h, blob, h.VerifyBlob(blob)
}
