package placement

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/kv"
)

// fewSequences takes seconds. docs/benchmarks/cluster-scale.md has the tables of more.
const fewSequences = 8_000

// sequences is the number of sequences in TestRebalance.
var sequences = flag.Int("sequences", fewSequences, "sequences that TestRebalance places on 1,000 nodes")

// copyAt is one copy of a sequence: the index of the sequence, and the seed of the node.
type copyAt struct {
	sequence int
	seed     uint64
}

// copies returns the places of all copies of the sequences.
func copies(places []Place, ids []kv.BlockID, replicas int) map[copyAt]bool {
	at, dst := make(map[copyAt]bool, len(ids)*replicas), make([]int, 0, replicas)
	for i, id := range ids {
		dst = Homes(dst[:0], places, id, replicas)
		for _, k := range dst {
			at[copyAt{i, places[k].Seed}] = true
		}
	}
	return at
}

// TestRebalance changes a cluster of 1,000 nodes in 50 zones and counts the copies that have another place
// afterwards. The theoretical minimum is the share of the capacity that joins or leaves: to give each node its
// share, no placement moves less in the mean. A copy only moves to a node that joined, or from one that left. With
// two or more replicas, no sequence loses all copies with one zone.
func TestRebalance(t *testing.T) {
	base := cluster(1000)
	joined := func(capacity int64) []Place {
		return append(slices.Clone(base), Place{Seed: PlaceSeed("node-new"), Capacity: capacity, Zone: base[0].Zone})
	}
	zone := base[500].Zone
	changes := []struct {
		name  string
		after []Place
		// least is the theoretical minimum of the share that moves.
		least float64
	}{
		{"a node joins", joined(4 << 40), 1.0 / 1001},
		{"a node leaves", slices.Delete(slices.Clone(base), 500, 501), 1.0 / 1000},
		{"a node of double capacity joins", joined(8 << 40), 2.0 / 1002},
		{"a zone of 20 nodes is lost", slices.DeleteFunc(slices.Clone(base), func(p Place) bool { return p.Zone == zone }), 20.0 / 1000},
	}
	ids := roots(*sequences)
	var table strings.Builder
	fmt.Fprintf(&table, "| change | replicas | theoretical minimum | moved | moved / minimum |\n| --- | --- | --- | --- | --- |\n")
	for _, replicas := range []int{1, 2, 3} {
		before := copies(base, ids, replicas)
		for _, c := range changes {
			after := copies(c.after, ids, replicas)
			has := make(map[uint64]bool)
			for _, p := range c.after {
				has[p.Seed] = true
			}
			moved, strays := 0, 0
			for at := range before {
				if after[at] {
					continue
				}
				moved++
				if len(c.after) < len(base) && has[at.seed] {
					strays++ // the copy has left a node that stays
				}
			}
			for at := range after {
				if len(c.after) > len(base) && !before[at] && at.seed != PlaceSeed("node-new") {
					strays++ // the copy has come to a node that was there
				}
			}
			n := float64(len(ids) * replicas)
			share := float64(moved) / n
			fmt.Fprintf(&table, "| %s | %d | %.4f%% | %.4f%% | %.3f |\n", c.name, replicas, 100*c.least, 100*share, share/c.least)
			if lost := lostAll(before, has, len(ids)); replicas > 1 && lost > 0 {
				t.Errorf("%s, %d replicas: %d sequences have lost all copies", c.name, replicas, lost)
			}
			if strays > 0 {
				t.Errorf("%s, %d replicas: %d copies moved between nodes that stay", c.name, replicas, strays)
			}
			// The number of copies that move is binomial around the minimum. Zones change the share of a node by
			// less than a twentieth here, because a zone has a fiftieth of the capacity.
			if dev := 5*math.Sqrt(c.least*(1-c.least)/n) + 0.05*c.least*float64(replicas-1); math.Abs(share-c.least) > dev {
				t.Errorf("%s, %d replicas: %.5f of the copies moved; want %.5f ± %.5f", c.name, replicas, share, c.least, dev)
			}
		}
	}
	t.Logf("%d sequences\n%s", len(ids), &table)
}

// lostAll returns the number of sequences without a copy on a node that is left.
func lostAll(before map[copyAt]bool, has map[uint64]bool, sequences int) int {
	alive := make([]bool, sequences)
	for at := range before {
		alive[at.sequence] = alive[at.sequence] || has[at.seed]
	}
	lost := 0
	for _, ok := range alive {
		if !ok {
			lost++
		}
	}
	return lost
}

// TestRebalanceFill fills 1,000 nodes to 80 % of their capacity with sequences of uneven sizes, and compares the
// fill of the fullest node with the mean: by the homes alone, and as clients write, past overfull homes, with a list
// of members that is one hundredth of the load old. The bound of the second is loadSlack, plus the load that
// arrives between two lists and the sequences whose next place is overfull too.
func TestRebalanceFill(t *testing.T) {
	base := cluster(1000)
	double := slices.Clone(base)
	for i := 0; i < len(double); i += 10 {
		double[i].Capacity *= 2
	}
	zone := base[500].Zone
	clusters := []struct {
		name string
		all  []Place
	}{
		{"1,000 equal nodes", base},
		{"100 of 1,000 nodes have double capacity", double},
		{"a zone of 20 nodes is lost", slices.DeleteFunc(slices.Clone(base), func(p Place) bool { return p.Zone == zone })},
	}
	if *sequences <= fewSequences {
		clusters = clusters[1:] // the other two have the same, and more
	}
	var table strings.Builder
	fmt.Fprintf(&table, "| cluster | max / mean fill, homes alone | max / mean fill, past overfull homes | sequences that passed a home over |\n| --- | --- | --- | --- |\n")
	for _, c := range clusters {
		ids := roots(100 * len(c.all))
		homes := make([][]int, len(ids))
		for i, id := range ids {
			homes[i] = Homes(nil, c.all, id, 2)
		}
		alone, _ := fill(c.all, homes, false)
		bounded, passed := fill(c.all, homes, true)
		fmt.Fprintf(&table, "| %s | %.3f | %.3f | %.2f%% |\n", c.name, alone, bounded, 100*passed)
		if bound := loadSlack * 1.04; bounded > bound {
			t.Errorf("%s: the fullest node has %.3f times the mean fill; want at most %.3f", c.name, bounded, bound)
		}
		if alone <= loadSlack*1.04 {
			t.Errorf("%s: the fullest node has %.3f times the mean fill without bounded load, so the test shows nothing", c.name, alone)
		}
	}
	t.Log("\n" + table.String())
}

// fill places sequences, with the given two homes each, until the places are 80 % full in the mean. It returns the
// largest fill over the mean fill, and the share of the sequences that passed their home over.
func fill(places []Place, homes [][]int, bounded bool) (maxOverMean, passed float64) {
	const lists = 100
	places = slices.Clone(places)
	var capacity, size float64
	for _, p := range places {
		capacity += float64(p.Capacity)
	}
	sizes, r := make([]float64, len(homes)), rand.New(rand.NewPCG(1, 2))
	for i := range sizes {
		sizes[i] = r.ExpFloat64()
		size += sizes[i]
	}
	unit := 0.8 * capacity / size
	used, over, past := make([]float64, len(places)), make([]bool, len(places)), 0
	for i, at := range homes {
		if bounded && i%(len(homes)/lists) == 0 {
			for k := range places {
				places[k].Used = int64(used[k])
			}
			over = Overfull(places)
		}
		home := at[0]
		if over[home] && !over[at[1]] {
			home = at[1]
			past++
		}
		used[home] += sizes[i] * unit
	}
	for i, p := range places {
		maxOverMean = max(maxOverMean, used[i]/float64(p.Capacity)/0.8)
	}
	return maxOverMean, float64(past) / float64(len(homes))
}
