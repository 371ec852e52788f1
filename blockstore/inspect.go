package blockstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
)

// InspectVolume prints the superblock copies, the catalogue areas and one line for each segment.
// The device may be in any state: damaged, foreign, incomplete, or in use by a store. InspectVolume
// takes no lock and writes nothing. It fails if the device has no file of a volume.
func InspectVolume(ctx context.Context, dev blockio.Device, w io.Writer) error {
	fmt.Fprintf(w, "volume %s\n", dev.Info().Path)
	names, err := dev.List()
	if err != nil {
		return fmt.Errorf("blockstore: inspect: %w", err)
	}
	if !slices.ContainsFunc(names, ofVolume) {
		return fmt.Errorf("blockstore: inspect: %s is not a volume: neither superblock nor catalogue nor segments are there: %w", dev.Info().Path, blockio.ErrNotExist)
	}
	// If a file cannot be read, the error is printed, and the other files are printed as usual.
	sb, err := inspectSuperblock(ctx, dev, ondisk.SuperblockName, w)
	if err != nil {
		fmt.Fprintf(w, "superblock: %v\n", err)
	}
	catalogue := ondisk.CatalogueName
	if sb.Shared {
		var super string
		if _, super = newestOwner(ctx, dev, names, sb); super != ondisk.SuperblockName {
			fmt.Fprintf(w, "%s is the newest owner's\n", super)
			if sb, err = inspectSuperblock(ctx, dev, super, w); err != nil {
				fmt.Fprintf(w, "%s: %v\n", super, err)
			}
			catalogue = catalogueOf(super)
		}
	}
	if sb.CatalogueBytes > 0 {
		if err := inspectCatalogue(ctx, dev, catalogue, sb.CatalogueBytes, w); err != nil {
			fmt.Fprintf(w, "catalogue: %v\n", err)
		}
	}
	for _, name := range names {
		if number, ok := ondisk.ParseSegmentName(name); ok {
			line, err := inspectSegmentHeader(ctx, dev, number)
			if err != nil {
				line = err.Error() + "\n"
			}
			fmt.Fprintf(w, "%s: %s", name, line)
		}
	}
	return nil
}

// ofVolume reports whether a file of that name belongs to a volume.
func ofVolume(name string) bool {
	_, segment := ondisk.ParseSegmentName(name)
	return segment || sharedFile(name) || name == ondisk.SuperblockName || name == ondisk.CatalogueName
}

// inspectSuperblock prints both copies and returns the newest valid one, if any.
func inspectSuperblock(ctx context.Context, dev blockio.Device, name string, w io.Writer) (ondisk.Superblock, error) {
	b, err := readFile(ctx, dev, name, 0, ondisk.SuperblockFileBytes)
	if err != nil {
		return ondisk.Superblock{}, err
	}
	var best ondisk.Superblock
	for i, copyName := range []string{"A", "B"} {
		sb, err := ondisk.DecodeSuperblock(b[i*ondisk.Page:][:ondisk.Page])
		if err != nil {
			fmt.Fprintf(w, "copy %s: %v\n", copyName, err)
			continue
		}
		fmt.Fprintf(w, "copy %s: %v", copyName, sb)
		if sb.Sequence > best.Sequence {
			best = sb
		}
	}
	return best, nil
}

func inspectCatalogue(ctx context.Context, dev blockio.Device, name string, room int64, w io.Writer) error {
	f, err := dev.Open(name)
	if err != nil {
		return fmt.Errorf("blockstore: inspect: %w", err)
	}
	defer f.Close()
	for i, area := range []string{"A", "B"} {
		h, _, err := readCatalogueArea(ctx, dev, f, i, room)
		if err != nil {
			fmt.Fprintf(w, "area %s: %v\n", area, err)
			continue
		}
		fmt.Fprintf(w, "area %s: %v", area, h)
	}
	return nil
}

func inspectSegmentHeader(ctx context.Context, dev blockio.Device, number uint32) (string, error) {
	b, err := readFile(ctx, dev, ondisk.SegmentName(number), 0, ondisk.Page)
	if err != nil {
		return "", err
	}
	h, err := ondisk.DecodeSegmentHeader(b)
	if err != nil {
		return "", err
	}
	return h.String(), nil
}

// InspectSegment prints the header of a segment and one line for each slot that
// holds a header.
func InspectSegment(ctx context.Context, dev blockio.Device, number uint32, w io.Writer) error {
	f, h, err := openSegment(ctx, dev, number)
	if err != nil {
		return err
	}
	defer f.Close()
	fmt.Fprint(w, h)
	for slot := range h.Slots {
		sh, err := readSlotHeader(ctx, dev, f, h, slot)
		switch {
		case errors.Is(err, ondisk.ErrBlank):
		case err != nil:
			fmt.Fprintf(w, "  %d: %v\n", slot, err)
		default:
			note := ""
			if sh.Generation <= h.Cut {
				note = ", from before the cut"
			}
			fmt.Fprintf(w, "  %d: generation %d namespace %d epoch %d group %d block %v depth %d, %d bytes in %d layers%s\n",
				slot, sh.Generation, sh.Namespace, sh.Epoch, sh.Group, sh.ID, sh.Depth, sh.PayloadBytes, sh.Layers, note)
		}
	}
	return nil
}

// InspectSlot prints the header of a slot and whether the checksums of the header and of every
// layer are right. keys, which may be nil, decrypt an encrypted slot.
func InspectSlot(ctx context.Context, dev blockio.Device, segment, slot uint32, keys *crypt.Keyring, w io.Writer) error {
	f, h, err := openSegment(ctx, dev, segment)
	if err != nil {
		return err
	}
	defer f.Close()
	if slot >= h.Slots {
		return fmt.Errorf("blockstore: inspect: slot %d; segment %d has %d: %w", slot, segment, h.Slots, ErrStale)
	}
	sh, err := readSlotHeader(ctx, dev, f, h, slot)
	if err != nil {
		fmt.Fprintf(w, "slot %d of segment %d: %v\n", slot, segment, err)
		return nil
	}
	fmt.Fprint(w, &sh)
	b, err := readPages(ctx, dev, f, h.SlotOffset(slot), int(h.SlotBytes))
	if err != nil {
		return fmt.Errorf("blockstore: inspect: %w", err)
	}
	verdict := "every layer has its checksum"
	open := func(sh *ondisk.SlotHeader, header []byte) (slotOpener, error) {
		if sh.Key == (ondisk.KeyID{}) {
			return slotOpener{}, nil
		}
		if keys == nil || keys.Find(sh.Key.String()) == nil {
			return slotOpener{}, fmt.Errorf("encrypted with key %v: %w", sh.Key, errNoKey)
		}
		key := keys.Find(sh.Key.String())
		secrets, needed, err := inspectSecrets(ctx, dev, keys, sh)
		switch {
		case err != nil:
			return slotOpener{}, err
		case needed:
			return openEpoch(key, secrets, h.Volume, sh, header)
		}
		return openSealed(key, h.Volume, sh, header)
	}
	err = verifySlot(sh.Ref(), h.SlotBytes, b, open)
	switch {
	case errors.Is(err, errNoKey):
		verdict = fmt.Sprintf("not verified: the slot is encrypted with key %v, which is not given", sh.Key)
	case errors.Is(err, ErrErased):
		verdict = fmt.Sprintf("not readable: the catalogue of this volume has no secret of epoch %d of namespace %d", sh.Epoch, sh.Namespace)
	case err != nil:
		verdict = err.Error()
	}
	fmt.Fprintf(w, "  verdict    %s\n", verdict)
	return nil
}

// inspectSecrets returns the secrets of a slot's epoch in the catalogue of the slot's volume. needed is false
// if the slot does not depend on such a secret.
func inspectSecrets(ctx context.Context, dev blockio.Device, keys *crypt.Keyring, h *ondisk.SlotHeader) (secrets []crypt.Secret, needed bool, err error) {
	c, err := probe(ctx, dev)
	if err == nil && !c.formatted {
		err = ErrDamaged
	}
	if err != nil {
		return nil, false, fmt.Errorf("the superblock, which has the keys of the slot: %w", err)
	}
	var p periods
	for _, k := range c.superblock.Keys {
		p = append(p, period{KeyPeriod: k})
	}
	if of := p.of(h.Generation); of == nil || !of.Epochs {
		return nil, false, nil
	}
	f, err := dev.Open(catalogueOf(cmp.Or(c.superName, ondisk.SuperblockName)))
	if err != nil {
		return nil, true, fmt.Errorf("the catalogue, which has the secret of the slot's epoch: %w", err)
	}
	defer f.Close()
	t := newEpochTable()
	for area := range 2 {
		ch, blob, err := readCatalogueArea(ctx, dev, f, area, c.superblock.CatalogueBytes)
		if err != nil {
			continue // the other area may be valid
		}
		if opened, err := openCatalogue(keys, c.superblock.Node, ch, blob); err == nil {
			t.merge(opened.secrets, nil)
		}
	}
	return t.secrets[EpochID{h.Namespace, h.Epoch}], true, nil
}

// openSegment opens a segment file that has an intact header.
func openSegment(ctx context.Context, dev blockio.Device, number uint32) (blockio.File, ondisk.SegmentHeader, error) {
	f, err := dev.Open(ondisk.SegmentName(number))
	if err != nil {
		return nil, ondisk.SegmentHeader{}, fmt.Errorf("blockstore: inspect: %w", err)
	}
	b, err := readPages(ctx, dev, f, 0, ondisk.Page)
	var h ondisk.SegmentHeader
	if err == nil {
		h, err = ondisk.DecodeSegmentHeader(b)
	}
	if err == nil && h.Slots > ondisk.SegmentSlots(f.Size(), h.SlotBytes) {
		err = fmt.Errorf("%d slots of %d bytes in a file of %d: %w", h.Slots, h.SlotBytes, f.Size(), ErrDamaged)
	}
	if err != nil {
		return nil, h, errors.Join(fmt.Errorf("blockstore: inspect segment %d: %w", number, err), f.Close())
	}
	return f, h, nil
}

// readSlotHeader reads and decodes the header of one slot, of any length.
func readSlotHeader(ctx context.Context, dev blockio.Device, f blockio.File, h ondisk.SegmentHeader, slot uint32) (ondisk.SlotHeader, error) {
	b, err := readPages(ctx, dev, f, h.SlotOffset(slot), ondisk.Page)
	if err != nil {
		return ondisk.SlotHeader{}, err
	}
	if long := ondisk.SlotHeaderBytes(b); long > ondisk.Page && int64(long) < h.SlotBytes {
		if b, err = readPages(ctx, dev, f, h.SlotOffset(slot), long); err != nil {
			return ondisk.SlotHeader{}, err
		}
	}
	return ondisk.DecodeSlotHeader(b, nil)
}

// readFile reads n bytes of a file that may be shorter.
func readFile(ctx context.Context, dev blockio.Device, name string, offset int64, n int) ([]byte, error) {
	f, err := dev.Open(name)
	if err != nil {
		return nil, fmt.Errorf("blockstore: inspect: %w", err)
	}
	defer f.Close()
	if f.Size() < offset+int64(n) {
		return nil, fmt.Errorf("blockstore: inspect: %s has %d bytes, %d at %d wanted: %w", name, f.Size(), n, offset, ErrDamaged)
	}
	b, err := readPages(ctx, dev, f, offset, n)
	if err != nil {
		return nil, fmt.Errorf("blockstore: inspect: %s: %w", name, err)
	}
	return b, nil
}
