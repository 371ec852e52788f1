//go:build fabric && cgo && linux

package fabric

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// killTimeout bounds each of these tests.
const killTimeout = 3 * time.Minute

// TestKilledTarget: kill -9 of the target process ends each operation in flight to it
// once, with ErrPeerDied, and also its expectations.
func TestKilledTarget(t *testing.T) {
	testkit.VerifyNone(t)
	testkit.Repeat(t, "no write was in flight when the process was killed", func() bool { return killTarget(t) > 0 })
}

// killTarget returns how many writes were in flight to the process that it killed.
func killTarget(t *testing.T) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), killTimeout)
	defer cancel()
	dst, sink := startSink(t)
	e := engineOver(t, 1, group.Options{InFlightOps: 64}, false)
	defer closeEngine(t, e)
	if _, err := e.Connect(ctx, dst.Addr(), rdma.Token(childToken)); err != nil {
		t.Fatal(err)
	}
	const n = 4 << 20
	src, err := e.Register(make([]byte, n), rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	expected := rdma.NewFlag()
	if _, err := e.ExpectImm(rdma.Expect{Imm: 1, Count: 1, From: []rdma.EngineID{dst.Engine}, Done: expected.Set}); err != nil {
		t.Fatal(err)
	}
	w := writer{landing: make(chan struct{})}
	w.running.Go(func() { w.run(ctx, t, e, rdma.Write{Src: src, Dst: dst, Len: n, Done: w.done(t)}) })
	select {
	case <-w.landing:
	case <-ctx.Done():
		t.Fatal("nothing lands")
	}
	sink.kill()
	w.running.Wait()
	if err := expected.Wait(ctx); !errors.Is(err, rdma.ErrPeerDied) {
		t.Errorf("expectation: %v", err)
	}
	if err := src.Close(ctx); err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.landed+w.died != w.submitted {
		t.Errorf("%d submitted, %d landed, %d died", w.submitted, w.landed, w.died)
	}
	if st := e.Stats(); st.InFlightOps != 0 || st.InFlightBytes != 0 || st.SessionsClosed != 1 {
		t.Errorf("counters: %+v", st)
	}
	return w.died
}

// writer submits writes until the peer is gone, and counts their results.
type writer struct {
	running                 sync.WaitGroup
	landing                 chan struct{} // closed when a number of writes have landed
	mu                      sync.Mutex
	submitted, landed, died int
}

func (w *writer) run(ctx context.Context, t *testing.T, e rdma.Engine, x rdma.Write) {
	for {
		w.mu.Lock()
		w.submitted++
		w.mu.Unlock()
		if err := e.Write(ctx, x); err != nil {
			if !errors.Is(err, rdma.ErrNoPeer) && !errors.Is(err, rdma.ErrPeerDied) {
				t.Errorf("submit: %v", err)
			}
			w.mu.Lock()
			w.submitted--
			w.mu.Unlock()
			return
		}
	}
}

func (w *writer) done(t *testing.T) func(error) {
	return func(err error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		switch {
		case err == nil:
			if w.landed++; w.landed == 50 {
				close(w.landing)
			}
		case errors.Is(err, rdma.ErrPeerDied):
			w.died++
		default:
			t.Errorf("write: %v", err)
		}
	}
}

func closeEngine(t *testing.T, e rdma.Engine) {
	t.Helper()
	if err := e.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

// TestKilledSource: after OnPeerDown was called for a writer that was killed during its writes,
// none of its writes changes memory.
func TestKilledSource(t *testing.T) {
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(t.Context(), killTimeout)
	defer cancel()
	down := rdma.NewFlag()
	var first sync.Once
	e := engineOver(t, 1, group.Options{
		Token: rdma.Token(childToken), OnPeerDown: func(_ rdma.EngineID, err error) { first.Do(func() { down.Set(err) }) },
	}, true)
	defer closeEngine(t, e)
	const n = 8 << 20
	mem := make([]byte, n)
	r, err := e.Register(mem, rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	counted := rdma.NewFlag()
	if _, err := e.ExpectImm(rdma.Expect{Imm: 1, Count: 20, Done: counted.Set}); err != nil {
		t.Fatal(err)
	}
	b, err := r.Desc().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	source := startChild(t, "source", base64.StdEncoding.EncodeToString(b))
	if err := counted.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	source.kill()
	<-down.C()
	poison := bytes.Repeat([]byte{0xA5}, n)
	copy(mem, poison)
	// Another peer's traffic makes the engine poll: a write that is still running would
	// continue now.
	other := startChild(t, "source", base64.StdEncoding.EncodeToString(elsewhere(t, e)))
	again := rdma.NewFlag()
	if _, err := e.ExpectImm(rdma.Expect{Imm: 1, Count: 1 << 10, Done: again.Set}); err != nil {
		t.Fatal(err)
	}
	if err := again.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(mem, poison) {
		t.Error("memory changed after the peer was down")
	}
	other.kill()
}

// elsewhere registers other memory and returns its Desc.
func elsewhere(t *testing.T, e rdma.Engine) []byte {
	t.Helper()
	r, err := e.Register(make([]byte, 4096), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	b, err := r.Desc().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	return b
}
