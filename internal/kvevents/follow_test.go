package kvevents

import (
	"context"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/internal/testnode"
	"github.com/penstock-kv/penstock/kv"
)

// TestAgainstIndex: whatever is stored, deleted, evicted and cleared, in namespaces
// that come and go, a subscriber's view is what the node lists, and no message is
// missing.
func TestAgainstIndex(t *testing.T) {
	testkit.VerifyNone(t)
	for _, topic := range []Topic{DefaultTopic, "kv@{node}@{namespace}"} {
		h := newHost(t, testnode.Options{})
		h.namespace("before", kv.IndexTrie)
		h.put("before", chainOf(5, 1)...)
		s := newShow(t, Options{Topic: topic}, h)
		s.view.next = 0
		if r := s.report("announced"); r.Namespaces != 1 || r.Blocks != 5 || r.Node != "test" {
			t.Errorf("%+v", r)
		}
		s.view.until(topic.of("test", "before"), h, "before")

		rng := rand.New(rand.NewPCG(7, 7))
		names := []string{"chained", "flat", "fleeting"}
		create := func(name string) {
			index := kv.IndexTrie
			if name == "flat" {
				index = kv.IndexFlat
			}
			h.namespace(name, index)
		}
		for _, name := range names {
			create(name)
		}
		for round := range 120 {
			name := names[rng.IntN(len(names))]
			switch op := rng.IntN(10); {
			case op < 6:
				h.put(name, chainOf(1+rng.IntN(6), uint64(rng.IntN(4)))...)
			case op < 8:
				victim := chainOf(6, uint64(rng.IntN(4)))[rng.IntN(6)]
				if h.list(name)[victim] {
					must[*pb.DeleteBlocksResponse](t)(h.admin.DeleteBlocks(t.Context(), &pb.DeleteBlocksRequest{Namespace: name, BlockId: victim[:]}))
				}
			case op == 8:
				must[*pb.EvictResponse](t)(h.admin.Evict(t.Context(), &pb.EvictRequest{Namespace: name, Bytes: 1}))
			case name == "fleeting":
				h.drop(name)
				create(name)
			default:
				h.bump(name)
			}
			if round%20 != 19 {
				continue
			}
			for _, name := range append(names, "before") {
				marker := block(uint64(1000 + round))
				h.put(name, marker)
				s.view.has(topic.of("test", name), marker)
				s.view.until(topic.of("test", name), h, name)
			}
		}
		// What another clears must not be lost for good.
		for _, name := range append(names, "before") {
			s.view.until(topic.of("test", name), h, name)
		}
		if got := s.pub.Stats(); got.Lost != 0 || got.Joined != 1 {
			t.Errorf("%+v", got)
		}
	}
}

// TestNodeAway: events of the time when a node could not be reached are published
// when it can be; those that it no longer has make an announcement, as does a node
// that was restarted with something else.
func TestNodeAway(t *testing.T) {
	testkit.VerifyNone(t)
	h := newHost(t, testnode.Options{EventHistory: 4})
	near := h.wire.target
	h.namespace("m", kv.IndexTrie)
	h.put("m", chainOf(3, 1)...)
	s := newShow(t, Options{}, h)
	topic := topicOf("test", "m")
	s.report("announced")
	s.view.until(topic, h, "m")

	h.wire.join("")
	if r := s.report("down"); r.Server != h.wire.addr() || r.Reason == "" {
		t.Errorf("%+v", r)
	}
	h.put("m", chainOf(4, 1)...)
	h.wire.join(near)
	s.report("back")
	s.view.until(topic, h, "m")
	if n := len(s.reports); n != 0 {
		t.Errorf("%d reports about events that were all there, %+v", n, <-s.reports)
	}

	h.wire.join("")
	s.report("down")
	h.bump("m")
	for seed := range uint64(6) {
		h.put("m", chainOf(2, 10+seed)...)
	}
	h.wire.join(near)
	s.report("gap")
	if r := s.report("announced"); r.Blocks != 12 {
		t.Errorf("%+v", r)
	}
	s.view.until(topic, h, "m")

	other := newHost(t, testnode.Options{})
	other.namespace("n", kv.IndexTrie)
	other.put("n", chainOf(3, 99)...)
	h.wire.join(other.wire.target)
	if r := s.report("announced"); r.Blocks != 3 || r.Namespaces != 1 {
		t.Errorf("%+v", r)
	}
	s.view.until(topicOf("test", "n"), other, "n")
	if len(s.view.topics[topic]) != 0 {
		t.Errorf("%d blocks of the node that is gone are known", len(s.view.topics[topic]))
	}
}

// topicOf is a topic made of DefaultTopic.
func topicOf(node, namespace string) string { return Topic(DefaultTopic).of(node, namespace) }

// TestNodes: several nodes, some namespaces the same, over one socket; what one of
// them loses the other keeps. A subscriber of one topic gets nothing else.
func TestNodes(t *testing.T) {
	testkit.VerifyNone(t)
	a, b := newHost(t, testnode.Options{Name: "a"}), newHost(t, testnode.Options{Name: "b"})
	for i, h := range []*host{a, b} {
		h.namespace("m", kv.IndexTrie)
		h.namespace("other", kv.IndexTrie)
		h.put("m", chainOf(3+i, 1)...)
		h.put("other", chainOf(1, 1)...)
	}
	s := newShow(t, Options{Namespace: "m", Heartbeat: 10 * time.Millisecond}, a, b)
	only := s.subscribe("kv@b/")
	s.view.until(topicOf("a", "m"), a, "m")
	s.view.until(topicOf("b", "m"), b, "m")
	a.bump("m")
	b.put("m", chainOf(6, 1)...)
	s.view.until(topicOf("a", "m"), a, "m")
	s.view.until(topicOf("b", "m"), b, "m")
	only.has(topicOf("b", "m"), chainOf(6, 1)[5])
	for beats := s.view.beats; s.view.beats < beats+3; {
		s.view.receive()
	}
	for topic := range s.view.topics {
		if !strings.HasSuffix(topic, "@m") {
			t.Errorf("topic %s", topic)
		}
	}
	for topic := range only.topics {
		if topic != topicOf("b", "m") {
			t.Errorf("a subscriber of node b gets %s", topic)
		}
	}
}

// TestLateSubscriber: who joins is told all that there is; a replay of the beginning
// says the same.
func TestLateSubscriber(t *testing.T) {
	testkit.VerifyNone(t)
	h := newHost(t, testnode.Options{})
	h.namespace("m", kv.IndexTrie)
	h.put("m", chainOf(200, 1)...)
	s := newShow(t, Options{Resync: 1}, h)
	topic := topicOf("test", "m")
	s.view.until(topic, h, "m")
	late := s.subscribe("kv@test/")
	late.until(topic, h, "m")
	s.view.until(topic, h, "m")
}

// TestTwoNodesOfOneName: their topics would be the same.
func TestTwoNodesOfOneName(t *testing.T) {
	a, b := newHost(t, testnode.Options{Name: "twin"}), newHost(t, testnode.Options{Name: "twin"})
	f, err := NewFollower(Options{Nodes: []Node{dial(t, a.wire.addr()), dial(t, b.wire.addr())}, Topic: DefaultTopic, Publisher: NewPublisher(PublisherOptions{})})
	if err != nil {
		t.Fatal(err)
	}
	err = f.Run(context.Background())
	if err == nil || !strings.Contains(err.Error(), `both named "twin"`) || !strings.Contains(err.Error(), a.wire.addr()) || !strings.Contains(err.Error(), b.wire.addr()) {
		t.Errorf("%v", err)
	}
}

// TestTopics: which patterns are refused, and what the others become.
func TestTopics(t *testing.T) {
	for _, c := range []struct {
		topic     Topic
		nodes     int
		namespace string
		say       string // empty: it is good
		shared    bool
		of        string
	}{
		{DefaultTopic, 3, "", "", false, "kv@n1/m@m"},
		{"kv@{node}@{namespace}", 3, "", "", true, "kv@n1@m"},
		{"kv@node:{node}@Qwen/Qwen3-8B", 2, "m", "", true, "kv@node:n1@Qwen/Qwen3-8B"},
		{"", 1, "m", "", true, ""},
		{"{namespace}", 1, "", "", false, "m"},
		{"kv@pool@{namespace}-{node}", 2, "", `same pod, "pool", for all 2 nodes`, true, "kv@pool@m-n1"},
		{"", 1, "", "the same for all namespaces", true, ""},
		{"kv@{nod}@{namespace}", 1, "", "only {node} and {namespace}", true, "kv@{nod}@m"},
	} {
		err := c.topic.Check(c.nodes, c.namespace)
		if (err == nil) != (c.say == "") || err != nil && !strings.Contains(err.Error(), c.say) {
			t.Errorf("%q, %d nodes, namespace %q: %v; want %q", c.topic, c.nodes, c.namespace, err, c.say)
		}
		if got := c.topic.of("n1", "m"); got != c.of || c.topic.shared() != c.shared {
			t.Errorf("%q: %q, shared %v", c.topic, got, c.topic.shared())
		}
	}
	if _, err := NewFollower(Options{}); err == nil {
		t.Error("a topic that is the same for all namespaces is taken")
	}
}

// FuzzChains: of a listing in any order, each block is published once, after its
// parent, if it has one, or as the first of a Change.
func FuzzChains(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 3, 0, 6}, uint64(1), false)
	f.Add([]byte{200, 1, 1, 1}, uint64(2), true)
	f.Fuzz(func(t *testing.T, parents []byte, seed uint64, flat bool) {
		// Block i+1 has the parent parents[i], if that is smaller; 0 is none.
		want := make(map[kv.BlockID]kv.BlockID)
		var listed []*pb.Block
		for i, p := range parents {
			id, l := block(uint64(i)+1), &pb.Block{Epoch: 3}
			var parent kv.BlockID
			if p != 0 && int(p) <= i && !flat {
				parent = block(uint64(p))
				l.Parent = parent[:]
			}
			l.Id = id[:]
			want[id] = parent
			listed = append(listed, l, &pb.Block{Id: id[:], Group: 1, Epoch: 3}, &pb.Block{Id: make([]byte, kv.BlockIDSize), Epoch: 4})
		}
		rand.New(rand.NewPCG(seed, 0)).Shuffle(len(listed), func(i, j int) { listed[i], listed[j] = listed[j], listed[i] })
		changes, err := (&space{flat: flat, epoch: 3, blockTokens: 5}).chains(listed)
		if err != nil {
			t.Fatal(err)
		}
		if flat && len(changes) > 1 {
			t.Fatalf("%d changes of a flat namespace", len(changes))
		}
		for _, c := range changes {
			parent := c.Parent
			for _, id := range c.IDs {
				if p, ok := want[id]; !ok || !flat && p != parent || c.Kind != Stored || c.BlockTokens != 5 {
					t.Fatalf("block %v after %v in %+v; want it after %v", id, parent, c, p)
				}
				delete(want, id)
				parent = id
			}
		}
		if len(want) > 0 {
			t.Fatalf("%d blocks are missing", len(want))
		}
	})
}
