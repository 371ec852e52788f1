package client_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/lab/testnode"
)

// silentAfter is a small part of longRead, so that a read with this deadline waits for the node long
// enough on a busy machine too.
const (
	silentAfter = 200 * time.Millisecond
	longRead    = 10 * silentAfter
)

// heldDevice does not complete batches while hold is locked.
type heldDevice struct {
	blockio.Device
	hold sync.RWMutex
}

func (d *heldDevice) Do(ctx context.Context, batch []blockio.Request) error {
	d.hold.RLock()
	defer d.hold.RUnlock()
	return d.Device.Do(ctx, batch)
}

// TestSilentReplica: a read with a deadline shorter than SilentAfter that a node has not answered changes
// nothing. After a longer one the other replica is asked first, until the node has answered again.
func TestSilentReplica(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	device := &heldDevice{Device: memio.New(memio.Options{})}
	a := testnode.Start(t, testnode.Options{Name: "a", Etcd: etcd.Endpoints, Device: device})
	b := testnode.Start(t, testnode.Options{Name: "b", Etcd: etcd.Endpoints})
	c := openMember(t, client.Options{Servers: []string{b.Addr}, Discover: true, DeadFor: time.Hour, SilentAfter: silentAfter})
	var err error
	if c.ns, err = c.EnsureNamespace(t.Context(), kv.Namespace{Name: "r", Index: kv.IndexTrie, Replicas: 2, Geometry: c.ns.Geometry}); err != nil {
		t.Fatal(err)
	}
	const sequences = 16
	// first returns a sequence that is read from a before b, and the number of such sequences.
	first := func() (sequence, count int) {
		for i := range sequences {
			if c.Asked(t.Context(), c.ns, sequenceIDs(i))[0] == a.Addr {
				sequence = i
				count++
			}
		}
		return sequence, count
	}
	for i := range sequences {
		c.write(i, 0, 2)
	}
	sequence, before := first()
	if before == 0 {
		t.Fatal("no sequence is read from node a first")
	}
	device.hold.Lock()
	release := sync.OnceFunc(device.hold.Unlock)
	t.Cleanup(release)
	read := func(limit time.Duration) {
		t.Helper()
		within, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		if _, err := c.Read(within, client.ReadRequest{Namespace: c.ns, IDs: sequenceIDs(sequence), Into: c.memory}); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("a read from the node that does not answer: %v", err)
		}
	}
	read(time.Millisecond)
	if _, n := first(); n != before {
		t.Errorf("after a read with a deadline of 1 ms, %d sequences are read from node a first; %d before", n, before)
	}
	read(longRead)
	if _, n := first(); n > 0 {
		t.Errorf("%d sequences are read from the node that does not answer", n)
	}
	for i := range sequences {
		if n := c.blocks(i); n != 2 {
			t.Errorf("sequence %d: %d blocks", i, n)
		}
	}
	release()
	only := openMember(t, client.Options{Servers: []string{a.Addr}})
	only.ns = c.ns
	only.write(sequences, 0, 2)
	if n := c.blocks(sequences); n != 2 {
		t.Errorf("%d blocks of the sequence that only node a has", n)
	}
	if _, n := first(); n != before {
		t.Errorf("%d sequences are read from node a first after it has answered; %d before", n, before)
	}
}

// TestSilentWhileDraining: while a third node drains, a node that has let a read wait until its deadline is asked
// last too. It has sequences that the other home lacks and the draining node has.
func TestSilentWhileDraining(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	device := &heldDevice{Device: memio.New(memio.Options{})}
	a := testnode.Start(t, testnode.Options{Name: "a", Etcd: etcd.Endpoints, Device: device})
	b := testnode.Start(t, testnode.Options{Name: "b", Etcd: etcd.Endpoints})
	testnode.Start(t, testnode.Options{Name: "c", Etcd: etcd.Endpoints})
	c := openMember(t, client.Options{Servers: []string{b.Addr}, Discover: true, DeadFor: time.Hour, SilentAfter: silentAfter})
	var err error
	if c.ns, err = c.EnsureNamespace(t.Context(), kv.Namespace{Name: "r", Index: kv.IndexTrie, Replicas: 2, Geometry: c.ns.Geometry}); err != nil {
		t.Fatal(err)
	}
	flat, err := c.EnsureNamespace(t.Context(), kv.Namespace{Name: "f", Index: kv.IndexFlat, Replicas: 2, Geometry: c.ns.Geometry})
	if err != nil {
		t.Fatal(err)
	}
	const sequences = 24
	for i := range sequences {
		c.write(i, 0, 2)
		if w, err := c.Write(t.Context(), client.WriteRequest{Namespace: flat, IDs: sequenceIDs(i)[:1], From: c.memory}); err != nil || w.Stored != 1 {
			t.Fatalf("key %d: %+v, %v", i, w, err)
		}
	}
	drainMember(t, b, "c", c)
	var before []int // sequences that are at a and c, and are read from a first
	for i := range sequences {
		if asked := c.Asked(t.Context(), c.ns, sequenceIDs(i)); len(asked) == 2 && asked[0] == a.Addr && !slices.Contains(asked, b.Addr) {
			before = append(before, i)
		}
	}
	if len(before) == 0 {
		t.Fatal("no sequence is at a and c alone, and read from a first")
	}
	device.hold.Lock()
	release := sync.OnceFunc(device.hold.Unlock)
	t.Cleanup(release)
	within, cancel := context.WithTimeout(t.Context(), longRead)
	defer cancel()
	if _, err := c.Read(within, client.ReadRequest{Namespace: c.ns, IDs: sequenceIDs(before[0]), Into: c.memory}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a read from the node that does not answer: %v", err)
	}
	for _, i := range before {
		if asked := c.Asked(t.Context(), c.ns, sequenceIDs(i)); len(asked) != 2 || asked[1] != a.Addr {
			t.Fatalf("a read of sequence %d asks %v; node a at %s does not answer", i, asked, a.Addr)
		}
		if n := c.blocks(i); n != 2 {
			t.Errorf("sequence %d: %d blocks", i, n)
		}
	}
	for i := range sequences { // each key is at two of the nodes
		if asked := c.Asked(t.Context(), flat, sequenceIDs(i)[:1]); asked[0] == a.Addr {
			t.Errorf("a read of key %d asks %v; node a at %s does not answer", i, asked, a.Addr)
		}
	}
}
