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
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

const (
	// unitBytes is how much one device batch of a Load brings: large enough for
	// full bandwidth, small enough that the network starts early.
	unitBytes = 4 << 20
	// partBytes is the length of the parts of a piece that is cut through.
	partBytes = 2 << 20
	// loadDepth is how many units of one Load are on their way at once: one on
	// the disk, one on the wire, and one to hide each one's end.
	loadDepth = 4
	// cutDepth is the same for the parts of a piece that is cut through, which lie
	// on one volume. A device that is given more at once may finish all of it at
	// once, and then no part is on the wire while the next is on the disk.
	cutDepth = 2
)

// PieceRef names one group of one block of a chain.
type PieceRef struct {
	// Block is the index in the chain.
	Block, Group int
}

// LoadRequest says what to load.
type LoadRequest struct {
	Namespace string
	// Epoch is the epoch wanted; 0 means the newest.
	Epoch kv.Epoch
	// IDs is the chain from the first block of the prompt.
	IDs []kv.BlockID
	// Pieces are what to load, in any order. Nil means all pieces that the
	// matched prefix needs.
	Pieces []PieceRef
	// Suffix lets IDs begin in the middle of a prompt, whose blocks before them are not
	// looked at. It is for trees of one full group.
	Suffix bool
	// Alone finds each of Pieces by itself: the pieces are of one epoch of a mixed match,
	// of which the epoch need not have the rest.
	Alone bool
	// FirstLayer and Layers choose layers of every piece; Layers 0 means all.
	FirstLayer, Layers int
	// Geometry is the reader's: it made room for pieces of that length. Zero is
	// not compared.
	Geometry kv.GeometryDigest
	// Keep says that deliver will Keep every part: a piece comes as one part,
	// however large it is, and what could not be lent is not loaded.
	Keep bool
	// Early says that the Load may return when every piece has been found and
	// taken by deliver, before the transfers have been confirmed.
	Early bool
}

// PieceState says what became of a piece.
type PieceState uint8

const (
	// Delivered: handed over, and the transfer was confirmed.
	Delivered PieceState = iota + 1
	// Absent: not stored, or not matchable, or reused meanwhile: a miss.
	Absent
	// Corrupt: failed a checksum and was dropped: a miss.
	Corrupt
	// Failed: a device or transfer error; Err says which.
	Failed
)

// String returns delivered, absent, corrupt or failed.
func (s PieceState) String() string {
	switch s {
	case Delivered:
		return "delivered"
	case Absent:
		return "absent"
	case Corrupt:
		return "corrupt"
	case Failed:
		return "failed"
	}
	return fmt.Sprintf("PieceState(%d)", uint8(s))
}

// LoadedPiece is the outcome of one piece.
type LoadedPiece struct {
	PieceRef
	State PieceState
	Err   error
	// LayerSums are the writer's XXH3-64 of the layers asked for, in order.
	LayerSums []uint64
}

// LoadResult is the outcome of a Load.
type LoadResult struct {
	Match  MatchResult
	Pieces []LoadedPiece
	// UnderWay: every piece is, and what is said of it holds unless its transfer
	// fails.
	UnderWay bool
}

// Part is a run of verified layers of one piece, in the arena.
type Part struct {
	// Piece is the index in the request's Pieces (or in the result's, if the
	// request had none).
	Piece int
	PieceRef
	// At is where the part starts in the layers asked for, in bytes.
	At int64
	// Bytes are the layers; they stay as they are until Done. ArenaOffset is
	// where they lie in the arena.
	Bytes       []byte
	ArenaOffset int64

	load *load
	hold *hold
}

// Done ends the part: nil says that the bytes have reached their reader. It is
// called once for each part, from any goroutine, and does not block.
func (p *Part) Done(err error) {
	p.hold.release()
	p.load.partDone(p.Piece, err)
}

// A Deliver takes verified parts on their way to the reader. It calls, or has
// called, Done on each part once, also when it fails or ctx has ended. It may
// block while the reader is slow.
type Deliver func(ctx context.Context, parts []Part)

// load is one Load under way.
type load struct {
	node    *Node
	ns      kv.Namespace // with the epoch that was matched
	digest  kv.GeometryDigest
	req     LoadRequest
	deliver Deliver

	mu     sync.Mutex
	pieces []LoadedPiece
	// refs holds the slot of each piece; the zero Ref where there is none.
	refs []kv.Ref
	// open counts the parts that were handed to deliver and are not Done, and 1
	// until there will be no more. At 0 the load ends.
	open int
	// ended is closed then.
	ended chan struct{}
	// givenUp: nobody has seen, or will see, what becomes of the pieces.
	givenUp bool

	lanes laneUse
}

// Load finds the chain and delivers the pieces, verified. It returns when every
// part is Done (see Early), or when ctx ends; the parts that are under way then end by
// themselves. A piece that cannot be delivered is an outcome, not an error of the
// call. Errors: trie.ErrNamespaceUnknown, ErrRequest, ErrBusy, ctx's.
func (n *Node) Load(ctx context.Context, req LoadRequest, deliver Deliver) (LoadResult, error) {
	start := time.Now()
	m := n.opts.Metrics
	ns, err := n.Namespace(req.Namespace)
	if err != nil {
		return LoadResult{}, err
	}
	m.ReadRequests.Of(ns.Name).Inc()
	defer func() { m.ReadSeconds.Observe(time.Since(start).Seconds()) }()
	result, err := n.load(ctx, ns, req, deliver)
	if err != nil {
		m.ReadFailures.WithLabelValues(failureReason(err)).Inc()
	}
	return result, err
}

// failureReason is the metrics label of a call's error.
func failureReason(err error) string {
	switch {
	case errors.Is(err, ErrBusy):
		return "busy"
	case errors.Is(err, ErrRequest), errors.Is(err, ErrMismatch):
		return "request"
	case errors.Is(err, ErrReadOnly), errors.Is(err, ErrDraining):
		return "read_only"
	case errors.Is(err, ErrReservation):
		return "expired"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return "deadline"
	case errors.Is(err, errTransfer):
		return "transfer"
	}
	return "device"
}

func (n *Node) load(ctx context.Context, ns kv.Namespace, req LoadRequest, deliver Deliver) (LoadResult, error) {
	if err := n.checkLoad(ns, req); err != nil {
		return LoadResult{}, err
	}
	wait, cancel := context.WithTimeout(ctx, n.opts.QueueWait)
	err := n.reads.enter(wait)
	cancel()
	if err != nil {
		if ctx.Err() == nil {
			err = fmt.Errorf("%w: %d loads are running and as many wait", ErrBusy, cap(n.reads.running))
		}
		return LoadResult{}, err
	}
	l := &load{node: n, ns: ns, req: req, deliver: deliver, open: 1, ended: make(chan struct{}), lanes: newLaneUse(n.lanes)}
	match, err := l.plan()
	if err != nil {
		n.reads.leave()
		return LoadResult{}, err
	}
	if err := l.perform(ctx); err != nil {
		l.mu.Lock()
		l.givenUp = true
		l.mu.Unlock()
		return LoadResult{}, err
	}
	return l.result(match), nil
}

// perform runs the load and waits as long as the caller wants to. Errors: ctx's.
func (l *load) perform(ctx context.Context) error {
	units := l.deliverHot(ctx, l.units())
	if len(units) == 0 {
		l.release()
	} else {
		// A device may hang for longer than ctx lasts.
		ran := make(chan struct{})
		go func() {
			defer l.release()
			defer close(ran)
			l.run(ctx, units)
		}()
		select {
		case <-ran:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if l.req.Early && l.intact() {
		return nil
	}
	select {
	case <-l.ended:
		return nil
	default: // ctx.Done has a cost
	}
	select {
	case <-l.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// deliverHot hands over what is in memory at once, from the caller's goroutine,
// if the units are few and of whole pieces. It returns the units that are left.
func (l *load) deliverHot(ctx context.Context, units []unit) []unit {
	if len(units) > loadDepth || slices.ContainsFunc(units, func(u unit) bool { return u.layers > 0 }) {
		return units
	}
	left := units[:0]
	for _, u := range units {
		parts, cold := l.hotParts(u.pieces)
		if len(parts) > 0 {
			l.deliver(ctx, parts)
		}
		if u.pieces = cold; len(cold) > 0 {
			left = append(left, u)
		}
	}
	return left
}

// release gives up one of what open counts, and ends the load with the last.
func (l *load) release() {
	l.mu.Lock()
	l.open--
	last := l.open == 0
	if last && !l.givenUp {
		l.countLocked()
	}
	l.mu.Unlock()
	if last {
		l.node.reads.leave()
		close(l.ended)
	}
}

// intact reports whether no piece is lost so far.
func (l *load) intact() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.pieces {
		if s := l.pieces[i].State; s != 0 && s != Delivered {
			return false
		}
	}
	return true
}

// result is the outcome as it is now.
func (l *load) result(match MatchResult) LoadResult {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := LoadResult{Match: match, Pieces: l.pieces}
	if r.UnderWay = l.open > 0; r.UnderWay {
		r.Pieces = slices.Clone(l.pieces)
		for i := range r.Pieces {
			r.Pieces[i].State = Delivered
		}
	}
	return r
}

func (n *Node) checkLoad(ns kv.Namespace, req LoadRequest) error {
	if err := n.checkChain(req.IDs); err != nil {
		return err
	}
	if want := ns.Geometry.Digest(); req.Geometry != want && req.Geometry != (kv.GeometryDigest{}) {
		return fmt.Errorf("%w: geometry %v; namespace %q has %v (%v)", ErrMismatch, req.Geometry, ns.Name, want, ns.Geometry)
	}
	if groups := ns.Geometry.Groups; req.Suffix && (ns.Index == kv.IndexFlat || len(groups) > 1 || groups[0].Kind != kv.Full || req.Alone) {
		return fmt.Errorf("%w: the end of a chain in namespace %q, which is not a tree of one full group, or of a mixed match", ErrRequest, ns.Name)
	}
	var bytes, largest int64
	for _, p := range req.Pieces {
		if p.Block < 0 || p.Block >= len(req.IDs) || p.Group < 0 || p.Group >= len(ns.Geometry.Groups) {
			return fmt.Errorf("%w: piece of block %d, group %d; the chain has %d blocks and the namespace %d groups", ErrRequest, p.Block, p.Group, len(req.IDs), len(ns.Geometry.Groups))
		}
		layers := ns.Geometry.Groups[p.Group].Layers
		if req.FirstLayer < 0 || req.Layers < 0 || req.FirstLayer >= layers || req.Layers > layers-req.FirstLayer {
			return fmt.Errorf("%w: layers %d to %d of group %d, which has %d", ErrRequest, req.FirstLayer, req.FirstLayer+req.Layers, p.Group, layers)
		}
		bytes += ns.Geometry.PieceBytes(p.Group)
		largest = max(largest, ns.Geometry.PieceBytes(p.Group))
	}
	if bytes > n.opts.LoadBytesMax {
		return fmt.Errorf("%w: %d bytes in one read; at most %d", ErrRequest, bytes, n.opts.LoadBytesMax)
	}
	if req.Keep {
		// Room for the first unit: what does not fit behind it is Busy piece by
		// piece.
		return n.loans.room(min(bytes, max(unitBytes, largest)))
	}
	return nil
}

func (n *Node) checkChain(ids []kv.BlockID) error {
	switch {
	case len(ids) == 0:
		return fmt.Errorf("%w: a chain of no blocks", ErrRequest)
	case len(ids) > n.opts.ChainBlocksMax:
		return fmt.Errorf("%w: a chain of %d blocks; at most %d", ErrRequest, len(ids), n.opts.ChainBlocksMax)
	}
	return nil
}

// match finds the pieces.
func (l *load) match() (MatchResult, error) {
	if l.req.Alone {
		pieces := make([]trie.Piece, len(l.req.Pieces))
		for i, p := range l.req.Pieces {
			pieces[i] = trie.Piece{Block: uint32(p.Block), Group: uint8(p.Group)}
		}
		return l.node.index.Locate(l.ns.ID, l.req.Epoch, l.req.IDs, pieces)
	}
	last := len(l.req.IDs)
	// Which pieces a window or a state makes up depends on the length of the
	// match, so only full attention can be cut short behind the last one wanted.
	if groups := l.ns.Geometry.Groups; l.req.Pieces != nil && len(groups) == 1 && groups[0].Kind == kv.Full {
		last = 0
		for _, p := range l.req.Pieces {
			last = max(last, p.Block+1)
		}
	}
	return l.node.match(l.ns, l.req.IDs, trie.MatchOptions{Epoch: l.req.Epoch, MaxBlocks: max(1, last), Suffix: l.req.Suffix})
}

// plan matches the chain and gives each piece its slot.
func (l *load) plan() (MatchResult, error) {
	match, err := l.match()
	if err != nil {
		return MatchResult{}, err
	}
	l.ns.Epoch = match.Epoch
	l.digest = l.ns.Geometry.Digest()
	found := make(map[PieceRef]kv.Ref, len(match.Pieces))
	for _, p := range match.Pieces {
		found[PieceRef{Block: int(p.Block), Group: int(p.Group)}] = p.Ref
	}
	if l.req.Pieces == nil {
		for _, p := range match.Pieces {
			l.req.Pieces = append(l.req.Pieces, PieceRef{Block: int(p.Block), Group: int(p.Group)})
		}
		if err := l.node.checkLoad(l.ns, l.req); err != nil {
			return MatchResult{}, err
		}
	}
	l.pieces = make([]LoadedPiece, len(l.req.Pieces))
	l.refs = make([]kv.Ref, len(l.req.Pieces))
	for i, p := range l.req.Pieces {
		l.pieces[i].PieceRef = p
		if ref := found[p]; ref != (kv.Ref{}) {
			l.refs[i] = ref
		} else {
			l.pieces[i].State = Absent
		}
	}
	return match, nil
}

// unit is what one device batch reads from one volume: several whole pieces, or
// some layers of one.
type unit struct {
	volume             int
	pieces             []int
	firstLayer, layers int // layers 0: whole pieces
	bytes              int64
}

// units cuts the pieces that have a slot into units, in order of their first
// pieces.
func (l *load) units() (units []unit) {
	// growing holds the unit of each volume that takes further pieces, as its
	// index in units.
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

// run loads the units, a few at a time, and hands their parts over.
func (l *load) run(ctx context.Context, units []unit) {
	for _, u := range units {
		l.lanes.left[u.volume]++
	}
	if len(units) == 1 {
		l.bring(ctx, units[0])
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
			l.bring(ctx, u)
		})
	}
	wg.Wait()
}

// bring loads a unit and hands its parts over.
func (l *load) bring(ctx context.Context, u unit) {
	parts := l.loadUnit(ctx, u)
	if len(parts) > 0 {
		l.deliver(ctx, parts)
	}
}

// loadUnit loads a unit. A place in the volume's lane is not kept while the
// reader takes the parts.
func (l *load) loadUnit(ctx context.Context, u unit) []Part {
	defer l.lanes.end(u.volume)
	if u.layers == 0 {
		return l.loadPieces(ctx, u)
	}
	return l.loadLayers(ctx, u)
}

// read reads slots of one volume into arena memory of total bytes. place gives
// each read its part of the memory. Without an error the hold is the caller's to
// release; with one, the batch must not be touched any more.
func (l *load) read(ctx context.Context, volume int, total int64, batch []blockstore.Read, place func(buf arena.Buffer)) (*hold, error) {
	n := l.node
	lane, err := l.lanes.begin(volume)
	if err != nil {
		return nil, err
	}
	return n.readSlots(ctx, lane, total, batch, place)
}

// hotParts takes what is in memory, and returns the pieces that are not.
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

// loadPieces brings whole pieces, those that are hot without the device.
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

// loadLayers brings some layers of one piece.
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

// readMoved reads a whole piece that was moved to another slot before its read. If that
// fails, it records the outcome.
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

// follow repeats a read that failed because the piece was moved. It reads the new slot
// into new memory, which the caller releases if there is no error. The result names the
// slot that was read last.
func (l *load) follow(ctx context.Context, r blockstore.Read, bytes int64) (*hold, blockstore.Read, error) {
	n := l.node
	for errors.Is(r.Err, blockstore.ErrStale) {
		ref, ok := n.index.Find(l.ns.ID, l.ns.Epoch, trie.PieceKey{ID: r.Want.ID, Group: r.Want.Group})
		if !ok || ref == r.Ref {
			break
		}
		r.Ref = ref
		lane := n.lanes[ref.Extent.Volume()]
		if err := lane.enter(); err != nil {
			return nil, r, err
		}
		batch := []blockstore.Read{r}
		h, err := n.readSlots(ctx, lane, bytes, batch, func(buf arena.Buffer) { batch[0].Buf = buf.Bytes()[:bytes] })
		lane.leave()
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

// want is what the slot of piece i must hold.
func (l *load) want(i int) ondisk.SlotKey {
	return slotKey(l.ns, l.digest, l.req.IDs[l.pieces[i].Block], l.pieces[i].Group)
}

func slotKey(ns kv.Namespace, digest kv.GeometryDigest, id kv.BlockID, group int) ondisk.SlotKey {
	return ondisk.SlotKey{
		Namespace:    ns.ID,
		Epoch:        ns.Epoch,
		ID:           id,
		Group:        uint8(group),
		Geometry:     digest,
		PayloadBytes: ns.Geometry.PieceBytes(group),
		Layers:       ns.Geometry.Groups[group].Layers,
	}
}

// part makes a part of bytes at payload in h and records the sums of its layers,
// which belong at the layer that at names.
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

// errTransfer: the piece was read, and did not reach its reader.
var errTransfer = errors.New("transfer")

// partDone records the end of a part's transfer.
func (l *load) partDone(i int, err error) {
	if err != nil {
		l.outcome(i, Failed, fmt.Errorf("%w: %w", errTransfer, err))
	}
	l.release()
}

// lost records the outcome of a piece whose read from ref failed. It drops the piece
// from the index if the piece is corrupt, unreadable or no longer in the slot.
func (l *load) lost(i int, ref kv.Ref, err error) {
	switch {
	case errors.Is(err, blockstore.ErrCorrupt):
		l.node.dropCorrupt(ref, "read", err)
		l.outcome(i, Corrupt, err)
	case errors.Is(err, blockstore.ErrStale):
		l.node.dropStale(ref)
		l.outcome(i, Absent, err)
	case l.node.lostForGood(ref, err):
		l.node.dropUnreadable(ref, "read", err)
		l.outcome(i, Failed, err)
	default:
		l.outcome(i, Failed, err)
	}
}

// lostForGood reports whether to drop a piece whose read failed: its device cannot read
// it, or its volume has failed and another volume takes writes.
func (n *Node) lostForGood(ref kv.Ref, err error) bool {
	return n.store.Unreadable(ref, err) || errors.Is(err, blockstore.ErrVolumeFailed) && n.store.Elsewhere(&ref)
}

func (l *load) fail(pieces []int, err error) {
	for _, i := range pieces {
		l.outcome(i, Failed, err)
	}
}

// outcome records what became of a piece; the first failure stands.
func (l *load) outcome(i int, s PieceState, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pieces[i].State == 0 {
		l.pieces[i].State, l.pieces[i].Err = s, err
	}
}

// countLocked settles the outcomes: what nothing happened to was delivered.
func (l *load) countLocked() {
	m := l.node.opts.Metrics
	for i := range l.pieces {
		p := &l.pieces[i]
		if p.State == 0 {
			p.State = Delivered
			m.ReadBlocks.Of(l.ns.Name).Inc()
			m.ReadBytes.Of(l.ns.Name).Add(float64(int64(len(p.LayerSums)) * l.ns.Geometry.LayerBytes(p.Group)))
			continue
		}
		p.LayerSums = nil
		reason := p.State.String()
		if p.State == Failed {
			reason = failureReason(p.Err)
		}
		m.ReadLost.WithLabelValues(reason).Inc()
	}
}
