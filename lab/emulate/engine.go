package emulate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/kv"
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
		NICs: e.opts.Compute.NICs,
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
