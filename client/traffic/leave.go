package traffic

import (
	"fmt"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// leave is the state of one layer that the prefill engine sends to the decode engine (DE).
type leave struct {
	// claimed is the number of blocks of Prefill.sends that goroutines have written to the DE or
	// are writing; writing is the number of these goroutines. last: the last block that the DE
	// needs is among the claimed blocks.
	claimed, writing int
	last             bool
}

// claim takes the blocks of a layer before the block upto that no other goroutine sends, so that the
// caller sends them to the decode engine (DE). It returns these blocks and their device pages. miss
// are the blocks among them that the model has computed. last is true if the last block that the DE
// needs is among the blocks, or if the DE needs none. ok is false if there is no block to send.
//
// A goroutine takes no block of a later call of ComputedAfter, whose mark it does not have.
func (p *Prefill) claim(layer, upto int) (blocks, pages, miss []uint32, last, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := &p.leaves[layer]
	last = upto == p.job.Blocks
	if l.last {
		return nil, nil, nil, false, false
	}
	// Blocks outside of the layer's window, or before the last state, are not sent, nor are blocks that the
	// DE has in device memory.
	first := p.m.geo.firstSent(layer, p.job.Hit, p.job.Blocks, slices.Contains(p.from, computed))
	l.claimed = max(l.claimed, len(p.sends)-len(needed(p.sends, max(first, p.residentLocked()))))
	end := len(p.sends)
	if !last {
		end, _ = slices.BinarySearch(p.sends, uint32(upto))
		end = min(end, len(p.sends)-1) // the last write of a layer has the immediate
		if end <= l.claimed {
			return nil, nil, nil, false, false
		}
	}
	blocks = p.sends[l.claimed:end]
	l.claimed, l.last = end, last
	l.writing++
	pages = make([]uint32, len(blocks))
	for i, b := range blocks {
		pages[i] = p.m.page(p.pages, layer, int(b))
		if int(b) >= p.job.Hit || p.from[b] == computed {
			miss = append(miss, b)
		}
	}
	return blocks, pages, miss, last, true
}

// residentLocked returns the number of leading blocks that the DE has in device memory and that are not
// sent. A block that the model has computed again is sent, because the DE stores it.
func (p *Prefill) residentLocked() int {
	n := int(p.offer.ResidentBlocks)
	if i := slices.Index(p.from[:n], computed); i >= 0 {
		return i
	}
	return n
}

// forward waits until the hit blocks of a layer are in device memory. Then it sends the DE the
// blocks of the layer before the block upto that this prefill engine has read or computed and that
// no other call of forward sends (claim). after is nil, or the mark after which they are computed.
func (p *Prefill) forward(layer, upto int, after copier.Mark) error {
	err := p.await(p.ctx, func() bool { return p.in[layer] })
	if err != nil {
		return err
	}
	blocks, pages, miss, last, ok := p.claim(layer, upto)
	if !ok {
		return nil
	}
	switch {
	case len(blocks) > 0:
		err = p.depart(layer, blocks, pages, miss, last, after)
	case last && len(p.sends) > 0:
		err = p.sendNone(layer)
	}
	if err != nil {
		return err
	}
	var all bool
	p.update(func() {
		p.leaves[layer].writing--
		p.sent[layer] = p.sent[layer] || last
		for p.passed < p.m.geo.layers && p.sent[p.passed] {
			p.passed++
		}
		all = p.passed == p.m.geo.layers
	})
	if all {
		p.unwatch() // the DE has the whole prompt, so this job does not fail if the DE dies
	}
	return nil
}

// depart sends blocks of a layer, and their sums, to the DE. It computes the sums of miss, the
// blocks among them that the model has computed. The DE counts two immediates for each layer.
// Transfers arrive in any order. So the last blocks carry the immediates and are sent only when all
// other blocks have arrived.
func (p *Prefill) depart(layer int, blocks, pages, miss []uint32, last bool, after copier.Mark) error {
	g, d := &p.m.geo, &p.m.opts.Device
	others := func() error {
		if !last {
			return nil
		}
		return p.await(p.ctx, func() bool { return p.leaves[layer].writing == 1 })
	}
	src, mem := rdma.Pages{Indices: pages, Stride: d.Stride, Offset: d.offset(layer, 0)}, p.m.opts.deviceMemory()
	region, place := d.Region, func(i int) uint64 { return d.offset(layer, pages[i]) }
	if p.stage != nil {
		// Wait before this goroutine takes a slot of the staging memory: a goroutine that has a
		// slot must not wait for another goroutine of the layer.
		if err := others(); err != nil {
			return err
		}
		done, err := p.stage.leave(p.ctx, layer)
		if err != nil {
			return err
		}
		defer done()
		if err := p.fromDevice(layer, blocks, pages, after); err != nil {
			return fmt.Errorf("traffic: request %q: copy of layer %d from the device: %w", p.request, layer, err)
		}
		src, mem = rdma.Pages{Indices: blocks, Stride: p.stage.pageBytes, Offset: p.stage.offset(layer, 0)}, p.m.buffer.Bytes()
		region, place = p.m.buffer.region, func(i int) uint64 { return p.stage.offset(layer, blocks[i]) }
	}
	if mem == nil && len(miss) > 0 {
		return fmt.Errorf("traffic: request %q: computed KV in device memory that the CPU cannot address has no sums: %w", p.request, rdma.ErrUnsupported)
	}
	for i, b := range blocks {
		if len(miss) > 0 && miss[0] == b {
			off := place(i)
			p.sums.set(layer, int(b), xxh3.Hash(mem[off:off+g.bytes[layer]]))
			miss = miss[1:]
		}
	}
	if p.stage == nil {
		if err := others(); err != nil {
			return err
		}
	}
	if err := p.send(layer, region, src, blocks, last); err != nil {
		return fmt.Errorf("traffic: request %q: layer %d to the decode side: %w", p.request, layer, err)
	}
	return nil
}

// sendNone delivers the immediates of a layer of which the DE needs no block, after those of earlier
// writes of the layer.
func (p *Prefill) sendNone(layer int) error {
	if err := p.await(p.ctx, func() bool { return p.leaves[layer].writing == 1 }); err != nil {
		return err
	}
	b := newBatch(2)
	for range 2 {
		if err := p.scope.Write(p.ctx, rdma.Write{Src: p.m.buffer.region, Dst: p.decode, Imm: rdma.ImmOf(p.offer.Imm), Done: b.done}); err != nil {
			return fmt.Errorf("traffic: request %q: layer %d to the decode side: %w", p.request, layer, err)
		}
	}
	return b.wait(p.ctx)
}

// send writes blocks of a layer and their sums to the DE. The blocks are in the pages src of
// region.
func (p *Prefill) send(layer int, region rdma.Region, src rdma.Pages, blocks []uint32, last bool) error {
	g := &p.m.geo
	imm := rdma.Imm{}
	if last {
		imm = rdma.ImmOf(p.offer.Imm)
	}
	row := uint64(layer) * uint64(p.job.Blocks) * sumBytes
	b := newBatch(2)
	err := p.writePaged(p.ctx, rdma.PagedWrite{
		PageLen: g.bytes[layer], Src: region, SrcPages: src,
		Dst: p.decode, DstPages: rdma.Pages{Indices: blocks, Stride: g.fullBytes, Offset: g.at(layer)},
		Imm: imm, Done: b.done,
	})
	if err == nil {
		err = p.writePaged(p.ctx, rdma.PagedWrite{
			PageLen: sumBytes, Src: p.m.buffer.region, SrcPages: rdma.Pages{Indices: blocks, Stride: sumBytes, Offset: p.sumsAt + row},
			Dst: p.decode, DstPages: rdma.Pages{Indices: blocks, Stride: sumBytes, Offset: uint64(p.job.Blocks)*g.fullBytes + row},
			Imm: imm, Done: b.done,
		})
	}
	if err != nil {
		return err
	}
	return b.wait(p.ctx)
}
