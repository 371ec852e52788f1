package emulate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/dualpath/batch"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/content"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// work is one request to an engine.
type work struct {
	*leader.Request
	// IDs are the ids of the full blocks of the prompt and the output, in order.
	IDs []kv.BlockID
}

// EngineOptions configures an Engine.
type EngineOptions struct {
	Name      string
	Model     Model
	Namespace kv.Namespace
	Store     *client.Store
	Compute   rdma.Engine
	// Copier copies KV between the buffer and "HBM". nil: the traffic manager's default. The caller
	// keeps ownership and closes the copier after the engine.
	Copier copier.Copier
	// BufferBytes is the size of the engine's KV buffer in host memory. DeviceBlocks is the number
	// of blocks that "HBM" holds, with Window layers of each (0: all layers).
	BufferBytes          int64
	DeviceBlocks, Window int
	// Loaded, if set, is called for each request that a prefill engine has computed. The function
	// must not block.
	Loaded func(Loaded)
	Logger *slog.Logger
}

// Loaded has the times at which the cached KV of a request reached the device memory of its prefill
// engine. Times count from the start of the request on that engine.
type Loaded struct {
	Request string `json:"request"`
	// Hit is the number of cached tokens.
	Hit int `json:"hit"`
	// First is the arrival time of the first layer, Last of the last layer.
	First time.Duration `json:"first"`
	Last  time.Duration `json:"last"`
}

// Counts are an engine's counters since its start.
type Counts struct {
	// Requests is the number of requests that succeeded. Failed is the number of failed requests.
	// CheckedBytes is the size of the KV in device memory that was compared with the expected bytes. WrongBlocks
	// is the number of blocks that differed. CaughtBlocks is the number of wrong blocks that a
	// checksum rejected before they reached the device.
	Requests, Failed, CheckedBytes, WrongBlocks, CaughtBlocks uint64
	// Busy is the emulated compute time of all prefill batches and decode steps. Batches
	// counts the prefill batches.
	Busy    time.Duration
	Batches uint64
	// ByEpoch is the number of successful requests by the epoch of the weights that served them.
	ByEpoch map[kv.Epoch]uint64
}

// Engine is one emulated engine.
type Engine struct {
	opts    EngineOptions
	manager *traffic.Manager
	// region is the registration of the device memory with the compute NIC, copies its registration
	// with opts.Copier.
	region rdma.Region
	copies copier.Memory
	device []byte
	bases  []uint64
	blocks int
	log    *slog.Logger

	requests, failed, checked, wrong, caught atomic.Uint64
	busy                                     atomic.Int64
	batches                                  atomic.Uint64

	mu      sync.Mutex
	byEpoch map[kv.Epoch]uint64
	free    []uint32 // device pages
	jobs    map[string]*running
	queue   []*running // prefill: the loaded requests, in order
	// started wakes the prefill loop, ready wakes the decode loop.
	started, ready chan struct{}
	// decoding maps each request of the decode loop to the number of tokens that it must still
	// generate.
	decoding map[*running]int // tokens left
	freed    chan struct{}
	closed   bool
	stop     context.CancelFunc
	ctx      context.Context
	wg       sync.WaitGroup
}

// running is a request on an engine.
type running struct {
	work    work
	ctx     context.Context
	cancel  context.CancelFunc
	pages   []uint32
	prefill *traffic.Prefill
	decode  *traffic.Decode
	// computed is the number of tokens computed so far (cached tokens not included). Only the
	// prefill loop uses this field.
	computed int
	// orders are calls that arrived before the traffic manager's job began; begin runs them.
	orders []func(p *traffic.Prefill, d *traffic.Decode)
	begun  time.Time
	loaded Loaded
	ended  bool
	wake   chan struct{} // decode: the output is complete
}

// NewEngine starts an engine. A leader starts requests on the engine; Close ends the engine.
func NewEngine(opts EngineOptions) (*Engine, error) {
	opts.Model.EnsureDefaults()
	if err := opts.Model.Validate(); err != nil {
		return nil, err
	}
	if opts.Window == 0 || opts.Window > opts.Model.Layers {
		opts.Window = opts.Model.Layers
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	e := &Engine{
		opts: opts, log: opts.Logger, blocks: opts.DeviceBlocks, jobs: make(map[string]*running), byEpoch: make(map[kv.Epoch]uint64),
		started: make(chan struct{}, 1), ready: make(chan struct{}, 1), decoding: make(map[*running]int), freed: make(chan struct{}),
	}
	layer := opts.Namespace.Geometry.LayerBytes(0)
	e.device = make([]byte, int64(opts.Window)*int64(opts.DeviceBlocks)*layer)
	for l := range opts.Window {
		e.bases = append(e.bases, uint64(int64(l)*int64(opts.DeviceBlocks)*layer))
	}
	for p := range opts.DeviceBlocks {
		e.free = append(e.free, uint32(p))
	}
	if err := e.open(); err != nil {
		return nil, fmt.Errorf("emulate: %s: %w", opts.Name, errors.Join(err, e.release(context.Background())))
	}
	e.ctx, e.stop = context.WithCancel(context.Background())
	e.wg.Add(2)
	go e.prefillLoop()
	go e.decodeLoop()
	return e, nil
}

// open registers the device and starts the traffic manager.
func (e *Engine) open() (err error) {
	if e.region, err = e.opts.Compute.Register(e.device, rdma.RegisterOptions{Local: true}); err != nil {
		return err
	}
	if e.opts.Copier != nil {
		if e.copies, err = e.opts.Copier.Register(e.device, rdma.RegisterOptions{}); err != nil {
			return err
		}
	}
	e.manager, err = traffic.New(traffic.Options{
		Namespace: e.opts.Namespace, Storage: e.opts.Store, Compute: e.opts.Compute, BufferBytes: e.opts.BufferBytes,
		Device: traffic.Device{Region: e.region, Bases: e.bases}, Copier: e.opts.Copier, DeviceCopies: e.copies, Logger: e.log,
	})
	return err
}

// release unregisters the device memory. The manager must be closed.
func (e *Engine) release(ctx context.Context) error {
	var errs []error
	if e.copies != nil {
		errs = append(errs, e.copies.Close(ctx))
	}
	if e.region != nil {
		errs = append(errs, e.region.Close(ctx))
	}
	return errors.Join(errs...)
}

// Close cancels all requests and waits until they have ended.
func (e *Engine) Close() error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil
	}
	e.closed = true
	for _, r := range e.jobs {
		r.cancel()
	}
	e.mu.Unlock()
	e.stop()
	err := e.manager.Close()
	e.wg.Wait()
	within, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return errors.Join(err, e.release(within))
}

// Counts returns the engine's counters.
func (e *Engine) Counts() Counts {
	e.mu.Lock()
	byEpoch := maps.Clone(e.byEpoch)
	e.mu.Unlock()
	return Counts{e.requests.Load(), e.failed.Load(), e.checked.Load(), e.wrong.Load(), e.caught.Load(), time.Duration(e.busy.Load()), e.batches.Load(), byEpoch}
}

// Member returns the engine as a member of a group. addr and token are the address of the engine's
// compute NIC and the token with which peers connect to it.
func (e *Engine) Member(addr rdma.Addr, token rdma.Token) leader.Member {
	return leader.Member{
		Name: e.opts.Name, Engine: e, Peer: traffic.Peer{Addr: addr, Token: token}, DeviceBlocks: e.blocks, Footprint: e.manager.Footprint(),
	}
}

// SwitchRole makes the engine serve requests of another role; it implements
// leader.Options.SwitchRole. Any engine can prefill. Only an engine whose device holds all
// layers can decode.
func (e *Engine) SwitchRole(to leader.Role) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if n := len(e.jobs); n > 0 {
		return fmt.Errorf("emulate: %s: %d requests are in progress; the role can change only without requests", e.opts.Name, n)
	}
	if held := len(e.bases); to == leader.Decode && held < e.opts.Model.Layers {
		return fmt.Errorf("emulate: %s holds %d of %d layers in device memory; decode needs all: start it with a window of all layers", e.opts.Name, held, e.opts.Model.Layers)
	}
	return nil
}

// blocksOf returns the number of blocks that hold the given number of tokens.
func (e *Engine) blocksOf(tokens int) int {
	bt := e.opts.Namespace.Geometry.BlockTokens
	return (tokens + bt - 1) / bt
}

// enter registers a request, so that Engine.with finds it.
func (e *Engine) enter(ctx context.Context, q *leader.Request) (*running, error) {
	load, err := gateway.ParsePayload(q.Payload)
	if err != nil {
		return nil, fmt.Errorf("emulate: %s: request %q: %w", e.opts.Name, q.Name, err)
	}
	r := &running{work: work{q, load.IDs}, wake: make(chan struct{})}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, traffic.ErrClosed
	}
	if e.jobs[q.Name] != nil {
		return nil, fmt.Errorf("emulate: %s: request %q: %w", e.opts.Name, q.Name, traffic.ErrExists)
	}
	r.ctx, r.cancel = context.WithCancel(ctx)
	e.jobs[q.Name] = r
	return r, nil
}

// take allocates device pages to a request, and waits until enough are free.
func (e *Engine) take(r *running, pages int) error {
	if pages > e.blocks {
		return fmt.Errorf("emulate: %s: request %q needs %d blocks of device memory; there are %d", e.opts.Name, r.work.Name, pages, e.blocks)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for len(e.free) < pages {
		freed := e.freed
		e.mu.Unlock()
		select {
		case <-freed:
		case <-r.ctx.Done():
		case <-e.ctx.Done():
		}
		e.mu.Lock()
		if r.ctx.Err() != nil || e.closed {
			return context.Canceled
		}
	}
	r.pages = append(r.pages, e.free[len(e.free)-pages:]...)
	e.free = e.free[:len(e.free)-pages]
	return nil
}

// begin sets a request's job and runs the orders that waited for it.
func (e *Engine) begin(r *running, p *traffic.Prefill, d *traffic.Decode) {
	e.mu.Lock()
	r.prefill, r.decode = p, d
	orders := r.orders
	r.orders = nil
	e.mu.Unlock()
	for _, order := range orders {
		order(p, d)
	}
}

// leave ends a request: it frees the pages and calls Done.
func (e *Engine) leave(r *running, err error) {
	e.mu.Lock()
	if r.ended {
		e.mu.Unlock()
		return
	}
	r.ended = true
	delete(e.jobs, r.work.Name)
	delete(e.decoding, r)
	e.free = append(e.free, r.pages...)
	if err == nil {
		e.byEpoch[r.work.Epoch]++
	}
	close(e.freed)
	e.freed = make(chan struct{})
	e.mu.Unlock()
	r.cancel()
	if err != nil {
		e.failed.Add(1)
		var wrong *traffic.BlockError
		if errors.As(err, &wrong) && wrong.Where != onDevice {
			e.caught.Add(1)
		}
	} else {
		e.requests.Add(1)
	}
	r.work.Done(err)
}

// with passes the traffic manager's job of a request to f: at once, or when the job begins.
func (e *Engine) with(request string, f func(p *traffic.Prefill, d *traffic.Decode)) {
	e.mu.Lock()
	r := e.jobs[request]
	begun := r != nil && (r.prefill != nil || r.decode != nil)
	if r != nil && !begun {
		r.orders = append(r.orders, f)
	}
	e.mu.Unlock()
	if begun {
		f(r.prefill, r.decode)
	}
}

// Read makes the engine read an additional range of hit blocks.
func (e *Engine) Read(request string, part traffic.Part) {
	e.with(request, func(p *traffic.Prefill, d *traffic.Decode) {
		if p != nil {
			p.Read(part)
		} else {
			d.Read(part)
		}
	})
}

// Cut makes the engine stop reading for a request.
func (e *Engine) Cut(request string) {
	e.with(request, func(p *traffic.Prefill, d *traffic.Decode) {
		if p != nil {
			p.Cut()
		} else {
			d.Cut()
		}
	})
}

// Recompute makes the engine compute a range of hit blocks.
func (e *Engine) Recompute(request string, part traffic.Part) {
	e.with(request, func(p *traffic.Prefill, _ *traffic.Decode) {
		if p != nil {
			p.Recompute(part)
		}
	})
}

// Start starts a request.
func (e *Engine) Start(ctx context.Context, q *leader.Request) {
	r, err := e.enter(ctx, q)
	e.wg.Add(1)
	go func() {
		defer e.wg.Done()
		switch {
		case err != nil:
			q.Done(err)
		case q.Role == leader.Prefill:
			e.prefill(r)
		default:
			e.decode(r)
		}
	}()
}

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

// decode serves a request until its output is complete.
func (e *Engine) decode(r *running) {
	w := r.work
	prompt, whole := e.blocksOf(w.Prompt), e.blocksOf(w.Prompt+w.Output)
	if err := e.take(r, whole); err != nil {
		e.leave(r, err)
		return
	}
	full := min(w.Prompt/e.opts.Namespace.Geometry.BlockTokens, len(w.IDs))
	d, err := e.manager.Decode(r.ctx, traffic.DecodeJob{
		Request: w.Name, IDs: w.IDs[:full], Epoch: w.Epoch, Blocks: prompt, Hit: w.Hit, Parts: w.Parts, Pages: r.pages[:prompt], Peer: w.Peer,
		Stopped: w.Stopped, Progress: w.Progress,
	})
	if err != nil {
		e.leave(r, err)
		return
	}
	e.begin(r, nil, d)
	e.leave(r, e.decodeOne(r, prompt, full))
}

// decodeOne waits for the prompt's KV, compares the KV with the expected bytes, decodes, and stores
// the decoded blocks.
func (e *Engine) decodeOne(r *running, prompt, full int) error {
	if err := r.decode.Ready(r.ctx); err != nil {
		r.decode.Cancel()
		return err
	}
	for b := range prompt {
		for l := range e.opts.Model.Layers {
			if err := e.compare(r.work, b, l, e.page(l, r.pages[b]), e.content(r.work, r.work.Prompt, b, l)); err != nil {
				r.decode.Cancel()
				return err
			}
		}
	}
	// The prompt's new blocks are stored while the output is decoded.
	finished := make(chan error, 1)
	go func() {
		err := r.decode.Finish(r.ctx)
		r.work.Passed()
		finished <- err
	}()
	if err := errors.Join(e.await(r), <-finished); err != nil {
		return err
	}
	return e.append(r, full)
}

// await passes a request to the decode loop and waits until its output is complete.
func (e *Engine) await(r *running) error {
	e.mu.Lock()
	if r.work.Output > 0 {
		e.decoding[r] = r.work.Output
	} else {
		close(r.wake)
	}
	e.mu.Unlock()
	select {
	case e.ready <- struct{}{}:
	default:
	}
	select {
	case <-r.wake:
		return nil
	case <-r.ctx.Done():
		return context.Cause(r.ctx)
	}
}

// append stores the blocks that the output completed. It first writes the KV of these blocks to
// device memory, as decoding would have done, and stores the blocks from device memory.
func (e *Engine) append(r *running, full int) error {
	w := r.work
	for b := full; b < len(w.IDs); b++ {
		for l := range e.opts.Model.Layers {
			e.content(w, w.Prompt+w.Output, b, l).Fill(e.page(l, r.pages[b]))
		}
		if err := e.manager.Append(r.ctx, w.Name, w.IDs[:b+1], w.Epoch, r.pages[b]); err != nil {
			return err
		}
	}
	if n := len(w.IDs); n > full {
		return e.manager.Settle(r.ctx, w.IDs[n-1])
	}
	return nil
}

// decodeLoop decodes one token of every request per step.
func (e *Engine) decodeLoop() {
	defer e.wg.Done()
	for {
		e.mu.Lock()
		n := len(e.decoding)
		for r, left := range e.decoding {
			if left--; left > 0 {
				e.decoding[r] = left
				continue
			}
			delete(e.decoding, r)
			close(r.wake)
		}
		e.mu.Unlock()
		if n == 0 {
			select {
			case <-e.ready:
				continue
			case <-e.ctx.Done():
				return
			}
		}
		if e.ctx.Err() != nil {
			return
		}
		e.spend(e.opts.Model.DecodeStep(n))
	}
}
