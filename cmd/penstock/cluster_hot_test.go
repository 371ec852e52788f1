package main

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/placement"
	"github.com/penstock-kv/penstock/kv"
)

// hotSettings make a prefix hot with two matches in one second, and copy it to two further nodes.
// A busy machine renews the leases in time.
var hotSettings = []string{"--cluster-hot-matches", "1", "--cluster-hot-copies", "2", "--cluster-lease-ttl", "60s"}

// hotSequences is the number of sequences in the tests of hot prefixes.
const hotSequences = 12

// figure returns the value of a metric of a node.
func figure(t *testing.T, http, name string) float64 {
	t.Helper()
	_, text := call(t, gatewayClient(t, nil), "GET", "http://"+http+"/metrics", "")
	m := regexp.MustCompile(`(?m)^` + name + ` (\S+)$`).FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("there is no metric %s", name)
	}
	v, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// copyReads returns the payload that a node has delivered of copies.
func copyReads(t *testing.T, s *served) float64 {
	t.Helper()
	return figure(t, s.ready.HTTP, "penstock_cluster_hot_read_bytes_total")
}

// use matches a sequence and reads it, and returns the number of blocks that the read has found.
func (s *sequences) use(i int) int {
	s.Helper()
	if _, err := s.Match(s.Context(), client.MatchRequest{Namespace: s.ns, Tokens: s.tokens(i, sequenceBlocks)}); err != nil {
		s.Error(err)
	}
	return s.read(i)
}

// writeSome writes hotSequences sequences.
func (s *sequences) writeSome() {
	s.Helper()
	for i := range hotSequences {
		if w := s.write(i, 0, sequenceBlocks); w.Stored != sequenceBlocks {
			s.Fatalf("sequence %d: %+v", i, w)
		}
	}
}

// ids returns the chain of a sequence.
func (s *sequences) ids(i int) []kv.BlockID {
	s.Helper()
	chain, err := s.ns.Chain()
	if err != nil {
		s.Fatal(err)
	}
	ids, _ := chain.Append(nil, s.tokens(i, sequenceBlocks))
	return ids
}

// hotRig is a cluster of three nodes with a namespace without replicas, of which one sequence is hot.
type hotRig struct {
	*movesRig
	nodes []*served
	only  []*sequences // of one node each
	s     *sequences
	// home is the index of the node that stores the hot sequence, and hot the number of it.
	home, hot int
}

func newHotRig(t *testing.T, more ...string) *hotRig {
	r := &hotRig{movesRig: newMovesRig(t)}
	for _, name := range []string{"a", "b", "c"} {
		r.nodes = append(r.nodes, r.here(name, slices.Concat(hotSettings, more)...))
	}
	r.nodes[0].run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256").must(t)
	r.s = r.open(r.nodes[0], "m", false)
	awaitTrue(t, "the client has all nodes", func() bool { return nodesUp(r.s) == "3 of 3" })
	r.s.writeSome()
	for i, n := range r.nodes {
		r.only = append(r.only, r.movesRig.only(n, "m"))
		if r.only[i].stored(r.hot) > 0 {
			r.home = i
		}
	}
	return r
}

// copies returns the indexes of the nodes that are not the home of the hot sequence.
func (r *hotRig) copies() []int { return []int{(r.home + 1) % 3, (r.home + 2) % 3} }

// heat uses the hot sequence until both other nodes have delivered copies of it.
func (r *hotRig) heat() {
	r.Helper()
	var before [2]float64
	for k, i := range r.copies() {
		before[k] = copyReads(r.T, r.nodes[i])
	}
	awaitTrue(r.T, "copies of the hot sequence are read", func() bool {
		for range 8 {
			if n := r.s.use(r.hot); n != sequenceBlocks {
				r.Fatalf("%d blocks of the hot sequence are found", n)
			}
		}
		for k, i := range r.copies() {
			if copyReads(r.T, r.nodes[i]) == before[k] {
				return false
			}
		}
		return true
	})
}

// TestHotPrefix: the reads of a hot sequence spread over its home and two further nodes, with the right bytes. A sequence of the
// same home that is matched less gets no copies. Blocks behind the hot prefix are read from the home by the same Read.
func TestHotPrefix(t *testing.T) {
	r := newHotRig(t)
	cold := -1
	for i := range hotSequences {
		if i != r.hot && r.only[r.home].stored(i) > 0 {
			cold = i
		}
	}
	if cold < 0 {
		t.Fatal("the home of the hot sequence has no other sequence")
	}
	r.s.use(cold)
	r.heat()
	for _, i := range r.copies() {
		if n := r.only[i].read(r.hot); n != sequenceBlocks {
			t.Errorf("node %d has %d blocks of the hot sequence", i, n)
		}
		if n := r.only[i].stored(cold); n != 0 {
			t.Errorf("node %d has %d blocks of a sequence that is not hot", i, n)
		}
	}
	awaitTrue(t, "the home has one hot prefix with copies", func() bool { // the metric changes after the first hint
		return figure(t, r.nodes[r.home].ready.HTTP, "penstock_cluster_hot_prefixes") == 1
	})
	if n, want := figure(t, r.nodes[r.home].ready.HTTP, "penstock_cluster_hot_copied_bytes_total"), sequenceBlocks*float64(r.s.ns.Geometry.BlockBytes()); n != want {
		t.Errorf("%v bytes were copied; want %v", n, want)
	}
	if n := r.s.use(cold); n != sequenceBlocks {
		t.Errorf("%d blocks of the cold sequence are found", n)
	}

	// Several clients at a time: every node takes a part.
	var wg sync.WaitGroup
	var before []float64
	for _, i := range r.copies() {
		before = append(before, copyReads(t, r.nodes[i]))
	}
	const clients, reads = 4, 30
	for range clients {
		s := r.open(r.nodes[0], "m", false)
		wg.Go(func() {
			for range reads {
				if n := s.use(r.hot); n != sequenceBlocks {
					t.Errorf("%d blocks of the hot sequence are found", n)
				}
			}
		})
	}
	wg.Wait()
	size := sequenceBlocks * float64(r.s.ns.Geometry.BlockBytes())
	for k, i := range r.copies() {
		// A third of the reads are expected. The chance of less than an eighth is below 1e-6.
		if n := (copyReads(t, r.nodes[i]) - before[k]) / size; n < clients*reads/8 || n > clients*reads*3/4 {
			t.Errorf("node %d has delivered %v of %d reads", i, n, clients*reads)
		}
	}
}

// TestHotPrefixOfMany: sequences that share their beginning make the beginning hot. It is read from the copies, and the other blocks
// from the home, which has them alone. One of the sequences may be hot as a whole, because all of it is matched once a second.
func TestHotPrefixOfMany(t *testing.T) {
	r := newHotRig(t)
	const shared = 2
	tokens := func(k int) []uint32 {
		all := r.s.tokens(r.hot, sequenceBlocks)
		for i := shared * 4; i < len(all); i++ {
			all[i] += uint32(100_000 * (k + 1))
		}
		return all
	}
	size := int(r.s.ns.Geometry.BlockBytes())
	payload := func(k, block int) []byte {
		if block < shared {
			k = -1
		}
		return bytesOf(byte(k*13+block*7+5), size)
	}
	const many = 8
	for k := range many {
		for b := range sequenceBlocks {
			copy(r.s.memory.Bytes()[b*size:], payload(k, b))
		}
		copy(r.s.memory.Bytes(), slices.Concat(r.s.bytes(r.hot, 0, 1), r.s.bytes(r.hot, 1, 1)))
		if _, err := r.s.Write(t.Context(), client.WriteRequest{Namespace: r.s.ns, Tokens: tokens(k), From: r.s.memory}); err != nil {
			t.Fatal(err)
		}
	}
	use := func(k int) {
		m, err := r.s.Match(t.Context(), client.MatchRequest{Namespace: r.s.ns, Tokens: tokens(k)})
		if err != nil || m.Blocks != sequenceBlocks {
			t.Fatalf("match %+v, %v", m, err)
		}
		clear(r.s.memory.Bytes())
		got, err := r.s.Read(t.Context(), client.ReadRequest{Namespace: r.s.ns, IDs: m.IDs, Into: r.s.memory})
		if err != nil || got.Blocks != sequenceBlocks || len(got.Lost) > 0 {
			t.Fatalf("read %+v, %v", got, err)
		}
		for b := range sequenceBlocks {
			want := payload(k, b)
			if b < shared {
				want = r.s.bytes(r.hot, b, 1)
			}
			if string(r.s.memory.Bytes()[b*size:][:size]) != string(want) {
				t.Fatalf("sequence %d: block %d has other bytes", k, b)
			}
		}
	}
	turn := 0
	awaitTrue(t, "copies of the shared blocks are read", func() bool {
		for range many {
			use(turn % many)
			turn++
		}
		return copyReads(t, r.nodes[r.copies()[0]]) > 0 && copyReads(t, r.nodes[r.copies()[1]]) > 0
	})
	for _, i := range r.copies() {
		if n := r.only[i].stored(r.hot); n != shared {
			t.Errorf("node %d has %d blocks of the hot beginning; want %d", i, n, shared)
		}
		whole := 0 // sequences of which the node has more
		for k := range many {
			m, err := r.only[i].Match(t.Context(), client.MatchRequest{Namespace: r.s.ns, Tokens: tokens(k)})
			if err != nil || m.Blocks < shared {
				t.Errorf("node %d: match %+v, %v", i, m, err)
			}
			if m.Blocks > shared {
				whole++
			}
		}
		if whole > 1 {
			t.Errorf("node %d has blocks behind the hot beginning of %d sequences", i, whole)
		}
	}
}

// TestHotPrefixEnds: with the epoch, no node serves the blocks. A deletion reaches the copies, whether a client deletes the block on all nodes
// or an operator on its home.
func TestHotPrefixEnds(t *testing.T) {
	r := newHotRig(t)
	r.heat()
	third := r.s.ids(r.hot)[2]
	if _, err := r.s.Delete(t.Context(), client.KeysRequest{Namespace: r.s.ns, IDs: []kv.BlockID{third}}); err != nil {
		t.Fatal(err)
	}
	// A copy that was under way at the deletion is deleted again.
	awaitTrue(t, "the third block is deleted on all nodes", func() bool {
		found := r.s.use(r.hot)
		return found == 2 && !slices.ContainsFunc(r.only, func(s *sequences) bool { return s.stored(r.hot) != 2 })
	})
	r.nodes[r.home].run("block", "delete", "m", fmt.Sprint(r.s.ids(r.hot)[1])).must(t)
	awaitTrue(t, "the copies are deleted", func() bool {
		r.s.use(r.hot)
		return r.only[r.copies()[0]].stored(r.hot) == 1 && r.only[r.copies()[1]].stored(r.hot) == 1
	})
	if n := r.s.use(r.hot); n != 1 {
		t.Errorf("%d blocks are found after the deletion of the second", n)
	}

	r.nodes[r.home].run("ns", "bump-epoch", "m").must(t)
	for range 20 {
		if n := r.s.use(r.hot); n != 0 {
			t.Fatalf("%d blocks of the ended epoch are read", n)
		}
	}
	for i, only := range r.only {
		if n := only.read(r.hot); n != 0 {
			t.Errorf("node %d serves %d blocks of the ended epoch", i, n)
		}
	}
}

// TestHotPrefixCools: when the matches end, the copies are the first blocks that their nodes evict, although they were used more than all
// others, and the home has its blocks.
func TestHotPrefixCools(t *testing.T) {
	r := newHotRig(t, "--cluster-hot-for", "2s")
	r.heat()
	for k := range hotSequences {
		r.s.use(k)
	}
	awaitTrue(t, "the prefix is not hot", func() bool {
		return figure(t, r.nodes[r.home].ready.HTTP, "penstock_cluster_hot_prefixes") == 0
	})
	for _, i := range r.copies() {
		own := 0
		for k := range hotSequences {
			if k != r.hot {
				own += r.only[i].stored(k)
			}
		}
		awaitTrue(t, "the copies are evicted first", func() bool {
			if r.only[i].stored(r.hot) == 0 {
				return true
			}
			decode[struct{ Blocks int64 }](t, r.nodes[i].run("evict", "--bytes", "1", "--format", "json"))
			return false
		})
		left := 0
		for k := range hotSequences {
			if k != r.hot {
				left += r.only[i].stored(k)
			}
		}
		if left != own {
			t.Errorf("node %d had %d blocks of its own, and has %d without the copies", i, own, left)
		}
	}
	if n := r.s.use(r.hot); n != sequenceBlocks {
		t.Errorf("%d blocks of the hot sequence are found", n)
	}
}

// TestHotPrefixNodeDeath: the death of a node with copies changes nothing for the reads of the hot sequence. When the home has died, each read
// is right or a miss.
func TestHotPrefixNodeDeath(t *testing.T) {
	r := newMovesRig(t)
	var nodes []*process
	for _, name := range []string{"a", "b", "c"} {
		nodes = append(nodes, r.process(name, hotSettings...))
	}
	seed := nodes[0].client(t)
	seed.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "256").must(t)
	s := r.open(seed, "m", false)
	awaitTrue(t, "the client has all nodes", func() bool { return nodesUp(s) == "3 of 3" })
	s.writeSome()
	home := -1
	var others []int
	for i, n := range nodes {
		if r.only(n.client(t), "m").stored(0) > 0 {
			home = i
		} else {
			others = append(others, i)
		}
	}
	awaitTrue(t, "copies of the hot sequence are read", func() bool {
		for range 8 {
			if n := s.use(0); n != sequenceBlocks {
				t.Fatalf("%d blocks of the hot sequence are found", n)
			}
		}
		return copyReads(t, nodes[others[0]].client(t)) > 0 && copyReads(t, nodes[others[1]].client(t)) > 0
	})
	if err := nodes[others[0]].Kill(); err != nil {
		t.Fatal(err)
	}
	for range 50 {
		if n := s.use(0); n != sequenceBlocks {
			t.Fatalf("without a node with copies %d blocks of the hot sequence are found", n)
		}
	}
	if err := nodes[home].Kill(); err != nil {
		t.Fatal(err)
	}
	found := 0
	for range 50 {
		if n := s.use(0); n == sequenceBlocks {
			found++
		} else if n != 0 {
			t.Errorf("without the home %d blocks of the hot sequence are found", n)
		}
	}
	t.Logf("without the home %d of 50 reads found the hot sequence", found)
}

// TestHotPrefixMembers: while a node with copies and the home of a hot sequence drain, and while a node that became its home drains and is removed,
// each read of the sequence is right. Only between the beginning of the new home and the order to fill it, a read may miss.
func TestHotPrefixMembers(t *testing.T) {
	r := newHotRig(t)
	r.heat()
	reader := r.open(r.nodes[0], "m", false)
	during := func(what string, change func()) {
		t.Helper()
		reading, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			for reading.Err() == nil {
				if n := reader.use(r.hot); n != sequenceBlocks {
					t.Errorf("%s: %d blocks of the hot sequence are found", what, n)
				}
			}
		})
		defer wg.Wait()
		defer stop()
		change()
	}
	nodesAre := func(want string) func() bool {
		return func() bool { return nodesUp(r.s) == want && nodesUp(reader) == want }
	}
	admin, names := r.nodes[0], []string{"a", "b", "c"}
	one, last := r.copies()[0], r.copies()[1]
	during("drain", func() {
		admin.run("cluster", "drain", names[one], "--wait").must(t)
		admin.run("cluster", "drain", names[r.home], "--wait").must(t)
		if n := r.only[last].stored(r.hot); n != sequenceBlocks {
			t.Errorf("the node that does not drain has %d blocks of the hot sequence", n)
		}
	})
	during("end of the drain", func() {
		admin.run("cluster", "undrain", names[one]).must(t)
		admin.run("cluster", "undrain", names[r.home]).must(t)
		awaitTrue(t, "no node drains", func() bool { return states(t, admin) == "a:serving b:serving c:serving" })
	})
	r.heat()

	name := r.nextHome(names)
	node := r.process(name, hotSettings...)
	awaitTrue(t, "the clients have the new node", nodesAre("4 of 4"))
	admin.run("cluster", "rebalance", name, "--wait").must(t)
	if n := r.movesRig.only(node.client(t), "m").stored(r.hot); n != sequenceBlocks {
		t.Errorf("the new home has %d blocks of the hot sequence", n)
	}
	during("drain of the new home", func() { admin.run("cluster", "drain", name, "--wait").must(t) })
	if err := node.Stop(); err != nil {
		t.Fatal(err)
	}
	awaitTrue(t, "the clients have seen the end of the node", nodesAre("3 of 4"))
	during("removal", func() {
		clusterRemove(t, admin, name)
		awaitTrue(t, "the clients have forgotten the node", nodesAre("3 of 3"))
	})
	r.heat()
}

// nextHome returns the name of a further node of the size of the others that becomes the home of the hot sequence.
func (r *hotRig) nextHome(names []string) string {
	r.Helper()
	var places []placement.Place
	for _, name := range names {
		places = append(places, placement.Place{Seed: placement.PlaceSeed(name), Capacity: 1})
	}
	for c := 'd'; c <= 'z'; c++ {
		next := placement.Place{Seed: placement.PlaceSeed(string(c)), Capacity: 1}
		if placement.Home(append(places[:len(names):len(names)], next), r.s.ids(r.hot)[0]) == len(names) {
			return string(c)
		}
	}
	r.Fatal("no name makes a node the home of the hot sequence")
	return ""
}
