package group

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/handshake"
)

// protocol is what a control connection begins with: "PGD", "PGC" and the
// version of the frames.
var protocol = handshake.Protocol{Hello: [4]byte{'P', 'G', 'D', '1'}, Challenge: [4]byte{'P', 'G', 'C', '1'}}

// handshakesMax bounds the connections that have not proved the token yet; more
// wait in the listener's backlog.
const handshakesMax = 256

// maxControlAddr leaves room for the serial number behind the address.
const maxControlAddr = 200

// ensureAddr fills and checks the address that peers are told.
func (c *Control) ensureAddr() error {
	if c.Listener == nil {
		c.Addr = ""
		return nil
	}
	if c.Addr == "" {
		c.Addr = c.Listener.Addr().String()
	}
	if len(c.Addr) > maxControlAddr || strings.ContainsRune(c.Addr, '#') {
		return fmt.Errorf("group: control address %q to advertise; at most %d bytes, without '#'", c.Addr, maxControlAddr)
	}
	return nil
}

// accept is the goroutine that takes connections.
func (e *Engine) accept() {
	slots := make(chan struct{}, handshakesMax)
	var pause time.Duration
	for {
		nc, err := e.opts.Control.Listener.Accept()
		if err != nil {
			if e.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of file descriptors, most likely: let some go first.
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			e.log.warn(logAccept, "data plane cannot accept", "listen", e.opts.Control.Addr, "err", err)
			select {
			case <-time.After(pause):
			case <-e.ctx.Done():
				return
			}
			continue
		}
		pause = 0
		select {
		case slots <- struct{}{}:
		case <-e.ctx.Done():
			_ = nc.Close()
			return
		}
		e.running.Go(func() {
			defer func() { <-slots }()
			e.admit(nc)
		})
	}
}

// admit performs the accepting side of a handshake on nc, which it closes if
// that fails.
func (e *Engine) admit(nc net.Conn) {
	stop := context.AfterFunc(e.ctx, func() { _ = nc.Close() })
	defer stop()
	_ = nc.SetDeadline(time.Now().Add(e.opts.HandshakeTimeout))
	err := e.admitConn(nc)
	if err == nil {
		return
	}
	_ = nc.Close()
	if !errors.Is(err, handshake.ErrSilent) && e.ctx.Err() == nil {
		e.log.warn(logAuth, "data-plane connection turned away", "remote", nc.RemoteAddr(), "err", err)
	}
}

// admitConn proves the token both ways and begins a session.
func (e *Engine) admitConn(nc net.Conn) error {
	h, verdict, err := protocol.Accept(nc, e.id, e.opts.Token)
	if err != nil {
		if !errors.Is(err, handshake.ErrSilent) {
			e.stats.authFailures.Add(1)
		}
		return err
	}
	if v, err := e.reserveSession(); err != nil {
		return errors.Join(err, verdict(v))
	}
	defer e.unreserveSession()
	if err := verdict(handshake.OK); err != nil {
		return err
	}
	s, err := e.setUp(nc, h.Engine, false)
	if err != nil {
		return fmt.Errorf("session with %v: %w", h.Engine, err)
	}
	return e.activate(s)
}

// reserveSession counts a session that is about to begin.
func (e *Engine) reserveSession() (handshake.Verdict, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return handshake.Request, rdma.ErrClosed
	}
	if len(e.all)+e.admitted >= e.opts.MaxPeers {
		return handshake.Full, fmt.Errorf("%d sessions, MaxPeers is %d", len(e.all), e.opts.MaxPeers)
	}
	e.admitted++
	return handshake.OK, nil
}

// unreserveSession ends what reserveSession counted.
func (e *Engine) unreserveSession() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.admitted--
}

// setUp exchanges what each side has to know of the other, and makes the
// session.
func (e *Engine) setUp(nc net.Conn, peer rdma.EngineID, dialed bool) (*session, error) {
	mine := setup{separate: e.opts.SeparateClasses, counted: e.counted, provider: e.opts.Provider}
	for i := range e.nics {
		mine.nics = append(mine.nics, e.nics[i].Load().name)
	}
	// Written beside the read: on a connection without buffers two writers
	// would wait for each other.
	wrote := make(chan error, 1)
	go func() {
		_, err := nc.Write(mine.append(nil))
		wrote <- err
	}()
	c := newStream(nc)
	kind, payload, _, err := c.readFrame(nil)
	if err != nil {
		_ = nc.Close()
	}
	err = errors.Join(err, <-wrote)
	if err == nil && kind != frameSetup {
		err = fmt.Errorf("frame of type %d where a setup has to be: %w", kind, errFrame)
	}
	if err != nil {
		return nil, err
	}
	theirs, err := decodeSetup(payload)
	if err != nil {
		e.stats.malformedFrames.Add(1)
		return nil, err
	}
	if theirs.provider != mine.provider || theirs.counted != mine.counted {
		return nil, fmt.Errorf("provider %.32q there (counted %v), %q here (%v): both sides need the same kind of NIC: %w",
			theirs.provider, theirs.counted, mine.provider, mine.counted, rdma.ErrUnsupported)
	}
	if err := nc.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	return newSession(e, peer, dialed, c, &theirs), nil
}

// activate makes a session known and starts it. An older session of the same
// peer ends first: its engine has given it up.
func (e *Engine) activate(s *session) error {
	k := peerKey{s.peer, s.dialed}
	for {
		e.mu.Lock()
		if e.closing {
			e.mu.Unlock()
			return fmt.Errorf("rdma: %w", rdma.ErrClosed)
		}
		old := (*e.peers.Load())[k]
		if old == nil {
			break
		}
		e.mu.Unlock()
		old.fail(fmt.Errorf("rdma: %v opened a new session: %w", s.peer, rdma.ErrPeerDied))
		<-old.buried
	}
	e.all[s] = struct{}{}
	e.setPeerLocked(k, s)
	// Counted before anybody can find the session and end it.
	s.running.Add(2)
	e.mu.Unlock()
	e.stats.sessionsOpened.Add(1)
	if e.opts.OnPeerUp != nil {
		e.opts.OnPeerUp(s.peer)
	}
	go func() {
		defer s.running.Done()
		s.read()
	}()
	go func() {
		defer s.running.Done()
		s.write()
	}()
	for _, l := range s.lanes {
		l.open()
	}
	return nil
}

// Connect implements rdma.Engine.
func (e *Engine) Connect(ctx context.Context, addr rdma.Addr, token rdma.Token) (rdma.EngineID, error) {
	if err := token.Validate(); err != nil {
		return rdma.EngineID{}, err
	}
	where := ""
	for _, n := range addr.NICs {
		if c, ok := controlOf(n); !ok {
			return rdma.EngineID{}, fmt.Errorf("group: address %q is of no engine of this kind: %w", n, rdma.ErrMalformed)
		} else if where == "" {
			where = c
		}
	}
	if where == "" {
		if !addr.Engine.IsZero() && e.alive(addr.Engine) {
			return addr.Engine, nil
		}
		return rdma.EngineID{}, fmt.Errorf("group: engine %v does not listen; it has to connect to us: %w", addr.Engine, rdma.ErrNoPeer)
	}
	unlock, err := e.lockConnect(ctx, where)
	if err != nil {
		return rdma.EngineID{}, err
	}
	defer unlock()
	if !addr.Engine.IsZero() && e.alive(addr.Engine) {
		return addr.Engine, nil
	}
	ctx, cancel := context.WithTimeout(ctx, e.opts.HandshakeTimeout)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	peer, err := e.dial(ctx, where, addr.Engine, token)
	if err != nil {
		if e.ctx.Err() != nil {
			err = rdma.ErrClosed
		}
		return rdma.EngineID{}, fmt.Errorf("group: connect to %s: %w", where, err)
	}
	return peer, nil
}

// lockConnect admits one Connect to an address at a time, so that two callers
// share one session.
func (e *Engine) lockConnect(ctx context.Context, a string) (unlock func(), _ error) {
	for {
		e.mu.Lock()
		if e.closing {
			e.mu.Unlock()
			return nil, fmt.Errorf("group: connect: %w", rdma.ErrClosed)
		}
		busy := e.connecting[a]
		if busy == nil {
			mine := make(chan struct{})
			e.connecting[a] = mine
			e.mu.Unlock()
			return sync.OnceFunc(func() {
				e.mu.Lock()
				delete(e.connecting, a)
				e.mu.Unlock()
				close(mine)
			}), nil
		}
		e.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, fmt.Errorf("group: connect to %s: %w", a, ctx.Err())
		}
	}
}

// dial opens a session and returns when its lanes have come up, at least one, or
// failed.
func (e *Engine) dial(ctx context.Context, where string, want rdma.EngineID, token rdma.Token) (rdma.EngineID, error) {
	if e.opts.Control.Dial == nil {
		return want, fmt.Errorf("this engine can't dial (Control.Dial): %w", rdma.ErrUnsupported)
	}
	nc, err := e.opts.Control.Dial(ctx, where)
	if err != nil {
		return want, err
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	peer, s, err := e.introduce(nc, want, token)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = e.activate(s)
	}
	if err != nil {
		_ = nc.Close()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return peer, err
	}
	return peer, s.awaitLanes(ctx)
}

// introduce proves the token on nc and sets the session up.
func (e *Engine) introduce(nc net.Conn, want rdma.EngineID, token rdma.Token) (rdma.EngineID, *session, error) {
	h := handshake.Hello{Engine: e.id}
	_, _ = rand.Read(h.Session[:])
	peer, err := protocol.Dial(nc, h, want, token)
	if err != nil {
		return peer, nil, err
	}
	s, err := e.setUp(nc, peer, true)
	return peer, s, err
}

// awaitLanes returns once each lane has come up or failed; without one that is
// up there is no session.
func (s *session) awaitLanes(ctx context.Context) (err error) {
	select {
	case <-s.settled:
		if s.anyUp() {
			return nil
		}
		err = fmt.Errorf("no NIC reaches the peer (%w): %w", s.downReason(), rdma.ErrPeerDied)
	case <-s.dying:
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.why
	case <-ctx.Done():
		if s.anyUp() {
			return nil // the others come up later, or fail
		}
		err = ctx.Err()
	}
	s.fail(fmt.Errorf("rdma: session with %v did not begin: %w: %w", s.peer, rdma.ErrPeerDied, err))
	return err
}
