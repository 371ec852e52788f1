package client_test

import (
	"errors"
	"net"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// TestAnotherVersion: Open and Namespace fail if every node is of another version, and the
// error has both versions. One node of several is a miss.
func TestAnotherVersion(t *testing.T) {
	other := testnode.Start(t, testnode.Options{OtherVersion: true}).Addr
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	noStore := grpc.NewServer()
	served := make(chan error, 1)
	go func() { served <- noStore.Serve(listener) }()
	t.Cleanup(func() {
		noStore.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	for addr, words := range map[string][]string{
		other:                    {"speaks version 4", "this side version 3", "release is v0", "run the same release"},
		listener.Addr().String(): {"does not have the call Describe", "check the address"},
	} {
		s, err := client.Open(t.Context(), client.Options{Servers: []string{addr}, Engine: engine})
		if !errors.Is(err, client.ErrVersion) {
			t.Fatalf("open: %v, %v; want ErrVersion", s, err)
		}
		for _, w := range append(words, addr) {
			if strings.Count(err.Error(), w) != 1 {
				t.Errorf("the error does not have %q once: %v", w, err)
			}
		}
	}

	good := newHost(t, nil)
	r := newRig(t, func(o *client.Options) { o.Servers = append(o.Servers, other) }, good)
	ns, err := r.store.EnsureNamespace(t.Context(), kv.Namespace{Name: "m", Geometry: geometry, Index: kv.IndexTrie})
	if err != nil {
		t.Fatal(err)
	}
	outcomes := map[client.Outcome]int{}
	// Each sequence is on one of the two nodes, depending on their addresses, which differ in each
	// run.
	for seed := uint32(0); seed < 64 && len(outcomes) < 2; seed++ {
		ids := chain(ns, 4, seed)
		w, err := r.put(ns, ids, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		outcomes[w.Outcome]++
		if m := r.match(ns, ids); m.Blocks != w.Stored || w.Stored == 0 && m.Cut != client.CutNodeDown {
			t.Errorf("stored %d blocks, matched %d, cut %v", w.Stored, m.Blocks, m.Cut)
		}
	}
	if outcomes[client.Hit] == 0 || outcomes[client.Miss] == 0 {
		t.Errorf("outcomes %v; want hits on one node and misses on the other", outcomes)
	}
	if n := r.store.Nodes(); !n[0].Up || n[1].Up || !strings.Contains(n[1].Err.Error(), "version 4") {
		t.Errorf("nodes %+v", n)
	}
	good.kill()
	if _, err := r.store.Namespace(t.Context(), "m"); !errors.Is(err, client.ErrUnavailable) || errors.Is(err, client.ErrVersion) {
		t.Errorf("namespace, while the node of this version is down: %v", err)
	}
}
