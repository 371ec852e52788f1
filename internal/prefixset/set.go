package prefixset

import "sort"

// Set is a bounded set of block hashes with LRU eviction. The hashes of a chain are used
// from the end of the chain to its start. Its methods may not be called concurrently.
//
// Invariant: the parent of each hash is in the set and was used later than the hash. So the hashes of a
// chain that are in the set are a prefix of the chain.
type Set struct {
	capacity int
	at       map[uint64]int32
	entries  []entry // entries[0] is the head of the ring: next is the most, prev the least recently used entry
}

type entry struct {
	hash       uint64
	prev, next int32
}

// New returns an empty set of at most capacity hashes.
func New(capacity int) *Set {
	x := &Set{capacity: capacity}
	x.Clear()
	return x
}

// Clear removes all hashes.
func (x *Set) Clear() {
	x.at = make(map[uint64]int32)
	x.entries = make([]entry, 1)
}

// Len returns the number of hashes.
func (x *Set) Len() int { return len(x.at) }

// Match returns the number of leading hashes of the chain that are in the set.
func (x *Set) Match(chain []uint64) int {
	return sort.Search(len(chain), func(i int) bool {
		_, ok := x.at[chain[i]]
		return !ok
	})
}

// Touch makes the hashes of the chain the most recently used, and its first hash the most recently
// used of all. If the chain is longer than the capacity, only the start of the chain is added.
func (x *Set) Touch(chain []uint64) {
	for i := min(len(chain), x.capacity) - 1; i >= 0; i-- {
		x.use(chain[i])
	}
}

func (x *Set) use(hash uint64) {
	i, ok := x.at[hash]
	switch {
	case ok:
		x.unlink(i)
	case len(x.at) < x.capacity:
		i = int32(len(x.entries))
		x.entries = append(x.entries, entry{hash: hash})
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

func (x *Set) unlink(i int32) {
	e := x.entries[i]
	x.entries[e.prev].next = e.next
	x.entries[e.next].prev = e.prev
}
