package tcp

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/handshake"
	"github.com/penstock-kv/penstock/rdma/internal/peers"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// acceptedKey identifies a session that a peer dialed.
type acceptedKey struct {
	engine  rdma.EngineID
	session [16]byte
}

// accept is the goroutine that accepts the connections of one NIC.
func (e *Engine) accept(n *nic) {
	failed := func(err error) {
		e.core.Log.Warn(sessions.LogAccept, "data plane cannot accept", "listen", n.addr, "err", err)
	}
	peers.Accept(e.core.Ctx, n.listener, &e.core.Running, failed, func(nc net.Conn, proved func()) { e.admit(nc, n, proved) })
}

// admit performs the accepting engine's part of a handshake on nc. It closes nc if the handshake
// fails. It calls proved once the peer has proved the token. After that, MaxPeers bounds the
// number of waiting connections.
func (e *Engine) admit(nc net.Conn, n *nic, proved func()) {
	if e.opts.Wrap != nil {
		nc = e.opts.Wrap(nc)
	}
	if e.opts.TLS != nil {
		nc = tls.Server(nc, e.opts.TLS)
	}
	stop := context.AfterFunc(e.core.Ctx, func() { _ = nc.Close() })
	defer stop()
	_ = nc.SetDeadline(time.Now().Add(e.opts.HandshakeTimeout))
	err := e.admitConn(nc, n, proved)
	if err == nil {
		return
	}
	_ = nc.Close()
	if e.core.Ctx.Err() == nil && !errors.Is(err, handshake.ErrLeft) && !errors.Is(err, sessions.ErrPeerClosed) && !errors.Is(err, errRailBusy) {
		e.core.Log.Warn(sessions.LogAuth, "data-plane connection refused", "remote", nc.RemoteAddr(), "err", err)
	}
}

// admitConn performs the mutual proof of the token and adds the connection to its rail. The rail
// comes up when its last connection has been added.
func (e *Engine) admitConn(nc net.Conn, n *nic, proved func()) error {
	raw, verdict, err := protocol.Accept(nc, e.id, e.admission.Tokens())
	if err != nil {
		// If Close of this engine ended the connection, the handshake is not counted as failed
		// authentication.
		if e.core.Ctx.Err() == nil && !errors.Is(err, handshake.ErrLeft) {
			e.core.AuthFailures.Add(1)
		}
		return err
	}
	if err := e.admission.Admit(raw.Engine, raw.Token); err != nil {
		v := handshake.VerdictOf(err)
		if v == handshake.Token {
			e.core.AuthFailures.Add(1)
		}
		return errors.Join(err, verdict(v))
	}
	proved()
	var h hello
	if err := h.decode(&raw); err != nil {
		return errors.Join(err, verdict(handshake.Request))
	}
	s, status, err := e.sessionOf(&h)
	if err != nil {
		return errors.Join(err, verdict(status))
	}
	if err := e.mark(nc, rdma.Class(h.lane)); err != nil {
		return errors.Join(err, verdict(handshake.Request))
	}
	c := newConn(s, nc, n, h.lane)
	a, status, err := s.join(&h, c)
	if err != nil {
		return errors.Join(err, verdict(status))
	}
	return s.awaitRail(c, a, verdict)
}

// sessionOf returns the session that a hello names, and creates it at the session's first hello.
func (e *Engine) sessionOf(h *hello) (*session, handshake.Verdict, error) {
	k := acceptedKey{h.engine, h.session}
	e.core.Mu.Lock()
	defer e.core.Mu.Unlock()
	if e.core.Closing {
		return nil, handshake.Request, rdma.ErrClosed
	}
	if s := e.accepted[k]; s != nil {
		return s, handshake.OK, nil
	}
	if h.generation > 1 {
		return nil, handshake.Gone, fmt.Errorf("%v joins a session that has ended: %w", h.engine, sessions.ErrPeerClosed)
	}
	if len(e.core.All) >= e.opts.MaxPeers {
		return nil, handshake.Full, fmt.Errorf("%d sessions, MaxPeers is %d", len(e.core.All), e.opts.MaxPeers)
	}
	s := newSession(e, h.engine, h.session, h.rails, h.lanes, h.conns, false)
	e.accepted[k] = s
	e.core.All[s] = struct{}{}
	return s, handshake.OK, nil
}

// join adds an authenticated connection to its rail's next generation. The rail comes up when its
// last connection has been added.
func (s *session) join(h *hello, c *conn) (*assembly, handshake.Verdict, error) {
	if h.rails != len(s.rails) || h.lanes != len(s.lanes) || h.conns != s.rails[0].connsEach {
		return nil, handshake.Request, fmt.Errorf("hello for %d rails, %d lanes of %d connections; the session has %d, %d of %d: %w",
			h.rails, h.lanes, h.conns, len(s.rails), len(s.lanes), s.rails[0].connsEach, errFrame)
	}
	r := s.rails[h.rail]
	// A dialer closes the previous generation before it starts the next.
	if err := s.peerTookDown(uint32(h.rail), h.generation-1); err != nil {
		return nil, handshake.Request, err
	}
	a, complete, status, err := r.collect(h, c)
	if err != nil {
		return nil, status, err
	}
	if complete {
		err := r.attach(a.generation, a.conns)
		if err == nil {
			// If this fails, the session has ended, and each connection detects that.
			_ = s.activate()
			s.e.logRailUp(c)
		}
		a.err = err
		close(a.done)
	}
	return a, handshake.OK, nil
}

// collect adds a connection to the rail's next generation. complete reports whether the generation
// has all its connections.
func (r *rail) collect(h *hello, c *conn) (a *assembly, complete bool, _ handshake.Verdict, _ error) {
	s := r.s
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.Why != nil {
		return nil, false, handshake.Gone, s.GoneLocked()
	}
	if r.state != railDown || !r.fenced || h.generation <= r.generation || r.assembly != nil && r.assembly.generation > h.generation {
		return nil, false, handshake.Later, fmt.Errorf("generation %d of rail %d, which is %v at generation %d: %w", h.generation, h.rail, r.state, r.generation, errRailBusy)
	}
	if a = r.assembly; a != nil && (a.generation < h.generation || a.conns[h.slot()] != nil) {
		err := fmt.Errorf("connection %d of rail %d joins generation %d after %d: %w", h.slot(), h.rail, h.generation, a.generation, errFrame)
		r.abortLocked(a, err)
		return nil, false, handshake.Request, err
	}
	if a == nil {
		a = &assembly{generation: h.generation, conns: make([]*conn, h.lanes*h.conns), done: make(chan struct{})}
		r.assembly = a
	}
	r.nic = c.nic
	a.conns[h.slot()] = c
	if a.joined++; a.joined < len(a.conns) {
		return a, false, handshake.OK, nil
	}
	r.assembly = nil
	return a, true, handshake.OK, nil
}

// abortLocked ends an incomplete assembly.
func (r *rail) abortLocked(a *assembly, err error) {
	if r.assembly == a {
		r.assembly = nil
		a.err = err
		close(a.done)
	}
}

// awaitRail waits until the rail of c is up, sends the verdict, and starts the connection.
func (s *session) awaitRail(c *conn, a *assembly, verdict func(handshake.Verdict) error) error {
	timeout := time.NewTimer(s.e.opts.HandshakeTimeout)
	defer timeout.Stop()
	why := errors.New("the session ended")
	select {
	case <-a.done:
	case <-s.Dying:
	case <-timeout.C:
		why = fmt.Errorf("connections are missing after %v", s.e.opts.HandshakeTimeout)
	}
	s.Mu.Lock()
	for _, r := range s.rails {
		r.abortLocked(a, why)
	}
	s.Mu.Unlock()
	<-a.done
	if a.err != nil {
		s.failUnassembled(a.err)
		return errors.Join(a.err, verdict(handshake.Request))
	}
	err := verdict(handshake.OK)
	if err == nil {
		err = c.nc.SetDeadline(time.Time{})
	}
	if err != nil {
		c.abandon(fmt.Errorf("rdma: connection to %v not assembled: %w: %w", s.Peer, rdma.ErrPeerDied, err))
		if s.endedNormally() {
			return sessions.ErrPeerClosed
		}
		return err
	}
	c.start()
	return nil
}

// failUnassembled ends a session if no rail is up and no rail's connections are being collected.
func (s *session) failUnassembled(err error) {
	s.Mu.Lock()
	waiting := s.up > 0
	for _, r := range s.rails {
		waiting = waiting || r.assembly != nil || r.state != railDown
	}
	s.Mu.Unlock()
	if !waiting {
		s.Fail(fmt.Errorf("rdma: session with %v not assembled: %w: %w", s.Peer, rdma.ErrPeerDied, err))
	}
}

// Connect implements rdma.Engine.
func (e *Engine) Connect(ctx context.Context, addr rdma.Addr, token rdma.Token) (rdma.EngineID, error) {
	if err := token.Validate(); err != nil {
		return rdma.EngineID{}, err
	}
	return e.core.Connect(ctx, addr.Engine, addr.NICs, token, func(ctx context.Context) (rdma.EngineID, error) {
		s, err := e.dial(ctx, addr, token)
		if err != nil {
			return rdma.EngineID{}, err
		}
		return s.Peer, nil
	})
}

// railGrace is the time for which Connect waits for the other rails after the first rail is up.
const railGrace = time.Second

// dial opens a session with a rail for each pair of NICs. If the engines have different numbers of
// NICs, the NICs of the engine with fewer are used in rotation (see the package doc). dial returns
// when each rail has been tried, or railGrace after the first rail is up.
func (e *Engine) dial(ctx context.Context, addr rdma.Addr, token rdma.Token) (*session, error) {
	var id [16]byte
	_, _ = rand.Read(id[:])
	lanes := 1
	if e.opts.QoS != nil {
		lanes = rdma.Classes
	}
	n := max(len(e.nics), min(len(addr.NICs), MaxNICs))
	s := newSession(e, addr.Engine, id, n, lanes, e.opts.Conns+1, true)
	s.Where, s.Token = addr.NICs, token
	e.core.Mu.Lock()
	if e.core.Closing {
		e.core.Mu.Unlock()
		s.cancel()
		return nil, rdma.ErrClosed
	}
	e.core.All[s] = struct{}{}
	e.core.Mu.Unlock()
	results := make(chan error, n)
	s.Mu.Lock()
	for i, r := range s.rails {
		r.nic = e.nics[i%len(e.nics)]
		s.redialLocked(r, 0, results)
	}
	s.Mu.Unlock()
	if err := s.awaitRails(ctx, results); err != nil {
		s.Fail(fmt.Errorf("rdma: session with %v not assembled: %w", addr.Engine, err))
		<-s.Removed
		return nil, err
	}
	return s, nil
}

// awaitRails waits until each rail has been tried once, or railGrace after the first rail is up.
// It returns early for an error that every rail would get.
func (s *session) awaitRails(ctx context.Context, results <-chan error) error {
	var first error
	var grace <-chan time.Time
	up := false
	for range s.rails {
		select {
		case err := <-results:
			switch {
			case err == nil && !up:
				up = true
				t := time.NewTimer(railGrace)
				defer t.Stop()
				grace = t.C
			case errors.Is(err, rdma.ErrAuth), errors.Is(err, rdma.ErrVersion), errors.Is(err, rdma.ErrNoPeer), errors.Is(err, rdma.ErrBusy):
				return err // the other NICs would give the same answer
			case err != nil && first == nil:
				first = err
			}
		case <-grace:
			return nil
		case <-ctx.Done():
			if up {
				return nil
			}
			return ctx.Err()
		}
	}
	if up {
		return nil
	}
	return first
}

// setPeer sets the session's peer to the engine that answered on a connection. All connections
// must reach the same engine.
func (s *session) setPeer(id rdma.EngineID) error {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.Peer.IsZero() {
		s.Peer = id
	}
	if s.Peer != id {
		return fmt.Errorf("engines %v and %v answer at the same addresses: %w", s.Peer, id, rdma.ErrNoPeer)
	}
	return nil
}

// dialRail opens all connections of a generation of a rail.
func (e *Engine) dialRail(ctx context.Context, s *session, r *rail, generation uint32) ([]*conn, error) {
	if len(s.rails) > 1 {
		// The other rails carry the traffic in the meantime. So this attempt has a time limit, and
		// a failed attempt is repeated later.
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, e.opts.HandshakeTimeout)
		defer cancel()
	}
	// The first failure cancels the other dials, because the rail needs all connections.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	conns := make([]*conn, len(s.lanes)*r.connsEach)
	var wg sync.WaitGroup
	for i := range conns {
		h := hello{
			index: i % r.connsEach, conns: r.connsEach, lane: i / r.connsEach, lanes: len(s.lanes),
			rail: r.index, rails: len(s.rails), generation: generation, engine: e.id, session: s.id,
		}
		wg.Go(func() {
			nc, err := e.dialConn(ctx, s, r, h)
			if err != nil {
				cancel(err)
				return
			}
			conns[i] = newConn(s, nc, r.nic, h.lane)
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		for _, c := range conns {
			if c != nil {
				_ = c.nc.Close()
			}
		}
		return nil, err
	}
	return conns, nil
}

// dialConn opens one connection and performs the dialer's part of its handshake.
func (e *Engine) dialConn(ctx context.Context, s *session, r *rail, h hello) (net.Conn, error) {
	nc, err := e.dialNIC(ctx, r.nic, s.Where[r.index%len(s.Where)], rdma.Class(h.lane))
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	id, err := e.authenticate(nc, s.PeerID(), s.Token, h)
	if err == nil {
		err = s.setPeer(id)
	}
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = nc.Close()
		return nil, err
	}
	return nc, nil
}

// dialNIC opens a connection from a local NIC for a class, with TLS if the address requires it.
func (e *Engine) dialNIC(ctx context.Context, n *nic, a rdma.NetAddr, class rdma.Class) (net.Conn, error) {
	hostPort, secure := HostPort(a)
	if secure && e.opts.TLS == nil {
		return nil, fmt.Errorf("%s requires TLS and this engine has no TLS configuration (Options.TLS): %w", hostPort, rdma.ErrAuth)
	}
	if !secure && e.opts.TLSOnly {
		return nil, fmt.Errorf("%s has no TLS and this engine dials peers with TLS only (Options.TLSOnly): %w", hostPort, rdma.ErrAuth)
	}
	d := net.Dialer{Control: e.control(n), LocalAddr: n.local}
	d.SetMultipathTCP(false)
	nc, err := d.DialContext(ctx, "tcp", hostPort)
	if err != nil {
		return nil, err
	}
	if err := e.mark(nc, class); err != nil {
		return nil, errors.Join(err, nc.Close())
	}
	if e.opts.Wrap != nil {
		nc = e.opts.Wrap(nc)
	}
	if !secure {
		return nc, nil
	}
	return handshake.DialTLS(ctx, nc, hostPort, e.opts.TLS)
}

// authenticate performs the dialer's part of the mutual proof of the token on nc. want, if not
// zero, is the only engine that is accepted.
func (e *Engine) authenticate(nc net.Conn, want rdma.EngineID, token rdma.Token, h hello) (rdma.EngineID, error) {
	h.engine = e.id
	return protocol.Dial(nc, h.encode(), want, token)
}
