package client_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/penstock-kv/penstock/api"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

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
	pins := func() int {
		pins, _, err := h.node.Pins(nil, "", false, 0, 1000)
		h.must(err)
		return len(pins)
	}
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
	if err != nil || pins() == 0 {
		t.Fatalf("match with a pin: %+v, %v; %d pins", m, err, pins())
	}
	h.must(m.Lease.Release(t.Context()))
	h.must(r.store.Close()) // it waits until the pins are released
	if n := pins(); n != 0 {
		t.Errorf("%d pins are left", n)
	}
}
