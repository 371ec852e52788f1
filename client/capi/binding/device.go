package binding

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// slots is the number of slots of a lane. A batch uses two at a time: while the values of one slot
// are copied, the values of the other slot are transferred.
const slots = 8

// defaultStaging is the default of DeviceOptions.StagingBytes.
const defaultStaging = 256 << 20

// DeviceOptions are the options of RegisterDevice.
type DeviceOptions struct {
	// Device is the number of the device in the CUDA driver.
	Device int
	// StagingBytes is the size of the pinned host memory through which all values of this device pass.
	// The first registration of the device decides it. Default 256 MiB.
	StagingBytes uint64
	// Open opens a copier of the device. The Store closes it.
	Open func() (copier.DeviceCopier, error)
}

// device is a device of a store, whose memory the CPU and the transfer engine cannot access. Values
// pass through host memory, where their checksums are made and verified:
//
//	node ══► slot of loads ══► copier of loads ══► device memory
//	device memory ══► copier of saves ══► slot of saves ══► node
//
// Each lane has a stream of its own, so that a load does not wait for a save that waits for the
// engine.
type device struct {
	number       int
	mapped       []byte
	loads, saves lane
}

// lane is one direction.
type lane struct {
	copier copier.DeviceCopier
	// pinned and memory are the lane's half of the mapped memory, as the copier and as the transfer
	// engine have it.
	pinned copier.Memory
	memory *client.Memory
	// bytes is the size of a slot, and free has the offsets of the slots that are not in use.
	bytes uint64
	free  chan uint64
}

// devices are the open devices of a store by number.
type devices struct {
	mu   sync.Mutex
	open map[int]*device
}

// device returns the device of the options, which the first call opens.
func (s *Store) device(o DeviceOptions) (*device, error) {
	s.devices.mu.Lock()
	defer s.devices.mu.Unlock()
	if d := s.devices.open[o.Device]; d != nil {
		return d, nil
	}
	staging := cmp.Or(o.StagingBytes, defaultStaging)
	const grain = 2 * slots * sys.HugePageSize
	if staging > math.MaxInt64/2 {
		return nil, fmt.Errorf("%w: %d bytes of staging memory", ErrInvalid, staging)
	}
	staging = (staging + grain - 1) / grain * grain
	d := &device{number: o.Device}
	if err := s.openDevice(d, o, int(staging)); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: CUDA device %d: %w", ErrInvalid, o.Device, err), d.close())
	}
	if s.devices.open == nil {
		s.devices.open = make(map[int]*device)
	}
	s.devices.open[o.Device] = d
	return d, nil
}

func (s *Store) openDevice(d *device, o DeviceOptions, staging int) (err error) {
	for _, l := range []*lane{&d.loads, &d.saves} {
		if l.copier, err = o.Open(); err != nil {
			return err
		}
	}
	if d.mapped, err = sys.MapAnon(staging, false); err != nil {
		return err
	}
	half := staging / 2
	for i, l := range []*lane{&d.loads, &d.saves} {
		host := d.mapped[i*half : (i+1)*half : (i+1)*half]
		if l.pinned, err = l.copier.Register(host, rdma.RegisterOptions{}); err != nil {
			return err
		}
		if l.memory, err = s.client.Register(host); err != nil {
			return err
		}
		l.bytes, l.free = uint64(half/slots), make(chan uint64, slots)
		for k := range uint64(slots) {
			l.free <- k * l.bytes
		}
	}
	return nil
}

// close releases everything that openDevice has opened. No batch uses the device.
func (d *device) close() error {
	var errs []error
	for _, l := range []*lane{&d.loads, &d.saves} {
		if l.memory != nil {
			errs = append(errs, l.memory.Close(context.Background()))
		}
		if l.copier != nil {
			errs = append(errs, l.copier.Close()) // closes pinned too
		}
	}
	if d.mapped != nil {
		errs = append(errs, sys.Unmap(d.mapped))
	}
	return errors.Join(errs...)
}

// take returns a slot.
func (l *lane) take(ctx context.Context) (at uint64, err error) {
	select {
	case at = <-l.free:
		return at, nil
	default:
	}
	select {
	case at = <-l.free:
		return at, nil
	case <-ctx.Done():
		return 0, fmt.Errorf("the batch waited for staging memory: %w", ctx.Err())
	}
}

func (l *lane) give(at uint64) { l.free <- at }

// RegisterDevice registers memory of a CUDA device for values, as Register does for host memory.
func (s *Store) RegisterDevice(o DeviceOptions, addr, n uint64) (Handle, error) {
	if err := s.begin(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	if err := checkMemory(addr, n); err != nil {
		return 0, err
	}
	d, err := s.device(o)
	if err != nil {
		return 0, err
	}
	m := &Memory{store: s, device: d, addr: addr, end: addr + n}
	if m.loads, err = d.loads.copier.Import(addr, n); err != nil {
		return 0, err
	}
	if m.saves, err = d.saves.copier.Import(addr, n); err != nil {
		return 0, errors.Join(err, m.close(context.Background()))
	}
	return s.addMemory(m)
}

// CopyDevice copies n bytes between device memory at address and host memory, and waits for the copy.
func CopyDevice(open func() (copier.DeviceCopier, error), address, host, n uint64, toDevice bool) (err error) {
	for _, at := range []uint64{address, host} {
		if err := checkMemory(at, n); err != nil {
			return err
		}
	}
	c, err := open()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	device, err := c.Import(address, n)
	if err != nil {
		return err
	}
	pinned, err := c.Register(bytesAt(host, n), rdma.RegisterOptions{})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	b := copier.Batch{Src: device, Dst: pinned, Spans: []copier.Span{{Len: n}}}
	if toDevice {
		b.Src, b.Dst = pinned, device
	}
	return copier.Copy(context.Background(), c, b)
}

// span is a part of a piece in device memory.
type span struct {
	memory *Memory
	at, n  uint64
}

// placeOnDevice sets spans. All fragments of the batch are in memory of one device.
func (c *call) placeOnDevice(b *Batch, d *device) error {
	c.device = d
	c.spans = make([][]span, len(c.pieces))
	spans := make([]span, 0, len(b.Addresses))
	var last *Memory
	for i := range c.pieces {
		from, to, err := b.fragmentsOf(i)
		if err != nil {
			return err
		}
		first := len(spans)
		var total int64
		for f := from; f < to; f++ {
			addr, n := b.Addresses[f], b.Lengths[f]
			if err := c.checkFragment(i, f-from, addr, n); err != nil {
				return err
			}
			m, err := c.find(last, addr, n, false)
			switch {
			case err == nil && m.device != d, err != nil && b.AnyMemory:
				return errMixed(i, f-from)
			case err != nil:
				return fmt.Errorf("piece %d, fragment %d: %w; piece 0 begins on device %d, and the values of a batch are all in host memory, or all on one device", i, f-from, err, d.number)
			}
			last = m
			total += int64(n)
			if j := len(spans) - 1; j >= first && spans[j].memory == m && spans[j].at+spans[j].n == addr-m.addr {
				spans[j].n += n
			} else {
				spans = append(spans, span{m, addr - m.addr, n})
			}
		}
		if err := c.checkPiece(i, total); err != nil {
			return err
		}
		c.spans[i] = spans[first:len(spans):len(spans)]
	}
	if err := c.checkSpansApart(); err != nil {
		return err
	}
	return c.cut()
}

// checkSpansApart returns an error if pieces of a get share bytes of device memory: only one of them
// would be there afterwards.
func (c *call) checkSpansApart() error {
	if c.op != OpGet {
		return nil
	}
	type place struct {
		piece  int
		lo, hi uint64
	}
	var all []place
	for i, spans := range c.spans {
		for _, s := range spans {
			lo := s.memory.addr + s.at
			all = append(all, place{i, lo, lo + s.n})
		}
	}
	slices.SortFunc(all, func(a, b place) int { return cmp.Compare(a.lo, b.lo) })
	for k := 1; k < len(all); k++ {
		if a, b := all[k-1], all[k]; b.lo < a.hi {
			return invalid("pieces %d and %d share bytes, at address %#x", a.piece, b.piece, b.lo)
		}
	}
	return nil
}

func errMixed(piece, fragment int) error {
	return invalid("piece %d, fragment %d: it is not in the memory in which piece 0 begins; the values of a batch are all in host memory, or all on one device", piece, fragment)
}

// chunk is a part of a batch that has room in one slot: pieces of consecutive keys.
type chunk struct {
	first, end int // keys
	pieces     []int
}

// cut divides the pieces into chunks, in the order of their keys. All pieces of a key are in one chunk.
func (c *call) cut() error {
	order := make([]int, len(c.pieces))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(c.pieces[a].Block, c.pieces[b].Block) })
	room := c.lane().bytes
	var now chunk
	var used uint64
	for len(order) > 0 {
		key, n, bytes := c.pieces[order[0]].Block, 0, uint64(0)
		for ; n < len(order) && c.pieces[order[n]].Block == key; n++ {
			bytes += c.pieceBytes(order[n])
		}
		if bytes > room {
			return invalid("key %d has %d bytes in the batch, and the staging memory of device %d has slots of %d: set staging_bytes to %d or more at the first registration of the device",
				key, bytes, c.device.number, room, bytes*2*slots)
		}
		if used += bytes; used > room {
			c.chunks, now, used = append(c.chunks, now), chunk{}, bytes
		}
		if now.pieces == nil {
			now.first = key
		}
		now.end, now.pieces = key+1, append(now.pieces, order[:n]...)
		order = order[n:]
	}
	if now.pieces != nil {
		c.chunks = append(c.chunks, now)
	}
	return nil
}

func (c *call) pieceBytes(i int) (n uint64) {
	for _, s := range c.spans[i] {
		n += s.n
	}
	return n
}

// lane returns the lane of the call's direction.
func (c *call) lane() *lane {
	if c.op == OpGet {
		return &c.device.loads
	}
	return &c.device.saves
}

// mark records an event in the engine's stream, for which the copies of the call wait.
func (c *call) mark(stream uint64) (err error) {
	if c.device == nil {
		return invalid("a stream is for values in device memory")
	}
	c.after, err = c.lane().copier.Mark(stream)
	return err
}

// part returns the call of one chunk, whose values are in the slot at.
func (c *call) part(k chunk, at uint64) *call {
	p := &call{
		ns: c.ns, def: c.def, op: c.op, ids: c.ids, first: k.first, epochs: c.epochs,
		firstLayer: c.firstLayer, layers: c.layers, memory: c.lane().memory,
		pieces: make([]client.Piece, len(k.pieces)), results: make([]byte, len(k.pieces)),
	}
	for j, i := range k.pieces {
		p.pieces[j] = client.Piece{Block: c.pieces[i].Block, Group: c.pieces[i].Group, Offset: int64(at)}
		at += c.pieceBytes(i)
	}
	if c.def.Index == kv.IndexFlat {
		p.first, p.ids = 0, c.ids[k.first:k.end]
		if p.epochs != nil {
			p.epochs = c.epochs[k.first:k.end]
		}
		for j := range p.pieces {
			p.pieces[j].Block -= k.first
		}
	}
	return p
}

// take adds the result of a part. It reports whether later chunks of the batch are of use.
func (c *call) take(k chunk, p *call, r *Result, got Result) (more bool) {
	more = got.Err == nil
	for j, i := range k.pieces {
		c.results[i] = p.results[j]
		if ok := p.results[j] == KeyOK || p.results[j] == KeyExists; !ok && c.def.Index != kv.IndexFlat {
			more = false
		}
	}
	r.Bytes += got.Bytes
	r.Err = got.Err
	if r.Cut == client.CutComplete {
		r.Cut = got.Cut
	}
	return more
}

// copies starts the copies between the slot and the device memory of the pieces of a chunk that
// chosen accepts, all if it is nil. p is the chunk's part. done is called when the last copy has
// ended. copies waits only for places in the copier's queue.
func (c *call) copies(k chunk, p *call, chosen func(j int) bool, done func(error)) {
	l := c.lane()
	type batch struct {
		memory *Memory
		spans  []copier.Span
	}
	var batches []*batch
	open := make(map[*Memory]*batch)
	for j, i := range k.pieces {
		if chosen != nil && !chosen(j) {
			continue
		}
		at := uint64(p.pieces[j].Offset)
		for _, s := range c.spans[i] {
			b := open[s.memory]
			if b == nil || len(b.spans) == copier.MaxSpans {
				b = &batch{memory: s.memory}
				open[s.memory], batches = b, append(batches, b)
			}
			move := copier.Span{Src: at, Dst: s.at, Len: s.n}
			if c.op == OpPut {
				move.Src, move.Dst = move.Dst, move.Src
			}
			b.spans = append(b.spans, move)
			at += s.n
		}
	}
	var mu sync.Mutex // guards left and failed
	left := len(batches) + 1
	var failed error
	end := func(err error) {
		mu.Lock()
		failed = errors.Join(failed, err)
		left--
		last := left == 0
		mu.Unlock()
		if last {
			done(failed)
		}
	}
	for _, b := range batches {
		one := copier.Batch{Src: l.pinned, Dst: b.memory.loads, Spans: b.spans, Done: end, After: c.after}
		if c.op == OpPut {
			one.Src, one.Dst = b.memory.saves, l.pinned
		}
		// The context does not end: the copies before this one are in progress and make room for it.
		if err := l.copier.Submit(context.Background(), one); err != nil {
			end(err)
		}
	}
	end(nil)
}

// load performs a get into device memory. While the values of a chunk are copied to the device, the
// next chunk is read.
func (c *call) load(ctx context.Context, r *Result) {
	l := c.lane()
	var copying sync.WaitGroup
	var mu sync.Mutex // guards failed, and the results of chunks that are being copied
	var failed error
	for n, k := range c.chunks {
		at, err := l.take(ctx)
		if err != nil {
			r.Err = err
			break
		}
		p := c.part(k, at)
		got := p.run(ctx)
		mu.Lock()
		more := c.take(k, p, r, got)
		mu.Unlock()
		copying.Add(1)
		c.copies(k, p, func(j int) bool { return p.results[j] == KeyOK }, func(err error) {
			defer copying.Done()
			l.give(at)
			if err == nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			failed = errors.Join(failed, err)
			for j, i := range k.pieces {
				if p.results[j] == KeyOK {
					c.results[i] = KeyLost
				}
			}
		})
		if !more {
			c.skip(c.chunks[n+1:], got)
			break
		}
	}
	copying.Wait()
	if failed != nil {
		r.Err = errors.Join(r.Err, fmt.Errorf("values were not copied to device %d: %w", c.device.number, failed))
	}
}

// skip sets the results of the chunks after an incomplete one.
func (c *call) skip(chunks []chunk, got Result) {
	state := KeyMiss
	switch {
	case got.Err != nil:
	case got.Cut == client.CutNodeDown:
		state = KeyDown
	case got.Cut == client.CutBusy:
		state = KeyBusy
	}
	for _, k := range chunks {
		for _, i := range k.pieces {
			c.results[i] = state
		}
	}
}

// filled is a slot with the values of a chunk, and the chunk's part.
type filled struct {
	at   uint64
	part *call
	err  error
}

// fill copies a chunk from the device to a slot.
func (c *call) fill(ctx context.Context, k chunk) <-chan filled {
	out := make(chan filled, 1)
	go func() {
		at, err := c.lane().take(ctx)
		if err != nil {
			out <- filled{err: err}
			return
		}
		p := c.part(k, at)
		c.copies(k, p, nil, func(err error) {
			if err != nil {
				c.lane().give(at)
				err = fmt.Errorf("values were not copied from device %d: %w", c.device.number, err)
			}
			out <- filled{at, p, err}
		})
	}()
	return out
}

// save performs a put from device memory. While a chunk is written, the next one is copied from the
// device.
func (c *call) save(ctx context.Context, r *Result) {
	if len(c.chunks) == 0 {
		return
	}
	next := c.fill(ctx, c.chunks[0])
	for n, k := range c.chunks {
		now := <-next
		if now.err != nil {
			r.Err = now.err
			return
		}
		next = nil
		if n+1 < len(c.chunks) {
			next = c.fill(ctx, c.chunks[n+1])
		}
		got := now.part.run(ctx)
		c.lane().give(now.at)
		if c.take(k, now.part, r, got) {
			continue
		}
		if next != nil {
			if ahead := <-next; ahead.err == nil {
				c.lane().give(ahead.at)
			}
		}
		return
	}
}
