package front

import "sort"

// prefixIndex is a bounded set of block hashes with LRU eviction. The hashes of a chain are used
// from the end of the chain to its start.
//
// Invariant: the parent of each hash is in the set and was used later than the hash. So the hashes of a
// chain that are in the set are a prefix of the chain.
type prefixIndex struct {
	capacity int
	at       map[uint64]int32
	entries  []indexEntry // entries[0] is the head of the ring: next is the most, prev the least recently used entry
}

type indexEntry struct {
	hash       uint64
	prev, next int32
}

func newPrefixIndex(capacity int) *prefixIndex {
	x := &prefixIndex{capacity: capacity}
	x.clear()
	return x
}

// clear removes all hashes.
func (x *prefixIndex) clear() {
	x.at = make(map[uint64]int32)
	x.entries = make([]indexEntry, 1)
}

func (x *prefixIndex) len() int { return len(x.at) }

// match returns the number of leading hashes of the chain that are in the set.
func (x *prefixIndex) match(chain []uint64) int {
	return sort.Search(len(chain), func(i int) bool {
		_, ok := x.at[chain[i]]
		return !ok
	})
}

// touch makes the hashes of the chain the most recently used, and its first hash the most recently
// used of all. If the chain is longer than the capacity, only the start of the chain is added.
func (x *prefixIndex) touch(chain []uint64) {
	for i := min(len(chain), x.capacity) - 1; i >= 0; i-- {
		x.use(chain[i])
	}
}

func (x *prefixIndex) use(hash uint64) {
	i, ok := x.at[hash]
	switch {
	case ok:
		x.unlink(i)
	case len(x.at) < x.capacity:
		i = int32(len(x.entries))
		x.entries = append(x.entries, indexEntry{hash: hash})
	default:
		i = x.entries[0].prev
		x.unlink(i)
		delete(x.at, x.entries[i].hash)
		x.entries[i].hash = hash
	}
	x.at[hash] = i
	first := x.entries[0].next
	x.entries[i].prev, x.entries[i].next = 0, first
	x.entries[first].prev = i
	x.entries[0].next = i
}

func (x *prefixIndex) unlink(i int32) {
	e := x.entries[i]
	x.entries[e.prev].next = e.next
	x.entries[e.next].prev = e.prev
}
