package storage

import (
	"cmp"
	"container/heap"
	"slices"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// prefixesMax is the number of prefixes whose hits a node counts.
const prefixesMax = 1024

// PrefixHits has the hits of all matches in one epoch whose chains begin with the same block.
type PrefixHits struct {
	Namespace kv.NamespaceID
	Epoch     kv.Epoch
	// First is the first block of the chains.
	First kv.BlockID
	// Matches and Tokens count the matches that found blocks and the tokens that they found, since
	// the node counts this prefix.
	Matches, Tokens int64
	// Blocks is the length of the longest match.
	Blocks int
	// Last is the time of the last match, and Cut the reason why that match was not longer.
	Last time.Time
	Cut  trie.Cut
}

// prefixHits counts the hits of the prefixes with the most hits, at most max. It uses the algorithm
// Space-Saving (Metwally, Agrawal, El Abbadi, "Efficient Computation of Frequent and Top-k Elements in Data
// Streams", ICDT 2005, section 3): a prefix that is new takes the place of the prefix with the lowest rank, and its own rank begins above the
// rank of the removed prefix. So prefixHits counts each prefix that has more than 1/max of all tokens.
type prefixHits struct {
	max int

	mu    sync.Mutex
	byKey map[prefixKey]*rankedPrefix
	ranks prefixHeap
}

type prefixKey struct {
	namespace kv.NamespaceID
	epoch     kv.Epoch
	first     kv.BlockID
}

// rankedPrefix is a prefix at the index at of the heap. rank is an upper bound of all its tokens,
// including the tokens from before it was counted.
type rankedPrefix struct {
	PrefixHits
	rank int64
	at   int
}

func newPrefixHits(limit int) *prefixHits {
	return &prefixHits{max: limit, byKey: make(map[prefixKey]*rankedPrefix)}
}

// add counts a match that found blocks of a chain with the given first block.
func (p *prefixHits) add(ns kv.NamespaceID, first kv.BlockID, m trie.Match, now time.Time) {
	key := prefixKey{ns, m.Epoch, first}
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.byKey[key]
	switch {
	case e != nil:
	case len(p.ranks) < p.max:
		e = &rankedPrefix{at: len(p.ranks)}
		p.ranks = append(p.ranks, e) // the rank is 0, so the last place is right until heap.Fix
	default:
		e = p.ranks[0]
		delete(p.byKey, prefixKey{e.Namespace, e.Epoch, e.First})
		e.PrefixHits = PrefixHits{}
	}
	p.byKey[key] = e
	e.Namespace, e.Epoch, e.First = ns, m.Epoch, first
	e.Matches++
	e.Tokens += int64(m.Tokens)
	e.rank += int64(m.Tokens)
	e.Blocks = max(e.Blocks, m.Blocks)
	e.Last, e.Cut = now, m.Cut
	heap.Fix(&p.ranks, e.at)
}

// list returns the prefixes, the one with the most tokens first.
func (p *prefixHits) list() []PrefixHits {
	p.mu.Lock()
	all := make([]PrefixHits, len(p.ranks))
	for i, e := range p.ranks {
		all[i] = e.PrefixHits
	}
	p.mu.Unlock()
	slices.SortFunc(all, func(a, b PrefixHits) int {
		return cmp.Or(cmp.Compare(b.Tokens, a.Tokens), b.Last.Compare(a.Last), slices.Compare(a.First[:], b.First[:]))
	})
	return all
}

// TopPrefixes returns the prefixes of live epochs with the most tokens found, the first one with the
// most, at most 1024. They are counted since the start of the node.
func (n *Node) TopPrefixes() []PrefixHits {
	live := make(map[kv.NamespaceID]kv.Namespace)
	for _, def := range n.index.Namespaces() {
		live[def.ID] = def
	}
	return slices.DeleteFunc(n.prefixes.list(), func(h PrefixHits) bool {
		def, ok := live[h.Namespace]
		return !ok || !def.IsLive(h.Epoch)
	})
}

// prefixHeap is a heap of prefixes, the one with the lowest rank first.
type prefixHeap []*rankedPrefix

func (h prefixHeap) Len() int           { return len(h) }
func (h prefixHeap) Less(i, j int) bool { return h[i].rank < h[j].rank }
func (h prefixHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}

// Push implements heap.Interface.
func (h *prefixHeap) Push(x any) { *h = append(*h, x.(*rankedPrefix)) }

// Pop implements heap.Interface.
func (h *prefixHeap) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	*h = (*h)[:last]
	return e
}
