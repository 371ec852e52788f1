package client_test

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"testing"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/storage"
)

// calls returns how many calls for writes f makes over a unix socket and as messages.
func (r *rig) calls(f func()) (local, messages uint64) {
	before := r.store.Stats()
	f()
	after := r.store.Stats()
	return after.LocalWrites - before.LocalWrites, after.Messages - before.Messages
}

// newWriter starts a node with a unix socket and an engine whose writes go over the socket.
func newWriter(t *testing.T, edit func(*storage.Options, *server.Options)) (*rig, *host, kv.Namespace) {
	h, _ := newLocalHost(t, 1<<20, edit)
	r := newRig(t, nil, h)
	if err := r.store.ConnectLocal(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	return r, h, r.namespace("m", geometry, kv.IndexTrie)
}

// TestWriteOverUnixSocket: a Write is one call over the socket, and so is one of blocks that the
// node has. Larger Writes are several calls.
func TestWriteOverUnixSocket(t *testing.T) {
	r, h, ns := newWriter(t, func(so *storage.Options, o *server.Options) { so.WriteBytesMax, o.Limits.WriteBytes = 4<<20, 4<<20 })
	ids := chain(ns, 8, 1)
	for _, stored := range []int{8, 0} {
		local, messages := r.calls(func() {
			w, err := r.put(ns, ids, 0, 0)
			if err != nil || w.Stored != stored || w.Existed != 8-stored || w.Blocks != 8 || w.Bytes != int64(stored)*8192 {
				t.Fatalf("write: %+v, %v", w, err)
			}
		})
		if local != 1 || messages != 0 {
			t.Errorf("%d blocks to store: %d calls over the socket and %d messages; want 1 and 0", stored, local, messages)
		}
	}
	if got := r.get(ns, ids); got.Blocks != 8 {
		t.Errorf("read: %+v", got)
	}
	// A session has 2 MiB of staging memory.
	large := chain(ns, 640, 2)
	local, messages := r.calls(func() { r.mustPut(ns, large) })
	if local != 3 || messages != 0 {
		t.Errorf("5 MiB: %d calls over the socket and %d messages; want 3 and 0", local, messages)
	}
	if got := r.get(ns, large); got.Blocks != 640 {
		t.Errorf("read: %+v", got)
	}
	if s := h.node.Stats(); s.Reservations != 0 {
		t.Errorf("%d reservations are left", s.Reservations)
	}
}

// TestPartStoredOverUnixSocket: the bytes of stored keys lie in the staging memory between those of
// the other keys. Each key gets its own bytes, in calls of few and of many bytes.
func TestPartStoredOverUnixSocket(t *testing.T) {
	r, _, _ := newWriter(t, func(so *storage.Options, o *server.Options) { so.WriteBytesMax, o.Limits.WriteBytes = 4<<20, 4<<20 })
	ns := r.namespace("f", geometry, kv.IndexFlat)
	for seed, keys := range map[uint32]int{5: 3, 6: 256} {
		ids := chain(ns, keys, seed)
		r.mustPut(ns, ids[1:2])
		r.mustPut(ns, ids[keys-1:])
		local, messages := r.calls(func() {
			w, err := r.put(ns, ids, 0, 0)
			if err != nil || w.Stored != keys-2 || w.Existed != 2 || w.Bytes != int64(keys-2)*8192 {
				t.Errorf("%d keys: %+v, %v", keys, w, err)
			}
		})
		if local != 1 || messages != 0 {
			t.Errorf("%d keys: %d calls over the socket and %d messages; want 1 and 0", keys, local, messages)
		}
		if got := r.get(ns, ids); got.Blocks != keys {
			t.Errorf("read: %+v", got)
		}
	}
}

// TestWriteNotOverUnixSocket: pieces larger than the staging memory, clients with NoLocal, and
// nodes that accept no writes on the socket.
func TestWriteNotOverUnixSocket(t *testing.T) {
	h, path := newLocalHost(t, 4<<20, func(so *storage.Options, o *server.Options) {
		so.LoadBytesMax, so.WriteBytesMax, o.Limits.WriteBytes, o.Limits.ReadBytes = 16<<20, 16<<20, 16<<20, 16<<20
	})
	h.stagingBytes = 2 << 20
	h.restart()
	r := newRig(t, nil, h)
	if err := r.store.ConnectLocal(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	large := r.namespace("large", kv.SingleGroup(3, 16, 64<<10), kv.IndexTrie)
	small := r.namespace("small", geometry, kv.IndexTrie)
	tcpOnly := newRig(t, func(o *client.Options) { o.NoLocal = true }, h)
	l, old, stop := newProxy(t, h, path, true)
	defer stop()
	l.setChange(func(*pb.ReadResponse) {})
	if err := old.ConnectLocal(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for i, c := range []struct {
		name string
		on   *rig
		ns   kv.Namespace
	}{
		{"a piece of 3 MiB", r, large},
		{"NoLocal", tcpOnly, small},
		{"an older node", &rig{t: t, store: old}, small},
	} {
		ids := chain(c.ns, 2, uint32(i))
		local, messages := c.on.calls(func() { c.on.mustPut(c.ns, ids) })
		if local != 0 || messages == 0 {
			t.Errorf("%s: %d calls over the socket and %d messages", c.name, local, messages)
		}
		if got := r.get(c.ns, ids); got.Blocks != 2 {
			t.Errorf("%s: read: %+v", c.name, got)
		}
	}
}

// TestStagingIsBounded: a client for which the node has no staging memory writes over the data
// plane, and over the socket when another client has closed.
func TestStagingIsBounded(t *testing.T) {
	h, _ := newLocalHost(t, 1<<20, nil)
	h.stagingBytes = 2 << 20
	h.restart()
	first, second := newRig(t, nil, h), newRig(t, nil, h)
	ns := first.namespace("m", geometry, kv.IndexTrie)
	put := func(r *rig, seed uint32, want uint64) {
		t.Helper()
		if local, _ := r.calls(func() { r.mustPut(ns, chain(ns, 4, seed)) }); local != want {
			t.Errorf("%d calls over the socket; want %d", local, want)
		}
	}
	for _, r := range []*rig{first, second} {
		if err := r.store.ConnectLocal(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
	}
	put(first, 1, 1)
	put(second, 2, 0)
	put(first, 3, 1)
	put(second, 4, 0)
	if s := h.local.Stats(); s.StagingBytes != 2<<20 {
		t.Errorf("%+v", s)
	}
	if err := first.store.Close(); err != nil {
		t.Error(err)
	}
	eventually(t, "the memory is free", func() bool { return h.local.Stats().StagingBytes == 0 })
	put(second, 5, 1)
	for seed := range uint32(5) {
		if got := second.get(ns, chain(ns, 4, seed+1)); got.Blocks != 4 {
			t.Errorf("read: %+v", got)
		}
	}
}

// TestWriteCancelled: ctx ends while the device is slow. The Write returns at once and its memory
// is no longer used. The node frees its memory when the device continues, and the next Write goes
// over the socket.
func TestWriteCancelled(t *testing.T) {
	r, h, ns := newWriter(t, nil)
	r.mustPut(ns, chain(ns, 4, 1))
	idle := h.node.Stats().Arena.UsedBytes
	for i := range uint32(10) {
		mem := r.memory(4 * 8192)
		ctx, cancel := context.WithCancel(t.Context())
		h.gate.hold(blockio.Write)
		var wg sync.WaitGroup
		wg.Go(func() {
			<-h.gate.arrived
			cancel()
		})
		w, err := r.store.Write(ctx, client.WriteRequest{Namespace: ns, IDs: chain(ns, 4, 10+i), From: mem})
		wg.Wait()
		if !errors.Is(err, context.Canceled) || w.Stored != 0 {
			t.Fatalf("write: %+v, %v", w, err)
		}
		if err := mem.Close(t.Context()); err != nil {
			t.Errorf("the memory is still in use: %v", err)
		}
		h.gate.lift()
		eventually(t, "the node has its memory back", func() bool {
			s := h.node.Stats()
			return s.Arena.UsedBytes == idle && s.Reservations == 0 && h.local.Stats().StagingBytes == 0
		})
		if err := r.store.ConnectLocal(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		if local, _ := r.calls(func() { r.mustPut(ns, chain(ns, 4, 100+i)) }); local != 1 {
			t.Errorf("%d calls over the socket after a cancelled one", local)
		}
	}
}

// TestCloseEndsWrites: Close ends a Write that waits for a slow device. As over the data plane, its
// blocks are refused.
func TestCloseEndsWrites(t *testing.T) {
	r, h, ns := newWriter(t, nil)
	r.mustPut(ns, chain(ns, 4, 1))
	mem := r.memory(4 * 8192)
	h.gate.hold(blockio.Write)
	results := make(chan client.WriteResult, 1)
	go func() {
		w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: chain(ns, 4, 2), From: mem})
		if err != nil && !errors.Is(err, client.ErrClosed) {
			t.Errorf("write: %v", err)
		}
		results <- w
	}()
	<-h.gate.arrived
	if err := r.store.Close(); err != nil {
		t.Error(err)
	}
	if w := <-results; w.Stored != 0 || len(w.Refused) != 4 {
		t.Errorf("write: %+v", w)
	}
	h.gate.lift()
	eventually(t, "the node has its memory back", func() bool {
		return h.node.Stats().Reservations == 0 && h.local.Stats().StagingBytes == 0
	})
}

// TestManyWritesAtOnce: with more Writes than connections and staging memory, the other Writes go
// over the data plane.
func TestManyWritesAtOnce(t *testing.T) {
	r, h, ns := newWriter(t, nil)
	var wg sync.WaitGroup
	for k := range uint32(24) {
		wg.Go(func() {
			for i := range uint32(6) {
				ids := chain(ns, 4, 1000+10*k+i)
				w, err := r.put(ns, ids, 0, 0)
				if err != nil || w.Stored != 4 && w.Outcome != client.Busy {
					t.Errorf("write: %+v, %v", w, err)
					return
				}
				if got := r.get(ns, ids[:w.Blocks]); got.Blocks != w.Blocks {
					t.Errorf("read: %+v", got)
				}
			}
		})
	}
	wg.Wait()
	if r.store.Stats().LocalWrites == 0 {
		t.Error("no write went over the socket")
	}
	if s := h.local.Stats(); s.StagingBytes > 4<<20 {
		t.Errorf("%+v; at most 4 MiB are lent", s)
	}
	if s := h.node.Stats(); s.Reservations != 0 {
		t.Errorf("%d reservations are left", s.Reservations)
	}
}

// writeUntilKilled writes blocks while the node delays the write.
func writeUntilKilled(t *testing.T, store *client.Store, ns kv.Namespace) {
	if err := store.ConnectLocal(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, store: store}
	w, err := r.put(ns, chain(ns, 8, 9), 0, 0)
	t.Fatalf("the write was not held up: %+v, %v", w, err)
}

// TestKilledWriterIsFreed: when a client is killed during a Write over the socket, the node frees
// its memory, and the blocks are exact or absent.
func TestKilledWriterIsFreed(t *testing.T) {
	if store, ns := openVictim(t); store != nil {
		writeUntilKilled(t, store, ns)
	}
	r, h, ns := newWriter(t, nil)
	r.mustPut(ns, chain(ns, 8, 1))
	idle, staged := h.node.Stats().Arena.UsedBytes, h.local.Stats()
	h.gate.hold(blockio.Write)
	cmd, _ := startVictim(t, "TestKilledWriterIsFreed", h, ns, "")
	<-h.gate.arrived
	if s := h.local.Stats(); s.StagingBytes <= staged.StagingBytes || s.Sessions <= staged.Sessions {
		t.Errorf("%+v while the write is under way; %+v before: it does not go over the socket", s, staged)
	}
	h.must(cmd.Process.Signal(syscall.SIGKILL))
	_ = cmd.Wait() // killed
	h.gate.lift()
	eventually(t, "the node has its memory back", func() bool {
		s, l := h.node.Stats(), h.local.Stats()
		return s.Arena.UsedBytes == idle && s.Reservations == 0 && l.StagingBytes == staged.StagingBytes && l.Sessions == staged.Sessions
	})
	r.get(ns, chain(ns, 8, 9)) // get compares the bytes of the blocks that it finds
	if got := r.get(ns, chain(ns, 8, 1)); got.Blocks != 8 {
		t.Errorf("the blocks of another client: %+v", got)
	}
}

// TestKilledNodeEndsWrites: a node is killed during a Write over the socket. The Write is a miss,
// as over the data plane.
func TestKilledNodeEndsWrites(t *testing.T) {
	cmd, h := startNode(t, "local")
	r := newRig(t, nil, h)
	if err := r.store.ConnectLocal(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	ns := r.namespace("m", geometry, kv.IndexTrie)
	if local, _ := r.calls(func() { r.mustPut(ns, chain(ns, 8, 1)) }); local != 1 {
		t.Fatalf("%d calls over the socket", local)
	}
	stop(t, cmd)
	type outcome struct {
		w   client.WriteResult
		err error
	}
	results := make(chan outcome, 1)
	go func() {
		w, err := r.put(ns, chain(ns, 8, 2), 0, 0)
		results <- outcome{w, err}
	}()
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if got := <-results; got.err != nil || got.w.Outcome != client.Miss || len(got.w.Refused) != 8 || got.w.Refused[0].Reason != "node_down" {
		t.Errorf("write: %+v, %v", got.w, got.err)
	}
}
