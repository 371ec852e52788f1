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
	"github.com/penstock-kv/penstock/internal/fair"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// PieceRef names one group of one block of a chain.
type PieceRef struct {
	// Block is the index in the chain.
	Block, Group int
}

// LoadRequest is the request of a Load.
type LoadRequest struct {
	Namespace string
	// Share is that of the principal that reads.
	Share fair.Share
	// Epoch is the requested epoch. 0 means the newest.
	Epoch kv.Epoch
	// IDs is the chain from the first block of the prompt.
	IDs []kv.BlockID
	// Pieces are the pieces to load, in any order. Nil means all pieces that the matched prefix
	// needs.
	Pieces []PieceRef
	// Suffix allows IDs to begin in the middle of a prompt. The blocks before the first of IDs are
	// not looked up. Suffix is for trees of one full group.
	Suffix bool
	// Alone makes Load look up each of Pieces separately instead of a prefix. It is used to load
	// the pieces of one epoch of a mixed match: that epoch need not have the other pieces of the
	// match.
	Alone bool
	// FirstLayer and Layers select layers of every piece. Layers 0 means all layers.
	FirstLayer, Layers int
	// Geometry is the geometry for which the reader has sized its memory. A zero Geometry is not
	// compared.
	Geometry kv.GeometryDigest
	// Keep is set if deliver calls Part.Keep on every part. Each piece, of any size, is then
	// delivered as one part, and a piece is not loaded if the limit of loans leaves no room for it.
	Keep bool
	// Early allows the Load to return as soon as all pieces were found and passed to deliver,
	// before the transfers are confirmed.
	Early bool
}

// PieceState is the outcome of a piece.
type PieceState uint8

const (
	// Delivered: the piece was passed to deliver, and its transfer was confirmed.
	Delivered PieceState = iota + 1
	// Absent: a miss. The piece is not stored, not matchable, or its slot was reused meanwhile.
	Absent
	// Corrupt: a miss. The piece failed a checksum and was removed from the index.
	Corrupt
	// Failed: a device or transfer error, which is in Err.
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
	// LayerSums are the writer's XXH3-64 of the requested layers, in order.
	LayerSums []uint64
}

// LoadResult is the outcome of a Load.
type LoadResult struct {
	Match  MatchResult
	Pieces []LoadedPiece
	// UnderWay is set if transfers are still in progress. The states of the pieces then assume that
	// these transfers will succeed.
	UnderWay bool
}

// Part is a run of verified layers of one piece, in the arena.
type Part struct {
	// Piece is the index of the piece in the request's Pieces or, if the request has none, in the
	// result's Pieces.
	Piece int
	PieceRef
	// At is the offset of the part from the first requested layer of the piece, in bytes.
	At int64
	// Bytes are the layers, in the arena. They stay unchanged until Done. ArenaOffset is the offset
	// of Bytes in the arena.
	Bytes       []byte
	ArenaOffset int64

	load *load
	hold *hold
}

// Done ends the use of the part. A nil error means that the bytes have reached the reader. Done is
// called once for each part, from any goroutine, and does not block.
func (p *Part) Done(err error) {
	p.hold.release()
	p.load.partDone(p.Piece, err)
}

// A Deliver sends verified parts to the reader. It calls Done on each part exactly once, before or
// after it returns, also if the transfer fails or ctx has ended. It may block while the reader is
// slow.
type Deliver func(ctx context.Context, parts []Part)

// load is one Load in progress.
type load struct {
	node    *Node
	ns      kv.Namespace // with the matched epoch
	place   place        // in Node.reads
	digest  kv.GeometryDigest
	req     LoadRequest
	deliver Deliver

	mu     sync.Mutex
	pieces []LoadedPiece
	// refs holds the slot of each piece, or the zero Ref if the piece has none.
	refs []kv.Ref
	// open is the number of parts that were passed to deliver and are not Done, plus 1 until the
	// last part was passed. The load ends when open becomes 0.
	open int
	// ended is closed when open becomes 0.
	ended chan struct{}
	// givenUp is set if Load has returned an error. The outcomes of the pieces are then not
	// counted.
	givenUp bool

	lanes laneUse
}

// Load looks up the chain and delivers the verified pieces. It returns when every part is Done, or
// earlier if LoadRequest.Early is set or ctx ends. Parts in progress at the end of ctx are finished
// after Load has returned. A piece that cannot be delivered is an outcome and not an error of the
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

// failureReason returns the metrics label for a call's error.
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
	by := fair.Caller{Share: req.Share, Tenant: ns.Tenant}
	p, err := n.enterReads(ctx, by, req.bytes(ns.Geometry))
	if err != nil {
		return LoadResult{}, err
	}
	l := &load{node: n, ns: ns, place: p, req: req, deliver: deliver, open: 1, ended: make(chan struct{}), lanes: newLaneUse(by, n.lanes)}
	match, err := l.plan()
	if err != nil {
		p.leave()
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

// enterReads waits up to QueueWait until a Load of the given number of bytes may run. If the Load may
// run at once, enterReads does not use ctx.Done and starts no timer, because either would wake a
// thread. Errors: ErrBusy, ctx's.
func (n *Node) enterReads(ctx context.Context, by fair.Caller, bytes int64) (place, error) {
	if p, ok := n.reads.try(by, 1, bytes); ok {
		return p, nil
	}
	wait, cancel := context.WithTimeout(ctx, n.limits.Load().QueueWait)
	defer cancel()
	p, err := n.reads.enter(wait, by, 1, bytes)
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w: %d loads are running and as many wait", ErrBusy, n.reads.limit())
	}
	return p, err
}

// perform runs the load. It returns when the load has ended or, with ctx's error, when ctx ends.
func (l *load) perform(ctx context.Context) error {
	units := l.deliverHot(ctx, l.units())
	if len(units) == 0 {
		l.release()
	} else {
		// A device may hang for longer than ctx lasts, so the units run in a goroutine.
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
	default: // checked first, because a select on ctx.Done has a cost
	}
	select {
	case <-l.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// deliverHot delivers the pieces that are in the hot set, in the caller's goroutine, and returns
// the units (batches of device reads) that are left. If there are more than loadDepth units, or a
// unit has only some layers of a piece, it delivers nothing and returns all units.
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

// release decrements open, and ends the load at 0.
func (l *load) release() {
	l.mu.Lock()
	l.open--
	last := l.open == 0
	if last && !l.givenUp {
		l.countLocked()
	}
	l.mu.Unlock()
	if last {
		l.place.leave()
		close(l.ended)
	}
}

// intact reports whether every piece with an outcome so far was delivered.
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

// result returns the current outcome.
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
		return fmt.Errorf("%w: the geometry is %v, but namespace %q has %v (%v)", ErrMismatch, req.Geometry, ns.Name, want, ns.Geometry)
	}
	if groups := ns.Geometry.Groups; req.Suffix && (ns.Index == kv.IndexFlat || len(groups) > 1 || groups[0].Kind != kv.Full || req.Alone) {
		return fmt.Errorf("%w: a chain without its beginning (suffix) in namespace %q; this needs a tree of one full group, and no mixed match", ErrRequest, ns.Name)
	}
	var bytes, largest int64
	for _, p := range req.Pieces {
		if p.Block < 0 || p.Block >= len(req.IDs) || p.Group < 0 || p.Group >= len(ns.Geometry.Groups) {
			return fmt.Errorf("%w: block %d, group %d does not exist: the chain has %d blocks and the namespace %d groups", ErrRequest, p.Block, p.Group, len(req.IDs), len(ns.Geometry.Groups))
		}
		layers := ns.Geometry.Groups[p.Group].Layers
		if req.FirstLayer < 0 || req.Layers < 0 || req.FirstLayer >= layers || req.Layers > layers-req.FirstLayer {
			return fmt.Errorf("%w: layers %d to %d of group %d do not exist: it has %d", ErrRequest, req.FirstLayer, req.FirstLayer+req.Layers, p.Group, layers)
		}
		bytes += ns.Geometry.PieceBytes(p.Group)
		largest = max(largest, ns.Geometry.PieceBytes(p.Group))
	}
	if bytes > n.opts.LoadBytesMax {
		return fmt.Errorf("%w: one read of %d bytes; the limit is %d (limits.read_bytes)", ErrRequest, bytes, n.opts.LoadBytesMax)
	}
	if req.Keep {
		// The limit of lent memory must leave room for the first unit (batch of device reads). If
		// there is no room for a later piece, only that piece is Busy.
		return n.loans.room(min(bytes, max(unitBytes, largest)))
	}
	return nil
}

// bytes returns the size of the requested layers of all requested pieces. checkLoad has accepted the request.
func (req *LoadRequest) bytes(g kv.Geometry) (sum int64) {
	if req.Pieces == nil {
		return g.NeededBytes(len(req.IDs))
	}
	for _, p := range req.Pieces {
		layers := req.Layers
		if layers == 0 {
			layers = g.Groups[p.Group].Layers - req.FirstLayer
		}
		sum += int64(layers) * g.LayerBytes(p.Group)
	}
	return sum
}

func (n *Node) checkChain(ids []kv.BlockID) error {
	switch {
	case len(ids) == 0:
		return fmt.Errorf("%w: the chain is empty", ErrRequest)
	case len(ids) > n.opts.ChainBlocksMax:
		return fmt.Errorf("%w: a chain of %d blocks; the limit is %d (limits.chain_blocks)", ErrRequest, len(ids), n.opts.ChainBlocksMax)
	}
	return nil
}

// match looks up the pieces.
func (l *load) match() (MatchResult, error) {
	if l.req.Alone {
		pieces := make([]trie.Piece, len(l.req.Pieces))
		for i, p := range l.req.Pieces {
			pieces[i] = trie.Piece{Block: uint32(p.Block), Group: uint8(p.Group)}
		}
		return l.node.index.Locate(l.ns.ID, l.req.Epoch, l.req.IDs, pieces)
	}
	last := len(l.req.IDs)
	// The length of the match determines which pieces of a window or state group are needed. So the
	// match may be limited to the last requested block only if the geometry has a single group and
	// it is of kind Full.
	if groups := l.ns.Geometry.Groups; l.req.Pieces != nil && len(groups) == 1 && groups[0].Kind == kv.Full {
		last = 0
		for _, p := range l.req.Pieces {
			last = max(last, p.Block+1)
		}
	}
	return l.node.match(l.ns, l.req.IDs, trie.MatchOptions{Epoch: l.req.Epoch, MaxBlocks: max(1, last), Suffix: l.req.Suffix})
}

// plan matches the chain and assigns each piece its slot.
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

// errTransfer: the piece was read and did not reach the reader.
var errTransfer = errors.New("transfer")

// partDone records the end of a part's transfer.
func (l *load) partDone(i int, err error) {
	if err != nil {
		l.outcome(i, Failed, fmt.Errorf("%w: %w", errTransfer, err))
	}
	l.release()
}

// lost records the outcome of a piece whose read from the slot ref failed. It removes the piece
// from the index if the piece is corrupt, is unreadable, or is not in the slot any more.
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

// lostForGood reports whether a piece whose read failed with err should be removed from the index:
// the device cannot read the slot, or the volume has failed and another volume takes writes.
func (n *Node) lostForGood(ref kv.Ref, err error) bool {
	return n.store.Unreadable(ref, err) || errors.Is(err, blockstore.ErrVolumeFailed) && n.store.Elsewhere(&ref)
}

func (l *load) fail(pieces []int, err error) {
	for _, i := range pieces {
		l.outcome(i, Failed, err)
	}
}

// outcome records the outcome of a piece, unless it already has one.
func (l *load) outcome(i int, s PieceState, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pieces[i].State == 0 {
		l.pieces[i].State, l.pieces[i].Err = s, err
	}
}

// countLocked sets the outcome of each piece without one to Delivered, and adds all outcomes to the
// metrics.
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
