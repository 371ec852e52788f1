package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// rebuildBatch is the number of entries in one Put of a rebuild.
const rebuildBatch = 1024

// IndexLost reports whether the index was lost: the index is new although the catalogue on the
// volumes has namespaces. The index must then be rebuilt before Open, because Open frees every slot
// to which the index does not refer.
func IndexLost(store *blockstore.Store, index *trie.Trie) (bool, error) {
	c, err := decodeCatalogue(store.Catalogue())
	if err != nil {
		return false, err
	}
	lost := len(c.Namespaces) > 0 && index.Fresh()
	if lost && !store.CatalogueCertain() {
		return true, errUncertain
	}
	return lost, nil
}

// errUncertain: the index is lost, and too few volumes can be read to determine the newest epochs.
var errUncertain = errors.New("storage: the index is lost, and too few volumes can be read to determine the newest epochs; make the missing volumes available, or start with empty directories")

// RebuildOptions are the options of Rebuild.
type RebuildOptions struct {
	// Store is open and not Ready.
	Store *blockstore.Store
	// Index is fresh (trie.Trie.Fresh). If nil, Rebuild only counts the pieces.
	Index *trie.Trie
	// Verify reads all payloads and leaves out blocks with a damaged layer. Without Verify, such a
	// block is detected at its first read. If several slots hold one piece, Rebuild reads the
	// payloads of these slots in any case.
	Verify bool
	// Progress, if not nil, is called periodically. doneBytes is the number of bytes that Rebuild
	// has read or skipped. totalBytes is the size of all segments; when the headers have been read,
	// the payloads to read are added to it. found is the number of slots with pieces so far.
	Progress func(doneBytes, totalBytes, found int64)
	Logger   *slog.Logger
}

// RebuildReport is the result of a rebuild.
type RebuildReport struct {
	// Namespaces is the number of namespaces in the catalogue.
	Namespaces int
	// Scan is the result of reading the slot headers.
	Scan blockstore.ScanStats
	// Indexed counts the pieces that are matchable, or that would be if RebuildOptions.Index were
	// set.
	Indexed int64
	// These fields count the pieces that were left out, by reason. DeletedNamespace: the catalogue
	// does not have the namespace. OldEpoch: the epoch is not live. Geometry: it differs from the
	// namespace's. Transfer: the class is transfer, and the piece may have been delivered. Copies:
	// the slot is an older copy of a piece. Deleted: the piece or an ancestor was deleted. Orphans:
	// an ancestor is missing. Refused: the index refused the piece because of the
	// quota of its namespace.
	DeletedNamespace, OldEpoch, Geometry, Transfer, Copies, Deleted, Orphans, Refused int64
	Took                                                                              time.Duration
}

// found is one slot that holds a piece of a live epoch.
type found struct {
	id, parent kv.BlockID
	ref        kv.Ref
	// born is the generation of the slot to which the content was first written. A move
	// to another slot keeps born.
	born kv.Generation
	// deleted is the highest generation up to which a tombstone covers the piece and its
	// descendants. It is set by isDeleted.
	deleted kv.Generation
	group   uint8
	state   foundState
	// intact or damaged is set if Rebuild has read the payload. Otherwise both are false.
	intact, damaged bool
}

type foundState uint8

const (
	// waiting: not examined yet.
	waiting foundState = iota
	// climbing: the ancestors of the piece are being examined. If a piece in this state is met
	// again, it is its own ancestor, and so an orphan.
	climbing
	placed
	orphan
)

// pieceName identifies a piece within one namespace and epoch.
type pieceName struct {
	id    kv.BlockID
	group uint8
}

// rebuild is a rebuild in progress.
type rebuild struct {
	opts    RebuildOptions
	report  RebuildReport
	defs    map[kv.NamespaceID]kv.Namespace
	digests map[kv.NamespaceID]kv.GeometryDigest
	found   map[namespaceEpoch][]found
	stones  map[stoneKey]kv.Generation
	floors  map[kv.NamespaceID]kv.Generation
	// highest is the highest namespace id found in the catalogue and in the slots.
	highest kv.NamespaceID
	// pieces counts the slots that were added to found. scanned is the total number of bytes of the
	// finished scans, for Progress.
	pieces, scanned int64
}

// progress returns the progress function of the next scan, or nil if Progress is nil.
func (r *rebuild) progress() func(done, total int64) {
	if r.opts.Progress == nil {
		return nil
	}
	before := r.scanned
	return func(done, total int64) {
		r.scanned = before + total
		r.opts.Progress(before+done, before+total, r.pieces)
	}
}

// Rebuild makes the index from the slot headers and the catalogue. If several slots hold one piece,
// it uses the newest intact slot. A block that had been evicted may be matchable again, with the
// bytes that its writer stored in a live epoch of its namespace. A deleted block does not return.
// Rebuild ends all pins, and retires the epochs that were live only because of a pin.
func Rebuild(ctx context.Context, opts RebuildOptions) (RebuildReport, error) {
	start := time.Now()
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if !opts.Store.CatalogueCertain() {
		return RebuildReport{}, errUncertain
	}
	c, err := decodeCatalogue(opts.Store.Catalogue())
	if err != nil {
		return RebuildReport{}, err
	}
	r := &rebuild{
		opts:    opts,
		defs:    make(map[kv.NamespaceID]kv.Namespace),
		digests: make(map[kv.NamespaceID]kv.GeometryDigest),
		found:   make(map[namespaceEpoch][]found),
	}
	for i, def := range c.Namespaces {
		def = def.Settle(func(kv.Epoch) bool { return false })
		c.Namespaces[i] = def
		r.defs[def.ID], r.digests[def.ID] = def, def.Geometry.Digest()
		r.highest = max(r.highest, def.ID)
	}
	var deleted deletions
	if err := deleted.load(c); err != nil {
		return RebuildReport{}, err
	}
	if !opts.Store.CatalogueCertain() {
		opts.Logger.Warn("too few volumes can be read to determine the newest catalogue: the namespaces are restored without their blocks, because some of the blocks may have been deleted")
		for _, def := range c.Namespaces {
			deleted.raiseFloor(def.ID, opts.Store.NewestGeneration())
		}
	}
	r.stones, r.floors, r.highest = deleted.stones, deleted.floors, max(r.highest, c.Highest)
	r.report.Namespaces = len(c.Namespaces)
	if err := r.scan(ctx); err != nil {
		return r.report, fmt.Errorf("storage: rebuild: %w", err)
	}
	if err := r.choose(ctx); err != nil {
		return r.report, fmt.Errorf("storage: rebuild: %w", err)
	}
	if opts.Index != nil {
		if err := opts.Index.Restore(c.Namespaces, r.highest); err != nil {
			return r.report, fmt.Errorf("storage: rebuild: %w", err)
		}
	}
	for _, def := range c.Namespaces {
		for _, def.Epoch = range def.Live() {
			if err := r.index(ctx, def); err != nil {
				return r.report, fmt.Errorf("storage: rebuild epoch %d of namespace %q: %w", def.Epoch, def.Name, err)
			}
		}
	}
	if opts.Index != nil {
		if err := opts.Index.Sync(); err != nil {
			return r.report, fmt.Errorf("storage: rebuild: %w", err)
		}
	}
	r.report.Took = time.Since(start)
	return r.report, nil
}

// scan collects the slots that hold pieces of live epochs.
func (r *rebuild) scan(ctx context.Context) (err error) {
	opts := blockstore.ScanOptions{Verify: r.opts.Verify, Progress: r.progress()}
	r.report.Scan, err = r.opts.Store.Scan(ctx, opts, func(ref kv.Ref, h *ondisk.SlotHeader) error {
		r.highest = max(r.highest, h.Namespace)
		if r.wanted(h) {
			r.pieces++
			of := namespaceEpoch{h.Namespace, h.Epoch}
			r.found[of] = append(r.found[of], found{id: h.ID, parent: h.Parent, ref: ref, born: h.Origin(), group: h.Group})
		}
		return nil
	})
	return err
}

// wanted reports whether the slot holds a piece for the rebuilt index. It counts the other slots.
func (r *rebuild) wanted(h *ondisk.SlotHeader) bool {
	def, ok := r.defs[h.Namespace]
	switch {
	case !ok:
		r.report.DeletedNamespace++
	case !def.IsLive(h.Epoch):
		r.report.OldEpoch++
	case h.Geometry != r.digests[h.Namespace], int(h.Group) >= len(def.Geometry.Groups),
		h.PayloadBytes != def.Geometry.PieceBytes(int(h.Group)), h.Layers != def.Geometry.Groups[h.Group].Layers:
		r.report.Geometry++
	case h.Class == ondisk.ClassTransfer:
		r.report.Transfer++
	case h.Origin() <= r.floors[h.Namespace]:
		r.report.Deleted++
	default:
		return true
	}
	return false
}

// index adds the pieces of the epoch def.Epoch to the index. Ancestors come first, and otherwise
// the order is that of the slots, so that the blocks of a sequence have the same order in the index
// as on the volume.
func (r *rebuild) index(ctx context.Context, def kv.Namespace) error {
	of := namespaceEpoch{def.ID, def.Epoch}
	pieces := r.found[of]
	byName := make(map[pieceName]int32, len(pieces))
	for i := range pieces {
		byName[pieceName{pieces[i].id, pieces[i].group}] = int32(i)
	}
	batch := make([]trie.Entry, 0, rebuildBatch)
	flush := func() error {
		err := r.put(ctx, def, batch)
		batch = batch[:0]
		return err
	}
	var climb []int32
	for i := range pieces {
		climb = r.climb(def, pieces, byName, int32(i), climb[:0])
		for k, j := range slices.Backward(climb) {
			p := &pieces[j]
			if r.isDeleted(def, pieces, byName, p) {
				// The pieces in climb[:k] are descendants of the deleted piece, so they are deleted
				// too.
				for _, j := range climb[:k+1] {
					pieces[j].state = orphan
				}
				r.report.Deleted += int64(k + 1)
				break
			}
			p.state = placed
			batch = append(batch, p.entry(def))
			if len(batch) == rebuildBatch {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	delete(r.found, of)
	return flush()
}

// choose keeps one slot of each piece in found: the slot with the newest content, and among slots
// with the same content the slot written last. It sorts found by extent. A damaged slot is used
// only if the piece has no other slot. After a power failure, a slot that was being written may
// have a header without its whole payload. Such a slot is either the new slot of a piece that was
// being moved, whose old slot is intact, or a second copy of a piece that another writer was
// storing.
func (r *rebuild) choose(ctx context.Context) error {
	for _, all := range r.found {
		slices.SortFunc(all, func(a, b found) int {
			return cmp.Or(slices.Compare(a.id[:], b.id[:]), cmp.Compare(a.group, b.group), cmp.Compare(b.born, a.born), cmp.Compare(b.ref.Generation, a.ref.Generation))
		})
	}
	for !r.opts.Verify {
		if more, err := r.dropDamaged(ctx); err != nil {
			return err
		} else if !more {
			break
		}
	}
	for of, all := range r.found {
		kept := slices.CompactFunc(all, samePiece)
		r.report.Copies += int64(len(all) - len(kept))
		slices.SortFunc(kept, func(a, b found) int { return cmp.Compare(a.ref.Extent, b.ref.Extent) })
		r.found[of] = kept
	}
	return nil
}

func samePiece(a, b found) bool { return a.id == b.id && a.group == b.group }

// dropDamaged reads the payload of the first slot of each piece that has several slots, unless it
// was read before. It removes the slot from found if the slot is damaged. It reports whether it
// removed any slot.
func (r *rebuild) dropDamaged(ctx context.Context) (dropped bool, err error) {
	first := make(map[kv.Extent]*found)
	for _, all := range r.found {
		for i := 0; i < len(all); {
			p := &all[i]
			for i++; i < len(all) && samePiece(*p, all[i]); i++ {
				first[p.ref.Extent] = p
			}
			if p.intact {
				delete(first, p.ref.Extent)
			}
		}
	}
	if len(first) == 0 {
		return false, nil
	}
	opts := blockstore.ScanOptions{Verify: true, Slots: slices.Sorted(maps.Keys(first)), Progress: r.progress()}
	stats, err := r.opts.Store.Scan(ctx, opts, func(ref kv.Ref, _ *ondisk.SlotHeader) error {
		p := first[ref.Extent]
		p.intact = p.ref == ref
		return nil
	})
	r.report.Scan.Bytes += stats.Bytes
	if err != nil {
		return false, err
	}
	for _, p := range first {
		p.damaged = !p.intact
	}
	for of, all := range r.found {
		kept := slices.DeleteFunc(all, func(p found) bool { return p.damaged })
		dropped = dropped || len(kept) < len(all)
		r.report.Scan.Found -= int64(len(all) - len(kept))
		r.found[of] = kept
	}
	r.report.Scan.Damaged += stats.Damaged
	r.report.Scan.Unreadable += stats.Unreadable
	return dropped, nil
}

// climb returns piece i and those of its ancestors that are not placed yet, the topmost ancestor
// last. If an ancestor is missing, it returns nothing, and all of these pieces are orphans.
func (r *rebuild) climb(def kv.Namespace, pieces []found, byName map[pieceName]int32, i int32, path []int32) []int32 {
	lost := false
	for pieces[i].state == waiting {
		pieces[i].state = climbing
		path = append(path, i)
		name, has := ancestor(def, &pieces[i])
		if !has {
			return path
		}
		next, ok := byName[name]
		if !ok {
			lost = true
			break
		}
		i = next
	}
	if len(path) == 0 || (!lost && pieces[i].state == placed) {
		return path
	}
	for _, j := range path {
		pieces[j].state = orphan
	}
	r.report.Orphans += int64(len(path))
	return path[:0]
}

// isDeleted reports whether a tombstone covers the piece p. The parent of p must be placed.
// isDeleted sets p.deleted. It compares p.born with the tombstones only, and not with the
// generation of an ancestor: if several writers stored the ancestor, its slot in the index may be
// newer than its descendants.
func (r *rebuild) isDeleted(def kv.Namespace, pieces []found, byName map[pieceName]int32, p *found) bool {
	p.deleted = r.stones[stoneKey{def.ID, def.Epoch, trie.PieceKey{ID: p.id, Group: p.group}}]
	if name, has := ancestor(def, p); has {
		p.deleted = max(p.deleted, pieces[byName[name]].deleted)
	}
	return p.born <= p.deleted
}

// ancestor returns the name of the piece that must be indexed before p, if there is one (see
// trie.ParentAbsent).
func ancestor(def kv.Namespace, p *found) (pieceName, bool) {
	switch {
	case def.Index == kv.IndexFlat, def.Geometry.Groups[0].Kind != kv.Full:
		return pieceName{}, false
	case p.group > 0:
		return pieceName{id: p.id}, true
	}
	return pieceName{id: p.parent}, !p.parent.IsZero()
}

func (p *found) entry(def kv.Namespace) trie.Entry {
	e := trie.Entry{ID: p.id, Ref: p.ref, Group: int(p.group)}
	if def.Index != kv.IndexFlat {
		e.Parent = p.parent
	}
	return e
}

// put adds a batch to the index, or only counts it if there is no index.
func (r *rebuild) put(ctx context.Context, def kv.Namespace, batch []trie.Entry) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(batch) == 0 {
		return nil
	}
	if r.opts.Index == nil {
		r.report.Indexed += int64(len(batch))
		return nil
	}
	statuses, err := r.opts.Index.Put(nil, def.ID, def.Epoch, batch, false)
	if err != nil {
		return err
	}
	for _, s := range statuses {
		switch s {
		case trie.Added:
			r.report.Indexed++
		case trie.Exists:
			return errors.New("the index was not fresh")
		default:
			r.report.Refused++
		}
	}
	return nil
}
