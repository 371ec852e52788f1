package group

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// Engine is the transfer engine over a group of NICs.
type Engine struct {
	opts      Options
	admission *rdma.Admission
	id        rdma.EngineID
	addr      rdma.Addr
	// Properties that all domains share. counted: an endpoint is ordered and stops at a refusal,
	// so the number of immediates that arrived determines which arrived. final: closing a window
	// is enough to revoke it. emptyMessages: an empty write is sent as a message. maxWrite: the
	// longest Work, in bytes.
	counted, final, emptyMessages bool
	maxWrite                      uint64

	core        sessions.Engine[*session]
	outbox      *outbox
	serials     atomic.Uint32
	revocations atomic.Uint64
	// revokes counts the running revocations. withdrawSlots is a semaphore of withdrawalsMax slots
	// for the revocations that wait for peers.
	revokes       sync.WaitGroup
	withdrawSlots chan struct{}

	// nics holds, at each index, the NIC in use or the last NIC that was in use.
	nics []atomic.Pointer[nic]
	// admitted is the number of sessions that will soon be in core.All. Guarded by core.Mu.
	admitted int

	// regMu is held for reading while memory is registered, opened or closed, and for writing
	// while a NIC is added or removed. So each region is registered with each NIC.
	regMu     sync.RWMutex
	released  bool
	regionsMu sync.Mutex
	regions   map[*region]struct{}

	keysMu sync.RWMutex
	keys   map[remoteKey]*window
}

var _ rdma.Engine = (*Engine)(nil)

// New starts an engine over opts.Domains. If there is a Listener, the engine accepts sessions
// before New returns. ctx bounds the start only.
func New(ctx context.Context, opts Options) (*Engine, error) {
	opts.EnsureDefaults()
	err := opts.Validate()
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = opts.Control.ensureAddr()
	}
	var e *Engine
	if err == nil {
		e, err = newEngine(opts)
	}
	if err != nil {
		if opts.Control.Listener != nil {
			_ = opts.Control.Listener.Close()
		}
		if e == nil {
			for _, d := range opts.Domains {
				_ = d.Close()
			}
		}
		return nil, err
	}
	for i := range e.nics {
		e.core.Running.Go(e.nics[i].Load().poll)
	}
	if opts.Control.Listener != nil {
		e.core.Running.Go(e.accept)
	}
	e.core.Running.Go(e.watch)
	return e, nil
}

// newEngine makes an engine without starting the engine's goroutines. If newEngine fails it closes
// the domains.
func newEngine(opts Options) (_ *Engine, err error) {
	e := &Engine{
		opts:          opts,
		admission:     rdma.AdmissionOf(opts.Admission, opts.Token),
		withdrawSlots: make(chan struct{}, withdrawalsMax),
		nics:          make([]atomic.Pointer[nic], len(opts.Domains)),
		regions:       make(map[*region]struct{}), keys: make(map[remoteKey]*window),
		counted: true, final: true, maxWrite: ^uint64(0),
	}
	_, _ = rand.Read(e.id[:])
	e.addr.Engine = e.id
	e.core.Init(sessions.Options{
		Name: "group", InFlightBytes: opts.InFlightBytes, MaxMessage: opts.MaxMessage, EarlyImmediates: opts.EarlyImmediates,
		OnPeerUp: opts.OnPeerUp, OnPeerDown: opts.OnPeerDown, Logger: opts.Logger,
	})
	for i, d := range opts.Domains {
		n, err := e.newNIC(i, d)
		if err != nil {
			for _, rest := range opts.Domains[i:] {
				err = errors.Join(err, rest.Close())
			}
			return e, errors.Join(err, e.closeDomains())
		}
		e.nics[i].Store(n)
		e.counted = e.counted && n.lim.Ordered && n.lim.RefusalBreaks
		e.final = e.final && n.lim.CloseIsFinal
		e.emptyMessages = e.emptyMessages || n.lim.EmptyUnchecked
		e.maxWrite = min(e.maxWrite, n.lim.MaxWrite)
		if opts.Control.Listener != nil {
			e.addr.NICs = append(e.addr.NICs, n.addr)
		}
	}
	if e.outbox, err = e.newOutbox(); err != nil {
		return e, errors.Join(err, e.closeDomains())
	}
	return e, nil
}

// closeDomains closes the domains. No poller may be running.
func (e *Engine) closeDomains() error {
	var errs []error
	for i := range e.nics {
		if n := e.nics[i].Load(); n != nil {
			errs = append(errs, n.closeDomain())
		}
	}
	if e.outbox != nil {
		e.outbox.freeMem()
	}
	return errors.Join(errs...)
}

// Addr implements rdma.Engine.
func (e *Engine) Addr() rdma.Addr { return e.addr }

// NICs implements rdma.Engine. A NIC is down if its domain is dead. It is also down if there are
// sessions and no session has a working endpoint on it.
func (e *Engine) NICs() []rdma.NIC {
	out := make([]rdma.NIC, len(e.nics))
	sessions := e.core.Sessions()
	for i := range e.nics {
		n := e.nics[i].Load()
		x := rdma.NIC{Name: n.name, Addr: n.addr, Up: true, BytesOut: n.bytesOut.Load(), BytesIn: n.bytesIn.Load()}
		if n.dead.Load() {
			x.Up, x.Reason = false, n.reason().Error()
		} else if why := laneReason(sessions, i); why != nil {
			x.Up, x.Reason = false, why.Error()
		}
		out[i] = x
	}
	return out
}

// laneReason returns why no session has a working lane on a NIC. It returns nil if a session has
// one, or if there is no session.
func laneReason(sessions []*session, nic int) (why error) {
	for _, s := range sessions {
		for _, l := range s.lanes {
			if l.nicIndex != nic {
				continue
			}
			if l.up.Load() {
				return nil
			}
			l.mu.Lock()
			if l.why != nil {
				why = fmt.Errorf("endpoint to %v: %w", s.Peer, l.why)
			}
			l.mu.Unlock()
		}
	}
	return why
}

// Info implements rdma.Engine.
func (e *Engine) Info() rdma.Info {
	detail := "1 NIC"
	if n := len(e.nics); n > 1 {
		detail = fmt.Sprintf("%d NICs", n)
	}
	if e.opts.Detail != "" {
		detail += ", " + e.opts.Detail
	}
	spans := true
	for i := range e.nics {
		spans = spans && e.nics[i].Load().lim.Spans
	}
	return rdma.Info{
		Provider: e.opts.Provider, Detail: detail, Spans: spans,
		HeartbeatInterval: e.opts.HeartbeatInterval, IdleTimeout: e.opts.IdleTimeout,
	}
}

// Peers implements rdma.Engine.
func (e *Engine) Peers() []rdma.Peer { return e.core.Peers() }

// Stats implements rdma.Engine. The target's engine cannot observe writes without an immediate.
// WritesIn and WriteBytesIn therefore count the writes whose immediate arrived, and the payload of
// these writes.
func (e *Engine) Stats() rdma.Stats { return e.core.Stats() }

// Disconnect implements rdma.Engine.
func (e *Engine) Disconnect(peer rdma.EngineID) { e.core.Disconnect(peer, nil) }

// Recv implements rdma.Engine.
func (e *Engine) Recv(count, sizeBytes int, handler func(from rdma.EngineID, msg []byte)) error {
	return e.core.Recv(count, sizeBytes, handler)
}

// source returns r, the source of a write of n bytes, as a region of this engine. It returns nil if
// there is no source or n is 0.
func (e *Engine) source(r rdma.Region, n uint64) (*region, error) {
	if r == nil || n == 0 {
		return nil, nil
	}
	own, ok := r.(*region)
	if !ok || own.e != e {
		return nil, fmt.Errorf("group: source: %w", rdma.ErrForeign)
	}
	return own, nil
}

// target checks the destination and the class of an operation before room is reserved for the
// operation. It returns the session.
func (e *Engine) target(ctx context.Context, dst *rdma.Desc, class rdma.Class) (*session, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("group: write: %w", err)
	}
	if class >= rdma.Classes {
		return nil, fmt.Errorf("group: write of %v; there are %d classes: %w", class, rdma.Classes, rdma.ErrRange)
	}
	if len(dst.NICs) == 0 {
		return nil, fmt.Errorf("group: write to a Desc without a key: %w", rdma.ErrMalformed)
	}
	return e.core.Session(dst.Engine)
}

// prepare reserves an op for a write of n bytes to dst.
func (e *Engine) prepare(ctx context.Context, s *session, src rdma.Region, dst *rdma.Desc, n uint64, noWait bool) (*op, error) {
	own, err := e.source(src, n)
	if err != nil {
		return nil, err
	}
	queue := forWrite
	if n == 0 && e.emptyMessages {
		queue = forMessage
	}
	o, err := s.Reserve(ctx, queue, n, noWait)
	if err != nil {
		return nil, err
	}
	err = o.aim(dst, e.id)
	if err == nil && own != nil {
		o.src, err = own, o.Hold(&own.readers)
	}
	if err != nil {
		s.Unreserve(o)
		return nil, err
	}
	return o, nil
}

// runBytesMax returns the largest size of a run (a contiguous part of an operation) in bytes: at
// most one Work and at most one piece.
func (e *Engine) runBytesMax() uint64 { return min(e.maxWrite, uint64(e.opts.PieceBytes)) }

// dispatch submits an op whose runs have been laid out. An op without runs is an empty write, with
// the destination offset off.
func (e *Engine) dispatch(ctx context.Context, s *session, o *op, off uint64, noWait bool) error {
	if len(o.Runs) > 0 {
		return s.submit(o)
	}
	if o.kind == opMessage {
		return e.sendEmpty(ctx, s, o, off, noWait)
	}
	o.Runs = append(o.Runs, sessions.Run{Dst: off})
	return s.submit(o)
}

// sendEmpty submits an empty write as a message.
func (e *Engine) sendEmpty(ctx context.Context, s *session, o *op, off uint64, noWait bool) error {
	o.empty = true
	return s.send(ctx, o, noWait, func(o *op, low uint64) {
		var p [emptySize]byte
		le.PutUint32(p[0:], o.keys[0].serial)
		le.PutUint64(p[8:], o.keys[0].key)
		le.PutUint64(p[16:], o.base+off)
		kind := byte(kindEmpty)
		if _, ok := o.Imm.Get(); ok {
			kind = kindImm
		}
		e.outbox.encode(o, kind, low, p[:])
	})
}

// Write implements rdma.Engine.
func (e *Engine) Write(ctx context.Context, w rdma.Write) error {
	if err := w.Check(); err != nil {
		return err
	}
	s, err := e.target(ctx, &w.Dst, w.Class)
	if err != nil {
		return err
	}
	return e.write(ctx, s, &w)
}

// write submits one write to a session.
func (e *Engine) write(ctx context.Context, s *session, w *rdma.Write) error {
	o, err := e.prepare(ctx, s, w.Src, &w.Dst, w.Len, w.NoWait)
	if err != nil {
		return err
	}
	o.Imm, o.Done, o.Class = w.Imm, w.Done, w.Class
	if w.Len > 0 {
		o.add(w.SrcOffset, w.DstOffset, w.Len, e.runBytesMax())
	}
	return e.dispatch(ctx, s, o, w.DstOffset, w.NoWait)
}

// WritePaged implements rdma.Engine.
func (e *Engine) WritePaged(ctx context.Context, w rdma.PagedWrite) error {
	if err := w.Check(); err != nil {
		return err
	}
	total, err := sessions.PagedBytes("group", &w)
	if err != nil {
		return err
	}
	s, err := e.target(ctx, &w.Dst, w.Class)
	if err != nil {
		return err
	}
	o, err := e.prepare(ctx, s, w.Src, &w.Dst, total, w.NoWait)
	if err != nil {
		return err
	}
	if err := o.layPages(&w, e.runBytesMax()); err != nil {
		s.Unreserve(o)
		return err
	}
	o.Imm, o.Done, o.Class = w.Imm, w.Done, w.Class
	return e.dispatch(ctx, s, o, 0, w.NoWait)
}

// Send implements rdma.Engine.
func (e *Engine) Send(ctx context.Context, to rdma.EngineID, msg []byte, done func(error)) error {
	s, err := e.core.Recipient(ctx, to, msg)
	if err != nil {
		return err
	}
	o, err := s.Reserve(ctx, forMessage, uint64(len(msg)), false)
	if err != nil {
		return err
	}
	o.Done = done
	return s.send(ctx, o, false, func(o *op, low uint64) { e.outbox.encode(o, kindMessage, low, msg) })
}

// ExpectImm implements rdma.Engine.
func (e *Engine) ExpectImm(x rdma.Expect) (*rdma.Expectation, error) {
	return e.core.ExpectImm(x)
}

// Close implements rdma.Engine.
func (e *Engine) Close() error {
	if !e.core.BeginClose() {
		return nil
	}
	all := e.core.Unremoved() // no session is added after BeginClose
	e.core.Cancel()
	if e.opts.Control.Listener != nil {
		_ = e.opts.Control.Listener.Close()
	}
	e.core.EndAll(all)
	e.core.Imms.Close()
	e.revokes.Wait()
	e.regMu.Lock()
	e.released = true
	e.regMu.Unlock()
	// From here on no NIC is replaced.
	for i := range e.nics {
		n := e.nics[i].Load()
		n.stop.Store(true)
		n.dom.Wake()
	}
	e.core.Running.Wait()
	var errs []error
	for i := range e.nics {
		if n := e.nics[i].Load(); !n.dead.Load() {
			errs = append(errs, n.closeDomain())
		}
	}
	e.outbox.freeMem()
	e.regionsMu.Lock()
	for r := range e.regions {
		r.closeDescriptor()
	}
	e.regionsMu.Unlock()
	close(e.core.Closed)
	return errors.Join(errs...)
}
