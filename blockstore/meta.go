package blockstore

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
)

// takeMeta takes the token that serialises writes of superblocks and catalogues.
func (s *Store) takeMeta(ctx context.Context) error {
	select {
	case s.meta <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("blockstore: waiting to write superblock or catalogue: %w", context.Cause(ctx))
	}
}

func (s *Store) giveMeta() { <-s.meta }

// onVolumes runs f for every volume, at once, and joins the errors.
func onVolumes(volumes []*volume, f func(v *volume) error) error {
	errs := make([]error, len(volumes))
	var wg sync.WaitGroup
	for i, v := range volumes {
		wg.Go(func() { errs[i] = f(v) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// writeSuperblocks changes the superblock of every volume, durably. The meta
// token is held, or the store is not open yet.
func (s *Store) writeSuperblocks(ctx context.Context, change func(*ondisk.Superblock)) error {
	return onVolumes(s.volumes, func(v *volume) error {
		sb := v.superblock
		change(&sb)
		sb.Sequence++
		// The copy that is not the newest: were this write torn, the newest
		// would still be there.
		copyOffset := int64(sb.Sequence%2) * ondisk.Page
		if err := v.writePage(context.WithoutCancel(ctx), v.super, copyOffset, sb.Encode()); err != nil {
			return fmt.Errorf("blockstore: volume %d (%s): superblock: %w", v.index, v.dev.Info().Path, err)
		}
		v.superblock = sb
		return nil
	})
}

// SetCatalogue replaces the catalogue, an opaque blob, on every volume that
// takes writes. When it returns nil the new one is durable; if it fails or the
// process dies, either the old or the new one is found at the next Open.
func (s *Store) SetCatalogue(ctx context.Context, blob []byte) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.gate.Leave()
	if err := s.takeMeta(ctx); err != nil {
		return err
	}
	defer s.giveMeta()
	if room := s.catalogueRoom(); int64(len(blob)) > room {
		return fmt.Errorf("blockstore: catalogue of %d bytes; the volumes have room for %d: %w", len(blob), room, ErrTooLarge)
	}
	var writable []*volume
	for _, v := range s.volumes {
		if v.syncer.failure() == nil {
			writable = append(writable, v)
		}
	}
	if len(writable) == 0 {
		return fmt.Errorf("blockstore: catalogue: %w", ErrFloor)
	}
	// A sequence is never used twice, also not after a failure: an area of a
	// failed try must lose against the next try.
	s.mu.Lock()
	s.catalogueSequence++
	seq := s.catalogueSequence
	s.mu.Unlock()
	header := ondisk.NewCatalogueHeader(seq, blob)
	if err := onVolumes(writable, func(v *volume) error { return v.writeCatalogue(context.WithoutCancel(ctx), header, blob) }); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.catalogue = append([]byte(nil), blob...)
	return nil
}

// Catalogue returns a copy of the newest catalogue, empty if none was set.
func (s *Store) Catalogue() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]byte(nil), s.catalogue...)
}

// catalogueRoom is the largest blob that every volume can hold.
func (s *Store) catalogueRoom() int64 {
	room := s.volumes[0].superblock.CatalogueBytes
	for _, v := range s.volumes {
		room = min(room, v.superblock.CatalogueBytes)
	}
	return room
}

// writeCatalogue writes header and blob, as one request, to the area that does
// not hold the newest durable one.
func (v *volume) writeCatalogue(ctx context.Context, h ondisk.CatalogueHeader, blob []byte) error {
	area := 1 - v.catArea
	n := ondisk.Page + (len(blob)+ondisk.Page-1)/ondisk.Page*ondisk.Page
	buf, release, err := heapAlloc(ctx, n)
	if err != nil {
		return err
	}
	defer release()
	copy(buf, h.Encode())
	copy(buf[ondisk.Page:], blob)
	offset := ondisk.CatalogueOffset(area, v.superblock.CatalogueBytes)
	if err := v.writePage(ctx, v.catalogue, offset, buf); err != nil {
		return fmt.Errorf("blockstore: volume %d: catalogue: %w", v.index, err)
	}
	v.catArea = area
	return nil
}

// readCatalogue finds the newest valid catalogue of the volume and notes its
// area.
func (v *volume) readCatalogue(ctx context.Context) (h ondisk.CatalogueHeader, blob []byte, err error) {
	for area := range 2 {
		ah, ab, err := readCatalogueArea(ctx, v.dev, v.catalogue, area, v.superblock.CatalogueBytes)
		switch {
		case errors.Is(err, ErrVersion):
			return h, nil, fmt.Errorf("blockstore: volume %s: %w", v.dev.Info().Path, err)
		case errors.Is(err, ondisk.ErrBlank), errors.Is(err, ondisk.ErrDamaged):
			continue
		case err != nil:
			return h, nil, err
		}
		if ah.Sequence > h.Sequence {
			h, blob, v.catArea = ah, ab, area
		}
	}
	return h, blob, nil
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
