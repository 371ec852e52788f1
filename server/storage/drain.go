package storage

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/fair"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

const (
	// moveBytes and moveSlots are the maximum bytes and slots of one batch of moves. A larger batch
	// shares one sync of data and index among more blocks. A smaller batch delays other readers of
	// the volume less, because the mover always has one batch of reads in flight.
	moveBytes = 4 << 20
	moveSlots = 256
	// movePause is the time between two passes over a volume if the earlier pass left blocks on the
	// volume.
	movePause = time.Second
)

// A mover moves the blocks of one volume to the other volumes while the volume is
// draining. While Limits.RewriteBytesPerSecond is positive, it also moves blocks of older keys to slots of the newest
// key, on any volume (rewrite.go).
//
//	slot on the draining volume ─► read, verified ─► slot elsewhere: write ─► sync ─► live
//	                                                                                  │
//	             old slot: free, or condemned until its readers have left ◄── trie.Move, synced
//
// After a crash before the sync of the index, the index refers to the old slot, and the new slot is
// free. After a crash later than that sync, the index refers to the new slot. If the index is lost
// too, Rebuild takes the new slot if it is intact, and otherwise the old one. To drain a volume, the mover never
// evicts. If there is no room for a block on the other volumes, the block stays in its slot and is
// served from there, and the next pass tries again. The mover has one batch in flight. Its reads
// count against the limits of the volume (lane) and of the arena, as the reads of a Load do.
type mover struct {
	node   *Node
	volume uint32
	kick   chan struct{}

	mu    sync.Mutex
	stats MoveStats
}

// MoveStats is the progress of the draining of a volume.
type MoveStats struct {
	// MovedBlocks counts the blocks moved since the node started, MovedBytes the bytes of their
	// slots, and Failures the failed moves, which the mover repeats.
	MovedBlocks, MovedBytes, Failures int64
	// BytesPerSecond is the rate of the current or the last pass over the volume. It is
	// 0 if no pass moved a block.
	BytesPerSecond int64
	// Stalled is the reason why the last pass left blocks on the volume. It is nil if the pass left
	// no block, or if there was no pass.
	Stalled error
}

// VolumeInfo is the state of one volume.
type VolumeInfo struct {
	Index uint32
	blockstore.VolumeStats
	Move MoveStats
}

// Volumes returns the state of each volume, by index.
func (n *Node) Volumes() []VolumeInfo {
	var out []VolumeInfo
	for i, v := range n.store.Stats().Volumes {
		out = append(out, VolumeInfo{Index: uint32(i), VolumeStats: v, Move: n.movers[i].status()})
	}
	return out
}

// VolumeNamed returns the index of a volume. name is the index in decimal digits, or
// the path. VolumeNamed fails with blockstore.ErrVolumeUnknown.
func (n *Node) VolumeNamed(name string) (uint32, error) { return n.store.VolumeNamed(name) }

// DrainVolume begins to move the blocks of a volume to the other volumes. The volume
// takes no new blocks. The draining continues after a restart. See
// blockstore.Store.DrainVolume.
func (n *Node) DrainVolume(ctx context.Context, volume uint32) error {
	if err := n.store.DrainVolume(ctx, volume); err != nil {
		return err
	}
	n.movers[volume].wake()
	return nil
}

// UndrainVolume ends the draining of a volume. The moved blocks stay on the other
// volumes.
func (n *Node) UndrainVolume(ctx context.Context, volume uint32) error {
	if err := n.store.UndrainVolume(ctx, volume); err != nil {
		return err
	}
	n.movers[volume].wake()
	return nil
}

// RemoveVolume ends the use of a volume permanently. It returns the number and size of the lost
// pieces: the pieces on the volume and all descendants of these. Without force, no pieces are lost.
// See blockstore.Store.RemoveVolume.
//
// If the directory of the index is in the directory of the volume, RemoveVolume moves the index to
// another volume (trie.Trie.Relocate). If no other volume can take the index, the volume is removed
// all the same, the node continues to use the index in its old directory, and RemoveVolume returns
// an error. A second call tries again to move the index.
func (n *Node) RemoveVolume(ctx context.Context, volume uint32, force bool) (Removed, error) {
	if err := n.store.RemoveVolume(ctx, volume, force); err != nil {
		return Removed{}, err
	}
	n.movers[volume].wake()
	// The index is moved first. If its drive has failed, the index cannot drop pieces before it is
	// on another drive.
	moved := n.moveIndexFrom(volume)
	var lost []kv.Ref
	for ref := range n.index.Refs() {
		if ref.Extent.Volume() == volume {
			lost = append(lost, ref)
		}
	}
	before := n.index.Stats()
	// The volume is removed already, so the end of the caller's context must not stop dropAll. If
	// the node crashes here, the next start drops the remaining pieces.
	err := n.dropAll(n.stopped, lost, trie.Lost)
	after := n.index.Stats()
	return Removed{Blocks: max(0, before.Pieces-after.Pieces), Bytes: max(0, before.Bytes-after.Bytes)}, errors.Join(err, moved)
}

// moveIndexFrom moves the index to another volume if the index is in the directory of the removed
// volume. It does not stop at the end of the caller's context.
func (n *Node) moveIndexFrom(removed uint32) error {
	volumes, dir := n.store.Stats().Volumes, n.index.Dir()
	if !strings.HasPrefix(filepath.Clean(dir), filepath.Clean(volumes[removed].Path)+string(filepath.Separator)) {
		return nil
	}
	failed := errors.New("no other volume is usable")
	for i, v := range volumes {
		if uint32(i) == removed || v.Health.State != health.OK || v.BelowFloor {
			continue
		}
		to := filepath.Join(v.Path, filepath.Base(dir))
		err := n.index.Relocate(n.stopped, to, func() error { return n.opts.IndexMoved(to) })
		if err == nil {
			return nil
		}
		failed = err
		n.opts.Logger.Warn("could not move the index to another volume", "err", err)
	}
	return fmt.Errorf("storage: volume %d is removed, but the index is still in %s, so the disk cannot be unmounted: %w; remove the volume again to retry, or restart the node without its directory, which rebuilds the index", removed, dir, failed)
}

// removed reports whether the volume of a slot was removed.
func (n *Node) removed(ref kv.Ref) bool {
	return n.store.VolumeHealth(ref).Duty == health.Removed
}

// dropLost makes the piece in a slot of a removed volume unmatchable, and its
// descendants.
func (n *Node) dropLost(ref kv.Ref) {
	n.forget(ref, trie.Lost)
	n.wakeReclaim()
}

func newMovers(n *Node) []*mover {
	movers := make([]*mover, n.store.Volumes())
	for i := range movers {
		movers[i] = &mover{node: n, volume: uint32(i), kick: make(chan struct{}, 1)}
	}
	return movers
}

// wake makes run check soon whether the volume is draining.
func (m *mover) wake() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

func (m *mover) status() MoveStats {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stats
}

func (m *mover) draining() bool {
	return m.node.store.VolumeHealth(kv.Ref{Extent: kv.MakeExtent(m.volume, 0, 0)}).Duty == health.Draining
}

// run makes passes while the volume is draining or has blocks to rewrite. It returns when the node stops.
func (m *mover) run() {
	n := m.node
	var w rewriter
	for {
		var again <-chan time.Time
		if m.rewrites() {
			again = w.run(m)
		}
		if m.draining() {
			m.pass(n.stopped)
			if m.left() {
				again = time.After(movePause)
			} else if m.draining() {
				n.opts.Logger.Info("volume is drained: it holds no block and can be removed", "volume", m.volume)
			}
		}
		select {
		case <-n.stopped.Done():
			return
		case <-m.kick:
		case <-again:
		}
	}
}

// left reports whether the volume is draining and still has slots in use.
func (m *mover) left() bool {
	return m.draining() && m.node.store.Stats().Volumes[m.volume].Slots.UsedBytes() > 0
}

// errNotMatchable: the slots that are still in use hold no matchable blocks. Their blocks are being
// written, or were deleted and have not been removed from the index yet.
var errNotMatchable = errors.New("the remaining blocks are being written, or were deleted and are still leased")

// pass is one pass over the volume.
type pass struct {
	mover *mover
	began time.Time
	moved int64
	// full maps each slot size for which the other volumes had no free slot to the error of the
	// store.
	full map[int64]error
	// after is the last slot that was written. If hasAfter is set, the next block is put right
	// after that slot if possible.
	after    kv.Extent
	hasAfter bool
	stalled  error
	// rewrite: the pass moves blocks of older keys, and does not drain the volume.
	rewrite bool
}

func (m *mover) newPass() *pass {
	return &pass{mover: m, began: time.Now(), full: make(map[int64]error), stalled: errNotMatchable}
}

// pass tries to move every block of the volume to another volume once.
func (m *mover) pass(ctx context.Context) {
	p := m.newPass()
	p.run(ctx, m.draining)
	if ctx.Err() == nil && !m.left() {
		p.stalled = nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stats.Stalled = p.stalled
}

// run moves the blocks of the volume, in the order of the slots, while going returns true.
func (p *pass) run(ctx context.Context, going func() bool) {
	m := p.mover
	from := kv.MakeExtent(m.volume, 0, 0)
	for ctx.Err() == nil && going() {
		refs, slotBytes, next, ok := m.node.store.LiveFrom(from, moveSlots)
		if !ok {
			break
		}
		if p.rewrite {
			if refs = slices.DeleteFunc(refs, func(ref kv.Ref) bool { return !m.node.store.Outdated(ref) }); len(refs) == 0 {
				from = next
				continue
			}
		}
		if p.full[slotBytes] != nil {
			from = kv.MakeExtent(m.volume, refs[0].Extent.Segment()+1, 0)
			continue
		}
		refs = refs[:min(len(refs), int(max(1, moveBytes/slotBytes)))]
		done, err := p.batch(ctx, refs, slotBytes)
		if err != nil {
			p.stall(err)
			break
		}
		if done > 0 {
			from = refs[done-1].Extent + 1
		}
	}
	for _, err := range p.full {
		p.stall(err)
	}
}

func (p *pass) stall(err error) { p.stalled = err }

// moving is one block that is being moved.
type moving struct {
	from, to kv.Ref
	layout   ondisk.Layout
	key      ondisk.SlotKey
	// err is the reason why the block was not moved.
	err error
}

// batch moves the blocks in refs, slots of one size. It returns the number of refs that it has
// handled, whether or not the blocks were moved. After an error the pass must end, because the
// volume cannot be read or the node cannot write.
func (p *pass) batch(ctx context.Context, refs []kv.Ref, slotBytes int64) (done int, err error) {
	n := p.mover.node
	blocks := n.movable(refs)
	if p.rewrite {
		blocks = p.encryptable(blocks)
	}
	if len(blocks) == 0 {
		return len(refs), nil
	}
	to, err := p.reserve(ctx, blocks)
	if err != nil {
		if errors.Is(err, blockstore.ErrFull) {
			p.full[slotBytes] = fmt.Errorf("the volumes that take new blocks have no room: %w", err)
			return 0, nil
		}
		return 0, err
	}
	done = len(refs)
	if len(to) < len(blocks) {
		last := blocks[len(to)-1].from
		for done = 1; refs[done-1] != last; done++ {
		}
		blocks = blocks[:len(to)]
	}
	for i := range blocks {
		blocks[i].to = to[i]
	}
	err = p.copy(ctx, blocks, slotBytes)
	p.publish(ctx, blocks, slotBytes)
	return done, err
}

// movable returns the matchable blocks in the slots.
func (n *Node) movable(refs []kv.Ref) (blocks []moving) {
	for _, ref := range refs {
		owner, ok := n.index.Owner(ref)
		if !ok {
			continue
		}
		ns, err := n.index.NamespaceByID(owner.Namespace)
		if err != nil {
			continue
		}
		at, ok := n.index.Find(owner.Namespace, owner.Epoch, trie.PieceKey{ID: owner.ID, Group: uint8(owner.Group)})
		if !ok || at != ref {
			continue
		}
		ns.Epoch = owner.Epoch
		b := moving{from: ref, key: slotKey(ns, ns.Geometry.Digest(), owner.ID, owner.Group)}
		if b.layout, err = b.key.Layout(); err == nil {
			blocks = append(blocks, b)
		}
	}
	return blocks
}

// reserve takes slots for the blocks, in order: on the other volumes, because a draining volume takes no new blocks. It may
// return fewer slots than blocks.
func (p *pass) reserve(ctx context.Context, blocks []moving) (refs []kv.Ref, err error) {
	room := p.mover.node.room
	take := room.free
	if p.rewrite {
		take = room.slots
	}
	for count := len(blocks); count > 0; count /= 2 {
		refs, err = take(ctx, blocks[0].layout, count, p.after, p.hasAfter)
		if !errors.Is(err, blockstore.ErrFull) {
			break
		}
	}
	if len(refs) > 0 {
		p.after, p.hasAfter = refs[len(refs)-1].Extent, true
	}
	return refs, err
}

// copy reads the blocks, writes them to their new slots and syncs the new slots. The outcome of
// each block is in its err. If copy itself returns an error, the pass must end.
func (p *pass) copy(ctx context.Context, blocks []moving, slotBytes int64) error {
	n := p.mover.node
	fail := func(err error) error {
		for i := range blocks {
			blocks[i].err = err
		}
		return err
	}
	lane := n.lanes[p.mover.volume]
	if err := lane.enter(fair.Caller{}); err != nil {
		return fail(err)
	}
	defer lane.leave(fair.Caller{})
	reads := make([]blockstore.Read, len(blocks))
	for i, b := range blocks {
		reads[i] = blockstore.Read{Ref: b.from, Want: b.key}
	}
	h, err := n.readSlots(ctx, lane, fair.Caller{}, slotBytes*int64(len(blocks)), reads, func(buf arena.Buffer) {
		for i := range reads {
			reads[i].Buf = buf.Bytes()[int64(i)*slotBytes:][:slotBytes]
		}
	})
	if err != nil {
		return fail(err)
	}
	defer h.release()
	var writes []blockstore.Write
	var owners []*moving
	for i := range blocks {
		b, r := &blocks[i], &reads[i]
		if b.err = r.Err; b.err != nil {
			if err := p.readFailed(b); err != nil {
				return fail(err)
			}
			continue
		}
		writes = append(writes, blockstore.Write{Ref: b.to, Buf: r.Buf, Header: ondisk.SlotHeader{
			SlotKey: b.key, Born: r.Origin, Class: r.Class, Parent: r.Parent, Depth: r.Depth, LayerSums: r.LayerSums,
		}})
		owners = append(owners, b)
	}
	if len(writes) == 0 {
		return nil
	}
	_ = n.store.Write(ctx, writes) // each write has its error in Err
	var written []kv.Ref
	for i := range writes {
		if owners[i].err = writes[i].Err; owners[i].err == nil {
			written = append(written, owners[i].to)
		}
	}
	if len(written) == 0 {
		return nil
	}
	err = n.store.Sync(ctx, written...)
	var failed *blockstore.SyncError
	if err != nil && !errors.As(err, &failed) {
		return fail(err)
	}
	for _, b := range owners {
		if failed != nil && b.err == nil {
			b.err = failed.Of(b.to)
		}
	}
	return nil
}

// readFailed removes a block that is corrupt or unreadable from the index. It returns an error if
// the volume has failed, because no other block can be read then.
func (p *pass) readFailed(b *moving) error {
	n := p.mover.node
	switch {
	case errors.Is(b.err, blockstore.ErrStale): // the block was deleted or evicted
	case errors.Is(b.err, blockstore.ErrCorrupt):
		n.dropCorrupt(b.from, "drain", b.err)
	case n.store.Unreadable(b.from, b.err):
		n.dropUnreadable(b.from, "drain", b.err)
	case errors.Is(b.err, blockstore.ErrVolumeFailed):
		return b.err
	}
	return nil
}

// publish makes the index refer to the new slots and frees the old ones. It frees the
// new slots of blocks that were not moved.
func (p *pass) publish(ctx context.Context, blocks []moving, slotBytes int64) {
	n := p.mover.node
	var moves []trie.Moved
	var owners []*moving
	for i := range blocks {
		b := &blocks[i]
		if b.err == nil {
			b.err = n.store.Commit(b.to)
		}
		if b.err != nil {
			n.logIf("abandon slot", n.store.Abandon(b.to))
			continue
		}
		moves = append(moves, trie.Moved{From: b.from, To: b.to})
		owners = append(owners, b)
	}
	if len(moves) == 0 {
		p.count(blocks, 0, slotBytes)
		return
	}
	moved, err := n.index.Move(moves)
	if err == nil {
		// The index is synced before the old slots are freed: after a crash, it must not refer to
		// an old slot that was reused.
		err = n.index.Sync()
	}
	var gone int64
	for i, b := range owners {
		if moved == nil || !moved[i] {
			n.logIf("free slot", n.store.Free(b.to))
			if b.err = err; err == nil {
				b.err = blockstore.ErrStale // the block was deleted or evicted
			}
			continue
		}
		n.hot.rename(b.from, b.to)
		n.logIf("free slot", ignoreStale(n.store.Free(b.from)))
		gone++
		if n.removed(b.to) {
			n.dropLost(b.to) // the volume of the new slot was removed meanwhile; see Node.dropRemoved
		}
	}
	n.unsynced.Store(true)
	p.count(blocks, gone, slotBytes)
	if err != nil {
		p.stall(fmt.Errorf("index: %w", err))
	}
}

func ignoreStale(err error) error {
	if errors.Is(err, blockstore.ErrStale) {
		return nil
	}
	return err
}

// count adds the outcome of a batch to the mover's stats.
func (p *pass) count(blocks []moving, moved, slotBytes int64) {
	m := p.mover
	p.moved += moved * slotBytes
	failures := int64(0)
	for i := range blocks {
		if err := blocks[i].err; err != nil && !errors.Is(err, blockstore.ErrStale) {
			failures++
			p.stall(err)
		}
	}
	if p.rewrite {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stats.Failures += failures
	m.stats.MovedBlocks += moved
	m.stats.MovedBytes += moved * slotBytes
	if took := time.Since(p.began).Seconds(); took > 0 && p.moved > 0 {
		m.stats.BytesPerSecond = int64(float64(p.moved) / took)
	}
}
