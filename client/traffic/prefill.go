package traffic

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// PrefillJob is a request on its prefill engine.
type PrefillJob struct {
	Request string
	// IDs are the chained ids of the cached prefix under Epoch: at least Hit ids.
	IDs   []kv.BlockID
	Epoch kv.Epoch
	// Blocks is the length of the whole prompt; the last block may be partly filled.
	// The first Hit blocks are cached.
	Blocks, Hit int
	// Parts are the ranges of hit blocks that the prefill side reads. The decode side reads the
	// other hit blocks, or they are passed to Read or Recompute later.
	Parts []Part
	// Pages are the device pages of the first blocks, one in each page table (Device.Tables) for each
	// block. AddPages adds the pages of the other blocks: an engine may allocate the pages of the hit only when storage has been
	// read (Loaded), and the pages of a chunk only when the chunk begins.
	Pages []uint32
	// After is nil, or a mark for Pages as in AddPagesAfter.
	After copier.Mark
	// Stopped, if set, is called when a read of this engine has ended before the end of its part.
	// It must not block.
	Stopped func(Stop)
	// Progress, if set, is called while a part is read and when it is complete, from
	// goroutines of the transfer engine. It must not block.
	Progress func(Progress)
}

// source is the place from which a hit block comes.
type source uint8

const (
	unknown  source = iota // in no buffer yet
	here                   // in the PE buffer
	there                  // in the DE buffer
	computed               // the model computes it again
)

// Prefill is a running PrefillJob.
type Prefill struct {
	transfer
	job  PrefillJob
	sums sumTable
	// sumsAt is the table's offset in the buffer's region.
	sumsAt uint64
	// stage is the staging memory for device memory that the compute NIC cannot reach. It is nil if
	// the NIC reaches device memory, and before begun is set.
	stage *staging

	// The fields below are guarded by transfer.mu.

	// begun is set once the job has its memory. Until then, parts collects the ranges to read.
	begun  bool
	parts  []Part
	from   []source // of each hit block
	at     []uint64 // offset in the buffer's region of each hit block that is in the PE buffer
	offer  *pb.TrafficOffer
	decode rdma.Desc
	// sends are the blocks that the decode engine (DE) does not have and that this prefill engine
	// sends. It is set once the sources of all hit blocks are final (sealedLocked).
	sends    []uint32
	in, sent []bool // by layer
	// pages are the device pages of the first blocks. leaves has, by layer, the state of the
	// transfer to the DE.
	pages  []uint32
	leaves []leave
	// after is nil, or the last mark of the pages: copies to the device begin after it.
	after copier.Mark
	// passed is the number of layers, counted from layer 0, that have been sent. The device pages
	// of these layers may be used again.
	passed int
}

// Prefill begins a job. It reads the job's parts once the decode side has offered its
// memory. It keeps none of the job's slices. ctx bounds the whole job. Call Finish or Cancel at the
// end.
func (m *Manager) Prefill(ctx context.Context, job PrefillJob) (*Prefill, error) {
	if err := m.checkPrefill(&job); err != nil {
		return nil, err
	}
	job.IDs, job.Parts = slices.Clone(job.IDs), slices.Clone(job.Parts)
	p := &Prefill{job: job, parts: job.Parts, from: make([]source, job.Hit), at: make([]uint64, job.Hit), in: make([]bool, m.geo.layers), sent: make([]bool, m.geo.layers), pages: slices.Clone(job.Pages), after: job.After, leaves: make([]leave, m.geo.layers)}
	p.firstImm, p.imms = m.imm(m.geo.layers), m.geo.layers
	if err := p.open(ctx, m, job.Request, "decode side", p); err != nil {
		return nil, err
	}
	if size := tableBytes(m.geo.layers, job.Blocks) + m.stageBytes(job.Blocks); size > uint64(m.buffer.Stats().SizeBytes) {
		return nil, p.close(fmt.Errorf("traffic: request %q: %d bytes for the sums and the staging of %d blocks; the buffer has %d: %w", job.Request, size, job.Blocks, m.buffer.Stats().SizeBytes, ErrJob))
	}
	p.run(p.begin)
	p.run(p.feed)
	for _, e := range m.takeEarly(job.Request) {
		p.message(e.from, e.m)
	}
	return p, nil
}

// checkPrefill returns an error for a job whose fields contradict each other.
func (m *Manager) checkPrefill(j *PrefillJob) error {
	if err := m.checkLengths(j.Blocks, j.Hit, len(j.IDs)); err != nil {
		return fmt.Errorf("traffic: request %q: %w", j.Request, err)
	}
	if n := len(j.Pages); n%m.tables != 0 || n/m.tables > j.Blocks {
		return fmt.Errorf("traffic: request %q: %d device pages for %d blocks in %d page tables: %w", j.Request, n, j.Blocks, m.tables, ErrJob)
	}
	if err := m.checkPages(j.Pages); err != nil {
		return fmt.Errorf("traffic: request %q: %w", j.Request, err)
	}
	return checkParts(j.Request, j.Parts, j.Hit)
}

// checkLengths returns an error for lengths that contradict each other.
func (m *Manager) checkLengths(blocks, hit, ids int) error {
	switch {
	case blocks < 1 || blocks > MaxBlocks:
		return fmt.Errorf("a prompt of %d blocks; it must have 1 to %d: %w", blocks, MaxBlocks, ErrJob)
	case hit < 0 || hit > blocks:
		return fmt.Errorf("%d cached blocks of %d: %w", hit, blocks, ErrJob)
	case ids < hit:
		return fmt.Errorf("%d block ids for %d cached blocks: %w", ids, hit, ErrJob)
	}
	return nil
}

// checkPages returns an error for pages that lie outside of device memory. pages begin with the first
// page table.
func (m *Manager) checkPages(pages []uint32) error {
	d := &m.opts.Device
	for i, page := range pages {
		if page == NoPage && m.geo.partial {
			continue
		}
		if d.Pages > 0 && page >= uint32(d.Pages) {
			return fmt.Errorf("page %d; each layer has %d: %w", page, d.Pages, ErrJob)
		}
		for l := range d.Bases {
			if d.table(l) != i%m.tables {
				continue
			}
			n := m.geo.maxBytes
			if len(d.Bases) == m.geo.layers {
				n = m.geo.bytes[l]
			}
			if off := d.offset(l, page); off+n > m.opts.deviceBytes() {
				return fmt.Errorf("page %d of layer %d ends at %d; device memory has %d bytes: %w", page, l, off+n, m.opts.deviceBytes(), ErrJob)
			}
		}
	}
	return nil
}

// checkParts returns an error for parts that overlap or are not within the hit blocks.
func checkParts(request string, parts []Part, hit int) error {
	sorted := slices.Clone(parts)
	slices.SortFunc(sorted, func(a, b Part) int { return a.From - b.From })
	end := 0
	for _, p := range sorted {
		if p.From < end || p.To <= p.From || p.To > hit {
			return fmt.Errorf("traffic: request %q: part [%d, %d) of %d cached blocks, after a part that ends at %d: %w", request, p.From, p.To, hit, end, ErrJob)
		}
		end = p.To
	}
	return nil
}

// begin allocates the job's memory and starts to read. It waits for the decode side's offer first,
// and allocates all memory in one piece. So a job that has memory here has memory on the decode
// side too and waits for no other memory: it always ends and releases its memory.
func (p *Prefill) begin() error {
	if err := p.await(p.ctx, func() bool { return p.offer != nil }); err != nil {
		return err
	}
	p.mu.Lock()
	parts := p.parts
	p.mu.Unlock()
	g := p.m.geo
	stageAt := tableBytes(g.layers, p.job.Blocks)
	at := stageAt + p.m.stageBytes(p.job.Blocks)
	size := at
	for _, part := range parts {
		size += uint64(part.Len()) * g.fullBytes
	}
	buf, err := p.alloc(size)
	if err != nil {
		return err
	}
	var late []Part
	p.update(func() {
		p.sums, p.sumsAt, p.begun = tableIn(buf, 0, g.layers, p.job.Blocks), uint64(buf.Offset()), true
		if p.m.staged() {
			p.stage = p.m.newStaging(uint64(buf.Offset())+stageAt, p.job.Blocks)
		}
		late = p.parts[len(parts):]
	})
	for _, part := range parts {
		base := at
		p.run(func() error { return p.load1(part, buf, base) })
		at += uint64(part.Len()) * g.fullBytes
	}
	for _, part := range late {
		p.run(func() error { return p.loadLate(part) })
	}
	return nil
}

// Read makes the prefill engine read a range of hit blocks (blocks of the cached prefix) from
// storage. No block of the range may be in the buffer of either engine, and neither engine may be
// reading a block of the range. If the buffer has no room for the range at once, Read calls Stopped
// with ErrBusy, because a job that has memory never waits for more memory.
func (p *Prefill) Read(part Part) {
	if part.From < 0 || part.To > p.job.Hit || part.Len() <= 0 {
		p.fail(fmt.Errorf("traffic: request %q: part [%d, %d) of %d cached blocks: %w", p.request, part.From, part.To, p.job.Hit, ErrJob))
		return
	}
	p.mu.Lock()
	begun := p.begun
	if !begun {
		p.parts = append(slices.Clip(p.parts), part)
	}
	p.mu.Unlock()
	if begun {
		p.run(func() error { return p.loadLate(part) })
	}
}

// loadLate reads one part into a separate allocation. If the buffer has no room, it
// calls Stopped with ErrBusy.
func (p *Prefill) loadLate(part Part) error {
	buf, err := p.tryAlloc(uint64(part.Len()) * p.m.geo.fullBytes)
	if errors.Is(err, ErrBusy) {
		if p.job.Stopped != nil {
			p.job.Stopped(Stop{Part: part, Upto: part.From, Err: err})
		}
		return nil
	}
	if err != nil {
		return err
	}
	return p.load1(part, buf, 0)
}

// load1 reads one part into buf, from offset base on.
func (p *Prefill) load1(part Part, buf arena.Buffer, base uint64) error {
	ctx, after := p.reading()
	defer after()
	have, sums, stop, err := p.load(ctx, chain{p.job.IDs, p.job.Epoch}, p.job.Hit, part, buf, base, p.job.Progress)
	if err != nil {
		return err
	}
	p.update(func() {
		for b := have.From; b < have.To; b++ {
			if p.from[b] == unknown {
				p.sums.setBlock(b, sums[b-part.From], p.m.geo.places)
				p.from[b] = here
				p.at[b] = uint64(buf.Offset()) + base + uint64(b-part.From)*p.m.geo.fullBytes
			}
		}
	})
	if stop != nil {
		if p.job.Stopped != nil {
			p.job.Stopped(*stop)
		}
	} else if p.job.Progress != nil {
		p.job.Progress(Progress{part, part.To, p.m.geo.PartBytes(part.From, part.To, p.job.Hit)})
	}
	return nil
}

// Recompute makes the model compute a range of hit blocks. From then on these blocks count as
// missed, even if they are in a buffer already. Once the hit blocks are loaded and have their
// device pages, the model may already have used a block of the range, and KV computed from it must
// not be kept. In that case the job fails with ErrRecompute, and the caller must begin a new job
// that does not count these blocks as hits. An engine with several jobs for a request, one for each
// rank, adds the pages only when all jobs are Loaded. So it can call Recompute on a Loaded job for
// blocks that another job lacks.
//
// If a layer group has a sliding window or recurrent state, the model computes all hit blocks. In that
// group's layers the block part.From needs KV or state that was not read, because it is before the end
// of the hit.
func (p *Prefill) Recompute(part Part) {
	if p.m.geo.partial && part.To > max(part.From, 0) && part.From < p.job.Hit {
		part = Part{0, p.job.Hit}
	}
	used := false
	p.update(func() {
		sealed := p.sealedLocked()
		for b := max(part.From, 0); b < min(part.To, p.job.Hit); b++ {
			if used = sealed && p.from[b] != computed; used {
				return
			}
			p.from[b] = computed
		}
	})
	if used {
		p.fail(fmt.Errorf("traffic: request %q: blocks [%d, %d): %w", p.request, part.From, part.To, ErrRecompute))
	}
}

// Miss returns the blocks that the model has to compute. Call it after Layer(0) has returned.
func (p *Prefill) Miss() []int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.missLocked()
}

func (p *Prefill) missLocked() []int {
	var miss []int
	for b, s := range p.from {
		if s == computed {
			miss = append(miss, b)
		}
	}
	for b := p.job.Hit; b < p.job.Blocks; b++ {
		miss = append(miss, b)
	}
	return miss
}

// Loaded waits until the decode side has offered its memory and every hit block is in a buffer or
// is to be recomputed. From then on the job waits only for its own transfers and its pages. An
// engine should add a job to a batch only after Loaded has returned nil. Then no job of the batch
// waits for storage, or for a decode engine whose buffer is full of jobs that wait for this engine.
func (p *Prefill) Loaded(ctx context.Context) error {
	return p.await(ctx, p.loadedLocked)
}

func (p *Prefill) loadedLocked() bool { return p.begun && !slices.Contains(p.from, unknown) }

// sealedLocked reports whether the sources of the hit blocks are final (the hit is sealed): all
// sources are known, and the blocks that come from a buffer have their device pages. Once true, it
// stays true.
func (p *Prefill) sealedLocked() bool {
	return p.loadedLocked() && len(p.pages) >= p.fromBuffersLocked()*p.m.tables
}

// fromBuffersLocked returns the number of leading hit blocks up to the last one that comes from a
// buffer. The model computes all hit blocks after it.
func (p *Prefill) fromBuffersLocked() int {
	end := p.job.Hit
	for end > 0 && p.from[end-1] == computed {
		end--
	}
	return end
}

// Layer waits until the KV of the cached prefix in a layer is in device memory and verified. The
// pages of blocks outside of the layer's window do not change.
func (p *Prefill) Layer(ctx context.Context, layer int) error {
	return p.await(ctx, func() bool { return p.in[layer] })
}

// AddPages adds the device pages of the next blocks, one in each page table for each block, after the
// pages of the job and of earlier calls. A page outside of device memory, or more pages than blocks,
// fails the job.
func (p *Prefill) AddPages(pages ...uint32) { p.AddPagesAfter(nil, pages...) }

// AddPagesAfter is AddPages for pages that the engine's stream may still use: nothing is written to
// them before the mark, which is of Options.Copier. It is not closed before the job has ended. The
// mark of a later call replaces it, so that mark must not be reached before it.
func (p *Prefill) AddPagesAfter(after copier.Mark, pages ...uint32) {
	err := p.m.checkPages(pages)
	p.update(func() {
		if n, tables := len(p.pages)+len(pages), p.m.tables; err == nil && (len(pages)%tables != 0 || n/tables > p.job.Blocks) {
			err = fmt.Errorf("%d device pages for %d blocks in %d page tables: %w", n, p.job.Blocks, tables, ErrJob)
		}
		if err == nil {
			p.pages = append(p.pages, pages...)
			if after != nil {
				p.after = after
			}
		}
	})
	if err != nil {
		p.fail(fmt.Errorf("traffic: request %q: %w", p.request, err))
	}
}

// Computed reports that the KV of a layer's missed blocks is in their pages. The PE
// then sends the DE all blocks of the layer that the DE does not have. The layer's
// pages must not change until Layer returns for layer + len(Device.Bases).
func (p *Prefill) Computed(layer int) { p.ComputedTo(layer, p.job.Blocks) }

// ComputedTo is like Computed, but only for the missed blocks before the given block. It is for a
// prompt that is computed in chunks: the PE sends these blocks while the model computes the layers
// and chunks that follow. Device memory must hold all layers, because each chunk reads the KV of
// the chunks before it. A block that is not full counts as computed with the last chunk.
func (p *Prefill) ComputedTo(layer, block int) { p.ComputedAfter(layer, block, nil) }

// ComputedAfter is ComputedTo for blocks that the engine's stream has still to compute: the copies
// from device memory wait, on the device, for the mark, and no thread of the engine does. The mark
// is of Options.SaveCopier, or of Options.Copier if that is nil, and it is not closed before the job
// has ended. It needs staged device memory that holds all layers.
func (p *Prefill) ComputedAfter(layer, block int, after copier.Mark) {
	var err error
	p.update(func() {
		switch {
		case layer < 0 || layer >= p.m.geo.layers || block < 0 || block > p.job.Blocks:
			err = fmt.Errorf("layer %d of %d is computed up to block %d of %d: %w", layer, p.m.geo.layers, block, p.job.Blocks, ErrJob)
		case block > len(p.pages)/p.m.tables:
			err = fmt.Errorf("layer %d is computed up to block %d, and the job has device pages of %d: %w", layer, block, len(p.pages)/p.m.tables, ErrJob)
		case block == p.job.Blocks && p.m.geo.state(layer) && p.m.page(p.pages, layer, block-1) == NoPage:
			err = fmt.Errorf("layer %d is computed, and the last block has no device page for its state: %w", layer, ErrJob)
		case block < p.job.Blocks && len(p.m.opts.Device.Bases) < p.m.geo.layers:
			err = fmt.Errorf("a chunk up to block %d of %d; device memory holds %d of %d layers: %w", block, p.job.Blocks, len(p.m.opts.Device.Bases), p.m.geo.layers, ErrJob)
		case after != nil && (!p.m.staged() || len(p.m.opts.Device.Bases) < p.m.geo.layers):
			err = fmt.Errorf("layer %d is computed after a mark; marks need staged device memory that holds all layers: %w", layer, ErrJob)
		}
	})
	if err != nil {
		p.fail(fmt.Errorf("traffic: request %q: %w", p.request, err))
		return
	}
	p.run(func() error { return p.forward(layer, block, after) })
}

// Finish waits until every layer has arrived on the decode side, and releases the job's
// memory.
func (p *Prefill) Finish(ctx context.Context) error {
	err := p.await(ctx, func() bool { return p.passed == p.m.geo.layers })
	return p.close(err)
}

// Cancel ends the job. When it returns, no transfer of the job is running and no write
// of the decode side can touch device memory or the buffer.
func (p *Prefill) Cancel() {
	_ = p.close(fmt.Errorf("traffic: request %q: %w", p.request, ErrCancelled)) // close returns its argument
}

// message implements job.
func (p *Prefill) message(from rdma.EngineID, m *pb.TrafficMessage) {
	if err := p.accepts(from, m); err != nil {
		p.fail(err)
		return
	}
	switch b := m.Body.(type) {
	case *pb.TrafficMessage_Offer:
		p.takeOffer(b.Offer)
	case *pb.TrafficMessage_Held:
		h := b.Held
		if h.From > h.To || int(h.To) > p.job.Hit {
			p.fail(fmt.Errorf("traffic: request %q: the decode side has [%d, %d) of %d cached blocks: %w", p.request, h.From, h.To, p.job.Hit, ErrJob))
			return
		}
		p.update(func() {
			for i := h.From; i < h.To; i++ {
				if p.from[i] == unknown {
					p.from[i] = there
				}
			}
		})
	}
}

// takeOffer stores the DE's offer, which has the window to which the PE writes the prompt's KV. A
// job gets only one offer, so goroutines that have waited for the offer read it without the lock.
func (p *Prefill) takeOffer(o *pb.TrafficOffer) {
	var d rdma.Desc
	err := d.UnmarshalBinary(o.Window)
	switch {
	case err != nil:
	case !bytes.Equal(o.GeometryDigest, p.m.geo.digest):
		err = fmt.Errorf("its geometry differs: %w", ErrJob)
	case int(o.Blocks) != p.job.Blocks || int(o.HitBlocks) != p.job.Hit:
		err = fmt.Errorf("its prompt has %d blocks, %d cached; here %d, %d: %w", o.Blocks, o.HitBlocks, p.job.Blocks, p.job.Hit, ErrJob)
	case o.ResidentBlocks > o.HitBlocks || o.ResidentBlocks > 0 && o.ResidentBlocks == o.Blocks:
		err = fmt.Errorf("%d of its %d cached blocks of %d are resident: %w", o.ResidentBlocks, o.HitBlocks, o.Blocks, ErrJob)
	}
	if err != nil {
		p.fail(fmt.Errorf("traffic: request %q: offer of the decode side: %w", p.request, err))
		return
	}
	p.update(func() {
		if p.offer != nil {
			err = fmt.Errorf("traffic: request %q: a second offer of the decode side: %w", p.request, ErrJob)
			return
		}
		p.offer, p.decode = o, d
	})
	if err != nil {
		p.fail(err)
	}
}

// feed loads the layers of the hit blocks to device memory, at most len(Device.Bases) layers at a
// time. It waits until the sources of the hit blocks are final (sealedLocked).
func (p *Prefill) feed() error {
	if err := p.await(p.ctx, p.sealedLocked); err != nil {
		return err
	}
	var mine, theirs, again, pages []uint32
	var after copier.Mark
	p.update(func() {
		after = p.after
		pages = slices.Clone(p.pages[:p.fromBuffersLocked()*p.m.tables])
		for b, s := range p.from {
			switch s {
			case here:
				mine = append(mine, uint32(b))
			case there:
				theirs = append(theirs, uint32(b))
			case computed:
				again = append(again, uint32(b))
			}
			if s != there {
				p.sends = append(p.sends, uint32(b))
			}
		}
		for b := p.job.Hit; b < p.job.Blocks; b++ {
			p.sends = append(p.sends, uint32(b))
		}
	})
	for _, s := range sendsOf(p.sends, again) {
		if err := p.sendMessage(&pb.TrafficMessage{Body: &pb.TrafficMessage_Sends{Sends: s}}); err != nil {
			return err
		}
	}
	depth := len(p.m.opts.Device.Bases)
	credit := depth // number of layers that the DE may write before it gets more credit
	if p.stage != nil {
		credit = min(depth, p.stage.slots)
	}
	if len(theirs) > 0 {
		if err := p.accept(theirs, pages, min(credit, p.m.geo.layers)); err != nil {
			return err
		}
	}
	for l := range p.m.geo.layers {
		free := func() bool {
			return l < p.passed+depth && (p.stage == nil || l < p.stage.slots || p.in[l-p.stage.slots])
		}
		if err := p.await(p.ctx, free); err != nil {
			return err
		}
		if len(theirs) > 0 && l >= credit {
			if err := p.sendMessage(&pb.TrafficMessage{Body: &pb.TrafficMessage_Credit{Credit: &pb.TrafficCredit{Layers: uint32(l + 1)}}}); err != nil {
				return err
			}
		}
		p.run(func() error { return p.land(l, pages, mine, theirs, after) })
	}
	return nil
}

// accept opens windows for the DE on the pages of hit blocks, or on their places in staging memory,
// and on the table of checksums, and sends the DE both windows. hit are the pages of the hit blocks
// that come from buffers.
func (p *Prefill) accept(blocks, hit []uint32, layers int) error {
	d := &p.m.opts.Device
	if p.stage != nil {
		d = p.stage.device(p.m.buffer.region)
		hit = make([]uint32, len(hit)/p.m.tables)
		for b := range hit {
			hit[b] = uint32(b)
		}
	}
	device, bases, firsts, err := p.openPages(d, blocks, hit)
	if err != nil {
		return err
	}
	table, err := p.window(p.m.buffer.region, p.sumsAt, tableBytes(p.m.geo.layers, p.job.Blocks))
	if err != nil {
		return err
	}
	var tables []uint32
	for _, t := range d.Tables {
		tables = append(tables, uint32(t))
	}
	a := &pb.TrafficAccept{Tables: tables, Device: device, Bases: bases, Stride: d.Stride, Sums: table, Imm: p.firstImm, Layers: uint32(layers)}
	if err := p.sendMessage(&pb.TrafficMessage{Body: &pb.TrafficMessage_Accept{Accept: a}}); err != nil {
		return err
	}
	for t, first := range firsts {
		pages := make([]uint32, p.job.Blocks)
		for _, b := range blocks {
			if page := hit[int(b)*len(firsts)+t]; page != NoPage {
				pages[b] = page - first
			}
		}
		for from := 0; from < len(pages); from += pagesPerMessage {
			m := &pb.TrafficPages{Table: uint32(t), First: uint32(from), Pages: pages[from:min(from+pagesPerMessage, len(pages))]}
			if err := p.sendMessage(&pb.TrafficMessage{Body: &pb.TrafficMessage_Pages{Pages: m}}); err != nil {
				return err
			}
		}
	}
	return nil
}

// openPages opens a window on exactly the pages of blocks, in each layer that d holds. hit has the pages
// of the hit blocks, in each page table of d. firsts has the lowest page of each table. bases has, for
// each layer, the offset of the lowest page of its table in the window.
func (p *Prefill) openPages(d *Device, blocks, hit []uint32) (window []byte, bases []uint64, firsts []uint32, _ error) {
	tables := d.tables()
	firsts = make([]uint32, tables)
	// Runs of consecutive pages [from, to), by page table. They are the same in each layer of a table.
	type run struct{ from, to uint32 }
	runs := make([][]run, tables)
	for t := range tables {
		var pages []uint32
		for _, b := range blocks {
			if page := hit[int(b)*tables+t]; page != NoPage {
				pages = append(pages, page)
			}
		}
		slices.Sort(pages)
		for _, page := range pages {
			if last := len(runs[t]) - 1; last >= 0 && runs[t][last].to == page {
				runs[t][last].to++
				continue
			}
			runs[t] = append(runs[t], run{page, page + 1})
		}
		if len(pages) > 0 {
			firsts[t] = pages[0]
		}
	}
	var spans []rdma.Span
	for l := range d.Bases {
		n := p.m.geo.maxBytes
		if len(d.Bases) == p.m.geo.layers {
			n = p.m.geo.bytes[l]
		}
		for _, r := range runs[d.table(l)] {
			if d.Stride == n {
				spans = append(spans, rdma.Span{Offset: d.offset(l, r.from), Len: uint64(r.to-r.from) * n})
				continue
			}
			for page := r.from; page < r.to; page++ {
				spans = append(spans, rdma.Span{Offset: d.offset(l, page), Len: n})
			}
		}
	}
	spans = joined(spans)
	for l := range d.Bases {
		var base uint64 // no block is sent for a layer whose table has none of the pages
		if len(runs[d.table(l)]) > 0 {
			base = d.offset(l, firsts[d.table(l)]) - spans[0].Offset
		}
		bases = append(bases, base)
	}
	p.mu.Lock()
	peer := p.peer
	p.mu.Unlock()
	w, err := d.Region.WindowSpans(spans, peer)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("traffic: request %q: %w", p.request, err)
	}
	window, err = p.opened(w)
	return window, bases, firsts, err
}

// joined returns the spans in order, and joins adjacent spans: the layers of a page may be
// adjacent.
func joined(spans []rdma.Span) []rdma.Span {
	slices.SortFunc(spans, func(a, b rdma.Span) int { return cmp.Compare(a.Offset, b.Offset) })
	out := spans[:0]
	for _, s := range spans {
		if last := len(out) - 1; last >= 0 && out[last].Offset+out[last].Len == s.Offset {
			out[last].Len += s.Len
			continue
		}
		out = append(out, s)
	}
	return out
}

// land copies one layer of the hit blocks from the PE buffer to device memory, waits until the
// other hit blocks of the layer have arrived from the DE, and verifies the layer. hit are the pages
// of the hit blocks that come from buffers. mine are the blocks from the PE buffer, theirs the
// blocks from the DE. Blocks outside of the layer's window, or before the last state, are left out. after is nil, or the mark
// before which the engine may use the pages.
func (p *Prefill) land(layer int, hit, mine, theirs []uint32, after copier.Mark) error {
	g, d := &p.m.geo, &p.m.opts.Device
	first := g.first(layer, p.job.Hit)
	mine, theirs = needed(mine, first), needed(theirs, first)
	for _, b := range slices.Concat(mine, theirs) {
		if p.m.page(hit, layer, int(b)) == NoPage {
			return fmt.Errorf("traffic: request %q: cached block %d has no device page in layer %d: %w", p.request, b, layer, ErrJob)
		}
	}
	landed := rdma.NewFlag()
	if len(theirs) > 0 {
		x, err := p.m.opts.Compute.ExpectImm(rdma.Expect{Imm: p.firstImm + uint32(layer), Count: 2, From: []rdma.EngineID{p.peer}, Done: landed.Set})
		if err != nil {
			return fmt.Errorf("traffic: request %q: %w", p.request, err)
		}
		defer x.Cancel()
	}
	if len(mine) > 0 {
		if err := p.toDevice(layer, hit, mine, func(b uint32) uint64 { return p.at[b] + g.at(layer) }, "prefill buffer", after); err != nil {
			return err
		}
	}
	if len(theirs) > 0 {
		if err := landed.Wait(p.ctx); err != nil {
			return fmt.Errorf("traffic: request %q: layer %d: %w", p.request, layer, err)
		}
		if p.stage != nil {
			if err := p.toDevice(layer, hit, theirs, func(b uint32) uint64 { return p.stage.offset(layer, b) }, "prefill staging", after); err != nil {
				return err
			}
		}
	}
	if mem := p.m.opts.deviceMemory(); mem != nil {
		offset := func(block uint32) uint64 { return d.offset(layer, p.m.page(hit, layer, int(block))) }
		for _, blocks := range [][]uint32{mine, theirs} {
			if err := p.m.checkLast(p.sums, mem, layer, blocks, offset, "prefill device"); err != nil {
				return err
			}
		}
	}
	p.update(func() { p.in[layer] = true })
	return nil
}

// toDevice copies blocks of a layer from the buffer to their device pages. from returns the offset
// of a block in the buffer. If the CPU cannot address device memory, toDevice verifies the blocks
// before it copies them; where names the memory of these blocks in errors.
func (p *Prefill) toDevice(layer int, hit, blocks []uint32, from func(block uint32) uint64, where string, after copier.Mark) error {
	g, d := p.m.geo, &p.m.opts.Device
	if p.m.opts.deviceMemory() == nil {
		if err := p.m.checkLast(p.sums, p.m.buffer.Bytes(), layer, blocks, from, where); err != nil {
			return err
		}
	}
	spans := make([]copier.Span, len(blocks))
	for i, b := range blocks {
		spans[i] = copier.Span{Src: from(b), Dst: d.offset(layer, p.m.page(hit, layer, int(b))), Len: g.bytes[layer]}
	}
	if err := p.m.toDevice(p.ctx, spans, after); err != nil {
		return fmt.Errorf("traffic: request %q: copy of layer %d to the device: %w", p.request, layer, err)
	}
	return nil
}

var _ job = (*Prefill)(nil)
