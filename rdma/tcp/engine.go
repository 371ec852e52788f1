package tcp

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// Engine is the transfer engine over TCP.
type Engine struct {
	opts       Options
	admission  *rdma.Admission
	id         rdma.EngineID
	nics       []*nic // at least one
	congestion string // congestion control of the connections

	core sessions.Engine[*session]
	// railsLost counts rails (the connections between two NICs) that failed in sessions that
	// continued. framesResent counts frames that were then given to another rail. framesRepeated
	// counts frames that arrived twice; the second copy was dropped.
	railsLost, framesResent, framesRepeated atomic.Uint64
	// pipes are the pipes for splicing; nil unless Options.ZeroCopy is set and usable.
	pipes *pipes

	// accepted holds the sessions that a peer dialed, by the peer's session id. Guarded by
	// core.Mu.
	accepted map[acceptedKey]*session

	winMu sync.RWMutex
	// windows are the windows by key; nil once the engine is closed.
	windows map[uint64]*window
}

var _ rdma.Engine = (*Engine)(nil)

// New starts an engine. If Listen is set, the engine listens before New returns. ctx bounds the
// start only.
func New(ctx context.Context, opts Options) (*Engine, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{
		opts:      opts,
		admission: rdma.AdmissionOf(opts.Admission, opts.Token),
		accepted:  make(map[acceptedKey]*session),
		windows:   make(map[uint64]*window),
	}
	_, _ = rand.Read(e.id[:])
	e.pipes = usablePipes(opts)
	e.congestion = usableCongestion(opts.Congestion, opts.Logger)
	if err := e.openNICs(ctx); err != nil {
		return nil, err
	}
	e.core.Init(sessions.Options{
		Name: "tcp", InFlightBytes: opts.InFlightBytes, MaxMessage: opts.MaxMessage, EarlyImmediates: opts.EarlyImmediates,
		OnPeerUp: opts.OnPeerUp, OnPeerDown: opts.OnPeerDown, Logger: opts.Logger,
	})
	for _, n := range e.nics {
		if n.listener != nil {
			e.core.Running.Go(func() { e.accept(n) })
		}
	}
	e.core.Running.Go(e.watch)
	for _, n := range e.nics {
		if n.device != "" {
			e.core.Running.Go(func() { e.watchLink(n) })
		}
	}
	return e, nil
}

// usablePipes returns the pipes for splicing, or nil if large writes must be copied. If opts
// requests zero copy and splicing does not work, usablePipes logs the reason.
func usablePipes(opts Options) *pipes {
	if !opts.ZeroCopy || !canSplice {
		return nil
	}
	if err := probeSplice(); err != nil {
		opts.Logger.Warn("data plane: zero copy not available, large writes are copied", "err", err)
		return nil
	}
	return new(pipes)
}

// Addr implements rdma.Engine.
func (e *Engine) Addr() rdma.Addr {
	a := rdma.Addr{Engine: e.id}
	for _, n := range e.nics {
		if n.addr != "" {
			a.NICs = append(a.NICs, n.addr)
		}
	}
	return a
}

// Info implements rdma.Engine.
func (e *Engine) Info() rdma.Info {
	detail := fmt.Sprintf("%d connections a peer, congestion control %s", e.opts.Conns, e.congestion)
	if len(e.nics) > 1 {
		detail = fmt.Sprintf("%d NICs, %d connections a peer on each, congestion control %s", len(e.nics), e.opts.Conns, e.congestion)
	}
	if e.opts.QoS != nil {
		detail += ", marked by class"
	}
	if e.opts.TLS != nil {
		detail += ", TLS"
	} else if e.pipes != nil {
		detail += ", zero copy"
	}
	return rdma.Info{
		Provider: "tcp", Detail: detail, Spans: true,
		HeartbeatInterval: e.opts.HeartbeatInterval, IdleTimeout: e.opts.IdleTimeout,
	}
}

// Peers implements rdma.Engine.
func (e *Engine) Peers() []rdma.Peer { return e.core.Peers() }

// Stats implements rdma.Engine.
func (e *Engine) Stats() rdma.Stats { return e.core.Stats() }

// Disconnect implements rdma.Engine.
func (e *Engine) Disconnect(peer rdma.EngineID) { e.core.Disconnect(peer, e.drainAcks) }

// Recv implements rdma.Engine.
func (e *Engine) Recv(count, sizeBytes int, handler func(from rdma.EngineID, msg []byte)) error {
	return e.core.Recv(count, sizeBytes, handler)
}

// forget removes a session that begins to end from the tables of the engine.
func (e *Engine) forget(s *session) {
	e.core.Drop(s)
	e.core.Mu.Lock()
	defer e.core.Mu.Unlock()
	if k := (acceptedKey{s.PeerID(), s.id}); e.accepted[k] == s {
		delete(e.accepted, k)
	}
}

// logRail logs that a rail is down in a session that continues.
func (e *Engine) logRail(r *rail, n *nic, why error, quiet bool) {
	args := []any{"peer", r.s.Peer.String(), "nic", n.name, "rail", r.index, "why", why}
	if quiet {
		e.core.Log.Debug("data-plane rail is down", args...)
		return
	}
	e.core.Log.Warn(sessions.LogPath, "data-plane rail is down; the other rails take over its work", args...)
}

// logRailUp logs that a rail is up. It does not log the first generation of rail 0, with which most
// sessions begin.
func (e *Engine) logRailUp(c *conn) {
	if c.rail.index > 0 || c.generation > 1 {
		e.core.Log.Debug("data-plane rail is up", "peer", c.s.Peer.String(), "nic", c.nic.name, "rail", c.rail.index)
	}
}

// source returns r, the source of a write of n bytes, as a region of this engine. It returns nil if
// there is no source or n is 0.
func (e *Engine) source(r rdma.Region, n uint64) (*region, error) {
	if r == nil || n == 0 {
		return nil, nil
	}
	own, ok := r.(*region)
	if !ok || own.e != e {
		return nil, fmt.Errorf("tcp: source: %w", rdma.ErrForeign)
	}
	return own, nil
}

// prepare reserves an op for a write of n bytes to dst. s, if set, is the session with dst's
// engine.
func (e *Engine) prepare(ctx context.Context, s *session, src rdma.Region, dst *rdma.Desc, n uint64, noWait bool) (*session, *op, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, fmt.Errorf("tcp: write: %w", err)
	}
	if len(dst.NICs) == 0 {
		return nil, nil, fmt.Errorf("tcp: write to a Desc without a key: %w", rdma.ErrMalformed)
	}
	if dst.Base > ^uint64(0)-dst.Len {
		return nil, nil, fmt.Errorf("tcp: Desc of %d bytes at %d: %w", dst.Len, dst.Base, rdma.ErrRange)
	}
	own, err := e.source(src, n)
	if err != nil {
		return nil, nil, err
	}
	if s == nil {
		if s, err = e.core.Session(dst.Engine); err != nil {
			return nil, nil, err
		}
	}
	o, err := s.Reserve(ctx, sessions.Plain, n, noWait)
	if err != nil {
		return nil, nil, err
	}
	o.kind, o.key = frameWrite, dst.NICs[0].Key
	if own != nil {
		if err := o.Hold(&own.readers); err != nil {
			s.Unreserve(o)
			return nil, nil, err
		}
		o.mem = own.mem
	}
	return s, o, nil
}

// Write implements rdma.Engine.
func (e *Engine) Write(ctx context.Context, w rdma.Write) error { return e.write(ctx, nil, &w) }

// write submits w, as Write does. s, if not nil, is the session with the destination's engine.
func (e *Engine) write(ctx context.Context, s *session, w *rdma.Write) error {
	if err := w.Check(); err != nil {
		return err
	}
	s, o, err := e.prepare(ctx, s, w.Src, &w.Dst, w.Len, w.NoWait)
	if err != nil {
		return err
	}
	o.Imm, o.Done, o.Class = w.Imm, w.Done, w.Class
	o.add(w.SrcOffset, w.Dst.Base+w.DstOffset, w.Len, uint64(e.opts.PieceBytes), 0)
	o.seal()
	return s.submit(o)
}

// WritePaged implements rdma.Engine.
func (e *Engine) WritePaged(ctx context.Context, w rdma.PagedWrite) error {
	if err := w.Check(); err != nil {
		return err
	}
	total, err := sessions.PagedBytes("tcp", &w)
	if err != nil {
		return err
	}
	s, o, err := e.prepare(ctx, nil, w.Src, &w.Dst, total, w.NoWait)
	if err != nil {
		return err
	}
	if err := o.layPages(&w, uint64(e.opts.PieceBytes)); err != nil {
		s.Unreserve(o)
		return err
	}
	o.Imm, o.Done, o.Class = w.Imm, w.Done, w.Class
	return s.submit(o)
}

// layPages cuts the pages of w into runs and frames.
func (o *op) layPages(w *rdma.PagedWrite, piece uint64) error {
	frame := uint64(0)
	err := sessions.Pages(w, uint64(len(o.mem)), func(src, dst uint64) {
		frame = o.add(src, w.Dst.Base+dst, w.PageLen, piece, frame)
	})
	o.seal()
	return err
}

// Send implements rdma.Engine.
func (e *Engine) Send(ctx context.Context, to rdma.EngineID, msg []byte, done func(error)) error {
	s, err := e.core.Recipient(ctx, to, msg)
	if err != nil {
		return err
	}
	o, err := s.Reserve(ctx, sessions.Limited, uint64(len(msg)), false)
	if err != nil {
		return err
	}
	o.kind, o.Done = frameMessage, done
	o.msg = append(o.msg[:0], msg...)
	o.seal()
	return s.submit(o)
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
	e.drainAcks(all)
	e.core.Cancel()
	for _, n := range e.nics {
		n.close()
	}
	e.core.EndAll(all)
	e.winMu.Lock()
	e.windows = nil
	e.winMu.Unlock()
	e.core.Imms.Close()
	e.core.Running.Wait()
	if e.pipes != nil {
		e.pipes.close()
	}
	close(e.core.Closed)
	return nil
}

// drainWait is the longest time for which Close waits until the last acks are written.
const drainWait = time.Second

// drainAcks waits until the sessions, which are about to end, have written their last acks.
func (e *Engine) drainAcks(all []*session) {
	t := time.NewTimer(drainWait)
	defer t.Stop()
	var drained []<-chan struct{}
	for _, s := range all {
		if c := s.drainAcks(); c != nil {
			drained = append(drained, c)
		}
	}
	for _, c := range drained {
		select {
		case <-c:
		case <-t.C:
			return
		}
	}
}
