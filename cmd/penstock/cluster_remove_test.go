package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/client"
)

// clusterRemove runs cluster remove and decodes its output.
func clusterRemove(t *testing.T, on *served, more ...string) (out nodeRemoved) {
	t.Helper()
	return decode[nodeRemoved](t, on.run(append([]string{"cluster", "remove", "--format", "json"}, more...)...))
}

// TestRemoveMember: a drained node is removed after its end. Clients forget it at once, place new sequences
// on the other nodes, and find all blocks there. A process with its volumes serves nothing until the node is
// readmitted.
func TestRemoveMember(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a")
	b := r.process("b")
	r.here("c")
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256").must(t)
	s := r.open(a, "m", false)
	s.writeAll()
	all := sequenceCount * sequenceBlocks
	refused := func(want string, args ...string) {
		t.Helper()
		if r := a.run(append([]string{"cluster", "remove", "b"}, args...)...); r.code == 0 || !strings.Contains(r.err, want) {
			t.Errorf("%v: exit %d: %s", args, r.code, r.err)
		}
	}
	refused("penstock cluster drain b --wait")
	awaitTrue(t, "the record of the node has its blocks", func() bool {
		dry := clusterRemove(t, a, "b", "--force", "--dry-run")
		return dry.Up && dry.DryRun && dry.LostBlocks > 0 && dry.LostBytes > 0
	})
	a.run("cluster", "drain", "b", "--wait").must(t)
	refused("stop its process first")
	if err := b.Stop(); err != nil {
		t.Fatal(err)
	}
	if got := clusterRemove(t, a, "b", "--dry-run"); got != (nodeRemoved{Node: "b", DryRun: true}) {
		t.Errorf("the removal would lose %+v", got)
	}
	awaitTrue(t, "the client has seen the end of the node", func() bool { return nodesUp(s) == "2 of 3" })
	if got := clusterRemove(t, a, "b"); got != (nodeRemoved{Node: "b"}) {
		t.Errorf("removed: %+v", got)
	}
	awaitTrue(t, "the client has forgotten the node", func() bool { return nodesUp(s) == "2 of 2" })
	if n := s.found(); n != all {
		t.Errorf("%d of %d blocks are found", n, all)
	}

	dir, settings := r.node("b")
	again := startProcess(t, dir, settings...)
	t.Cleanup(func() { _ = again.Kill() })
	awaitTrue(t, "the volumes are refused", func() bool { return strings.Contains(again.Log(), "penstock cluster readmit b") })
	if code, _ := readiness(t, again.client(t)); code == 200 {
		t.Error("a removed node is ready")
	}
	if got := states(t, a); got != "a:serving c:serving" {
		t.Errorf("members %q", got)
	}
	a.run("cluster", "readmit", "b").must(t)
	awaitTrue(t, "the node serves again", serving(t, again.client(t)))
	awaitTrue(t, "the client has the node", func() bool { return nodesUp(s) == "3 of 3" })
	if n := s.found(); n != all {
		t.Errorf("after the readmission %d of %d blocks are found", n, all)
	}
	if err := again.Stop(); err != nil {
		t.Fatal(err)
	}
}

// nodesUp returns how many of the nodes of a client are up.
func nodesUp(s *sequences) string {
	up, nodes := 0, s.Nodes()
	for _, n := range nodes {
		if n.Up {
			up++
		}
	}
	return fmt.Sprintf("%d of %d", up, len(nodes))
}

// TestRemoveForced: a node that serves and is removed by force serves nothing when the command has returned.
// Its sequences are misses, and are stored on the other node again.
func TestRemoveForced(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a")
	b := r.process("b")
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256").must(t)
	s, only := r.open(a, "m", false), r.only(b.client(t), "m")
	s.writeAll()
	text := a.run("cluster", "remove", "b", "--force").must(t)
	if !strings.Contains(text, "lost: ") || !strings.Contains(text, "removed: node b") {
		t.Errorf("the output is %q", text)
	}
	if res, err := only.Read(t.Context(), client.ReadRequest{Namespace: s.ns, Tokens: s.tokens(0, 1), Into: only.memory}); err == nil && res.Blocks > 0 {
		t.Errorf("the removed node served %+v", res)
	}
	awaitTrue(t, "the client has forgotten the node", func() bool { return nodesUp(s) == "1 of 1" })
	if n := s.found(); n == sequenceCount*sequenceBlocks || n == 0 {
		t.Errorf("%d blocks are found on the other node", n)
	}
	for i := range sequenceCount {
		if w := s.write(i, 0, sequenceBlocks); w.Stored+w.Existed != sequenceBlocks {
			t.Errorf("sequence %d: %+v", i, w)
		}
	}
	if n := s.found(); n != sequenceCount*sequenceBlocks {
		t.Errorf("%d blocks are found", n)
	}
	a.run("ns", "bump-epoch", "m").must(t)
}
