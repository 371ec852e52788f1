package client

import (
	"sync"

	"github.com/zeebo/xxh3"
)

// firstBadOf is firstBad for a piece whose layers may have been hashed on arrival. landed is nil if
// no layer was.
func (s *Store) firstBadOf(mem []byte, layerBytes int64, sums []uint64, landed []arrivedLayer) (layer int, sum uint64) {
	for from := 0; from < len(sums); {
		if from < len(landed) {
			if got, ok := landed[from].sumIf(layerBytes); ok {
				if got != sums[from] {
					return from, got
				}
				from++
				continue
			}
		}
		to := from + 1
		for to < len(sums) {
			if to < len(landed) {
				if _, ok := landed[to].sumIf(layerBytes); ok {
					break
				}
			}
			to++
		}
		if k, got := s.firstBad(mem[int64(from)*layerBytes:], layerBytes, sums[from:to]); k >= 0 {
			return from + k, got
		}
		from = to
	}
	return -1, 0
}

// firstBad compares the layers of a piece with their checksums. It returns the first layer that
// differs and the checksum of its bytes; -1 if none differs.
func (s *Store) firstBad(mem []byte, layerBytes int64, sums []uint64) (layer int, sum uint64) {
	var mu sync.Mutex
	layer = -1
	s.workers.Do(len(sums), int64(len(sums))*layerBytes, func(from, to int) {
		k, got := firstBad(mem[int64(from)*layerBytes:], layerBytes, sums[from:to])
		if k < 0 {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if k += from; layer < 0 || k < layer {
			layer, sum = k, got
		}
	})
	return layer, sum
}

// firstBad is Store.firstBad on one goroutine.
func firstBad(mem []byte, layerBytes int64, sums []uint64) (layer int, sum uint64) {
	for k, want := range sums {
		if got := xxh3.Hash(mem[int64(k)*layerBytes:][:layerBytes]); got != want {
			return k, got
		}
	}
	return -1, 0
}
