package prfaas

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

func TestRoute(t *testing.T) {
	one := func(cached int) []Cluster { return []Cluster{{Cached: cached}} }
	for _, c := range []struct {
		name    string
		router  Router
		request Request
		want    Route
	}{
		{"short", Router{1000, false}, Request{Total: 1000, Remote: one(0)}, Route{Local, -1, 0, 1000, FetchNone, 0, ""}},
		{"long", Router{1000, false}, Request{Total: 1001, Remote: one(0)}, Route{Remote, 0, 0, 1001, FetchNone, 0, ""}},
		{"scarce: its own cache alone decides", Router{1000, false}, Request{Total: 5000, Cached: 4000, Remote: one(4900)}, Route{Local, -1, 4000, 1000, FetchNone, 4000, ""}},
		{"scarce: a remote cache does not keep it local", Router{1000, false}, Request{Total: 5000, Cached: 3000, Remote: one(4900)}, Route{Remote, 0, 4900, 100, FetchNone, 4900, ""}},
		{"scarce: a local cache is not sent", Router{1000, false}, Request{Total: 5000, Cached: 3000, Remote: one(100)}, Route{Remote, 0, 100, 4900, FetchNone, 100, ""}},
		{"abundant: a remote cache keeps it local", Router{1000, true}, Request{Total: 5000, Cached: 3000, Remote: one(4900)}, Route{Local, -1, 4900, 100, 0, 3000, ""}},
		{"abundant: the longer cache is local", Router{1000, true}, Request{Total: 5000, Cached: 4500, Remote: one(100)}, Route{Local, -1, 4500, 500, FetchNone, 4500, ""}},
		{"abundant: a local cache is sent", Router{1000, true}, Request{Total: 9000, Cached: 3000, Remote: one(500)}, Route{Remote, 0, 3000, 6000, FetchLocal, 500, ""}},
		{"abundant: the remote cache is there", Router{1000, true}, Request{Total: 9000, Cached: 3000, Remote: one(4000)}, Route{Remote, 0, 4000, 5000, FetchNone, 4000, ""}},
		{"equal caches are not moved", Router{1000, true}, Request{Total: 9000, Cached: 4000, Remote: one(4000)}, Route{Remote, 0, 4000, 5000, FetchNone, 4000, ""}},
		{"the longest cache wins", Router{1000, false}, Request{Total: 9000, Remote: []Cluster{{Cached: 1}, {Cached: 5}, {Cached: 4}}}, Route{Remote, 1, 5, 8995, FetchNone, 5, ""}},
		{"then the shortest queue", Router{1000, false}, Request{Total: 9000, Remote: []Cluster{{QueueSeconds: 2}, {QueueSeconds: 1}, {QueueSeconds: 1}}}, Route{Remote, 1, 0, 9000, FetchNone, 0, ""}},
		{"not one that is down", Router{1000, true}, Request{Total: 9000, Cached: 10, Remote: []Cluster{{Cached: 8999, Down: true}, {}}}, Route{Remote, 1, 10, 8990, FetchLocal, 0, ""}},
		{"all are down", Router{1000, true}, Request{Total: 9000, Cached: 10, Remote: []Cluster{{Cached: 8999, Down: true}}}, Route{Local, -1, 10, 8990, FetchNone, 10, ""}},
		{"there is none", Router{}, Request{Total: 9000}, Route{Local, -1, 0, 9000, FetchNone, 0, ""}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := c.router.Route(c.request)
			if err != nil {
				t.Fatal(err)
			}
			if got.Why == "" {
				t.Error("no reason")
			}
			got.Why = ""
			if got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
	for word, q := range map[string]Request{
		"prompt of 0": {}, "-1 tokens": {Total: 1, Cached: -1}, "2 tokens of": {Total: 1, Cached: 2}, "PrfaaS cluster 1": {Total: 1, Remote: []Cluster{{}, {Cached: 2}}},
	} {
		if _, err := (Router{}).Route(q); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v; want %q", err, word)
		}
	}
}

// TestRouteProperties checks properties of every route.
func TestRouteProperties(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 1))
	kvBytes := Polynomial(1000, 10, 0)
	for range 20000 {
		q := Request{Total: 1 + rng.IntN(5000)}
		q.Cached = rng.IntN(q.Total + 1)
		for range rng.IntN(4) {
			q.Remote = append(q.Remote, Cluster{Cached: rng.IntN(q.Total + 1), QueueSeconds: rng.Float64(), Down: rng.IntN(4) == 0})
		}
		scarce := Router{Threshold: float64(rng.IntN(3000))}
		abundant := scarce
		abundant.Abundant = true
		a, err := scarce.Route(q)
		if err != nil {
			t.Fatal(err)
		}
		b, err := abundant.Route(q)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range []Route{a, b} {
			if r.Prefix+r.Prefill != q.Total || r.Prefill < 0 || (r.Side == Remote) != (r.Cluster >= 0) || r.Cluster >= 0 && q.Remote[r.Cluster].Down {
				t.Fatalf("%+v: %+v", q, r)
			}
			if r.FetchFrom >= 0 && q.Remote[r.FetchFrom].Down {
				t.Fatalf("%+v: fetches from a cluster that is down: %+v", q, r)
			}
			egress, ingress := q.DeliverBytes(kvBytes, r)
			if egress < 0 || ingress < 0 || ingress > 0 && r.FetchFrom != FetchLocal || r.Side == Local && r.FetchFrom == FetchNone && egress+ingress != 0 {
				t.Fatalf("%+v: %+v crosses with %v, %v bytes", q, r, egress, ingress)
			}
		}
		if a.FetchFrom != FetchNone {
			t.Fatalf("scarce bandwidth, and a prefix is fetched: %+v", a)
		}
		// Fetching never increases the number of tokens that a cluster computes.
		if b.Side == a.Side && b.Prefill > a.Prefill {
			t.Fatalf("%+v: abundant bandwidth computes %d, scarce %d", q, b.Prefill, a.Prefill)
		}
	}
}

// TestCrossBytes: the state crosses the link as a whole, the rest only as far as it is missing.
func TestCrossBytes(t *testing.T) {
	s := caseStudy(t)
	state := s.KVBytes.At(0)
	if state < 150<<20 || state > 190<<20 {
		t.Errorf("the state is %v bytes; the intercept of Table 5 is about 174 MiB", state)
	}
	near(t, "all of it", CrossBytes(s.KVBytes, 0, 32000), s.KVBytes.At(32000), 1e-9)
	near(t, "a part", CrossBytes(s.KVBytes, 8000, 32000), state+s.KVBytes.At(32000)-s.KVBytes.At(8000), 1e-9)
	if got := CrossBytes(s.KVBytes, 5, 5); got != 0 {
		t.Errorf("nothing is %v bytes", got)
	}
}

// TestPoolAgainstTrie: for every chain, a pool gives the same prefix as the index of a storage
// node, with full attention alone and with recurrent layers, after any sequence of kept and
// passed-on blocks.
func TestPoolAgainstTrie(t *testing.T) {
	const blocks = 24
	for _, recurrent := range []bool{false, true} {
		for seed := range uint64(20) {
			rng := rand.New(rand.NewPCG(seed, 3))
			index, err := trie.Open(trie.Options{Dir: "index", FS: vfs.NewMem()})
			if err != nil {
				t.Fatal(err)
			}
			g := kv.Geometry{BlockTokens: 64, Groups: []kv.Group{{Kind: kv.Full, Layers: 2, TokenBytes: 8}}}
			if recurrent {
				g.Groups = append(g.Groups, kv.Group{Kind: kv.State, Layers: 6, TokenBytes: 4096})
			}
			ns, err := index.Create(kv.Namespace{Name: "hybrid", Index: kv.IndexTrie, Geometry: g})
			if err != nil {
				t.Fatal(err)
			}
			chain, err := ns.Chain()
			if err != nil {
				t.Fatal(err)
			}
			tokens := make([]kv.Token, blocks*64)
			for i := range tokens {
				tokens[i] = kv.Token(rng.Uint32N(1000))
			}
			ids, _ := chain.Append(nil, tokens)
			pool := NewPool(recurrent)
			slot := uint32(0)
			for range 40 {
				if rng.IntN(4) == 0 {
					if _, err := index.Delivered(nil, ns.ID, ns.Epoch, ids); err != nil {
						t.Fatal(err)
					}
					pool.Delivered()
				} else {
					end := 1 + rng.IntN(blocks)
					use, class := KeepPrefix, trie.Prefix
					if rng.IntN(2) == 0 {
						use, class = PassOn, trie.Transfer
					}
					pool.Put(end, use)
					put(t, index, ns, ids, end, class, recurrent, &slot)
				}
				m, err := index.Match(ns.ID, ids, trie.MatchOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if got := pool.Prefix(); got.Reusable() != m.Blocks || got.FullBlocks != m.Stored {
					t.Fatalf("recurrent %v, seed %d: the pool can reuse %d of %d blocks (%+v), the index %d of %d\n%v", recurrent, seed, got.Reusable(), got.FullBlocks, got, m.Blocks, m.Stored, index)
				}
			}
			if err := index.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// put stores the result of a prefill up to end blocks.
func put(t *testing.T, index *trie.Trie, ns kv.Namespace, ids []kv.BlockID, end int, class trie.Class, recurrent bool, slot *uint32) {
	t.Helper()
	var entries []trie.Entry
	for i := range end {
		e := trie.Entry{ID: ids[i], Class: class, Ref: kv.Ref{Extent: kv.MakeExtent(0, 0, *slot), Generation: 1}}
		if i > 0 {
			e.Parent = ids[i-1]
		}
		entries = append(entries, e)
		*slot++
	}
	if recurrent {
		entries = append(entries, trie.Entry{ID: ids[end-1], Group: 1, Class: class, Ref: kv.Ref{Extent: kv.MakeExtent(0, 0, *slot), Generation: 1}})
		*slot++
	}
	status, err := index.Put(nil, ns.ID, ns.Epoch, entries, false)
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range status {
		if s != trie.Added && s != trie.Exists {
			t.Fatalf("entry %d: %v", i, s)
		}
	}
}
