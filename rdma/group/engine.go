package group

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/inbox"
	"github.com/penstock-kv/penstock/rdma/internal/peers"
	"github.com/penstock-kv/penstock/rdma/internal/quiet"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// Engine is the transfer engine over a group of NICs.
type Engine struct {
	opts Options
	id   rdma.EngineID
	addr rdma.Addr
	// What the domains have in common. counted: how many immediates arrived on
	// an endpoint says which (ordered, and nothing goes on behind a refusal);
	// final: closing a window is enough to revoke it; emptyMessages: an empty
	// write travels as a message; maxWrite: the longest Work.
	counted, final, emptyMessages bool
	maxWrite                      uint64

	imms   *rdma.ImmCounters
	inbox  atomic.Pointer[inbox.Inbox]
	outbox *outbox
	stats  sessions.Counters
	log    *quiet.Log[logKind]
	// ticks is the engine's coarse clock: it counts the watch's rounds.
	ticks       atomic.Uint64
	serials     atomic.Uint32
	revocations atomic.Uint64

	// ctx ends when Close begins; running counts the engine's own goroutines,
	// revokes the revocations under way.
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	revokes sync.WaitGroup
	closed  chan struct{}
	// asking holds a token for each revocation that asks peers: withdrawalsMax at most.
	asking chan struct{}

	// nics are the NICs in use, or the last that was in that place.
	nics []atomic.Pointer[nic]
	// peers are the live sessions; connecting is whose turn it is to dial an
	// address.
	peers      peers.Table[*session]
	connecting peers.Turns[string]

	mu      sync.Mutex
	closing bool
	// all are the sessions not yet removed; admitted counts those that are about
	// to be in it.
	all      map[*session]struct{}
	admitted int

	// regMu is held for reading while memory is registered, opened or closed,
	// and for writing while a NIC comes or goes: each region is on each NIC.
	regMu     sync.RWMutex
	released  bool
	regionsMu sync.Mutex
	regions   map[*region]struct{}

	keysMu sync.RWMutex
	keys   map[remoteKey]*window
}

var _ rdma.Engine = (*Engine)(nil)

// New starts an engine over opts.Domains. If it is to accept sessions, it does
// so before New returns. ctx bounds the start only.
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
		e.running.Go(e.nics[i].Load().poll)
	}
	if opts.Control.Listener != nil {
		e.running.Go(e.accept)
	}
	e.running.Go(e.watch)
	return e, nil
}

// newEngine makes an engine whose goroutines do not run yet. After an error the
// domains have been closed.
func newEngine(opts Options) (_ *Engine, err error) {
	e := &Engine{
		opts: opts, log: quiet.New[logKind](opts.Logger),
		imms:    rdma.NewImmCounters(opts.EarlyImmediates),
		closed:  make(chan struct{}),
		asking:  make(chan struct{}, withdrawalsMax),
		nics:    make([]atomic.Pointer[nic], len(opts.Domains)),
		all:     make(map[*session]struct{}),
		regions: make(map[*region]struct{}), keys: make(map[remoteKey]*window),
		counted: true, final: true, maxWrite: ^uint64(0),
	}
	_, _ = rand.Read(e.id[:])
	e.addr.Engine = e.id
	e.ctx, e.cancel = context.WithCancel(context.Background())
	for i, d := range opts.Domains {
		n, err := e.newNIC(i, d)
		if err != nil {
			for _, rest := range opts.Domains[i:] {
				err = errors.Join(err, rest.Close())
			}
			return e, errors.Join(err, e.retireAll())
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
		return e, errors.Join(err, e.retireAll())
	}
	return e, nil
}

// retireAll gives the domains back; no poller runs.
func (e *Engine) retireAll() error {
	var errs []error
	for i := range e.nics {
		if n := e.nics[i].Load(); n != nil {
			errs = append(errs, n.retire())
		}
	}
	if e.outbox != nil {
		e.outbox.freed()
	}
	return errors.Join(errs...)
}

// Addr implements rdma.Engine.
func (e *Engine) Addr() rdma.Addr { return e.addr }

// NICs implements rdma.Engine. A NIC is down when its domain is dead, and when
// there are sessions and none of them has an endpoint on it that works.
func (e *Engine) NICs() []rdma.NIC {
	out := make([]rdma.NIC, len(e.nics))
	sessions := e.sessions()
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

// laneReason says why no session uses a NIC; nil if one does, or there is none.
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
				why = fmt.Errorf("endpoint to %v: %w", s.peer, l.why)
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

// unremoved returns the live sessions and the sessions that are ending. Payload of both may
// land here.
func (e *Engine) unremoved() []*session {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Collect(maps.Keys(e.all))
}

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
	for _, s := range e.sessions() {
		if s.peer == peer {
			s.fail(fmt.Errorf("rdma: %w from %v: %w", errDisconnected, peer, rdma.ErrPeerDied))
		}
	}
}

// forget makes a session that begins to end unknown.
func (e *Engine) forget(s *session) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.peers.Drop(s.key(), s)
}

// key is the session's in the table of peers.
func (s *session) key() peers.Key { return peers.Key{ID: s.peer, Dialed: s.dialed} }

// removed removes a session whose operations have all ended.
func (e *Engine) removed(s *session) {
	e.stats.SessionsClosed.Add(1)
	e.imms.PeerDied(s.peer, s.why)
	e.logEnd(s)
	if e.opts.OnPeerDown != nil {
		e.opts.OnPeerDown(s.peer, s.why)
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

// source returns the region of a write of n bytes.
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

// target is what an operation is checked against before room is reserved.
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
	return e.session(dst.Engine)
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
	o, err := s.reserve(ctx, queue, n, noWait)
	if err != nil {
		return nil, err
	}
	err = o.aim(dst, e.id)
	if err == nil && own != nil {
		if err = own.readers.Acquire(); err == nil {
			o.src = own
		}
	}
	if err != nil {
		s.unreserve(o)
		return nil, err
	}
	return o, nil
}

// most returns the longest run of an operation: a Work at most, and a piece.
func (e *Engine) most() uint64 { return min(e.maxWrite, uint64(e.opts.PieceBytes)) }

// dispatch submits an op whose runs are laid out.
func (e *Engine) dispatch(ctx context.Context, s *session, o *op, off uint64, noWait bool) error {
	if len(o.runs) > 0 {
		return s.submit(o)
	}
	if o.kind == opMessage {
		return e.sendEmpty(ctx, s, o, off, noWait)
	}
	o.runs = append(o.runs, run{0, off, 0})
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
		if _, ok := o.imm.Get(); ok {
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
	o.imm, o.done, o.class = w.Imm, w.Done, w.Class
	if w.Len > 0 {
		o.add(w.SrcOffset, w.DstOffset, w.Len, e.most())
	}
	return e.dispatch(ctx, s, o, w.DstOffset, w.NoWait)
}

// WritePaged implements rdma.Engine.
func (e *Engine) WritePaged(ctx context.Context, w rdma.PagedWrite) error {
	if err := w.Check(); err != nil {
		return err
	}
	hi, total := bits.Mul64(w.PageLen, uint64(len(w.SrcPages.Indices)))
	if hi != 0 {
		return fmt.Errorf("group: %d pages of %d bytes: %w", len(w.SrcPages.Indices), w.PageLen, rdma.ErrRange)
	}
	s, err := e.target(ctx, &w.Dst, w.Class)
	if err != nil {
		return err
	}
	o, err := e.prepare(ctx, s, w.Src, &w.Dst, total, w.NoWait)
	if err != nil {
		return err
	}
	if err := o.layPages(&w, e.most()); err != nil {
		s.unreserve(o)
		return err
	}
	o.imm, o.done, o.class = w.Imm, w.Done, w.Class
	return e.dispatch(ctx, s, o, 0, w.NoWait)
}

// Send implements rdma.Engine.
func (e *Engine) Send(ctx context.Context, to rdma.EngineID, msg []byte, done func(error)) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("group: send: %w", err)
	}
	if len(msg) > e.opts.MaxMessage {
		return fmt.Errorf("group: message of %d bytes, at most %d (MaxMessage): %w", len(msg), e.opts.MaxMessage, rdma.ErrRange)
	}
	s, err := e.session(to)
	if err != nil {
		return err
	}
	o, err := s.reserve(ctx, forMessage, uint64(len(msg)), false)
	if err != nil {
		return err
	}
	o.done = done
	return s.send(ctx, o, false, func(o *op, low uint64) { e.outbox.encode(o, kindMessage, low, msg) })
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
	e.mu.Unlock()
	all := e.unremoved() // no session is added any more
	e.cancel()
	if e.opts.Control.Listener != nil {
		_ = e.opts.Control.Listener.Close()
	}
	for _, s := range all {
		s.fail(fmt.Errorf("rdma: %w", rdma.ErrClosed))
	}
	for _, s := range all {
		<-s.removed
	}
	e.imms.Close()
	e.revokes.Wait()
	e.regMu.Lock()
	e.released = true
	e.regMu.Unlock()
	// From here no NIC is replaced any more.
	for i := range e.nics {
		n := e.nics[i].Load()
		n.stop.Store(true)
		n.dom.Wake()
	}
	e.running.Wait()
	var errs []error
	for i := range e.nics {
		if n := e.nics[i].Load(); !n.dead.Load() {
			errs = append(errs, n.retire())
		}
	}
	e.outbox.freed()
	e.regionsMu.Lock()
	for r := range e.regions {
		r.disown()
	}
	e.regionsMu.Unlock()
	close(e.closed)
	return errors.Join(errs...)
}
