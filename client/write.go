package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

const (
	// writeChunkPieces bounds the pieces of one Reserve: each is one operation of the transfer
	// engine and one entry of the node's index.
	writeChunkPieces = 2048
	// pieceRoomMin is the least number of bytes that a piece counts for in one Reserve, because the
	// node holds a piece in whole pages of its arena, with a page in front.
	pieceRoomMin = 8 << 10
	// abortWithin is how long a Write whose ctx has ended waits for the node to abort the
	// reservation. After that the client ends the data-plane session, because the caller's memory
	// must not be read once Write has returned.
	abortWithin = time.Second
)

// writing is one Write under way.
type writing struct {
	store  *Store
	req    WriteRequest
	ids    []kv.BlockID
	digest kv.GeometryDigest
	pieces []Piece // in order of blocks, then groups
	// given has the caller's checksums of each piece; nil if the caller gave none.
	given map[pieceName][]uint64
	// fragments has the places of each piece; nil: each piece is in From, at its Offset.
	fragments map[pieceName][]Fragment
	// existedAt maps a piece to its entry of WriteRequest.Existed; nil without Existed.
	existedAt map[pieceName]int

	mu     sync.Mutex
	states []writeState // of pieces
	busy   string
}

// pieceName is a piece within a chain.
type pieceName struct{ block, group int }

// writeState is the result of a piece. The zero value means that the piece was not sent,
// because an earlier piece was refused.
type writeState struct {
	stored, existed bool
	refused         Reason
	detail          string
}

// writeChunk is the work of one reservation.
type writeChunk struct {
	parent kv.BlockID
	ids    []kv.BlockID
	pieces []int // indices into writing.pieces
	local  []int // position of each piece's block in ids
}

// Write stores blocks from the caller's memory. It commits its chunks in the order of the chain, so
// that each chunk finds its parent. After Write has returned, with or without an error, nothing
// reads the memory any more; to ensure that, Write may return up to a second after the end of ctx.
// If ctx ended, the result has the blocks that had been stored by then.
func (s *Store) Write(ctx context.Context, req WriteRequest) (WriteResult, error) {
	s.stats.writes.Add(1)
	w, err := s.newWriting(req)
	if err != nil {
		return WriteResult{}, err
	}
	lines := w.lines()
	if len(lines) == 1 {
		// The calling goroutine does the work: then a chunk over a unix socket wakes no other
		// thread.
		err := w.runLine(ctx, lines[0])
		return w.result(), err
	}
	errs := make([]error, len(lines))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	for i, l := range lines {
		wg.Go(func() {
			if errs[i] = w.runLine(ctx, l); errs[i] != nil {
				cancel()
			}
		})
	}
	wg.Wait()
	return w.result(), firstCause(errs)
}

// firstCause returns the error that made the Write cancel its other lines, not one of their context
// errors.
func firstCause(errs []error) error {
	for _, err := range errs {
		if err != nil && !errors.Is(err, context.Canceled) {
			return err
		}
	}
	return errors.Join(errs...)
}

// newWriting checks the request.
func (s *Store) newWriting(req WriteRequest) (*writing, error) {
	if err := checkNamespace(req.Namespace); err != nil {
		return nil, err
	}
	ids, err := chainOf(req.Namespace, req.IDs, req.Tokens)
	if err != nil {
		return nil, err
	}
	if err := ownEpoch(req.Namespace, &req.Epoch); err != nil {
		return nil, fmt.Errorf("client: write: %w", err)
	}
	g := req.Namespace.Geometry
	w := &writing{store: s, req: req, ids: ids, digest: g.Digest(), pieces: slices.Clone(req.Pieces)}
	if req.First < 0 || req.First > len(ids) {
		return nil, fmt.Errorf("client: write: %w: first block %d of a chain of %d", ErrRequest, req.First, len(ids))
	}
	if w.pieces == nil {
		if len(g.Groups) > 1 {
			return nil, fmt.Errorf("client: write: %w: namespace %q has %v; list the pieces that there are (WriteRequest.Pieces)", ErrRequest, req.Namespace.Name, g)
		}
		for b := req.First; b < len(ids); b++ {
			w.pieces = append(w.pieces, Piece{Block: b, Offset: req.Base + g.PieceOffset(b, 0)})
		}
	}
	if req.Fragments != nil && len(req.Fragments) != len(w.pieces) {
		return nil, fmt.Errorf("client: write: %w: fragments for %d pieces; want %d", ErrRequest, len(req.Fragments), len(w.pieces))
	}
	if len(w.pieces) > 0 && req.From == nil && req.Fragments == nil {
		return nil, fmt.Errorf("client: write: %w: no memory to write from (WriteRequest.From)", ErrRequest)
	}
	for i, p := range w.pieces {
		if err := checkPiece(g, len(ids), p); err != nil {
			return nil, fmt.Errorf("client: write: %w", err)
		}
		if p.Block < req.First {
			return nil, fmt.Errorf("client: write: %w: a piece of block %d, before the first block to write, %d", ErrRequest, p.Block, req.First)
		}
		if req.Fragments != nil {
			if err := checkFragments(req.Fragments[i], g.Groups[p.Group].Layers, g.LayerBytes(p.Group)); err != nil {
				return nil, fmt.Errorf("client: write: %w: piece %d: %w", ErrRequest, i, err)
			}
			continue
		}
		if err := checkRange(p, g.PieceBytes(p.Group), req.From); err != nil {
			return nil, fmt.Errorf("client: write: %w", err)
		}
	}
	w.takeFragments()
	if w.fragments == nil {
		if err := checkApart(w.pieces, g.PieceBytes); err != nil {
			return nil, fmt.Errorf("client: write: %w", err)
		}
	}
	if err := w.takeSums(); err != nil {
		return nil, err
	}
	if err := w.takeExisted(); err != nil {
		return nil, err
	}
	slices.SortStableFunc(w.pieces, func(a, b Piece) int {
		return cmp.Or(a.Block-b.Block, a.Group-b.Group)
	})
	for i := 1; i < len(w.pieces); i++ {
		if a, b := w.pieces[i-1], w.pieces[i]; a.Block == b.Block && a.Group == b.Group {
			return nil, fmt.Errorf("client: write: %w: block %d, group %d is offered twice", ErrRequest, a.Block, a.Group)
		}
	}
	w.states = make([]writeState, len(w.pieces))
	return w, nil
}

// takeSums sets given. It is called while w.pieces has the caller's order.
func (w *writing) takeSums() error {
	if w.req.Sums == nil {
		return nil
	}
	if len(w.req.Sums) != len(w.pieces) {
		return fmt.Errorf("client: write: %w: sums for %d pieces of %d", ErrRequest, len(w.req.Sums), len(w.pieces))
	}
	w.given = make(map[pieceName][]uint64, len(w.pieces))
	for i, p := range w.pieces {
		if got, want := len(w.req.Sums[i]), w.req.Namespace.Geometry.Groups[p.Group].Layers; got != want {
			return fmt.Errorf("client: write: %w: %d sums for block %d, group %d, which has %d layers", ErrRequest, got, p.Block, p.Group, want)
		}
		w.given[pieceName{p.Block, p.Group}] = w.req.Sums[i]
	}
	return nil
}

// takeFragments sets fragments. It is called while w.pieces has the caller's order.
func (w *writing) takeFragments() {
	if w.req.Fragments == nil {
		return
	}
	w.fragments = make(map[pieceName][]Fragment, len(w.pieces))
	for i, p := range w.pieces {
		w.fragments[pieceName{p.Block, p.Group}] = w.req.Fragments[i]
	}
}

// runs returns the places of a piece. It uses one as memory for a single place.
func (w *writing) runs(p Piece, one *[1]Fragment) []Fragment {
	if w.fragments != nil {
		return w.fragments[pieceName{p.Block, p.Group}]
	}
	one[0] = Fragment{Memory: w.req.From, Offset: p.Offset, Layers: w.req.Namespace.Geometry.Groups[p.Group].Layers}
	return one[:]
}

// takeExisted sets existedAt. It is called while w.pieces has the caller's order.
func (w *writing) takeExisted() error {
	if w.req.Existed == nil {
		return nil
	}
	if n := len(w.req.Existed); n != len(w.pieces) {
		return fmt.Errorf("client: write: %w: Existed has %d entries for %d pieces", ErrRequest, n, len(w.pieces))
	}
	w.existedAt = make(map[pieceName]int, len(w.pieces))
	for i, p := range w.pieces {
		w.existedAt[pieceName{p.Block, p.Group}] = i
	}
	return nil
}

// line is the part of a Write that goes to one node, in order.
type line struct {
	node   *node
	pieces []int
}

// lines assigns the pieces to nodes: a whole chain to its owner, and each key of a flat namespace
// to its own owner.
func (w *writing) lines() []line {
	var out []line
	at := make(map[*node]int)
	for i, p := range w.pieces {
		root := w.ids[0]
		if w.flat() {
			root = w.ids[p.Block]
		}
		n := w.store.owner(root)
		k, ok := at[n]
		if !ok {
			k = len(out)
			at[n] = k
			out = append(out, line{node: n})
		}
		out[k].pieces = append(out[k].pieces, i)
	}
	return out
}

func (w *writing) flat() bool { return w.req.Namespace.Index == kv.IndexFlat }

// runLine writes the chunks of a line one after the other. In a trie the first refusal ends the
// line, because a block cannot be stored without its parent.
func (w *writing) runLine(ctx context.Context, l line) error {
	for pieces := l.pieces; len(pieces) > 0; {
		sess, err := l.node.live(ctx)
		if errors.Is(err, errDown) {
			w.refuseAll(pieces, "node_down", err.Error())
			return nil
		}
		if err != nil {
			return err
		}
		n, err := w.chunkLen(l.node, sess, pieces)
		if err != nil {
			return err
		}
		chunk := w.chunk(pieces[:n])
		pieces = pieces[n:]
		err = w.runChunk(ctx, l.node, sess, chunk)
		switch {
		case errors.Is(err, errBusy):
			w.refuseAll(chunk.pieces, "busy", err.Error())
			w.noteBusy(err.Error())
			return nil
		case errors.Is(err, errDown):
			w.refuseAll(chunk.pieces, "node_down", err.Error())
			return nil
		case err != nil:
			return err
		}
		if !w.flat() && w.anyRefused(chunk.pieces) {
			return nil
		}
	}
	return nil
}

// chunkLen returns the number of pieces of the next chunk: as many whole blocks as fit or, if not
// even one block fits, as many of its pieces as fit.
func (w *writing) chunkLen(n *node, sess *session, pieces []int) (int, error) {
	g := w.req.Namespace.Geometry
	limit := min(w.store.opts.WriteChunkBytes, sess.writeBytes)
	if most := n.local.chunkBytes(sess); most > 0 {
		limit = min(limit, most)
	}
	first := w.pieces[pieces[0]]
	// A single piece may exceed limit, but not the node's own limit.
	if size := g.PieceBytes(first.Group); size > sess.writeBytes {
		return 0, fmt.Errorf("client: write: %w: a piece of %d bytes; %s takes %d in one write: raise its limit", ErrRequest, size, n.target, sess.writeBytes)
	}
	var bytes int64
	whole := 0 // pieces up to the end of the last whole block that fits
	for k, i := range pieces {
		p := w.pieces[i]
		bytes += max(g.PieceBytes(p.Group), pieceRoomMin)
		blocks := k + 1
		if !w.flat() {
			blocks = p.Block - first.Block + 1
		}
		if k > 0 && (bytes > limit || k == writeChunkPieces || blocks > sess.chainBlocks) {
			return cmp.Or(whole, k), nil
		}
		if k+1 == len(pieces) || w.pieces[pieces[k+1]].Block != p.Block {
			whole = k + 1
		}
	}
	return len(pieces), nil
}

// chunk makes a chunk of pieces. In a trie its ids are the part of the chain from the first to the
// last of their blocks; in a flat namespace they are the pieces' keys.
func (w *writing) chunk(pieces []int) writeChunk {
	c := writeChunk{pieces: pieces}
	first, last := w.pieces[pieces[0]].Block, w.pieces[pieces[len(pieces)-1]].Block
	if !w.flat() {
		c.ids = w.ids[first : last+1]
		if first > 0 {
			c.parent = w.ids[first-1]
		}
	}
	for _, i := range pieces {
		block := w.pieces[i].Block
		if w.flat() {
			c.local = append(c.local, len(c.ids))
			c.ids = append(c.ids, w.ids[block])
			continue
		}
		c.local = append(c.local, block-first)
	}
	return c
}

// runChunk reserves, writes and commits one chunk. errBusy and errDown end the line; any other
// error ends the whole Write.
func (w *writing) runChunk(ctx context.Context, n *node, sess *session, c writeChunk) error {
	if err := w.runLocal(ctx, n, sess, c); !errors.Is(err, errNotLocal) {
		return err
	}
	resp, err := w.reserve(ctx, n, sess, c)
	if err != nil {
		return err
	}
	granted := w.settleGrants(c, resp)
	if len(granted) == 0 {
		return nil
	}
	sums, err := w.send(ctx, n, sess, c, resp, granted)
	if err != nil {
		return err
	}
	return w.commit(ctx, n, sess, c, resp.GetReservation(), granted, sums)
}

// reserve makes the Reserve call once. It does not retry if the node cannot take the bytes now: KV
// that is not stored costs a recomputation, but a queue of writers would slow down the readers.
func (w *writing) reserve(ctx context.Context, n *node, sess *session, c writeChunk) (*pb.ReserveResponse, error) {
	req := w.reserveRequest(c)
	resp, _, err := ask(ctx, sess, api.MethodReserve, req, 0, replyMax(len(c.pieces), 0), func() (*pb.ReserveResponse, error) {
		// gRPC does not report which engine sends a request; the data plane does.
		own := n.store.opts.Engine.Addr().Engine
		req.DataEngine = own[:]
		return sess.cache.Reserve(ctx, req)
	})
	if err != nil {
		// A node that drains also returns Unavailable, and still serves reads. So the error
		// does not mark the node as failed.
		return nil, callError(ctx, "reserve", n.target, err)
	}
	return resp, w.checkReserved(n, c, resp)
}

// reserveRequest returns the request for a chunk.
func (w *writing) reserveRequest(c writeChunk) *pb.ReserveRequest {
	req := &pb.ReserveRequest{
		Namespace:      w.req.Namespace.Name,
		Epoch:          uint64(w.req.Epoch),
		BlockIds:       api.AppendIDs(nil, c.ids),
		GeometryDigest: w.digest[:],
		BlockClass:     pb.BlockClass_BLOCK_CLASS_PREFIX,
	}
	if w.req.Class == Transfer {
		req.BlockClass = pb.BlockClass_BLOCK_CLASS_TRANSFER
	}
	if !c.parent.IsZero() {
		req.Parent = c.parent[:]
	}
	for k, i := range c.pieces {
		req.Pieces = append(req.Pieces, &pb.PieceRef{Block: uint32(c.local[k]), Group: uint32(w.pieces[i].Group)})
	}
	return req
}

// checkReserved returns errBusy if the node has no room for a chunk now, and another error if the
// response does not belong to the chunk.
func (w *writing) checkReserved(n *node, c writeChunk, resp *pb.ReserveResponse) error {
	if resp.GetOutcome() == pb.Outcome_OUTCOME_BUSY {
		return fmt.Errorf("client: reserve: %s: %w", n.target, inWords(errBusy, resp.GetBusyReason()))
	}
	if got := len(resp.GetPieces()); got != len(c.pieces) {
		return fmt.Errorf("client: reserve: %s answered for %d pieces of %d", n.target, got, len(c.pieces))
	}
	return nil
}

// settleGrants records the pieces that need not be written. It returns the positions, in the chunk,
// of the pieces to write.
func (w *writing) settleGrants(c writeChunk, resp *pb.ReserveResponse) (granted []int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for k, i := range c.pieces {
		switch r := resp.GetPieces()[k]; r.GetState() {
		case pb.PieceResult_STATE_GRANTED:
			granted = append(granted, k)
		case pb.PieceResult_STATE_EXISTS:
			w.states[i].existed = true
		default:
			w.states[i] = refusal(r.GetReason())
		}
	}
	return granted
}

// landing waits until all of a chunk's one-sided writes have completed.
type landing struct {
	mu      sync.Mutex
	pending int
	err     error
	done    chan struct{} // closed when pending reaches 0
}

func (l *landing) one(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
	}
	if l.pending--; l.pending == 0 {
		close(l.done)
	}
}

// send writes the granted pieces into the node's window, hashes them meanwhile, and returns when
// all writes have completed. After an error nothing reads the caller's memory any more, and the
// reservation has been aborted.
func (w *writing) send(ctx context.Context, n *node, sess *session, c writeChunk, resp *pb.ReserveResponse, granted []int) ([]*pb.PieceSums, error) {
	var window rdma.Desc
	if err := window.UnmarshalBinary(resp.GetWindow()); err != nil {
		return nil, fmt.Errorf("client: reserve: %s: window: %w", n.target, err)
	}
	// pending starts at 1, so done is not closed before all writes are submitted.
	land := &landing{pending: 1, done: make(chan struct{})}
	sums := make([]*pb.PieceSums, 0, len(granted))
	for _, k := range granted {
		p := w.pieces[c.pieces[k]]
		if err := w.sendPiece(ctx, p, window, resp.GetPieces()[k].GetOffset(), resp.GetImm(), land); err != nil {
			land.one(err)
			break
		}
		sums = append(sums, &pb.PieceSums{Block: uint32(c.local[k]), Group: uint32(p.Group), LayerSums: w.sums(p)})
	}
	land.one(nil)
	select {
	case <-land.done:
	case <-ctx.Done():
	}
	// A refused write fails the whole chunk, because the node counts all of its writes.
	if err := land.outcome(); err == nil && ctx.Err() == nil {
		return sums, nil
	}
	w.abort(ctx, n, sess, resp.GetReservation(), land)
	if ctx.Err() != nil {
		return nil, fmt.Errorf("client: write: %w", ctx.Err())
	}
	err := land.outcome()
	if errors.Is(err, rdma.ErrClosed) {
		return nil, fmt.Errorf("client: write: transfer engine: %w", err)
	}
	return nil, fmt.Errorf("client: write: %s: %w: %w", n.target, errDown, err)
}

// sendPiece writes the runs of a piece to an offset of the window. Only the last run's
// write carries the immediate, because the node counts one immediate for each piece.
// The client asks for the commit after the writes of all pieces have completed.
func (w *writing) sendPiece(ctx context.Context, p Piece, window rdma.Desc, offset uint64, imm uint32, land *landing) error {
	layerBytes := w.req.Namespace.Geometry.LayerBytes(p.Group)
	var one [1]Fragment
	runs := w.runs(p, &one)
	for k, f := range runs {
		write := rdma.Write{
			Src:       f.Memory.region,
			SrcOffset: uint64(f.Offset),
			Dst:       window,
			DstOffset: offset,
			Len:       uint64(int64(f.Layers) * layerBytes),
			Done:      land.one,
		}
		if k+1 == len(runs) {
			write.Imm = rdma.ImmOf(imm)
		}
		land.add()
		if err := w.store.opts.Engine.Write(ctx, write); err != nil {
			return err
		}
		offset += write.Len
	}
	return nil
}

func (l *landing) add() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending++
}

func (l *landing) outcome() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// sums returns the XXH3-64 of each of the piece's layers: the caller's checksums, or those of the
// present bytes in memory.
func (w *writing) sums(p Piece) []uint64 {
	if w.given != nil {
		return w.given[pieceName{p.Block, p.Group}]
	}
	g := w.req.Namespace.Geometry
	layerBytes := g.LayerBytes(p.Group)
	sums := make([]uint64, 0, g.Groups[p.Group].Layers)
	var one [1]Fragment
	for _, f := range w.runs(p, &one) {
		mem := f.Memory.Bytes()[f.Offset:]
		for k := range f.Layers {
			sums = append(sums, xxh3.Hash(mem[int64(k)*layerBytes:][:layerBytes]))
		}
	}
	return sums
}

// abort aborts a reservation and returns when the engine does not read the caller's memory any
// more. The node closes the window, so writes under way are refused. If the node does not answer,
// abort ends the data-plane session.
func (w *writing) abort(ctx context.Context, n *node, sess *session, reservation uint64, land *landing) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortWithin)
	defer cancel()
	// An error does not matter: the reservation expires at the node.
	_, _ = sess.cache.Abort(ctx, &pb.AbortRequest{Reservation: reservation})
	select {
	case <-land.done:
		return
	case <-ctx.Done():
	}
	w.store.opts.Logger.Warn("data-plane session ended: a write was cancelled and the node does not confirm the abort", "server", n.target)
	w.store.opts.Engine.Disconnect(sess.engine)
	<-land.done
}

// commit makes the Commit call once. If the answer is lost, the client cannot determine whether the
// pieces were stored, and a second Commit would not show it either.
func (w *writing) commit(ctx context.Context, n *node, sess *session, c writeChunk, reservation uint64, granted []int, sums []*pb.PieceSums) error {
	req := &pb.CommitRequest{Reservation: reservation, Pieces: sums}
	resp, _, err := ask(ctx, sess, api.MethodCommit, req, 0, replyMax(len(granted), 0), func() (*pb.CommitResponse, error) { return sess.cache.Commit(ctx, req) })
	if err != nil {
		return w.commitFailed(ctx, n, c, granted, err)
	}
	return w.settleCommit(n, c, granted, resp)
}

// settleCommit records the results of the granted pieces. Errors: errBusy, or an error if the
// response does not belong to the chunk.
func (w *writing) settleCommit(n *node, c writeChunk, granted []int, resp *pb.CommitResponse) error {
	if resp.GetOutcome() == pb.Outcome_OUTCOME_BUSY {
		return fmt.Errorf("client: commit: %s: %w", n.target, inWords(errBusy, resp.GetBusyReason()))
	}
	type key struct{ block, group uint32 }
	index := make(map[key]int, len(granted))
	for _, k := range granted {
		index[key{uint32(c.local[k]), uint32(w.pieces[c.pieces[k]].Group)}] = c.pieces[k]
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, k := range granted {
		w.states[c.pieces[k]] = writeState{refused: "failed", detail: "the node's answer does not have this piece"}
	}
	for _, r := range resp.GetPieces() {
		i, ok := index[key{r.GetBlock(), r.GetGroup()}]
		if !ok {
			return fmt.Errorf("client: commit: %s answered for block %d, group %d, which was not written", n.target, r.GetBlock(), r.GetGroup())
		}
		switch r.GetState() {
		case pb.PieceResult_STATE_STORED:
			w.states[i] = writeState{stored: true}
		case pb.PieceResult_STATE_EXISTS:
			w.states[i] = writeState{existed: true}
		default:
			w.states[i] = refusal(r.GetReason())
		}
	}
	return nil
}

// refusal parses a node's reason, "word" or "word: sentence".
func refusal(reason string) writeState {
	for i := range len(reason) - 1 {
		if reason[i] == ':' {
			return writeState{refused: Reason(reason[:i]), detail: reason[i+2:]}
		}
	}
	return writeState{refused: Reason(reason)}
}

// commitFailed handles the failure of a Commit. The pieces may or may not be stored, so they count
// as refused. Only failures that end the line or the Write are returned as errors.
func (w *writing) commitFailed(ctx context.Context, n *node, c writeChunk, granted []int, err error) error {
	err = callError(ctx, "commit", n.target, err)
	if ctx.Err() != nil || errors.Is(err, errDown) || errors.Is(err, errBusy) || errors.Is(err, ErrAuth) || errors.Is(err, ErrRequest) {
		return err
	}
	pieces := make([]int, len(granted))
	for j, k := range granted {
		pieces[j] = c.pieces[k]
	}
	w.refuseAll(pieces, "failed", err.Error())
	return nil
}

// refuseAll records a refusal for the pieces that have no result yet.
func (w *writing) refuseAll(pieces []int, why Reason, detail string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, i := range pieces {
		if w.states[i] == (writeState{}) {
			w.states[i] = writeState{refused: why, detail: detail}
		}
	}
}

func (w *writing) noteBusy(detail string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.busy = detail
}

func (w *writing) anyRefused(pieces []int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(pieces, func(i int) bool { return w.states[i].refused != "" })
}

// result returns the totals. No chunk is running.
func (w *writing) result() WriteResult {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := WriteResult{Blocks: len(w.ids)}
	for i, p := range w.pieces {
		s := w.states[i]
		switch {
		case s.stored:
			r.Stored++
			r.Bytes += w.req.Namespace.Geometry.PieceBytes(p.Group)
			continue
		case s.existed:
			if w.existedAt != nil {
				w.req.Existed[w.existedAt[pieceName{p.Block, p.Group}]] = true
			}
			r.Existed++
			continue
		case s.refused == "":
			s.refused = LostSkipped
		}
		r.Blocks = min(r.Blocks, p.Block)
		r.Refused = append(r.Refused, RefusedPiece{Block: p.Block, Group: p.Group, Reason: s.refused, Detail: s.detail})
		r.Detail = cmp.Or(r.Detail, s.detail)
	}
	switch {
	case r.Stored+r.Existed > 0, len(w.pieces) == 0 && w.req.First > 0:
		r.Outcome = Hit
	case w.busy != "":
		r.Outcome, r.Detail = Busy, w.busy
	}
	if w.busy != "" {
		w.store.stats.busy.Add(1)
	}
	w.store.stats.writeBytes.Add(uint64(r.Bytes))
	w.store.stats.refusedPieces.Add(uint64(len(r.Refused)))
	return r
}
