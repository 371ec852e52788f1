package client_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
)

// TestEvents: what is stored and removed is reported in order, and a restart of
// the node, which forgets its numbers, as a gap.
func TestEvents(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	events := make(chan client.Event, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		// A number that the node never gave out: it begins with a gap, by which
		// the test knows that the stream is there.
		ended <- r.store.Events(ctx, client.EventsRequest{Namespace: "m", After: map[string]uint64{h.control: 1 << 60}}, func(e client.Event) error {
			events <- e
			return nil
		})
	}()
	next := func(want client.EventKind) client.Event {
		t.Helper()
		e := <-events
		if e.Kind != want || e.Server != h.control {
			t.Fatalf("event %+v; want %v", e, want)
		}
		return e
	}
	next(client.Gap)
	ids := chain(ns, 6, 1)
	r.mustPut(ns, ids[:4])
	if e := next(client.BlockStored); !slices.Equal(e.IDs, ids[:4]) || !e.Parent.IsZero() || e.Namespace != "m" || e.Sequence == 0 || e.Time.IsZero() {
		t.Errorf("stored: %+v", e)
	}
	if w, err := r.put(ns, ids, 4, 0); err != nil || w.Stored != 2 {
		t.Fatalf("write: %+v, %v", w, err)
	}
	if e := next(client.BlockStored); !slices.Equal(e.IDs, ids[4:]) || e.Parent != ids[3] {
		t.Errorf("stored: %+v", e)
	}
	r.bump("m")
	if e := next(client.AllBlocksCleared); e.Kind.String() != "cleared" {
		t.Errorf("kind %v", e.Kind)
	}
	h.restart()
	eventually(t, "a write after the restart", func() bool {
		w, err := r.put(ns, chain(ns, 1, 2), 0, ns.Epoch+1)
		return err == nil && w.Blocks == 1
	})
	next(client.Gap)
	if e := next(client.BlockStored); !slices.Equal(e.IDs, chain(ns, 1, 2)) {
		t.Errorf("stored: %+v", e)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("events: %v", err)
	}
}

// TestEventsConsumerFails: the consumer's error is what Events returns.
func TestEventsConsumerFails(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	full := errors.New("full")
	err := r.store.Events(t.Context(), client.EventsRequest{After: map[string]uint64{h.control: 1 << 60}}, func(client.Event) error { return full })
	if !errors.Is(err, full) {
		t.Errorf("events: %v", err)
	}
}
