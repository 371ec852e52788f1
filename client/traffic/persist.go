package traffic

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// pending are the blocks that are on their way to storage: what a later turn of
// a session waits for, so that it sees the turn before.
type pending struct {
	max    int
	mu     sync.Mutex
	blocks map[kv.BlockID]chan struct{}
	// trains are those that have not left yet, by their last block.
	trains map[kv.BlockID]*train
}

func newPending(n int) pending {
	return pending{max: n, blocks: make(map[kv.BlockID]chan struct{}), trains: make(map[kv.BlockID]*train)}
}

// train is decoded blocks, each the parent of the next, that wait until storage
// has what is before them and then go in one write: a write is two round trips,
// and one for each block would have the last block wait for all of them.
type train struct {
	chain  chain // up to the last block
	first  int
	pieces []client.Piece
	sums   [][]uint64
	bufs   []arena.Buffer
	ends   []func()
}

// add couples a block, the last of c; pending.mu is held, or nobody knows t.
func (t *train) add(c chain, buf arena.Buffer, sums []uint64, end func()) {
	t.chain = c
	t.pieces = append(t.pieces, client.Piece{Block: len(c.ids) - 1, Offset: buf.Offset()})
	t.sums, t.bufs, t.ends = append(t.sums, sums), append(t.bufs, buf), append(t.ends, end)
}

// over gives everything back.
func (t *train) over() {
	for i, buf := range t.bufs {
		buf.Release()
		t.ends[i]()
	}
}

// board couples a block to the train that its parent waits in, nil if there is
// none; otherwise it returns a new train, which the caller drives.
func (p *pending) board(c chain, buf arena.Buffer, sums []uint64, end func()) *train {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(c.ids)
	var t *train
	if n > 1 {
		t = p.trains[c.ids[n-2]]
	}
	driver := t == nil || t.chain.epoch != c.epoch
	if driver {
		t = &train{first: n - 1}
	} else {
		delete(p.trains, c.ids[n-2])
	}
	t.add(c, buf, sums, end)
	p.trains[c.ids[n-1]] = t
	if !driver {
		return nil
	}
	return t
}

// leave has no more blocks coupled to a train.
func (p *pending) leave(t *train) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if last := t.chain.ids[len(t.chain.ids)-1]; p.trains[last] == t {
		delete(p.trains, last)
	}
}

// begin enters blocks and returns what ends them; false if there are too many.
func (p *pending) begin(ids []kv.BlockID) (end func(), ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.blocks)+len(ids) > p.max {
		return nil, false
	}
	done := make(chan struct{})
	for _, id := range ids {
		p.blocks[id] = done
	}
	return func() {
		p.mu.Lock()
		for _, id := range ids {
			if p.blocks[id] == done {
				delete(p.blocks, id)
			}
		}
		p.mu.Unlock()
		close(done)
	}, true
}

// len is how many blocks are on their way.
func (p *pending) len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.blocks)
}

// Settle waits until a block that was computed or decoded here is in storage, or
// is known not to get there: after it, a match of the session's next turn finds
// what it will ever find. A block that is not on its way costs nothing.
func (m *Manager) Settle(ctx context.Context, id kv.BlockID) error {
	m.pending.mu.Lock()
	done := m.pending.blocks[id]
	m.pending.mu.Unlock()
	if done == nil {
		return nil
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// persist stores the full blocks of the prompt that storage does not have: the
// new ones, and those of the hit that had to be computed again. What it returns is
// closed when the buffer is not read any more. A block that storage refuses is
// lost to the cache and to nobody else.
func (d *Decode) persist() <-chan struct{} {
	done := make(chan struct{})
	// What was verified is what is stored: the sums go with the blocks, so that
	// storage refuses one whose memory has changed since.
	var pieces []client.Piece
	var sums [][]uint64
	var ids []kv.BlockID
	for b, id := range d.job.IDs {
		if d.sends.sent[b] && (d.sends.again[b] || b >= d.job.Hit) {
			pieces = append(pieces, client.Piece{Block: b, Offset: d.buf.Offset() + int64(b)*int64(d.m.geo.fullBytes)})
			sums = append(sums, d.sums.block(b, d.m.geo.layers))
			ids = append(ids, id)
		}
	}
	if d.job.NoPersist || len(pieces) == 0 {
		close(done)
		return done
	}
	end, ok := d.m.pending.begin(ids)
	if !ok {
		d.m.log.Warn("new blocks are not stored: too many wait for storage", "request", d.request, "blocks", len(ids))
		close(done)
		return done
	}
	go func() {
		defer close(done)
		defer end()
		d.m.store(d.tail, d.request, d.m.buffer.memory, chain{d.job.IDs, d.job.Epoch}, pieces, sums)
	}()
	return done
}

const (
	// persistWithin bounds how long one write of new blocks may take, from its
	// beginning: the cache may lose them, memory may not be held for ever.
	persistWithin = time.Minute
	// persistBlocks bounds the blocks of one write, so that a long prompt has as many
	// times persistWithin as it needs.
	persistBlocks = 2048
)

// store writes blocks that lie in from to storage, in the order of the chain. Where
// one of them is refused those behind it have no parent, and are not offered.
func (m *Manager) store(ctx context.Context, request string, from *client.Memory, c chain, pieces []client.Piece, sums [][]uint64) {
	for len(pieces) > 0 && ctx.Err() == nil {
		n := min(len(pieces), persistBlocks)
		if !m.storeSome(ctx, request, client.WriteRequest{
			Namespace: m.opts.Namespace, IDs: c.ids[:pieces[n-1].Block+1], First: pieces[0].Block, Epoch: c.epoch, From: from, Pieces: pieces[:n], Sums: sums[:n],
		}) {
			return
		}
		pieces, sums = pieces[n:], sums[n:]
	}
}

// storeSome performs one write; false: something of it is not stored.
func (m *Manager) storeSome(ctx context.Context, request string, w client.WriteRequest) bool {
	ctx, cancel := context.WithTimeout(ctx, persistWithin)
	defer cancel()
	res, err := m.opts.Storage.Write(ctx, w)
	ok := err == nil && len(res.Refused) == 0 && res.Outcome == client.Hit
	if !ok {
		m.log.Warn("new blocks are not stored", "request", request, "first", w.First, "blocks", len(w.Pieces), "refused", len(res.Refused), "outcome", res.Outcome.String(), "detail", res.Detail, "err", err)
	}
	return ok
}

// Append stores one block that decoding has filled: its KV is in a page of every
// layer of device memory. ids is the chain up to and including it. It returns when
// the page may change; the write goes on (Settle waits for it). Blocks whose parent
// is still waiting for storage go with it, in one write.
func (m *Manager) Append(ctx context.Context, request string, ids []kv.BlockID, epoch kv.Epoch, page uint32) error {
	if len(ids) == 0 {
		return fmt.Errorf("traffic: request %q: append without a chain: %w", request, ErrJob)
	}
	if err := m.checkPages([]uint32{page}); err != nil {
		return fmt.Errorf("traffic: request %q: %w", request, err)
	}
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return ErrClosed
	}
	m.work.Add(1)
	m.mu.Unlock()
	end, ok := m.pending.begin(ids[len(ids)-1:])
	if !ok {
		m.work.Done()
		m.log.Warn("a decoded block is not stored: too many wait for storage", "request", request)
		return nil
	}
	buf, sums, err := m.take(ctx, page)
	if err != nil {
		end()
		m.work.Done()
		return fmt.Errorf("traffic: request %q: %w", request, err)
	}
	t := m.pending.board(chain{ids, epoch}, buf, sums, end)
	if t == nil {
		m.work.Done()
		return nil
	}
	go func() {
		defer m.work.Done()
		ctx := context.WithoutCancel(ctx)
		if t.first > 0 {
			// It ends: the parent's own write is bounded.
			_ = m.Settle(ctx, ids[t.first-1])
		}
		m.pending.leave(t)
		defer t.over()
		m.store(ctx, request, m.appended.memory, t.chain, t.pieces, t.sums)
	}()
	return nil
}

// take copies one block, all its layers, from the device to memory of Append's, and
// returns the sums of what the device holds; of what came, where the CPU cannot
// address the device.
func (m *Manager) take(ctx context.Context, page uint32) (arena.Buffer, []uint64, error) {
	g, dev := m.geo, &m.opts.Device
	buf, err := m.appended.Alloc(ctx, int(g.fullBytes))
	if err != nil {
		return buf, nil, err
	}
	spans, sums := make([]copier.Span, g.layers), make([]uint64, g.layers)
	sum := func(l int, mem []byte, off uint64) { sums[l] = xxh3.Hash(mem[off : off+g.layerBytes]) }
	device := dev.Region.Bytes()
	for l := range spans {
		off := dev.offset(l, page, g.layerBytes)
		spans[l] = copier.Span{Src: off, Dst: uint64(buf.Offset()) + uint64(l)*g.layerBytes, Len: g.layerBytes}
		if device != nil {
			sum(l, device, off)
		}
	}
	if err := copier.Copy(ctx, m.opts.Copier, copier.Batch{Src: m.opts.DeviceCopies, Dst: m.appended.copies, Spans: spans}); err != nil {
		buf.Release()
		return buf, nil, err
	}
	if device == nil {
		for l := range sums {
			sum(l, buf.Bytes(), uint64(l)*g.layerBytes)
		}
	}
	return buf, sums, nil
}
