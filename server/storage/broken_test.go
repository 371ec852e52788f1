package storage_test

import (
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// logSyncs wraps the file of the index's log. The first sync after arm waits for release. With
// fails, the third sync and all later syncs fail.
type logSyncs struct {
	armed            atomic.Bool
	fails            bool
	syncs            atomic.Int64
	waiting, release chan struct{}
}

func (l *logSyncs) fail(op errorfs.Op) error {
	sync := op.Kind == errorfs.OpFileSync || op.Kind == errorfs.OpFileSyncData || op.Kind == errorfs.OpFileSyncTo
	if !sync || !l.armed.Load() || !strings.HasSuffix(op.Path, ".log") {
		return nil
	}
	n := l.syncs.Add(1)
	if n == 1 {
		close(l.waiting)
		<-l.release
	}
	if n > 2 && l.fails {
		return errorfs.ErrInjected
	}
	return nil
}

// TestIndexBreaksAfterAdding: two writers store the same prompt. The longer writer's own block is
// durable in the index when the sync of the pieces from the shorter writer fails. Commit returns an
// error, and the block keeps its slot, because the index refers to it.
func TestIndexBreaksAfterAdding(t *testing.T) {
	syncs := &logSyncs{fails: true, waiting: make(chan struct{}), release: make(chan struct{})}
	r := newRig(t, rigOptions{durability: blockstore.DurabilitySync, index: errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(syncs.fail))})
	ns := r.namespace("m", kv.SingleGroup(2, 4, 512))
	ids := chain(ns, 1, 1, 2)
	begin := func(ids []kv.BlockID) func() <-chan error {
		commit, err := r.reserve(ns, ids, 0)
		if err != nil || commit == nil {
			t.Fatalf("reserve %d blocks: %v", len(ids), err)
		}
		return func() <-chan error {
			done := make(chan error, 1)
			go func() { _, err := commit(); done <- err }()
			return done
		}
	}
	commitShort, commitLong := begin(ids[:1]), begin(ids)
	syncs.armed.Store(true)
	short := commitShort()
	<-syncs.waiting
	long := commitLong()
	staged := func() bool {
		known, err := r.trie.Known(nil, ns.ID, ns.Epoch, []trie.Entry{{ID: ids[1], Parent: ids[0]}})
		return err == nil && known[0] == trie.Exists
	}
	for deadline := time.Now().Add(time.Minute); !staged(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatal("the longer prompt never reached the index")
		}
	}
	close(syncs.release)
	if err := <-short; err != nil {
		t.Errorf("the shorter prompt: %v", err)
	}
	if err := <-long; !errors.Is(err, trie.ErrBroken) {
		t.Errorf("the longer prompt: %v, want ErrBroken", err)
	}
	if n := syncs.syncs.Load(); n < 3 {
		t.Errorf("%d syncs of the log, so none failed", n)
	}
	if result, delivered := r.load(ns, ids); delivered != 2 {
		t.Errorf("%d of 2 blocks delivered: %+v", delivered, result)
	}
	if _, err := r.node.SetQuota(t.Context(), "m", 1<<30); !errors.Is(err, trie.ErrBroken) {
		t.Errorf("quota while the index is broken: %v, want ErrBroken", err)
	}
	syncs.armed.Store(false)
	for deadline := time.Now().Add(time.Minute); r.node.Ready() != nil; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatal("the index has not recovered")
		}
	}
	if _, err := r.node.SetQuota(t.Context(), "m", 1<<30); err != nil {
		t.Errorf("quota after the fault: %v", err)
	}
}
