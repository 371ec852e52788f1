package traffic

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// pending holds the blocks that are being written to storage. The next turn of a conversation waits
// for these writes, so that it finds the blocks of the previous turn in storage.
type pending struct {
	max    int
	mu     sync.Mutex
	blocks map[kv.BlockID]chan struct{}
	// runs are the runs that still accept blocks, keyed by their last block.
	runs map[kv.BlockID]*run
}

func newPending(n int) pending {
	return pending{max: n, blocks: make(map[kv.BlockID]chan struct{}), runs: make(map[kv.BlockID]*run)}
}

// run is a sequence of decoded blocks, each the parent of the next. It waits until storage has the
// parent of the first block, and then one write stores all its blocks. With one write per block,
// the last block would wait for two round trips for each block before it.
type run struct {
	chain  chain // up to the last block
	first  int
	pieces []client.Piece
	sums   [][]uint64
	bufs   []arena.Buffer
	ends   []func()
}

// add appends a block, the last of c, which has the groups for which has returns true. pending.mu
// must be held.
func (r *run) add(g *geometry, c chain, has func(group int) bool, buf arena.Buffer, sums []uint64, end func()) {
	r.chain = c
	r.pieces, r.sums = g.pieces(r.pieces, r.sums, len(c.ids)-1, has, buf.Offset(), sums)
	r.bufs, r.ends = append(r.bufs, buf), append(r.ends, end)
}

// release releases the memory of the run's blocks, and removes the blocks from the set of blocks that are being
// written.
func (r *run) release() {
	for i, buf := range r.bufs {
		buf.Release()
		r.ends[i]()
	}
}

// add appends a block to the run that ends with its parent, and returns nil. If there
// is no such run, add returns a new one, which the caller has to write.
func (p *pending) add(g *geometry, c chain, has func(group int) bool, buf arena.Buffer, sums []uint64, end func()) *run {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(c.ids)
	var r *run
	if n > 1 {
		r = p.runs[c.ids[n-2]]
	}
	fresh := r == nil || r.chain.epoch != c.epoch
	if fresh {
		r = &run{first: n - 1}
	} else {
		delete(p.runs, c.ids[n-2])
	}
	r.add(g, c, has, buf, sums, end)
	p.runs[c.ids[n-1]] = r
	if !fresh {
		return nil
	}
	return r
}

// seal removes a run from runs, so that it accepts no more blocks.
func (p *pending) seal(r *run) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if last := r.chain.ids[len(r.chain.ids)-1]; p.runs[last] == r {
		delete(p.runs, last)
	}
}

// begin adds blocks to the set of blocks that are being written, and returns the function that removes them. ok
// is false if there would be more than max blocks.
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

// len returns the number of blocks that are being written.
func (p *pending) len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.blocks)
}

// Settle waits until a block that was computed or decoded here is in storage, or until its write
// has failed. After Settle for the last block of a conversation's turn, a match finds all blocks of
// the turn that will ever be in storage. If the block is not being written, Settle returns at once.
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

// persist stores the full blocks of the prompt that storage does not have: the new blocks, and the
// hit blocks that were computed again. The returned channel is closed when no write reads the
// buffer any more. A block that storage refuses is missing only in the cache; the request is not
// affected.
func (d *Decode) persist() <-chan struct{} {
	done := make(chan struct{})
	// The checksums are sent with the blocks, so storage refuses a block whose memory
	// has changed since it was verified.
	var pieces []client.Piece
	var sums [][]uint64
	var ids []kv.BlockID
	for b, id := range d.job.IDs {
		if d.sends.sent[b] && (d.sends.again[b] || b >= d.job.Hit) {
			has := func(group int) bool { return d.m.geo.Groups[group].Kind != kv.State || b == d.job.Blocks-1 }
			pieces, sums = d.m.geo.pieces(pieces, sums, b, has, d.buf.Offset()+int64(b)*int64(d.m.geo.fullBytes), d.sums.block(b, d.m.geo.places))
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
	// persistWithin is the time limit of one write of new blocks. After this time the blocks are
	// not stored, because their memory must be released.
	persistWithin = time.Minute
	// persistBlocks is the largest number of blocks in one write. A long prompt takes several
	// writes, and persistWithin applies to each.
	persistBlocks = 2048
)

// store writes blocks from memory to storage, in the order of the chain. It stops at
// the first refused block: the blocks after it would have no parent.
func (m *Manager) store(ctx context.Context, request string, from *client.Memory, c chain, pieces []client.Piece, sums [][]uint64) {
	for len(pieces) > 0 && ctx.Err() == nil {
		n := slices.IndexFunc(pieces, func(p client.Piece) bool { return p.Block >= pieces[0].Block+persistBlocks })
		if n < 0 {
			n = len(pieces)
		}
		if !m.storeSome(ctx, request, client.WriteRequest{
			Namespace: m.opts.Namespace, IDs: c.ids[:pieces[n-1].Block+1], First: pieces[0].Block, Epoch: c.epoch, From: from, Pieces: pieces[:n], Sums: sums[:n],
		}) {
			return
		}
		pieces, sums = pieces[n:], sums[n:]
	}
}

// storeSome performs one write. It returns false if any block was not stored.
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

// Append stores one block that decoding has filled: its KV is in the given pages of
// device memory, one for each page table (Device.Tables). A layer with recurrent state may have
// NoPage; the block is then stored without state. ids is the chain up to and including the block. Append
// returns when the pages and ids may change, before the write has ended (Settle waits for it).
// A block whose parent is still waiting to be written is stored by the same write.
func (m *Manager) Append(ctx context.Context, request string, ids []kv.BlockID, epoch kv.Epoch, pages ...uint32) error {
	return m.AppendAfter(ctx, request, ids, epoch, nil, pages...)
}

// AppendAfter is Append for a block that the engine's stream has still to fill: the copy waits, on
// the device, for the mark, and AppendAfter waits for the copy. The mark is as in
// Prefill.ComputedAfter, and is not closed before AppendAfter has returned.
func (m *Manager) AppendAfter(ctx context.Context, request string, ids []kv.BlockID, epoch kv.Epoch, after copier.Mark, pages ...uint32) error {
	if len(ids) == 0 {
		return fmt.Errorf("traffic: request %q: append without a chain: %w", request, ErrJob)
	}
	has, err := m.groupsWithPages(pages)
	if err != nil {
		return fmt.Errorf("traffic: request %q: %w", request, err)
	}
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return ErrClosed
	}
	m.work.Add(1)
	m.mu.Unlock()
	ids = slices.Clone(ids)
	end, ok := m.pending.begin(ids[len(ids)-1:])
	if !ok {
		m.work.Done()
		m.log.Warn("a decoded block is not stored: too many wait for storage", "request", request)
		return nil
	}
	buf, sums, err := m.take(ctx, pages, after)
	if err != nil {
		end()
		m.work.Done()
		return fmt.Errorf("traffic: request %q: %w", request, err)
	}
	r := m.pending.add(&m.geo, chain{ids, epoch}, func(group int) bool { return has[group] }, buf, sums, end)
	if r == nil {
		m.work.Done()
		return nil
	}
	go func() {
		defer m.work.Done()
		ctx := context.WithoutCancel(ctx)
		if r.first > 0 {
			// The wait is bounded, because the write of the parent has a time limit.
			_ = m.Settle(ctx, ids[r.first-1])
		}
		m.pending.seal(r)
		defer r.release()
		m.store(ctx, request, m.appended.memory, r.chain, r.pieces, r.sums)
	}()
	return nil
}

// groupsWithPages reports, by layer group, whether a block with the given pages, one for each page
// table, has the group's layers. It returns an error for pages that lie outside of device memory, and
// for a block without a page in a layer without state or in a part of a group.
func (m *Manager) groupsWithPages(pages []uint32) ([]bool, error) {
	if len(pages) != m.tables {
		return nil, fmt.Errorf("a block with %d device pages; want one in each of %d page tables: %w", len(pages), m.tables, ErrJob)
	}
	if err := m.checkPages(pages); err != nil {
		return nil, err
	}
	has := make([]bool, len(m.geo.Groups))
	for g, group := range m.geo.Groups {
		has[g] = group.Kind != kv.State
	}
	for l, g := range m.geo.groups {
		has[g] = has[g] || m.page(pages, l, 0) != NoPage
	}
	for l, g := range m.geo.groups {
		if has[g] && m.page(pages, l, 0) == NoPage {
			return nil, fmt.Errorf("a block without a device page in layer %d; only all layers of a group with recurrent state may lack it: %w", l, ErrJob)
		}
	}
	return has, nil
}

// take copies the layers of one block that have a page from the device to the buffer of decoded blocks and
// returns the checksums of the layers, both in the order of a Full Block. The checksums are computed over
// device memory or, if the CPU cannot address device memory, over the copy.
func (m *Manager) take(ctx context.Context, pages []uint32, after copier.Mark) (arena.Buffer, []uint64, error) {
	g, dev := &m.geo, &m.opts.Device
	buf, err := m.appended.Alloc(ctx, int(g.fullBytes))
	if err != nil {
		return buf, nil, err
	}
	spans, sums := make([]copier.Span, 0, g.layers), make([]uint64, g.layers)
	sum := func(l int, mem []byte, off uint64) { sums[g.places[l]] = xxh3.Hash(mem[off : off+g.bytes[l]]) }
	device := m.opts.deviceMemory()
	for l := range g.layers {
		page := m.page(pages, l, 0)
		if page == NoPage {
			continue
		}
		off := dev.offset(l, page)
		spans = append(spans, copier.Span{Src: off, Dst: uint64(buf.Offset()) + g.at(l), Len: g.bytes[l]})
		if device != nil {
			sum(l, device, off)
		}
	}
	if err := m.fromDevice(ctx, &m.appended, spans, after); err != nil {
		buf.Release()
		return buf, nil, err
	}
	if device == nil {
		for l := range sums {
			sum(l, buf.Bytes(), g.at(l))
		}
	}
	return buf, sums, nil
}
