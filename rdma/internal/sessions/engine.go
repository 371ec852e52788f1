package sessions

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/internal/ratelog"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/inbox"
	"github.com/penstock-kv/penstock/rdma/internal/peers"
)

// LogKind is a kind of logged event. Each kind has its own rate limit.
type LogKind int

// Kinds of log events.
const (
	LogRefused LogKind = iota
	LogMalformed
	LogAuth
	LogSession
	LogAccept
	LogPath // a rail or an endpoint failed in a session that continues
	LogNIC
	LogLate
)

// ErrPeerClosed is the reason for the end of a session that the peer closed with no operation in
// flight.
var ErrPeerClosed = errors.New("closed the session with nothing in flight")

// ErrDisconnected is the reason for the end of a session on which this engine's caller called
// Disconnect.
var ErrDisconnected = errors.New("disconnected")

// Peer is an engine's session with a peer.
type Peer interface {
	comparable
	state() *State
	// Fail begins the end of the session. Only the reason of the first call is kept.
	Fail(why error)
}

// Engine is the part of an engine that starts, finds and ends sessions.
type Engine[S Peer] struct {
	Options
	Counters
	Imms  *rdma.ImmCounters
	Inbox atomic.Pointer[inbox.Inbox]
	Log   *ratelog.Log[LogKind]
	// Ticks is the number of rounds that Watch has made. The engine uses it as a coarse clock.
	Ticks atomic.Uint64

	// Ctx ends when Close begins. Running is the number of the engine's own goroutines. Closed is
	// closed when Close has finished.
	Ctx     context.Context
	Cancel  context.CancelFunc
	Running sync.WaitGroup
	Closed  chan struct{}

	// table holds the live sessions. connecting serialises the dials to one address.
	table      peers.Table[S]
	connecting peers.Turns[rdma.NetAddr]

	Mu      sync.Mutex
	Closing bool
	// All are the sessions that have not been removed yet.
	All map[S]struct{}
}

// Options are the options of an engine that Engine and its sessions need.
type Options struct {
	// Name is the prefix of error texts.
	Name string
	// InFlightBytes is the in-flight budget of a session, in bytes.
	InFlightBytes int64
	// MaxMessage is the longest Send, in bytes.
	MaxMessage      int
	EarlyImmediates int
	OnPeerUp        func(rdma.EngineID)
	OnPeerDown      func(rdma.EngineID, error)
	Logger          *slog.Logger
}

// Init initialises the engine.
func (e *Engine[S]) Init(o Options) {
	e.Options, e.Imms, e.Log = o, rdma.NewImmCounters(o.EarlyImmediates), ratelog.New[LogKind](o.Logger)
	e.Ctx, e.Cancel = context.WithCancel(context.Background())
	e.Closed, e.All = make(chan struct{}), make(map[S]struct{})
}

// Open returns nil while the engine is open, and ErrClosed once Close has begun.
func (e *Engine[S]) Open() error {
	if e.Ctx.Err() != nil {
		return fmt.Errorf("rdma: %w", rdma.ErrClosed)
	}
	return nil
}

// Session returns the live session with peer.
func (e *Engine[S]) Session(peer rdma.EngineID) (S, error) {
	s, ok := e.table.Find(peer)
	if ok {
		return s, nil
	}
	if err := e.Open(); err != nil {
		return s, err
	}
	return s, fmt.Errorf("rdma: engine %v: %w", peer, rdma.ErrNoPeer)
}

// Recipient returns the session over which msg can be sent to the engine with the ID to. It returns
// an error if ctx has ended, msg is too long, or there is no such session.
func (e *Engine[S]) Recipient(ctx context.Context, to rdma.EngineID, msg []byte) (none S, _ error) {
	if err := ctx.Err(); err != nil {
		return none, fmt.Errorf("%s: send: %w", e.Name, err)
	}
	if len(msg) > e.MaxMessage {
		return none, fmt.Errorf("%s: message of %d bytes, at most %d (MaxMessage): %w", e.Name, len(msg), e.MaxMessage, rdma.ErrRange)
	}
	return e.Session(to)
}

// Alive reports whether there is a session with peer that has not begun to end. (A session that
// has begun to end stays in the table for a short time.)
func (e *Engine[S]) Alive(peer rdma.EngineID) bool {
	s, ok := e.table.Find(peer)
	return ok && s.state().alive()
}

// Sessions returns the live sessions.
func (e *Engine[S]) Sessions() []S { return e.table.All() }

// Peers implements the method of rdma.Engine.
func (e *Engine[S]) Peers() []rdma.Peer {
	var out []rdma.Peer
	for _, live := range e.Sessions() {
		s := live.state()
		s.Mu.Lock()
		out = append(out, rdma.Peer{
			ID: s.Peer, Remote: s.Remote, Dialed: s.Dialed,
			InFlightOps: s.Active, InFlightBytes: e.InFlightBytes - s.FreeBytes,
		})
		s.Mu.Unlock()
	}
	return out
}

// Stats implements the method of rdma.Engine.
func (e *Engine[S]) Stats() rdma.Stats { return e.Counters.Stats(e.Imms, e.Peers()) }

// ExpectImm implements the method of rdma.Engine.
func (e *Engine[S]) ExpectImm(x rdma.Expect) (*rdma.Expectation, error) {
	return e.Imms.Expect(x, e.Alive)
}

// Recv implements the method of rdma.Engine.
func (e *Engine[S]) Recv(count, sizeBytes int, handler func(from rdma.EngineID, msg []byte)) error {
	if handler == nil {
		return fmt.Errorf("%s: receive buffers without a handler: %w", e.Name, rdma.ErrRange)
	}
	p, err := inbox.New(count, sizeBytes)
	if err != nil {
		return err
	}
	e.Mu.Lock()
	defer e.Mu.Unlock()
	if e.Closing {
		return fmt.Errorf("%s: recv: %w", e.Name, rdma.ErrClosed)
	}
	if !e.Inbox.CompareAndSwap(nil, p) {
		return fmt.Errorf("%s: receive buffers: %w", e.Name, rdma.ErrExists)
	}
	e.Running.Go(func() { p.Run(e.Ctx, handler) })
	return nil
}

// Scatter implements the method of rdma.Engine for the engine owner. It calls write for each
// destination.
func (e *Engine[S]) Scatter(ctx context.Context, owner rdma.Engine, x rdma.Scatter, write func(context.Context, S, *rdma.Write) error) error {
	if err := e.Open(); err != nil {
		return err
	}
	find, err := peers.Resolve(owner, x.Group, e.Session, func(s S) bool { return s.state().Dead() })
	if err != nil {
		return err
	}
	return peers.Scatter(ctx, x, find, write)
}

// Connect implements the method of rdma.Engine. where are the addresses on which the engine peer
// listens; peer is zero if it is unknown. dial opens a session at these addresses.
func (e *Engine[S]) Connect(ctx context.Context, peer rdma.EngineID, where []rdma.NetAddr, token rdma.Token, dial func(context.Context) (rdma.EngineID, error)) (none rdma.EngineID, _ error) {
	if len(where) == 0 {
		if !peer.IsZero() && e.Alive(peer) {
			return peer, nil
		}
		return none, fmt.Errorf("%s: engine %v does not listen; it must connect to this engine: %w", e.Name, peer, rdma.ErrNoPeer)
	}
	giveUp, err := e.connecting.Take(ctx, where[0])
	if err != nil {
		return none, fmt.Errorf("%s: connect to %s: %w", e.Name, where[0], err)
	}
	defer giveUp()
	if err := e.Open(); err != nil {
		return none, fmt.Errorf("%s: connect: %w", e.Name, err)
	}
	if !peer.IsZero() && e.Alive(peer) {
		return peer, nil
	}
	if peer.IsZero() {
		// Another goroutine may have connected to these addresses in the meantime. Its session is
		// used, because a second session with the same peer would end it.
		if peer, ok := e.dialedTo(where, token); ok {
			return peer, nil
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.Ctx, cancel)()
	if peer, err = dial(ctx); err != nil {
		if e.Ctx.Err() != nil {
			err = rdma.ErrClosed
		}
		return none, fmt.Errorf("%s: connect to %s: %w", e.Name, where[0], err)
	}
	return peer, nil
}

// dialedTo returns the engine of a session that was dialed at the same addresses, with the same
// token, and has not begun to end.
func (e *Engine[S]) dialedTo(where []rdma.NetAddr, token rdma.Token) (rdma.EngineID, bool) {
	for _, live := range e.Sessions() {
		s := live.state()
		if s.Dialed && slices.Equal(s.Where, where) && bytes.Equal(s.Token, token) && e.Alive(s.Peer) {
			return s.Peer, true
		}
	}
	return rdma.EngineID{}, false
}

// Activate adds a session to the table. If the table already has a session under the same key,
// Activate first ends that session and waits for its removal, because the peer has replaced it.
func (e *Engine[S]) Activate(live S) error {
	s := live.state()
	k := s.key()
	for {
		e.Mu.Lock()
		if e.Closing {
			e.Mu.Unlock()
			return fmt.Errorf("rdma: %w", rdma.ErrClosed)
		}
		old, ok := e.table.At(k)
		if !ok {
			break
		}
		e.Mu.Unlock()
		old.Fail(fmt.Errorf("rdma: %v opened a new session: %w", s.Peer, rdma.ErrPeerDied))
		<-old.state().Removed
	}
	ok := s.alive()
	if ok {
		e.All[live] = struct{}{}
		e.table.Put(k, live) // if the session ends after this, Drop removes it
	}
	e.Mu.Unlock()
	if !ok {
		return fmt.Errorf("rdma: session with %v ended before it began: %w", s.Peer, rdma.ErrPeerDied)
	}
	e.SessionsOpened.Add(1)
	if e.OnPeerUp != nil {
		e.OnPeerUp(s.Peer)
	}
	// Ready is closed last, so that OnPeerDown cannot precede OnPeerUp. The goroutines that the
	// engine starts for the session must have ended before Remove is called.
	close(s.Ready)
	return nil
}

// Drop removes a session from the table. It is called when the session begins to end.
func (e *Engine[S]) Drop(s S) {
	e.Mu.Lock()
	defer e.Mu.Unlock()
	e.table.Drop(s.state().key(), s)
}

// Remove calls OnPeerDown for an ended session and removes the session from All. It is called when
// all operations of the session have ended.
func (e *Engine[S]) Remove(live S) {
	s := live.state()
	select {
	case <-s.Ready:
		e.SessionsClosed.Add(1)
		e.Imms.PeerDied(s.Peer, s.Why)
		e.logEnd(s)
		if e.OnPeerDown != nil {
			e.OnPeerDown(s.Peer, s.Why)
		}
	default: // the session was never complete
	}
	e.Mu.Lock()
	delete(e.All, live)
	e.Mu.Unlock()
	close(s.Removed)
}

// logEnd logs the end of a session, normally as a warning. If the peer closed the session with no
// operation in flight, or if this engine's caller ended the session, no action is needed, so logEnd
// logs at debug level.
func (e *Engine[S]) logEnd(s *State) {
	args := []any{"peer", s.Peer.String(), "remote", s.Remote}
	switch {
	case errors.Is(s.Why, ErrPeerClosed):
		e.Log.Debug("data-plane session ended by the peer, with nothing in flight", args...)
	case errors.Is(s.Why, ErrDisconnected), errors.Is(s.Why, rdma.ErrClosed):
		e.Log.Debug("data-plane session ended by this engine", append(args, "why", s.Why)...)
	default:
		e.Log.Warn(LogSession, "data-plane session ended", append(args, "why", s.Why)...)
	}
}

// Unremoved returns the live sessions and the sessions that are ending.
func (e *Engine[S]) Unremoved() []S {
	e.Mu.Lock()
	defer e.Mu.Unlock()
	return slices.Collect(maps.Keys(e.All))
}

// Disconnect ends the sessions with peer. Before that it calls part, if part is not nil, with
// these sessions.
func (e *Engine[S]) Disconnect(peer rdma.EngineID, part func([]S)) {
	with := slices.DeleteFunc(e.Sessions(), func(s S) bool { return s.state().Peer != peer })
	if part != nil {
		part(with)
	}
	for _, s := range with {
		s.Fail(fmt.Errorf("rdma: %w from %v: %w", ErrDisconnected, peer, rdma.ErrPeerDied))
	}
}

// BeginClose begins to close the engine: after that, no session can be added. If another call has
// already begun, BeginClose waits for Closed and returns false.
func (e *Engine[S]) BeginClose() (first bool) {
	e.Mu.Lock()
	first, e.Closing = !e.Closing, true
	e.Mu.Unlock()
	if !first {
		<-e.Closed
	}
	return first
}

// EndAll ends the sessions because the engine closes, and returns when they have been removed.
func (e *Engine[S]) EndAll(all []S) {
	for _, s := range all {
		s.Fail(fmt.Errorf("rdma: %w", rdma.ErrClosed))
	}
	for _, s := range all {
		<-s.state().Removed
	}
}
