package client_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

// stuckEngine does not complete writes before the session ends, like a peer that has stopped
// reading.
type stuckEngine struct {
	rdma.Engine
	mu      sync.Mutex
	writes  []rdma.Write
	arrived chan struct{}
}

func (e *stuckEngine) Write(_ context.Context, w rdma.Write) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.writes = append(e.writes, w)
	e.arrived <- struct{}{}
	return nil
}

func (e *stuckEngine) Disconnect(peer rdma.EngineID) {
	e.mu.Lock()
	writes := e.writes
	e.writes = nil
	e.mu.Unlock()
	for _, w := range writes {
		w.Done(rdma.ErrPeerDied)
	}
	e.Engine.Disconnect(peer)
}

func (e *stuckEngine) pending() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.writes)
}

// TestWriteToStuckNode: the node has stopped reading, so its Abort does not end the writes in
// flight. Write ends the session, because otherwise the engine would read the caller's memory after
// Write has returned. The next call opens another session.
func TestWriteToStuckNode(t *testing.T) {
	h := newHost(t, nil)
	stuck := &stuckEngine{arrived: make(chan struct{}, 4)}
	r := newRig(t, func(o *client.Options) {
		stuck.Engine = o.Engine
		o.Engine = stuck
	}, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	mem := r.memory(4 * 8192)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for range 4 {
			<-stuck.arrived
		}
		cancel()
	}()
	w, err := r.store.Write(ctx, client.WriteRequest{Namespace: ns, IDs: chain(ns, 4, 1), From: mem})
	if !errors.Is(err, context.Canceled) || w.Stored != 0 {
		t.Fatalf("write: %+v, %v", w, err)
	}
	if n := stuck.pending(); n != 0 {
		t.Errorf("%d writes still read the caller's memory", n)
	}
	if m := r.match(ns, chain(ns, 4, 1)); m.Cut != client.CutAbsent {
		t.Errorf("match: %+v", m)
	}
}

// TestDeadNodeIsMissAtOnce: no call waits for a node that is marked dead.
func TestDeadNodeIsMissAtOnce(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, func(o *client.Options) { o.DeadFor = time.Hour }, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	h.kill()
	ids := chain(ns, 4, 1)
	if m := r.match(ns, ids); m.Outcome != client.Miss || m.Cut != client.CutNodeDown {
		t.Fatalf("the call that detects the failure: %+v", m)
	}
	h.start()
	before := r.store.Stats()
	for range 100 {
		if m := r.match(ns, ids); m.Cut != client.CutNodeDown {
			t.Fatalf("match: %+v", m)
		}
		if got := r.get(ns, ids); got.Cut != client.CutNodeDown {
			t.Fatalf("read: %+v", got)
		}
	}
	after := r.store.Stats()
	if after.Connects != before.Connects || after.DeadCalls < before.DeadCalls+200 {
		t.Errorf("before %v, after %v", before, after)
	}
}
