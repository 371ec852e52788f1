package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/fair"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// listPage is the largest limit, in pieces, that is passed to trie.Trie.List. It bounds the time
// for which a call locks the index.
const listPage = 4096

// held returns the number and the size of the pieces of a namespace.
func (n *Node) held(id kv.NamespaceID) Removed {
	s, _ := n.index.StatsOf(id)
	return Removed{Blocks: s.Pieces, Bytes: s.Bytes}
}

// heldBy returns the number and the size of the pieces of one live epoch of a namespace.
func (n *Node) heldBy(id kv.NamespaceID, epoch kv.Epoch) Removed {
	s, _ := n.index.StatsOf(id)
	for _, e := range s.Live {
		if e.Epoch == epoch {
			return Removed{Blocks: e.Pieces, Bytes: e.Bytes}
		}
	}
	return Removed{}
}

// NamespaceStats returns the index's figures of one namespace; false if there is none with this id.
func (n *Node) NamespaceStats(id kv.NamespaceID) (trie.NamespaceStats, bool) {
	return n.index.StatsOf(id)
}

// DeleteBlocks makes a block and its descendants unmatchable in every live epoch. The deletion is
// durable, so a rebuild of the index does not restore the blocks. Their slots are freed in the
// background. DeleteBlocks returns the number and the size of the deleted pieces. If dryRun is set,
// it changes nothing. If the index does not have the block, it returns trie.ErrAbsent, but still
// records the deletion, so that a rebuild does not restore copies of the block in free slots.
func (n *Node) DeleteBlocks(namespace string, id kv.BlockID, dryRun bool) (Removed, error) {
	ns, err := n.Namespace(namespace)
	if err != nil {
		return Removed{}, err
	}
	var below Removed
	below.Blocks, below.Bytes, err = n.index.Below(ns.ID, id)
	if err != nil && !errors.Is(err, trie.ErrAbsent) || dryRun {
		return below, err
	}
	// The index changes before the tombstone (the record of the deletion) is made. So the tombstone
	// covers every descendant that was added before that. If the catalogue cannot be written, the
	// caller can repeat the call.
	err = n.index.Delete(ns.ID, id)
	n.publishChanges()
	// The tombstones are for the epochs that are live after the deletion: an epoch that began
	// meanwhile needs a tombstone, and an epoch that was retired meanwhile needs none.
	if now, err := n.index.NamespaceByID(ns.ID); err == nil {
		ns = now
	}
	count := n.noteDeleted(ns.ID, ns.Live(), id, rootGroups(ns)...)
	n.wakeReclaim()
	// The caller's context is not used: the block is deleted from the index already, so the
	// deletion must become durable even if the caller ends.
	if err := n.writeDeleted(n.stopped, count); err != nil {
		return Removed{}, fmt.Errorf("storage: block %v is deleted, but the deletion could not be written to the volumes; repeat the call, or a rebuild of the index may restore the block: %w", id, err)
	}
	if err != nil {
		return Removed{}, err
	}
	return below, nil
}

// Evict removes blocks in the order of the eviction policy until it has freed slots of at least
// bytes in total, or until no further block may be removed. If dryRun is set, it changes nothing
// and returns an upper bound: the number and size of all pieces of the namespace or, if namespace
// is empty, of the node.
func (n *Node) Evict(namespace string, bytes int64, dryRun bool) (Removed, error) {
	if bytes <= 0 {
		return Removed{}, fmt.Errorf("%w: cannot evict %d bytes; give a positive number", ErrRequest, bytes)
	}
	var from only
	stats := n.index.Stats()
	held := Removed{Blocks: stats.Pieces, Bytes: stats.Bytes}
	if namespace != "" {
		ns, err := n.Namespace(namespace)
		if err != nil {
			return Removed{}, err
		}
		from.namespace, held = ns.ID, n.held(ns.ID)
	}
	if !dryRun {
		return n.evict(bytes, from)
	}
	if held.Bytes <= bytes || held.Blocks == 0 {
		return held, nil
	}
	slot := held.Bytes / held.Blocks
	blocks := (bytes + slot - 1) / slot
	return Removed{Blocks: blocks, Bytes: blocks * slot}, nil
}

// Delivered removes blocks of class transfer that have reached their reader. epoch is the epoch of
// the blocks; 0 means the newest.
func (n *Node) Delivered(namespace string, epoch kv.Epoch, ids []kv.BlockID) (Removed, error) {
	ns, err := n.Namespace(namespace)
	if err != nil {
		return Removed{}, err
	}
	if err := n.checkChain(ids); err != nil {
		return Removed{}, err
	}
	dropped, err := n.index.Delivered(nil, ns.ID, epoch, ids)
	return n.free(dropped), err
}

// StatBlock returns the pieces of one block, those of the newest live epoch first.
func (n *Node) StatBlock(namespace string, id kv.BlockID) (kv.Namespace, []trie.Info, error) {
	ns, err := n.Namespace(namespace)
	if err != nil {
		return ns, nil, err
	}
	infos, err := n.index.Stat(ns.ID, id)
	if err != nil {
		return ns, nil, err
	}
	return ns, infos, nil
}

// ListBlocks returns pieces of a namespace in no particular order; see
// trie.Trie.List.
func (n *Node) ListBlocks(namespace string, cursor uint32, limit int) (kv.Namespace, []trie.Info, uint32, error) {
	ns, err := n.Namespace(namespace)
	if err != nil {
		return ns, nil, 0, err
	}
	infos, next, err := n.index.List(ns.ID, cursor, min(max(1, limit), listPage))
	return ns, infos, next, err
}

// Tips returns the last blocks of the stored sequences of one live epoch, the hottest first, and the
// number and the payload of the epoch's pieces. Errors: those of trie.Trie.Tips.
func (n *Node) Tips(namespace string, epoch kv.Epoch) ([]trie.Tip, Removed, error) {
	ns, err := n.Namespace(namespace)
	if err != nil {
		return nil, Removed{}, err
	}
	tips, err := n.index.Tips(ns.ID, epoch)
	return tips, n.payload(ns, epoch), err
}

// payload returns the number and the payload of the pieces of one live epoch.
func (n *Node) payload(ns kv.Namespace, epoch kv.Epoch) (held Removed) {
	s, _ := n.index.StatsOf(ns.ID)
	for _, e := range s.Live {
		if e.Epoch != epoch {
			continue
		}
		for g := range ns.Geometry.Groups {
			held.Blocks += e.GroupPieces[g]
			held.Bytes += e.GroupPieces[g] * ns.Geometry.PieceBytes(g)
		}
	}
	return held
}

// Chain returns the chain of a stored block in one live epoch, as trie.Trie.Chain does.
func (n *Node) Chain(namespace string, epoch kv.Epoch, id kv.BlockID) ([]trie.Link, error) {
	ns, err := n.Namespace(namespace)
	if err != nil {
		return nil, err
	}
	return n.index.Chain(ns.ID, epoch, id)
}

// Demote makes blocks of one live epoch the first to be evicted, until they are used again. See trie.Trie.Demote.
func (n *Node) Demote(namespace string, epoch kv.Epoch, ids []kv.BlockID) error {
	ns, err := n.Namespace(namespace)
	if err != nil {
		return err
	}
	return n.index.Demote(ns.ID, epoch, ids)
}

// Commits returns the number of commits that have stored a piece since Open.
func (n *Node) Commits() uint64 { return n.commits.Load() }

// VerifiedPiece is the outcome of Verify for one piece.
type VerifiedPiece struct {
	ID    kv.BlockID
	Group int
	State PieceState // Delivered means intact
	Err   error
	// LayerSums are the checksums in the slot's header, set if the piece is intact.
	LayerSums []uint64
}

// Verify reads every piece of the blocks from the device, even if the piece is in memory, and
// checks every checksum. It reads the pieces of one epoch, or of every live epoch if epoch is 0.
// Broken pieces are dropped from the index. Blocks that are not stored are Absent.
func (n *Node) Verify(ctx context.Context, namespace string, epoch kv.Epoch, ids []kv.BlockID) ([]VerifiedPiece, error) {
	if err := n.checkChain(ids); err != nil {
		return nil, err
	}
	var out []VerifiedPiece
	for _, id := range ids {
		// StatBlock is called for each block, because the live epochs may change in between.
		ns, infos, err := n.StatBlock(namespace, id)
		infos = slices.DeleteFunc(infos, func(i trie.Info) bool { return epoch != 0 && i.Epoch != epoch })
		if errors.Is(err, trie.ErrAbsent) || err == nil && len(infos) == 0 {
			out = append(out, VerifiedPiece{ID: id, State: Absent})
			continue
		}
		if err != nil {
			return out, err
		}
		for _, info := range infos {
			v, err := n.verifyPiece(ctx, ns, info)
			if err != nil {
				return out, err
			}
			out = append(out, v)
		}
	}
	return out, n.writePending(ctx)
}

func (n *Node) verifyPiece(ctx context.Context, ns kv.Namespace, info trie.Info) (VerifiedPiece, error) {
	v := VerifiedPiece{ID: info.ID, Group: info.Group}
	ns.Epoch = info.Epoch
	want := slotKey(ns, ns.Geometry.Digest(), info.ID, info.Group)
	layout, err := want.Layout()
	if err != nil {
		return v, err
	}
	batch := []blockstore.Read{{Ref: info.Ref, Want: want}}
	lane := n.lanes[info.Ref.Extent.Volume()]
	h, err := n.readSlots(ctx, lane, fair.Caller{}, layout.SlotBytes(), batch, func(buf arena.Buffer) { batch[0].Buf = buf.Bytes()[:layout.SlotBytes()] })
	if err != nil {
		return v, err
	}
	defer h.release()
	switch err := batch[0].Err; {
	case err == nil:
		v.State, v.LayerSums = Delivered, slices.Clone(batch[0].LayerSums)
	case errors.Is(err, blockstore.ErrCorrupt) && !n.current(ns):
		// The epoch was retired before or during the read, so the slot may have been reused for
		// another block.
		v.State, v.Err = Absent, fmt.Errorf("block %v: epoch %d of namespace %q was retired meanwhile", info.ID, ns.Epoch, ns.Name)
	case errors.Is(err, blockstore.ErrCorrupt):
		n.dropCorrupt(info.Ref, "verify", err)
		v.State, v.Err = Corrupt, err
	case errors.Is(err, blockstore.ErrStale):
		if ref, ok := n.index.Find(ns.ID, ns.Epoch, trie.PieceKey{ID: info.ID, Group: uint8(info.Group)}); ok && ref != info.Ref {
			info.Ref = ref // the piece was moved to another slot
			return n.verifyPiece(ctx, ns, info)
		}
		n.dropStale(info.Ref)
		v.State, v.Err = Absent, err
	default:
		if n.store.Unreadable(info.Ref, err) {
			n.dropUnreadable(info.Ref, "verify", err)
		}
		v.State, v.Err = Failed, err
	}
	return v, nil
}

// current reports whether the epoch of ns is still live.
func (n *Node) current(ns kv.Namespace) bool {
	now, err := n.index.NamespaceByID(ns.ID)
	return err == nil && now.IsLive(ns.Epoch)
}

// Stats are the counters of a node.
type Stats struct {
	Index trie.Stats
	Store blockstore.Stats
	Arena arena.Stats
	// HotBytes is the size of the hot set (hotSet). HotQueries counts the lookups of pieces in the
	// hot set, and HotHits the lookups that found the piece.
	HotBytes            int64
	HotHits, HotQueries uint64
	Reservations        int
	// RunningReads and WaitingReads count the Loads that run and that wait for others to end. At
	// most ReadsMax run.
	RunningReads, WaitingReads, ReadsMax int
	// LoanBytes is the size of the arena memory lent to readers on this host, and Loans the number
	// of lent pieces.
	LoanBytes int64
	Loans     int
}

// WaitingReads returns the number of a principal's Loads that wait for others to end.
func (n *Node) WaitingReads(principal string) int { return n.reads.waitingOf(principal) }

// Memory returns the size of the arena memory that a principal's reads hold, also of blocks that they
// have put into the hot set, and the size that its reservations hold.
func (n *Node) Memory(principal string) (readBytes, writeBytes int64) {
	return n.opts.Arena.Held(principal)
}

// Stats returns the current counters.
func (n *Node) Stats() Stats {
	s := Stats{Index: n.index.Stats(), Store: n.store.Stats(), Arena: n.opts.Arena.Stats()}
	s.HotBytes, s.HotHits, s.HotQueries = n.hot.stats()
	s.LoanBytes, s.Loans = n.loans.stats()
	running, waiting, limit := n.reads.stats()
	s.RunningReads, s.WaitingReads, s.ReadsMax = int(running), waiting, int(limit)
	n.mu.Lock()
	s.Reservations = len(n.reservations)
	n.mu.Unlock()
	return s
}

// SetKeys replaces the keys of encrypted volumes. It fails, and changes nothing, if blocks need a key
// that is missing.
func (n *Node) SetKeys(ctx context.Context, keys *crypt.Keyring) error {
	err := n.store.SetKeys(ctx, keys)
	n.wakeMovers()
	return err
}

// CheckKeys returns the error with which SetKeys would refuse the keys. It changes nothing.
func (n *Node) CheckKeys(keys *crypt.Keyring) error { return n.store.CheckKeys(keys) }

// EpochKeys returns which blocks depend on the secrets of their epochs, and which erasures of secrets are not
// complete.
func (n *Node) EpochKeys() blockstore.EpochKeys { return n.store.EpochKeys() }

// Erasures returns the erasures of the secrets of epochs that are not complete, sorted by namespace.
func (n *Node) Erasures() []blockstore.Erasure { return n.store.Erasures() }

// KeyUse returns the keys of encrypted volumes with the blocks of each.
func (n *Node) KeyUse() []blockstore.KeyUse { return n.store.KeyUse() }
