package tcp

import (
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

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
		t.Errorf("interface %q was requested", name)
	}
	heartbeats(t, c.core.Sessions()[0])
	if n := e.NICs()[0]; !n.Up {
		t.Errorf("%+v", n)
	}
}
