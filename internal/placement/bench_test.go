package placement

import (
	"fmt"
	"testing"
)

// cluster returns n places of 4 TiB in zones of 20.
func cluster(n int) []Place {
	out := make([]Place, n)
	for i := range out {
		out[i] = Place{Seed: PlaceSeed(fmt.Sprintf("node-%04d", i)), Capacity: 4 << 40, Zone: fmt.Sprintf("rack-%02d", i/20)}
	}
	return out
}

// BenchmarkHomes measures the choice of the places of one sequence.
func BenchmarkHomes(b *testing.B) {
	for _, members := range []int{10, 100, 1000} {
		for replicas := 1; replicas <= 3; replicas++ {
			b.Run(fmt.Sprintf("members=%d/replicas=%d", members, replicas), func(b *testing.B) {
				all, ids, dst := cluster(members), roots(256), make([]int, 0, 4)
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					dst = Homes(dst[:0], all, ids[i%len(ids)], replicas)
				}
			})
		}
	}
}
