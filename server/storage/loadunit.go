package storage

import (
	"context"
	"errors"
	"sync"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/trie"
)

const (
	// unitBytes is the size, in bytes, of one device batch of a Load. It is large enough for the
	// device's full bandwidth, and small enough that the network transfer starts early.
	unitBytes = 4 << 20
	// partBytes is the size, in bytes, of one part of a piece that is loaded in parts
	// (Options.CutThroughBytes).
	partBytes = 2 << 20
	// loadDepth is the maximum number of units of one Load in progress: one on the disk, one on the
	// network, and two that cover the time between a completion and the next request.
	loadDepth = 4
	// cutDepth is the maximum number of parts in progress of one piece that is loaded in parts. All
	// parts are on one volume. With more parts in progress, the device may complete all of them at
	// the same time, and then disk and network do not overlap.
	cutDepth = 2
)

// unit is the content of one device batch from one volume: several whole pieces, or some layers of
// one piece.
type unit struct {
	volume             int
	pieces             []int
	firstLayer, layers int // layers 0: whole pieces
	bytes              int64
}

// units divides the pieces that have a slot into units. The units are in the order of their first
// pieces.
func (l *load) units() (units []unit) {
	// growing maps a volume to the index of the unit to which further pieces of the volume are
	// added.
	growing := make(map[int]int)
	for i, ref := range l.refs {
		if ref.Generation == 0 {
			continue
		}
		group := l.pieces[i].Group
		pieceBytes, layerBytes := l.ns.Geometry.PieceBytes(group), l.ns.Geometry.LayerBytes(group)
		all := l.ns.Geometry.Groups[group].Layers
		first, count := l.req.FirstLayer, l.req.Layers
		if count == 0 {
			count = all - first
		}
		whole := l.req.Keep || l.node.opts.CutThroughBytes < 0 || pieceBytes < l.node.opts.CutThroughBytes
		volume := int(ref.Extent.Volume())
		if count == all && whole {
			at, ok := growing[volume]
			if !ok || units[at].bytes+pieceBytes > unitBytes {
				at = len(units)
				growing[volume] = at
				units = append(units, unit{volume: volume})
			}
			units[at].pieces = append(units[at].pieces, i)
			units[at].bytes += pieceBytes
			continue
		}
		clear(growing)
		step := int(max(1, partBytes/layerBytes))
		if whole {
			step = count
		}
		for at := first; at < first+count; at += step {
			units = append(units, unit{volume: volume, pieces: []int{i}, firstLayer: at, layers: min(step, first+count-at)})
		}
	}
	return units
}

// run loads and delivers the units, a few concurrently.
func (l *load) run(ctx context.Context, units []unit) {
	for _, u := range units {
		l.lanes.left[u.volume]++
	}
	if len(units) == 1 {
		l.loadAndDeliver(ctx, units[0])
		return
	}
	depth := loadDepth
	if first, second := units[0], units[1]; first.layers > 0 && first.pieces[0] == second.pieces[0] {
		depth = cutDepth
	}
	slots := make(chan struct{}, depth)
	var wg sync.WaitGroup
	for _, u := range units {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			l.loadAndDeliver(ctx, u)
		})
	}
	wg.Wait()
}

// loadAndDeliver loads a unit and delivers its parts.
func (l *load) loadAndDeliver(ctx context.Context, u unit) {
	parts := l.loadUnit(ctx, u)
	if len(parts) > 0 {
		l.deliver(ctx, parts)
	}
}

// loadUnit reads a unit and returns its verified parts. The unit leaves the volume's lane before
// the parts are sent to the reader.
func (l *load) loadUnit(ctx context.Context, u unit) []Part {
	defer l.lanes.end(u.volume)
	if u.layers == 0 {
		return l.loadPieces(ctx, u)
	}
	return l.loadLayers(ctx, u)
}

// read reads slots of one volume into arena memory of total bytes; see Node.readSlots. Without an
// error the caller releases the hold. After an error the caller must not use the batch.
func (l *load) read(ctx context.Context, volume int, total int64, batch []blockstore.Read, place func(buf arena.Buffer)) (*hold, error) {
	n := l.node
	lane, err := l.lanes.begin(volume)
	if err != nil {
		return nil, err
	}
	return n.readSlots(ctx, lane, l.lanes.by, total, batch, place)
}

// hotParts returns parts for the pieces that are in the hot set, and the indexes of the other
// pieces.
func (l *load) hotParts(pieces []int) (parts []Part, cold []int) {
	for _, i := range pieces {
		if p, ok := l.node.hot.get(l.refs[i]); ok {
			parts = append(parts, l.part(i, 0, p.hold, p.payload, p.bytes, p.sums))
			p.hold.release()
			continue
		}
		cold = append(cold, i)
	}
	return parts, cold
}

// loadPieces loads whole pieces. Hot pieces need no device read.
func (l *load) loadPieces(ctx context.Context, u unit) []Part {
	n := l.node
	parts, cold := l.hotParts(u.pieces)
	if len(cold) == 0 {
		return parts
	}
	reads := make([]blockstore.Read, len(cold))
	layouts := make([]ondisk.Layout, len(cold))
	var total int64
	for j, i := range cold {
		reads[j] = blockstore.Read{Ref: l.refs[i], Want: l.want(i)}
		layout, err := reads[j].Want.Layout()
		if err != nil {
			l.fail(cold, err)
			return parts
		}
		layouts[j] = layout
		total += layout.SlotBytes()
	}
	h, err := l.read(ctx, u.volume, total, reads, func(buf arena.Buffer) {
		offset := int64(0)
		for j := range reads {
			size := layouts[j].SlotBytes()
			reads[j].Buf = buf.Bytes()[offset : offset+size]
			offset += size
		}
	})
	if err != nil {
		l.fail(cold, err)
		return parts
	}
	defer h.release()
	offset := int64(0)
	for j, i := range cold {
		payload := offset + layouts[j].HeaderBytes()
		offset += layouts[j].SlotBytes()
		if reads[j].Err != nil {
			parts = append(parts, l.readMoved(ctx, i, reads[j], layouts[j])...)
			continue
		}
		n.hot.put(hotPiece{ref: l.refs[i], hold: h, payload: payload, bytes: layouts[j].PayloadBytes, slotBytes: layouts[j].SlotBytes(), sums: reads[j].LayerSums})
		parts = append(parts, l.part(i, 0, h, payload, layouts[j].PayloadBytes, reads[j].LayerSums))
	}
	return parts
}

// loadLayers loads some layers of one piece.
func (l *load) loadLayers(ctx context.Context, u unit) []Part {
	i := u.pieces[0]
	read := blockstore.Read{Ref: l.refs[i], Want: l.want(i), FirstLayer: u.firstLayer, Layers: u.layers}
	layout, err := read.Want.Layout()
	if err != nil {
		l.fail(u.pieces, err)
		return nil
	}
	_, size, skip := layout.Range(u.firstLayer, u.layers)
	batch := []blockstore.Read{read}
	h, err := l.read(ctx, u.volume, size, batch, func(buf arena.Buffer) { batch[0].Buf = buf.Bytes()[:size] })
	if err != nil {
		l.fail(u.pieces, err)
		return nil
	}
	defer h.release()
	if batch[0].Err != nil {
		moved, r, err := l.follow(ctx, batch[0], size)
		if err != nil {
			l.lost(i, r.Ref, err)
			return nil
		}
		defer moved.release()
		h, batch[0] = moved, r
	}
	at := int64(u.firstLayer-l.req.FirstLayer) * layout.LayerBytes()
	return []Part{l.part(i, at, h, skip, int64(u.layers)*layout.LayerBytes(), batch[0].LayerSums)}
}

// readMoved reads a whole piece that was moved to another slot before it was read. If the read
// fails, readMoved records the outcome.
func (l *load) readMoved(ctx context.Context, i int, r blockstore.Read, layout ondisk.Layout) []Part {
	h, r, err := l.follow(ctx, r, layout.SlotBytes())
	if err != nil {
		l.lost(i, r.Ref, err)
		return nil
	}
	defer h.release()
	l.node.hot.put(hotPiece{ref: r.Ref, hold: h, payload: layout.HeaderBytes(), bytes: layout.PayloadBytes, slotBytes: layout.SlotBytes(), sums: r.LayerSums})
	return []Part{l.part(i, 0, h, layout.HeaderBytes(), layout.PayloadBytes, r.LayerSums)}
}

// follow repeats a read that failed because the piece was moved. It reads the new slot into new
// memory. Without an error the caller releases that memory. The returned Read has the slot that was
// read last.
func (l *load) follow(ctx context.Context, r blockstore.Read, bytes int64) (*hold, blockstore.Read, error) {
	n := l.node
	for errors.Is(r.Err, blockstore.ErrStale) {
		ref, ok := n.index.Find(l.ns.ID, l.ns.Epoch, trie.PieceKey{ID: r.Want.ID, Group: r.Want.Group})
		if !ok || ref == r.Ref {
			break
		}
		r.Ref = ref
		lane := n.lanes[ref.Extent.Volume()]
		if err := lane.enter(l.lanes.by); err != nil {
			return nil, r, err
		}
		batch := []blockstore.Read{r}
		h, err := n.readSlots(ctx, lane, l.lanes.by, bytes, batch, func(buf arena.Buffer) { batch[0].Buf = buf.Bytes()[:bytes] })
		lane.leave(l.lanes.by)
		if err != nil {
			return nil, r, err
		}
		if r = batch[0]; r.Err == nil {
			return h, r, nil
		}
		h.release()
	}
	return nil, r, r.Err
}

// want returns the key that the slot of piece i must have.
func (l *load) want(i int) ondisk.SlotKey {
	return slotKey(l.ns, l.digest, l.req.IDs[l.pieces[i].Block], l.pieces[i].Group)
}

// part makes a part of the bytes in h from payload to payload+bytes. at is the offset of the part
// in the piece. part records sums, the checksums of the part's layers.
func (l *load) part(i int, at int64, h *hold, payload, bytes int64, sums []uint64) Part {
	h.retain()
	l.mu.Lock()
	l.open++
	p := &l.pieces[i]
	if p.LayerSums == nil {
		count := l.req.Layers
		if count == 0 {
			count = l.ns.Geometry.Groups[p.Group].Layers - l.req.FirstLayer
		}
		p.LayerSums = make([]uint64, count)
	}
	copy(p.LayerSums[at/l.ns.Geometry.LayerBytes(p.Group):], sums)
	l.mu.Unlock()
	return Part{
		Piece:       i,
		PieceRef:    p.PieceRef,
		At:          at,
		Bytes:       h.buf.Bytes()[payload : payload+bytes : payload+bytes],
		ArenaOffset: h.buf.Offset() + payload,
		load:        l,
		hold:        h,
	}
}
