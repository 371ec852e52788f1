package copier

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/rdma"
)

// NIC copies by RDMA writes between two engines on one NIC.
type NIC struct {
	near, far rdma.Engine
	class     rdma.Class

	mu      sync.Mutex
	closed  bool
	pending int
	idle    chan struct{} // closed when pending reaches zero after Close
	free    *transfer
}

var _ Copier = (*NIC)(nil)

// NICOptions configure NewNIC.
type NICOptions struct {
	// Near and Far are two engines on the same NIC. Far listens. The caller keeps ownership of the
	// engines and closes them after the copier.
	Near, Far rdma.Engine
	// Token is the token of Far.
	Token rdma.Token
	// Class is the traffic class of the copies. The zero value is rdma.ClassKV, which has low
	// priority.
	Class rdma.Class
}

// NewNIC connects near to far.
func NewNIC(ctx context.Context, o NICOptions) (*NIC, error) {
	if o.Near == nil || o.Far == nil || o.Near == o.Far {
		return nil, errors.New("copier: a NIC takes two engines: an engine does not connect to itself")
	}
	if _, err := o.Near.Connect(ctx, o.Far.Addr(), o.Token); err != nil {
		return nil, fmt.Errorf("copier: connect the two engines of the NIC: %w", err)
	}
	return &NIC{near: o.Near, far: o.Far, class: o.Class, idle: make(chan struct{})}, nil
}

// Info implements Copier.
func (n *NIC) Info() Info {
	return Info{Kind: "nic", Detail: fmt.Sprintf("writes over loopback of %s, class %v", n.near.Info().Provider, n.class)}
}

// nicMemory is memory that is registered with both engines.
type nicMemory struct {
	nic *NIC
	src rdma.Region // registered with near; peers cannot write to it
	dst rdma.Region // of far
	// desc is the Desc of dst, kept because it does not change.
	desc rdma.Desc
	users
}

// Register implements Copier. The memory is registered twice, with near and with far, so it counts
// twice against the limit of locked memory.
func (n *NIC) Register(mem []byte, opts rdma.RegisterOptions) (Memory, error) {
	dst, err := n.far.Register(mem, opts)
	if err != nil {
		return nil, fmt.Errorf("copier: register a destination: %w", err)
	}
	opts.Local = true
	src, err := n.near.Register(mem, opts)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("copier: register a source: %w", err), dst.Close(context.Background()))
	}
	return &nicMemory{nic: n, src: src, dst: dst, desc: dst.Desc()}, nil
}

// Len implements Memory.
func (m *nicMemory) Len() uint64 { return m.src.Len() }

// Close implements Memory.
func (m *nicMemory) Close(ctx context.Context) error {
	if err := m.users.close(ctx); err != nil {
		return err
	}
	return errors.Join(m.src.Close(ctx), m.dst.Close(ctx))
}

// transfer is one batch in flight. Transfers are recycled, so a batch allocates no memory once
// enough transfers exist.
type transfer struct {
	nic      *NIC
	next     *transfer
	src, dst *nicMemory
	done     func(error)
	ended    func(error) // t.one, made once

	spans          []Span
	runs           []run
	srcIdx, dstIdx []uint32

	mu   sync.Mutex
	left int // writes that have not ended
	err  error
}

// Submit implements Copier.
func (n *NIC) Submit(ctx context.Context, b Batch) error {
	src, ok := b.Src.(*nicMemory)
	if !ok || src.nic != n {
		return foreign("source")
	}
	dst, ok := b.Dst.(*nicMemory)
	if !ok || dst.nic != n {
		return foreign("destination")
	}
	if b.After != nil {
		return foreign("mark")
	}
	if err := b.check(); err != nil {
		return err
	}
	t, err := n.take()
	if err != nil {
		return err
	}
	if err := both(&src.users, &dst.users); err != nil {
		n.recycle(t)
		n.leave()
		return err
	}
	t.src, t.dst, t.done = src, dst, b.Done
	t.spans = append(t.spans[:0], b.Spans...)
	t.runs = layout(t.spans, t.runs[:0])
	return t.post(ctx, b.NoWait)
}

// post submits the writes of a batch. If the first write is refused, the batch is not submitted.
// If a later write fails, the batch ends with that write's error.
func (t *transfer) post(ctx context.Context, noWait bool) error {
	writes := 0
	for i := range t.runs {
		writes += t.runs[i].writes()
	}
	t.left, t.err = writes, nil
	if writes == 0 {
		// There is nothing to copy. finish runs in a goroutine, because Done must not be called
		// inside Submit.
		go t.finish()
		return nil
	}
	posted := 0
	for i := range t.runs {
		n, err := t.postRun(ctx, &t.runs[i], noWait)
		posted += n
		if err != nil && posted == 0 {
			t.release()
			return err
		}
		if err != nil {
			// end runs in a goroutine, because it may be the end of the batch, and Done must not
			// be called inside Submit.
			go t.end(writes-posted, err)
			return nil
		}
	}
	return nil
}

// postRun submits one run and returns the number of accepted writes.
func (t *transfer) postRun(ctx context.Context, r *run, noWait bool) (posted int, err error) {
	if r.single {
		for _, s := range t.spans[r.from:r.to] {
			err := t.nic.near.Write(ctx, rdma.Write{
				Src: t.src.src, SrcOffset: s.Src, Dst: t.dst.desc, DstOffset: s.Dst, Len: s.Len,
				Class: t.nic.class, Done: t.ended, NoWait: noWait,
			})
			if err != nil {
				return posted, err
			}
			posted++
		}
		return posted, nil
	}
	t.srcIdx, t.dstIdx = t.srcIdx[:0], t.dstIdx[:0]
	for _, s := range t.spans[r.from:r.to] {
		t.srcIdx = append(t.srcIdx, r.src.index(s.Src))
		t.dstIdx = append(t.dstIdx, r.dst.index(s.Dst))
	}
	err = t.nic.near.WritePaged(ctx, rdma.PagedWrite{
		PageLen: r.len,
		Src:     t.src.src, SrcPages: rdma.Pages{Indices: t.srcIdx, Stride: r.src.stride, Offset: r.src.base},
		Dst: t.dst.desc, DstPages: rdma.Pages{Indices: t.dstIdx, Stride: r.dst.stride, Offset: r.dst.base},
		Class: t.nic.class, Done: t.ended, NoWait: noWait,
	})
	if err != nil {
		return 0, err
	}
	return 1, nil
}

// writeEnded records the end of one write.
func (t *transfer) writeEnded(err error) { t.end(1, err) }

// end records the end of writes that have ended or will not be posted.
func (t *transfer) end(writes int, err error) {
	t.mu.Lock()
	if t.err == nil {
		t.err = err
	}
	t.left -= writes
	last := t.left == 0
	t.mu.Unlock()
	if last {
		t.finish()
	}
}

// finish ends the batch. It releases the transfer before it calls Done, because Done may submit a
// batch. The batch's memories remain in use until Done has returned.
func (t *transfer) finish() {
	n, src, dst, done, err := t.nic, t.src, t.dst, t.done, t.err
	n.recycle(t)
	if done != nil {
		done(err)
	}
	src.users.done()
	dst.users.done()
	n.leave()
}

// release releases the transfer of a batch that was not submitted.
func (t *transfer) release() {
	n, src, dst := t.nic, t.src, t.dst
	n.recycle(t)
	src.users.done()
	dst.users.done()
	n.leave()
}

// take returns a transfer and counts it as pending.
func (n *NIC) take() (*transfer, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, fmt.Errorf("copier: %w", rdma.ErrClosed)
	}
	n.pending++
	t := n.free
	if t == nil {
		t = &transfer{nic: n}
		t.ended = t.writeEnded
		return t, nil
	}
	n.free = t.next
	return t, nil
}

func (n *NIC) recycle(t *transfer) {
	t.src, t.dst, t.done = nil, nil, nil
	n.mu.Lock()
	defer n.mu.Unlock()
	t.next, n.free = n.free, t
}

// leave undoes take.
func (n *NIC) leave() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pending--
	if n.closed && n.pending == 0 {
		close(n.idle)
	}
}

// Close implements Copier. It waits for the batches in flight; the engines' timeouts bound this
// wait. The engines stay open.
func (n *NIC) Close() error {
	n.mu.Lock()
	if !n.closed && n.pending == 0 {
		close(n.idle)
	}
	n.closed = true
	n.mu.Unlock()
	<-n.idle
	return nil
}
