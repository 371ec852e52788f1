package batch

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// TestVectors compares with an independent reference implementation.
func TestVectors(t *testing.T) {
	type vector struct {
		Items       [][2]int
		Quota, A, B float64
		Packed      [][2]int
	}
	for i, v := range testkit.Vectors[vector](t, "../testdata/vectors.json", "dualpath.pack") {
		var queue []Item
		for _, it := range v.Items {
			queue = append(queue, Item{it[0], it[1]})
		}
		var want []Chunk
		for _, c := range v.Packed {
			want = append(want, Chunk{c[0], c[1]})
		}
		got := Pack(queue, time.Duration(v.Quota*float64(time.Second)), Model{v.A, v.B}, nil)
		if !slices.Equal(got, want) {
			t.Errorf("vector %d: packed %v, want %v", i, got, want)
		}
	}
}

// naive packs token by token.
func naive(queue []Item, quota time.Duration, m Model) []Chunk {
	var out []Chunk
	left := quota.Seconds()
	for i, it := range queue {
		n := 0
		for n < it.Compute && m.Seconds(it.Cached, n+1) <= left {
			n++
		}
		if n == it.Compute {
			out = append(out, Chunk{i, n})
			left -= m.Seconds(it.Cached, n)
			continue
		}
		if n > 0 {
			out = append(out, Chunk{i, n})
		}
		break
	}
	return out
}

func FuzzPack(f *testing.F) {
	f.Add(uint64(1), uint16(300))
	f.Add(uint64(2), uint16(0))
	f.Fuzz(func(t *testing.T, seed uint64, ms uint16) {
		rng := rand.New(rand.NewPCG(seed, 1))
		queue := make([]Item, rng.IntN(20))
		for i := range queue {
			queue[i] = Item{rng.IntN(100_000), rng.IntN(4000)}
		}
		m := Model{rng.Float64() * 2e-5, rng.Float64() * 4e-9}
		quota := time.Duration(ms) * time.Millisecond
		got, want := Pack(queue, quota, m, nil), naive(queue, quota, m)
		if !slices.Equal(got, want) {
			t.Fatalf("packed %v, want %v", got, want)
		}
	})
}

// TestFit: Fit finds the constants from samples of a known model, and from noisy samples within the
// bounds of the noise.
func TestFit(t *testing.T) {
	want := Model{1.2e-5, 2.5e-9}
	rng := rand.New(rand.NewPCG(1, 2))
	for _, noise := range []float64{0, 0.05} {
		var samples []Sample
		for _, cached := range []int{0, 4096, 16384, 65536} {
			for _, n := range []int{64, 512, 4096} {
				s := want.Seconds(cached, n) * (1 + noise*(2*rng.Float64()-1))
				samples = append(samples, Sample{cached, n, time.Duration(s * float64(time.Second))})
			}
		}
		got, err := Fit(samples)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []int{0, 30_000} {
			if r := got.Seconds(c, 1000) / want.Seconds(c, 1000); math.Abs(r-1) > noise+1e-3 {
				t.Errorf("noise %v: %+v predicts %.3f of the truth after %d cached tokens", noise, got, r, c)
			}
		}
	}
}

func TestFitRefuses(t *testing.T) {
	s := Sample{0, 100, time.Millisecond}
	for name, samples := range map[string][]Sample{
		"none": nil, "one": {s}, "alike": {s, s, s}, "no time": {s, {10, 100, 0}}, "no tokens": {s, {10, 0, time.Second}},
	} {
		if m, err := Fit(samples); err == nil {
			t.Errorf("%s: fitted %+v", name, m)
		}
	}
}

// BenchmarkPack measures the decision for one forward pass.
func BenchmarkPack(b *testing.B) {
	for _, n := range []int{8, 64, 512} {
		b.Run(fmt.Sprintf("queue=%d", n), func(b *testing.B) {
			queue := make([]Item, n)
			for i := range queue {
				queue[i] = Item{32_721, 429}
			}
			var into []Chunk
			b.ReportAllocs()
			for b.Loop() {
				into = Pack(queue, DefaultQuota, Model{1e-5, 2e-9}, into)
			}
		})
	}
}
