package client_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/kv"
)

// TestEvents: stored and removed blocks are reported in order. A restart of the node, which resets
// its numbers, is a gap.
func TestEvents(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	events := make(chan client.Event, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		// The node never assigned this number, so its stream begins with a gap, which
		// shows that the stream is open.
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

// TestEventsConsumerFails: Events returns the consumer's error.
func TestEventsConsumerFails(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	full := errors.New("full")
	err := r.store.Events(t.Context(), client.EventsRequest{After: map[string]uint64{h.control: 1 << 60}}, func(client.Event) error { return full })
	if !errors.Is(err, full) {
		t.Errorf("events: %v", err)
	}
}

// TestVolumeEvents: a failed volume is reported to subscribers of all namespaces, and not
// to a subscriber of one namespace.
func TestVolumeEvents(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ctx, cancel := context.WithCancel(t.Context())
	events := map[string]chan client.Event{"": make(chan client.Event, 100), "m": make(chan client.Event, 100)}
	ended := make(chan error)
	for namespace, seen := range events {
		go func() {
			ended <- r.store.Events(ctx, client.EventsRequest{Namespace: namespace, After: map[string]uint64{h.control: 1 << 60}}, func(e client.Event) error {
				seen <- e
				return nil
			})
		}()
		if e := <-seen; e.Kind != client.Gap {
			t.Fatalf("the first event is %+v", e)
		}
	}
	r.mustPut(ns, chain(ns, 1, 1))
	h.faults.SetRules(faultio.MustParse(`(Err EIO Syncs)`))
	if err := h.node.Sync(t.Context()); err == nil {
		t.Error("no error of the sync that fails")
	}
	h.faults.SetRules(nil)
	for namespace, seen := range events {
		e := <-seen
		if e.Kind != client.BlockStored {
			t.Errorf("followers of %q got %+v; want the stored blocks", namespace, e)
		}
	}
	e := <-events[""]
	want := client.VolumeState{Volume: 0, Path: h.medium.Info().Path, Was: "ok", Is: "failed"}
	if e.Kind != client.VolumeChanged || e.Kind.String() != "volume" || e.Volume != want || !strings.Contains(e.Reason, "sync") || e.Time.IsZero() || e.Namespace != "" {
		t.Errorf("event %+v; want the change %+v, and why", e, want)
	}
	for _, want := range []client.VolumeState{{Path: want.Path, Was: "failed", Is: "suspect"}, {Path: want.Path, Was: "suspect", Is: "ok"}} {
		if e := <-events[""]; e.Kind != client.VolumeChanged || e.Volume != want || (e.Reason == "") != (want.Is == "ok") {
			t.Errorf("event %+v; want the change %+v", e, want)
		}
	}
	r.bump("m")
	if e := <-events["m"]; e.Kind != client.AllBlocksCleared {
		t.Errorf("a follower of one namespace got %+v", e)
	}
	cancel()
	for range events {
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("events: %v", err)
		}
	}
}
