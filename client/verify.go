package client

import (
	"runtime"
	"sync"

	"github.com/zeebo/xxh3"
)

// hashShareBytes is the least number of bytes to hash for which a goroutine is woken: about 40 µs
// of work.
const hashShareBytes = 1 << 20

// hashers limits the number of goroutines that help to hash, over the whole Store, to one less than
// the number of processors. So one calling goroutine and all helpers fill the processors.
type hashers chan struct{}

func newHashers() hashers { return make(hashers, runtime.GOMAXPROCS(0)-1) }

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
	s.share(len(sums), int64(len(sums))*layerBytes, func(from, to int) {
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

// share divides n items of the given total size into ranges, calls part for each range, and returns
// when all calls have returned. After the last byte has arrived, the caller of a read waits only
// for the hashing, so goroutines on idle processors hash a part of the bytes.
func (s *Store) share(n int, bytes int64, part func(from, to int)) {
	helpers := s.hashers.take(min(n, int(bytes/hashShareBytes)) - 1)
	if helpers == 0 {
		part(0, n)
		return
	}
	defer s.hashers.give(helpers)
	cut := func(i int) int { return i * n / (helpers + 1) }
	var wg sync.WaitGroup
	for i := range helpers {
		wg.Go(func() { part(cut(i+1), cut(i+2)) })
	}
	part(0, cut(1))
	wg.Wait()
}

// take reserves up to n helpers, as many as are idle.
func (h hashers) take(n int) (got int) {
	for got < n {
		select {
		case h <- struct{}{}:
			got++
		default:
			return got
		}
	}
	return got
}

func (h hashers) give(n int) {
	for range n {
		<-h
	}
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
