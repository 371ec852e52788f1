package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

const (
	// writeChunkPieces is the largest number of pieces in one Reserve. Each piece is one operation
	// of the transfer engine and one entry of the node's index.
	writeChunkPieces = 2048
	// pieceRoomMin is the least number of bytes with which a piece counts towards the limit of one
	// Reserve. The node stores a piece in whole pages of its arena, with an additional page before
	// the piece.
	pieceRoomMin = 8 << 10
	// abortWithin is the longest time for which a Write whose ctx has ended waits until the node
	// has aborted the reservation. Then the client ends the data-plane session, because the
	// caller's memory must not be read once Write has returned.
	abortWithin = time.Second
)

// writeChunk is the work of one reservation.
type writeChunk struct {
	parent kv.BlockID
	ids    []kv.BlockID
	pieces []int // indices into writing.pieces
	local  []int // position of each piece's block in ids
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
	whole := 0 // number of pieces up to the end of the last whole block that fits
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
// last block of the pieces; in a flat namespace they are the pieces' keys.
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

// runChunk reserves, writes and commits one chunk. After errBusy or errDown, no further chunk of
// this node's share is written; any other error ends the whole Write.
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
	// A refused write fails the whole chunk, because the node counts the writes of all granted
	// pieces.
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

// sums returns the XXH3-64 checksum of each of the piece's layers: the caller's checksums or, if
// there are none, the checksums of the present bytes in memory.
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

// abort aborts a reservation and returns when the engine has stopped reading the caller's memory.
// The node closes the window, so writes in progress are refused. If the node does not answer, abort
// ends the data-plane session.
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
// pieces were stored, not even by a second Commit.
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
// as refused. It returns an error only for a failure after which no further chunk goes to this
// node, or which ends the Write.
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
