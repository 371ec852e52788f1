package kvevents

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/server/access"
)

// TestAgainstIndex stores, deletes, evicts and retires blocks in live epochs of namespaces
// that are created and deleted. A subscriber's view then equals the blocks that the node lists, and no
// message is missing.
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
				h.putIn(name, rng.IntN(3), chainOf(1+rng.IntN(6), uint64(rng.IntN(4)))...)
			case op < 8:
				victim := chainOf(6, uint64(rng.IntN(4)))[rng.IntN(6)]
				if h.list(name)[victim] {
					must[*pb.DeleteBlocksResponse](t)(h.admin.DeleteBlocks(t.Context(), &pb.DeleteBlocksRequest{Namespace: name, BlockId: victim[:]}))
				}
			case op == 8:
				must[*pb.EvictResponse](t)(h.admin.Evict(t.Context(), &pb.EvictRequest{Namespace: name, Bytes: 1}))
			case name == "fleeting" && rng.IntN(2) == 0:
				h.drop(name)
				create(name)
			default:
				h.epochs(name, rng)
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
		// The namespaces of one pod clear each other; their blocks must be announced again.
		for _, name := range append(names, "before") {
			s.view.until(topic.of("test", name), h, name)
		}
		if got := s.pub.Stats(); got.Lost != 0 || got.Joined != 1 {
			t.Errorf("%+v", got)
		}
	}
}

// TestNodeAway: when a node is reachable again, its events of the time in between are
// published. If the node no longer has them all, or was restarted with other blocks, all
// its blocks are announced.
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
		t.Errorf("%d reports although the node had all events, %+v", n, <-s.reports)
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
		t.Errorf("the view has %d blocks of the old node; want 0", len(s.view.topics[topic]))
	}
}

// topicOf returns the topic of a namespace under DefaultTopic.
func topicOf(node, namespace string) string { return Topic(DefaultTopic).of(node, namespace) }

// TestNodes follows several nodes, some with equal namespaces, over one socket. A removal
// on one node does not affect the other. A subscriber of one topic receives no other topic.
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
			t.Errorf("unexpected topic %s", topic)
		}
	}
	for topic := range only.topics {
		if topic != topicOf("b", "m") {
			t.Errorf("a subscriber of node b received topic %s", topic)
		}
	}
}

// TestLateSubscriber: a subscriber that joins receives all blocks. A replay from the first
// message gives the same view.
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

// TestAnnouncementOutlivesStream: all blocks are announced to a subscriber that joined shortly before the stream of events
// broke.
func TestAnnouncementOutlivesStream(t *testing.T) {
	testkit.VerifyNone(t)
	h := newHost(t, testnode.Options{})
	announced := make(chan Report, 1)
	f, err := NewFollower(Options{
		Nodes: []Node{dial(t, h.wire.addr())}, Topic: DefaultTopic, Publisher: NewPublisher(PublisherOptions{}), Resync: time.Hour,
		Report: func(r Report) { announced <- r },
	})
	if err != nil {
		t.Fatal(err)
	}
	s := f.sources[0]
	s.announced = time.Now()
	f.Missed(nil, 0)
	broken := errors.New("the stream broke")
	events, ended := make(chan *pb.Event), make(chan error, 1)
	returned := make(chan error, 1)
	go func() { returned <- s.pump(t.Context(), events, ended) }()
	for len(s.wake) > 0 && t.Context().Err() == nil {
		runtime.Gosched()
	}
	ended <- broken
	close(events)
	if err := <-returned; !errors.Is(err, broken) {
		t.Fatal(err)
	}
	s.opts.Resync = 1
	events = make(chan *pb.Event)
	go func() { returned <- s.pump(t.Context(), events, ended) }()
	select {
	case r := <-announced:
		if r.What != "announced" {
			t.Errorf("%+v", r)
		}
	case <-time.After(hangs):
		t.Error("no announcement after the stream broke")
	}
	ended <- broken
	close(events)
	if err := <-returned; !errors.Is(err, broken) {
		t.Error(err)
	}
}

// TestTokenIsReplaced: a follower whose stream of events the node ends, because the stream's token was removed, goes on with
// its present token. It ends if the node refuses that token too.
func TestTokenIsReplaced(t *testing.T) {
	testkit.VerifyNone(t)
	var policy atomic.Pointer[access.Policy]
	var token atomic.Pointer[string]
	use := func(s string) { token.Store(&s) }
	accept := func(s string) {
		t.Helper()
		text := fmt.Sprintf("principals: [{name: a, tokens: [sha256:%x], grants: [{roles: [read, admin], namespaces: ['*']}, {roles: [operate], namespaces: ['*']}]}]", sha256.Sum256([]byte(s)))
		p, err := access.Parse("roles.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		policy.Store(p)
	}
	use("")
	n := testnode.Start(t, testnode.Options{Roles: policy.Load})
	conn, err := client.Dial(n.Addr, client.DialOptions{Timeout: time.Minute, TokenSource: func() string { return *token.Load() }})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	h := &host{t: t, admin: pb.NewAdminClient(conn)}
	h.namespace("m", kv.IndexTrie)
	reports := make(chan Report, 10)
	node := Node{Server: n.Addr, Cache: pb.NewCacheClient(conn), Admin: h.admin}
	f, err := NewFollower(Options{Nodes: []Node{node}, Topic: DefaultTopic, Publisher: NewPublisher(PublisherOptions{}), Report: func(r Report) { reports <- r }})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- f.Run(t.Context()) }()
	next := func(want string) {
		t.Helper()
		select {
		case r := <-reports:
			if r.What != want {
				t.Fatalf("%+v; want %s", r, want)
			}
		case err := <-ended:
			t.Fatalf("the follower ended with %v; want %s", err, want)
		}
	}
	next("announced")
	use("a token of the follower")
	accept("a token of the follower")
	h.bump("m")
	next("down")
	next("back")
	accept("another token of it")
	if _, err := n.Storage.BumpEpoch(t.Context(), "m", 0, 0); err != nil {
		t.Fatal(err)
	}
	next("down")
	if err := <-ended; status.Code(err) != codes.Unauthenticated {
		t.Errorf("the follower ends with %v", err)
	}
}

// TestTwoNodesOfOneName: Run returns an error, because the nodes' topics would be equal.
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

// TestTopics: Check refuses patterns that are not unique. The other patterns give the
// expected topics.
func TestTopics(t *testing.T) {
	for _, c := range []struct {
		topic     Topic
		nodes     int
		namespace string
		say       string // text of the error; empty: no error
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
		t.Error("no error for a topic that is the same for all namespaces")
	}
}

// FuzzChains: chains returns each block of a list once, in any order of the list. A block
// comes after its parent, or is the first block of a Change.
func FuzzChains(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 3, 0, 6}, uint64(1), false)
	f.Add([]byte{200, 1, 1, 1}, uint64(2), true)
	f.Fuzz(func(t *testing.T, parents []byte, seed uint64, flat bool) {
		// Block i+1 has the parent parents[i] if that is smaller than i+1 and not 0.
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
			if seed%3 == 0 { // the same block in another epoch
				listed = append(listed, &pb.Block{Id: l.Id, Parent: l.Parent, Epoch: 5})
			}
		}
		rand.New(rand.NewPCG(seed, 0)).Shuffle(len(listed), func(i, j int) { listed[i], listed[j] = listed[j], listed[i] })
		changes, err := (&space{flat: flat, live: []kv.Epoch{5, 3}, blockTokens: 5}).chains(listed)
		if err != nil {
			t.Fatal(err)
		}
		if flat && len(changes) > 1 {
			t.Fatalf("%d changes of a flat namespace; want 1", len(changes))
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
