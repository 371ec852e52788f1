package binding

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/copier"
)

const (
	// nameMax is the longest name of a transfer's request, in bytes.
	nameMax = 1024
	// ordersMax is the largest number of calls that wait until the manager has begun the job.
	// Further calls return ErrBusy.
	ordersMax = 4096
)

// moving is a *traffic.Prefill or a *traffic.Decode.
type moving interface {
	Read(part traffic.Part)
	Cut()
	Ended() <-chan struct{}
	Finish(ctx context.Context) error
}

var (
	_ moving = (*traffic.Prefill)(nil)
	_ moving = (*traffic.Decode)(nil)
)

// Transfer is a job of a Traffic, until its last event was drained.
type Transfer struct {
	traffic     *Traffic
	handle      Handle
	request     string
	blocks, hit int
	// prefill: the job is a *traffic.Prefill.
	prefill bool
	// ctx ends with the Traffic or by Cancel.
	ctx    context.Context
	cancel context.CancelCauseFunc
	// begun is closed when the manager has begun the job or has refused it. Finish closes finish.
	begun, finish chan struct{}
	// over: the last event is in the queue. Traffic.mu guards it.
	over bool

	// mu is held while calls on the job are performed, so that they are performed in the caller's
	// order.
	mu sync.Mutex
	// job is nil until the manager has begun it. orders are the calls that wait for the job.
	job    moving
	orders []func(moving)
	// refusal is the manager's error if it has refused the job.
	refusal error
	// finished reports whether finish is closed.
	finished bool
	// pages is the number of blocks of a prefill that have device pages.
	pages int
	// marks are the marks of the calls, for which copies of the job may wait. closed is set when the
	// job has ended, and they are closed.
	marks  []copier.Mark
	closed bool
}

// mark records an event for copies of a later call; see Traffic.mark. x.mu is held.
func (x *Transfer) mark(d *deviceCopies) (copier.Mark, error) {
	if x.closed {
		return nil, nil
	}
	m, err := x.traffic.mark(d)
	if m != nil {
		x.marks = append(x.marks, m)
	}
	return m, err
}

// closeMarks closes the marks of a job that has ended.
func (x *Transfer) closeMarks() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.closed = true
	for _, m := range x.marks {
		_ = m.Close() // an event that the driver does not destroy lives as long as its context
	}
	x.marks = nil
}

func (x *Transfer) of() *Store { return x.traffic.store }

// Prefill begins a job on a prefill engine and returns at once. timeout bounds the whole job; 0: no
// bound. The Transfer sets the job's Stopped and Progress itself; the caller's values are not used.
func (t *Traffic) Prefill(j traffic.PrefillJob, timeout time.Duration) (Handle, error) {
	if err := t.begin(); err != nil {
		return 0, err
	}
	defer t.calls.Done()
	j.Epoch = t.epoch(j.Epoch)
	if err := t.manager.CheckPrefill(j); err != nil {
		return 0, err
	}
	x := &Transfer{traffic: t, request: j.Request, blocks: j.Blocks, hit: j.Hit, prefill: true, pages: len(j.Pages) / t.tables}
	j.Stopped, j.Progress = x.stopped, x.progress
	var err error
	if j.After, err = x.mark(&t.loads); err != nil {
		return 0, err
	}
	return t.start(x, timeout, func(ctx context.Context) (moving, error) { return t.manager.Prefill(ctx, j) }, func(ctx context.Context, m moving) error {
		p := m.(*traffic.Prefill)
		if err := p.Loaded(ctx); err != nil {
			return err
		}
		x.push(TransferEvent{Kind: TransferLoaded, FirstMiss: firstMiss(p, j.Blocks)})
		if !slices.ContainsFunc(t.geo.Groups, func(g kv.Group) bool { return g.Kind == kv.State }) {
			return nil
		}
		// An engine can need the state before it computes any layer.
		for l := range t.geo.LayerCount() {
			if err := p.Layer(ctx, l); err != nil {
				return err
			}
		}
		x.push(TransferEvent{Kind: TransferReady})
		return nil
	})
}

// firstMiss returns the lowest block that the model computes, or blocks if there is none.
func firstMiss(p *traffic.Prefill, blocks int) int {
	miss := p.Miss()
	if len(miss) == 0 {
		return blocks
	}
	return slices.Min(miss)
}

// Decode begins a job on a decode engine and returns at once. timeout bounds the whole job; 0: no
// bound. The Transfer sets the job's Stopped and Progress itself; the caller's values are not used.
func (t *Traffic) Decode(j traffic.DecodeJob, timeout time.Duration) (Handle, error) {
	if err := t.begin(); err != nil {
		return 0, err
	}
	defer t.calls.Done()
	j.Epoch = t.epoch(j.Epoch)
	if err := t.manager.CheckDecode(j); err != nil {
		return 0, err
	}
	if len(j.Peer.Addr.NICs) == 0 || j.Peer.Addr.NICs[0] == "" {
		return 0, fmt.Errorf("%w: request %q: no address of the prefill engine", ErrInvalid, j.Request)
	}
	if err := j.Peer.Token.Validate(); err != nil {
		return 0, fmt.Errorf("%w: request %q: prefill engine: %w", ErrInvalid, j.Request, err)
	}
	x := &Transfer{traffic: t, request: j.Request, blocks: j.Blocks, hit: j.Hit}
	j.Stopped, j.Progress = x.stopped, x.progress
	var err error
	if j.After, err = x.mark(&t.loads); err != nil {
		return 0, err
	}
	return t.start(x, timeout, func(ctx context.Context) (moving, error) { return t.manager.Decode(ctx, j) }, func(ctx context.Context, m moving) error {
		err := m.(*traffic.Decode).Ready(ctx)
		if err == nil {
			x.push(TransferEvent{Kind: TransferReady})
		}
		return err
	})
}

// beginFunc begins a job. readyFunc queues the events after which the engine continues.
type (
	beginFunc func(context.Context) (moving, error)
	readyFunc func(context.Context, moving) error
)

// start adds a transfer and serves it on a goroutine.
func (t *Traffic) start(x *Transfer, timeout time.Duration, begin beginFunc, ready readyFunc) (Handle, error) {
	if len(x.request) > nameMax {
		x.closeMarks()
		return 0, fmt.Errorf("%w: a request with a name of %d bytes; it has at most %d", ErrInvalid, len(x.request), nameMax)
	}
	x.begun, x.finish = make(chan struct{}), make(chan struct{})
	x.ctx, x.cancel = context.WithCancelCause(t.ctx)
	x.handle = t.store.library.add(x)
	t.mu.Lock()
	var err error
	switch {
	case t.requests[x.request]:
		err = fmt.Errorf("%w: %w: %q", ErrInvalid, traffic.ErrExists, x.request)
	case len(t.transfers) >= t.max:
		err = fmt.Errorf("%w: %d transfers have not ended or are not drained; drain their events, or raise transfers_max", ErrBusy, len(t.transfers))
	default:
		t.transfers[x.handle], t.requests[x.request] = x, true
		// Close first waits for calls such as this one, and then for the goroutines in running, so
		// running.Go is never called too late.
		t.running.Go(func() { x.serve(timeout, begin, ready) })
	}
	t.mu.Unlock()
	if err != nil {
		x.cancel(err)
		x.closeMarks()
		t.store.library.remove(x.handle)
		return 0, err
	}
	return x.handle, nil
}

// serve runs a job to its end. It queues the last event when nothing accesses the job's memory any
// more.
func (x *Transfer) serve(timeout time.Duration, begin beginFunc, ready readyFunc) {
	defer x.cancel(nil)
	ctx := x.ctx
	if timeout > 0 {
		limited, stop := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("request %q: its time limit of %v has passed: %w", x.request, timeout, context.DeadlineExceeded))
		defer stop()
		ctx = limited
	}
	m, err := begin(ctx)
	x.beginOrders(m, err)
	if err == nil {
		if err := ready(ctx, m); err == nil {
			select {
			case <-x.finish:
			case <-m.Ended():
			}
		}
		err = m.Finish(ctx) // if ready failed, Finish returns the same error
	}
	x.closeMarks()
	end := TransferEvent{Kind: TransferFinished}
	if err != nil {
		end = TransferEvent{Kind: TransferFailed, Err: err, Intact: intact(err, x.hit)}
	}
	x.push(end)
}

// intact returns the number of cached blocks that are certainly intact after a job has failed, by
// the rule of package leader.
func intact(err error, hit int) int {
	if wrong := (*traffic.BlockError)(nil); errors.As(err, &wrong) {
		return min(wrong.Block, hit)
	}
	return 0
}

// push queues an event of the transfer, unless the transfer's last event is queued already.
func (x *Transfer) push(e TransferEvent) {
	e.Transfer = x.handle
	t := x.traffic
	t.mu.Lock()
	defer t.mu.Unlock()
	if x.over {
		return
	}
	if x.over = e.last(); x.over {
		delete(t.requests, x.request)
	}
	t.pushLocked(e)
}

// progress queues a progress report about the read of a part of the cached prefix. If a report
// about the same part waits for Drain, progress updates that report instead.
func (x *Transfer) progress(p traffic.Progress) {
	t := x.traffic
	t.mu.Lock()
	defer t.mu.Unlock()
	if x.over {
		return
	}
	for i := len(t.events) - 1; i >= 0; i-- {
		e := &t.events[i]
		if e.Transfer != x.handle || e.Part != p.Part {
			continue
		}
		if e.Kind != TransferProgress {
			break // the report of an earlier read of the part
		}
		e.Upto, e.Bytes = max(e.Upto, p.Upto), max(e.Bytes, p.Bytes)
		return
	}
	t.pushLocked(TransferEvent{Transfer: x.handle, Kind: TransferProgress, Part: p.Part, Upto: p.Upto, Bytes: p.Bytes})
}

// stopped queues an event for a storage read that has ended before the last block of its part.
func (x *Transfer) stopped(s traffic.Stop) {
	x.push(TransferEvent{Kind: TransferStopped, Part: s.Part, Upto: s.Upto, Gone: s.Gone, Err: s.Err})
}

// beginOrders sets the job or the refusal, and performs the calls that have waited for the job.
func (x *Transfer) beginOrders(m moving, refusal error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.refusal = refusal; refusal == nil {
		x.job = m
		for _, f := range x.orders {
			f(m)
		}
	}
	x.orders = nil
	close(x.begun)
}

// order performs f when the manager has begun the job, after earlier calls of order. If check
// returns an error, order returns this error. If the job has ended or was refused, f has no effect.
func (x *Transfer) order(check func() error, f func(moving)) error {
	if err := x.traffic.begin(); err != nil {
		return err
	}
	defer x.traffic.calls.Done()
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := check(); err != nil {
		return err
	}
	switch {
	case x.job != nil:
		f(x.job)
	case x.refusal != nil:
	case len(x.orders) >= ordersMax:
		return fmt.Errorf("%w: %d calls wait until the transfer of request %q has begun", ErrBusy, len(x.orders), x.request)
	default:
		x.orders = append(x.orders, f)
	}
	return nil
}

// checkPart returns an error for a part that is empty or lies outside of the cached prefix.
func (x *Transfer) checkPart(p traffic.Part) error {
	if p.From < 0 || p.From >= p.To || p.To > x.hit {
		return fmt.Errorf("%w: part [%d, %d) of request %q, which has %d cached blocks", ErrInvalid, p.From, p.To, x.request, x.hit)
	}
	return nil
}

// onPrefill returns an error for a decode transfer.
func (x *Transfer) onPrefill(call string) error {
	if !x.prefill {
		return fmt.Errorf("%w: %s is for prefill transfers; that of request %q is a decode", ErrInvalid, call, x.request)
	}
	return nil
}

// checkLayer returns an error for a layer that the model does not have.
func (x *Transfer) checkLayer(layer int) error {
	if layers := x.traffic.geo.LayerCount(); layer < 0 || layer >= layers {
		return fmt.Errorf("%w: layer %d of %d", ErrInvalid, layer, layers)
	}
	return nil
}

// Read makes this engine read a part of the cached prefix from storage. No block of the part may be
// in a buffer of either engine, and neither engine may be reading a block of the part.
func (x *Transfer) Read(p traffic.Part) error {
	return x.order(func() error { return x.checkPart(p) }, func(m moving) { m.Read(p) })
}

// Cut ends the running reads.
func (x *Transfer) Cut() error {
	return x.order(func() error { return nil }, moving.Cut)
}

// Recompute makes the model compute a part of the cached prefix; see traffic.Prefill.Recompute.
func (x *Transfer) Recompute(p traffic.Part) error {
	return x.order(func() error { return errors.Join(x.onPrefill("recompute"), x.checkPart(p)) }, func(m moving) { m.(*traffic.Prefill).Recompute(p) })
}

// AddPages adds the device pages of the next blocks. It returns an error for pages outside of
// device memory, and for more pages than blocks.
func (x *Transfer) AddPages(pages []uint32) error {
	var after copier.Mark
	return x.order(func() (err error) {
		if err := x.onPrefill("add_pages"); err != nil {
			return err
		}
		tables := x.traffic.tables
		if n := x.pages*tables + len(pages); n > x.blocks*tables || n%tables != 0 {
			return fmt.Errorf("%w: %d device pages for the %d blocks of request %q in %d page tables", ErrInvalid, n, x.blocks, x.request, tables)
		}
		if err := x.traffic.manager.CheckPages(pages...); err != nil {
			return err
		}
		if after, err = x.mark(&x.traffic.loads); err != nil {
			return err
		}
		x.pages += len(pages) / tables
		return nil
	}, func(m moving) { m.(*traffic.Prefill).AddPagesAfter(after, pages...) })
}

// Computed reports that the model has computed a layer up to a block; see
// traffic.Prefill.ComputedAfter.
func (x *Transfer) Computed(layer, block int) error {
	var after copier.Mark
	return x.order(func() (err error) {
		if err := errors.Join(x.onPrefill("computed"), x.checkLayer(layer)); err != nil {
			return err
		}
		switch t := x.traffic; {
		case block < 0 || block > x.blocks:
			return fmt.Errorf("%w: computed up to block %d of %d", ErrInvalid, block, x.blocks)
		case block > x.pages:
			return fmt.Errorf("%w: computed up to block %d; request %q has device pages of %d", ErrInvalid, block, x.request, x.pages)
		case block < x.blocks && t.bases < t.geo.LayerCount():
			return fmt.Errorf("%w: computed up to block %d of %d, with device memory for %d of %d layers: chunks need all layers", ErrInvalid, block, x.blocks, t.bases, t.geo.LayerCount())
		case t.stream.Load() != nil && t.bases < t.geo.LayerCount():
			return fmt.Errorf("%w: computed in a stream, with device memory for %d of %d layers: the order of a stream needs all layers", ErrInvalid, t.bases, t.geo.LayerCount())
		}
		after, err = x.mark(&x.traffic.saves)
		return err
	}, func(m moving) { m.(*traffic.Prefill).ComputedAfter(layer, block, after) })
}

// Layer waits until the cached prefix's KV of a layer is in device memory and verified. If the
// transfer ends first, the error is ErrEnded.
func (x *Transfer) Layer(layer int, timeout time.Duration) error {
	t := x.traffic
	if err := t.begin(); err != nil {
		return err
	}
	defer t.calls.Done()
	if err := errors.Join(x.onPrefill("layer"), x.checkLayer(layer)); err != nil {
		return err
	}
	ctx, cancel := t.within(timeout)
	defer cancel()
	select {
	case <-x.begun:
	case <-ctx.Done():
		return t.ofCall(x.late(layer, ctx.Err()))
	}
	x.mu.Lock()
	m, refusal := x.job, x.refusal
	x.mu.Unlock()
	if refusal != nil {
		return endedBy(refusal)
	}
	err := m.(*traffic.Prefill).Layer(ctx, layer)
	switch {
	case err == nil:
		return nil
	case t.ctx.Err() != nil:
		return t.ofCall(err)
	case ended(m):
		return endedBy(err)
	}
	return x.late(layer, err)
}

func (x *Transfer) late(layer int, err error) error {
	return fmt.Errorf("layer %d of request %q is not in device memory yet: %w", layer, x.request, err)
}

// endedBy returns an ErrEnded with the text of reason. It does not wrap reason, so that the error
// matches only ErrEnded and not, for example, a timeout that ended the transfer.
func endedBy(reason error) error { return fmt.Errorf("%w: %v", ErrEnded, reason) }

// ended reports whether a job has failed or was ended.
func ended(m moving) bool {
	select {
	case <-m.Ended():
		return true
	default:
		return false
	}
}

// Finish requests that the job ends when its KV has arrived. It does not wait; the last event
// reports the end.
func (x *Transfer) Finish() error {
	if err := x.traffic.begin(); err != nil {
		return err
	}
	defer x.traffic.calls.Done()
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.finished {
		x.finished = true
		close(x.finish)
	}
	return nil
}

// Cancel ends the job, and does not wait for its last event.
func (x *Transfer) Cancel() error {
	if err := x.traffic.begin(); err != nil {
		return err
	}
	defer x.traffic.calls.Done()
	x.cancel(fmt.Errorf("request %q: %w", x.request, traffic.ErrCancelled))
	return nil
}
