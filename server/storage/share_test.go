package storage_test

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// TestReadersPassAWaitingWriter: a writer that waits for memory does not delay readers that fit. It
// drops only hot pieces in the writers' share. It gets its memory when the other users of the share
// release theirs.
func TestReadersPassAWaitingWriter(t *testing.T) {
	const blocks, bytes = 64, 64 * 12 << 10 // of one prompt, in slots
	r := newRig(t, rigOptions{capacityBytes: 64 << 20, edit: func(o *storage.Options) { o.QueueWait = time.Hour }})
	ns := r.namespace("m", small)
	var prompts [][]kv.BlockID
	for seed := range 12 {
		prompts = append(prompts, chain(ns, blocks, 1+seed))
		r.mustPut(ns, prompts[seed])
	}
	// Ten Loads with slow readers fill the arena of 8 MiB.
	var slow [10][]storage.Part
	for i := range slow {
		_, err := r.node.Load(t.Context(), storage.LoadRequest{Namespace: "m", IDs: prompts[i], Early: true}, func(_ context.Context, parts []storage.Part) {
			slow[i] = append(slow[i], parts...)
		})
		if err != nil || len(slow[i]) != blocks {
			t.Fatalf("%d parts: %v", len(slow[i]), err)
		}
	}
	done := func(loads [][]storage.Part) {
		for _, parts := range loads {
			for i := range parts {
				parts[i].Done(nil)
			}
		}
	}
	// The hot set is three quarters of the arena, so the first two are not in it. Of the others,
	// the next three are entirely outside the writers' half.
	done(slow[:4])

	written := make(chan error, 1)
	go func() {
		stored, err := r.put(ns, chain(ns, blocks, 100), 0)
		if err == nil && (len(stored) != blocks || !stored[blocks-1].Stored) {
			t.Errorf("%d blocks stored: %+v", len(stored), stored)
		}
		written <- err
	}()
	for r.arena.Stats().Waiting == 0 {
		runtime.Gosched()
	}
	if got := r.node.Stats().HotBytes; got != 3*bytes {
		t.Errorf("the waiting writer left %d bytes of the hot set; %d lie outside of its share", got, 3*bytes)
	}
	for _, ids := range prompts[10:] {
		if _, n := r.load(ns, ids); n != blocks {
			t.Errorf("%d of %d blocks while a writer waits", n, blocks)
		}
	}
	select {
	case err := <-written:
		t.Fatalf("the writer did not wait: %v", err)
	default:
	}
	done(slow[4:])
	if err := <-written; err != nil {
		t.Error(err)
	}
}
