package tcp

import (
	"bytes"
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

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
