package client

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/internal/spread"
)

// TestFirstBad: the first wrong layer is found, for any number of helpers.
func TestFirstBad(t *testing.T) {
	const layerBytes, layers = 128 << 10, 40 // 5 MiB: five shares
	mem := make([]byte, layers*layerBytes)
	rng := rand.New(rand.NewPCG(1, 1))
	for i := 0; i < len(mem); i += 8 {
		binary.LittleEndian.PutUint64(mem[i:], rng.Uint64())
	}
	sums := make([]uint64, layers)
	for k := range sums {
		sums[k] = xxh3.Hash(mem[k*layerBytes:][:layerBytes])
	}
	for helpers := range 8 {
		s := &Store{workers: spread.NewOf(helpers)}
		if k, _ := s.firstBad(mem, layerBytes, sums); k != -1 {
			t.Fatalf("%d helpers: layer %d of intact ones", helpers, k)
		}
		for first := range layers {
			bad := slices.Clone(sums)
			for k := first; k < layers; k += 7 {
				bad[k]++
			}
			if k, sum := s.firstBad(mem, layerBytes, bad); k != first || sum != sums[first] {
				t.Fatalf("%d helpers: layer %d, %x; want %d, %x", helpers, k, sum, first, sums[first])
			}
		}
		if k, _ := s.firstBad(nil, layerBytes, nil); k != -1 {
			t.Fatalf("no layers: %d", k)
		}
	}
	// Concurrent calls do not wait for each other's helpers.
	s := &Store{workers: spread.NewOf(1)}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if k, _ := s.firstBad(mem, layerBytes, sums); k != -1 {
				t.Errorf("layer %d of intact ones", k)
			}
		})
	}
	wg.Wait()
}

// BenchmarkFirstBad hashes a block of 4 MiB with and without helpers.
func BenchmarkFirstBad(b *testing.B) {
	const layerBytes, layers = 64 << 10, 64
	mem := make([]byte, 16*layers*layerBytes) // more than the CPU caches
	sums := make([]uint64, layers)
	for k := range sums {
		sums[k] = xxh3.Hash(mem[:layerBytes])
	}
	for name, s := range map[string]*Store{"alone": {workers: spread.NewOf(0)}, "shared": {workers: spread.New()}} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(layers * layerBytes)
			for i := range b.N {
				if k, _ := s.firstBad(mem[i%16*layers*layerBytes:], layerBytes, sums); k != -1 {
					b.Fatal(k)
				}
			}
		})
	}
}
