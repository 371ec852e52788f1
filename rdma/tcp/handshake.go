package tcp

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// assemblyKey names a session that is being assembled.
type assemblyKey struct {
	engine  rdma.EngineID
	session [16]byte
}

// handshakesMax bounds the connections that have not proved the token yet; more
// wait in the listener's backlog.
const handshakesMax = 256

// accept is the goroutine that takes connections.
func (e *Engine) accept() {
	slots := make(chan struct{}, handshakesMax)
	var pause time.Duration
	for {
		nc, err := e.listener.Accept()
		if err != nil {
			if e.ctx.Err() != nil {
				return
			}
			// Out of file descriptors, most likely: let some go first.
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			e.log.warn(logAccept, "data plane cannot accept", "listen", e.netAddr, "err", err)
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
			release := sync.OnceFunc(func() { <-slots })
			defer release()
			e.admit(nc, release)
		})
	}
}

// admit performs the accepting side of a handshake on nc, which it closes if
// that fails. It calls proved once the peer has proved the token: what waits
// after that is bounded by MaxPeers.
func (e *Engine) admit(nc net.Conn, proved func()) {
	if e.opts.TLS != nil {
		nc = tls.Server(nc, e.opts.TLS)
	}
	stop := context.AfterFunc(e.ctx, func() { _ = nc.Close() })
	defer stop()
	_ = nc.SetDeadline(time.Now().Add(e.opts.HandshakeTimeout))
	s, err := e.admitConn(nc, proved)
	if err == nil {
		return
	}
	if err == errNoHello || s != nil && s.hungUp() {
		_ = nc.Close()
		return
	}
	e.log.warn(logAuth, "data-plane connection turned away", "remote", nc.RemoteAddr(), "err", err)
	_ = nc.Close()
	if s != nil {
		s.fail(fmt.Errorf("rdma: session with %v not assembled: %w: %w", s.peer, rdma.ErrPeerDied, err))
	}
}

// errNoHello: the connection was closed before it said anything, which is how
// health checks and `penstock doctor` ask whether somebody listens.
var errNoHello = errors.New("closed without a word")

// admitConn reads the hello, checks the proof, and joins the connection to its
// session; with the last one the session begins.
func (e *Engine) admitConn(nc net.Conn, proved func()) (*session, error) {
	rawHello := make([]byte, helloSize)
	var h hello
	if _, err := io.ReadFull(nc, rawHello); err == io.EOF {
		return nil, errNoHello
	} else if err != nil {
		e.stats.authFailures.Add(1)
		return nil, fmt.Errorf("hello: %w", err)
	}
	if err := h.decode(rawHello); err != nil {
		e.stats.authFailures.Add(1)
		return nil, err
	}
	ch := challenge{engine: e.id}
	_, _ = rand.Read(ch.nonce[:])
	rawChallenge := ch.encode()
	proof := make([]byte, proofSize)
	if _, err := nc.Write(rawChallenge); err != nil {
		return nil, fmt.Errorf("challenge: %w", err)
	}
	if _, err := io.ReadFull(nc, proof); err != nil {
		e.stats.authFailures.Add(1)
		return nil, fmt.Errorf("proof: %w", err)
	}
	verdict := func(v verdictStatus) error {
		b := make([]byte, 8, verdictSize)
		b[0] = byte(v)
		b = append(b, prove(e.opts.Token, roleAcceptor, rawHello, rawChallenge, b[:1])...)
		_, err := nc.Write(b)
		return err
	}
	if !hmac.Equal(proof, prove(e.opts.Token, roleDialer, rawHello, rawChallenge)) {
		e.stats.authFailures.Add(1)
		return nil, errors.Join(rdma.ErrAuth, verdict(verdictToken))
	}
	proved()
	s, status, err := e.assemble(&h, nc)
	if err != nil {
		return s, errors.Join(err, verdict(status))
	}
	return s, e.enroll(s, s.conns[h.index], func() error { return verdict(verdictOK) })
}

// enroll waits until the session of c is complete, sends the verdict, and starts
// the connection.
func (e *Engine) enroll(s *session, c *conn, verdict func() error) error {
	err := e.awaitReady(s)
	if err == nil {
		err = verdict()
	}
	if err == nil {
		err = c.nc.SetDeadline(time.Time{})
	}
	if err != nil {
		s.abandon(fmt.Errorf("rdma: session with %v not assembled: %w: %w", s.peer, rdma.ErrPeerDied, err))
		return err
	}
	s.start(c)
	return nil
}

// awaitReady returns once all connections of s have joined.
func (e *Engine) awaitReady(s *session) error {
	timeout := time.NewTimer(e.opts.HandshakeTimeout)
	defer timeout.Stop()
	select {
	case <-s.ready:
		return nil
	case <-s.dying:
		return errors.New("another connection of the session failed")
	case <-timeout.C:
		return fmt.Errorf("connections are missing after %v", e.opts.HandshakeTimeout)
	}
}

// assemble joins a connection that proved the token to its session.
func (e *Engine) assemble(h *hello, nc net.Conn) (*session, verdictStatus, error) {
	k := assemblyKey{h.engine, h.session}
	e.mu.Lock()
	if e.closing {
		e.mu.Unlock()
		return nil, verdictRequest, rdma.ErrClosed
	}
	s := e.assembling[k]
	if s == nil {
		if len(e.all) >= e.opts.MaxPeers {
			e.mu.Unlock()
			return nil, verdictFull, fmt.Errorf("%d sessions, MaxPeers is %d", len(e.all), e.opts.MaxPeers)
		}
		s = newSession(e, h.engine, h.session, h.conns, false)
		e.assembling[k] = s
		e.all[s] = struct{}{}
	}
	e.mu.Unlock()
	complete, err := s.join(newConn(s, nc, h.index))
	if err == nil && complete {
		err = e.activate(s)
	}
	if err != nil {
		return s, verdictRequest, err
	}
	return s, verdictOK, nil
}

// Connect implements rdma.Engine.
func (e *Engine) Connect(ctx context.Context, addr rdma.Addr, token rdma.Token) (rdma.EngineID, error) {
	if err := token.Validate(); err != nil {
		return rdma.EngineID{}, err
	}
	if len(addr.NICs) == 0 {
		if !addr.Engine.IsZero() && e.alive(addr.Engine) {
			return addr.Engine, nil
		}
		return rdma.EngineID{}, fmt.Errorf("tcp: engine %v does not listen; it has to connect to us: %w", addr.Engine, rdma.ErrNoPeer)
	}
	unlock, err := e.lockConnect(ctx, addr.NICs[0])
	if err != nil {
		return rdma.EngineID{}, err
	}
	defer unlock()
	if !addr.Engine.IsZero() && e.alive(addr.Engine) {
		return addr.Engine, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	s, err := e.dial(ctx, addr, token)
	if err != nil {
		if e.ctx.Err() != nil {
			err = rdma.ErrClosed
		}
		return rdma.EngineID{}, fmt.Errorf("tcp: connect to %s: %w", addr.NICs[0], err)
	}
	return s.peer, nil
}

// lockConnect admits one Connect to an address at a time, so that two callers
// share one session.
func (e *Engine) lockConnect(ctx context.Context, a rdma.NetAddr) (unlock func(), _ error) {
	for {
		e.mu.Lock()
		if e.closing {
			e.mu.Unlock()
			return nil, fmt.Errorf("tcp: connect: %w", rdma.ErrClosed)
		}
		busy := e.connecting[a]
		if busy == nil {
			mine := make(chan struct{})
			e.connecting[a] = mine
			e.mu.Unlock()
			return func() {
				e.mu.Lock()
				delete(e.connecting, a)
				e.mu.Unlock()
				close(mine)
			}, nil
		}
		e.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, fmt.Errorf("tcp: connect to %s: %w", a, ctx.Err())
		}
	}
}

// dial opens all connections of a new session and begins it.
func (e *Engine) dial(ctx context.Context, addr rdma.Addr, token rdma.Token) (*session, error) {
	var id [16]byte
	_, _ = rand.Read(id[:])
	n := e.opts.Conns
	ncs, ids := make([]net.Conn, n), make([]rdma.EngineID, n)
	// The first failure ends the others: the session needs all of them.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			h := hello{index: i, conns: n, engine: e.id, session: id}
			var err error
			if ncs[i], ids[i], err = e.dialConn(ctx, addr, token, h); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	s := newSession(e, ids[0], id, n, true)
	err := context.Cause(ctx)
	for i := range n {
		if err == nil && ids[i] != ids[0] {
			err = fmt.Errorf("engines %v and %v answer there: %w", ids[0], ids[i], rdma.ErrNoPeer)
		}
		if ncs[i] != nil {
			s.conns[i] = newConn(s, ncs[i], i)
		}
	}
	if err == nil {
		err = e.enlist(s)
	}
	if err != nil {
		for _, c := range s.conns {
			if c != nil {
				_ = c.nc.Close()
			}
		}
		return nil, err
	}
	for _, c := range s.conns {
		s.start(c)
	}
	return s, nil
}

// enlist makes a dialed session known and active.
func (e *Engine) enlist(s *session) error {
	e.mu.Lock()
	if e.closing {
		e.mu.Unlock()
		return rdma.ErrClosed
	}
	e.all[s] = struct{}{}
	e.mu.Unlock()
	if err := e.activate(s); err != nil {
		s.fail(err)
		return err
	}
	return nil
}

// dialConn opens one connection and performs the dialing side of its handshake.
func (e *Engine) dialConn(ctx context.Context, addr rdma.Addr, token rdma.Token, h hello) (net.Conn, rdma.EngineID, error) {
	nc, err := e.dialNIC(ctx, addr.NICs[0])
	if err != nil {
		return nil, rdma.EngineID{}, err
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	id, err := e.introduce(nc, addr.Engine, token, h)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = nc.Close()
		return nil, id, err
	}
	return nc, id, nil
}

// dialNIC opens a socket, and TLS on it where the address asks for that.
func (e *Engine) dialNIC(ctx context.Context, a rdma.NetAddr) (net.Conn, error) {
	hostPort, secure := HostPort(a)
	if secure && e.opts.TLS == nil {
		return nil, fmt.Errorf("%s wants TLS and this engine was given none (Options.TLS): %w", hostPort, rdma.ErrAuth)
	}
	d := net.Dialer{Control: e.control}
	d.SetMultipathTCP(false)
	nc, err := d.DialContext(ctx, "tcp", hostPort)
	if err != nil || !secure {
		return nc, err
	}
	return e.dialTLS(ctx, nc, hostPort)
}

// introduce proves the token on nc and checks that the other side knows it. want,
// unless zero, is the engine that has to be there.
func (e *Engine) introduce(nc net.Conn, want rdma.EngineID, token rdma.Token, h hello) (rdma.EngineID, error) {
	_, _ = rand.Read(h.nonce[:])
	rawHello := h.encode()
	if _, err := nc.Write(rawHello); err != nil {
		return rdma.EngineID{}, fmt.Errorf("hello: %w", err)
	}
	rawChallenge := make([]byte, challengeSize)
	if _, err := io.ReadFull(nc, rawChallenge); err != nil {
		return rdma.EngineID{}, fmt.Errorf("challenge: %w", err)
	}
	var ch challenge
	if err := ch.decode(rawChallenge); err != nil {
		return rdma.EngineID{}, err
	}
	if ch.engine == e.id {
		return ch.engine, fmt.Errorf("that is this engine itself: %w", rdma.ErrNoPeer)
	}
	if !want.IsZero() && ch.engine != want {
		return ch.engine, fmt.Errorf("engine %v answers, not %v: %w", ch.engine, want, rdma.ErrNoPeer)
	}
	if _, err := nc.Write(prove(token, roleDialer, rawHello, rawChallenge)); err != nil {
		return ch.engine, fmt.Errorf("proof: %w", err)
	}
	return ch.engine, readVerdict(nc, token, rawHello, rawChallenge)
}

// readVerdict reads the acceptor's last word and checks its proof.
func readVerdict(nc net.Conn, token rdma.Token, rawHello, rawChallenge []byte) error {
	b := make([]byte, verdictSize)
	if _, err := io.ReadFull(nc, b); err != nil {
		return fmt.Errorf("verdict: %w", err)
	}
	switch v := verdictStatus(b[0]); v {
	case verdictOK:
	case verdictToken:
		return rdma.ErrAuth
	case verdictFull:
		return fmt.Errorf("%v: %w", v, rdma.ErrBusy)
	default:
		return fmt.Errorf("%v: %w", v, rdma.ErrPeerDied)
	}
	if !bytes.Equal(b[1:8], make([]byte, 7)) || !hmac.Equal(b[8:], prove(token, roleAcceptor, rawHello, rawChallenge, b[:1])) {
		return fmt.Errorf("the other side did not prove the token: %w", rdma.ErrAuth)
	}
	return nil
}
