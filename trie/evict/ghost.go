package evict

import "slices"

// ghost remembers fingerprints of recently evicted content. It is a hash table of small buckets.
// Each bucket is a FIFO queue, so the table as a whole forgets fingerprints in about the order of
// insertion, without a link per entry.
//
//	bucket  ┌────┬────┬────┬────┬────┬────┬────┬────┐
//	(32 B)  │newest                          oldest │  0 = empty
//	        └────┴────┴────┴────┴────┴────┴────┴────┘
//
// A fingerprint has 32 bits. With g fingerprints in the table, a fraction g/2^32 of new content is
// mistaken for returning content. The only effect is that such content enters the main queue.
type ghost struct {
	buckets [][ghostWays]uint32
}

const ghostWays = 8

// fingerprint folds key into 32 bits. The result is never 0, which marks an empty entry.
func fingerprint(key uint64) uint32 { return uint32(key>>32) | 1 }

func (g *ghost) bucket(fp uint32) *[ghostWays]uint32 {
	// The scaling uses the high bits of the fingerprint only. That is sufficient, because all bits
	// of a good hash are equally random.
	return &g.buckets[uint64(fp)*uint64(len(g.buckets))>>32]
}

// add adds the fingerprint of key and drops the oldest fingerprint of its bucket. capacity is the
// number of fingerprints for which the table must have room.
func (g *ghost) add(key uint64, capacity int) {
	if capacity <= 0 {
		return
	}
	g.resize(capacity)
	b := g.bucket(fingerprint(key))
	copy(b[1:], b[:ghostWays-1])
	b[0] = fingerprint(key)
}

// take reports whether the table has the fingerprint of key, and removes it.
func (g *ghost) take(key uint64) bool {
	if len(g.buckets) == 0 {
		return false
	}
	fp := fingerprint(key)
	b := g.bucket(fp)
	i := slices.Index(b[:], fp)
	if i < 0 {
		return false
	}
	copy(b[i:], b[i+1:])
	b[ghostWays-1] = 0
	return true
}

// resize makes room for capacity fingerprints. If the table is too small, it grows by at least a
// quarter. The cache is about full when evictions begin, so the capacity seldom changes afterwards.
func (g *ghost) resize(capacity int) {
	want := (capacity + ghostWays - 1) / ghostWays
	if want <= len(g.buckets) {
		return
	}
	old := g.buckets
	g.buckets = make([][ghostWays]uint32, max(want, len(old)+len(old)/4))
	for i := range old {
		// The oldest fingerprints are inserted first, so that their order is preserved.
		for _, fp := range slices.Backward(old[i][:]) {
			if fp != 0 {
				b := g.bucket(fp)
				copy(b[1:], b[:ghostWays-1])
				b[0] = fp
			}
		}
	}
}

func (g *ghost) bytes() int64 { return int64(len(g.buckets)) * ghostWays * 4 }
