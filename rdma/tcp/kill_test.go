package tcp

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"os"
	"os/exec"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/rdmatest"
)

// TestKilledPeer: kill -9 of the target process ends the operations in flight with ErrPeerDied,
// each once, and the expectations of its immediates.
func TestKilledPeer(t *testing.T) {
	testkit.VerifyNone(t)
	testkit.Repeat(t, "no write was in flight when the peer was killed", func() bool { return killPeer(t) > 0 })
}

// killPeer returns how many writes were in flight to the process that it killed.
func killPeer(t *testing.T) int {
	t.Helper()
	ctx := testContext(t)
	dst, _, process := startSink(t)
	e := closing(t, newEngine(t, Options{InFlightOps: 64}))
	if _, err := e.Connect(ctx, dst.Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	src, err := e.Register(make([]byte, 4<<20), rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	expected := rdma.NewFlag()
	if _, err := e.ExpectImm(rdma.Expect{Imm: 1, Count: 1, From: []rdma.EngineID{dst.Engine}, Done: expected.Set}); err != nil {
		t.Fatal(err)
	}
	died := rdmatest.KillTarget(ctx, t, e, src, dst, process.Kill)
	if err := expected.Wait(ctx); !errors.Is(err, rdma.ErrPeerDied) {
		t.Errorf("expectation: %v", err)
	}
	if st := e.Stats(); st.InFlightOps != 0 || st.InFlightBytes != 0 || st.SessionsClosed != 1 {
		t.Errorf("counters: %+v", st)
	}
	return died
}

// senderEnv makes the test binary write to the Desc in it until it is killed.
const senderEnv = "PENSTOCK_TCP_TEST_SENDER"

// runSender is that process.
func runSender() error {
	raw, err := base64.StdEncoding.DecodeString(os.Getenv(senderEnv))
	if err != nil {
		return err
	}
	var dst rdma.Desc
	if err := dst.UnmarshalBinary(raw); err != nil {
		return err
	}
	ctx := context.Background()
	e, err := New(ctx, Options{Conns: 2})
	if err != nil {
		return err
	}
	if _, err := e.Connect(ctx, dst.Addr(), rdma.Token(testToken)); err != nil {
		return err
	}
	src, err := e.Register(bytes.Repeat([]byte{1}, int(dst.Len)), rdma.RegisterOptions{Local: true})
	if err != nil {
		return err
	}
	for { // one at a time, because overlapping writes have no defined result
		done := rdma.NewFlag()
		if err := e.Write(ctx, rdma.Write{Src: src, Dst: dst, Len: dst.Len, Imm: rdma.ImmOf(1), Done: done.Set}); err != nil {
			return err
		}
		if err := done.Wait(ctx); err != nil {
			return err
		}
	}
}

// TestKilledSender: kill -9 of the writing process ends the expectations of its immediates with
// ErrPeerDied, and no byte of its window changes after the window is revoked.
func TestKilledSender(t *testing.T) {
	testkit.VerifyNone(t)
	ctx := testContext(t)
	down := make(chan error, 1)
	e := newServer(t, Options{OnPeerDown: func(_ rdma.EngineID, why error) { down <- why }})
	const n = 8 << 20
	r, err := e.Register(make([]byte, n), rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	win, err := r.Window(0, n)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := win.Desc().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	landing := rdma.NewFlag()
	if _, err := e.ExpectImm(rdma.Expect{Imm: 1, Count: 20, Done: landing.Set}); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), senderEnv+"="+base64.StdEncoding.EncodeToString(raw))
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	killed := sync.OnceFunc(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	defer killed()
	if err := landing.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	peers := e.Peers()
	if len(peers) != 1 {
		t.Fatalf("peers: %+v", peers)
	}
	expected := rdma.NewFlag()
	if _, err := e.ExpectImm(rdma.Expect{Imm: 2, Count: 1, From: []rdma.EngineID{peers[0].ID}, Done: expected.Set}); err != nil {
		t.Fatal(err)
	}
	killed()
	if err := expected.Wait(ctx); !errors.Is(err, rdma.ErrPeerDied) {
		t.Errorf("expectation: %v", err)
	}
	if err := win.Revoke(ctx); err != nil {
		t.Fatal(err)
	}
	poison := bytes.Repeat([]byte{0xA5}, n)
	copy(win.Bytes(), poison)
	select {
	case why := <-down:
		if !errors.Is(why, rdma.ErrPeerDied) {
			t.Errorf("down: %v", why)
		}
	case <-ctx.Done():
		t.Fatal("the session does not end")
	}
	if len(e.Peers()) != 0 || !bytes.Equal(r.Bytes(), poison) {
		t.Errorf("%d peers; bytes as poisoned: %v", len(e.Peers()), bytes.Equal(r.Bytes(), poison))
	}
}
