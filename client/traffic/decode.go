package traffic

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// DecodeJob is a request on its decode engine.
type DecodeJob struct {
	Request string
	// IDs are the chained ids of the prompt's full blocks under Epoch. The first Hit blocks are
	// read from storage; the others are stored when they have arrived from the prefill engine.
	IDs   []kv.BlockID
	Epoch kv.Epoch
	// Blocks, Hit, Parts, Stopped, Progress are as in PrefillJob. Pages are the device pages
	// of the blocks, one in each page table (Device.Tables) for each of Blocks.
	Blocks, Hit int
	Parts       []Part
	Pages       []uint32
	// Resident is the number of leading blocks whose KV under Epoch is in their Pages already, in every
	// layer without recurrent state; the job does not verify it. The blocks of the cached prefix among them are not sent to this
	// engine, and their pages do not change, so they may be pages of other requests too.
	Resident int
	Stopped  func(Stop)
	Progress func(Progress)
	// After is nil, or a mark of Options.Copier: nothing is written to Pages before it. It is not
	// closed before the job has ended.
	After copier.Mark
	// Peer is the prefill engine's manager.
	Peer Peer
	// NoPersist disables storing the prompt's new blocks.
	NoPersist bool
}

// Decode is a running DecodeJob.
type Decode struct {
	transfer
	job  DecodeJob
	buf  arena.Buffer
	sums sumTable
	// resident is the number of leading blocks whose pages do not change.
	resident int

	// The fields below are guarded by transfer.mu.

	have []bool // for each block of the cached prefix: it was read from storage into the DE buffer
	// reads are the storage reads that are writing to the buffer. While a block is read, the
	// prefill side must not write other bytes to it, because the result would depend on the order
	// of the writes.
	reads  []*localRead
	sends  incoming
	accept *pb.TrafficAccept
	// pages has the pages of the PE by page table.
	pages  map[uint32]*pageList
	device rdma.Desc
	table  rdma.Desc
	credit int
	// returned is the number of messages that the prefill engine (PE) had no room to keep and so
	// returned.
	returned int
	// ready is set when the whole prompt is in device memory and verified.
	ready bool
}

// localRead is a storage read of the decode side. stop ends the read early.
type localRead struct {
	part Part
	stop func()
}

// Decode begins a job: it allocates the job's memory, offers this memory to the prefill side, and
// starts to read the job's parts of the prefix. It keeps none of the job's slices. ctx bounds the
// whole job. Call Finish or Cancel at the end.
func (m *Manager) Decode(ctx context.Context, job DecodeJob) (*Decode, error) {
	if err := m.checkDecode(&job); err != nil {
		return nil, err
	}
	job.IDs, job.Parts, job.Pages = slices.Clone(job.IDs), slices.Clone(job.Parts), slices.Clone(job.Pages)
	d := &Decode{job: job, have: make([]bool, job.Hit), pages: make(map[uint32]*pageList)}
	if job.Hit < job.Blocks { // if all blocks are cached, none is new, and this engine may need all of them
		d.resident = min(job.Resident, job.Hit)
	}
	d.sends.sent, d.sends.again = make([]bool, job.Blocks), make([]bool, job.Blocks)
	d.firstImm, d.imms = m.imm(1), 1
	if err := d.open(ctx, m, job.Request, "prefill side", d); err != nil {
		return nil, err
	}
	if err := d.here(d.begin); err != nil {
		return nil, d.close(err)
	}
	return d, nil
}

// checkDecode returns an error for a job whose fields contradict each other.
func (m *Manager) checkDecode(j *DecodeJob) error {
	if err := m.checkLengths(j.Blocks, j.Hit, len(j.IDs)); err != nil {
		return fmt.Errorf("traffic: request %q: %w", j.Request, err)
	}
	if len(j.Pages) != j.Blocks*m.tables {
		return fmt.Errorf("traffic: request %q: %d device pages for %d blocks in %d page tables: %w", j.Request, len(j.Pages), j.Blocks, m.tables, ErrJob)
	}
	if j.Resident < 0 || j.Resident > j.Blocks {
		return fmt.Errorf("traffic: request %q: %d of %d blocks are resident: %w", j.Request, j.Resident, j.Blocks, ErrJob)
	}
	if len(m.opts.Device.Bases) != m.geo.layers {
		return fmt.Errorf("traffic: request %q: a decode engine keeps all %d layers; its device memory has bases for %d: %w", j.Request, m.geo.layers, len(m.opts.Device.Bases), ErrJob)
	}
	if len(j.IDs) > j.Blocks {
		return fmt.Errorf("traffic: request %q: %d block ids for %d blocks: %w", j.Request, len(j.IDs), j.Blocks, ErrJob)
	}
	if err := m.checkPages(j.Pages); err != nil {
		return fmt.Errorf("traffic: request %q: %w", j.Request, err)
	}
	for l := range m.geo.layers {
		// The model may compute the hit blocks again, so this engine may need the pages of all blocks.
		for b := max(m.geo.firstSent(l, j.Hit, j.Blocks, true), 0); b < j.Blocks; b++ {
			if m.page(j.Pages, l, b) == NoPage {
				return fmt.Errorf("traffic: request %q: block %d of %d has no device page in layer %d: %w", j.Request, b, j.Blocks, l, ErrJob)
			}
		}
	}
	return checkParts(j.Request, j.Parts, j.Hit)
}

// begin allocates the job's memory, connects to the prefill side and offers the memory.
func (d *Decode) begin() error {
	g := d.m.geo
	blocks := uint64(d.job.Blocks)
	size := blocks*g.fullBytes + tableBytes(g.layers, d.job.Blocks)
	var err error
	if d.buf, err = d.alloc(size); err != nil {
		return err
	}
	d.sums = tableIn(d.buf, blocks*g.fullBytes, g.layers, d.job.Blocks)
	peer, err := d.m.opts.Compute.Connect(d.ctx, d.job.Peer.Addr, d.job.Peer.Token)
	if err != nil {
		return fmt.Errorf("traffic: request %q: prefill side: %w", d.request, err)
	}
	if err := d.bind(peer); err != nil {
		return err
	}
	window, err := d.window(d.m.buffer.region, uint64(d.buf.Offset()), size)
	if err != nil {
		return err
	}
	// Expect the immediates before the PE can write: an engine keeps only a bounded
	// number of immediates without an expectation.
	landed := rdma.NewFlag()
	x, err := d.m.opts.Compute.ExpectImm(rdma.Expect{Imm: d.firstImm, Count: uint32(2 * g.layers), From: []rdma.EngineID{peer}, Done: landed.Set})
	if err != nil {
		return fmt.Errorf("traffic: request %q: %w", d.request, err)
	}
	if !d.run(func() error {
		defer x.Cancel()
		return d.assemble(landed)
	}) {
		x.Cancel()
	}
	offer := &pb.TrafficOffer{Window: window, GeometryDigest: g.digest, Blocks: uint32(d.job.Blocks), HitBlocks: uint32(d.job.Hit), Imm: d.firstImm, ResidentBlocks: uint32(d.resident)}
	if err := d.sendMessage(&pb.TrafficMessage{Body: &pb.TrafficMessage_Offer{Offer: offer}}); err != nil {
		return err
	}
	for _, part := range d.job.Parts {
		d.Read(part)
	}
	d.run(d.push)
	for _, e := range d.m.takeEarly(d.request) {
		d.message(e.from, e.m)
	}
	return nil
}

// Read makes the decode engine read a range of hit blocks (blocks of the cached prefix) from
// storage. No block of the range may be in the buffer of either engine, and neither engine may be
// reading a block of the range.
func (d *Decode) Read(part Part) {
	d.run(func() error {
		if part.From < 0 || part.To > d.job.Hit || part.Len() <= 0 {
			return fmt.Errorf("traffic: request %q: part [%d, %d) of %d cached blocks: %w", d.request, part.From, part.To, d.job.Hit, ErrJob)
		}
		ctx, after := d.reading()
		defer after()
		read := &localRead{part, after}
		if !d.beginRead(read) {
			return nil // the prefill side has read the part
		}
		have, sums, stop, err := d.load(ctx, chain{d.job.IDs, d.job.Epoch}, d.job.Hit, part, d.buf, uint64(part.From)*d.m.geo.fullBytes, d.job.Progress)
		d.endRead(read, have, sums)
		if err != nil {
			return err
		}
		if have.Len() > 0 {
			if err := d.sendMessage(&pb.TrafficMessage{Body: &pb.TrafficMessage_Held{Held: &pb.TrafficHeld{From: uint32(have.From), To: uint32(have.To)}}}); err != nil {
				return err
			}
		}
		if stop != nil {
			if d.job.Stopped != nil {
				d.job.Stopped(*stop)
			}
		} else if d.job.Progress != nil {
			d.job.Progress(Progress{part, part.To, d.m.geo.PartBytes(part.From, part.To, d.job.Hit)})
		}
		return nil
	})
}

// beginRead adds a storage read to reads. If the prefill side sends a block of the read's part,
// beginRead adds nothing and returns false.
func (d *Decode) beginRead(read *localRead) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if slices.Contains(d.sends.sent[read.part.From:read.part.To], true) {
		return false
	}
	d.reads = append(d.reads, read)
	return true
}

// endRead removes a read from reads and marks the blocks of have, which the read has loaded. It
// also sets their checksums, except for blocks that the prefill side sends: the prefill side writes
// the checksums of these blocks itself.
func (d *Decode) endRead(read *localRead, have Part, sums [][]uint64) {
	d.update(func() {
		d.reads = slices.DeleteFunc(d.reads, func(r *localRead) bool { return r == read })
		for b := have.From; b < have.To; b++ {
			d.have[b] = true
			if !d.sends.sent[b] {
				d.sums.setBlock(b, sums[b-read.part.From], d.m.geo.places)
			}
		}
	})
}

// takeSends handles one of the messages that list which blocks the prefill side sends.
func (d *Decode) takeSends(m *pb.TrafficSends) error {
	lost, err := d.addSends(m)
	// The planner ordered both sides to read these parts, and the prefill side finished first.
	// Storage may still write to the buffer until the reads have ended; it writes the same bytes as
	// the prefill side sends.
	for _, read := range lost {
		read.stop()
	}
	return err
}

// addSends adds a message to the list of blocks that the prefill side sends. It returns the running
// reads that load such blocks.
func (d *Decode) addSends(m *pb.TrafficSends) (lost []*localRead, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.sends.take(m); err != nil {
		return nil, fmt.Errorf("traffic: request %q: the prefill side: %w", d.request, err)
	}
	for _, read := range d.reads {
		if from, to := read.part.From, read.part.To; slices.Contains(d.sends.again[from:to], true) {
			return nil, fmt.Errorf("traffic: request %q: the prefill side sends blocks of [%d, %d), which are being read here: %w", d.request, from, to, ErrRecompute)
		}
		if d.sentLocked(read) {
			lost = append(lost, read)
		}
	}
	d.changedLocked()
	return lost, nil
}

// takePages handles one of the messages that list the prefill side's device pages.
func (d *Decode) takePages(m *pb.TrafficPages) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := d.pages[m.Table]
	if list == nil && m.Table < kv.MaxLayers {
		list = newPageList(d.job.Blocks)
		d.pages[m.Table] = list
	}
	err := fmt.Errorf("pages of table %d; a model has at most %d: %w", m.Table, kv.MaxLayers, ErrJob)
	if list != nil {
		err = list.take(m)
	}
	if err != nil {
		return fmt.Errorf("traffic: request %q: the prefill side: %w", d.request, err)
	}
	d.changedLocked()
	return nil
}

// Ready waits until the whole prompt is in device memory and verified. Then decoding
// may begin.
func (d *Decode) Ready(ctx context.Context) error {
	return d.await(ctx, func() bool { return d.ready })
}

// Finish waits until the prompt is ready (Ready) and its new blocks are in storage, and then
// releases the job's memory. A decode engine calls it when decoding has ended, because the blocks
// are stored during decoding. Manager.Settle waits only for storage.
func (d *Decode) Finish(ctx context.Context) error {
	return d.close(d.Ready(ctx))
}

// Cancel ends the job. When it returns, no transfer of the job is running and no write
// of the prefill side can touch the buffer.
func (d *Decode) Cancel() {
	_ = d.close(fmt.Errorf("traffic: request %q: %w", d.request, ErrCancelled)) // close returns its argument
}

// message implements job.
func (d *Decode) message(from rdma.EngineID, m *pb.TrafficMessage) {
	err := d.accepts(from, m)
	if err == nil {
		switch b := m.Body.(type) {
		case *pb.TrafficMessage_Accept:
			err = d.takeAccept(b.Accept)
		case *pb.TrafficMessage_Pages:
			err = d.takePages(b.Pages)
		case *pb.TrafficMessage_Credit:
			d.update(func() { d.credit = max(d.credit, int(b.Credit.Layers)) })
		case *pb.TrafficMessage_Sends:
			err = d.takeSends(b.Sends)
		case *pb.TrafficMessage_Again:
			d.sendAgain(b.Again.Message)
		}
	}
	if err != nil {
		d.fail(err)
	}
}

// sendAgain repeats a message that the PE has returned, after a pause that grows with the number of
// returned messages.
func (d *Decode) sendAgain(raw []byte) {
	raw = bytes.Clone(raw)
	d.mu.Lock()
	pause := min(resendMin<<min(d.returned, 16), resendMax)
	d.returned++
	peer := d.peer
	d.mu.Unlock()
	d.run(func() error { return d.m.sendLater(d.tail, peer, raw, pause, d.messageSent) })
}

// takeAccept stores the windows of the prefill engine (PE) to which this decode engine (DE) writes
// the layers of the hit blocks that it has read.
func (d *Decode) takeAccept(a *pb.TrafficAccept) error {
	var device, table rdma.Desc
	err := device.UnmarshalBinary(a.Device)
	if err == nil {
		err = table.UnmarshalBinary(a.Sums)
	}
	if err == nil && len(a.Bases) == 0 {
		err = fmt.Errorf("device memory without a layer: %w", ErrJob)
	}
	if err == nil && a.Stride < d.m.geo.maxBytes {
		err = fmt.Errorf("device pages every %d bytes; a page has %d: %w", a.Stride, d.m.geo.maxBytes, ErrJob)
	}
	if err == nil && len(a.Tables) > 0 && (len(a.Tables) != d.m.geo.layers || slices.Max(a.Tables) >= kv.MaxLayers) {
		err = fmt.Errorf("page tables %v of %d layers: %w", a.Tables, d.m.geo.layers, ErrJob)
	}
	if err != nil {
		return fmt.Errorf("traffic: request %q: answer of the prefill side: %w", d.request, err)
	}
	d.update(func() { d.accept, d.device, d.table, d.credit = a, device, table, max(d.credit, int(a.Layers)) })
	return nil
}

// push sends the prefill engine (PE) the layers of the blocks that this decode engine has read.
// Before each layer it waits until the PE has granted credit for the layer.
func (d *Decode) push() error {
	// The PE needs from this engine exactly the blocks that are not in the PE's list of blocks to
	// send.
	known := func() bool {
		if d.accept == nil {
			return false
		}
		for l := range d.m.geo.layers {
			if list := d.pages[tableOf(d.accept, l)]; list == nil || list.left > 0 {
				return false
			}
		}
		return true
	}
	if err := d.await(d.ctx, func() bool { return d.sends.complete() && (known() || !slices.Contains(d.sends.sent, false)) }); err != nil {
		return err
	}
	d.mu.Lock()
	mine, a, device, table := d.mineLocked(), d.accept, d.device, d.table
	for _, b := range mine {
		if int(b) >= d.job.Hit || !d.have[b] {
			d.mu.Unlock()
			return fmt.Errorf("traffic: request %q: the prefill side wants block %d, which did not come here: %w", d.request, b, ErrJob)
		}
	}
	d.mu.Unlock()
	if len(mine) == 0 {
		return nil
	}
	g, base, all := &d.m.geo, uint64(d.buf.Offset()), mine
	for l := range g.layers {
		if mine = needed(all, g.first(l, d.job.Hit)); len(mine) == 0 {
			continue
		}
		pages, list := make([]uint32, len(mine)), d.pages[tableOf(a, l)]
		for i, b := range mine {
			pages[i] = list.pages[b]
		}
		if err := d.await(d.ctx, func() bool { return l < d.credit }); err != nil {
			return err
		}
		row := d.sums.at(l)
		b := newBatch(2)
		imm := rdma.ImmOf(a.Imm + uint32(l))
		err := d.writePaged(d.ctx, rdma.PagedWrite{
			PageLen: g.bytes[l], Src: d.m.buffer.region, SrcPages: rdma.Pages{Indices: mine, Stride: g.fullBytes, Offset: base + g.at(l)},
			Dst: device, DstPages: rdma.Pages{Indices: pages, Stride: a.Stride, Offset: a.Bases[l%len(a.Bases)]},
			Imm: imm, Done: b.done,
		})
		if err == nil {
			err = d.writePaged(d.ctx, rdma.PagedWrite{
				PageLen: sumBytes, Src: d.m.buffer.region, SrcPages: rdma.Pages{Indices: mine, Stride: sumBytes, Offset: base + uint64(d.job.Blocks)*g.fullBytes + row},
				Dst: table, DstPages: rdma.Pages{Indices: mine, Stride: sumBytes, Offset: row},
				Imm: imm, Done: b.done,
			})
		}
		if err != nil {
			return fmt.Errorf("traffic: request %q: layer %d to the prefill side: %w", d.request, l, err)
		}
		d.run(func() error {
			if err := b.wait(d.ctx); err != nil {
				return fmt.Errorf("traffic: request %q: layer %d to the prefill side: %w", d.request, l, err)
			}
			return nil
		})
	}
	return nil
}

// tableOf returns the page table of a layer of the prefill engine.
func tableOf(a *pb.TrafficAccept, layer int) uint32 {
	if len(a.Tables) == 0 {
		return 0
	}
	return a.Tables[layer]
}

// first returns the first block that a layer needs. If the prefill side has computed hit blocks
// again, it has computed all of them, for every layer. The list of the prefill side must be complete.
func (d *Decode) first(layer int) int {
	return d.m.geo.firstSent(layer, d.job.Hit, d.job.Blocks, d.sends.anyAgain)
}

// sentLocked reports whether the prefill side sends any block that read loads.
func (d *Decode) sentLocked(read *localRead) bool {
	return slices.Contains(d.sends.sent[read.part.From:read.part.To], true)
}

// mineLocked returns the hit blocks that the prefill engine does not send, so this decode engine
// has to send them.
func (d *Decode) mineLocked() []uint32 {
	var mine []uint32
	for b, s := range d.sends.sent {
		if !s {
			mine = append(mine, uint32(b))
		}
	}
	return mine
}

// assemble waits for the whole prompt, verifies it, stores the new blocks and copies
// the prompt to device memory. landed is set when every write of the PE has arrived.
func (d *Decode) assemble(landed *rdma.Flag) error {
	if err := d.await(d.ctx, d.sends.complete); err != nil {
		return err
	}
	g := &d.m.geo
	// Wait until no storage read is writing a block that the prefill side sends.
	if err := d.await(d.ctx, func() bool { return !slices.ContainsFunc(d.reads, d.sentLocked) }); err != nil {
		return err
	}
	// No lock is needed: a complete list does not change.
	if d.sends.any {
		if err := landed.Wait(d.ctx); err != nil {
			return fmt.Errorf("traffic: request %q: the prompt's KV from the prefill side: %w", d.request, err)
		}
	}
	base := uint64(d.buf.Offset())
	// The buffer has no resident block, unless the model has computed the block again.
	arrived := d.resident
	if i := slices.Index(d.sends.again[:d.resident], true); i >= 0 {
		arrived = i
	}
	all := make([]uint32, d.job.Blocks)
	for b := range all {
		all[b] = uint32(b)
	}
	for l := range g.layers {
		at := func(b uint32) uint64 { return base + uint64(b)*g.fullBytes + g.at(l) }
		check := d.m.checkHop
		if d.m.opts.deviceMemory() == nil {
			check = d.m.checkLast
		}
		if err := check(d.sums, d.m.buffer.Bytes(), l, needed(all, max(d.first(l), arrived)), at, "decode buffer"); err != nil {
			return err
		}
	}
	d.unwatch() // the prompt is complete, so this job does not fail if the PE dies
	persisted := d.persist()
	err := d.toDevice(base, all)
	if err != nil {
		d.fail(err) // close then ends the write to storage
	} else {
		d.update(func() { d.ready = true })
	}
	// Until persisted is closed, the write to storage reads the buffer.
	<-persisted
	return err
}

// toDevice copies every layer of the prompt to device memory and verifies it there. It leaves out
// the resident blocks, and the blocks of the cached prefix that are outside of a layer's window.
func (d *Decode) toDevice(base uint64, all []uint32) error {
	g, dev := &d.m.geo, &d.m.opts.Device
	for l := range g.layers {
		blocks := needed(all, max(d.first(l), d.resident))
		spans := make([]copier.Span, len(blocks))
		for i, b := range blocks {
			spans[i] = copier.Span{
				Src: base + uint64(b)*g.fullBytes + g.at(l), Dst: dev.offset(l, d.m.page(d.job.Pages, l, int(b))), Len: g.bytes[l],
			}
		}
		if err := d.m.toDevice(d.ctx, spans, d.job.After); err != nil {
			return fmt.Errorf("traffic: request %q: copy of layer %d to the device: %w", d.request, l, err)
		}
		mem := d.m.opts.deviceMemory()
		if mem == nil {
			continue // assemble has verified the blocks in the DE buffer
		}
		offset := func(b uint32) uint64 { return dev.offset(l, d.m.page(d.job.Pages, l, int(b))) }
		if err := d.m.checkLast(d.sums, mem, l, blocks, offset, "decode device"); err != nil {
			return err
		}
	}
	return nil
}

var _ job = (*Decode)(nil)
