package hitsim

import (
	"context"
	"math/bits"
)

// belady runs the optimal policy, which looks at future requests. It evicts the block whose next
// use is the latest. It does not store a block whose next use is later than the next uses of all
// cached blocks. For blocks of one size no policy has more hits (Belady, A study of replacement
// algorithms for virtual-storage computers, IBM Systems Journal 1966; not storing a block is the
// usual extension). The next use of an ancestor is never later than the next use of its
// descendants, so leaf-first eviction does not reduce the number of hits.
func belady(ctx context.Context, t *Trace, capacity int) (Found, error) {
	b := &beladyCache{
		t:        t,
		capacity: capacity,
		uses:     nextUses(t),
		next:     make([]uint32, len(t.parent)),
		held:     make([]bool, len(t.parent)),
		kids:     make([]uint32, len(t.parent)),
		leaves:   newBuckets(len(t.requests)+1, len(t.parent)),
	}
	var found Found
	for i, r := range t.requests {
		if i%256 == 0 && ctx.Err() != nil {
			return Found{}, context.Cause(ctx)
		}
		found.add(r, b.access(i), t.BlockTokens)
	}
	return found, nil
}

type beladyCache struct {
	t        *Trace
	capacity int
	count    int
	uses     uses
	next     []uint32 // for each cached (held) node: the request of its next use
	held     []bool
	kids     []uint32 // number of held children
	// leaves are the cached (held) nodes without cached children, by next use. The last held node
	// of the current request's path is not among them.
	leaves buckets
	path   []uint32
	wanted []uint32
}

func (b *beladyCache) access(i int) (hits int) {
	b.path = b.t.appendPath(b.path[:0], b.t.requests[i])
	b.wanted = b.uses.appendTo(b.wanted[:0], i)
	for hits < len(b.path) && b.held[b.path[hits]] {
		b.next[b.path[hits]] = b.wanted[hits]
		hits++
	}
	var tip uint32
	if hits > 0 {
		tip = b.path[hits-1]
		b.leaves.remove(tip)
	}
	for j := hits; j < len(b.path); j++ {
		if b.count == b.capacity && !b.evictAfter(b.wanted[j], tip) {
			break // the next uses of the remaining blocks of the path are not earlier
		}
		n := b.path[j]
		b.held[n], b.next[n] = true, b.wanted[j]
		b.kids[tip]++
		b.count++
		tip = n
	}
	b.offer(tip)
	return hits
}

// evictAfter evicts the leaf with the latest next use, if this next use is later than use. It
// reports whether it has evicted a leaf. tip is the last held node of the current request's path.
func (b *beladyCache) evictAfter(use, tip uint32) bool {
	use1, victim := b.leaves.max()
	if victim == 0 || use1 <= use {
		return false
	}
	b.leaves.remove(victim)
	b.held[victim] = false
	b.count--
	p := b.t.parent[victim]
	b.kids[p]--
	if p != tip {
		b.offer(p)
	}
	return true
}

// offer adds node n to leaves, if no child of n is in the cache (held).
func (b *beladyCache) offer(n uint32) {
	if n != 0 && b.kids[n] == 0 {
		b.leaves.add(n, b.next[n])
	}
}

// uses holds, for each request, the next uses of the blocks of its path. Next uses never decrease
// along a path, so they are stored as runs of equal values.
type uses struct {
	runs  []useRun
	start []int // request i has runs[start[i+1]:start[i]], from the leaf to the root
}

type useRun struct {
	use   uint32 // index of a request; the number of requests means never
	count uint32
}

func nextUses(t *Trace) uses {
	never := uint32(len(t.requests))
	last := make([]uint32, len(t.parent))
	for i := range last {
		last[i] = never
	}
	// The loop goes from the last request to the first, and along each path from its leaf to the
	// root, so the runs are in reverse order.
	var reversed []useRun
	start := make([]int, len(t.requests)+1)
	for i := len(t.requests) - 1; i >= 0; i-- {
		start[i+1] = len(reversed)
		first := len(reversed)
		r := t.requests[i]
		for n := r.leaf; n != 0; n = t.parent[n] {
			if k := len(reversed); k > first && reversed[k-1].use == last[n] {
				reversed[k-1].count++
			} else {
				reversed = append(reversed, useRun{last[n], 1})
			}
			last[n] = uint32(i)
		}
	}
	start[0] = len(reversed)
	return uses{runs: reversed, start: start}
}

// appendTo appends the next use of each block of request i's path to dst, from
// the root down.
func (u uses) appendTo(dst []uint32, i int) []uint32 {
	for k := u.start[i] - 1; k >= u.start[i+1]; k-- {
		for range u.runs[k].count {
			dst = append(dst, u.runs[k].use)
		}
	}
	return dst
}

// buckets sort nodes by a small number. Adding a node, removing a node and finding a node with the
// largest number take constant time.
type buckets struct {
	head       []uint32
	prev, next []uint32 // of each node; 0 ends the list
	at         []uint32 // bucket+1 of each node, 0: in none
	// full has a bit per bucket, set if the bucket is not empty. index has a bit per word of full,
	// set if the word is not 0, and top a bit per word of index.
	full, index, top []uint64
}

func newBuckets(count, nodes int) buckets {
	words := count/64 + 1
	return buckets{
		head: make([]uint32, count),
		prev: make([]uint32, nodes), next: make([]uint32, nodes), at: make([]uint32, nodes),
		full: make([]uint64, words), index: make([]uint64, words/64+1), top: make([]uint64, words/4096+1),
	}
}

func (b *buckets) add(n, bucket uint32) {
	h := b.head[bucket]
	b.prev[n], b.next[n], b.at[n] = 0, h, bucket+1
	if h != 0 {
		b.prev[h] = n
	}
	b.head[bucket] = n
	b.full[bucket/64] |= 1 << (bucket % 64)
	b.index[bucket/4096] |= 1 << (bucket / 64 % 64)
	b.top[bucket/262144] |= 1 << (bucket / 4096 % 64)
}

func (b *buckets) remove(n uint32) {
	if b.at[n] == 0 {
		return
	}
	bucket := b.at[n] - 1
	p, x := b.prev[n], b.next[n]
	b.at[n] = 0
	if x != 0 {
		b.prev[x] = p
	}
	if p != 0 {
		b.next[p] = x
		return
	}
	if b.head[bucket] = x; x != 0 {
		return
	}
	if b.full[bucket/64] &^= 1 << (bucket % 64); b.full[bucket/64] != 0 {
		return
	}
	if b.index[bucket/4096] &^= 1 << (bucket / 64 % 64); b.index[bucket/4096] != 0 {
		return
	}
	b.top[bucket/262144] &^= 1 << (bucket / 4096 % 64)
}

// max returns a node of the last bucket that is not empty, or node 0.
func (b *buckets) max() (bucket, n uint32) {
	for i := len(b.top) - 1; i >= 0; i-- {
		if b.top[i] == 0 {
			continue
		}
		w := i*64 + bits.Len64(b.top[i]) - 1
		w = w*64 + bits.Len64(b.index[w]) - 1
		w = w*64 + bits.Len64(b.full[w]) - 1
		return uint32(w), b.head[w]
	}
	return 0, 0
}
