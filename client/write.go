package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/penstock-kv/penstock/internal/placement"
	"github.com/penstock-kv/penstock/kv"
)

// writing is the state of one running Write.
type writing struct {
	store  *Store
	req    WriteRequest
	ids    []kv.BlockID
	digest kv.GeometryDigest
	pieces []Piece // in order of blocks, then groups
	// given has the caller's checksums of each piece; nil if the caller gave none.
	given map[pieceName][]uint64
	// fragments has the positions of each piece in memory; nil: each piece is in From, at its
	// Offset.
	fragments map[pieceName][]Fragment
	// existedAt maps a piece to its entry of WriteRequest.Existed; nil without Existed.
	existedAt map[pieceName]int

	mu     sync.Mutex
	states []writeState // of pieces
	busy   string
}

// pieceName identifies a piece within a chain.
type pieceName struct{ block, group int }

// writeState is the result of a piece. The zero value means that the piece was not sent,
// because an earlier piece was refused.
type writeState struct {
	stored, existed bool
	refused         Reason
	detail          string
}

// Write stores blocks from the caller's memory. It commits its chunks in the order of the chain, so
// that each chunk finds its parent. After Write has returned, with or without an error, no transfer
// reads the memory any more. To ensure this, Write may return up to a second after the end of ctx.
// If ctx ended, the result has the blocks that had been stored by then.
func (s *Store) Write(ctx context.Context, req WriteRequest) (WriteResult, error) {
	s.stats.writes.Add(1)
	w, err := s.newWriting(req)
	if err != nil {
		return WriteResult{}, err
	}
	if len(w.pieces) == 0 {
		return w.result(), nil
	}
	copies := w.copies(ctx)
	if len(copies) == 1 {
		err := w.runCopy(ctx, copies[0])
		return w.result(), err
	}
	errs := make([]error, len(copies))
	written := make([]*writing, len(copies))
	var wg sync.WaitGroup
	for k, lines := range copies {
		written[k] = w.another()
		wg.Go(func() { errs[k] = written[k].runCopy(ctx, lines) })
	}
	wg.Wait()
	w.states = slices.Clone(written[0].states)
	for _, c := range written {
		w.merge(c)
	}
	return w.result(), firstCause(errs)
}

// runCopy writes one copy of the pieces.
func (w *writing) runCopy(ctx context.Context, lines []line) error {
	if len(lines) == 1 {
		// The calling goroutine itself does the work, so that a chunk over a unix socket wakes no
		// other thread.
		return w.runLine(ctx, lines[0])
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
	return firstCause(errs)
}

// another returns a writing for another copy of the same pieces.
func (w *writing) another() *writing {
	return &writing{
		store: w.store, req: w.req, ids: w.ids, digest: w.digest, pieces: w.pieces, given: w.given, fragments: w.fragments,
		existedAt: w.existedAt, states: make([]writeState, len(w.pieces)),
	}
}

// merge adds the results of a copy. A piece is stored if one copy of it is, by this call or before; with
// WriteRequest.AllCopies, if all copies are.
func (w *writing) merge(copied *writing) {
	for i, s := range copied.states {
		have := &w.states[i]
		take := s.stored || s.existed && !have.stored || *have == (writeState{})
		if w.req.AllCopies {
			take = (have.stored || have.existed) && !(s.existed && have.stored)
		}
		if take {
			*have = s
		}
	}
	w.busy = cmp.Or(w.busy, copied.busy)
}

// firstCause returns the error that made the Write cancel its other lines (a line is the part of a
// Write for one node). It skips the context errors of the cancelled lines.
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
	if err := w.checkMemories(); err != nil {
		return nil, fmt.Errorf("client: write: %w", err)
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

// checkMemories returns an error if memory of the request is registered with another engine than the Store's.
func (w *writing) checkMemories() error {
	if w.req.Fragments == nil {
		return w.store.checkMemory(w.req.From)
	}
	for _, fragments := range w.req.Fragments {
		for _, f := range fragments {
			if err := w.store.checkMemory(f.Memory); err != nil {
				return err
			}
		}
	}
	return nil
}

// takeSums sets given from WriteRequest.Sums. It is called before w.pieces is sorted.
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

// takeFragments sets fragments from WriteRequest.Fragments. It is called before w.pieces is sorted.
func (w *writing) takeFragments() {
	if w.req.Fragments == nil {
		return
	}
	w.fragments = make(map[pieceName][]Fragment, len(w.pieces))
	for i, p := range w.pieces {
		w.fragments[pieceName{p.Block, p.Group}] = w.req.Fragments[i]
	}
}

// runs returns the positions of a piece in memory. A single position is stored in one, to avoid an
// allocation.
func (w *writing) runs(p Piece, one *[1]Fragment) []Fragment {
	if w.fragments != nil {
		return w.fragments[pieceName{p.Block, p.Group}]
	}
	one[0] = Fragment{Memory: w.req.From, Offset: p.Offset, Layers: w.req.Namespace.Geometry.Groups[p.Group].Layers}
	return one[:]
}

// takeExisted sets existedAt if WriteRequest.Existed is set. It is called before w.pieces is
// sorted.
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

// line is the part of a Write that goes to one node. Its pieces are written in order.
type line struct {
	node *node
	// others may have the beginning of the sequence if node does not; nil in a flat namespace.
	others *others
	pieces []int
}

// others are nodes for the lines whose own nodes do not have the beginning of the sequence. Each is used
// once, so two copies do not go to the same node.
type others struct {
	mu    sync.Mutex
	nodes []*node
}

// next returns the next of the nodes, nil if there is none.
func (o *others) next() *node {
	if o == nil {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.nodes) == 0 {
		return nil
	}
	n := o.nodes[0]
	o.nodes = o.nodes[1:]
	return n
}

// copies assigns the pieces of each copy to nodes: a whole chain to one of its homes, and each key of a
// flat namespace to one of its own homes.
func (w *writing) copies(ctx context.Context) [][]line {
	t := w.store.table.Load()
	if !w.flat() {
		homes := w.homes(ctx, t)
		pieces := make([]int, len(w.pieces))
		for i := range pieces {
			pieces[i] = i
		}
		mayHave := w.store.candidates
		if w.req.AllCopies {
			mayHave = w.store.readers // a copy on a former node is none of the copies
		}
		rest := slices.DeleteFunc(slices.Clone(mayHave(w.req.Namespace, w.ids[0])), func(n *node) bool { return slices.Contains(homes, n) })
		out, shared := make([][]line, len(homes)), &others{nodes: rest}
		for k, n := range homes {
			out[k] = []line{{node: n, others: shared, pieces: pieces}}
		}
		return out
	}
	var out [][]line
	var at []map[*node]int
	for i, p := range w.pieces {
		for k, n := range w.store.homes(t, w.ids[p.Block], w.req.Namespace.Copies()) {
			if k == len(out) {
				out, at = append(out, nil), append(at, make(map[*node]int))
			}
			l, ok := at[k][n]
			if !ok {
				l = len(out[k])
				at[k][n] = l
				out[k] = append(out[k], line{node: n})
			}
			out[k][l].pieces = append(out[k][l].pieces, i)
		}
	}
	return out
}

// homes returns the nodes that store the sequence. A new sequence passes over one home that is overfull
// and goes to the next node of placement.Homes instead, unless that is overfull too.
func (w *writing) homes(ctx context.Context, t *table) []*node {
	root, copies := w.ids[0], w.req.Namespace.Copies()
	nodes := w.store.homes(t, root, copies)
	if t.places == nil || w.req.First > 0 {
		return nodes
	}
	at := placement.Homes(nil, t.places, root, copies+1)
	if len(at) == len(nodes) || t.overfull[at[copies]] {
		return nodes
	}
	for i, n := range nodes {
		if t.overfull[at[i]] && !w.begunOn(ctx, n) {
			nodes[i] = t.nodes[at[copies]]
			break
		}
	}
	return nodes
}

// begunOn reports whether the node has the first block of the sequence.
func (w *writing) begunOn(ctx context.Context, n *node) bool {
	sh := share{node: n, ids: w.ids[:1]}
	return sh.matchHere(ctx, MatchRequest{Namespace: w.req.Namespace, Epoch: w.req.Epoch}).blocks > 0
}

func (w *writing) flat() bool { return w.req.Namespace.Index == kv.IndexFlat }

// runLine writes the pieces of a line (the part of a copy for one node) chunk by chunk. If the
// ids are chained (a trie), the first refusal ends the line, because a block cannot be stored
// without its parent.
//
// If the node lacks the parent of the first chunk, and one of the others has it, the line goes on
// there: the sequence has passed the node over, or its beginning has not been moved from a draining
// member yet.
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
		if w.flat() || !w.anyRefused(chunk.pieces) {
			l.others = nil // the line stays on this node
			continue
		}
		if !w.allRefused(chunk.pieces, "parent_absent") {
			return nil
		}
		next := l.others.next()
		if next == nil {
			return nil
		}
		w.takeBack(chunk.pieces)
		l.node, pieces = next, l.pieces
	}
	return nil
}

// allRefused reports whether all of the pieces were refused for the reason why.
func (w *writing) allRefused(pieces []int, why Reason) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !slices.ContainsFunc(pieces, func(i int) bool { return w.states[i].refused != why })
}

// takeBack forgets the refusals of the pieces.
func (w *writing) takeBack(pieces []int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, i := range pieces {
		w.states[i] = writeState{}
	}
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

// result returns the result of the Write. It is called when no chunk is running.
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
