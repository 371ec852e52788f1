package tcp

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// idleConn returns a connection of a rail that is up. Its reader and writer do not run.
func idleConn(t *testing.T) *conn {
	t.Helper()
	o := Options{}
	o.EnsureDefaults()
	s := newSession(&Engine{opts: o}, rdma.EngineID{1}, [16]byte{2}, 1, 1, 1, true)
	one, other := net.Pipe()
	t.Cleanup(func() { _, _ = one.Close(), other.Close() })
	c := newConn(s, one, &nic{}, 0)
	if err := s.rails[0].attach(1, []*conn{c}); err != nil {
		t.Fatal(err)
	}
	s.inbound = make([]inbound, delayedAcksMax)
	return c
}

// owe acknowledges an operation of the peer.
func (c *conn) owe(h *header, reason rdma.Reason) {
	c.s.acksOwed++
	c.s.acknowledge(c, h, reason)
}

// signalled reports whether the writer of c has been woken, and resets that.
func (c *conn) signalled() bool {
	synctest.Wait()
	select {
	case <-c.wake:
		return true
	default:
		return false
	}
}

// TestDelayedAcks: the ack of a message with flagAckMayWait is written with the answer, after
// ackWait, or with delayedAcksMax others. Any other ack is written immediately.
func TestDelayedAcks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := idleConn(t)
		delayed := &header{kind: frameMessage, flags: flagAckMayWait, op: 1 << 32}
		c.owe(delayed, rdma.ReasonNone)
		if c.signalled() {
			t.Error("the ack of a message with flagAckMayWait was written at once")
		}
		o, err := c.s.Reserve(t.Context(), sessions.Limited, 8, true)
		if err != nil {
			t.Fatal(err)
		}
		o.kind, o.msg = frameMessage, []byte("answer")
		o.seal()
		if err := c.s.submit(o); err != nil {
			t.Fatal(err)
		}
		if !c.signalled() || !c.next() || len(c.w.acks) != 1 || len(c.w.batch) != 1 {
			t.Errorf("the batch has %d acks and %d frames, want the ack with the answer", len(c.w.acks), len(c.w.batch))
		}
		c.flushLate() // as the timer does
		if c.signalled() {
			t.Error("the writer was woken for an ack that it has had")
		}
		start := time.Now()
		c.owe(delayed, rdma.ReasonNone)
		<-c.wake
		if d := time.Since(start); d != ackWait {
			t.Errorf("the ack went after %v, want %v", d, ackWait)
		}
		for len(c.acks) < delayedAcksMax-1 {
			c.owe(delayed, rdma.ReasonNone)
		}
		if c.signalled() {
			t.Errorf("%d acks did not wait", len(c.acks))
		}
		c.owe(delayed, rdma.ReasonNone)
		if !c.signalled() {
			t.Errorf("%d acks wait", len(c.acks))
		}
		for _, h := range []*header{{kind: frameMessage, op: 1 << 32}, {kind: frameWrite, op: 1 << 32}} {
			if c.owe(h, rdma.ReasonNone); !c.signalled() {
				t.Errorf("the ack of a frame of type %d waits", h.kind)
			}
		}
		if c.owe(delayed, rdma.ReasonNoBuffer); !c.signalled() {
			t.Error("a refusal waits")
		}
		c.ackTimer.Stop()
	})
}

// TestImmediateAcksPastHalfBudget: a sender with more than half of MaxMessages in flight asks for
// immediate acks.
func TestImmediateAcksPastHalfBudget(t *testing.T) {
	c := idleConn(t)
	for i := range MaxMessages {
		o, err := c.s.Reserve(t.Context(), sessions.Limited, 1, true)
		if err != nil {
			t.Fatal(err)
		}
		o.kind = frameMessage
		o.seal()
		if err := c.s.submit(o); err != nil {
			t.Fatal(err)
		}
		if want := 2*(i+1) <= MaxMessages; o.ackMayWait != want {
			t.Fatalf("message %d of %d may have its ack delayed: %v, want %v", i, MaxMessages, o.ackMayWait, want)
		}
	}
	if _, err := c.s.Reserve(t.Context(), sessions.Limited, 1, true); !errors.Is(err, rdma.ErrBusy) {
		t.Errorf("a message above MaxMessages: %v", err)
	}
}

// TestCloseWritesAcks: a client receives an answer and closes immediately. It first writes the
// acks that it owes, over any of its connections. The server's operations then succeed, and the
// server reports a peer that closed, not one that failed.
func TestCloseWritesAcks(t *testing.T) {
	testkit.VerifyNone(t)
	ctx := testContext(t)
	var logged bytes.Buffer
	down, done := make(chan error, 1), make(chan error, 2)
	e := newServer(t, Options{
		Logger:     slog.New(slog.NewTextHandler(&logged, nil)),
		OnPeerDown: func(_ rdma.EngineID, why error) { down <- why },
	})
	mem := make([]byte, 1<<20)
	src, err := e.Register(mem, rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		c := newEngine(t, Options{})
		if _, err := c.Connect(ctx, e.Addr(), rdma.Token(testToken)); err != nil {
			t.Fatal(err)
		}
		dst, err := c.Register(make([]byte, len(mem)), rdma.RegisterOptions{})
		if err != nil {
			t.Fatal(err)
		}
		landed := rdma.NewFlag()
		if _, err := c.ExpectImm(rdma.Expect{Imm: 7, Count: 1, Done: landed.Set}); err != nil {
			t.Fatal(err)
		}
		got := make(chan struct{}, 1)
		if err := c.Recv(1, 64, func(rdma.EngineID, []byte) { got <- struct{}{} }); err != nil {
			t.Fatal(err)
		}
		if err := e.Write(ctx, rdma.Write{Src: src, Dst: dst.Desc(), Len: uint64(len(mem)), Imm: rdma.ImmOf(7), Done: func(err error) { done <- err }}); err != nil {
			t.Fatal(err)
		}
		if err := e.Send(ctx, c.Addr().Engine, []byte("that was it"), func(err error) { done <- err }); err != nil {
			t.Fatal(err)
		}
		if err := landed.Wait(ctx); err != nil {
			t.Fatal(err)
		}
		<-got
		if i%2 == 1 { // as for a caller whose engine stays open
			c.Disconnect(e.Addr().Engine)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(<-done, <-done); err != nil {
			t.Fatal(err)
		}
		if why := <-down; !errors.Is(why, sessions.ErrPeerClosed) {
			t.Fatalf("the session ended with: %v", why)
		}
	}
	if err := e.Close(); err != nil { // after Close no goroutine logs
		t.Fatal(err)
	}
	if logged.Len() > 0 {
		t.Errorf("logged:\n%s", &logged)
	}
}
