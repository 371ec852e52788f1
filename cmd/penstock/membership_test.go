package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// clusterOf returns the settings of a member of a cluster.
func clusterOf(e *testetcd.Etcd, name string) []string {
	return []string{"--node", name, "--cluster-etcd", strings.Join(e.Endpoints, ","), "--cluster-lease-ttl", "4s", "--cluster-zone", "rack-" + name}
}

// awaitTrue waits until the condition holds.
func awaitTrue(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(2 * time.Minute)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("not reached: " + what)
		}
	}
}

// readiness returns the status and the body of /readyz.
func readiness(t *testing.T, s *served) (int, string) {
	t.Helper()
	resp, err := http.Get("http://" + s.ready.HTTP + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func serving(t *testing.T, s *served) func() bool {
	return func() bool {
		code, _ := readiness(t, s)
		return code == http.StatusOK
	}
}

// states returns the members as node:state.
func states(t *testing.T, s *served) string {
	t.Helper()
	r := s.run("cluster", "members", "--format", "json")
	if r.code != 0 {
		return r.err
	}
	var all []string
	list := decode[struct {
		Members []struct{ Name, State string }
	}](t, r)
	for _, m := range list.Members {
		all = append(all, m.Name+":"+m.State)
	}
	return strings.Join(all, " ")
}

// TestMembers: commands on one node of a cluster change the namespaces of all nodes. A node that was
// killed leaves the list, and has the new weights when it is back. Without etcd the nodes serve
// nothing.
func TestMembers(t *testing.T) {
	testkit.VerifyNone(t)
	etcd, dir := testetcd.Start(t, 1), t.TempDir()
	a := startServed(t, dir+"/a", clusterOf(etcd, "a")...)
	c := startProcess(t, dir+"/c", clusterOf(etcd, "c")...)
	awaitTrue(t, "both nodes serve", func() bool { return serving(t, a)() && serving(t, c.client(t))() })
	if got := states(t, a); got != "a:serving c:serving" {
		t.Errorf("members %q", got)
	}
	table := c.client(t).run("cluster", "members").must(t)
	for _, want := range []string{"NAME", "rack-a", "rack-c", a.ready.Listen} {
		if !strings.Contains(table, want) {
			t.Errorf("no %q in\n%s", want, table)
		}
	}
	tokensFile, dataFile := prompt(t, a, dir, 3)
	for _, s := range []*served{a, c.client(t)} {
		s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
		fetchSame(t, s, dir, tokensFile, dataFile)
	}
	if out := c.client(t).run("ns", "bump-epoch", "m").must(t); !strings.Contains(out, "2") {
		t.Errorf("bump: %s", out)
	}
	missed := func(s *served) {
		t.Helper()
		if r := s.run("block", "get", "m", "--tokens-file", tokensFile, "--out", dir+"/old"); r.code == 0 {
			t.Errorf("blocks of old weights were returned: %s", r.out)
		}
	}
	missed(a)
	missed(c.client(t))
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	awaitTrue(t, "the killed node leaves the list", func() bool { return states(t, a) == "a:serving" })
	a.run("ns", "bump-epoch", "m", "--to", "7").must(t)
	again := alone(t, dir+"/c", clusterOf(etcd, "c")...)
	awaitTrue(t, "the node is back", serving(t, again))
	list := decode[struct {
		Namespaces []struct{ Epoch int }
	}](t, again.run("ns", "list", "--format", "json"))
	if len(list.Namespaces) != 1 || list.Namespaces[0].Epoch != 7 {
		t.Errorf("the node that is back has the namespaces %+v", list)
	}
	etcd.Pause(0)
	awaitTrue(t, "a node without etcd is not ready", func() bool {
		code, body := readiness(t, a)
		return code == http.StatusServiceUnavailable && strings.Contains(body, "no_lease")
	})
	if r := a.run("block", "get", "m", "--tokens-file", tokensFile, "--out", dir+"/without"); r.code == 0 {
		t.Error("a node without etcd returned blocks")
	}
	etcd.Resume(0)
	awaitTrue(t, "the nodes serve again", func() bool { return serving(t, a)() && serving(t, again)() })
}

// TestDiscover: a client that has the address of one node stores on all nodes of the cluster, and
// follows the list of members. The sequences of a node that is down are misses until the node is
// back.
func TestDiscover(t *testing.T) {
	testkit.VerifyNone(t)
	etcd, dir := testetcd.Start(t, 1), t.TempDir()
	durable := func(name string) []string { return append(clusterOf(etcd, name), "--durability", "sync") }
	a := startServed(t, dir+"/a", durable("a")...)
	c := startProcess(t, dir+"/c", durable("c")...)
	awaitTrue(t, "both nodes serve", func() bool { return serving(t, a)() && serving(t, c.client(t))() })
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "64").must(t)
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = engine.Close() })
	open := func(server string) (*client.Store, error) {
		return client.Open(t.Context(), client.Options{Servers: []string{server}, Discover: true, MembersEvery: 20 * time.Millisecond, DeadFor: 50 * time.Millisecond, Engine: engine})
	}
	store, err := open(a.ready.Listen)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	names := func() string {
		var all []string
		for _, n := range store.Nodes() {
			all = append(all, n.Node)
		}
		return strings.Join(all, " ")
	}
	if got := names(); got != "a c" {
		t.Errorf("the client has the nodes %q", got)
	}
	ns, err := store.Namespace(t.Context(), "m")
	if err != nil {
		t.Fatal(err)
	}
	events := make(chan client.Event, 1024)
	following, stop := context.WithCancel(t.Context())
	var followed sync.WaitGroup
	followed.Go(func() {
		err := store.Events(following, client.EventsRequest{}, func(e client.Event) error {
			events <- e
			return nil
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("events: %v", err)
		}
	})
	t.Cleanup(func() {
		stop()
		followed.Wait()
	})
	const sequences = 32
	memory, err := store.Register(make([]byte, ns.Geometry.BlockBytes()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = memory.Close(context.Background()) })
	tokens := func(i int) []uint32 { return []uint32{uint32(i), 1, 2, 3} }
	for i := range sequences {
		copy(memory.Bytes(), bytesOf(byte(i), len(memory.Bytes())))
		w, err := store.Write(t.Context(), client.WriteRequest{Namespace: ns, Tokens: tokens(i), From: memory})
		if err != nil || w.Stored != 1 {
			t.Fatalf("sequence %d: %+v, %v", i, w, err)
		}
	}
	hits := func() (n int) {
		for i := range sequences {
			m, err := store.Match(t.Context(), client.MatchRequest{Namespace: ns, Tokens: tokens(i)})
			if err != nil {
				t.Fatal(err)
			}
			clear(memory.Bytes())
			r, err := store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: m.IDs, Into: memory})
			if err != nil {
				t.Fatal(err)
			}
			if r.Blocks == 1 && !bytes.Equal(memory.Bytes(), bytesOf(byte(i), len(memory.Bytes()))) {
				t.Errorf("sequence %d has other bytes", i)
			}
			n += r.Blocks
		}
		return n
	}
	if n := hits(); n != sequences {
		t.Fatalf("%d of %d sequences are found", n, sequences)
	}
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	part := hits()
	if part == 0 || part == sequences {
		t.Errorf("%d of %d sequences are found without a node", part, sequences)
	}
	awaitTrue(t, "the killed node has left the list", func() bool { return states(t, a) == "a:serving" })
	if n := hits(); n != part {
		t.Errorf("%d sequences are found after the node has left the list; %d before", n, part)
	}
	alone(t, dir+"/c", durable("c")...)
	awaitTrue(t, "all sequences are found again", func() bool { return hits() == sequences })
	d := startServed(t, dir+"/d", durable("d")...)
	awaitTrue(t, "the client has the new node", func() bool { return names() == "a c d" })
	if n := hits(); n > sequences || n < sequences/3 {
		t.Errorf("%d of %d sequences are found after a node has joined", n, sequences)
	}
	for e := range events {
		if e.Server == d.ready.Listen {
			if e.Kind != client.Gap {
				t.Errorf("the first event of a node that has joined is %+v; want a gap", e)
			}
			break
		}
	}
	d.stop()
	if _, err := open(startServed(t, dir+"/alone").ready.Listen); !errors.Is(err, client.ErrRequest) {
		t.Errorf("a node without etcd: %v", err)
	}
	down := testkit.Port(t)
	if s, err := open(down); err != nil {
		t.Errorf("a node that is down: %v", err)
	} else if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestAloneIsNoCluster: a node without etcd refuses the list of members, with the setting to set.
func TestAloneIsNoCluster(t *testing.T) {
	testkit.VerifyNone(t)
	s := startServed(t, t.TempDir()+"/volume")
	if r := s.run("cluster", "members"); r.code == 0 || !strings.Contains(r.err, "cluster.etcd is empty") {
		t.Errorf("exit %d: %s", r.code, r.err)
	}
}
