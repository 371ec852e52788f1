package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// PieceSums are the XXH3-64 of a piece's layers, computed by the writer from its own memory.
type PieceSums struct {
	PieceRef
	LayerSums []uint64
}

// StoredPiece is the outcome of one piece of a Commit.
type StoredPiece struct {
	PieceRef
	// Stored is set if this call made the piece matchable. If not, Reason is one word
	// (corrupt, full, device, or the String of a trie.PutStatus), and Err, if not nil,
	// has the details.
	Stored bool
	Reason string
	Err    error
}

// committing is the state of one piece of a Commit.
type committing struct {
	StoredPiece
	// slot is the content of the piece's slot: header, payload and padding. It lies in mem, which
	// is the reservation's memory or a copy made by copySlot.
	slot []byte
	mem  *hold
	// from, if not nil, has the payload in staging memory: verify copies it into the slot.
	from []byte
	sums []uint64
	ref  kv.Ref
	// live is set if the slot is committed in the store.
	live bool
}

// Commit stores the pieces that the writer has written to the reservation's memory, and ends the
// reservation. It first calls closed once, which must return only when all bytes of the writer have
// arrived and no further write can change the memory. Each piece has its own outcome. Errors:
// ErrReservation, ErrRequest, and the error of ctx.
func (n *Node) Commit(ctx context.Context, id ReservationID, pieces []PieceSums, closed func(context.Context) error) ([]StoredPiece, error) {
	start := time.Now()
	r, err := n.take(id)
	if err != nil {
		n.opts.Metrics.WriteFailures.WithLabelValues(failureReason(err)).Inc()
		return nil, err
	}
	defer n.end(r)
	defer func() { n.opts.Metrics.WriteSeconds.Observe(time.Since(start).Seconds()) }()
	stored, err := n.commit(ctx, r, pieces, closed)
	if err != nil {
		n.opts.Metrics.WriteFailures.WithLabelValues(failureReason(err)).Inc()
	}
	return stored, err
}

func (n *Node) commit(ctx context.Context, r *Reservation, pieces []PieceSums, closed func(context.Context) error) ([]StoredPiece, error) {
	all, err := r.match(pieces)
	if err != nil {
		return nil, err
	}
	if closed != nil {
		if err := closed(ctx); err != nil {
			return nil, fmt.Errorf("storage: commit: the bytes of the writer did not arrive: %w", err)
		}
	}
	n.verify(r, all)
	if err := n.writeSlots(ctx, r, all); err != nil {
		n.giveUp(all)
		return nil, err
	}
	if err := n.publish(ctx, r, all); err != nil {
		if slices.ContainsFunc(all, func(c committing) bool { return c.Stored }) {
			n.report(r, all)
		}
		return nil, err
	}
	n.report(r, all)
	out := make([]StoredPiece, len(all))
	for i := range all {
		out[i] = all[i].StoredPiece
	}
	return out, nil
}

// match finds the grant of each piece, that is, its place in the reservation's memory.
func (r *Reservation) match(pieces []PieceSums) ([]committing, error) {
	type source struct {
		Grant
		from []byte
	}
	grants := make(map[PieceRef]source, len(r.Grants))
	rest := r.staged
	for _, g := range r.Grants {
		s := source{Grant: g}
		if r.staged != nil {
			size := r.ns.Geometry.PieceBytes(g.Group)
			s.from, rest = rest[:size], rest[size:]
		}
		if g.Status == trie.Added {
			grants[g.PieceRef] = s
		}
	}
	all := make([]committing, 0, len(pieces))
	for _, p := range pieces {
		g, ok := grants[p.PieceRef]
		if !ok {
			return nil, fmt.Errorf("%w: block %d, group %d was not granted or is in the call twice", ErrRequest, p.Block, p.Group)
		}
		delete(grants, p.PieceRef)
		if want := r.ns.Geometry.Groups[p.Group].Layers; len(p.LayerSums) != want {
			return nil, fmt.Errorf("%w: %d layer checksums for block %d, group %d, which has %d layers", ErrRequest, len(p.LayerSums), p.Block, p.Group, want)
		}
		layout := r.layouts[p.Group]
		all = append(all, committing{
			StoredPiece: StoredPiece{PieceRef: p.PieceRef},
			slot:        r.Bytes()[g.Offset-layout.HeaderBytes():][:layout.SlotBytes()],
			mem:         r.mem,
			from:        g.from,
			sums:        p.LayerSums,
		})
	}
	// Ancestors come before descendants, and a block's piece of the full layer group before its
	// pieces of the other groups.
	slices.SortStableFunc(all, func(a, b committing) int {
		if a.Group != b.Group {
			return a.Group - b.Group
		}
		return a.Block - b.Block
	})
	return all, nil
}

func (c *committing) refuse(reason string, err error) { c.Reason, c.Err = reason, err }

// verify copies the pieces that are in staging memory, and compares the checksums of the bytes in
// the reservation's memory with the writer's checksums. Each layer is hashed right after its copy,
// while it is in the CPU cache.
func (n *Node) verify(r *Reservation, all []committing) {
	type layer struct {
		from, at []byte
	}
	var layers []layer
	total := int64(0)
	for i := range all {
		c := &all[i]
		layout := r.layouts[c.Group]
		payload, from := c.slot[layout.HeaderBytes():][:layout.PayloadBytes], c.from
		size := len(payload) / layout.Layers
		total += int64(len(payload))
		for len(payload) > 0 {
			l := layer{at: payload[:size]}
			if from != nil {
				l.from, from = from[:size], from[size:]
			}
			layers, payload = append(layers, l), payload[size:]
		}
	}
	sums := make([]uint64, len(layers))
	n.workers.Do(len(layers), total, func(first, end int) {
		for k := first; k < end; k++ {
			copy(layers[k].at, layers[k].from)
			sums[k] = ondisk.LayerSum(layers[k].at)
		}
	})
	for i := range all {
		c := &all[i]
		got := sums[:len(c.sums)]
		sums = sums[len(c.sums):]
		if k := firstDifference(got, c.sums); k >= 0 {
			n.opts.Metrics.CorruptBlocks.WithLabelValues("write").Inc()
			c.refuse("corrupt", fmt.Errorf("layer %d arrived with checksum %016x; the writer computed %016x", k, got[k], c.sums[k]))
		}
	}
}

func firstDifference(a, b []uint64) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// placementTries is the maximum number of attempts to write a piece, each on another volume.
const placementTries = 3

// errHung: a volume did not complete a write within WriteWait. The device may still read the memory
// of the write.
var errHung = errors.New("the volume does not respond")

// writeSlots reserves slots for the pieces, writes the pieces, and commits the slots. With
// durability sync it syncs before the commit. If a volume returns an error or does not complete a
// write within WriteWait, the piece is written to another volume, if there is one. A piece is
// refused if an ancestor of it in this call was refused.
func (n *Node) writeSlots(ctx context.Context, r *Reservation, all []committing) error {
	defer func() {
		for i := range all {
			all[i].dropCopy(r)
		}
	}()
	r.refuseOrphans(all)
	for try := 1; ; try++ {
		placed := n.writePlaced(ctx, r, all)
		if len(placed) == 0 {
			return nil
		}
		if n.opts.Durability == blockstore.DurabilitySync {
			if err := n.syncData(ctx, placed); err != nil {
				return err
			}
		}
		again := false
		for _, c := range placed {
			if c.Err == nil {
				// Commit refuses the slot if a sync has failed since the write, because the written
				// bytes may be lost.
				c.Err = n.store.Commit(c.ref)
			}
			if c.Err == nil {
				c.live = true
				continue
			}
			elsewhere := n.store.Elsewhere(&c.ref)
			n.logIf("abandon slot", n.store.Abandon(c.ref))
			c.ref = kv.Ref{}
			if errors.Is(c.Err, blockstore.ErrErased) {
				c.refuse(trie.StaleEpoch.String(), nil)
				continue
			}
			if !elsewhere || try == placementTries || ctx.Err() != nil {
				c.refuse("device", c.Err)
				continue
			}
			if errors.Is(c.Err, errHung) {
				if err := n.copySlot(ctx, r, c); err != nil {
					c.refuse("device", fmt.Errorf("%w; there is no memory to try another volume: %w", c.Err, err))
					continue
				}
			}
			again, c.Err = true, nil
		}
		if !again {
			return nil
		}
	}
}

// copySlot copies the piece to new memory for the next attempt to write it. That attempt must not
// write its header into the old memory, which the hanging device may still read.
func (n *Node) copySlot(ctx context.Context, r *Reservation, c *committing) error {
	buf, err := n.allocShare(ctx, r.by, int64(len(c.slot)))
	if err != nil {
		return err
	}
	layout := r.layouts[c.Group]
	// Store.Write fills in the header and the padding.
	copy(buf.Bytes()[layout.HeaderBytes():][:layout.PayloadBytes], c.slot[layout.HeaderBytes():])
	c.dropCopy(r)
	c.mem, c.slot = newHold(buf), buf.Bytes()[:len(c.slot)]
	return nil
}

// dropCopy releases the memory that copySlot has allocated for the piece, if any.
func (c *committing) dropCopy(r *Reservation) {
	if c.mem != r.mem {
		c.mem.release()
		c.mem = r.mem
	}
}

// writePlaced reserves slots for the pieces that have none, group by group. It writes these pieces
// and returns them. The outcome of each piece is in its Err.
func (n *Node) writePlaced(ctx context.Context, r *Reservation, all []committing) []*committing {
	digest := r.ns.Geometry.Digest()
	parts := make(map[uint32]*volumeWrites)
	var owners []*committing
	for group := range r.ns.Geometry.Groups {
		var wanted []*committing
		for i := range all {
			if c := &all[i]; c.Group == group && c.Reason == "" && c.ref.Generation == 0 {
				wanted = append(wanted, c)
			}
		}
		if len(wanted) == 0 {
			continue
		}
		refs, err := n.slots(ctx, r, group, wanted[0].Block, len(wanted))
		if err != nil {
			for _, c := range wanted {
				c.refuse(slotReason(err), err)
			}
			continue
		}
		depth, _ := n.depth(r)
		for i, c := range wanted {
			c.ref = refs[i]
			entry := r.entry(c.PieceRef)
			volume := c.ref.Extent.Volume()
			part := parts[volume]
			if part == nil {
				part = &volumeWrites{volume: volume}
				parts[volume] = part
			}
			part.writes = append(part.writes, blockstore.Write{
				Ref: c.ref,
				Buf: c.slot,
				Header: ondisk.SlotHeader{
					SlotKey:   slotKey(r.ns, digest, entry.ID, group),
					Class:     ondiskClass(r.class),
					Parent:    entry.Parent,
					Depth:     depth + uint32(c.Block),
					LayerSums: c.sums,
				},
			})
			part.owners = append(part.owners, c)
			owners = append(owners, c)
		}
	}
	var volumes sync.WaitGroup
	for _, part := range parts {
		if len(parts) == 1 {
			n.writeVolume(ctx, part) // wakes one thread less
			break
		}
		volumes.Go(func() { n.writeVolume(ctx, part) })
	}
	volumes.Wait()
	return owners
}

// volumeWrites are the writes of one Commit to one volume. writes[i] writes the piece
// owners[i].
type volumeWrites struct {
	volume uint32
	writes []blockstore.Write
	owners []*committing
}

// writeVolume does the writes of one volume and sets the Err of each owner. If the device does not
// complete them within WriteWait, Err is errHung. The device may then still use the memory and the
// slots. The memory is therefore released only when the device has completed the writes. The slots,
// which the caller abandons, become free at that time too.
func (n *Node) writeVolume(ctx context.Context, part *volumeWrites) {
	held := make([]*hold, len(part.owners))
	for i, c := range part.owners {
		held[i] = c.mem
		c.mem.retain()
	}
	done := make(chan struct{})
	n.detach(func() {
		_ = n.store.Write(ctx, part.writes) // each write has its error in Err
		for _, h := range held {
			h.release()
		}
		close(done)
	})
	timer := time.NewTimer(n.opts.WriteWait)
	defer timer.Stop()
	select {
	case <-done:
		for i, c := range part.owners {
			c.Err = part.writes[i].Err
		}
	case <-timer.C:
		for _, c := range part.owners {
			c.Err = fmt.Errorf("volume %d has not completed a write within %v: %w", part.volume, n.opts.WriteWait, errHung)
		}
	}
}

// giveUp frees the slots of all pieces. None of them is in the index.
func (n *Node) giveUp(all []committing) {
	for i := range all {
		c := &all[i]
		switch {
		case c.live:
			n.logIf("free slot", n.store.Free(c.ref))
		case c.ref.Generation != 0:
			n.logIf("abandon slot", n.store.Abandon(c.ref))
		}
		c.ref, c.live = kv.Ref{}, false
	}
}

// syncData syncs the volumes of the written pieces. If a volume was not synced, the Err of its
// pieces is the reason. syncData itself fails only with the error of ctx.
func (n *Node) syncData(ctx context.Context, owners []*committing) error {
	var refs []kv.Ref
	for _, c := range owners {
		if c.Err == nil {
			refs = append(refs, c.ref)
		}
	}
	if len(refs) == 0 {
		return nil
	}
	err := n.store.Sync(ctx, refs...)
	var failed *blockstore.SyncError
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &failed):
		return fmt.Errorf("storage: commit: %w", err)
	}
	for _, c := range owners {
		if e := failed.Of(c.ref); e != nil && c.Err == nil {
			c.Err = fmt.Errorf("sync: %w", e)
		}
	}
	return nil
}

// refuseOrphans refuses each piece of which an ancestor was refused.
func (r *Reservation) refuseOrphans(all []committing) {
	if r.ns.Index == kv.IndexFlat {
		return
	}
	broken := len(r.ids)
	for i := range all {
		if all[i].Group == 0 && all[i].Reason != "" {
			broken = min(broken, all[i].Block)
		}
	}
	for i := range all {
		if all[i].Reason == "" && all[i].Block > broken {
			all[i].refuse("parent_absent", nil)
		}
	}
}

// depth returns the number of blocks before the first block of the reservation. The slot headers
// contain the depth for inspection and for a rebuild of the index. A rebuild uses only the order of
// depths, so callers ignore the error, which occurs if the parent was just removed.
func (n *Node) depth(r *Reservation) (uint32, error) {
	if r.parent.IsZero() {
		return 0, nil
	}
	infos, err := n.index.Stat(r.ns.ID, r.parent)
	if err != nil {
		return 0, err
	}
	for _, info := range infos {
		if info.Epoch == r.ns.Epoch {
			return uint32(info.Depth) + 1, nil
		}
	}
	return 0, fmt.Errorf("storage: block %v in epoch %d: %w", r.parent, r.ns.Epoch, trie.ErrAbsent)
}

// slots reserves count slots for the consecutive blocks from block first on, if possible right
// after the slot of the previous block. It evicts if no slot is free.
func (n *Node) slots(ctx context.Context, r *Reservation, group, first, count int) ([]kv.Ref, error) {
	layout := r.layouts[group]
	before := r.parent
	if first > 0 {
		before = r.ids[first-1]
	}
	after, hasAfter := n.index.Find(r.ns.ID, r.ns.Epoch, trie.PieceKey{ID: before, Group: uint8(group)})
	return n.room.slots(ctx, layout, count, after.Extent, hasAfter)
}

func slotReason(err error) string {
	if errors.Is(err, blockstore.ErrFull) || errors.Is(err, blockstore.ErrFloor) || errors.Is(err, ErrBusy) {
		return "full"
	}
	return "device"
}

func ondiskClass(c trie.Class) ondisk.Class {
	if c == trie.Transfer {
		return ondisk.ClassTransfer
	}
	return ondisk.ClassPrefix
}

// publish adds the pieces to the index. After an error, the pieces that are in the index are
// Stored, and the slots of the other pieces are free.
func (n *Node) publish(ctx context.Context, r *Reservation, all []committing) error {
	var entries []trie.Entry
	var owners []*committing
	for i := range all {
		c := &all[i]
		if c.Reason != "" {
			continue
		}
		e := r.entry(c.PieceRef)
		e.Ref = c.ref
		entries = append(entries, e)
		owners = append(owners, c)
	}
	if len(entries) == 0 {
		return nil
	}
	statuses, err := n.putInQuota(ctx, r, entries)
	if err != nil {
		err = fmt.Errorf("storage: commit: %w", err)
	}
	if len(statuses) == 0 {
		n.giveUp(all)
		return err
	}
	n.unsynced.Store(true)
	n.index.CountRefused(r.ns.ID, statuses)
	for i, c := range owners {
		if statuses[i] == trie.Added {
			c.Stored = true
			continue
		}
		c.refuse(statuses[i].String(), nil)
		n.logIf("free slot", n.store.Free(c.ref))
	}
	n.dropRemoved(r, owners)
	return err
}

// putInQuota adds entries to the index, as trie.Trie.Put does. Since Reserve other writers may have used
// up the room in the quota of the namespace or of its tenant. putInQuota then evicts blocks of the
// namespace or of the tenant for the pieces that the index has refused, and adds these pieces again.
func (n *Node) putInQuota(ctx context.Context, r *Reservation, entries []trie.Entry) ([]trie.PutStatus, error) {
	durable := n.opts.Durability == blockstore.DurabilitySync
	statuses, err := n.index.Put(nil, r.ns.ID, r.ns.Epoch, entries, durable)
	for round := 0; round < roomRounds && err == nil && slices.ContainsFunc(statuses, trie.PutStatus.ByQuota); round++ {
		var again []int // all pieces that the lack of room concerns: also those whose parent was refused
		var bytes int64
		var last kv.BlockID
		for i, s := range statuses {
			switch {
			case s.ByQuota() || s == trie.ParentAbsent:
				again = append(again, i)
				bytes += r.layouts[entries[i].Group].SlotBytes()
			case entries[i].Group == 0 && (s == trie.Added || s == trie.Exists):
				last = entries[i].ID
			}
		}
		fit := n.makeRoom(ctx, r, last, bytes)
		retry := make([]trie.Entry, len(again))
		for j, i := range again {
			retry[j] = entries[i]
		}
		var next []trie.PutStatus
		next, err = n.index.Put(nil, r.ns.ID, r.ns.Epoch, retry, durable)
		for j, s := range next {
			statuses[again[j]] = s
		}
		if !fit {
			break
		}
	}
	return statuses, err
}

// makeRoom evicts for the quotas of the namespace and its tenant, and reports whether slots of the size
// bytes fit afterwards. The block last of this call, if it is not zero, and its ancestors stay.
func (n *Node) makeRoom(ctx context.Context, r *Reservation, last kv.BlockID, bytes int64) bool {
	if !last.IsZero() {
		lease, err := n.index.Hold(r.ns.ID, r.ns.Epoch, last)
		if err != nil {
			return false
		}
		defer func() { n.logIf("release a block of the commit", n.index.Release(lease)) }()
	}
	fit, err := n.room.inQuota(ctx, r.ns, bytes)
	return err == nil && fit
}

// errVolumeRemoved: the volume was removed while blocks were written to it.
var errVolumeRemoved = errors.New("the volume was removed meanwhile")

// dropRemoved removes the pieces whose volume was removed during the Commit, and their descendants,
// from the index. RemoveVolume drops only the pieces that are in the index at the time of the
// removal, so pieces added after that are dropped here.
func (n *Node) dropRemoved(r *Reservation, stored []*committing) {
	lost := len(r.ids)
	for _, c := range stored {
		if c.Stored && n.removed(c.ref) {
			c.Stored = false
			c.refuse("device", errVolumeRemoved)
			n.dropLost(c.ref)
			if c.Group == 0 {
				lost = min(lost, c.Block)
			}
		}
	}
	if r.ns.Index == kv.IndexFlat {
		return
	}
	for _, c := range stored {
		if c.Stored && c.Block > lost {
			c.Stored = false
			c.refuse("parent_absent", nil)
		}
	}
}

// report counts the outcomes and publishes the stored blocks as events.
func (n *Node) report(r *Reservation, all []committing) {
	m := n.opts.Metrics
	for i := range all {
		c := &all[i]
		if !c.Stored {
			m.WriteSkipped.WithLabelValues(c.Reason).Inc()
			continue
		}
		m.WrittenBlocks.Of(r.ns.Name).Inc()
		m.WrittenBytes.Of(r.ns.Name).Add(float64(r.layouts[c.Group].PayloadBytes))
	}
	n.publishChanges()
	n.commits.Add(1)
}

// logIf logs err, if it is not nil, with the name of the operation. It is for errors that need no
// other reaction.
func (n *Node) logIf(what string, err error) {
	if err != nil {
		n.opts.Logger.Error(what, "err", err)
	}
}
