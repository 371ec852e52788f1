package placement

import (
	"encoding/binary"
	"math"
	"slices"
	"testing"

	"github.com/penstock-kv/penstock/kv"
)

func roots(n int) []kv.BlockID {
	ids := make([]kv.BlockID, n)
	for i := range ids {
		binary.LittleEndian.PutUint64(ids[i][:], uint64(i))
	}
	return ids
}

func places(capacities ...int64) []Place {
	names := []string{"a", "b", "c", "d"}
	out := make([]Place, len(capacities))
	for i, c := range capacities {
		out[i] = Place{Seed: PlaceSeed(names[i]), Capacity: c}
	}
	return out
}

// TestHomeByCapacity: places get sequences in proportion to their capacities. The end of a place, or
// a change of its capacity, moves no sequence between two other places.
func TestHomeByCapacity(t *testing.T) {
	capacities := []int64{1 << 40, 2 << 40, 3 << 40, 2 << 40}
	before, all := places(capacities...), roots(80_000)
	count := make([]int, len(before))
	for _, id := range all {
		count[Home(before, id)]++
	}
	for i, n := range count {
		want := float64(capacities[i]) / float64(8<<40)
		if got := float64(n) / float64(len(all)); math.Abs(got-want) > 5*math.Sqrt(want*(1-want)/float64(len(all))) {
			t.Errorf("place %d has %.4f of the sequences; want %.4f", i, got, want)
		}
	}
	smaller := slices.Clone(before)
	smaller[1].Capacity = 1 << 40
	fewer := slices.Delete(slices.Clone(before), 2, 3)
	for _, id := range all {
		was := Home(before, id)
		if is := Home(smaller, id); is != was && was != 1 {
			t.Fatalf("a sequence moved from place %d to %d; only the capacity of place 1 changed", was, is)
		}
		if is := fewer[Home(fewer, id)]; is != before[was] && was != 2 {
			t.Fatalf("a sequence of place %d moved; only place 2 has left", was)
		}
	}
}

// TestHomeOfDraining: the sequences of draining places move to the places that they have when the
// draining places have left, and the draining places are known as former ones. No other sequence
// moves.
func TestHomeOfDraining(t *testing.T) {
	before := places(1<<40, 2<<40, 3<<40, 2<<40)
	draining := slices.Clone(before)
	draining[1].Draining, draining[2].Draining = true, true
	left := []Place{before[0], before[3]}
	both := 0
	for _, id := range roots(10_000) {
		was, is := Home(before, id), Home(draining, id)
		if draining[is] != left[Home(left, id)] {
			t.Fatalf("a sequence of place %d is at %d while places drain, and elsewhere when they have left", was, is)
		}
		former := Former(nil, draining, id, 1, false)
		if slices.Contains(former, was) != (was != is) {
			t.Fatalf("a sequence of place %d, which is %d now, was at %d", was, is, former)
		}
		if len(former) == 2 {
			both++
		}
	}
	if both == 0 {
		t.Error("no sequence has two former places")
	}
	for i := range draining {
		draining[i].Draining = true
	}
	for _, id := range roots(1000) {
		if Home(draining, id) != Home(before, id) {
			t.Fatal("with all places draining, a sequence is not at the place that it had")
		}
	}
}
