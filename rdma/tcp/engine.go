package tcp

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/inbox"
	"github.com/penstock-kv/penstock/rdma/internal/peers"
	"github.com/penstock-kv/penstock/rdma/internal/quiet"
)

// Engine is the transfer engine over TCP.
type Engine struct {
	opts       Options
	id         rdma.EngineID
	nics       []*nic // at least one
	congestion string // what connections run with

	imms  *rdma.ImmCounters
	inbox atomic.Pointer[inbox.Inbox]
	stats counters
	log   *quiet.Log[logKind]
	// ticks is the engine's coarse clock: it counts the watch's rounds.
	ticks atomic.Uint64
	// pipes is nil unless Options.ZeroCopy is set.
	pipes *pipes

	// ctx ends when Close begins; running counts the engine's own goroutines.
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	closed  chan struct{}

	// peers are the live sessions, which have or had a rail; connecting is whose
	// turn it is to dial an address.
	peers      peers.Table[*session]
	connecting peers.Turns[rdma.NetAddr]

	mu      sync.Mutex
	closing bool
	// all are the sessions not yet removed; accepted those that a peer dialed, by
	// the name it gave them.
	all      map[*session]struct{}
	accepted map[acceptedKey]*session

	winMu sync.RWMutex
	// windows by key; nil once the engine is closed.
	windows map[uint64]*window
}

var _ rdma.Engine = (*Engine)(nil)

// New starts an engine. If it is to listen, it does so before New returns. ctx
// bounds the start only.
func New(ctx context.Context, opts Options) (*Engine, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{
		opts:     opts,
		imms:     rdma.NewImmCounters(opts.EarlyImmediates),
		log:      quiet.New[logKind](opts.Logger),
		closed:   make(chan struct{}),
		all:      make(map[*session]struct{}),
		accepted: make(map[acceptedKey]*session),
		windows:  make(map[uint64]*window),
	}
	_, _ = rand.Read(e.id[:])
	e.pipes = usablePipes(opts)
	e.congestion = usableCongestion(opts.Congestion, opts.Logger)
	if err := e.openNICs(ctx); err != nil {
		return nil, err
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	for _, n := range e.nics {
		if n.listener != nil {
			e.running.Go(func() { e.accept(n) })
		}
	}
	e.running.Go(e.watch)
	for _, n := range e.nics {
		if n.device != "" {
			e.running.Go(func() { e.watchLink(n) })
		}
	}
	return e, nil
}

// usablePipes returns nil if large writes have to be copied. It logs why if opts asks for
// zero copy.
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

// open returns ErrClosed once Close has begun.
func (e *Engine) open() error {
	if e.ctx.Err() != nil {
		return fmt.Errorf("rdma: %w", rdma.ErrClosed)
	}
	return nil
}

// session returns the live session with peer.
func (e *Engine) session(peer rdma.EngineID) (*session, error) {
	if s, ok := e.peers.Find(peer); ok {
		return s, nil
	}
	if err := e.open(); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("rdma: engine %v: %w", peer, rdma.ErrNoPeer)
}

// alive reports whether there is a session with peer that has not begun to end. A session
// that has begun to end is in the table for a moment longer.
func (e *Engine) alive(peer rdma.EngineID) bool {
	s, ok := e.peers.Find(peer)
	if !ok {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.why == nil
}

// sessions returns the live sessions.
func (e *Engine) sessions() []*session { return e.peers.All() }

// Peers implements rdma.Engine.
func (e *Engine) Peers() []rdma.Peer {
	var out []rdma.Peer
	for _, s := range e.sessions() {
		s.mu.Lock()
		out = append(out, rdma.Peer{
			ID: s.peer, Remote: s.remote, Dialed: s.dialed,
			InFlightOps: s.active, InFlightBytes: e.opts.InFlightBytes - s.freeBytes,
		})
		s.mu.Unlock()
	}
	return out
}

// Disconnect implements rdma.Engine.
func (e *Engine) Disconnect(peer rdma.EngineID) {
	with := slices.DeleteFunc(e.sessions(), func(s *session) bool { return s.peer != peer })
	e.part(with)
	for _, s := range with {
		s.fail(fmt.Errorf("rdma: %w from %v: %w", errDisconnected, peer, rdma.ErrPeerDied))
	}
}

// forget makes a session that begins to end unknown.
func (e *Engine) forget(s *session) {
	k := s.key()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.peers.Drop(k, s)
	if k := (acceptedKey{k.ID, s.id}); e.accepted[k] == s {
		delete(e.accepted, k)
	}
}

// key is the session's in the table of peers.
func (s *session) key() peers.Key { return peers.Key{ID: s.peerID(), Dialed: s.dialed} }

// removed removes a session whose operations have all ended.
func (e *Engine) removed(s *session) {
	select {
	case <-s.ready:
		e.stats.SessionsClosed.Add(1)
		e.imms.PeerDied(s.peer, s.why)
		e.logEnd(s)
		if e.opts.OnPeerDown != nil {
			e.opts.OnPeerDown(s.peer, s.why)
		}
	default: // never was complete
	}
	e.mu.Lock()
	delete(e.all, s)
	e.mu.Unlock()
}

// logEnd logs the end of a session. It warns unless the peer closed the session with
// nothing in flight, or this engine's caller ended it: neither needs action.
func (e *Engine) logEnd(s *session) {
	args := []any{"peer", s.peer.String(), "remote", s.remote}
	switch {
	case errors.Is(s.why, errHungUp):
		e.log.Debug("data-plane session ended by the peer, with nothing in flight", args...)
	case errors.Is(s.why, errDisconnected), errors.Is(s.why, rdma.ErrClosed):
		e.log.Debug("data-plane session ended here", append(args, "why", s.why)...)
	default:
		e.log.Warn(logSession, "data-plane session ended", append(args, "why", s.why)...)
	}
}

// logRail logs that a rail of a session that goes on is down.
func (e *Engine) logRail(r *rail, n *nic, why error, quiet bool) {
	args := []any{"peer", r.s.peer.String(), "nic", n.name, "rail", r.index, "why", why}
	if quiet {
		e.log.Debug("data-plane rail is down", args...)
		return
	}
	e.log.Warn(logRailDown, "data-plane rail is down; its work goes over the others", args...)
}

// logRailUp logs that a rail is up again.
func (e *Engine) logRailUp(c *conn) {
	if c.rail.index > 0 || c.generation > 1 {
		e.log.Debug("data-plane rail is up", "peer", c.s.peer.String(), "nic", c.nic.name, "rail", c.rail.index)
	}
}

// activate makes a session with its first rail known to the engine. An older
// session of the same peer ends first: its engine has given it up.
func (e *Engine) activate(s *session) error {
	k := s.key()
	for {
		e.mu.Lock()
		if e.closing {
			e.mu.Unlock()
			return fmt.Errorf("rdma: %w", rdma.ErrClosed)
		}
		old, ok := e.peers.At(k)
		if !ok {
			break
		}
		e.mu.Unlock()
		old.fail(fmt.Errorf("rdma: %v opened a new session: %w", s.peer, rdma.ErrPeerDied))
		<-old.removed
	}
	s.mu.Lock()
	ok := s.why == nil
	s.mu.Unlock()
	if ok {
		e.peers.Put(k, s) // should it end from here on, forget takes it out again
	}
	e.mu.Unlock()
	if !ok {
		return fmt.Errorf("rdma: session with %v ended before it began: %w", s.peer, rdma.ErrPeerDied)
	}
	e.stats.SessionsOpened.Add(1)
	if e.opts.OnPeerUp != nil {
		e.opts.OnPeerUp(s.peer)
	}
	// Last, so that OnPeerDown cannot come first: the session is not removed
	// before each connection of the rail has been started or abandoned.
	close(s.ready)
	return nil
}

// source returns the region and its memory.
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

// prepare reserves an op for a write of n bytes to dst.
// s, if set, is the session with dst's engine.
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
		if s, err = e.session(dst.Engine); err != nil {
			return nil, nil, err
		}
	}
	o, err := s.reserve(ctx, n, noWait)
	if err != nil {
		return nil, nil, err
	}
	o.kind, o.key = frameWrite, dst.NICs[0].Key
	if own != nil {
		if err := own.readers.Acquire(); err != nil {
			s.unreserve(o)
			return nil, nil, err
		}
		o.src, o.mem = own, own.mem
	}
	return s, o, nil
}

// Write implements rdma.Engine.
func (e *Engine) Write(ctx context.Context, w rdma.Write) error { return e.write(ctx, nil, &w) }

// write is Write, in the session with the destination's engine if that is known.
func (e *Engine) write(ctx context.Context, s *session, w *rdma.Write) error {
	if err := w.Check(); err != nil {
		return err
	}
	s, o, err := e.prepare(ctx, s, w.Src, &w.Dst, w.Len, w.NoWait)
	if err != nil {
		return err
	}
	o.imm, o.done, o.class = w.Imm, w.Done, w.Class
	o.add(w.SrcOffset, w.Dst.Base+w.DstOffset, w.Len, uint64(e.opts.PieceBytes), 0)
	o.seal()
	return s.submit(o)
}

// WritePaged implements rdma.Engine.
func (e *Engine) WritePaged(ctx context.Context, w rdma.PagedWrite) error {
	if err := w.Check(); err != nil {
		return err
	}
	hi, total := bits.Mul64(w.PageLen, uint64(len(w.SrcPages.Indices)))
	if hi != 0 {
		return fmt.Errorf("tcp: %d pages of %d bytes: %w", len(w.SrcPages.Indices), w.PageLen, rdma.ErrRange)
	}
	s, o, err := e.prepare(ctx, nil, w.Src, &w.Dst, total, w.NoWait)
	if err != nil {
		return err
	}
	if err := o.layPages(&w, uint64(e.opts.PieceBytes)); err != nil {
		s.unreserve(o)
		return err
	}
	o.imm, o.done, o.class = w.Imm, w.Done, w.Class
	return s.submit(o)
}

// layPages cuts the pages of w into runs and frames.
func (o *op) layPages(w *rdma.PagedWrite, piece uint64) error {
	frame := uint64(0)
	for i := range w.SrcPages.Indices {
		src, err := w.SrcPages.At(i, w.PageLen, uint64(len(o.mem)))
		if err != nil {
			return fmt.Errorf("source %w", err)
		}
		dst, err := w.DstPages.At(i, w.PageLen, w.Dst.Len)
		if err != nil {
			return fmt.Errorf("destination %w", err)
		}
		frame = o.add(src, w.Dst.Base+dst, w.PageLen, piece, frame)
	}
	o.seal()
	return nil
}

// Send implements rdma.Engine.
func (e *Engine) Send(ctx context.Context, to rdma.EngineID, msg []byte, done func(error)) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("tcp: send: %w", err)
	}
	if len(msg) > e.opts.MaxMessage {
		return fmt.Errorf("tcp: message of %d bytes, at most %d (MaxMessage): %w", len(msg), e.opts.MaxMessage, rdma.ErrRange)
	}
	s, err := e.session(to)
	if err != nil {
		return err
	}
	o, err := s.reserve(ctx, uint64(len(msg)), false)
	if err != nil {
		return err
	}
	o.kind, o.done = frameMessage, done
	o.msg = append(o.msg[:0], msg...)
	o.seal()
	return s.submit(o)
}

// ExpectImm implements rdma.Engine.
func (e *Engine) ExpectImm(x rdma.Expect) (*rdma.Expectation, error) {
	return e.imms.Expect(x, e.alive)
}

// Close implements rdma.Engine.
func (e *Engine) Close() error {
	e.mu.Lock()
	if e.closing {
		e.mu.Unlock()
		<-e.closed
		return nil
	}
	e.closing = true
	all := make([]*session, 0, len(e.all))
	for s := range e.all {
		all = append(all, s)
	}
	e.mu.Unlock()
	e.part(all)
	e.cancel()
	for _, n := range e.nics {
		n.close()
	}
	for _, s := range all {
		s.fail(fmt.Errorf("rdma: %w", rdma.ErrClosed))
	}
	for _, s := range all {
		<-s.removed
	}
	e.winMu.Lock()
	e.windows = nil
	e.winMu.Unlock()
	e.imms.Close()
	e.running.Wait()
	if e.pipes != nil {
		e.pipes.close()
	}
	close(e.closed)
	return nil
}

// partWait bounds the wait for acks to be written before the sessions end.
const partWait = time.Second

// part gives sessions that are about to end a moment for their last acks.
func (e *Engine) part(all []*session) {
	t := time.NewTimer(partWait)
	defer t.Stop()
	var parted []<-chan struct{}
	for _, s := range all {
		if c := s.part(); c != nil {
			parted = append(parted, c)
		}
	}
	for _, c := range parted {
		select {
		case <-c:
		case <-t.C:
			return
		}
	}
}
