package kv

import (
	"math"

	"github.com/zeebo/xxh3"
)

// Place is a node of a cluster, as far as the choice of a node for a sequence depends on it.
type Place struct {
	// Seed is the hash of the node's name (PlaceSeed).
	Seed uint64
	// Capacity is the size of the node's store in bytes, at least 1.
	Capacity int64
	// Draining: the node gets no new sequences.
	Draining bool
}

// PlaceSeed returns Place.Seed of a node's name.
func PlaceSeed(name string) uint64 { return xxh3.HashString(name) }

// score returns the score of the place for a sequence; the lowest one wins. A node gets sequences
// in proportion to its capacity (weighted rendezvous hashing: the logarithmic method of Schindelhauer
// and Schomaker, "Weighted Distributed Hash Tables", SPAA 2005).
func (p Place) score(root BlockID) float64 {
	// u is uniform in (0, 1), so -ln(u)/capacity is exponential with the rate capacity. The smallest of
	// several is that of a place with a probability in proportion to the place's capacity.
	u := (float64(xxh3.HashSeed(root[:], p.Seed)>>11) + 0.5) / (1 << 53)
	return -math.Log(u) / float64(p.Capacity)
}

// Home returns the index of the place that stores a new sequence, whose first block is root: the best
// place that is not draining or, if all are draining, the best of all. places is not empty. Among
// equal scores the first place wins, so all callers must have the places in the same order.
//
// When a place is added, some sequences move to it, and all others stay. When a place is removed, or
// begins to drain, only its own sequences move.
func Home(places []Place, root BlockID) int {
	home, any := -1, 0
	var homeScore, anyScore float64
	for i, p := range places {
		score := p.score(root)
		if i == 0 || score < anyScore {
			any, anyScore = i, score
		}
		if !p.Draining && (home < 0 || score < homeScore) {
			home, homeScore = i, score
		}
	}
	if home < 0 {
		return any
	}
	return home
}

// Former appends to dst the indexes of the draining places that stored the sequence before they began
// to drain: those with a better score than its home.
func Former(dst []int, places []Place, root BlockID) []int {
	home := Home(places, root)
	score := places[home].score(root)
	for i, p := range places {
		if i == home || !p.Draining {
			continue
		}
		if s := p.score(root); s < score || s == score && i < home {
			dst = append(dst, i)
		}
	}
	return dst
}
