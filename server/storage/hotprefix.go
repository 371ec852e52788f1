package storage

import (
	"cmp"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

const (
	// hotPrefixesMax is the number of prefixes that are hot at a time, and hotBlocksMax the length of each.
	hotPrefixesMax = 16
	hotBlocksMax   = 1024
	// hotWatchedMax is the number of first blocks whose matches are counted.
	hotWatchedMax = 64
	// hotWindow is the time for which matches are counted.
	hotWindow = time.Second
	// hotHintFor is the time for which a client uses the copies after an answer that names them, unless the
	// prefix ends earlier.
	hotHintFor = 5 * time.Second
)

// HotOptions are the conditions on which a prefix is hot.
type HotOptions struct {
	// MatchesPerSecond is the number of matches per second that must find a prefix. 0: no prefix is hot.
	MatchesPerSecond float64
	// KeptFor is the time for which a prefix stays hot after the last second with so many matches.
	KeptFor time.Duration
}

// HotPrefix is a prefix that many matches find.
type HotPrefix struct {
	Namespace kv.NamespaceID
	Epoch     kv.Epoch
	IDs       []kv.BlockID
	// Until is the time at which the prefix ends to be hot, unless matches go on. After it no client reads copies.
	Until time.Time
}

// HotHint names the copies of the first blocks of a chain: the first Blocks of it are on all Replicas nodes that
// store the sequence in a namespace with this number of replicas. A client may use them for TTL.
type HotHint struct {
	Blocks, Replicas int
	TTL              time.Duration
}

// hotPrefixes finds the hot prefixes of a node from its matches. It counts the matches of each first block in windows of
// hotWindow, with the algorithm of prefixHits, and compares their chains with one chain of the window, the
// candidate. The longest prefix of the candidate that enough matches have found becomes hot. The candidate of a hot
// prefix begins with it, so the prefix stays the same while enough matches find it.
type hotPrefixes struct {
	opts HotOptions

	mu      sync.Mutex
	began   time.Time // of the window
	watched map[prefixKey]*watchedPrefix
}

// watchedPrefix has the matches of one first block.
type watchedPrefix struct {
	key prefixKey
	// matches is an upper bound of the matches in the window, and over the number by which it may be too high.
	matches, over int64
	// candidate is a chain of the window. found[n] is the number of matches in the window with exactly the first n of its blocks.
	candidate []kv.BlockID
	found     []int64
	// hot is the hot prefix; empty: none. until is its end, and placed and replicas are the blocks of it that have copies.
	hot              []kv.BlockID
	until            time.Time
	placed, replicas int
}

func newHotPrefixes(o HotOptions) *hotPrefixes {
	return &hotPrefixes{opts: o, watched: make(map[prefixKey]*watchedPrefix)}
}

// add counts a match that found the blocks ids of one epoch.
func (h *hotPrefixes) add(ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, now time.Time) {
	if h.opts.MatchesPerSecond <= 0 || len(ids) == 0 || !copyable(ns) {
		return
	}
	ids = ids[:min(len(ids), hotBlocksMax)]
	key := prefixKey{ns.ID, epoch, ids[0]}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.advance(now)
	w := h.watched[key]
	if w == nil {
		if w = h.watchLocked(key); w == nil {
			return
		}
	}
	w.matches++
	if w.candidate == nil {
		// The first match of a block makes no candidate, so that blocks with one match cost no copy of a chain.
		if w.matches-w.over < 2 && len(w.hot) == 0 || commonPrefix(w.hot, ids) < len(w.hot) {
			return
		}
		w.candidate, w.found = slices.Clone(ids), make([]int64, len(ids)+1)
	}
	w.found[commonPrefix(w.candidate, ids)]++
}

// copyable reports whether prefixes of a namespace may have copies: a chain of blocks of one group with full attention.
func copyable(ns kv.Namespace) bool {
	groups := ns.Geometry.Groups
	return ns.Index != kv.IndexFlat && len(groups) == 1 && groups[0].Kind == kv.Full
}

// watchLocked makes room for a first block, in place of the one with the fewest matches that has no hot prefix.
func (h *hotPrefixes) watchLocked(key prefixKey) *watchedPrefix {
	w := &watchedPrefix{key: key}
	if len(h.watched) >= hotWatchedMax {
		var least *watchedPrefix
		for _, x := range h.watched {
			if len(x.hot) == 0 && (least == nil || x.matches < least.matches) {
				least = x
			}
		}
		if least == nil {
			return nil
		}
		delete(h.watched, least.key)
		w.matches, w.over = least.matches, least.matches
	}
	h.watched[key] = w
	return w
}

// advance ends the window if its time is over.
func (h *hotPrefixes) advance(now time.Time) {
	if h.began.IsZero() {
		h.began = now
	}
	took := now.Sub(h.began)
	if took < hotWindow {
		return
	}
	h.began = now
	need := h.opts.MatchesPerSecond * took.Seconds()
	hot := 0
	for key, w := range h.watched {
		if n := w.enough(need); n > 0 && n >= len(w.hot) {
			if n > len(w.hot) {
				w.hot = slices.Clone(w.candidate[:n])
			}
			w.until = now.Add(h.opts.KeptFor)
		}
		if !now.Before(w.until) {
			delete(h.watched, key)
			continue
		}
		hot++
		w.matches, w.over, w.candidate, w.found = 0, 0, nil, nil
	}
	if hot <= hotPrefixesMax {
		return
	}
	// The newest prefixes are the ones without copies.
	all := make([]*watchedPrefix, 0, hot)
	for _, w := range h.watched {
		all = append(all, w)
	}
	slices.SortFunc(all, func(a, b *watchedPrefix) int { return cmp.Or(b.placed-a.placed, b.until.Compare(a.until)) })
	for _, w := range all[hotPrefixesMax:] {
		delete(h.watched, w.key)
	}
}

// enough returns the length of the longest prefix of the candidate that need matches have found.
func (w *watchedPrefix) enough(need float64) int {
	sum := int64(0)
	for n := len(w.found) - 1; n > 0; n-- {
		if sum += w.found[n]; float64(sum) >= need {
			return n
		}
	}
	return 0
}

// commonPrefix returns the number of equal blocks at the beginning of two chains. Equal ids have equal ancestors.
func commonPrefix(a, b []kv.BlockID) int {
	return sort.Search(min(len(a), len(b)), func(i int) bool { return a[i] != b[i] })
}

// list returns the hot prefixes.
func (h *hotPrefixes) list(now time.Time) (all []HotPrefix) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.advance(now)
	for key, w := range h.watched {
		if len(w.hot) > 0 && now.Before(w.until) {
			all = append(all, HotPrefix{Namespace: key.namespace, Epoch: key.epoch, IDs: w.hot, Until: w.until})
		}
	}
	return all
}

// place records that the first blocks of a hot prefix are on all nodes of so many replicas. 0 blocks: there are no copies.
func (h *hotPrefixes) place(p HotPrefix, blocks, replicas int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if w := h.watched[prefixKey{p.Namespace, p.Epoch, p.IDs[0]}]; w != nil && commonPrefix(w.hot, p.IDs) >= blocks {
		w.placed, w.replicas = blocks, replicas
	}
}

// hint returns the copies of the first of ids.
func (h *hotPrefixes) hint(ns kv.NamespaceID, epoch kv.Epoch, ids []kv.BlockID, now time.Time) (HotHint, bool) {
	if h.opts.MatchesPerSecond <= 0 || len(ids) == 0 {
		return HotHint{}, false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	w := h.watched[prefixKey{ns, epoch, ids[0]}]
	if w == nil || w.placed == 0 || !now.Before(w.until) {
		return HotHint{}, false
	}
	return HotHint{Blocks: commonPrefix(w.hot[:w.placed], ids), Replicas: w.replicas, TTL: min(hotHintFor, w.until.Sub(now))}, true
}

// countHot counts a match for the hot prefixes.
func (n *Node) countHot(ns kv.Namespace, req *MatchRequest, m trie.Match, now time.Time) {
	if !req.Mix && !req.NoTouch {
		n.hotPrefixes.add(ns, m.Epoch, req.IDs[:m.Blocks], now)
	}
}

// HotPrefixes returns the prefixes that are hot, at most 16, in no order.
func (n *Node) HotPrefixes() []HotPrefix { return n.hotPrefixes.list(n.opts.Now()) }

// PlaceHot records that the first blocks of a hot prefix are on all nodes that store the sequence in a namespace with the
// given number of replicas. With 0 blocks there are no copies.
func (n *Node) PlaceHot(p HotPrefix, blocks, replicas int) { n.hotPrefixes.place(p, blocks, replicas) }

// HotHint returns the copies of the first blocks of a chain, as far as PlaceHot has recorded them.
func (n *Node) HotHint(ns kv.NamespaceID, epoch kv.Epoch, ids []kv.BlockID) (HotHint, bool) {
	return n.hotPrefixes.hint(ns, epoch, ids, n.opts.Now())
}

// CountHotCopies counts pieces of hot prefixes that were copied to other nodes, and their payload.
func (n *Node) CountHotCopies(pieces int, payload int64) {
	n.opts.Metrics.HotCopiedBlocks.Add(float64(pieces))
	n.opts.Metrics.HotCopiedBytes.Add(float64(payload))
}

// SetHotCopies sets the number of prefixes that have copies on other nodes, and HotCopies returns it.
func (n *Node) SetHotCopies(prefixes int) { n.hotCopies.Store(int64(prefixes)) }

// HotCopies returns the number that SetHotCopies has set.
func (n *Node) HotCopies() int64 { return n.hotCopies.Load() }
