package tcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

// twoNICs returns an engine's interfaces for a test. Loopback answers on all of 127.0.0.0/8.
func twoNICs(listen bool) []NIC {
	out := []NIC{{Name: "nic0", Local: "127.0.0.1"}, {Name: "nic1", Local: "127.0.0.2"}}
	if listen {
		out[0].Listen, out[1].Listen = "127.0.0.1:0", "127.0.0.2:0"
	}
	return out
}

// railPair starts a server with two NICs and a client with those given, and
// connects them.
func railPair(t testing.TB, o Options, client []NIC) (server, dialer *Engine) {
	t.Helper()
	so, co := o, o
	so.NICs, so.Token = twoNICs(true), rdma.Token(testToken)
	co.NICs = client
	server, dialer = closing(t, newEngine(t, so)), closing(t, newEngine(t, co))
	if _, err := dialer.Connect(testContext(t), server.Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	return server, dialer
}

// until polls for a condition that has no callback.
func until(t testing.TB, ctx context.Context, what string, f func() bool) {
	t.Helper()
	for !f() {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			t.Fatalf("waiting for %s: %v", what, ctx.Err())
		}
	}
}

// TestRails: with several NICs on one or both sides every pair carries a share of a large write
// and of many small ones, and NICs reports the bytes.
func TestRails(t *testing.T) {
	for name, client := range map[string][]NIC{"two to two": twoNICs(false), "one to two": nil} {
		t.Run(name, func(t *testing.T) {
			testkit.VerifyNone(t)
			ctx := testContext(t)
			server, dialer := railPair(t, Options{}, client)
			mem := make([]byte, 32<<20)
			r, err := server.Register(mem, rdma.RegisterOptions{})
			if err != nil {
				t.Fatal(err)
			}
			want := bytes.Repeat([]byte{1, 2, 3, 4, 5, 6, 7}, len(mem)/7+1)[:len(mem)]
			src, err := dialer.Register(want, rdma.RegisterOptions{Local: true})
			if err != nil {
				t.Fatal(err)
			}
			d := r.Desc()
			if len(d.NICs) != 2 || d.NICs[0].Key != d.NICs[1].Key || d.NICs[0].Addr == d.NICs[1].Addr {
				t.Errorf("desc %+v", d)
			}
			until(t, ctx, "both rails", func() bool { return upRails(server) == 2 && upRails(dialer) == 2 })
			carried := func(e *Engine) (out []uint64) {
				for _, n := range e.NICs() {
					out = append(out, n.BytesOut+n.BytesIn)
				}
				return out
			}
			passes := 0
			pass := func(one uint64) {
				passes++
				var wg sync.WaitGroup
				for at := uint64(0); at < uint64(len(mem)); at += one {
					wg.Add(1)
					if err := dialer.Write(ctx, rdma.Write{Src: src, SrcOffset: at, Dst: d, DstOffset: at, Len: one, Done: func(err error) {
						if err != nil {
							t.Errorf("write: %v", err)
						}
						wg.Done()
					}}); err != nil {
						t.Fatal(err)
					}
				}
				wg.Wait()
				if !bytes.Equal(mem, want) {
					t.Fatal("wrong bytes")
				}
				clear(mem)
			}
			for _, one := range []uint64{uint64(len(mem)), 16 << 10} {
				before := carried(server)
				// A NIC takes the next bytes when it is ready. On a busy machine one of them may carry a whole pass.
				until(t, ctx, fmt.Sprintf("writes of %d bytes by both NICs of the server", one), func() bool {
					pass(one)
					now := carried(server)
					return now[0] > before[0] && now[1] > before[1]
				})
			}
			if in, out := sum(carried(server)), sum(carried(dialer)); in != out || in != uint64(passes*len(mem)) {
				t.Errorf("%d bytes sent, %d received, want %d", out, in, passes*len(mem))
			}
			for _, n := range append(server.NICs(), dialer.NICs()...) {
				if !n.Up {
					t.Errorf("%+v", n)
				}
			}
		})
	}
}

func sum(v []uint64) (n uint64) {
	for _, x := range v {
		n += x
	}
	return n
}

// upRails counts the rails of all sessions that are up.
func upRails(e *Engine) (n int) {
	for _, s := range e.core.Sessions() {
		s.Mu.Lock()
		n += s.up
		s.Mu.Unlock()
	}
	return n
}

// cut breaks connection i of a rail as a failure of its NIC would. With reset, bytes that have
// left are lost too.
func (e *Engine) cut(rail, i int, reset bool) {
	for _, s := range e.core.Sessions() {
		s.Mu.Lock()
		conns := s.rails[rail].conns
		s.Mu.Unlock()
		if len(conns) == 0 {
			continue
		}
		nc := conns[i%len(conns)].nc.(*net.TCPConn)
		if reset {
			_ = nc.SetLinger(0)
		}
		_ = nc.Close()
	}
}

// TestRailsDieUnderFire: while rails are cut at either end and come back, every write lands
// whole and succeeds once, its immediate is counted once, and each message is delivered once.
// Nothing changes the destination after the immediate has been counted.
func TestRailsDieUnderFire(t *testing.T) {
	testkit.Long(t, "cuts connections again and again under load")
	testkit.VerifyNone(t)
	const (
		seed    = 7
		lanes   = 6
		size    = 2<<20 + 77
		poison  = 0xA5
		perLane = 1 << 20 // immediates of a lane
	)
	cuts := 24
	if raceEnabled {
		cuts = 8
	}
	limit, stopLimit := context.WithTimeout(t.Context(), 3*time.Minute)
	defer stopLimit()
	ctx, cancel := context.WithCancelCause(limit)
	defer cancel(nil)
	down := func(_ rdma.EngineID, why error) { cancel(fmt.Errorf("the session ended: %w", why)) }
	server, dialer := railPair(t, Options{Conns: 2, PieceBytes: 256 << 10, OnPeerDown: down}, twoNICs(false))
	until(t, ctx, "both rails", func() bool { return upRails(server) == 2 && upRails(dialer) == 2 })
	mem := make([]byte, lanes*size)
	r, err := server.Register(mem, rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	from := make([]byte, lanes*size)
	src, err := dialer.Register(from, rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	var seen sync.Map
	var twice atomic.Int64
	if err := server.Recv(64, 64, func(_ rdma.EngineID, msg []byte) {
		if _, had := seen.LoadOrStore(binary.LittleEndian.Uint64(msg), true); had {
			twice.Add(1)
		}
	}); err != nil {
		t.Fatal(err)
	}
	d := r.Desc()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	finish := sync.OnceFunc(func() { close(stop); wg.Wait() })
	defer finish()
	var rounds atomic.Int64
	for lane := range uint64(lanes) {
		wg.Go(func() {
			own, at := from[lane*size:(lane+1)*size], mem[lane*size:(lane+1)*size]
			poisoned := bytes.Repeat([]byte{poison}, size)
			copy(at, poisoned)
			for round := uint64(0); ; round++ {
				select {
				case <-stop:
					return
				default:
				}
				if !bytes.Equal(at, poisoned) {
					t.Errorf("lane %d, round %d: bytes changed after the immediate had been counted", lane, round)
					return
				}
				for i := range own {
					own[i] = byte(uint64(i)*lane + round)
				}
				imm := uint32(lane*perLane + round)
				landed, done, sent := rdma.NewFlag(), rdma.NewFlag(), rdma.NewFlag()
				_, err := server.ExpectImm(rdma.Expect{Imm: imm, Count: 1, Done: landed.Set})
				w := rdma.Write{Src: src, SrcOffset: lane * size, Dst: d, DstOffset: lane * size, Len: size, Imm: rdma.ImmOf(imm), Done: done.Set}
				if err := errors.Join(err, dialer.Write(ctx, w),
					dialer.Send(ctx, server.id, binary.LittleEndian.AppendUint64(nil, uint64(imm)), sent.Set)); err != nil {
					t.Errorf("lane %d, round %d: %v", lane, round, err)
					return
				}
				if err := landed.Wait(ctx); err != nil {
					t.Errorf("lane %d, round %d: immediate: %v (%v)", lane, round, err, context.Cause(ctx))
					return
				}
				if !bytes.Equal(at, own) {
					t.Errorf("lane %d, round %d: wrong bytes", lane, round)
				}
				copy(at, poisoned)
				if err := errors.Join(done.Wait(ctx), sent.Wait(ctx)); err != nil {
					t.Errorf("lane %d, round %d: %v", lane, round, err)
					return
				}
				rounds.Add(1)
			}
		})
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	for i := range cuts {
		n := rounds.Load()
		until(t, ctx, "traffic", func() bool { return rounds.Load() > n || t.Failed() })
		e := []*Engine{server, dialer}[rng.IntN(2)]
		rail := rng.IntN(2)
		lost := server.railsLost.Load() + dialer.railsLost.Load()
		e.cut(rail, rng.IntN(2), rng.IntN(2) == 0)
		until(t, ctx, fmt.Sprintf("cut %d to be noticed", i), func() bool {
			return server.railsLost.Load()+dialer.railsLost.Load() > lost || t.Failed()
		})
		until(t, ctx, fmt.Sprintf("the rail to be up after cut %d", i), func() bool { return upRails(server) == 2 && upRails(dialer) == 2 || t.Failed() })
		if t.Failed() {
			break
		}
	}
	finish()
	n := uint64(rounds.Load())
	// The messages are in receive buffers; the handler may run later.
	until(t, ctx, "the last messages", func() bool {
		handled := uint64(0)
		seen.Range(func(any, any) bool { handled++; return true })
		return handled == n || t.Failed()
	})
	if st := server.Stats(); st.ImmediatesIn != n || st.WritesIn != n || st.SendsIn != n || twice.Load() != 0 {
		t.Errorf("%d rounds: %d immediates, %d writes, %d messages, %d delivered twice", n, st.ImmediatesIn, st.WritesIn, st.SendsIn, twice.Load())
	}
	if st := dialer.Stats(); st.WritesOut != n || st.SendsOut != n || st.WriteFailuresOut+st.SendFailuresOut != 0 || st.InFlightOps != 0 || st.SessionsClosed != 0 {
		t.Errorf("%d rounds: %+v", n, st)
	}
	if dialer.framesResent.Load() == 0 {
		t.Error("no frame was sent again: the case did not occur")
	}
	t.Logf("%d rounds, %d rails lost, %d frames sent again, %d of them had landed", n,
		server.railsLost.Load()+dialer.railsLost.Load(), dialer.framesResent.Load(), server.framesRepeated.Load())
}

// TestLastRail: a session ends with its last rail, and its operations in flight end with it.
func TestLastRail(t *testing.T) {
	testkit.VerifyNone(t)
	ctx := testContext(t)
	server, dialer := railPair(t, Options{HeartbeatInterval: 50 * time.Millisecond, NICTimeout: time.Minute}, twoNICs(false))
	until(t, ctx, "both rails", func() bool { return upRails(server) == 2 && upRails(dialer) == 2 })
	for _, n := range server.nics { // no rail can be dialed again
		n.close()
	}
	r, err := server.Register(make([]byte, 64<<20), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	src, err := dialer.Register(make([]byte, 64<<20), rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	dialer.cut(1, 0, true)
	until(t, ctx, "the rail to go down", func() bool { return upRails(server) == 1 && upRails(dialer) == 1 })
	nics := dialer.NICs()
	if !nics[0].Up || nics[1].Up || nics[1].Reason == "" {
		t.Errorf("NICs: %+v", nics)
	}
	expected := rdma.NewFlag()
	if _, err := server.ExpectImm(rdma.Expect{Imm: 1, Count: 1, From: []rdma.EngineID{dialer.id}, Done: expected.Set}); err != nil {
		t.Fatal(err)
	}
	s := dialer.core.Sessions()[0]
	var ended sync.WaitGroup
	var died atomic.Int64
	const writes = 8
	for i := range uint64(writes) {
		ended.Add(1)
		if err := dialer.Write(ctx, rdma.Write{Src: src, Dst: r.Desc(), DstOffset: i * 8 << 20, Len: 8 << 20, Done: func(err error) {
			if errors.Is(err, rdma.ErrPeerDied) {
				died.Add(1)
			}
			ended.Done()
		}}); err != nil {
			t.Fatal(err)
		}
	}
	dialer.cut(0, 0, true)
	ended.Wait()
	<-s.Removed
	if err := expected.Wait(ctx); !errors.Is(err, rdma.ErrPeerDied) {
		t.Errorf("expectation: %v", err)
	}
	if died.Load() == 0 {
		t.Errorf("all %d writes arrived before the cut", writes)
	}
}

// TestSilentRail: a rail whose packets are lost in both directions while its connections stay
// open goes down on both sides after NICTimeout. Its frames are sent over the other rail, and
// the session continues.
func TestSilentRail(t *testing.T) {
	testkit.VerifyNone(t)
	ctx := testContext(t)
	o := Options{Conns: 2, PieceBytes: 64 << 10, HeartbeatInterval: 20 * time.Millisecond, NICTimeout: 300 * time.Millisecond, IdleTimeout: time.Minute}
	hole := newBlackhole(t)
	so, co := o, o
	so.NICs, so.Token = twoNICs(true), rdma.Token(testToken)
	so.NICs[1].Advertise = hole.l.Addr().String()
	co.NICs = twoNICs(false)
	server, dialer := closing(t, newEngine(t, so)), closing(t, newEngine(t, co))
	hole.open(t, server.nics[1].listener.Addr().String())
	if _, err := dialer.Connect(ctx, server.Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	until(t, ctx, "both rails", func() bool { return upRails(server) == 2 && upRails(dialer) == 2 })
	r, err := server.Register(make([]byte, 32<<20), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	src, err := dialer.Register(bytes.Repeat([]byte{9}, 32<<20), rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	close(hole.stalled)
	for range 4 {
		f := rdma.NewFlag()
		if err := dialer.Write(ctx, rdma.Write{Src: src, Dst: r.Desc(), Len: 32 << 20, Done: f.Set}); err != nil {
			t.Fatal(err)
		}
		if err := f.Wait(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(r.Bytes(), src.Bytes()) {
		t.Error("wrong bytes")
	}
	until(t, ctx, "both sides to take the rail down", func() bool { return upRails(server) == 1 && upRails(dialer) == 1 })
	s := dialer.core.Sessions()[0]
	s.Mu.Lock()
	why := s.rails[1].why
	s.Mu.Unlock()
	if n := dialer.NICs()[1]; n.Up || n.Reason == "" {
		t.Errorf("NIC 1: %+v (%v)", n, why)
	}
}

// blackhole is a TCP relay. After stalled is closed it forwards nothing and closes nothing.
type blackhole struct {
	l       net.Listener
	stalled chan struct{}
}

func newBlackhole(t testing.TB) *blackhole {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return &blackhole{l: l, stalled: make(chan struct{})}
}

// open relays to an address until the end of the test.
func (h *blackhole) open(t testing.TB, to string) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); _ = h.l.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			in, err := h.l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				t.Errorf("relay: %v", err)
				_ = in.Close()
				return
			}
			context.AfterFunc(ctx, func() { _, _ = in.Close(), out.Close() })
			wg.Go(func() { h.relay(ctx, out, in) })
			wg.Go(func() { h.relay(ctx, in, out) })
		}
	})
}

// relay copies until the hole is stalled and then waits for the end of the test.
func (h *blackhole) relay(ctx context.Context, to, from net.Conn) {
	defer func() { _, _ = to.Close(), from.Close() }()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		select {
		case <-h.stalled:
			<-ctx.Done()
			return
		default:
		}
		if err != nil {
			return
		}
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}
