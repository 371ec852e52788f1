package evict

import "slices"

// ghost remembers the fingerprints of what was evicted lately. It is a table of
// small buckets, each a FIFO of its own, so that together they forget in about
// the order in which they learned, without a link per entry.
//
//	bucket  ┌────┬────┬────┬────┬────┬────┬────┬────┐
//	(32 B)  │newest                          oldest │  0 = empty
//	        └────┴────┴────┴────┴────┴────┴────┴────┘
//
// A fingerprint is 32 bits: with g ghosts, g/2^32 of the first insertions are
// mistaken for returning ones, which costs a place in the queue and no more.
type ghost struct {
	buckets [][ghostWays]uint32
}

const ghostWays = 8

// fingerprint folds key; the result is never 0, which marks an empty place.
func fingerprint(key uint64) uint32 { return uint32(key>>32) | 1 }

func (g *ghost) bucket(fp uint32) *[ghostWays]uint32 {
	// Scaling takes the high bits, which a good hash made as good as any others.
	return &g.buckets[uint64(fp)*uint64(len(g.buckets))>>32]
}

// add remembers key, forgetting the oldest of its bucket. capacity is how many
// fingerprints to keep room for.
func (g *ghost) add(key uint64, capacity int) {
	if capacity <= 0 {
		return
	}
	g.resize(capacity)
	b := g.bucket(fingerprint(key))
	copy(b[1:], b[:ghostWays-1])
	b[0] = fingerprint(key)
}

// take reports whether key is remembered, and forgets it.
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

// resize grows in steps of a quarter: the cache is about full when evictions
// begin, so that it seldom happens.
func (g *ghost) resize(capacity int) {
	want := (capacity + ghostWays - 1) / ghostWays
	if want <= len(g.buckets) {
		return
	}
	old := g.buckets
	g.buckets = make([][ghostWays]uint32, max(want, len(old)+len(old)/4))
	for i := range old {
		// Oldest first, so that the order survives.
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
