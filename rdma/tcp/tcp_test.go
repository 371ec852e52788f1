package tcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
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
			t.Fatal("the ack was not processed")
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

// TestOptions: Validate names the option that is out of range.
func TestOptions(t *testing.T) {
	for want, o := range map[string]Options{
		"needs a token":     {Listen: "127.0.0.1:0"},
		"Conns":             {Conns: 1000},
		"PieceBytes":        {PieceBytes: 1},
		"InFlightBytes":     {InFlightBytes: -1},
		"InFlightOps":       {InFlightOps: MaxOps - MaxMessages + 1},
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
