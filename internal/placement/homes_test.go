package placement

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"
	"pgregory.net/rapid"

	"github.com/penstock-kv/penstock/kv"
)

// drawPlaces returns places with names of their own, in up to four zones.
func drawPlaces(t *rapid.T, atLeast int) []Place {
	n := rapid.IntRange(atLeast, 12).Draw(t, "places")
	out := make([]Place, n)
	for i := range out {
		capacity := rapid.Int64Range(1, 1<<40).Draw(t, "capacity")
		out[i] = Place{
			Seed: PlaceSeed(fmt.Sprint("node", i)), Capacity: capacity, Zone: fmt.Sprint(rapid.IntRange(0, 3).Draw(t, "zone")),
			Used: rapid.Int64Range(0, capacity).Draw(t, "used"), Draining: rapid.IntRange(0, 4).Draw(t, "drains") == 0,
		}
	}
	return out
}

func drawRoot(t *rapid.T) (id kv.BlockID) {
	copy(id[:], rapid.SliceOfN(rapid.Byte(), kv.BlockIDSize, kv.BlockIDSize).Draw(t, "root"))
	return id
}

// seedsOf returns the identities of the homes of a sequence.
func seedsOf(places []Place, root kv.BlockID, n int) (seeds []uint64) {
	for _, i := range Homes(nil, places, root, n) {
		seeds = append(seeds, places[i].Seed)
	}
	return seeds
}

// TestHomes: the homes of a sequence are different places that do not drain, the first is Home, and as
// many as possible are in different zones. The places of n copies are the first n places of more copies. The
// order of the list does not matter.
func TestHomes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all, root := drawPlaces(t, 1), drawRoot(t)
		n := rapid.IntRange(1, kv.MaxReplicas+1).Draw(t, "copies")
		homes := Homes(nil, all, root, n)
		if homes[0] != Home(all, root) {
			t.Fatalf("the homes are %d; Home is %d", homes, Home(all, root))
		}
		if more := Homes(nil, all, root, n+1); !slices.Equal(more[:len(homes)], homes) {
			t.Fatalf("%d of %d copies, %d of one more", homes, n, more)
		}
		serving, zones := 0, make(map[string]bool)
		for _, p := range all {
			if !p.Draining {
				serving++
				zones[p.Zone] = true
			}
		}
		if serving == 0 {
			return
		}
		if len(homes) != min(n, serving) {
			t.Fatalf("%d homes of %d copies on %d places", len(homes), n, serving)
		}
		used, seen := make(map[string]bool), make(map[int]bool)
		for _, i := range homes {
			if all[i].Draining || seen[i] {
				t.Fatalf("place %d drains or occurs twice in %d", i, homes)
			}
			used[all[i].Zone], seen[i] = true, true
		}
		if len(used) != min(len(homes), len(zones)) {
			t.Fatalf("%d copies are in %d of %d zones", len(homes), len(used), len(zones))
		}
		turned := slices.Clone(all)
		rand.New(rand.NewPCG(1, uint64(n))).Shuffle(len(turned), func(i, j int) { turned[i], turned[j] = turned[j], turned[i] })
		if was, is := seedsOf(all, root, n), seedsOf(turned, root, n); !slices.Equal(was, is) {
			t.Fatalf("the homes depend on the order of the places: %x and %x", was, is)
		}
	})
}

// TestHomesOfModel: the homes are the places that the rule of docs/cluster.md gives, applied to the scores of all places.
func TestHomesOfModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all, root := drawPlaces(t, 1), drawRoot(t)
		n := rapid.IntRange(1, kv.MaxReplicas+1).Draw(t, "copies")
		counts := slices.ContainsFunc(all, func(p Place) bool { return !p.Draining })
		var order, want []int // order has the places that count, the best first
		for i, p := range all {
			if !p.Draining || !counts {
				order = append(order, i)
			}
		}
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(modelScore(all[a], root), modelScore(all[b], root)) })
		zones := make(map[string]bool)
		for len(want) < n && len(order) > 0 {
			k := max(0, slices.IndexFunc(order, func(i int) bool { return !zones[all[i].Zone] }))
			zones[all[order[k]].Zone] = true
			want, order = append(want, order[k]), slices.Delete(order, k, k+1)
		}
		if got := Homes(nil, all, root, n); !slices.Equal(got, want) {
			t.Fatalf("homes %d; by the scores of all places %d", got, want)
		}
	})
}

// modelScore is the score of a place as docs/cluster.md has it.
func modelScore(p Place, root kv.BlockID) float64 {
	return -math.Log((float64(xxh3.HashSeed(root[:], p.Seed)>>11)+0.5)/(1<<53)) / float64(p.Capacity)
}

// TestHomesAllocateNothing: choosing the places of a sequence among 1,000 allocates no memory.
func TestHomesAllocateNothing(t *testing.T) {
	all, id, dst := cluster(1000), roots(1)[0], make([]int, 0, kv.MaxReplicas)
	if n := testing.AllocsPerRun(10, func() { dst = Homes(dst[:0], all, id, 3) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestHomeLogarithms: among 1,000 places of equal capacity the logarithm is computed for the few whose hash may
// be the best so far, on average for at most 1+ln(1000) places and the places between 1-u and -ln(u).
func TestHomeLogarithms(t *testing.T) {
	all, ids, computed := cluster(1000), roots(200), 0
	for _, id := range ids {
		limit := math.Inf(1)
		for i := range all {
			if score, ok := all[i].scoreUpTo(&id, limit); ok {
				computed++
				limit = min(limit, score)
			}
		}
	}
	if mean := float64(computed) / float64(len(ids)); mean > 12 {
		t.Errorf("%.1f logarithms for a sequence; want at most 12", mean)
	}
}

// TestHomesStable: a place that joins replaces at most one home of a sequence, and only by itself. So a
// place that leaves is replaced by at most one other.
func TestHomesStable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		after := drawPlaces(t, 2)
		for i := range after {
			after[i].Draining = false
		}
		before, root := after[:len(after)-1], drawRoot(t)
		n := rapid.IntRange(1, kv.MaxReplicas).Draw(t, "copies")
		was, is := seedsOf(before, root, n), seedsOf(after, root, n)
		joined := after[len(after)-1].Seed
		gained := slices.DeleteFunc(slices.Clone(is), func(s uint64) bool { return slices.Contains(was, s) })
		lost := slices.DeleteFunc(slices.Clone(was), func(s uint64) bool { return slices.Contains(is, s) })
		if len(gained) > 1 || len(gained) == 1 && gained[0] != joined || len(lost) > 1 {
			t.Fatalf("the homes %x became %x when %x joined", was, is, joined)
		}
	})
}

// TestFormer: a draining place that was a home of a sequence is a home or a former one, whichever other
// places drained then. So is one that had the sequence because it passed over a home that is more than
// half full. Without replicas and fill, the former places are the places with a better score than the home.
func TestFormer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		is, root := drawPlaces(t, 1), drawRoot(t)
		was := slices.Clone(is)
		for i := range was {
			was[i].Draining = is[i].Draining && rapid.Bool().Draw(t, "drained")
		}
		n := rapid.IntRange(1, kv.MaxReplicas).Draw(t, "copies")
		now, keys, chains := Homes(nil, is, root, n), Former(nil, is, root, n, false), Former(nil, is, root, n, true)
		before := Homes(nil, was, root, n+1)
		copies := before[:min(n, len(before))]
		for _, i := range copies {
			if !slices.Contains(now, i) && (!slices.Contains(keys, i) || !slices.Contains(chains, i)) {
				t.Fatalf("the homes %d became %d; the former ones of keys are %d, of chains %d", copies, now, keys, chains)
			}
		}
		filling := slices.ContainsFunc(copies, func(i int) bool { return was[i].Filling() })
		if i := before[len(before)-1]; len(before) > n && filling && is[i].Draining && !slices.Contains(now, i) && !slices.Contains(chains, i) {
			t.Fatalf("a sequence that passed a home over is at %d; it is sought at %d and %d", i, now, chains)
		}
		for _, i := range chains {
			if !is[i].Draining || slices.Contains(now, i) {
				t.Fatalf("place %d is former; the homes are %d", i, now)
			}
		}
		if serving := slices.ContainsFunc(is, func(p Place) bool { return !p.Draining }); n == 1 && serving {
			for i, p := range is {
				if better := p.Draining && p.score(&root) < is[now[0]].score(&root); slices.Contains(keys, i) != better {
					t.Fatalf("place %d has a better score than the home: %t; former are %d", i, better, keys)
				}
			}
		}
	})
}

// TestHomesShare: a place gets its share of second copies: a place of equal capacity that joins two
// others becomes one of the two homes of two thirds of the sequences.
func TestHomesShare(t *testing.T) {
	all, count := places(1<<40, 1<<40, 1<<40), make([]int, 3)
	const sequences = 30_000
	for _, id := range roots(sequences) {
		for _, i := range Homes(nil, all, id, 2) {
			count[i]++
		}
	}
	for i, n := range count {
		if n < sequences*64/100 || n > sequences*69/100 {
			t.Errorf("place %d has %d copies of %d sequences", i, n, sequences)
		}
	}
}

// TestOverfull: a place is passed over only if it is more than half full and fuller than 1.25 times the
// mean. One place at least is not passed over.
func TestOverfull(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := drawPlaces(t, 1)
		over := Overfull(all)
		var used, capacity float64
		for _, p := range all {
			used, capacity = used+float64(p.Used), capacity+float64(p.Capacity)
		}
		for i, p := range all {
			fill := float64(p.Used) / float64(p.Capacity)
			if bound := max(0.5, 1.25*used/capacity); over[i] != (fill > bound) && (fill < bound*0.999 || fill > bound*1.001) {
				t.Fatalf("place %d with fill %.3f, bound %.3f: %t", i, fill, bound, over[i])
			}
		}
		if !slices.Contains(over, false) {
			t.Fatal("all places are passed over")
		}
	})
}

// TestPrevious: the homes of a sequence before new places joined are homes or previous ones, and so is the place
// to which the sequence passed over a home. Without new places there are no previous ones.
func TestPrevious(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		is, root := drawPlaces(t, 2), drawRoot(t)
		n := rapid.IntRange(1, kv.MaxReplicas).Draw(t, "copies")
		if got := Previous(nil, is, root, n, true); len(got) > 0 {
			t.Fatalf("without new places %d are previous", got)
		}
		var was []Place
		var index []int // of was in is
		for i := range is {
			if is[i].New = i > 0 && rapid.Bool().Draw(t, "new"); !is[i].New {
				was, index = append(was, is[i]), append(index, i)
			}
		}
		if len(was) == len(is) || !slices.ContainsFunc(was, func(p Place) bool { return !p.Draining }) {
			return
		}
		now, keys, chains := Homes(nil, is, root, n), Previous(nil, is, root, n, false), Previous(nil, is, root, n, true)
		before := Homes(nil, was, root, n+1)
		for rank, k := range before {
			i := index[k]
			if rank < n && !slices.Contains(now, i) && (!slices.Contains(keys, i) || !slices.Contains(chains, i)) {
				t.Fatalf("place %d was a home of %d; the homes are %d, the previous ones of keys %d and of chains %d", i, before, now, keys, chains)
			}
		}
		filling := slices.ContainsFunc(before[:min(n, len(before))], func(k int) bool { return was[k].Filling() })
		if last := index[before[len(before)-1]]; len(before) > n && filling && !slices.Contains(now, last) && !slices.Contains(chains, last) {
			t.Fatalf("a sequence that passed a home over is at %d; it is sought at %d and %d", last, now, chains)
		}
		for _, i := range chains {
			if is[i].New || slices.Contains(now, i) {
				t.Fatalf("place %d is previous; the homes are %d", i, now)
			}
		}
	})
}
