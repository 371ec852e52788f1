package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/placement"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// movesRig is a cluster, and clients that place sequences on its members.
type movesRig struct {
	*testing.T
	etcd *testetcd.Etcd
	dir  string
}

func newMovesRig(t *testing.T) *movesRig {
	testkit.VerifyNone(t)
	return &movesRig{t, testetcd.Start(t, 1), t.TempDir()}
}

// node returns the directory and the settings of a member. A busy machine renews its lease in time: a node without a
// lease refuses calls, and reads find fewer blocks then.
func (r *movesRig) node(name string, more ...string) (string, []string) {
	return r.dir + "/" + name, append(append(clusterOf(r.etcd, name), "--durability", "sync", "--cluster-lease-ttl", "10s"), more...)
}

// here starts a member in this process, and process one that can be killed.
func (r *movesRig) here(name string, more ...string) *served {
	r.Helper()
	dir, settings := r.node(name, more...)
	s := startServed(r.T, dir, settings...)
	awaitTrue(r.T, "node "+name+" serves", serving(r.T, s))
	return s
}

func (r *movesRig) process(name string, more ...string) *process {
	r.Helper()
	dir, settings := r.node(name, more...)
	p := startProcess(r.T, dir, settings...)
	r.Cleanup(func() { _ = p.Kill() }) // it may have ended
	awaitTrue(r.T, "node "+name+" serves", serving(r.T, p.client(r.T)))
	return p
}

// sequences are sequences of one namespace. The bytes of a block depend on the sequence, the block, and
// the epoch.
type sequences struct {
	*testing.T
	*client.Store
	ns     kv.Namespace
	memory *client.Memory
}

const (
	sequenceCount  = 48
	sequenceBlocks = 4
)

// open opens a client of the cluster for a namespace, and only one of a single node.
func (r *movesRig) open(seed *served, namespace string, skipDraining bool) *sequences {
	r.Helper()
	return r.client(namespace, client.Options{Servers: []string{seed.ready.Listen}, Discover: true, SkipDraining: skipDraining})
}

func (r *movesRig) only(node *served, namespace string) *sequences {
	r.Helper()
	return r.client(namespace, client.Options{Servers: []string{node.ready.Listen}})
}

func (r *movesRig) client(namespace string, o client.Options) *sequences {
	r.Helper()
	engine, err := tcp.New(r.Context(), tcp.Options{})
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { _ = engine.Close() })
	o.MembersEvery, o.DeadFor, o.Engine = 20*time.Millisecond, 50*time.Millisecond, engine
	store, err := client.Open(r.Context(), o)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { _ = store.Close() })
	ns, err := store.Namespace(r.Context(), namespace)
	if err != nil {
		r.Fatal(err)
	}
	memory, err := store.Register(make([]byte, sequenceBlocks*ns.Geometry.BlockBytes()))
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { _ = memory.Close(context.Background()) })
	return &sequences{r.T, store, ns, memory}
}

// tokens returns the tokens of a sequence. All sequences of a namespace begin with different blocks.
func (s *sequences) tokens(i, blocks int) []uint32 {
	out := make([]uint32, blocks*s.ns.Geometry.BlockTokens)
	for k := range out {
		out[k] = uint32(i*1000 + k)
	}
	return out
}

func (s *sequences) bytes(i, block int, epoch kv.Epoch) []byte {
	return bytesOf(byte(i*31+block*7+int(epoch)*101), int(s.ns.Geometry.BlockBytes()))
}

// write stores the blocks [first, first+n) of a sequence.
func (s *sequences) write(i, first, n int) client.WriteResult {
	s.Helper()
	size := int(s.ns.Geometry.BlockBytes())
	for b := first; b < first+n; b++ {
		copy(s.memory.Bytes()[b*size:], s.bytes(i, b, s.ns.Epoch))
	}
	w, err := s.Write(s.Context(), client.WriteRequest{Namespace: s.ns, Tokens: s.tokens(i, first+n), First: first, From: s.memory})
	if err != nil {
		s.Fatal(err)
	}
	return w
}

func (s *sequences) writeAll() {
	s.Helper()
	for i := range sequenceCount {
		if w := s.write(i, 0, sequenceBlocks); w.Stored != sequenceBlocks {
			s.Fatalf("sequence %d: %+v", i, w)
		}
	}
}

// read returns the number of blocks of a sequence that are found. It fails if their bytes are not those
// of the epoch of s.ns.
func (s *sequences) read(i int) int {
	s.Helper()
	return s.result(i).Blocks
}

// result is read with the whole result.
func (s *sequences) result(i int) client.ReadResult {
	s.Helper()
	clear(s.memory.Bytes())
	r, err := s.Read(s.Context(), client.ReadRequest{Namespace: s.ns, Tokens: s.tokens(i, sequenceBlocks), Into: s.memory})
	if err != nil {
		s.Error(err)
		return client.ReadResult{}
	}
	size := int(s.ns.Geometry.BlockBytes())
	for b := range r.Blocks {
		if !bytes.Equal(s.memory.Bytes()[b*size:][:size], s.bytes(i, b, s.ns.Epoch)) {
			s.Errorf("sequence %d: block %d has other bytes", i, b)
		}
	}
	return r
}

// found returns the number of blocks of all sequences that are found.
func (s *sequences) found() (n int) {
	s.Helper()
	for i := range sequenceCount {
		n += s.read(i)
	}
	return n
}

// moved is the progress of a member in the list.
type moved struct {
	Phase, Reason string
	CopiedBytes   int64 `json:"copied_bytes"`
	LeftBlocks    int64 `json:"left_blocks"`
}

// moveOf returns the state and the progress of a member in the list.
func moveOf(t *testing.T, s *served, name string) (state string, m moved) {
	t.Helper()
	list := decode[struct {
		Members []struct {
			Name, State string
			Move        moved
		}
	}](t, s.run("cluster", "members", "--format", "json"))
	for _, x := range list.Members {
		if x.Name == name {
			return x.State, x.Move
		}
	}
	return "", moved{}
}

// TestDrainMember: while a node drains, every block is found, with its bytes, by a client that follows
// the members, new sequences go elsewhere, and a sequence of the draining node can be continued. Then the
// other nodes have all blocks. The order to drain holds after a restart, until it is taken back.
func TestDrainMember(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a")
	b := r.process("b")
	r.here("c")
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256").must(t)
	s, elsewhere := r.open(a, "m", false), r.open(a, "m", true)
	s.writeAll()
	if n := s.found(); n != sequenceCount*sequenceBlocks {
		t.Fatalf("%d blocks are found", n)
	}

	reader := r.open(a, "m", false)
	reading, stop := context.WithCancel(t.Context())
	var reads atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; reading.Err() == nil; i = (i + 1) % sequenceCount {
			if n := reader.read(i); n != sequenceBlocks {
				t.Errorf("during the drain %d blocks of sequence %d are found", n, i)
			}
			reads.Add(1)
		}
	})
	t.Cleanup(func() {
		stop()
		wg.Wait()
	})
	out := decode[struct {
		Node    string
		Drained bool
		Move    struct {
			Phase  string
			Blocks int64
		}
	}](t, a.run("cluster", "drain", "b", "--rate", "1MiB", "--wait", "--format", "json"))
	if out.Node != "b" || !out.Drained || out.Move.Phase != "done" || out.Move.Blocks == 0 {
		t.Errorf("the drain returned %+v", out)
	}
	before := reads.Load()
	awaitTrue(t, "all sequences are read once more", func() bool { return reads.Load() > before+sequenceCount })
	stop()
	wg.Wait()
	if got := states(t, a); got != "a:serving b:draining c:serving" {
		t.Errorf("members %q", got)
	}
	if n := elsewhere.found(); n != sequenceCount*sequenceBlocks {
		t.Errorf("the other nodes have %d of %d blocks", n, sequenceCount*sequenceBlocks)
	}
	if text := a.run("cluster", "members").must(t); !strings.Contains(text, "b: other nodes have") || !strings.Contains(text, "; drained") {
		t.Errorf("no progress in\n%s", text)
	}

	if err := b.Stop(); err != nil {
		t.Fatal(err)
	}
	if n := s.found(); n != sequenceCount*sequenceBlocks {
		t.Errorf("without the drained node %d of %d blocks are found", n, sequenceCount*sequenceBlocks)
	}
	again := r.process("b")
	awaitTrue(t, "the restarted node is draining", func() bool {
		state, m := moveOf(t, a, "b")
		return state == "draining" && m.Phase == "done"
	})
	a.run("cluster", "undrain", "b").must(t)
	awaitTrue(t, "the node does not drain", func() bool { return states(t, a) == "a:serving b:serving c:serving" })
	if n := s.found(); n != sequenceCount*sequenceBlocks {
		t.Errorf("after the end of the draining %d of %d blocks are found", n, sequenceCount*sequenceBlocks)
	}
	if err := again.Stop(); err != nil {
		t.Fatal(err)
	}
}

// moveMetrics returns the values of the metrics of a node's copies.
func moveMetrics(t *testing.T, s *served) map[string]float64 {
	t.Helper()
	_, text := call(t, gatewayClient(t, nil), "GET", "http://"+s.ready.HTTP+"/metrics", "")
	out := make(map[string]float64)
	for _, m := range regexp.MustCompile(`(?m)^penstock_cluster_(move\S*) (\S+)$`).FindAllStringSubmatch(text, -1) {
		value, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			t.Fatal(err)
		}
		out[m[1]] = value
	}
	return out
}

// TestDrainMetrics: the metrics of a draining node have the blocks that could not be copied, then the copied
// ones, and after the draining no state.
func TestDrainMetrics(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a")
	b := r.process("b", "--free-floor", "1PiB")
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256").must(t)
	s := r.only(a, "m")
	for i := range 3 {
		s.write(i, 0, sequenceBlocks)
	}
	blocks, payload := float64(3*sequenceBlocks), float64(3*sequenceBlocks*s.ns.Geometry.BlockBytes())
	a.run("cluster", "drain", "a").must(t)
	awaitTrue(t, "blocks could not be copied", func() bool {
		m := moveMetrics(t, a)
		return m[`move_state{state="waiting"}`] == 1 && m["move_failed_blocks_total"] >= blocks && m["move_left_blocks"] == blocks &&
			m["move_left_bytes"] == payload && m["moved_blocks_total"] == 0
	})
	if err := b.Kill(); err != nil {
		t.Fatal(err)
	}
	r.process("b")
	a.run("cluster", "drain", "a", "--wait").must(t)
	m := moveMetrics(t, a)
	if m[`move_state{state="done"}`] != 1 || m[`move_state{state="waiting"}`] != 0 || m["move_left_blocks"] != 0 || m["move_left_bytes"] != 0 || m["moved_blocks_total"] != blocks || m["moved_bytes_total"] != payload {
		t.Errorf("after the copies: %v", m)
	}
	a.run("cluster", "undrain", "a").must(t)
	awaitTrue(t, "the state is gone", func() bool {
		m := moveMetrics(t, a)
		return m[`move_state{state="done"}`] == 0 && m["moved_blocks_total"] == blocks
	})
}

// TestDrainReplicas: with two replicas the blocks of a draining node are copied until two other nodes have
// them, chains and keys alike. A block that one of them has already is copied to the other.
func TestDrainReplicas(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a")
	r.here("b")
	c := r.here("c")
	geometry := []string{"--layers", "2", "--block-tokens", "4", "--token-bytes", "64", "--replicas", "2"}
	a.run(append([]string{"ns", "create", "chains"}, geometry...)...).must(t)
	a.run(append([]string{"ns", "create", "keys", "--index", "flat"}, geometry...)...).must(t)
	request := func(s *sequences, i int) client.ReadRequest {
		ids := make([]kv.BlockID, sequenceBlocks)
		for k := range ids {
			ids[k][0], ids[k][1] = byte(i+1), byte(k+1)
		}
		return client.ReadRequest{Namespace: s.ns, IDs: ids, Into: s.memory}
	}
	for _, name := range []string{"chains", "keys"} {
		s := r.open(a, name, false)
		for i := range sequenceCount {
			copy(s.memory.Bytes(), bytesOf(byte(i), len(s.memory.Bytes())))
			if w, err := s.Write(t.Context(), client.WriteRequest{Namespace: s.ns, IDs: request(s, i).IDs, From: s.memory}); err != nil || w.Stored != sequenceBlocks {
				t.Fatalf("%s %d: %+v, %v", name, i, w, err)
			}
		}
	}
	a.run("cluster", "drain", "b", "--wait").must(t)
	for _, node := range []*served{a, c} {
		for _, name := range []string{"chains", "keys"} {
			s := r.only(node, name)
			found := 0
			for i := range sequenceCount {
				clear(s.memory.Bytes())
				res, err := s.Read(t.Context(), request(s, i))
				if err != nil {
					t.Fatal(err)
				}
				if n := res.Blocks * int(s.ns.Geometry.BlockBytes()); !bytes.Equal(s.memory.Bytes()[:n], bytesOf(byte(i), len(s.memory.Bytes()))[:n]) {
					t.Errorf("%s %d has other bytes", name, i)
				}
				found += res.Blocks
			}
			if found != sequenceCount*sequenceBlocks {
				t.Errorf("node %s has %d of %d blocks of %s", node.ready.Listen, found, sequenceCount*sequenceBlocks, name)
			}
		}
	}
}

// TestDrainGroups: the pieces of all layer groups of a hybrid model are copied, with their bytes. Without the
// drained node each sequence is found at each length at which it had a state.
func TestDrainGroups(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a")
	b := r.process("b")
	r.here("c")
	a.run("ns", "create", "h", "--block-tokens", "4", "--group", "full:2:256", "--group", "window:1:128:6", "--group", "state:2:300").must(t)
	s := r.open(a, "h", false)
	g := s.ns.Geometry
	lengths := []int{2, sequenceBlocks} // with a state at the end
	needed := func(n int) (pieces []client.Piece) {
		for group := range g.Groups {
			for block := g.FirstNeeded(group, n); block < n; block++ {
				pieces = append(pieces, client.Piece{Block: block, Group: group, Offset: g.PieceOffset(block, group)})
			}
		}
		return pieces
	}
	for i := range sequenceCount {
		var pieces []client.Piece
		for _, n := range lengths {
			for _, p := range needed(n) {
				if slices.Contains(pieces, p) {
					continue
				}
				pieces = append(pieces, p)
			}
		}
		for block := range sequenceBlocks {
			copy(s.memory.Bytes()[g.PieceOffset(block, 0):], s.bytes(i, block, s.ns.Epoch))
		}
		w, err := s.Write(t.Context(), client.WriteRequest{Namespace: s.ns, Tokens: s.tokens(i, sequenceBlocks), From: s.memory, Pieces: pieces})
		if err != nil || w.Stored != len(pieces) {
			t.Fatalf("sequence %d: %+v, %v", i, w, err)
		}
	}
	check := func(s *sequences) {
		t.Helper()
		for i := range sequenceCount {
			for _, n := range lengths {
				clear(s.memory.Bytes())
				tokens := s.tokens(i, n)
				if m, err := s.Match(t.Context(), client.MatchRequest{Namespace: s.ns, Tokens: tokens}); err != nil || m.Blocks != n {
					t.Errorf("sequence %d of %d blocks: %+v, %v", i, n, m, err)
					continue
				}
				res, err := s.Read(t.Context(), client.ReadRequest{Namespace: s.ns, Tokens: tokens, Into: s.memory})
				if err != nil || res.Blocks != n {
					t.Errorf("sequence %d of %d blocks: %+v, %v", i, n, res, err)
					continue
				}
				for _, p := range needed(n) {
					at := p.Offset - g.PieceOffset(p.Block, 0)
					if want := s.bytes(i, p.Block, s.ns.Epoch)[at:][:g.PieceBytes(p.Group)]; !bytes.Equal(s.memory.Bytes()[p.Offset:][:len(want)], want) {
						t.Errorf("sequence %d of %d blocks: block %d, group %d has other bytes", i, n, p.Block, p.Group)
					}
				}
			}
		}
	}
	check(s)
	a.run("cluster", "drain", "b", "--wait").must(t)
	check(s)
	check(r.open(a, "h", true))
	if err := b.Kill(); err != nil {
		t.Fatal(err)
	}
	check(s)
}

// TestDrainContinues: a sequence of a draining node is continued there while its new node lacks its
// beginning, and the new blocks are copied too.
func TestDrainContinues(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a", "--cluster-move-rate", "1KiB")
	r.here("b")
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256").must(t)
	s := r.open(a, "m", false)
	for i := range sequenceCount {
		s.write(i, 0, sequenceBlocks-1)
	}
	a.run("cluster", "drain", "a").must(t)
	awaitTrue(t, "the client has the draining node", func() bool { return states(t, a) == "a:draining b:serving" })
	elsewhere := r.open(a, "m", true)
	if n := elsewhere.found(); n == sequenceCount*(sequenceBlocks-1) {
		t.Fatal("all blocks were copied at once; the rate has no effect")
	}
	for i := range sequenceCount {
		if w := s.write(i, sequenceBlocks-1, 1); w.Stored+w.Existed != 1 {
			t.Errorf("sequence %d is not continued: %+v", i, w)
		}
	}
	a.run("cluster", "drain", "a", "--rate", "64MiB", "--wait").must(t)
	awaitTrue(t, "the other node has all blocks", func() bool { return elsewhere.found() == sequenceCount*sequenceBlocks })
}

// TestDrainKilled: a node that is killed while it drains continues after its restart. A bump of the
// epoch meanwhile makes its old blocks misses everywhere: they are not copied as blocks of the new
// weights.
func TestDrainKilled(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a")
	b := r.process("b")
	for _, name := range []string{"m", "w"} {
		a.run("ns", "create", name, "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	}
	s, w := r.open(a, "m", false), r.open(a, "w", false)
	s.writeAll()
	w.writeAll()
	// About half of 2 x 48 x 4 blocks of 8 KiB are on b: 1.5 MiB.
	a.run("cluster", "drain", "b", "--rate", "200KiB").must(t)
	awaitTrue(t, "some blocks are copied", func() bool {
		_, m := moveOf(t, a, "b")
		return m.Phase == "copying" && m.CopiedBytes > 0
	})
	a.run("ns", "bump-epoch", "w").must(t)
	old := *w
	fresh := r.open(a, "w", false)
	if fresh.ns.Epoch != old.ns.Epoch+1 {
		t.Fatalf("epoch %d after %d", fresh.ns.Epoch, old.ns.Epoch)
	}
	for i := range sequenceCount / 2 {
		fresh.write(i, 0, sequenceBlocks)
	}
	if n := s.found(); n != sequenceCount*sequenceBlocks {
		t.Errorf("%d of %d blocks are found", n, sequenceCount*sequenceBlocks)
	}
	if err := b.Kill(); err != nil {
		t.Fatal(err)
	}
	again := r.process("b")
	awaitTrue(t, "the restarted node copies", func() bool {
		state, m := moveOf(t, a, "b")
		return state == "draining" && m.Phase != ""
	})
	a.run("cluster", "drain", "b", "--rate", "64MiB", "--wait").must(t)
	if err := again.Kill(); err != nil {
		t.Fatal(err)
	}
	if n := s.found(); n != sequenceCount*sequenceBlocks {
		t.Errorf("the other node has %d of %d blocks", n, sequenceCount*sequenceBlocks)
	}
	if n := fresh.found(); n != sequenceCount/2*sequenceBlocks {
		t.Errorf("%d blocks of the new weights are found; want %d", n, sequenceCount/2*sequenceBlocks)
	}
	if n := old.found(); n != 0 {
		t.Errorf("%d blocks of old weights are found", n)
	}
}

// TestDrainRefused: a node that takes no blocks, and then is down, does not stop the copies to others.
// The list of members has the reason. When the node takes blocks, the drain ends.
func TestDrainRefused(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a")
	r.here("b")
	c := r.process("c", "--free-floor", "1PiB")
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256").must(t)
	s := r.open(a, "m", false)
	for i := range sequenceCount {
		s.write(i, 0, sequenceBlocks) // those of c are refused
	}
	stored := s.found()
	a.run("cluster", "drain", "b").must(t)
	// A busy node may not answer the first call within the timeout.
	awaitTrue(t, "the command stops to wait", func() bool {
		r := a.run("cluster", "drain", "b", "--wait", "--timeout", "3s")
		if r.code == 0 {
			t.Fatalf("the drain ended: %s", r.out)
		}
		return strings.Contains(r.err, "the draining continues")
	})
	awaitTrue(t, "the reason is in the list", func() bool {
		_, m := moveOf(t, a, "b")
		return m.Phase == "waiting" && m.LeftBlocks > 0 && m.CopiedBytes > 0 && strings.Contains(m.Reason, "free_floor")
	})
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	awaitTrue(t, "the node that is down is in the list", func() bool {
		_, m := moveOf(t, a, "b")
		return strings.Contains(m.Reason, "node_down")
	})
	if n := s.found(); n != stored {
		t.Errorf("%d of %d blocks are found", n, stored)
	}
	dir, settings := r.node("c")
	awaitTrue(t, "node c serves", serving(t, alone(t, dir, settings...)))
	a.run("cluster", "drain", "b", "--wait").must(t)
	elsewhere := r.open(a, "m", true)
	if n := elsewhere.found(); n != stored {
		t.Errorf("the other nodes have %d of %d blocks", n, stored)
	}
}

// TestDrainJoin: if a node joins while another drains, the sequences whose node is the new one are copied
// there too.
func TestDrainJoin(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a")
	r.here("b")
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256").must(t)
	r.open(a, "m", false).writeAll()
	a.run("cluster", "drain", "b", "--wait").must(t)
	elsewhere := r.open(a, "m", true)
	if n := elsewhere.found(); n != sequenceCount*sequenceBlocks {
		t.Fatalf("the other node has %d of %d blocks", n, sequenceCount*sequenceBlocks)
	}
	chain, err := elsewhere.ns.Chain()
	if err != nil {
		t.Fatal(err)
	}
	before := []placement.Place{{Seed: placement.PlaceSeed("a"), Capacity: 1}, {Seed: placement.PlaceSeed("b"), Capacity: 1}}
	after := []placement.Place{before[0], {Seed: placement.PlaceSeed("c"), Capacity: 1}}
	var moved []int // the sequences of b whose node is c
	for i := range sequenceCount {
		copied := chain
		ids, _ := copied.Append(nil, elsewhere.tokens(i, 1))
		if placement.Home(before, ids[0]) == 1 && placement.Home(after, ids[0]) == 1 {
			moved = append(moved, i)
		}
	}
	if len(moved) == 0 {
		t.Fatal("no sequence has the new node")
	}
	r.here("c")
	awaitTrue(t, "the new node has its sequences", func() bool {
		for _, i := range moved {
			if elsewhere.read(i) != sequenceBlocks {
				return false
			}
		}
		return len(elsewhere.Nodes()) == 2
	})
}

// TestDrainSecured: nodes that require a token and TLS copy blocks to each other. With a token that the
// others refuse, the list of members has the reason.
func TestDrainSecured(t *testing.T) {
	r := newMovesRig(t)
	ca, cert, key := certificates(t, t.TempDir())
	token := writeFile(t, r.dir, "token", []byte("the token of all nodes\n"))
	wrong := writeFile(t, r.dir, "wrong", []byte("another token of this cluster\n"))
	secured := []string{"--auth-token-file", token, "--auth-tls-cert", cert, "--auth-tls-key", key, "--cluster-peer-ca", ca}
	a := r.here("a", append(secured, "--cluster-peer-token-file", wrong)...)
	r.here("b", secured...)
	with := func(args ...string) result { return a.run(append(args, "--token-file", token, "--ca", ca)...) }
	with("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	tokensFile, dataFile := writeFile(t, r.dir, "tokens", tokens(1, 12)), writeFile(t, r.dir, "data", bytesOf(1, 3*8192))
	with("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	with("cluster", "drain", "a").must(t)
	awaitTrue(t, "the refusal is in the list", func() bool {
		return strings.Contains(with("cluster", "members").must(t), "not authorised")
	})
	if err := os.WriteFile(wrong, []byte("the token of all nodes\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out := decode[struct {
		Drained bool
		Move    struct{ Blocks int64 }
	}](t, with("cluster", "drain", "a", "--wait", "--format", "json"))
	if !out.Drained || out.Move.Blocks != 3 {
		t.Errorf("%+v", out)
	}
}

// TestDrainTokenReplaced: a draining node goes on to copy blocks after the bearer token of all nodes was replaced.
func TestDrainTokenReplaced(t *testing.T) {
	r := newMovesRig(t)
	const old, next = "the old token of all nodes", "a new token of all nodes"
	file := writeFile(t, r.dir, "token", []byte(old))
	nodes := []*served{r.here("a", "--auth-token-file", file), r.here("b", "--auth-token-file", file)}
	clientFile := writeFile(t, r.dir, "client", []byte(old))
	with := func(s *served, args ...string) result { return s.run(append(args, "--token-file", clientFile)...) }
	put := func(seed int) {
		t.Helper()
		tokensFile, dataFile := writeFile(t, r.dir, "tokens", tokens(seed, 12)), writeFile(t, r.dir, "data", bytesOf(1, 3*8192))
		with(nodes[0], "block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	}
	// drained waits until other nodes have all blocks. A further order to drain would begin the copies anew.
	drained := func(blocks int64) {
		t.Helper()
		awaitTrue(t, fmt.Sprintf("other nodes have %d blocks", blocks), func() bool {
			list := decode[struct {
				Members []struct {
					Name string
					Move struct {
						Phase  string
						Blocks int64
					}
				}
			}](t, with(nodes[0], "cluster", "members", "--format", "json"))
			for _, m := range list.Members {
				if m.Name == "a" {
					return m.Move.Phase == "done" && m.Move.Blocks == blocks
				}
			}
			return false
		})
	}
	// accept replaces the tokens of the nodes, and waits until they take or refuse the token of clients.
	accept := func(tokens string, client string, taken bool) {
		t.Helper()
		for path, content := range map[string]string{file: tokens, clientFile: client} {
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for _, n := range nodes {
			awaitTrue(t, "the tokens are replaced", func() bool { return (with(n, "status").code == 0) == taken })
		}
	}
	with(nodes[0], "ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	put(1)
	with(nodes[0], "cluster", "drain", "a").must(t)
	drained(3)
	accept(next+"\n"+old, next, true)
	accept(next, old, false)
	accept(next, next, true)
	put(1000)
	drained(6)
}

// TestDrainOrders: orders that cannot be performed are refused, with the reason.
func TestDrainOrders(t *testing.T) {
	r := newMovesRig(t)
	a := r.here("a")
	for _, x := range []struct {
		args []string
		want string
	}{
		{[]string{"drain", "x"}, `no node "x"`},
		{[]string{"undrain", "x"}, `no node "x"`},
		{[]string{"drain", "a"}, "no other node of the cluster serves"},
	} {
		if r := a.run(append([]string{"cluster"}, x.args...)...); r.code == 0 || !strings.Contains(r.err, x.want) {
			t.Errorf("%v: exit %d: %s", x.args, r.code, r.err)
		}
	}
	alone := startServed(t, t.TempDir()+"/alone")
	if r := alone.run("cluster", "drain", "test"); r.code == 0 || !strings.Contains(r.err, "cluster.etcd is empty") {
		t.Errorf("exit %d: %s", r.code, r.err)
	}
	if got := fmt.Sprint(states(t, a)); got != "a:serving" {
		t.Errorf("members %q", got)
	}
}
