package emulate

import (
	"math/rand/v2"
	"time"

	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/dualpath/batch"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/content"
)

// prefill starts a request whose KV goes to a decode engine.
func (e *Engine) prefill(r *running) {
	w := r.work
	if err := e.take(r, e.blocksOf(w.Prompt)); err != nil {
		e.leave(r, err)
		return
	}
	r.begun = time.Now()
	p, err := e.manager.Prefill(r.ctx, traffic.PrefillJob{
		Request: w.Name, IDs: w.IDs, Epoch: w.Epoch, Blocks: e.blocksOf(w.Prompt), Hit: w.Hit, Parts: w.Parts, Pages: r.pages,
		Stopped: w.Stopped, Progress: w.Progress,
	})
	if err != nil {
		e.leave(r, err)
		return
	}
	e.begin(r, p, nil)
	if err := p.Loaded(r.ctx); err != nil {
		p.Cancel()
		e.leave(r, err)
		return
	}
	e.mu.Lock()
	e.queue = append(e.queue, r)
	e.mu.Unlock()
	select {
	case e.started <- struct{}{}:
	default:
	}
}

// member is the part of a request that a batch computes. The part begins after the tokens computed
// before. last is set if the part completes the prompt.
type member struct {
	*running
	item batch.Item
	last bool
}

// prefillLoop computes one batch after another.
func (e *Engine) prefillLoop() {
	defer e.wg.Done()
	var items []batch.Item
	var chunks []batch.Chunk
	cut := len(e.bases) == e.opts.Model.Layers
	for {
		e.mu.Lock()
		items = items[:0]
		for _, r := range e.queue {
			cached := r.work.Hit*e.opts.Namespace.Geometry.BlockTokens + r.computed
			items = append(items, batch.Item{Cached: cached, Compute: max(r.work.Prompt-cached, 0)})
		}
		chunks = e.opts.Model.take(items, cut, chunks)
		var members []member
		whole := 0
		for _, c := range chunks {
			m := member{e.queue[c.Index], batch.Item{Cached: items[c.Index].Cached, Compute: c.Compute}, c.Compute == items[c.Index].Compute}
			if m.last {
				whole++
			}
			members = append(members, m)
		}
		// A request that was split stays at the head of the queue. Only this goroutine removes
		// requests from the queue.
		e.queue = e.queue[whole:]
		e.mu.Unlock()
		if len(members) == 0 {
			select {
			case <-e.started:
				continue
			case <-e.ctx.Done():
				return
			}
		}
		e.batches.Add(1)
		e.forward(members)
	}
}

// forward computes one pass over all layers. A request that fails leaves the batch; the
// others continue. The next batch does not wait for the last transfers of this one.
func (e *Engine) forward(members []member) {
	items := make([]batch.Item, len(members))
	for i, m := range members {
		items[i] = m.item
	}
	for l := range e.opts.Model.Layers {
		for i, m := range members {
			r := m.running
			if r == nil {
				continue
			}
			err := r.prefill.Layer(r.ctx, l)
			if err == nil {
				if r.computed == 0 {
					r.layer(l)
				}
				err = e.compute(m, l)
			}
			if err != nil {
				members[i].running = nil
				e.unqueue(r)
				e.wg.Go(func() {
					r.prefill.Cancel()
					e.leave(r, err)
				})
			}
		}
		e.spend(e.opts.Model.Layer(items))
		for _, m := range members {
			if m.running != nil && m.last {
				m.prefill.Computed(l)
			}
		}
	}
	for _, m := range members {
		switch r := m.running; {
		case r == nil:
		case m.last:
			e.wg.Go(func() { e.finish(r) })
		default:
			r.computed += m.item.Compute
		}
	}
}

// unqueue removes a request if it is at the head of the queue.
func (e *Engine) unqueue(r *running) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.queue) > 0 && e.queue[0] == r {
		e.queue = e.queue[1:]
	}
}

// finish waits until all of a request's KV has arrived at the decode engine.
func (e *Engine) finish(r *running) {
	err := r.prefill.Finish(r.ctx)
	if err == nil && e.opts.Loaded != nil {
		r.loaded.Request, r.loaded.Hit = r.work.Name, r.work.Hit*e.opts.Namespace.Geometry.BlockTokens
		e.opts.Loaded(r.loaded)
	}
	e.leave(r, err)
}

// layer records that the cached KV of layer l is in device memory.
func (r *running) layer(l int) {
	r.loaded.Last = time.Since(r.begun)
	if l == 0 {
		r.loaded.First = r.loaded.Last
	}
}

// FlipBit flips one bit at a random offset of the engine's buffer, as a memory fault would. The
// offset may be in memory that holds no block.
func (e *Engine) FlipBit() {
	b := e.manager.Buffer()
	b[rand.IntN(len(b))] ^= 1 << rand.IntN(8)
}

// spend waits for d, the emulated compute time, and adds it to busy.
func (e *Engine) spend(d time.Duration) {
	if d <= 0 {
		return
	}
	e.busy.Add(int64(d))
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-e.ctx.Done():
	}
}

// compute emulates the computation of one layer. It compares the layer's KV on the device,
// both hit blocks and earlier parts, with the expected bytes, and fills in the KV of the
// missed blocks that this part completes.
func (e *Engine) compute(m member, layer int) error {
	bt := e.opts.Namespace.Geometry.BlockTokens
	miss := make(map[int]bool)
	for _, b := range m.prefill.Miss() {
		miss[b] = true
	}
	for b := range e.blocksOf(m.work.Prompt) {
		page, want := e.page(layer, m.pages[b]), e.content(m.work, m.work.Prompt, b, layer)
		end := min((b+1)*bt, m.work.Prompt)
		switch {
		case end > m.item.Cached+m.item.Compute:
			return nil // this block and all later ones belong to a later part
		case miss[b] && (m.computed == 0 || end > m.item.Cached):
			want.Fill(page)
			continue
		}
		if err := e.compare(m.work, b, layer, page, want); err != nil {
			return err
		}
	}
	return nil
}

// onDevice is the value of BlockError.Where for wrong bytes that compare finds, after all checksums
// have passed.
const onDevice = "emulated device"

// compare returns an error if the bytes of page differ from want. It adds the size of page to
// checked.
func (e *Engine) compare(w work, block, layer int, page []byte, want content.Content) error {
	e.checked.Add(uint64(len(page)))
	if at := want.Differs(page); at >= 0 {
		e.wrong.Add(1)
		e.log.Error("device memory has wrong bytes", "engine", e.opts.Name, "request", w.Name, "block", block, "layer", layer, "byte", at)
		return &traffic.BlockError{Block: block, Layer: layer, Where: onDevice}
	}
	return nil
}

// page returns the device memory of one block in one layer.
func (e *Engine) page(layer int, page uint32) []byte {
	lb := uint64(e.opts.Namespace.Geometry.LayerBytes(0))
	off := e.bases[layer%len(e.bases)] + uint64(page)*lb
	return e.device[off : off+lb]
}

// content returns the expected bytes of a layer of a block when the request has KV of the given
// number of tokens. A last block that is not full has no id in storage, so its bytes are derived
// from the request.
func (e *Engine) content(w work, tokens, block, layer int) content.Content {
	var id kv.BlockID
	if (block+1)*e.opts.Namespace.Geometry.BlockTokens <= tokens && block < len(w.IDs) {
		id = w.IDs[block]
	} else {
		copy(id[:], w.Name)
		id[15] ^= byte(block)
	}
	return content.Of(id, w.Epoch).From(int64(layer) * e.opts.Namespace.Geometry.LayerBytes(0))
}
