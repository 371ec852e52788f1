package blockstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
)

// segmentShare is the default minimum number of segments of a volume, so that several slot sizes
// have room. The minimum is a quarter of segmentShare if the segments would otherwise be smaller
// than smallSegmentBytes.
const segmentShare = 16

// Open opens the volumes of opts, or formats them if they are empty, and locks them for this
// process, or acquires them by Options.Owner. If another process has locked a volume, the error is a
// *blockio.OwnedError. After an error the
// caller still owns the devices and should close them.
func Open(ctx context.Context, opts Options) (*Store, error) {
	opts = opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	var err error
	if opts.Owner == nil {
		for _, d := range opts.Devices {
			if err := d.Lock(opts.Identity); err != nil {
				return nil, fmt.Errorf("blockstore: %w", err)
			}
		}
	} else if opts.node, err = acquire(ctx, opts); err != nil {
		return nil, err
	}
	found, members, err := assemble(ctx, opts)
	if err != nil {
		return nil, err
	}
	if opts.Owner != nil && found[0].superblock.Node != opts.node {
		return nil, fmt.Errorf("blockstore: %s has become a volume of store %v during the start, not of %v: start again: %w", found[0].path(), found[0].superblock.Node, opts.node, ErrForeign)
	}
	s := newStore(opts, found, members)
	for _, v := range s.present() {
		if err := v.loadKeys(opts.Keys); err != nil {
			return nil, err
		}
	}
	if err := s.load(ctx); err != nil {
		return nil, err
	}
	if err := s.loadCatalogue(ctx); err != nil {
		return nil, err
	}
	if err := s.beginBoot(ctx); err != nil {
		return nil, err
	}
	s.keepers.Go(func() { s.watch(s.life) })
	return s, nil
}

// newStore builds the store from checked volumes.
func newStore(opts Options, found []candidate, members membership) *Store {
	life, stop := context.WithCancel(context.Background())
	s := &Store{opts: opts, log: opts.Logger, node: found[0].superblock.Node, meta: make(chan struct{}, 1), closed: make(chan struct{}), life: life, stop: stop}
	s.keys = opts.Keys
	s.epochs.Store(newEpochTable())
	s.SetFreeFloor(opts.FreeFloorBytes)
	if opts.CapacityOfPresent {
		s.opts.CapacityBytes = opts.CapacityBytes / int64(present(found)) * int64(len(found))
	}
	share := s.opts.CapacityBytes / int64(len(found)) / ondisk.Page * ondisk.Page
	s.members = members
	for i, c := range found {
		v := &volume{
			store: s, index: uint32(i), capacityBytes: share, superblock: c.superblock,
			id: c.superblock.Volume, segmentBytes: c.superblock.SegmentBytes, catalogueBytes: c.superblock.CatalogueBytes,
			log:   opts.Logger.With("volume", i, "path", c.dev.Info().Path),
			meta:  make(chan struct{}, 1),
			kick:  make(chan struct{}, 1),
			names: c.names, local: c.local, superName: cmp.Or(c.superName, ondisk.SuperblockName),
		}
		if c.plain != nil {
			v.superblock.Plain = *c.plain
		}
		v.plain = v.superblock.Plain
		v.periods.Store(new(periods))
		v.sealing = newSealPool()
		v.space.init(v)
		v.dev = watchDevice(c.dev, opts.Health, v.log, s.background.Go)
		if opts.Owner != nil {
			v.dev.held = opts.Owner.Held
		}
		v.syncer = syncer{dev: v.dev, spawn: s.background.Go, failed: v.spoilWritten}
		s.volumes = append(s.volumes, v)
		switch cause := absent(c.dev); {
		case members.removed.has(i):
			v.dev.order(health.Removed)
		case cause != nil:
			v.missing = true
			v.dev.lost(fmt.Errorf("%w: %w", errAbsent, cause))
		case members.draining.has(i):
			v.dev.order(health.Draining)
		}
		if n := c.superblock.SegmentBytes - ondisk.Page; s.slotBytesMax == 0 || n < s.slotBytesMax {
			s.slotBytesMax = n
		}
	}
	return s
}

// candidate is a device that may be a volume of the store.
type candidate struct {
	dev        blockio.Device
	superblock ondisk.Superblock
	formatted  bool
	names      []string
	// superName is the file of the superblock, SuperblockName if empty.
	superName string
	// local: see Options.Local.
	local bool
	// plain is the element of Options.Plain, nil if there is none.
	plain *bool
}

func (c *candidate) path() string { return c.dev.Info().Path }

// present returns the number of candidates whose device is not absent.
func present(all []candidate) (n int) {
	for i := range all {
		if absent(all[i].dev) == nil {
			n++
		}
	}
	return n
}

// assemble checks that the devices are the volumes of one store, and formats empty devices if the
// options allow it. It returns one candidate for each volume index.
func assemble(ctx context.Context, opts Options) ([]candidate, membership, error) {
	all := make([]candidate, len(opts.Devices))
	for i, d := range opts.Devices {
		var err error
		if info := d.Info(); opts.Owner != nil && !opts.local(i) && absent(d) == nil && !info.Direct {
			return nil, membership{}, fmt.Errorf("blockstore: the page cache of this host may have bytes of shared volume %s that another host has replaced, and the file system refuses O_DIRECT (%s): mount it with direct I/O (docs/shared-storage.md)", info.Path, info.Detail)
		}
		all[i], err = probe(ctx, d)
		if err == nil && opts.local(i) && all[i].superblock.Shared {
			return nil, membership{}, fmt.Errorf("blockstore: %s is a shared volume: list it in shared_data: %w", d.Info().Path, ErrShared)
		}
		if err != nil {
			err = fmt.Errorf("blockstore: volume %s: %w", d.Info().Path, err)
			if !opts.Degraded || errors.Is(err, ErrVersion) || errors.Is(err, ErrDamaged) || ctx.Err() != nil {
				return nil, membership{}, err
			}
			opts.Logger.Error("volume cannot be read; the store is opened without it", "err", err)
			if err := d.Close(); err != nil {
				opts.Logger.Warn("close the volume that cannot be read", "err", err)
			}
			all[i] = candidate{dev: Absent(d.Info().Path, err)}
		}
		all[i].local = opts.local(i)
		if opts.Plain != nil {
			all[i].plain = &opts.Plain[i]
		}
	}
	var formatted []*candidate
	for i := range all {
		if all[i].formatted {
			formatted = append(formatted, &all[i])
		}
	}
	members := membershipOf(formatted)
	all, formatted, err := leaveOutRemoved(all, formatted, members, opts)
	if err != nil {
		return nil, members, err
	}
	if err := checkTogether(formatted, len(all), members, opts); err != nil {
		return nil, members, err
	}
	return complete(ctx, all, formatted, members, opts)
}

// leaveOutRemoved closes the devices of volumes that were removed from the node, and returns the
// other candidates. If all other volumes of the node are present, it assumes that an empty or
// missing directory belongs to a removed volume. So the node starts even if its configuration still
// lists the directory of a removed volume.
func leaveOutRemoved(all []candidate, formatted []*candidate, members membership, opts Options) ([]candidate, []*candidate, error) {
	removed, count, there := members.removed.len(), 0, 0
	if removed == 0 {
		return all, formatted, nil
	}
	for _, c := range formatted {
		if c.superblock.Node != formatted[0].superblock.Node {
			return all, formatted, nil // checkTogether reports volumes of two nodes
		}
		count = max(count, int(c.superblock.Count)-removed)
		if !members.removed.has(int(c.superblock.Index)) {
			there++
		}
	}
	if there == 0 {
		c := formatted[0]
		return nil, nil, fmt.Errorf("blockstore: %s is volume %d of node %v and was removed from it: give the directories of the other volumes; to use the disk again, empty the directory and set add_volumes: %w",
			c.path(), c.superblock.Index, c.superblock.Node, ErrForeign)
	}
	var left []candidate
	for _, c := range all {
		extra := !c.formatted && !opts.AddVolumes && there == count
		if !extra && !(c.formatted && members.removed.has(int(c.superblock.Index))) {
			left = append(left, c)
			continue
		}
		opts.Logger.Warn("the volume of this directory was removed from the node: delete the directory from the configured list", "volume", c.path())
		if err := c.dev.Close(); err != nil {
			return nil, nil, fmt.Errorf("blockstore: volume %s: %w", c.path(), err)
		}
	}
	formatted = nil
	for i := range left {
		if left[i].formatted {
			formatted = append(formatted, &left[i])
		}
	}
	return left, formatted, nil
}

// complete formats the new volumes, and returns an Absent device for each missing one.
func complete(ctx context.Context, all []candidate, formatted []*candidate, members membership, opts Options) ([]candidate, membership, error) {
	var use, missing []candidate
	for _, c := range all {
		// If the other volumes have been in use, an empty directory is assumed to be a disk that is
		// not mounted, unless AddVolumes is set.
		lost := absent(c.dev) != nil
		if !c.formatted && !lost && opts.Degraded && !opts.AddVolumes && slices.ContainsFunc(formatted, func(f *candidate) bool { return !neverBooted(f.superblock) }) {
			lost = true
			if err := c.dev.Close(); err != nil {
				return nil, members, fmt.Errorf("blockstore: volume %s: %w", c.path(), err)
			}
			c.dev = Absent(c.path(), errors.New("the volume's directory is empty: the disk is not mounted, or is a new one, which add_volumes formats"))
		}
		if lost {
			missing = append(missing, c)
		} else {
			use = append(use, c)
		}
	}
	if len(use) == 0 || len(formatted) == 0 && len(missing) > 0 {
		return nil, members, fmt.Errorf("blockstore: volume %s: %w", missing[0].path(), absent(missing[0].dev))
	}
	count := 0
	for _, c := range formatted {
		count = max(count, int(c.superblock.Count))
	}
	// The superblocks do not count a volume that was never formatted. If more devices are missing
	// than volumes of the node, one of them was never a volume of the node.
	if unknown := len(missing) - (count - members.removed.len() - len(formatted)); len(missing) > 0 && unknown > 0 {
		return nil, members, fmt.Errorf("blockstore: volume %s: %w; node %v has no such volume: take it out of the list, or set add_volumes when it is there: %w",
			missing[len(missing)-1].path(), absent(missing[len(missing)-1].dev), formatted[0].superblock.Node, ErrForeign)
	}
	members, count, err := formatRest(ctx, use, members, count, len(missing) > 0, opts)
	if err != nil {
		return nil, members, err
	}
	return fillAbsent(use, missing, members, count, opts.SharedOnly), members, nil
}

// probe reads the superblock and the file names of a device.
func probe(ctx context.Context, dev blockio.Device) (candidate, error) {
	c := candidate{dev: dev}
	if absent(dev) != nil {
		return c, nil
	}
	var err error
	if c.names, err = dev.List(); err != nil {
		return c, err
	}
	sb, err := readSuperblock(ctx, dev, ondisk.SuperblockName)
	switch {
	case err == nil:
		c.superblock, c.formatted = sb, true
		if sb.Shared {
			c.superblock, c.superName = newestOwner(ctx, dev, c.names, sb)
		}
		return c, nil
	case errors.Is(err, blockio.ErrNotExist), errors.Is(err, ondisk.ErrBlank), errors.Is(err, ondisk.ErrDamaged):
	default:
		return c, err
	}
	// There is no superblock. If there are no segments either, formatting was interrupted or never
	// began, because segments are created after the superblock.
	for _, n := range c.names {
		if _, ok := ondisk.ParseSegmentName(n); ok {
			return c, fmt.Errorf("%s but no superblock; restore it, or empty the directory: %w: %w", n, err, ErrDamaged)
		}
	}
	return c, nil
}

// readSuperblock returns the newest valid copy. It fails with ErrVersion if one copy has another
// version, and with the errors of both copies if neither is valid.
func readSuperblock(ctx context.Context, dev blockio.Device, name string) (ondisk.Superblock, error) {
	f, err := dev.Open(name)
	if err != nil {
		return ondisk.Superblock{}, err
	}
	defer f.Close()
	if f.Size() != ondisk.SuperblockFileBytes {
		return ondisk.Superblock{}, fmt.Errorf("superblock file of %d bytes, want %d: %w", f.Size(), ondisk.SuperblockFileBytes, ondisk.ErrBlank)
	}
	b, err := readPages(ctx, dev, f, 0, ondisk.SuperblockFileBytes)
	if err != nil {
		return ondisk.Superblock{}, err
	}
	return newestSuperblock(b[:ondisk.Page], b[ondisk.Page:])
}

// newestSuperblock chooses between the two copies.
func newestSuperblock(a, b []byte) (ondisk.Superblock, error) {
	sa, errA := ondisk.DecodeSuperblock(a)
	sb, errB := ondisk.DecodeSuperblock(b)
	switch {
	case errors.Is(errA, ErrVersion):
		return ondisk.Superblock{}, errA
	case errors.Is(errB, ErrVersion):
		return ondisk.Superblock{}, errB
	case errA != nil && errB != nil:
		return ondisk.Superblock{}, fmt.Errorf("copy A: %w; copy B: %w", errA, errB)
	case errA == nil && errB == nil:
		if sa.Sequence > sb.Sequence {
			return sa, nil
		}
		return sb, nil
	case errA != nil:
		sa = sb
	}
	// One copy is not valid, and it may have been the newer copy. Its boot counter was then higher
	// by one, and generations with that boot counter may have been assigned. So that boot counter
	// is skipped. On a new volume the second copy was never written, and skipping one boot counter
	// is harmless.
	sa.Boot = min(sa.Boot+1, ondisk.MaxBoot)
	return sa, nil
}

// neverBooted reports whether the volume was formatted but never used: no superblock was written
// after format.
func neverBooted(sb ondisk.Superblock) bool { return sb.Sequence == 1 }

// checkTogether refuses the volumes unless they are all the volumes of one store.
func checkTogether(formatted []*candidate, given int, members membership, opts Options) error {
	if len(formatted) == 0 {
		return nil
	}
	first := formatted[0]
	byIndex := make(map[uint32]*candidate)
	complete := true // set if all volumes of the node were formatted at an earlier start
	for _, c := range formatted {
		sb := c.superblock
		if sb.Node != first.superblock.Node {
			return fmt.Errorf("blockstore: %s belongs to node %v, %s to node %v; give the directories of one node: %w",
				c.path(), sb.Node, first.path(), first.superblock.Node, ErrForeign)
		}
		if other := byIndex[sb.Index]; other != nil {
			return fmt.Errorf("blockstore: %s and %s are both volume %d of node %v; give one of them: %w", other.path(), c.path(), sb.Index, sb.Node, ErrForeign)
		}
		byIndex[sb.Index] = c
		count := int(sb.Count) - members.removed.len()
		if count > given && opts.Owner != nil && !opts.SharedOnly {
			// A process that adopts the store takes a volume whose directory this owner does not have for a local one.
			return fmt.Errorf("blockstore: %s is one of %d volumes, %d are given; give all of them, or remove the others from the node; with degraded, the directories of missing volumes must be given too: %w", c.path(), count, given, ErrForeign)
		}
		if count > given && !opts.Degraded && !opts.SharedOnly {
			return fmt.Errorf("blockstore: %s is one of %d volumes, %d are given; give all of them, or set degraded to serve the present volumes: %w", c.path(), count, given, ErrForeign)
		}
		if count < given && !opts.AddVolumes && !opts.Degraded {
			return fmt.Errorf("blockstore: %s is one of %d volumes, %d are given; give those, or set add_volumes to format the others: %w", c.path(), count, given, ErrForeign)
		}
		if sb.Shared && opts.Owner == nil {
			return fmt.Errorf("blockstore: %s is a shared volume, which a lease in etcd gives to one node at a time: list it in shared_data, and set cluster.etcd: %w", c.path(), ErrShared)
		}
		if opts.SegmentBytes != 0 && opts.SegmentBytes != sb.SegmentBytes {
			return fmt.Errorf("blockstore: %s was formatted with segments of %d bytes, %d are configured; remove the setting: %w", c.path(), sb.SegmentBytes, opts.SegmentBytes, ErrForeign)
		}
		complete = complete && !neverBooted(sb)
	}
	if missing := given - len(formatted); missing > 0 && complete && !opts.AddVolumes && !opts.Degraded {
		return fmt.Errorf("blockstore: %d of %d directories are empty, the others have volumes of node %v; mount the missing disks, set degraded to serve the present volumes, or set add_volumes to format the empty ones: %w",
			missing, given, first.superblock.Node, ErrForeign)
	}
	return nil
}

// formatRest formats the candidates that are not formatted. It gives them free indices: first those
// of removed volumes, then those of missing volumes. If keep is set, it gives no index of a missing
// volume, because that volume may return. It returns the number of indices.
func formatRest(ctx context.Context, all []candidate, members membership, count int, keep bool, opts Options) (membership, int, error) {
	proto := ondisk.Superblock{Count: uint32(max(count, len(all)))}
	taken := make(map[uint32]bool)
	formatted := 0
	for _, c := range all {
		if c.formatted {
			proto.Node, proto.SegmentBytes = c.superblock.Node, c.superblock.SegmentBytes
			taken[c.superblock.Index] = true
			formatted++
		}
	}
	for i := range count {
		if keep && !members.removed.has(i) {
			taken[uint32(i)] = true
		}
	}
	if formatted == 0 {
		proto.Node = opts.node // not zero if Open has acquired the ownership of the store under it
		if proto.Node == (ondisk.UUID{}) {
			var err error
			if proto.Node, err = ondisk.NewUUID(opts.Rand); err != nil {
				return members, 0, err
			}
		}
	}
	if err := opts.fit(&proto); err != nil {
		return members, 0, err
	}
	version := members.version
	for i := range all {
		if all[i].formatted {
			continue
		}
		for taken[proto.Index] {
			proto.Index++
		}
		taken[proto.Index] = true
		proto.Count = max(proto.Count, proto.Index+1)
		if j := int(proto.Index); members.removed.has(j) || members.draining.has(j) {
			members.removed.drop(j)
			members.draining.drop(j)
			members.version = version + 1
		}
		proto.MembershipVersion, proto.Draining, proto.Removed = members.version, members.draining, members.removed
		proto.Shared = opts.Owner != nil && !all[i].local
		if err := all[i].format(ctx, proto, opts); err != nil {
			return members, 0, fmt.Errorf("blockstore: format %s: %w", all[i].path(), err)
		}
	}
	return members, int(proto.Count), nil
}

// fit chooses the sizes of segments and catalogue for the capacity.
func (o Options) fit(sb *ondisk.Superblock) error {
	share := o.CapacityBytes / int64(sb.Count)
	part := share / segmentShare / ondisk.Page * ondisk.Page
	remedy := ", or begin with empty directories, which get smaller segments"
	if sb.SegmentBytes == 0 {
		sb.SegmentBytes = o.SegmentBytes
		remedy = ", or choose smaller segments"
	}
	if sb.SegmentBytes == 0 {
		// A segment holds at least one slot. In a small store a segment is a larger share of the
		// volume, so that large blocks fit.
		large := min(smallSegmentBytes, share/4) / ondisk.Page * ondisk.Page
		sb.SegmentBytes = max(2*ondisk.Page, min(defaultSegmentBytes, max(part, large)))
	}
	sb.CatalogueBytes = o.CatalogueBytes
	if sb.CatalogueBytes == 0 {
		sb.CatalogueBytes = max(ondisk.Page, min(defaultCatalogueBytes, part/4/ondisk.Page*ondisk.Page))
	}
	need := sb.SegmentBytes + ondisk.SuperblockFileBytes + ondisk.CatalogueFileBytes(sb.CatalogueBytes)
	if share < need {
		return fmt.Errorf("blockstore: %d bytes are too few for %d volumes: a segment of %d bytes with superblock and catalogue takes %d on each; raise the capacity%s",
			o.CapacityBytes, sb.Count, sb.SegmentBytes, need, remedy)
	}
	return nil
}

// format creates an empty volume. The superblock is written last: without it the directory still
// counts as empty.
func (c *candidate) format(ctx context.Context, sb ondisk.Superblock, opts Options) error {
	var err error
	if sb.Volume, err = ondisk.NewUUID(opts.Rand); err != nil {
		return err
	}
	sb.Sequence = 1
	if err := c.create(ctx, ondisk.CatalogueName, ondisk.CatalogueFileBytes(sb.CatalogueBytes), nil); err != nil {
		return err
	}
	two := make([]byte, ondisk.SuperblockFileBytes)
	copy(two[ondisk.Page:], sb.Encode()) // odd sequences are in the second copy
	if err := c.create(ctx, ondisk.SuperblockName, ondisk.SuperblockFileBytes, two); err != nil {
		return err
	}
	c.superblock, c.formatted = sb, true
	return nil
}

// removeBlank removes a file that an interrupted attempt to format left. The first page of such a
// file is blank: the catalogue was not written yet, and the superblock only in its second page. A
// file with other content is not removed.
func (c *candidate) removeBlank(ctx context.Context, name string) error {
	f, err := c.dev.Open(name)
	if err != nil {
		return err
	}
	var page []byte
	if f.Size() >= ondisk.Page {
		page, err = readPages(ctx, c.dev, f, 0, ondisk.Page)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if slices.ContainsFunc(page, func(b byte) bool { return b != 0 }) {
		return fmt.Errorf("%s exists and has content, without a readable superblock; restore the superblock, or empty the directory: %w", name, ErrForeign)
	}
	return c.dev.Remove(name)
}

// create creates a file with content, durably. It replaces a file of an earlier attempt.
func (c *candidate) create(ctx context.Context, name string, sizeBytes int64, content []byte) error {
	if slices.Contains(c.names, name) {
		if err := c.removeBlank(ctx, name); err != nil {
			return err
		}
	}
	f, err := c.dev.Create(name, sizeBytes)
	if err != nil {
		return err
	}
	defer f.Close()
	if content != nil {
		buf, release, err := heapAlloc(ctx, len(content))
		if err != nil {
			return err
		}
		defer release()
		copy(buf, content)
		if err := doOne(ctx, c.dev, blockio.Request{Op: blockio.Write, File: f, Bufs: [][]byte{buf}}); err != nil {
			return err
		}
	}
	return c.dev.Sync(ctx, f)
}

// load loads the volumes. In a degraded store a volume that cannot be loaded, because its device fails, is
// missing.
func (s *Store) load(ctx context.Context) error {
	volumes := s.present()
	errs := eachVolume(volumes, func(v *volume) error { return v.load(ctx) })
	if !s.opts.Degraded || ctx.Err() != nil {
		return errors.Join(errs...)
	}
	for i, err := range errs {
		for _, refused := range []error{ErrVersion, ErrDamaged, ErrForeign, ErrNotOwner} {
			if errors.Is(err, refused) {
				return err
			}
		}
		if err != nil {
			volumes[i].leaveOut(err)
		}
	}
	if len(s.present()) == 0 {
		return errors.Join(errs...)
	}
	return nil
}

// leaveOut makes a volume that could not be loaded missing. No other goroutine uses the volume yet.
func (v *volume) leaveOut(cause error) {
	v.log.Error("volume cannot be read; the store is opened without it", "err", cause)
	path := v.dev.Info().Path
	for _, g := range v.space.sorted() {
		closeFile(v.log, g.file)
	}
	closeFile(v.log, v.super)
	closeFile(v.log, v.catalogue)
	if err := v.dev.Close(); err != nil {
		v.log.Warn("close the volume that cannot be read", "err", err)
	}
	v.space = space{}
	v.space.init(v)
	v.super, v.catalogue, v.metaBytes = nil, nil, 0
	v.missing, v.dev.Device = true, Absent(path, cause)
	v.dev.lost(fmt.Errorf("%w: %w", errAbsent, cause))
}

// closeFile closes a file of a volume that is not used, if it was opened.
func closeFile(log *slog.Logger, f blockio.File) {
	if f == nil {
		return
	}
	if err := f.Close(); err != nil {
		log.Warn("close a file of the volume that cannot be read", "file", f.Name(), "err", err)
	}
}

// load opens the volume's files and reads the segment headers.
func (v *volume) load(ctx context.Context) error {
	if err := v.loadFiles(ctx); err != nil {
		return fmt.Errorf("blockstore: volume %s: %w", v.dev.Info().Path, err)
	}
	return v.lookAtSpace()
}

func (v *volume) loadFiles(ctx context.Context) error {
	var err error
	if v.super, err = v.dev.Open(v.superName); err != nil {
		return err
	}
	switch v.catalogue, err = v.dev.Open(catalogueOf(v.superName)); {
	case errors.Is(err, blockio.ErrNotExist):
		return fmt.Errorf("restore it, or empty the directory: %w: %w", err, ErrDamaged)
	case err != nil:
		return err
	}
	if got, want := v.catalogue.Size(), ondisk.CatalogueFileBytes(v.catalogueBytes); got != want {
		return fmt.Errorf("catalogue file of %d bytes, want %d; restore it, or empty the directory: %w", got, want, ErrDamaged)
	}
	v.metaBytes = v.super.Size() + v.catalogue.Size()
	v.space.fileBytes = v.metaBytes
	names, err := v.dev.List()
	if err != nil {
		return err
	}
	segments := 0
	var unreadable []error
	for _, name := range names {
		number, ok := ondisk.ParseSegmentName(name)
		if !ok {
			continue
		}
		segments++
		err := v.loadSegment(ctx, number, name)
		if err != nil {
			err = fmt.Errorf("%s: %w", name, err)
		}
		switch {
		case errors.Is(err, errHeader) && v.dev.health().State != health.Failed:
			v.log.Warn("segment header cannot be read; its blocks are lost", "segment", number, "err", err)
			unreadable = append(unreadable, err)
		case err != nil:
			return err
		}
	}
	if segments > 0 && len(unreadable) == segments {
		return fmt.Errorf("no segment can be read; if the disk is in order, remove the files, whose blocks are then lost: %w", errors.Join(unreadable...))
	}
	// After this the store uses data that an earlier process wrote and perhaps did not sync, and it
	// overwrites the older copies of superblock and catalogue. So all files are synced first.
	return v.dev.Sync(ctx)
}

// errHeader: the header of a segment could not be read, in two attempts.
var errHeader = errors.New("segment header")

// loadSegment opens one segment. A file that is too short for a slot, or has no intact header, may
// be left by a crash and counts as blank. Any other file that does not belong to the volume is
// refused. After errHeader the segment is useBad.
func (v *volume) loadSegment(ctx context.Context, number uint32, name string) error {
	f, err := v.dev.Open(name)
	if err != nil {
		return err
	}
	if f.Size() < 2*ondisk.Page {
		if err := f.Close(); err != nil {
			return err
		}
		return v.dev.Remove(name)
	}
	g := v.space.found(number, f)
	page, err := readPages(ctx, v.dev, f, 0, ondisk.Page)
	if volumesFault(err) != nil {
		page, err = readPages(ctx, v.dev, f, 0, ondisk.Page)
	}
	switch {
	case volumesFault(err) != nil:
		v.space.spoil(g)
		return fmt.Errorf("%w: %w", errHeader, err)
	case err != nil:
		return err
	}
	h, err := ondisk.DecodeSegmentHeader(page)
	switch {
	case errors.Is(err, ErrVersion):
		return err
	case errors.Is(err, ondisk.ErrBlank), errors.Is(err, ondisk.ErrDamaged):
		if !errors.Is(err, ondisk.ErrBlank) {
			v.log.Warn("segment header is damaged; its blocks are lost", "segment", number, "err", err)
		}
		return nil
	case err != nil:
		return err
	case h.Volume != v.id || h.Number != number:
		return fmt.Errorf("the header is that of segment %d of volume %v, but this is volume %v; remove the file: %w", h.Number, h.Volume, v.id, ErrForeign)
	case h.Slots > ondisk.SegmentSlots(f.Size(), h.SlotBytes):
		v.log.Warn("segment file is too short for its slots; its blocks are lost", "segment", number, "slots", h.Slots, "bytes", f.Size())
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cutLocked(h)
	return nil
}

// loadCatalogue finds the newest catalogue of all volumes. A volume whose catalogue cannot be read
// has failed until a probe has written the newest catalogue to it.
func (s *Store) loadCatalogue(ctx context.Context) error {
	read := 0
	var locked lockedCatalogue
	var found []openedCatalogue
	for _, v := range s.present() {
		c, l, err := v.readCatalogue(ctx)
		switch {
		case errors.Is(err, ErrVersion) || ctx.Err() != nil:
			return err
		case err != nil:
			v.dev.lost(fmt.Errorf("the volume's catalogue could not be read: %w", err))
			continue
		}
		if v.votes() {
			read++
		}
		found = append(found, c)
		if l.sequence > locked.sequence {
			locked = l
		}
	}
	// The blocks of a volume may need a secret of an epoch that only the catalogue of this volume has: other
	// volumes may have got another one while this volume was missing.
	t := newEpochTable()
	slices.SortStableFunc(found, func(a, b openedCatalogue) int { return cmp.Compare(a.header.Sequence, b.header.Sequence) })
	for _, c := range found {
		t.merge(c.secrets, c.erasures)
		if c.header.Sequence > s.catalogueSequence {
			s.catalogueSequence, s.catalogue = c.header.Sequence, c.blob
		}
	}
	if s.wiping {
		t.wipe = 1 // each area, which has the number 0, may have an erased secret
	}
	s.epochs.Store(t)
	// A volume that had failed or was missing may have an older catalogue, of a key that was removed since.
	if locked.sequence > s.catalogueSequence {
		return locked.err
	}
	s.catalogueCertain = catalogueCertain(read, s.voterCount())
	if read < s.voterCount() {
		// A missing volume may have a newer catalogue, at least one that was not acknowledged. Its sequence must
		// be lower than that of each catalogue written after this.
		s.catalogueSequence += bootMargin << 16
	}
	return nil
}

// beginBoot sets the boot counter above that of every volume, and writes it with the number of
// volumes.
func (s *Store) beginBoot(ctx context.Context) error {
	var last uint32
	present := 0
	for _, v := range s.present() {
		last = max(last, v.superblock.Boot)
		if v.votes() {
			present++
		}
	}
	if n := s.voterCount(); !catalogueCertain(present, n) {
		// A missing volume may have recorded starts that no present volume has recorded. The
		// generations of such starts must not be assigned again.
		s.log.Warn("too few volumes are present to be certain of the newest superblock: the boot counter jumps", "present", present, "volumes", n)
		last += bootMargin
	}
	if last >= ondisk.MaxBoot {
		return fmt.Errorf("blockstore: %s: all %d starts are used up; begin with an empty directory: %w", s.volumes[0].dev.Info().Path, ondisk.MaxBoot, ErrFloor)
	}
	s.boot = last + 1
	if s.opts.Owner != nil {
		if err := s.beginOwnership(ctx, last); err != nil {
			return err
		}
	}
	changed, key := false, newestKey(s.keys)
	for _, v := range s.present() {
		if v.plain {
			continue
		}
		p := v.keyPeriods()
		epochs := p.epochs()
		if s.opts.EpochKeys != nil {
			epochs = *s.opts.EpochKeys
		}
		next, err := p.begin(key, s.boot, epochs)
		if err != nil {
			return fmt.Errorf("blockstore: volume %s: %w", v.dev.Info().Path, err)
		}
		changed = changed || len(next) != len(p)
		v.periods.Store(&next)
	}
	if err := s.writeSuperblocks(ctx); err != nil {
		return err
	}
	s.generations.start(s.boot)
	for _, v := range s.present() {
		v.removeOutlived(v.dev.health().Syncs())
	}
	if changed {
		s.log.Info("new blocks are encrypted with another key than at the last start", "key", key.ID(), "keys", periodNames(s.present()))
	}
	if !s.resealing {
		return nil
	}
	return s.resealCatalogue(ctx)
}
