package client_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/storage"
)

// TestOverUnixSocket repeats tests of Read, Match, Exists and Write with nodes that have a unix
// socket, because the results do not depend on the transport.
func TestOverUnixSocket(t *testing.T) {
	for name, test := range map[string]func(*testing.T){
		"WriteMatchRead": TestWriteMatchRead, "Layers": TestLayers, "ManyTasks": TestManyTasks, "BigChain": TestBigChain,
		"Hybrid": TestHybrid, "Flat": TestFlat, "SameIDTwice": TestSameIDTwice, "TwoNodes": TestTwoNodes,
		"KilledMidRead": TestKilledMidRead, "CorruptDevice": TestCorruptDevice, "DeviceErrors": TestDeviceErrors,
		"Epochs": TestEpochs, "Batches": TestBatches, "ManyAtOnce": TestManyAtOnce, "HeldUpDevice": TestHeldUpDevice,
		"Lease": TestLease, "Fragments": TestFragments, "ReadProgress": TestReadProgress, "Stories": TestStories,
		"WriteSums": TestWriteSums, "ParentAbsent": TestParentAbsent, "Transfer": TestTransfer, "Busy": TestBusy,
		"Refusals": TestRefusals, "VolumeErrors": TestVolumeErrors, "Tokens": TestTokens, "Mixed": TestMixed,
		"TwoBlocksOfOnePlace": TestTwoBlocksOfOnePlace, "EpochOfTheCaller": TestEpochOfTheCaller, "ExistsAndDelete": TestExistsAndDelete,
	} {
		t.Run(name, func(t *testing.T) {
			localHosts, localCalls = true, 0
			// This runs after the clean-ups of the test's rigs.
			t.Run("test", test)
			localHosts = false
			if localCalls == 0 && name != "KilledMidRead" { // whose only such call is cut off
				t.Error("no call went over a unix socket")
			}
		})
	}
}

// copies reads ids into m and returns the number of parts that were copied from the arena.
func (r *rig) copies(ns kv.Namespace, ids []kv.BlockID) uint64 {
	r.t.Helper()
	before := r.store.Stats().LocalReads
	if got := r.get(ns, ids); got.Blocks != len(ids) {
		r.t.Fatalf("read: %+v", got)
	}
	return r.store.Stats().LocalReads - before
}

// untilCopied waits until reads of ids are copied from the arena.
func (r *rig) untilCopied(ns kv.Namespace, ids []kv.BlockID) {
	r.t.Helper()
	eventually(r.t, "a copied read", func() bool { return r.copies(ns, ids) > 0 })
}

// newCopies starts a node with a unix socket and an engine, and stores blocks there, which reads
// copy from the node's arena.
func newCopies(t *testing.T, blocks int) (*rig, *host, kv.Namespace, []kv.BlockID) {
	h, _ := newLocalHost(t, 1<<20, nil)
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, blocks, 1)
	r.mustPut(ns, ids)
	r.untilCopied(ns, ids)
	return r, h, ns, ids
}

// TestCopyIsFound: a Store finds the socket, returns each loan, and continues after a restart of
// the node.
func TestCopyIsFound(t *testing.T) {
	r, h, ns, ids := newCopies(t, 200)
	h.noLoans()
	h.restart()
	eventually(t, "a hit after the restart", func() bool { return r.get(ns, ids).Outcome == client.Hit })
	r.untilCopied(ns, ids)
	h.noLoans()
}

// TestMatchOverUnixSocket: a match goes over the unix socket and a pin as a message. When the node
// is down, a match is a miss with the cut node_down.
func TestMatchOverUnixSocket(t *testing.T) {
	r, h, ns, ids := newCopies(t, 8)
	for pin, want := range map[bool]client.Stats{false: {LocalMatches: 1}, true: {Messages: 1}} {
		before := r.store.Stats()
		m, err := r.store.Match(t.Context(), client.MatchRequest{Namespace: ns, IDs: ids, Lease: time.Minute, Pin: pin})
		if err != nil || m.Blocks != 8 || m.Lease == nil {
			t.Fatalf("pin %t: %+v, %v", pin, m, err)
		}
		if err := m.Lease.Release(t.Context()); err != nil {
			t.Error(err)
		}
		after := r.store.Stats()
		if got := (client.Stats{LocalMatches: after.LocalMatches - before.LocalMatches, Messages: after.Messages - before.Messages}); got != want {
			t.Errorf("pin %t: %v; want %v", pin, got, want)
		}
	}
	h.kill()
	if m := r.match(ns, ids); m.Outcome != client.Miss || m.Cut != client.CutNodeDown {
		t.Errorf("the node is down: %+v", m)
	}
}

// TestExistsOverUnixSocket: Exists goes over the unix socket, and without one as a message. The
// result is the same.
func TestExistsOverUnixSocket(t *testing.T) {
	r, h, ns, ids := newCopies(t, 8)
	far := newRig(t, func(o *client.Options) { o.NoLocal = true }, h)
	asked := chain(ns, 10, 1) // of which 8 are stored
	for name, c := range map[string]struct {
		store *client.Store
		want  client.Stats
	}{
		"socket":  {r.store, client.Stats{LocalExists: 1}},
		"message": {far.store, client.Stats{Messages: 1}},
	} {
		before := c.store.Stats()
		got, err := c.store.Exists(t.Context(), client.KeysRequest{Namespace: ns, IDs: asked}, true)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for i, p := range got {
			if want := map[bool]client.Presence{true: client.Present, false: client.Absent}[i < len(ids)]; p != want {
				t.Errorf("%s: block %d: %v; want %v", name, i, p, want)
			}
		}
		after := c.store.Stats()
		if got := (client.Stats{LocalExists: after.LocalExists - before.LocalExists, Messages: after.Messages - before.Messages}); got != c.want {
			t.Errorf("%s: %v; want %v", name, got, c.want)
		}
	}
	if _, err := r.store.Exists(t.Context(), client.KeysRequest{Namespace: kv.Namespace{Name: "absent", ID: ns.ID + 9, Geometry: ns.Geometry, Index: ns.Index, Epoch: 1}, IDs: asked}, false); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("an unknown namespace: %v; want ErrNotFound", err)
	}
	h.kill()
	got, err := r.store.Exists(t.Context(), client.KeysRequest{Namespace: ns, IDs: ids}, false)
	for i, p := range got {
		if err != nil || p != client.Unknown {
			t.Errorf("the node is down: block %d: %v, %v; want Unknown", i, p, err)
		}
	}
}

// TestCopyIsAvoided: the transfer engine moves blocks that cannot be copied, and the Read's
// result is the same.
func TestCopyIsAvoided(t *testing.T) {
	h, path := newLocalHost(t, 1<<20, func(so *storage.Options, _ *server.Options) { so.LoanBytesMax = 64 << 10 })
	_, otherPath := newLocalHost(t, 1<<20, nil)
	for name, edit := range map[string]func(*client.Options){
		"NoLocal":      func(o *client.Options) { o.NoLocal = true },
		"absent":       func(o *client.Options) { o.LocalSocket = path + ".none" },
		"another node": func(o *client.Options) { o.LocalSocket = otherPath },
	} {
		r := newRig(t, edit, h)
		ns := r.namespace("m", geometry, kv.IndexTrie)
		ids := chain(ns, 4, 1)
		if _, err := r.put(ns, ids, 0, 0); err != nil {
			t.Fatal(err)
		}
		for range 50 {
			if n := r.copies(ns, ids); n != 0 {
				t.Fatalf("%s: %d parts of a read were copied", name, n)
			}
		}
	}
	// The node lends 64 KiB, less than is read.
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 32, 1)
	r.mustPut(ns, ids)
	r.untilCopied(ns, ids[:4])
	for range 20 {
		if n := r.copies(ns, ids); n != 0 {
			t.Fatalf("%d parts were copied of a read of more than the node lends", n)
		}
	}
	h.noLoans()
}

// TestCopyOfALyingNode: places outside the arena are not read. A piece at the place of another
// piece is lost.
func TestCopyOfALyingNode(t *testing.T) {
	r, h := newLocalRig(t, nil)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	l, store, stop := newProxy(t, h, r.socket, false)
	defer stop()
	if err := store.ConnectLocal(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	mem, err := store.Register(make([]byte, 8*8192))
	h.must(err)
	size := uint64(len(h.arena.Bytes()))
	for name, offset := range map[string]uint64{"at the end": size, "over the end": size - 8191, "far away": 1<<64 - 1, "wraps around": 1<<64 - 4096} {
		l.setChange(func(resp *pb.ReadResponse) { resp.GetPieces()[3].ArenaOffset = offset })
		before := store.Stats()
		got, err := store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: mem})
		// The data plane is the node's own.
		if err != nil || got.Blocks != 8 || store.Stats().LocalReads != before.LocalReads {
			t.Errorf("%s: %+v, %v, %d parts copied", name, got, err, store.Stats().LocalReads-before.LocalReads)
		}
	}
	l.setChange(func(resp *pb.ReadResponse) { resp.GetPieces()[3].ArenaOffset += 4096 })
	got, err := store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: mem})
	if err != nil || got.Blocks != 3 || len(got.Lost) != 1 || got.Lost[0].Reason != client.LostChecksum {
		t.Errorf("another piece's bytes: %+v, %v", got, err)
	}
}

// TestSuffixes: a node that does not support suffixes gets whole chains.
func TestSuffixes(t *testing.T) {
	r, h := newLocalRig(t, nil)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 200, 1) // two tasks
	r.mustPut(ns, ids)
	for old, want := range map[bool]int64{false: 1, true: 0} {
		l, store, stop := newProxy(t, h, r.socket, old)
		l.setChange(func(*pb.ReadResponse) {})
		got, err := store.ReadLocal(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids})
		if err != nil || got.Blocks != 200 || l.suffixes.Load() != want {
			t.Errorf("old %t: %+v, %v; %d reads of suffixes; want %d", old, got.ReadResult, err, l.suffixes.Load(), want)
		}
		r.checkBorrowed(got, ids)
		r.giveBack(got)
		stop()
	}
}

// TestCopyCancelled: ctx ends while the device is slow. The Read returns at once, nothing
// stays lent, and later reads are copied again.
func TestCopyCancelled(t *testing.T) {
	r, h, ns, ids := newCopies(t, 8)
	mem := r.memory(8 * 8192)
	for range 20 {
		r.untilCopied(ns, ids)
		h.gate.shut()
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			<-h.gate.arrived
			wg.Go(h.gate.lift) // the reply and the cancellation race
			cancel()
		})
		if _, err := r.store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: ids, Into: mem}); err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		wg.Wait()
		cancel()
	}
	h.gate.lift()
	h.noLoans()
}

// TestCloseEndsCopies: Close ends a Read that waits for a slow device, and the node gets its loan
// back.
func TestCloseEndsCopies(t *testing.T) {
	r, h, ns, ids := newCopies(t, 8)
	mem := r.memory(8 * 8192)
	h.gate.shut()
	ended := make(chan error, 1)
	go func() {
		_, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: mem})
		ended <- err
	}()
	<-h.gate.arrived
	if err := r.store.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, client.ErrClosed) {
		t.Errorf("read: %v; want ErrClosed", err)
	}
	h.gate.lift()
	h.noLoans()
}

// TestManyCopiesAtOnce: with more Reads than connections, the other Reads use the transfer engine.
func TestManyCopiesAtOnce(t *testing.T) {
	r, h, ns, ids := newCopies(t, 16)
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			for range 10 {
				if got := r.get(ns, ids); got.Blocks != len(ids) {
					t.Errorf("read: %+v", got)
				}
			}
		})
	}
	wg.Wait()
	h.noLoans()
}
