package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// TestDiscoverCommands: block put, block get and the gateway find the members of a cluster from the
// address of any one of them. Without --discover, block get finds only the blocks of its node, and
// warns.
func TestDiscoverCommands(t *testing.T) {
	testkit.VerifyNone(t)
	etcd, dir := testetcd.Start(t, 1), t.TempDir()
	a := startServed(t, dir+"/a", clusterOf(etcd, "a")...)
	c := startServed(t, dir+"/c", clusterOf(etcd, "c")...)
	awaitTrue(t, "both nodes serve", func() bool { return serving(t, a)() && serving(t, c)() })
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	const sequences = 8
	file := func(i int) string { return writeFile(t, dir, fmt.Sprint("tokens", i), tokens(1+100*i, 4)) }
	for i := range sequences {
		data := writeFile(t, dir, "data", bytesOf(byte(i), 8192))
		a.run("block", "put", "m", "--discover", "--tokens-file", file(i), "--data-file", data).must(t)
	}
	out, alone := dir+"/out", 0
	for i := range sequences {
		r := c.run("block", "get", "m", "--discover", "--tokens-file", file(i), "--out", out)
		r.must(t)
		got, err := os.ReadFile(out)
		if err != nil || !bytes.Equal(got, bytesOf(byte(i), 8192)) || strings.Contains(r.err, "warning") {
			t.Errorf("sequence %d has other bytes: %v, %s", i, err, r.err)
		}
		r = c.run("block", "get", "m", "--tokens-file", file(i), "--out", out)
		if r.code == exitOK {
			alone++
		}
		if !strings.Contains(r.err, "warning: the node has a cluster") {
			t.Errorf("no warning without --discover: %s", r.err)
		}
	}
	if alone == 0 || alone == sequences {
		t.Errorf("one node has %d of %d sequences", alone, sequences)
	}
	byVariable := []string{"PENSTOCK_SERVER=" + c.ready.Listen, "PENSTOCK_DISCOVER=true"}
	penstock(t, "", byVariable, "block", "get", "m", "--tokens-file", file(0), "--out", out).must(t)
	penstock(t, "", byVariable, "block", "get", "m", "--tokens-file", file(1), "--out", out).must(t)
	if r := penstock(t, "", []string{"PENSTOCK_DISCOVER=sometimes"}, "block", "get", "m", "--tokens-file", file(0), "--out", out); r.code != exitUsage || !strings.Contains(r.err, "PENSTOCK_DISCOVER") {
		t.Errorf("exit %d, %s", r.code, r.err)
	}

	_, args := startPrefillDecode(t, a, "m", func(string) {}) // args ends with --servers and the address of a; the prompts begin with the tokens of sequence 0
	for _, member := range []*served{a, c} {
		s := startGateway(t, append(args[:len(args)-1], member.ready.Listen, "--discover")...)
		web := gatewayClient(t, nil)
		if err := complete(t.Context(), web, s.ready.Listen, "x"); err != nil {
			t.Error(err)
		}
		if _, body := call(t, web, "GET", "http://"+s.ready.HTTP+"/metrics", ""); !strings.Contains(body, "\npenstock_gateway_hit_tokens_total 4\n") {
			t.Errorf("a gateway with the address of %s did not find the block of 4 tokens", member.ready.Listen)
		}
		s.stop()
	}
}

// replicaReader reads the sequences of TestReplicas and compares every byte.
type replicaReader struct {
	*testing.T
	store  *client.Store
	ns     kv.Namespace
	memory *client.Memory
}

// idsOf returns the ids of a sequence, a chain of two blocks, or two keys of a flat namespace.
func (r *replicaReader) idsOf(sequence int) []kv.BlockID {
	var first, second kv.BlockID
	first[0], second[0], second[1] = byte(1+sequence), byte(1+sequence), 1
	return []kv.BlockID{first, second}
}

func (r *replicaReader) write(sequence int) {
	r.Helper()
	copy(r.memory.Bytes(), bytesOf(byte(sequence), len(r.memory.Bytes())))
	w, err := r.store.Write(r.Context(), client.WriteRequest{Namespace: r.ns, IDs: r.idsOf(sequence), From: r.memory})
	if err != nil || w.Stored != 2 {
		r.Fatalf("sequence %d: %+v, %v", sequence, w, err)
	}
}

// hit reports whether both blocks of a sequence are matched and read.
func (r *replicaReader) hit(sequence int) bool {
	m, err := r.store.Match(r.Context(), client.MatchRequest{Namespace: r.ns, IDs: r.idsOf(sequence)})
	if err != nil {
		r.Error(err)
		return false
	}
	clear(r.memory.Bytes())
	res, err := r.store.Read(r.Context(), client.ReadRequest{Namespace: r.ns, IDs: r.idsOf(sequence), Into: r.memory})
	if err != nil {
		r.Error(err)
		return false
	}
	if n := int64(res.Blocks) * r.ns.Geometry.BlockBytes(); !bytes.Equal(r.memory.Bytes()[:n], bytesOf(byte(sequence), len(r.memory.Bytes()))[:n]) {
		r.Errorf("sequence %d of %s has other bytes", sequence, r.ns.Name)
	}
	return m.Blocks == 2 && res.Blocks == 2
}

// TestReplicas: with two replicas, kill -9 of a node makes no read a miss, neither of chains nor of
// single keys, and no byte is wrong. Without replicas some reads are misses.
func TestReplicas(t *testing.T) {
	testkit.VerifyNone(t)
	etcd, dir := testetcd.Start(t, 1), t.TempDir()
	a := startServed(t, dir+"/a", clusterOf(etcd, "a")...)
	b := startServed(t, dir+"/b", clusterOf(etcd, "b")...)
	c := startProcess(t, dir+"/c", clusterOf(etcd, "c")...)
	awaitTrue(t, "all nodes serve", func() bool { return serving(t, a)() && serving(t, b)() && serving(t, c.client(t))() })
	geometry := []string{"--layers", "2", "--block-tokens", "4", "--token-bytes", "64"}
	for name, more := range map[string][]string{"chains": {"--replicas", "2"}, "keys": {"--replicas", "2", "--index", "flat"}, "single": nil} {
		a.run(append(append([]string{"ns", "create", name}, geometry...), more...)...).must(t)
	}
	if out := b.run("ns", "show", "keys").must(t); !strings.Contains(out, "replicas") {
		t.Errorf("another node shows %s", out)
	}
	const sequences = 24
	reader := func(name string) *replicaReader {
		engine, err := tcp.New(t.Context(), tcp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = engine.Close() })
		store, err := client.Open(t.Context(), client.Options{Servers: []string{a.ready.Listen}, Discover: true, MembersEvery: 20 * time.Millisecond, Engine: engine})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = store.Close() })
		r := &replicaReader{T: t, store: store}
		if r.ns, err = store.Namespace(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		if r.memory, err = store.Register(make([]byte, 2*r.ns.Geometry.BlockBytes())); err != nil {
			t.Fatal(err)
		}
		for i := range sequences {
			r.write(i)
		}
		return r
	}
	single := reader("single")
	var rounds sync.WaitGroup
	killed, warm := make(chan struct{}), make(chan struct{}, 2)
	for _, name := range []string{"chains", "keys"} {
		r := reader(name)
		rounds.Go(func() {
			// At least one round before, one during and three after the end of the node.
			for round, left := 0, 3; left > 0; round++ {
				if round == 1 {
					warm <- struct{}{}
				}
				select {
				case <-killed:
					left--
				default:
				}
				for i := range sequences {
					if !r.hit(i) {
						t.Errorf("round %d: sequence %d of %s is a miss", round, i, name)
					}
				}
			}
		})
	}
	<-warm
	<-warm
	if err := c.Kill(); err != nil {
		t.Error(err)
	}
	close(killed)
	rounds.Wait()
	hits := 0
	for i := range sequences {
		if single.hit(i) {
			hits++
		}
	}
	if hits == 0 || hits == sequences {
		t.Errorf("without replicas %d of %d sequences are hits after the end of a node", hits, sequences)
	}
	if r := a.run(append([]string{"ns", "create", "single", "--replicas", "2"}, geometry...)...); r.code == exitOK || !strings.Contains(r.err, "ns replicas single 2") {
		t.Errorf("another number of replicas: exit %d, %s", r.code, r.err)
	}
	a.run("ns", "replicas", "single", "3").must(t)
	if out := b.run("ns", "show", "single").must(t); !strings.Contains(out, "replicas") {
		t.Errorf("another node shows %s", out)
	}
	if r := a.run("ns", "replicas", "single", "5"); r.code != exitUsage {
		t.Errorf("5 replicas: exit %d, %s", r.code, r.err)
	}
}
