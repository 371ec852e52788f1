package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// program is a running testdata/cluster.c.
type program struct {
	*testing.T
	in  io.Writer
	out *bufio.Scanner
}

// startProgram starts cluster.c. It ends, with the exit code 0, when the test ends.
func startProgram(t *testing.T, member string) *program {
	t.Helper()
	cmd := exec.Command(compile(t, "testdata/cluster.c"), member)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
			t.Errorf("cluster.c: %v", err)
		}
	})
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	return &program{T: t, in: in, out: lines}
}

// do sends a command and returns the answer.
func (p *program) do(format string, args ...any) string {
	p.Helper()
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		p.Fatal(err)
	}
	if !p.out.Scan() {
		p.Fatalf("cluster.c has ended: %v", p.out.Err())
	}
	return p.out.Text()
}

// get returns how many of the sequences [from, to) have hits. None may have other bytes.
func (p *program) get(from, to int) (loaded int) {
	p.Helper()
	different := -1
	if _, err := fmt.Sscanf(p.do("get %d %d", from, to), "get %d %d", &loaded, &different); err != nil || different != 0 {
		p.Errorf("%d sequences with other bytes, %v", different, err)
	}
	return loaded
}

// nodes returns the addresses of the nodes that the program is connected to.
func (p *program) nodes() (up []string) {
	p.Helper()
	var status struct {
		Nodes []struct {
			Server string
			Up     bool
		}
	}
	if err := json.Unmarshal([]byte(p.do("stats")), &status); err != nil {
		p.Fatal(err)
	}
	for _, n := range status.Nodes {
		if n.Up {
			up = append(up, n.Server)
		}
	}
	return up
}

// golang is a Go client with the sequences of cluster.c.
type golang struct {
	*testing.T
	*client.Store
	memory *client.Memory
}

func openGo(t *testing.T, o client.Options) *golang {
	t.Helper()
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = engine.Close() })
	o.Engine, o.MembersEvery = engine, 20*time.Millisecond
	store, err := client.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	memory, err := store.Register(make([]byte, 1024))
	if err != nil {
		t.Fatal(err)
	}
	return &golang{T: t, Store: store, memory: memory}
}

func (g *golang) namespace() kv.Namespace {
	g.Helper()
	ns, err := g.Namespace(g.Context(), "m")
	if err != nil {
		g.Fatal(err)
	}
	return ns
}

func tokensOf(sequence int) []kv.Token { return []kv.Token{kv.Token(sequence), 1, 2, 3, 4, 5, 6, 7} }

func bytesOf(sequence int) []byte {
	out := make([]byte, 1024)
	for i := range out {
		out[i] = byte((sequence*31 + i*7) % 251)
	}
	return out
}

// put stores the sequences [from, to).
func (g *golang) put(from, to int) {
	g.Helper()
	ns := g.namespace()
	for i := from; i < to; i++ {
		copy(g.memory.Bytes(), bytesOf(i))
		if w, err := g.Write(g.Context(), client.WriteRequest{Namespace: ns, Tokens: tokensOf(i), From: g.memory}); err != nil || w.Stored != 2 {
			g.Fatalf("sequence %d: %+v, %v", i, w, err)
		}
	}
}

// get is program.get.
func (g *golang) get(from, to int) (loaded int) {
	g.Helper()
	ns := g.namespace()
	for i := from; i < to; i++ {
		clear(g.memory.Bytes())
		r, err := g.Read(g.Context(), client.ReadRequest{Namespace: ns, Tokens: tokensOf(i), Into: g.memory})
		if err != nil {
			g.Fatal(err)
		}
		if r.Blocks == 2 {
			loaded++
			if !bytes.Equal(g.memory.Bytes(), bytesOf(i)) {
				g.Errorf("sequence %d has other bytes", i)
			}
		}
	}
	return loaded
}

// TestDiscover: a C program with discover has the address of one member, and finds what a Go client
// with Discover and the address of the other member has stored, and the reverse. It uses a node
// that joins. The sequences of a node that has left are misses, not errors. A client with a list of
// nodes warns once.
func TestDiscover(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	member := func(name string) *testnode.Node {
		return testnode.Start(t, testnode.Options{Name: name, Etcd: etcd.Endpoints})
	}
	a, b := member("a"), member("b")
	c := startProgram(t, a.Addr)
	if got := c.do("put 0 32"); got != "put 32" {
		t.Fatalf("%s of 32 sequences", got)
	}
	g := openGo(t, client.Options{Servers: []string{b.Addr}, Discover: true})
	if n := g.get(0, 32); n != 32 {
		t.Errorf("the Go client finds %d of the 32 sequences of the C program", n)
	}
	g.put(32, 64)
	if n := c.get(32, 64); n != 32 {
		t.Errorf("the C program finds %d of the 32 sequences of the Go client", n)
	}

	var log bytes.Buffer
	fixed := openGo(t, client.Options{Servers: []string{a.Addr, b.Addr}, Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	if n := strings.Count(log.String(), "set discover in all clients"); n != 1 {
		t.Errorf("a client without Discover logged %d warnings: %s", n, log.String())
	}
	if n := fixed.get(0, 64); n == 64 {
		t.Error("a client without Discover finds all sequences, so this test does not compare places")
	}

	added := member("c")
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for limit := time.After(time.Minute); len(c.nodes()) < 3; {
		select {
		case <-tick.C:
			c.get(0, 64) // connects to the new node
		case <-limit:
			t.Fatalf("the C program has the nodes %v", c.nodes())
		}
	}
	if got := c.do("put 64 96"); got != "put 32" {
		t.Errorf("%s of 32 sequences", got)
	}
	if n := openGo(t, client.Options{Servers: []string{added.Addr}}).get(64, 96); n == 0 || n == 32 {
		t.Errorf("the node that has joined has %d of 32 new sequences", n)
	}
	if n := g.get(64, 96); n != 32 {
		t.Errorf("the Go client finds %d of the 32 sequences that were stored after a node has joined", n)
	}

	if err := b.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	part := c.get(64, 96)
	if part == 0 || part == 32 {
		t.Errorf("%d of 32 sequences are hits without a node", part)
	}
	if n := g.get(64, 96); n != part {
		t.Errorf("the Go client has %d hits without a node, the C program %d", n, part)
	}
}
