// Package placement chooses the nodes of a cluster that store a sequence of blocks, by the names, capacities,
// zones and fills of the nodes. Clients and the mover of a draining node use it, so they choose alike. It
// is pure, and has no locks.
//
//	list of members ─► []Place ─┬─ Home ────► the node for new blocks
//	id of the first block ──────┼─ Homes ───► the nodes of all replicas
//	                            ├─ Overfull ► the nodes that new sequences pass over
//	                            ├─ Former ──► draining nodes that may still have the sequence
//	                            └─ Previous ► its homes before other nodes joined
//
// docs/cluster.md has the rules for users.
package placement

import (
	"math"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/kv"
)

// Place is a node of a cluster, as far as the choice of a node for a sequence depends on it.
type Place struct {
	// Seed is the hash of the node's name (PlaceSeed).
	Seed uint64
	// Capacity is the size of the node's store in bytes, at least 1.
	Capacity int64
	// Draining: the node gets no new sequences.
	Draining bool
	// New: the node has joined, and sequences whose home it is may still be at their Previous homes.
	New bool
	// Zone is the failure domain of the node. Used is the part of Capacity that is in use, in bytes.
	Zone string
	Used int64
}

// PlaceSeed returns Place.Seed of a node's name.
func PlaceSeed(name string) uint64 { return xxh3.HashString(name) }

// score returns the score of the place for a sequence; the lowest one wins. A node gets sequences
// in proportion to its capacity (weighted rendezvous hashing: the logarithmic method of Schindelhauer
// and Schomaker, "Weighted Distributed Hash Tables", SPAA 2005).
func (p *Place) score(root *kv.BlockID) float64 {
	score, _ := p.scoreUpTo(root, math.Inf(1))
	return score
}

// scoreUpTo returns the score of the place, or false if the score is certainly above limit.
func (p *Place) scoreUpTo(root *kv.BlockID, limit float64) (float64, bool) {
	// u is uniform in (0, 1), so -ln(u)/capacity is exponential with the rate capacity. The smallest of
	// several is that of a place with a probability in proportion to the place's capacity.
	u := (float64(xxh3.HashSeed(root[:], p.Seed)>>11) + 0.5) / (1 << 53)
	// -ln(u) is at least 1-u. With many places nearly all are excluded here, without the logarithm. The
	// margin is above the rounding errors of both sides.
	const margin = 1 + 1e-9
	if 1-u > limit*float64(p.Capacity)*margin {
		return 0, false
	}
	return -math.Log(u) / float64(p.Capacity), true
}

// Home returns the index of the place that stores a new sequence, whose first block is root: the best
// place that is not draining or, if all are draining, the best of all. places is not empty. Among
// equal scores the first place wins, so all callers must have the places in the same order.
//
// When a place is added, some sequences move to it, and all others stay. When a place is removed, or
// begins to drain, only its own sequences move.
func Home(places []Place, root kv.BlockID) int {
	var home [1]int
	return Homes(home[:0], places, root, 1)[0]
}

// Homes appends to dst the indexes of the n places at which a sequence is stored n times; fewer if there
// are fewer places. The first is Home. Each other one is the place with the best score in a zone that
// has none yet or, if all zones have one, the best of the remaining places. Homes of n places are the
// first of those of more places. Draining places count only if all places drain.
//
// When a place is added or removed, at most one of the homes of a sequence changes.
func Homes(dst []int, places []Place, root kv.BlockID, n int) []int {
	from := len(dst)
	if dst = appendHomes(dst, places, &root, n, false); len(dst) == from {
		dst = appendHomes(dst, places, &root, n, true)
	}
	return dst
}

// scored is a place, by its index, with its score for a sequence.
type scored struct {
	at    int
	score float64
}

// shortlist has up to n places, the best first.
type shortlist []scored

// limit returns the score below which a place gets into the list.
func (l shortlist) limit(n int) float64 {
	if len(l) < n {
		return math.Inf(1)
	}
	return l[n-1].score
}

// with returns the list with one more place, without the one that is then too many.
func (l shortlist) with(s scored, n int) shortlist {
	if len(l) == n {
		l = l[:n-1]
	}
	k := len(l)
	l = append(l, s)
	for ; k > 0 && s.score < l[k-1].score; k-- {
		l[k] = l[k-1]
	}
	l[k] = s
	return l
}

// appendHomes is Homes among the places that do not drain or, with draining, among all.
func appendHomes(dst []int, places []Place, root *kv.BlockID, n int, draining bool) []int {
	// all has the n best places, and apart the best place of each of the n best zones.
	var room [2][kv.MaxReplicas + 1]scored
	all, apart := shortlist(room[0][:0]), shortlist(room[1][:0])
	zoneOf := func(p *Place) int {
		return slices.IndexFunc(apart, func(s scored) bool { return places[s.at].Zone == p.Zone })
	}
	for i := range places {
		p := &places[i]
		if p.Draining && !draining {
			continue
		}
		limit := apart.limit(n)
		if len(apart) < n {
			if k := zoneOf(p); k >= 0 {
				limit = max(apart[k].score, all.limit(n))
			}
		}
		score, ok := p.scoreUpTo(root, limit)
		if !ok {
			continue
		}
		if score < all.limit(n) {
			all = all.with(scored{i, score}, n)
		}
		if n == 1 {
			apart = all
			continue
		}
		switch k := zoneOf(p); {
		case k < 0 && score < apart.limit(n):
			apart = apart.with(scored{i, score}, n)
		case k >= 0 && score < apart[k].score:
			apart = slices.Delete(apart, k, k+1).with(scored{i, score}, n)
		}
	}
	from := len(dst)
	for _, s := range apart {
		dst = append(dst, s.at)
	}
	for _, s := range all {
		if len(dst)-from < n && !slices.Contains(dst[from:], s.at) {
			dst = append(dst, s.at)
		}
	}
	return dst
}

// Former appends to dst the indexes of the draining places that may have a sequence that is stored n times,
// because they were among its Homes before they began to drain, whichever other places drained then. With
// spare, a place also counts if the sequence may have passed over one of its homes (Filling) to it.
func Former(dst []int, places []Place, root kv.BlockID, n int, spare bool) []int {
	if !slices.ContainsFunc(places, func(p Place) bool { return p.Draining }) {
		return dst
	}
	// A place keeps its rank, or gets a better one, when others are removed. So a place that was a home is
	// one if it is the only draining place that counts.
	homes, then := Homes(nil, places, root, n), slices.Clone(places)
	for i, p := range places {
		if !p.Draining || slices.Contains(homes, i) {
			continue
		}
		then[i].Draining = false
		order := Homes(nil, then, root, n+1)
		then[i].Draining = true
		rank := slices.Index(order, i)
		if rank >= 0 && rank < n || rank == n && spare && passedOver(places, order) {
			dst = append(dst, i)
		}
	}
	return dst
}

// Previous computes the homes of a sequence that is stored n times as if there were no New places. It appends
// to dst each of these homes that is no home among all places. With spare, the next place also counts if the sequence
// may have passed over a home to it.
func Previous(dst []int, places []Place, root kv.BlockID, n int, spare bool) []int {
	if !slices.ContainsFunc(places, func(p Place) bool { return p.New }) {
		return dst
	}
	homes, then := Homes(nil, places, root, n), slices.Clone(places)
	for i := range then {
		then[i].Draining = then[i].Draining || then[i].New
	}
	if !slices.ContainsFunc(then, func(p Place) bool { return !p.Draining }) {
		return dst
	}
	was := Homes(nil, then, root, n+1)
	for rank, i := range was {
		if !slices.Contains(homes, i) && (rank < n || spare && passedOver(places, was)) {
			dst = append(dst, i)
		}
	}
	return dst
}

// passedOver reports whether a sequence may have passed over a place before the last one of order: one of
// the others in order, or a draining one.
func passedOver(places []Place, order []int) bool {
	last := len(order) - 1
	for i, p := range places {
		if p.Filling() && i != order[last] && (p.Draining || slices.Contains(order[:last], i)) {
			return true
		}
	}
	return false
}

const (
	// loadSlack is the factor by which the fill of a place may exceed the mean of all places before new
	// sequences pass it over: 1+ε of consistent hashing with bounded loads (Mirrokni, Thorup and
	// Zadimoghaddam, SODA 2018), with the same value as the gateway's load_factor.
	loadSlack = 1.25
	// looseFill is the fill up to which a place is never passed over, because it evicts nothing.
	looseFill = 0.5
)

// Filling reports whether the fill of the place is in the range in which new sequences may pass it
// over. Then a sequence whose home it is may be at the next of its Homes.
func (p Place) Filling() bool { return float64(p.Used) > looseFill*float64(p.Capacity) }

// Overfull reports for each place whether new sequences pass it over: the place is Filling, and its fill exceeds
// loadSlack times the fill of all places together.
func Overfull(places []Place) []bool {
	var used, capacity float64
	for _, p := range places {
		used, capacity = used+float64(p.Used), capacity+float64(p.Capacity)
	}
	over := make([]bool, len(places))
	for i, p := range places {
		over[i] = p.Filling() && float64(p.Used)*capacity > loadSlack*used*float64(p.Capacity)
	}
	return over
}
