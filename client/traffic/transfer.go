package traffic

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/rdma"
)

// Part is a range of blocks of a prompt, [From, To).
type Part struct{ From, To int }

// Len returns the number of blocks.
func (p Part) Len() int { return p.To - p.From }

// Progress is the progress of the read of a part.
type Progress struct {
	Part Part
	// Upto is a block index: all blocks of the part before it are in the buffer and verified. The
	// last report of a complete read has Upto = Part.To.
	Upto int
	// Bytes is the number of bytes of the part that have arrived, verified or not.
	Bytes int64
}

// Stop reports a read that ended before the end of its part.
type Stop struct {
	Part Part
	// Upto is a block index: all blocks of the part before it are in the buffer.
	Upto int
	// Gone: storage does not have the block Upto. If Gone is false, this engine could not read the
	// block, and Err may have the reason.
	Gone bool
	Err  error
}

// teardownWithin bounds how long an ended job waits for its windows to be revoked. A transfer
// engine that takes longer is broken; the memory of the job is then never used again.
const teardownWithin = 30 * time.Second

// transfer is the common part of Prefill and Decode: the start and end of the job, its memory, and
// its messages to the peer.
type transfer struct {
	m       *Manager
	request string
	// other names the peer in errors: "prefill side" or "decode side".
	other  string
	self   job
	ctx    context.Context
	cancel context.CancelCauseFunc
	scope  *rdma.Scope
	// tail is the context of two activities that continue after the job has succeeded and ctx has
	// ended: writes to storage, and repeated messages to a peer that had no free receive buffer.
	// cut ends tail.
	tail context.Context
	cut  context.CancelFunc
	// deathWatch is an expectation that ends with the session to the peer.
	deathWatch *rdma.Expectation

	// firstImm is the first of the consecutive immediates that the peer's writes carry, and imms their number.
	firstImm uint32
	imms     int

	mu sync.Mutex
	// changed is closed and replaced whenever the state below, or that of
	// Prefill and Decode, has changed.
	changed chan struct{}
	err     error
	peer    rdma.EngineID
	windows []rdma.Window
	buffers []arena.Buffer
	// reads cancel the running reads.
	reads map[*context.CancelFunc]struct{}
	// running counts the job's goroutines, and callers of here.
	running sync.WaitGroup
	ended   sync.Once
}

// open begins the job in the manager. ctx bounds the whole job.
func (t *transfer) open(ctx context.Context, m *Manager, request, other string, self job) error {
	if request == "" {
		return fmt.Errorf("traffic: a job without a request: %w", ErrJob)
	}
	t.m, t.request, t.other, t.self, t.changed, t.reads = m, request, other, self, make(chan struct{}), make(map[*context.CancelFunc]struct{})
	t.scope = rdma.NewScope(m.opts.Compute)
	t.ctx, t.cancel = context.WithCancelCause(ctx)
	t.tail, t.cut = context.WithCancel(context.WithoutCancel(ctx))
	if err := m.begin(request, self); err != nil {
		t.cancel(err)
		t.cut()
		return err
	}
	return nil
}

// changedLocked wakes every await.
func (t *transfer) changedLocked() {
	close(t.changed)
	t.changed = make(chan struct{})
}

// Ended returns a channel that is closed when the job has failed or has ended. Then Finish and
// every other wait return at once.
func (t *transfer) Ended() <-chan struct{} { return t.ctx.Done() }

// update changes the state by f, with the lock held, and wakes every await.
func (t *transfer) update(f func()) {
	t.mu.Lock()
	f()
	t.changedLocked()
	t.mu.Unlock()
}

// await waits until ready returns true, the job fails, or ctx ends. It calls ready with
// the lock held.
func (t *transfer) await(ctx context.Context, ready func() bool) error {
	for {
		t.mu.Lock()
		if t.err != nil {
			err := t.err
			t.mu.Unlock()
			return err
		}
		if ready() {
			t.mu.Unlock()
			return nil
		}
		changed := t.changed
		t.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-t.ctx.Done():
			t.fail(context.Cause(t.ctx))
		}
	}
}

// fail sets the job's error, unless an error is set already, and cancels the job's context, so that
// the job's goroutines stop.
func (t *transfer) fail(err error) {
	t.mu.Lock()
	if t.err == nil {
		t.err = err
		t.changedLocked()
	}
	t.mu.Unlock()
	t.cancel(err)
}

// run starts a goroutine of the job; an error of f fails the job. If the job has ended,
// run starts nothing and returns false.
func (t *transfer) run(f func() error) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil {
		return false // close may be waiting already
	}
	t.running.Add(1)
	go func() {
		defer t.running.Done()
		if err := f(); err != nil {
			t.fail(err)
		}
	}()
	return true
}

// here is run on the caller's goroutine, for which close waits too. It returns the error of the job if f
// returns an error or the job has ended.
func (t *transfer) here(f func() error) error {
	t.mu.Lock()
	if t.err != nil {
		defer t.mu.Unlock()
		return t.err
	}
	t.running.Add(1)
	t.mu.Unlock()
	defer t.running.Done()
	err := f()
	if err == nil {
		return nil
	}
	t.fail(err)
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// Cut ends the running reads. Each read stops as soon as possible and calls Stopped with the block
// that it has reached. The job continues. The blocks that were not read must be passed to Read or
// Recompute.
func (t *transfer) Cut() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for cancel := range t.reads {
		(*cancel)()
	}
}

// reading returns a context for one read, and a function that must be called after the read. Cut
// and this function end the context.
func (t *transfer) reading() (ctx context.Context, after func()) {
	ctx, cancel := context.WithCancel(t.ctx)
	t.mu.Lock()
	t.reads[&cancel] = struct{}{}
	t.mu.Unlock()
	return ctx, func() {
		t.mu.Lock()
		delete(t.reads, &cancel)
		t.mu.Unlock()
		cancel()
	}
}

// alloc allocates memory of the buffer for the job. It waits until there is room.
func (t *transfer) alloc(sizeBytes uint64) (arena.Buffer, error) {
	b, err := t.m.buffer.Alloc(t.ctx, int(sizeBytes))
	return t.allocated(b, sizeBytes, err)
}

// tryAlloc is alloc without waiting: it returns ErrBusy if there is no room now.
func (t *transfer) tryAlloc(sizeBytes uint64) (arena.Buffer, error) {
	b, err := t.m.buffer.TryAlloc(int(sizeBytes))
	return t.allocated(b, sizeBytes, err)
}

// allocated records an allocation, which close releases, or wraps its error.
func (t *transfer) allocated(b arena.Buffer, sizeBytes uint64, err error) (arena.Buffer, error) {
	switch {
	case errors.Is(err, arena.ErrBusy):
		return b, fmt.Errorf("traffic: request %q: %d bytes: %w: %w", t.request, sizeBytes, ErrBusy, err)
	case err != nil:
		return b, fmt.Errorf("traffic: request %q: %d bytes of the buffer: %w", t.request, sizeBytes, err)
	}
	t.mu.Lock()
	t.buffers = append(t.buffers, b)
	t.mu.Unlock()
	return b, nil
}

// window opens a window on memory for the peer until the job ends. The peer must be
// known (bind).
func (t *transfer) window(r rdma.Region, off, n uint64) ([]byte, error) {
	t.mu.Lock()
	peer := t.peer
	t.mu.Unlock()
	w, err := r.Window(off, n, peer)
	if err != nil {
		return nil, fmt.Errorf("traffic: request %q: %w", t.request, err)
	}
	return t.opened(w)
}

// opened records a window, which close revokes, and returns its Desc for the peer.
func (t *transfer) opened(w rdma.Window) ([]byte, error) {
	t.mu.Lock()
	t.windows = append(t.windows, w)
	t.mu.Unlock()
	return w.Desc().MarshalBinary()
}

// bind sets the job's peer to from. It returns an error if the job has another peer already.
func (t *transfer) bind(from rdma.EngineID) error {
	t.mu.Lock()
	if !t.peer.IsZero() {
		known := t.peer == from
		t.mu.Unlock()
		if !known {
			return fmt.Errorf("traffic: request %q: a message of %v, which is not its other side: %w", t.request, from, ErrJob)
		}
		return nil
	}
	t.peer = from
	t.mu.Unlock()
	// No write carries this immediate, so the expectation ends only with the session or with the
	// job.
	watch, err := t.m.opts.Compute.ExpectImm(rdma.Expect{Imm: t.m.imm(1), Count: 1, From: []rdma.EngineID{from}, Done: func(err error) {
		if errors.Is(err, rdma.ErrPeerDied) || errors.Is(err, rdma.ErrClosed) {
			t.fail(fmt.Errorf("traffic: request %q: the other side: %w", t.request, err))
		}
	}})
	if err != nil {
		return fmt.Errorf("traffic: request %q: %w", t.request, err)
	}
	t.mu.Lock()
	t.deathWatch = watch
	over := t.err != nil // close may have run before deathWatch was set; then it has not cancelled watch
	t.mu.Unlock()
	if over {
		watch.Cancel()
	}
	return nil
}

// accepts returns an error if a message must end the job: its sender is not the job's peer, the
// message is of another version, or the message cancels the job.
func (t *transfer) accepts(from rdma.EngineID, m *pb.TrafficMessage) error {
	if err := t.bind(from); err != nil {
		return err
	}
	switch c := m.GetCancel(); {
	case c != nil:
		return fmt.Errorf("traffic: request %q: by the %s (%s): %w", t.request, t.other, c.Reason, ErrCancelled)
	case m.Version != wireVersion:
		return fmt.Errorf("traffic: request %q: the %s sends messages of version %d; this manager supports %d: run the same release on both sides: %w",
			t.request, t.other, max(m.Version, 1), wireVersion, ErrJob)
	}
	return nil
}

// writePaged is Scope.WritePaged for any number of pages: it splits more than rdma.MaxPages pages
// into several writes. Only the last write carries the immediate, and it is sent after the other
// writes have arrived. So the receiver counts one immediate, and then all pages are in place.
func (t *transfer) writePaged(ctx context.Context, w rdma.PagedWrite) error {
	src, dst, imm, done := w.SrcPages.Indices, w.DstPages.Indices, w.Imm, w.Done
	for len(src) > rdma.MaxPages {
		b := newBatch(1)
		w.SrcPages.Indices, w.DstPages.Indices, w.Imm, w.Done = src[:rdma.MaxPages], dst[:rdma.MaxPages], rdma.Imm{}, b.done
		if err := t.scope.WritePaged(ctx, w); err != nil {
			return err
		}
		if err := b.wait(ctx); err != nil {
			return err
		}
		src, dst = src[rdma.MaxPages:], dst[rdma.MaxPages:]
	}
	w.SrcPages.Indices, w.DstPages.Indices, w.Imm, w.Done = src, dst, imm, done
	return t.scope.WritePaged(ctx, w)
}

// sendMessage sends the peer a message about this request. It waits for space in the session's send queue
// until the job ends.
func (t *transfer) sendMessage(m *pb.TrafficMessage) error {
	t.mu.Lock()
	peer := t.peer
	t.mu.Unlock()
	m.Request, m.Version = t.request, wireVersion
	return t.m.send(t.tail, peer, m, t.messageSent)
}

// messageSent is the completion function of a message. If the message was lost, it fails the job,
// because the job cannot continue.
func (t *transfer) messageSent(err error) {
	if err != nil {
		t.fail(err)
	}
}

// unwatch cancels deathWatch. It is called when the job does not need the peer any more.
func (t *transfer) unwatch() {
	t.mu.Lock()
	watch := t.deathWatch
	t.mu.Unlock()
	if watch != nil {
		watch.Cancel()
	}
}

// close ends the job. When it returns, no write of the peer can touch the job's memory
// and none of the job's transfers is running. It sends err, if not nil, to the peer and
// returns it.
func (t *transfer) close(err error) error {
	t.ended.Do(func() {
		cause := err
		if cause == nil {
			cause = errFinished
		}
		t.fail(cause)
		within, cancel := context.WithTimeout(context.WithoutCancel(t.ctx), teardownWithin)
		defer cancel()
		t.mu.Lock()
		peer := t.peer
		t.mu.Unlock()
		if !peer.IsZero() && err != nil {
			t.tellCancel(peer, err)
		}
		t.unwatch()
		if err != nil {
			t.cut()
		}
		safe := t.revoke(within)
		// An operation that ended because its session ended does not read the job's memory any
		// more.
		if err := t.scope.Cancel(within); err != nil && within.Err() != nil {
			safe = false
		}
		t.running.Wait()
		// The job's goroutines may have opened windows since.
		safe = t.revoke(within) && safe
		if err != nil {
			t.forgetImms()
		}
		if !safe {
			t.m.log.Error("a window of the request could not be revoked: its memory may still be written to and is not used again", "request", t.request)
		} else {
			for _, b := range t.buffers {
				b.Release()
			}
		}
		t.m.end(t.request, t.self)
	})
	return err
}

// revoke revokes the windows that the job has opened. It returns false if one could not be revoked.
func (t *transfer) revoke(ctx context.Context) (safe bool) {
	t.mu.Lock()
	windows := t.windows
	t.windows = nil
	t.mu.Unlock()
	safe = true
	for _, w := range windows {
		if err := w.Revoke(ctx); err != nil {
			safe = false
		}
	}
	return safe
}

// forgetImms drops the counts of immediates that arrived when the goroutines of the failed job did not wait
// for them any more. The engine keeps a bounded number of such counts, so they would be in the way of later
// jobs. The job's windows are revoked, so no further immediate of the job is counted.
func (t *transfer) forgetImms() {
	for i := range t.imms {
		x, err := t.m.opts.Compute.ExpectImm(rdma.Expect{Imm: t.firstImm + uint32(i), Count: math.MaxUint32, Done: func(error) {}})
		if err == nil {
			x.Cancel()
		}
	}
}

// tellCancel sends the peer a Cancel message, because the job has ended early. The message may be
// repeated after the job's end. If it cannot be sent, the peer's job ends with the session or at
// its deadline.
func (t *transfer) tellCancel(peer rdma.EngineID, why error) {
	ctx, cancel := context.WithTimeout(t.m.life, teardownWithin)
	m := &pb.TrafficMessage{Request: t.request, Version: wireVersion, Body: &pb.TrafficMessage_Cancel{Cancel: &pb.TrafficCancel{Reason: why.Error()}}}
	if err := t.m.send(ctx, peer, m, func(error) { cancel() }); err != nil {
		cancel()
	}
}

// errFinished is the error with which close ends a job that succeeded.
var errFinished = errors.New("finished")

// batch waits for n operations and keeps their first error.
type batch struct {
	mu   sync.Mutex
	left int
	err  error
	flag *rdma.Flag
}

func newBatch(n int) *batch { return &batch{left: n, flag: rdma.NewFlag()} }

// done is the completion function of each operation.
func (b *batch) done(err error) {
	b.mu.Lock()
	if b.err == nil {
		b.err = err
	}
	b.left--
	last := b.left == 0
	b.mu.Unlock()
	if last {
		b.flag.Set(b.err)
	}
}

// wait returns when all operations have ended, or with the error of ctx.
func (b *batch) wait(ctx context.Context) error { return b.flag.Wait(ctx) }
