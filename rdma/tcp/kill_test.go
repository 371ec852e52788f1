package tcp

import (
	"errors"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

// TestKilledPeer: kill -9 of a process that is being written to ends what is in
// flight to it with ErrPeerDied, each operation once, and its expectations.
func TestKilledPeer(t *testing.T) {
	testkit.VerifyNone(t)
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
	var mu sync.Mutex
	var submitted, landed, died int
	landing := make(chan struct{})
	done := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err == nil:
			if landed++; landed == 50 {
				close(landing)
			}
		case errors.Is(err, rdma.ErrPeerDied):
			died++
		default:
			t.Errorf("write: %v", err)
		}
	}
	var writer sync.WaitGroup
	writer.Go(func() {
		for {
			if err := e.Write(ctx, rdma.Write{Src: src, Dst: dst, Len: 4 << 20, Done: done}); err != nil {
				if !errors.Is(err, rdma.ErrNoPeer) {
					t.Errorf("submit: %v", err)
				}
				return
			}
			mu.Lock()
			submitted++
			mu.Unlock()
		}
	})
	<-landing
	if err := process.Kill(); err != nil {
		t.Fatal(err)
	}
	writer.Wait()
	if err := expected.Wait(ctx); !errors.Is(err, rdma.ErrPeerDied) {
		t.Errorf("expectation: %v", err)
	}
	if err := src.Close(ctx); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if landed+died != submitted || died == 0 {
		t.Errorf("%d submitted, %d landed, %d died", submitted, landed, died)
	}
	if st := e.Stats(); st.InFlightOps != 0 || st.InFlightBytes != 0 || st.SessionsClosed != 1 {
		t.Errorf("counters: %+v", st)
	}
}
