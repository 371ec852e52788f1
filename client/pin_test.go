package client_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/api"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

// pins returns the number of pins on the node.
func (h *host) pins() int {
	pins, _, err := h.node.Pins(nil, "", false, 0, 1000)
	h.must(err)
	return len(pins)
}

// sentEngine calls a function when a Match call has been sent.
type sentEngine struct {
	rdma.Engine
	sent atomic.Pointer[context.CancelFunc]
}

func (e *sentEngine) Send(ctx context.Context, to rdma.EngineID, msg []byte, done func(error)) error {
	call, _, err := api.ParseCall(msg)
	if sendErr := e.Engine.Send(ctx, to, msg, done); sendErr != nil {
		return sendErr
	}
	if f := e.sent.Load(); f != nil && err == nil && call.Method == api.MethodMatch {
		(*f)()
	}
	return nil
}

// TestPinOfAnEndedMatch: a match whose ctx ends after the node has the call leaves no pin behind.
func TestPinOfAnEndedMatch(t *testing.T) {
	h := newHost(t, nil)
	engine := new(sentEngine)
	r := newRig(t, func(o *client.Options) { engine.Engine, o.Engine = o.Engine, engine }, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	r.mustPut(ns, ids)
	for range 50 {
		ctx, cancel := context.WithCancel(t.Context())
		engine.sent.Store(&cancel)
		m, err := r.store.Match(ctx, client.MatchRequest{Namespace: ns, IDs: ids, Pin: true})
		cancel()
		if err == nil {
			err = m.Lease.Release(t.Context())
		} else if errors.Is(err, context.Canceled) {
			err = nil
		}
		h.must(err)
	}
	engine.sent.Store(nil)
	m, err := r.store.Match(t.Context(), client.MatchRequest{Namespace: ns, IDs: ids, Pin: true})
	if err != nil || h.pins() == 0 {
		t.Fatalf("match with a pin: %+v, %v; %d pins", m, err, h.pins())
	}
	h.must(m.Lease.Release(t.Context()))
	h.must(r.store.Close()) // it waits until the pins are released
	if n := h.pins(); n != 0 {
		t.Errorf("%d pins are left", n)
	}
}

// gatedEngine locks its gate when it sends a Match call, and ends the call's ctx. While the gate is locked, no message is received.
type gatedEngine struct {
	rdma.Engine
	gate sync.RWMutex
	sent atomic.Pointer[context.CancelFunc]
}

func (e *gatedEngine) Send(ctx context.Context, to rdma.EngineID, msg []byte, done func(error)) error {
	if call, _, err := api.ParseCall(msg); err == nil && call.Method == api.MethodMatch {
		if cancel := e.sent.Swap(nil); cancel != nil {
			e.gate.Lock()
			defer (*cancel)()
		}
	}
	return e.Engine.Send(ctx, to, msg, done)
}

func (e *gatedEngine) Recv(count, sizeBytes int, handler func(rdma.EngineID, []byte)) error {
	return e.Engine.Recv(count, sizeBytes, func(from rdma.EngineID, msg []byte) {
		e.gate.RLock()
		defer e.gate.RUnlock()
		handler(from, msg)
	})
}

// gatedProxy forwards connections to an address. While the gate is locked, nothing passes.
func gatedProxy(t *testing.T, to string, gate *sync.RWMutex) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	copies := func(to, from net.Conn) {
		defer to.Close()
		buf := make([]byte, 32<<10)
		for {
			n, err := from.Read(buf)
			gate.RLock()
			_, writeErr := to.Write(buf[:n])
			gate.RUnlock()
			if err != nil || writeErr != nil {
				return
			}
		}
	}
	running.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				_ = near.Close()
				continue
			}
			running.Go(func() { copies(far, near) })
			running.Go(func() { copies(near, far) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		running.Wait()
	})
	return l.Addr().String()
}

// TestPinOfANodeThatStandsStill: a match with a pin is cancelled, and its node stands still for longer than a release may take, once before
// its reply and once more before it takes the release. No pin stays.
func TestPinOfANodeThatStandsStill(t *testing.T) {
	const still = 2 * time.Second // longer than abortWithin
	h := newHost(t, nil)
	engine := new(gatedEngine)
	var control sync.RWMutex
	proxy := gatedProxy(t, h.control, &control)
	r := newRig(t, func(o *client.Options) {
		engine.Engine, o.Engine = o.Engine, engine
		o.Servers, o.NoLocal = []string{proxy}, true
	}, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 4, 1)
	r.mustPut(ns, ids)
	ctx, cancel := context.WithCancel(t.Context())
	engine.sent.Store(&cancel)
	if _, err := r.store.Match(ctx, client.MatchRequest{Namespace: ns, IDs: ids, Pin: true}); !errors.Is(err, context.Canceled) {
		t.Fatalf("match: %v; want that it is cancelled", err)
	}
	eventually(t, "the node has the pin", func() bool { return h.pins() == 1 })
	control.Lock()
	<-time.After(still) // the length of the stall is the input
	engine.gate.Unlock()
	<-time.After(still)
	if n := h.pins(); n != 1 {
		t.Errorf("%d pins while the node takes no release", n)
	}
	control.Unlock()
	eventually(t, "the pin is released", func() bool { return h.pins() == 0 })
}
