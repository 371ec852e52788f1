package group

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/handshake"
	"github.com/penstock-kv/penstock/rdma/internal/peers"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// protocol is the first bytes that each engine sends on a control connection: "PGD" from the
// dialer, "PGC" from the acceptor, then the version of the frames.
var protocol = handshake.Protocol{Hello: [4]byte{'P', 'G', 'D', '1'}, Challenge: [4]byte{'P', 'G', 'C', '1'}}

// maxControlAddr is the largest length of the advertised address, in bytes. It leaves room for the
// NIC's serial number, which a Desc appends to the address.
const maxControlAddr = 200

// ensureAddr sets the default of the advertised address and checks it.
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

// accept is the goroutine that accepts connections.
func (e *Engine) accept() {
	failed := func(err error) {
		e.core.Log.Warn(sessions.LogAccept, "data plane cannot accept", "listen", e.opts.Control.Addr, "err", err)
	}
	peers.Accept(e.core.Ctx, e.opts.Control.Listener, &e.core.Running, failed, func(nc net.Conn, _ func()) { e.admit(nc) })
}

// admit performs the accepting side of a handshake on nc. It closes nc if the handshake fails.
func (e *Engine) admit(nc net.Conn) {
	stop := context.AfterFunc(e.core.Ctx, func() { _ = nc.Close() })
	defer stop()
	_ = nc.SetDeadline(time.Now().Add(e.opts.HandshakeTimeout))
	err := e.admitConn(nc)
	if err == nil {
		return
	}
	_ = nc.Close()
	if e.core.Ctx.Err() == nil && !errors.Is(err, handshake.ErrLeft) {
		e.core.Log.Warn(sessions.LogAuth, "data-plane connection refused", "remote", nc.RemoteAddr(), "err", err)
	}
}

// admitConn performs the mutual proof of the token and starts a session.
func (e *Engine) admitConn(nc net.Conn) error {
	h, verdict, err := protocol.Accept(nc, e.id, e.admission.Tokens())
	if err != nil {
		// If Close of this engine ended the connection, the handshake is not counted as failed
		// authentication.
		if e.core.Ctx.Err() == nil && !errors.Is(err, handshake.ErrLeft) {
			e.core.AuthFailures.Add(1)
		}
		return err
	}
	if err := e.admission.Admit(h.Engine, h.Token); err != nil {
		v := handshake.VerdictOf(err)
		if v == handshake.Token {
			e.core.AuthFailures.Add(1)
		}
		return errors.Join(err, verdict(v))
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

// reserveSession counts a session that is about to start towards MaxPeers.
func (e *Engine) reserveSession() (handshake.Verdict, error) {
	e.core.Mu.Lock()
	defer e.core.Mu.Unlock()
	if e.core.Closing {
		return handshake.Request, rdma.ErrClosed
	}
	if len(e.core.All)+e.admitted >= e.opts.MaxPeers {
		return handshake.Full, fmt.Errorf("%d sessions, MaxPeers is %d", len(e.core.All), e.opts.MaxPeers)
	}
	e.admitted++
	return handshake.OK, nil
}

// unreserveSession undoes reserveSession.
func (e *Engine) unreserveSession() {
	e.core.Mu.Lock()
	defer e.core.Mu.Unlock()
	e.admitted--
}

// setUp exchanges the setup frames and makes the session.
func (e *Engine) setUp(nc net.Conn, peer rdma.EngineID, dialed bool) (*session, error) {
	mine := setup{separate: e.opts.SeparateClasses, counted: e.counted, provider: e.opts.Provider}
	for i := range e.nics {
		mine.nics = append(mine.nics, e.nics[i].Load().name)
	}
	// The write runs concurrently with the read: on an unbuffered connection two writers would
	// wait for each other.
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
		err = fmt.Errorf("frame of type %d instead of a setup: %w", kind, errFrame)
	}
	if err != nil {
		return nil, err
	}
	theirs, err := decodeSetup(payload)
	if err != nil {
		e.core.MalformedFrames.Add(1)
		return nil, err
	}
	if theirs.provider != mine.provider || theirs.counted != mine.counted {
		return nil, fmt.Errorf("peer has provider %.32q (counted %v), this engine %q (%v): both sides need the same kind of NIC: %w",
			theirs.provider, theirs.counted, mine.provider, mine.counted, rdma.ErrUnsupported)
	}
	if err := nc.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	return newSession(e, peer, dialed, c, &theirs), nil
}

// activate adds a session to the engine and starts it.
func (e *Engine) activate(s *session) error {
	// Add is called before Activate, because after Activate another goroutine can find the session
	// and end it.
	s.running.Add(2)
	if err := e.core.Activate(s); err != nil {
		return err
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
	var where []rdma.NetAddr
	for _, n := range addr.NICs {
		if c, ok := controlOf(n); !ok {
			return rdma.EngineID{}, fmt.Errorf("group: address %q belongs to no engine of this kind: %w", n, rdma.ErrMalformed)
		} else if len(where) == 0 && c != "" {
			where = []rdma.NetAddr{rdma.NetAddr(c)}
		}
	}
	return e.core.Connect(ctx, addr.Engine, where, token, func(ctx context.Context) (rdma.EngineID, error) {
		ctx, cancel := context.WithTimeout(ctx, e.opts.HandshakeTimeout)
		defer cancel()
		return e.dial(ctx, where, addr.Engine, token)
	})
}

// dial opens a session. It returns when every lane has come up or failed. If no lane is up it
// returns an error.
func (e *Engine) dial(ctx context.Context, where []rdma.NetAddr, want rdma.EngineID, token rdma.Token) (rdma.EngineID, error) {
	if e.opts.Control.Dial == nil {
		return want, fmt.Errorf("this engine can't dial (Control.Dial): %w", rdma.ErrUnsupported)
	}
	nc, err := e.opts.Control.Dial(ctx, string(where[0]))
	if err != nil {
		return want, err
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	peer, s, err := e.authenticate(nc, want, token)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		s.Where, s.Token = where, token
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

// authenticate proves the token on nc and sets up the session.
func (e *Engine) authenticate(nc net.Conn, want rdma.EngineID, token rdma.Token) (rdma.EngineID, *session, error) {
	h := handshake.Hello{Engine: e.id}
	_, _ = rand.Read(h.Session[:])
	peer, err := protocol.Dial(nc, h, want, token)
	if err != nil {
		return peer, nil, err
	}
	s, err := e.setUp(nc, peer, true)
	return peer, s, err
}

// awaitLanes returns once each lane has come up or failed. If no lane is up it fails the session.
func (s *session) awaitLanes(ctx context.Context) (err error) {
	select {
	case <-s.settled:
		if s.anyUp() {
			return nil
		}
		err = fmt.Errorf("no NIC reaches the peer (%w): %w", s.downReason(), rdma.ErrPeerDied)
	case <-s.Dying:
		s.Mu.Lock()
		defer s.Mu.Unlock()
		return s.Why
	case <-ctx.Done():
		if s.anyUp() {
			return nil // the remaining lanes come up or fail later
		}
		err = ctx.Err()
	}
	s.Fail(fmt.Errorf("rdma: session with %v did not start: %w: %w", s.Peer, rdma.ErrPeerDied, err))
	return err
}
