package storage

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// TestPrefixHits: among many prefixes with few hits, the prefixes with more than 1/max of all tokens are
// counted, and no count exceeds the true one. The table does not grow.
func TestPrefixHits(t *testing.T) {
	const limit, hot = 64, 10
	random := rand.New(rand.NewPCG(1, 2))
	p := newPrefixHits(limit)
	truth := make(map[kv.BlockID]int64)
	var sum int64
	for i := range 50_000 {
		var first kv.BlockID
		first[0], first[1], first[2] = byte(i), byte(i>>8), byte(i>>16)|0x80
		if random.IntN(2) == 0 {
			first = kv.BlockID{1, byte(random.IntN(hot))}
		}
		m := trie.Match{Epoch: 3, Blocks: 1 + random.IntN(9), Cut: trie.CutAbsent}
		m.Tokens = 16 * m.Blocks
		truth[first] += int64(m.Tokens)
		sum += int64(m.Tokens)
		p.add(7, first, m, time.Unix(int64(i), 0))
	}
	all := p.list()
	if len(all) != limit || len(p.byKey) != limit {
		t.Fatalf("%d and %d prefixes; want %d", len(all), len(p.byKey), limit)
	}
	counted := make(map[kv.BlockID]PrefixHits)
	for i, h := range all {
		counted[h.First] = h
		if h.Tokens > truth[h.First] || i > 0 && h.Tokens > all[i-1].Tokens {
			t.Errorf("prefix %v at %d has %d tokens; it found %d, and the one before it has %d", h.First, i, h.Tokens, truth[h.First], all[max(i-1, 0)].Tokens)
		}
	}
	for i := range hot {
		first := kv.BlockID{1, byte(i)}
		h := counted[first]
		if truth[first] <= sum/limit {
			t.Fatalf("prefix %d is not hot", i)
		}
		if h.Tokens < truth[first]*9/10 || h.Blocks != 9 || h.Cut != trie.CutAbsent || h.Namespace != 7 || h.Epoch != 3 || h.Last.Unix() < 40_000 || h.Matches == 0 {
			t.Errorf("hot prefix %d: %+v; it found %d tokens", i, h, truth[first])
		}
	}
}
