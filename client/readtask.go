package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

const (
	// readTaskPieces is the largest number of pieces in one Read RPC. Each piece is one operation
	// of the transfer engine and one list of checksums. Small blocks reach this bound before
	// ReadTaskBytes.
	readTaskPieces = 512
	// landWithin is the longest wait for immediates after the node has reported that its writes are
	// complete. Every provider that confirms a write at the target delivers the immediates before
	// that report. The bound is for a provider that has lost an immediate. To a call by message the
	// node replies earlier, when the writes are submitted. They may then wait behind those of other
	// calls for longer than landWithin. So such a call waits on if the engine has counted any
	// immediate in the second half of landWithin.
	landWithin = 10 * time.Second
	// landAtMost bounds the wait of a call by message even while other immediates are counted.
	landAtMost = 5 * time.Minute
)

// readTask is the work of one Read RPC.
type readTask struct {
	node *node
	ids  []kv.BlockID
	// epoch is the epoch of all blocks of the task.
	epoch kv.Epoch
	// pieces are indices into reading.pieces. local has the position of each piece's block in ids.
	pieces []int
	local  []int
	// suffix is set if ids does not begin with the first block of the prompt.
	suffix bool
	// copy is set if node has copies of a hot prefix and is no home of the sequence.
	copy bool
}

// readLimits are the limits of one task for a node.
type readLimits struct {
	bytes int64
	// whole is the largest total size of the task's pieces, in bytes, with each piece counted in
	// its full size. The node counts full sizes even if it reads only some layers.
	whole    int64
	suffixes bool // a task may begin in the middle of a chain
}

// readLimit returns the limits of tasks for the node. For a node that is down it returns defaults,
// because the node's tasks will fail.
func (s *Store) readLimit(ctx context.Context, n *node) (readLimits, error) {
	sess, err := n.live(ctx)
	if errors.Is(err, errDown) {
		return readLimits{bytes: s.opts.ReadTaskBytes, whole: s.opts.ReadTaskBytes}, nil
	}
	if err != nil {
		return readLimits{}, err
	}
	return readLimits{bytes: min(s.opts.ReadTaskBytes, sess.readBytes), whole: sess.readBytes, suffixes: sess.suffixes}, nil
}

// add puts a piece into the task. In a flat namespace blocks have no ancestors: the task's keys are
// those of its pieces.
func (t *readTask) add(piece, block int, ids []kv.BlockID, flat bool) {
	t.pieces = append(t.pieces, piece)
	if flat {
		t.ids = append(t.ids, ids[block])
		block = len(t.ids) - 1
	}
	t.local = append(t.local, block)
}

// setChains sets the ids of each task. With full attention, the blocks behind the task's last block
// are not needed, and the node finds the ancestors of the task's first block. With window and state
// groups, the length of the chain decides which pieces are needed, so every task sends the whole
// chain.
func (r *reading) setChains(limits map[*node]readLimits) {
	groups := r.req.Namespace.Geometry.Groups
	whole := len(groups) > 1 || groups[0].Kind != kv.Full
	for i := range r.tasks {
		t := &r.tasks[i]
		t.ids = r.ids
		if whole {
			continue
		}
		t.ids = r.ids[:slices.Max(t.local)+1]
		if first := slices.Min(t.local); first > 0 && limits[t.node].suffixes && r.epochs == nil {
			t.ids, t.suffix = t.ids[first:], true
			for k := range t.local {
				t.local[k] -= first
			}
		}
	}
}

// runTask performs one task, and retries it if the connection broke. Pieces that could not be
// loaded are recorded in states. An error ends the whole Read.
func (r *reading) runTask(ctx context.Context, t *readTask) error {
	if r.skip(t) {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	t.node.calling.Add(1)
	defer t.node.calling.Add(-1)
	began := time.Now()
	err := t.node.retry(ctx, t.node.live, func(sess *session) error {
		if r.local != nil {
			return r.borrow(ctx, t, sess)
		}
		err := r.copyTask(ctx, t, sess)
		if errors.Is(err, errNotLocal) {
			err = r.attempt(ctx, t, sess)
		}
		return err
	})
	t.node.heard(ctx, began, time.Now(), err)
	switch {
	case errors.Is(err, errDown):
		r.loseAll(t, LostNodeDown, err.Error())
	case errors.Is(err, errBusy):
		r.loseAll(t, LostBusy, err.Error())
	case err != nil:
		return err
	}
	return nil
}

// skip reports whether the task lies wholly behind a block that will not arrive.
func (r *reading) skip(t *readTask) bool {
	if r.several {
		return false
	}
	first := math.MaxInt
	for _, i := range t.pieces {
		first = min(first, r.pieces[i].Block)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return first > r.broken
}

// attempt makes one Read RPC: it opens windows, makes the call, waits for the immediates, revokes
// the windows, and verifies the bytes.
func (r *reading) attempt(ctx context.Context, t *readTask, sess *session) error {
	zones := r.zones(t)
	arrival := r.newArrival(t, zones)
	counted, delivered := r.progress.attempt(), int64(0)
	defer func() { counted.end(delivered) }()
	windows, err := r.openWindows(arrival, zones, sess, counted)
	imm := r.store.imms.Add(1)
	var resp *pb.ReadResponse
	if err == nil {
		var landed bool
		resp, landed, err = r.call(ctx, t, sess, windows, zones, imm)
		if err == nil && !landed {
			err = r.land(ctx, sess, imm, resp.GetImmediates())
		}
	}
	// The windows are revoked in all cases, and without ctx. After the revocation nothing changes
	// the bytes, so the bytes that were hashed, on arrival or below, are the bytes that the caller
	// sees.
	for k, window := range windows {
		if window == nil {
			continue
		}
		if revokeErr := window.Revoke(context.WithoutCancel(ctx)); revokeErr != nil {
			return fmt.Errorf("client: read: memory [%d,%d) may still be written to: %w", zones[k].lo, zones[k].hi, revokeErr)
		}
	}
	if err != nil {
		r.store.forgetImm(imm)
		return err
	}
	if resp.GetOutcome() == pb.Outcome_OUTCOME_BUSY && len(resp.GetPieces()) == 0 {
		return fmt.Errorf("client: read: %s: %w", t.node.target, inWords(errBusy, resp.GetBusyReason()))
	}
	if anyFailed(resp) && !t.node.dataConnected(sess) {
		return fmt.Errorf("client: read: %s: %w: its data-plane session has ended", t.node.target, errDown)
	}
	if hot := resp.GetHot(); hot != nil && !t.suffix {
		r.store.hints.learn(r.req.Namespace, kv.Epoch(resp.GetEpoch()), t.ids[:min(int(resp.GetMatchedBlocks()), len(t.ids))], hot, time.Now())
	}
	r.verify(t, resp, arrival)
	if counted != nil {
		delivered = r.delivered(t)
		r.progress.verified(r.prefix())
	}
	return nil
}

func anyFailed(resp *pb.ReadResponse) bool {
	return slices.ContainsFunc(resp.GetPieces(), func(p *pb.PieceResult) bool { return p.GetState() == pb.PieceResult_STATE_FAILED })
}

// openWindows opens a window for the node over each zone. It returns the windows that it has
// opened, also together with an error.
func (r *reading) openWindows(a *arrival, zones []zone, sess *session, counted *attemptBytes) ([]rdma.Window, error) {
	windows := make([]rdma.Window, len(zones))
	for k, z := range zones {
		if z.lo > z.hi {
			continue
		}
		var err error
		if windows[k], err = a.window(k, r.targets[k].region, uint64(z.lo), uint64(z.hi-z.lo), sess.engine, counted); err != nil {
			windows[k] = nil
			return windows, fmt.Errorf("client: read: open a window of %d bytes at %d: %w", z.hi-z.lo, z.lo, err)
		}
	}
	return windows, nil
}

// call makes the Read call for the task's pieces. landed reports whether the immediates have been
// counted already, so the bytes are in place.
func (r *reading) call(ctx context.Context, t *readTask, sess *session, windows []rdma.Window, zones []zone, imm uint32) (_ *pb.ReadResponse, landed bool, _ error) {
	destinations := make([]uint32, len(windows))
	var descs [][]byte
	for k, w := range windows {
		if w == nil {
			continue
		}
		desc, err := w.Desc().MarshalBinary()
		if err != nil {
			return nil, false, fmt.Errorf("client: read: %w", err)
		}
		destinations[k] = uint32(len(descs))
		descs = append(descs, desc)
	}
	if r.fragments != nil && !sess.fragments {
		return nil, false, fmt.Errorf("client: read: %s has version %s, which cannot read into fragments: %w", t.node.target, sess.version, ErrVersion)
	}
	refs := make([]*pb.PieceRef, len(t.pieces))
	sums := 0
	for k, i := range t.pieces {
		sums += r.layers(r.pieces[i].Group)
		refs[k] = r.pieceRef(t, k, zones, destinations)
	}
	req := r.request(t, refs)
	req.Destination, req.MoreDestinations, req.Imm = descs[0], descs[1:], imm
	resp, landed, err := ask(ctx, sess, api.MethodRead, req, imm, replyMax(len(refs), sums), func() (*pb.ReadResponse, error) { return sess.cache.Read(ctx, req) })
	if err != nil {
		return nil, false, callError(ctx, "read", t.node.target, err)
	}
	if got := resp.GetPieces(); len(got) != len(t.pieces) && len(got) != 0 {
		return nil, false, fmt.Errorf("client: read: %s answered for %d pieces of %d", t.node.target, len(got), len(t.pieces))
	}
	return resp, landed, nil
}

// request returns the request of a task, without the destinations of its pieces.
func (r *reading) request(t *readTask, refs []*pb.PieceRef) *pb.ReadRequest {
	return &pb.ReadRequest{
		Namespace:      r.req.Namespace.Name,
		Epoch:          uint64(t.epoch),
		Alone:          r.epochs != nil,
		Suffix:         t.suffix,
		Copy:           t.copy,
		BlockIds:       api.AppendIDs(nil, t.ids),
		Pieces:         refs,
		FirstLayer:     uint32(r.req.FirstLayer),
		Layers:         uint32(r.req.Layers),
		GeometryDigest: r.digest[:],
	}
}

// land waits until the given number of the node's immediates have been counted. Then the payload of
// each is in place.
func (r *reading) land(ctx context.Context, sess *session, imm, count uint32) error {
	if count == 0 {
		return nil
	}
	landed := rdma.NewFlag()
	expectation, err := r.store.opts.Engine.ExpectImm(rdma.Expect{Imm: imm, Count: count, From: []rdma.EngineID{sess.engine}, Done: landed.Set})
	if err != nil {
		return fmt.Errorf("client: read: %w", err)
	}
	wait, cancel := context.WithTimeout(ctx, landWithin)
	defer cancel()
	err = landed.Wait(wait)
	if err == nil {
		return nil
	}
	expectation.Cancel()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("client: read: %w", ctx.Err())
	case errors.Is(err, rdma.ErrClosed):
		return fmt.Errorf("client: read: transfer engine: %w", err)
	case errors.Is(err, rdma.ErrPeerDied):
		return fmt.Errorf("client: read: %w: %w", errDown, err)
	}
	return fmt.Errorf("client: read: %w: not all of %d immediates arrived within %v", errDown, count, landWithin)
}

// forgetImm drops the count of an immediate that is not waited for, so that counts of abandoned
// immediates do not accumulate in the engine.
func (s *Store) forgetImm(imm uint32) {
	expectation, err := s.opts.Engine.ExpectImm(rdma.Expect{Imm: imm, Count: math.MaxUint32})
	if err == nil {
		expectation.Cancel()
	}
}

// verify hashes the bytes that were not hashed on arrival, and records the result of
// each piece. arrival is nil if no bytes were hashed on arrival.
func (r *reading) verify(t *readTask, resp *pb.ReadResponse, arrival *arrival) {
	for k, i := range t.pieces {
		result := resp.GetPieces()[k]
		state := pieceState{detail: result.GetReason()}
		switch result.GetState() {
		case pb.PieceResult_STATE_DELIVERED:
			state.delivered, state.detail = r.intact(i, result.GetLayerSums(), arrival.sumsOf(k, r.layers(r.pieces[i].Group)))
			// KV of two epochs must not meet in one prefix, unless the caller mixes epochs.
			if got := kv.Epoch(resp.GetEpoch()); state.delivered && got != t.epoch {
				state = pieceState{lost: LostEpoch, detail: fmt.Sprintf("read under epoch %d; epoch %d was requested", got, t.epoch)}
				break
			}
			if state.delivered && r.req.Sums != nil {
				copy(r.req.Sums[i], result.GetLayerSums())
			}
			if !state.delivered {
				state.lost = LostChecksum
				r.store.stats.lostChecksum.Add(1)
				r.store.opts.Logger.Error("a piece does not have the bytes that its writer wrote", "server", t.node.target, "namespace", r.req.Namespace.Name,
					"block", r.ids[r.pieces[i].Block], "group", r.pieces[i].Group, "detail", state.detail)
			}
		case pb.PieceResult_STATE_MISS:
			if t.local[k] >= int(resp.GetMatchedBlocks()) {
				state.cut = Cut(resp.GetCut())
			} else {
				state.lost = LostGone
			}
		case pb.PieceResult_STATE_CORRUPT:
			state.lost = LostCorrupt
		default:
			state.lost = LostFailed
			if b := resp.GetBusyReason(); b != "" && b == result.GetReason() {
				state.lost = LostBusy
			}
		}
		r.settle(i, state)
	}
}

// intact compares a piece in memory with its writer's checksums. landed are the piece's layers as
// hashed on arrival, or nil.
func (r *reading) intact(i int, sums []uint64, landed []arrivedLayer) (ok bool, detail string) {
	p := r.pieces[i]
	layers, layerBytes := r.layers(p.Group), r.req.Namespace.Geometry.LayerBytes(p.Group)
	if len(sums) != layers {
		return false, fmt.Sprintf("%d checksums for %d layers", len(sums), layers)
	}
	first := 0 // index of the run's first layer in the piece
	var one [1]run
	for _, f := range r.runs(i, &one) {
		mem, want := r.bytesOf(i, f), int64(f.layers)*layerBytes
		if int64(len(mem)) < want {
			return false, fmt.Sprintf("the memory that the node named has %d bytes; the piece has %d", len(mem), want)
		}
		if k, got := r.store.firstBadOf(mem, layerBytes, sums[first:first+f.layers], landed[min(first, len(landed)):]); k >= 0 {
			k += first
			return false, fmt.Sprintf("layer %d has checksum %016x; its writer computed %016x", r.req.FirstLayer+k, got, sums[k])
		}
		first += f.layers
	}
	return true, ""
}

// bytesOf returns the memory from the start of a run of piece i to the memory's end.
func (r *reading) bytesOf(i int, f run) []byte {
	if r.local != nil {
		return r.local.pieces[i]
	}
	return r.targets[f.target].Bytes()[f.offset:]
}
