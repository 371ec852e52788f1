package tcp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/handshake"
)

// TestHandshake: connections that do not complete a valid handshake are refused and leave no
// state.
func TestHandshake(t *testing.T) {
	testkit.VerifyNone(t)
	// Handshakes that do not end use an engine with a short timeout, the others an engine with
	// the default.
	e, shortTimeout := newServer(t, Options{MaxPeers: 2}), newServer(t, Options{HandshakeTimeout: 300 * time.Millisecond})
	good := hello{conns: 2, lanes: 1, rails: 1, generation: 1, engine: rdma.EngineID{1}, session: [16]byte{1}}
	dial := func(e *Engine) net.Conn {
		nc, err := net.Dial("tcp", string(e.nics[0].addr))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = nc.Close() })
		return nc
	}
	introduce := func(e *Engine, h hello, token string) error {
		_, err := (&Engine{id: h.engine}).authenticate(dial(e), e.id, rdma.Token(token), h)
		return err
	}
	// One of two connections: times out.
	if err := introduce(shortTimeout, good, testToken); !errors.Is(err, rdma.ErrPeerDied) && !errors.Is(err, io.EOF) {
		t.Errorf("half a session: %v", err)
	}
	// The same connection twice.
	var wg sync.WaitGroup
	var failed atomic.Int64
	for range 2 {
		wg.Go(func() {
			if introduce(shortTimeout, good, testToken) != nil {
				failed.Add(1)
			}
		})
	}
	wg.Wait()
	if failed.Load() != 2 {
		t.Errorf("%d of 2 equal connections failed", failed.Load())
	}
	if err := introduce(e, good, strings.ToUpper(testToken)); !errors.Is(err, rdma.ErrAuth) {
		t.Errorf("wrong token: %v", err)
	}
	for name, change := range map[string]func(*hello){
		"no connections": func(h *hello) { h.conns = 0 },
		"too many":       func(h *hello) { h.conns = MaxConns + 1 },
		"index":          func(h *hello) { h.index = 2 },
		"no engine":      func(h *hello) { h.engine = rdma.EngineID{} },
		"no lane":        func(h *hello) { h.lanes = 0 },
		"lane":           func(h *hello) { h.lane = 1 },
		"too many rails": func(h *hello) { h.rails = MaxNICs + 1 },
		"rail":           func(h *hello) { h.rail = 1 },
		"no generation":  func(h *hello) { h.generation = 0 },
		"a later one":    func(h *hello) { h.generation, h.session = 2, [16]byte{2} },
		"unknown lanes":  func(h *hello) { h.lanes = 200 },
	} {
		h := good
		change(&h)
		if err := introduce(e, h, testToken); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	// Another protocol, a truncated hello, and no bytes.
	for _, b := range []string{strings.Repeat("GET / HTTP/1.1\r\n", 10), "PRD1", ""} {
		nc := dial(shortTimeout)
		_, _ = nc.Write([]byte(b))
		if _, err := io.Copy(io.Discard, nc); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%q: %v", b, err)
		}
	}
	if len(e.Peers())+len(shortTimeout.Peers()) != 0 {
		t.Error("there is a session")
	}
	// MaxPeers.
	ctx := testContext(t)
	for i := range 3 {
		c := closing(t, newEngine(t, Options{}))
		_, err := c.Connect(ctx, e.Addr(), rdma.Token(testToken))
		if i < 2 && err != nil {
			t.Fatal(err)
		}
		if i == 2 && !errors.Is(err, rdma.ErrBusy) {
			t.Errorf("one peer too many: %v", err)
		}
	}
}

// TestAdmission: an engine with an Admission accepts each of its tokens, passes the engine and the
// token of each connection to Admit, and refuses a peer that Admit or the present set of tokens refuses.
func TestAdmission(t *testing.T) {
	testkit.VerifyNone(t)
	tokens := []rdma.Token{rdma.Token("the token of client a"), rdma.Token("the token of client b")}
	var current atomic.Pointer[[]rdma.Token]
	current.Store(&tokens)
	var mu sync.Mutex
	admitted := make(map[rdma.EngineID]string)
	var banned, busy rdma.EngineID
	e := newServer(t, Options{Admission: &rdma.Admission{
		Tokens: func() []rdma.Token { return *current.Load() },
		Admit: func(peer rdma.EngineID, proved rdma.Token) error {
			mu.Lock()
			defer mu.Unlock()
			if peer == banned {
				return errors.New("banned")
			}
			if peer == busy {
				return fmt.Errorf("client a has too many sessions: %w", rdma.ErrBusy)
			}
			admitted[peer] = string(proved)
			return nil
		},
	}})
	for _, token := range tokens {
		c := closing(t, newEngine(t, Options{}))
		if _, err := c.Connect(testContext(t), e.Addr(), token); err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		if got := admitted[c.Addr().Engine]; got != string(token) {
			t.Errorf("the engine proved %q; Admit got %q", string(token), got)
		}
		mu.Unlock()
	}
	refused := func(name string, c *Engine, token rdma.Token) {
		t.Helper()
		before := e.Stats().AuthFailures
		if _, err := c.Connect(testContext(t), e.Addr(), token); !errors.Is(err, rdma.ErrAuth) {
			t.Errorf("%s: %v", name, err)
		}
		// The refused engine may receive the answer before the failure is counted.
		until(t, testContext(t), name+" is counted", func() bool { return e.Stats().AuthFailures > before })
	}
	c := closing(t, newEngine(t, Options{}))
	// This case is the first of the refusals: a connection of an earlier case may be refused, and
	// counted, after Connect has returned.
	mu.Lock()
	busy = c.Addr().Engine
	mu.Unlock()
	if _, err := c.Connect(testContext(t), e.Addr(), tokens[0]); !errors.Is(err, rdma.ErrBusy) || errors.Is(err, rdma.ErrAuth) || e.Stats().AuthFailures != 0 {
		t.Errorf("an engine that Admit refuses as busy: %v, %d failures of authentication", err, e.Stats().AuthFailures)
	}
	refused("the token that Options.Token would be", c, rdma.Token(testToken))
	mu.Lock()
	banned, busy = c.Addr().Engine, rdma.EngineID{}
	mu.Unlock()
	refused("an engine that Admit refuses", c, tokens[0])
	one, none := tokens[:1], []rdma.Token{}
	current.Store(&one)
	refused("a removed token", closing(t, newEngine(t, Options{})), tokens[1])
	current.Store(&none)
	refused("any token of none", closing(t, newEngine(t, Options{})), tokens[0])
	if n := len(e.Peers()); n != 2 {
		t.Errorf("%d sessions, want those of the two clients", n)
	}
}

// TestImpostor: an acceptor that does not hold the token is rejected.
func TestImpostor(t *testing.T) {
	testkit.VerifyNone(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			b := make([]byte, handshake.HelloSize+protocol.MoreBytes)
			_, _ = io.ReadFull(nc, b)
			challenge := append(protocol.Challenge[:], make([]byte, handshake.ChallengeSize-4)...)
			challenge[8] = 7 // its engine id
			_, _ = nc.Write(challenge)
			_, _ = io.ReadFull(nc, b[:handshake.ProofSize])
			_, _ = nc.Write(make([]byte, handshake.VerdictSize)) // "accepted", without proof
			_, _ = io.Copy(io.Discard, nc)
			_ = nc.Close()
		}
	}()
	c := closing(t, newEngine(t, Options{}))
	_, err = c.Connect(testContext(t), rdma.Addr{NICs: []rdma.NetAddr{rdma.NetAddr(l.Addr().String())}}, rdma.Token(testToken))
	if !errors.Is(err, rdma.ErrAuth) {
		t.Errorf("connected to an impostor: %v", err)
	}
}

// TestNewSessionReplaces: a new session of an engine ends its old session, whose operations
// fail, before the new one begins.
func TestNewSessionReplaces(t *testing.T) {
	testkit.VerifyNone(t)
	ctx := testContext(t)
	var mu sync.Mutex
	var events []string
	e := newServer(t, Options{
		OnPeerUp:   func(rdma.EngineID) { mu.Lock(); events = append(events, "up"); mu.Unlock() },
		OnPeerDown: func(rdma.EngineID, error) { mu.Lock(); events = append(events, "down"); mu.Unlock() },
	})
	p := newRawPeer(t, e, 1)
	f := rdma.NewFlag()
	d := rdma.Desc{Engine: p.id, NICs: []rdma.NICKey{{Key: 1}}, Len: 10}
	if err := e.Write(ctx, rdma.Write{Dst: d, Done: f.Set}); err != nil {
		t.Fatal(err)
	}
	nc, err := net.Dial("tcp", string(e.nics[0].addr))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = nc.Close() }()
	h := hello{conns: 1, lanes: 1, rails: 1, generation: 1, engine: p.id, session: [16]byte{9}}
	if _, err := (&Engine{id: p.id}).authenticate(nc, e.id, rdma.Token(testToken), h); err != nil {
		t.Fatal(err)
	}
	if set, err := f.Poll(); !set || !errors.Is(err, rdma.ErrPeerDied) {
		t.Errorf("operation of the old session: %v, %v", set, err)
	}
	mu.Lock()
	defer mu.Unlock()
	if got := strings.Join(events, " "); got != "up down up" {
		t.Errorf("events: %s", got)
	}
}

// TestConnectWhileSessionEnds: a session is ending but still in the table of peers. Connect
// opens another session.
func TestConnectWhileSessionEnds(t *testing.T) {
	testkit.VerifyNone(t)
	ctx := testContext(t)
	server := newServer(t, Options{})
	client := closing(t, newEngine(t, Options{}))
	peer, err := client.Connect(ctx, server.Addr(), rdma.Token(testToken))
	if err != nil {
		t.Fatal(err)
	}
	s, err := client.core.Session(peer)
	if err != nil {
		t.Fatal(err)
	}
	s.Mu.Lock()
	conns, _ := s.beginEndLocked(fmt.Errorf("test: %w", rdma.ErrPeerDied))
	s.Mu.Unlock()
	if err := client.Send(ctx, peer, nil, nil); !errors.Is(err, rdma.ErrNoPeer) {
		t.Errorf("a message over a session that ends: %v", err)
	}
	connected := make(chan error, 1)
	go func() {
		_, err := client.Connect(ctx, server.Addr(), rdma.Token(testToken))
		connected <- err
	}()
	// Connect returns the ending session, or dials another, which waits for the end.
	for len(connected) == 0 && len(client.core.Unremoved()) < 2 && ctx.Err() == nil {
		runtime.Gosched()
	}
	s.finishEnd(conns)
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	if err := client.Send(ctx, peer, nil, nil); err != nil {
		t.Errorf("after Connect: %v", err)
	}
}
