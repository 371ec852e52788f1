package tcp

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"math/big"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/handshake"
	"github.com/penstock-kv/penstock/rdma/qos"
	"github.com/penstock-kv/penstock/rdma/rdmatest"
)

// testContext returns a context that ends well before the test binary's timeout.
func testContext(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// closing closes e at the end of the test.
func closing(t testing.TB, e *Engine) *Engine {
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return e
}

// newServer starts an engine that listens.
func newServer(t testing.TB, o Options) *Engine {
	t.Helper()
	o.Listen, o.Token = "127.0.0.1:0", rdma.Token(testToken)
	return closing(t, newEngine(t, o))
}

// rawPeer is a hand-made peer that may violate the protocol.
type rawPeer struct {
	t     testing.TB
	id    rdma.EngineID
	conns []net.Conn
}

// newRawPeer opens a session of n connections.
func newRawPeer(t testing.TB, e *Engine, n int) *rawPeer {
	t.Helper()
	p := &rawPeer{t: t}
	_, _ = rand.Read(p.id[:])
	var session [16]byte
	_, _ = rand.Read(session[:])
	var wg sync.WaitGroup
	p.conns = make([]net.Conn, n)
	for i := range n {
		nc, err := net.Dial("tcp", string(e.nics[0].addr))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = nc.Close() })
		p.conns[i] = nc
		h := hello{index: i, conns: n, lanes: 1, rails: 1, generation: 1, engine: p.id, session: session}
		wg.Go(func() {
			dialer := &Engine{id: p.id}
			if _, err := dialer.authenticate(nc, e.id, rdma.Token(testToken), h); err != nil {
				t.Errorf("handshake: %v", err)
			}
		})
	}
	wg.Wait()
	return p
}

// send writes raw bytes on a connection.
func (p *rawPeer) send(i int, b ...[]byte) {
	p.t.Helper()
	for _, x := range b {
		if _, err := p.conns[i].Write(x); err != nil {
			p.t.Fatalf("write: %v", err)
		}
	}
}

// raw returns the bytes of a header.
func (h header) raw() []byte {
	b := make([]byte, headerSize)
	h.encode(b)
	return b
}

// next reads frames of connection i up to the first that is not a heartbeat, and returns that
// one with its payload.
func (p *rawPeer) next(i int) (header, []byte) {
	p.t.Helper()
	b := make([]byte, headerSize)
	for {
		if _, err := io.ReadFull(p.conns[i], b); err != nil {
			p.t.Fatalf("read: %v", err)
		}
		var h header
		if err := h.decode(b); err != nil {
			p.t.Fatal(err)
		}
		if h.kind == frameHeartbeat {
			continue
		}
		payload := make([]byte, int(h.runs)*runSize+int(h.length))
		if _, err := io.ReadFull(p.conns[i], payload); err != nil {
			p.t.Fatalf("read: %v", err)
		}
		return h, payload
	}
}

// nextAck reads an ack frame of one entry.
func (p *rawPeer) nextAck(i int) ack {
	p.t.Helper()
	h, b := p.next(i)
	if h.kind != frameAck || len(b) != ackSize {
		p.t.Fatalf("frame of type %d with %d bytes, want one ack", h.kind, len(b))
	}
	a, err := decodeAck(b)
	if err != nil {
		p.t.Fatal(err)
	}
	return a
}

// closed waits until the engine has closed connection i.
func (p *rawPeer) closed(i int) {
	p.t.Helper()
	_ = p.conns[i].SetReadDeadline(time.Now().Add(30 * time.Second))
	_, err := io.Copy(io.Discard, p.conns[i])
	if errors.Is(err, context.DeadlineExceeded) || (err != nil && strings.Contains(err.Error(), "timeout")) {
		p.t.Fatal("the connection is still open")
	}
}

// TestConformanceVariants runs the suite with other shapes of session, and over
// TLS.
func TestConformanceVariants(t *testing.T) {
	testkit.Long(t, "the whole suite of rdma, once for each kind of socket")
	cfg := testTLS(t)
	for name, change := range map[string]func(*Options){
		"one connection": func(o *Options) { o.Conns = 1 },
		"small pieces":   func(o *Options) { o.Conns, o.PieceBytes = 7, 64<<10 },
		"TLS":            func(o *Options) { o.TLS = cfg },
		"zero copy":      func(o *Options) { o.ZeroCopy = true },
		"two NICs": func(o *Options) {
			o.NICs = twoNICs(o.Listen != "")
			o.Listen, o.Conns = "", 2
		},
		"two NICs to one": func(o *Options) {
			if o.Listen == "" {
				o.NICs, o.Conns = twoNICs(false), 1
			}
		},
		"classes": func(o *Options) {
			o.Conns, o.QoS = 2, &qos.Map{rdma.ClassKV: {DSCP: 8}, rdma.ClassCollective: {DSCP: 46, Priority: 6}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			rdmatest.Run(t, func(t testing.TB, c rdmatest.Config) rdma.Engine {
				o := optionsOf(c)
				change(&o)
				return newEngine(t, o)
			})
		})
	}
}

// testTLS returns a configuration for both sides with a certificate of its own.
func testTLS(t testing.TB) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "penstock test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
}

// TestStalledPayload: a peer that stops within a payload does not delay Revoke. Its later bytes
// are dropped and acked as revoked, and the session continues.
func TestStalledPayload(t *testing.T) {
	testkit.VerifyNone(t)
	ctx := testContext(t)
	e := newServer(t, Options{})
	mem := make([]byte, 1<<20)
	r, err := e.Register(mem, rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range []bool{false, true} {
		win, err := r.Window(0, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		p := newRawPeer(t, e, 1)
		h := header{kind: frameWrite, frames: 1, op: 1<<32 | 77, key: win.Desc().NICs[0].Key, length: 1 << 20, flags: flagImm, imm: 5}
		half := bytes.Repeat([]byte{1}, 1<<19)
		before := e.core.WritesIn.Load()
		if table {
			runs := make([]byte, 2*runSize)
			putSpan(runs, span{1 << 19, 1 << 19})
			putSpan(runs[runSize:], span{0, 1 << 19})
			h.runs, h.tableSum = 2, tableSum(runs)
			p.send(0, h.raw(), runs, half)
		} else {
			p.send(0, h.raw(), half)
		}
		awaitInside(t, win.(*window))
		if err := win.Revoke(ctx); err != nil {
			t.Fatal(err)
		}
		poison := bytes.Repeat([]byte{0xA5}, len(mem))
		copy(mem, poison)
		p.send(0, half)
		if a := p.nextAck(0); a != (ack{1<<32 | 77, rdma.ReasonRevoked}) {
			t.Fatalf("ack %+v", a)
		}
		if !bytes.Equal(mem, poison) {
			t.Fatal("bytes changed after Revoke had returned")
		}
		// The session continues.
		h.op = 1<<32 | 78
		h.runs, h.length = 0, 10
		p.send(0, h.raw(), make([]byte, 10))
		if a := p.nextAck(0); a != (ack{1<<32 | 78, rdma.ReasonKey}) {
			t.Fatalf("ack %+v", a)
		}
		if n := e.core.WritesIn.Load(); n != before {
			t.Errorf("%d writes counted", n-before)
		}
	}
}

// tableSum is the checksum of a table.
func tableSum(table []byte) uint32 { return crc32.Checksum(table, castagnoli) }

// awaitInside waits until a connection is inside w.
func awaitInside(t testing.TB, w *window) {
	t.Helper()
	ctx := testContext(t)
	for {
		w.mu.Lock()
		n := len(w.inside)
		w.mu.Unlock()
		if n > 0 {
			return
		}
		select {
		case <-time.After(100 * time.Microsecond):
		case <-ctx.Done():
			t.Fatal("no payload arrives")
		}
	}
}

// TestRevokeEndsWithContext: a Revoke whose context has ended returns, and the window stays
// revoked.
func TestRevokeEndsWithContext(t *testing.T) {
	e := newServer(t, Options{})
	r, err := e.Register(make([]byte, 100), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	rw, err := r.Window(0, 10)
	if err != nil {
		t.Fatal(err)
	}
	w := rw.(*window)
	c := &conn{nc: deadlineless{}}
	w.enter(c) // a reader that is not interrupted
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.Revoke(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("revoke: %v", err)
	}
	if err := r.Close(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("close: %v", err)
	}
	if w.enter(c) {
		t.Fatal("a revoked window lets a payload in")
	}
	w.leave(c)
	if err := w.Revoke(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(testContext(t)); err != nil {
		t.Fatal(err)
	}
}

// deadlineless is a connection that ignores interruptions.
type deadlineless struct{ net.Conn }

func (deadlineless) SetReadDeadline(time.Time) error { return nil }

// TestSilentPeer: a connected peer that sends nothing is declared dead after IdleTimeout, and
// the operations in flight to it end.
func TestSilentPeer(t *testing.T) {
	testkit.VerifyNone(t)
	ctx := testContext(t)
	down := make(chan error, 1)
	e := newServer(t, Options{
		// Long enough to submit two operations before it has passed.
		HeartbeatInterval: 100 * time.Millisecond, IdleTimeout: time.Second,
		OnPeerDown: func(_ rdma.EngineID, err error) { down <- err },
	})
	p := newRawPeer(t, e, 2)
	expected, written := rdma.NewFlag(), rdma.NewFlag()
	if _, err := e.ExpectImm(rdma.Expect{Imm: 1, Count: 1, From: []rdma.EngineID{p.id}, Done: expected.Set}); err != nil {
		t.Fatal(err)
	}
	d := rdma.Desc{Engine: p.id, NICs: []rdma.NICKey{{Key: 1}}, Len: 10}
	if err := e.Write(ctx, rdma.Write{Dst: d, Done: written.Set}); err != nil {
		t.Fatal(err)
	}
	if err := written.Wait(ctx); !errors.Is(err, rdma.ErrPeerDied) {
		t.Errorf("write: %v", err)
	}
	if err := expected.Wait(ctx); !errors.Is(err, rdma.ErrPeerDied) {
		t.Errorf("expectation: %v", err)
	}
	if err := <-down; !errors.Is(err, rdma.ErrPeerDied) || !strings.Contains(err.Error(), "silent") {
		t.Errorf("down: %v", err)
	}
	if st := e.Stats(); st.PeersTimedOut != 1 || st.SessionsClosed != 1 {
		t.Errorf("counters: %+v", st)
	}
}

// TestHeartbeatsWithoutAcks: heartbeats alone do not keep an operation alive.
func TestHeartbeatsWithoutAcks(t *testing.T) {
	testkit.VerifyNone(t)
	ctx := testContext(t)
	e := newServer(t, Options{HeartbeatInterval: 20 * time.Millisecond, IdleTimeout: time.Minute, TransferTimeout: 200 * time.Millisecond})
	p := newRawPeer(t, e, 1)
	written := rdma.NewFlag()
	d := rdma.Desc{Engine: p.id, NICs: []rdma.NICKey{{Key: 1}}, Len: 10}
	if err := e.Write(ctx, rdma.Write{Dst: d, Done: written.Set}); err != nil {
		t.Fatal(err)
	}
	beat := header{kind: frameHeartbeat}.raw()
	for {
		if set, err := written.Poll(); set {
			if !errors.Is(err, rdma.ErrPeerDied) || !strings.Contains(err.Error(), "did not end") {
				t.Errorf("write: %v", err)
			}
			return
		}
		_, _ = p.conns[0].Write(beat)
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			t.Fatal("the operation did not end")
		}
	}
}

// TestHeartbeatsKeepIdleSessions: an idle session stays open, and heartbeats arrive on every
// connection.
func TestHeartbeatsKeepIdleSessions(t *testing.T) {
	ctx := testContext(t)
	o := Options{HeartbeatInterval: 10 * time.Millisecond, IdleTimeout: 30 * time.Second}
	e := newServer(t, o)
	c := closing(t, newEngine(t, o))
	if _, err := c.Connect(ctx, e.Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	heartbeats(t, c.core.Sessions()[0])
	if len(c.Peers()) != 1 || len(e.Peers()) != 1 {
		t.Error("the session ended")
	}
}

// heartbeats returns when 20 heartbeats have arrived on every connection of a session.
func heartbeats(t *testing.T, s *session) {
	t.Helper()
	for range 20 {
		for _, k := range s.rails[0].conns {
			last := k.rx.Load()
			until(t, testContext(t), "a heartbeat", func() bool { return k.rx.Load() != last })
		}
	}
}

// TestHeartbeatsWhileTheKernelIsLate: the kernel delays its answer about a NIC's interface, as
// it does while interfaces are removed. The engine's heartbeats continue.
func TestHeartbeatsWhileTheKernelIsLate(t *testing.T) {
	asked, answer := make(chan string, 1), make(chan struct{})
	interfaceByName = func(name string) (*net.Interface, error) {
		select {
		case asked <- name:
		default:
		}
		<-answer
		return net.InterfaceByName(name)
	}
	t.Cleanup(func() { interfaceByName = net.InterfaceByName })
	o := Options{HeartbeatInterval: 10 * time.Millisecond, IdleTimeout: 30 * time.Second}
	c := newEngine(t, o)
	o.NICs, o.Token = []NIC{{Device: "lo", Listen: "127.0.0.1:0"}}, rdma.Token(testToken)
	e := closing(t, newEngine(t, o))
	closing(t, c)
	t.Cleanup(func() { close(answer) })
	if _, err := c.Connect(testContext(t), e.Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	if name := <-asked; name != "lo" {
		t.Errorf("interface %q was asked for", name)
	}
	heartbeats(t, c.core.Sessions()[0])
	if n := e.NICs()[0]; !n.Up {
		t.Errorf("%+v", n)
	}
}

// TestMalformed: an invalid frame ends the session, is counted, and does not affect other
// sessions.
func TestMalformed(t *testing.T) {
	testkit.VerifyNone(t)
	var logged bytes.Buffer
	e := newServer(t, Options{Logger: slog.New(slog.NewTextHandler(&logged, nil))})
	mem := make([]byte, 1<<20)
	r, err := e.Register(mem, rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	key := r.Desc().NICs[0].Key
	write := header{kind: frameWrite, frames: 1, op: 1 << 32, key: key, length: 32}
	mutate := func(f func([]byte)) []byte { b := write.raw(); f(b); return b }
	with := func(f func(*header)) []byte { h := write; f(&h); return h.raw() }
	table := make([]byte, 2*runSize)
	putSpan(table, span{0, 16})
	putSpan(table[runSize:], span{16, 17})
	tooMuch := with(func(h *header) { h.runs, h.tableSum = 2, tableSum(table) })
	var unknownAck, badStatus [ackSize]byte
	ack{op: 1 << 40}.put(unknownAck[:])
	ack{status: 200}.put(badStatus[:])
	cases := map[string][]byte{
		"magic":            mutate(func(b []byte) { b[0]++ }),
		"version":          mutate(func(b []byte) { b[3]++ }),
		"checksum":         mutate(func(b []byte) { b[20]++ }),
		"type":             with(func(h *header) { h.kind = 9 }),
		"flags":            with(func(h *header) { h.flags = 2 }),
		"no frames":        with(func(h *header) { h.frames = 0 }),
		"too many frames":  with(func(h *header) { h.frames = maxFrames + 1 }),
		"too many runs":    with(func(h *header) { h.runs = maxRuns + 1 }),
		"huge length":      with(func(h *header) { h.length = 1 << 62 }),
		"runs and offset":  with(func(h *header) { h.runs, h.offset = 1, 1 }),
		"table checksum":   append(with(func(h *header) { h.runs = 2 }), table...),
		"table too long":   append(tooMuch, table...),
		"table too short":  append(with(func(h *header) { h.runs, h.tableSum, h.length = 2, tableSum(table), 34 }), table...),
		"heartbeat length": header{kind: frameHeartbeat, length: 1}.raw(),
		"empty ack":        header{kind: frameAck}.raw(),
		"odd ack":          header{kind: frameAck, length: 17}.raw(),
		"huge ack":         header{kind: frameAck, length: ackSize * (maxAcks + 1)}.raw(),
		"huge message":     header{kind: frameMessage, length: maxMessage + 1}.raw(),
		"unknown ack":      append(header{kind: frameAck, length: ackSize}.raw(), unknownAck[:]...),
		"ack status":       append(header{kind: frameAck, length: ackSize}.raw(), badStatus[:]...),
		"piece":            with(func(h *header) { h.piece = 1 }),
		"generation":       with(func(h *header) { h.op = 5 }),
		"slot":             with(func(h *header) { h.op = 1<<32 | MaxOps }),
		"rail":             header{kind: frameDown, frames: MaxNICs}.raw(),
		"rail not there":   header{kind: frameDown, frames: 1, piece: 1}.raw(),
		"slot in use": append(with(func(h *header) { h.frames, h.length = 2, 0 }),
			with(func(h *header) { h.op, h.length = 2<<32, 0 })...),
		"generation goes back": append(with(func(h *header) { h.op, h.length = 2<<32, 0 }),
			with(func(h *header) { h.length = 0 })...),
		"frames disagree": append(with(func(h *header) { h.frames, h.length = 3, 0 }),
			with(func(h *header) { h.frames, h.length = 2, 0 })...),
	}
	for name, b := range cases {
		p := newRawPeer(t, e, 2)
		p.send(0, b)
		p.closed(0)
		p.closed(1) // all connections of the session end
		if st := e.Stats(); st.MalformedFrames == 0 {
			t.Errorf("%s: not counted", name)
		}
	}
	if n := e.Stats().MalformedFrames; n != uint64(len(cases)) {
		t.Errorf("%d malformed frames counted, want %d", n, len(cases))
	}
	if !bytes.Equal(mem, make([]byte, len(mem))) {
		t.Error("bytes were written")
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(logged.String(), "malformed frame") {
		t.Errorf("log: %s", logged.String())
	}
	if n := strings.Count(logged.String(), "\n"); n > 3*len(cases) {
		t.Errorf("%d lines logged", n)
	}
}

// TestEarlyAck: an ack that arrives before the frames were written does not free the source
// while a writer reads from it. A second ack is ignored, and an ack of an operation that has
// not begun ends the session.
func TestEarlyAck(t *testing.T) {
	ctx := testContext(t)
	e := newServer(t, Options{PieceBytes: maxPiece})
	src, err := e.Register(make([]byte, maxPiece), rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	p := newRawPeer(t, e, 1)
	if err := p.conns[0].(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	d := rdma.Desc{Engine: p.id, NICs: []rdma.NICKey{{Key: 1}}, Len: maxPiece}
	f := rdma.NewFlag()
	// The frame is larger than the sockets hold, so the writer blocks in it.
	if err := e.Write(ctx, rdma.Write{Src: src, Dst: d, Len: maxPiece, Done: f.Set}); err != nil {
		t.Fatal(err)
	}
	raw := make([]byte, headerSize)
	var h header
	if _, err := io.ReadFull(p.conns[0], raw); err != nil {
		t.Fatal(err)
	}
	if err := h.decode(raw); err != nil {
		t.Fatal(err)
	}
	var a [ackSize]byte
	ack{op: h.op}.put(a[:])
	p.send(0, header{kind: frameAck, length: ackSize}.raw(), a[:])
	s := e.core.Sessions()[0]
	for {
		s.Mu.Lock()
		acked := s.Ops[0].acked
		s.Mu.Unlock()
		if acked {
			break
		}
		select {
		case <-time.After(100 * time.Microsecond):
		case <-ctx.Done():
			t.Fatal("the ack was not taken")
		}
	}
	if set, _ := f.Poll(); set {
		t.Fatal("ended while its frames were being written")
	}
	nc := p.conns[0]
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		_, _ = io.Copy(io.Discard, nc)
	}()
	if err := f.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	p.send(0, header{kind: frameAck, length: ackSize}.raw(), a[:]) // a repeated ack is ignored
	ack{op: h.op + 2<<32}.put(a[:])
	p.send(0, header{kind: frameAck, length: ackSize}.raw(), a[:])
	<-drained // the engine has closed the connection
	if n := e.Stats().MalformedFrames; n != 1 {
		t.Errorf("%d malformed frames", n)
	}
}

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

// TestOptions: Validate names the option that is out of range.
func TestOptions(t *testing.T) {
	for want, o := range map[string]Options{
		"needs a token":     {Listen: "127.0.0.1:0"},
		"Conns":             {Conns: 1000},
		"PieceBytes":        {PieceBytes: 1},
		"InFlightBytes":     {InFlightBytes: -1},
		"InFlightOps":       {InFlightOps: MaxOps + 1},
		"MaxMessage":        {MaxMessage: 1 << 30},
		"IdleTimeout":       {HeartbeatInterval: time.Second, IdleTimeout: time.Second},
		"HeartbeatInterval": {HeartbeatInterval: 1},
		"NICTimeout":        {NICTimeout: 1},
		"give each NIC":     {NICs: make([]NIC, 2), Listen: "127.0.0.1:0"},
		"at most 16":        {NICs: make([]NIC, MaxNICs+1)},
		"none does":         {NICs: []NIC{{Listen: "127.0.0.1:0"}, {}}, Token: rdma.Token(testToken)},
		"no IP address":     {NICs: []NIC{{Local: "eth0"}}},
		"dscp:64":           {QoS: &qos.Map{{DSCP: 64}}},
		"listen on":         {Listen: "256.0.0.1:0", Token: rdma.Token(testToken)},
	} {
		if e, err := New(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
			if e != nil {
				_ = e.Close()
			}
		}
	}
	e := newServer(t, Options{Congestion: "no such congestion control", Advertise: "node7:7421"})
	if e.Addr().NICs[0] != "node7:7421" || !strings.Contains(e.Info().Detail, "system") {
		t.Errorf("address %v, info %+v", e.Addr(), e.Info())
	}
}

// TestNoAllocations: submitting, performing and ending a write allocates nothing on either
// side. A closure per operation, an op that is not recycled, or vectors that are not reused
// would break it.
func TestNoAllocations(t *testing.T) {
	if raceEnabled || invariants.Enabled {
		t.Skip("the race detector and the invariants' checks allocate")
	}
	for _, zeroCopy := range []bool{false, true} {
		t.Run(fmt.Sprintf("zero copy %v", zeroCopy), func(t *testing.T) { noAllocations(t, zeroCopy) })
	}
}

func noAllocations(t *testing.T, zeroCopy bool) {
	ctx := context.Background()
	e := newServer(t, Options{ZeroCopy: zeroCopy})
	c := closing(t, newEngine(t, Options{}))
	if _, err := c.Connect(ctx, e.Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	src, _ := e.Register(make([]byte, 1<<20), rdma.RegisterOptions{})
	dst, _ := c.Register(make([]byte, 1<<20), rdma.RegisterOptions{})
	done := make(chan error, 1)
	set := func(err error) { done <- err }
	a := []uint32{5, 3, 1, 9, 11}
	w := rdma.Write{Src: src, Dst: dst.Desc(), Len: 1 << 20, Done: set}
	p := rdma.PagedWrite{PageLen: 4096, Src: src, Dst: dst.Desc(), SrcPages: rdma.Pages{Indices: a, Stride: 4096}, DstPages: rdma.Pages{Indices: a, Stride: 8192}, Done: set}
	if n := testing.AllocsPerRun(200, func() {
		if err := errors.Join(e.Write(ctx, w), <-done, e.WritePaged(ctx, p), <-done); err != nil {
			t.Error(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations for a write and a paged write", n)
	}
}

// TestNormalEnds: a peer that closed normally, a health check, and a silent connection at Close
// cause no warning and no authentication failure.
func TestNormalEnds(t *testing.T) {
	testkit.VerifyNone(t)
	var logged bytes.Buffer
	down := make(chan error, 1)
	e := newServer(t, Options{
		Logger:     slog.New(slog.NewTextHandler(&logged, nil)),
		OnPeerDown: func(_ rdma.EngineID, why error) { down <- why },
	})
	nc, err := net.Dial("tcp", string(e.Addr().NICs[0]))
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Close(); err != nil {
		t.Fatal(err)
	}
	waits, err := net.Dial("tcp", string(e.Addr().NICs[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer waits.Close()
	c := newEngine(t, Options{})
	if _, err := c.Connect(t.Context(), e.Addr(), rdma.Token(testToken)); err != nil { // accepted in turn: after waits
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if why := <-down; !errors.Is(why, rdma.ErrPeerDied) {
		t.Errorf("the session ended with %v", why)
	}
	if err := e.Close(); err != nil { // after Close no goroutine logs
		t.Fatal(err)
	}
	if n := e.Stats().AuthFailures; n != 0 || logged.Len() > 0 {
		t.Errorf("%d failures of authentication; logged:\n%s", n, &logged)
	}
}
