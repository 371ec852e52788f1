package runs

import (
	"math/rand/v2"
	"testing"
)

// naive is the set as a slice of bools.
type naive []bool

func (m naive) first(n, from, to uint32) (uint32, bool) {
	run := uint32(0)
	for i := from; i < min(to, uint32(len(m))); i++ {
		if run++; !m[i] {
			run = 0
		}
		if run == n {
			return i + 1 - n, true
		}
	}
	return 0, false
}

func (m naive) longest() (best uint32) {
	run := uint32(0)
	for _, in := range m {
		if run++; !in {
			run = 0
		}
		best = max(best, run)
	}
	return best
}

func (m naive) from(start, limit uint32) (n uint32) {
	for i := start; i < uint32(len(m)) && m[i] && n < limit; i++ {
		n++
	}
	return n
}

// FuzzModel compares a Set with the naive one. Each operation has four bytes: kind, position and
// length.
func FuzzModel(f *testing.F) {
	rng := rand.New(rand.NewPCG(3, 3))
	for i := range 24 {
		seed := make([]byte, 1200)
		for j := range seed {
			seed[j] = byte(rng.Uint32())
		}
		seed[0] = byte(i * 11)
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < 2 {
			return
		}
		limit := uint32(in[0])*5 + uint32(in[1])%7 + 1
		s, m := New(limit), make(naive, limit)
		for in = in[2:]; len(in) >= 4; in = in[4:] {
			op, at, n := in[0]%4, (uint32(in[1])<<8|uint32(in[2]))%limit, uint32(in[3])+1
			n = min(n, limit-at)
			switch op {
			case 0, 1: // add or remove the longest uniform run from at on
				for k := range n {
					if m[at+k] != m[at] {
						n = k
						break
					}
				}
				if r := (Run{at, n}); m[at] {
					s.Remove(r)
				} else {
					s.Add(r)
				}
				for k := range n {
					m[at+k] = !m[at+k]
				}
			case 2:
				to := at + uint32(in[3])*3
				want := uint32(in[2])%70 + 1
				got, ok := s.First(want, at, to)
				if start, found := m.first(want, at, to); ok != found || ok && (got != Run{start, want}) {
					t.Fatalf("first %d from %d to %d: %+v, %v; the model has %d, %v", want, at, to, got, ok, start, found)
				}
			case 3:
				if got, want := s.From(at, n), m.from(at, n); got != want {
					t.Fatalf("from %d, at most %d: %d; the model has %d", at, n, got, want)
				}
			}
			size := uint32(0)
			for i, in := range m {
				if s.Has(uint32(i)) != in {
					t.Fatalf("%d is in the set: %v", i, !in)
				}
				if in {
					size++
				}
			}
			if s.Size() != size || s.Longest() != m.longest() || s.Has(limit) {
				t.Fatalf("size %d, longest run %d; the model has %d and %d", s.Size(), s.Longest(), size, m.longest())
			}
		}
	})
}

// TestSteps: the cost of an operation grows with the logarithm of the set.
func TestSteps(t *testing.T) {
	for _, limit := range []uint32{1 << 12, 1 << 16, 1 << 22} {
		s := New(limit)
		rng := rand.New(rand.NewPCG(1, uint64(limit)))
		for i := range limit {
			if rng.IntN(2) == 0 {
				s.Add(Run{i, 1})
			}
		}
		before := s.Steps()
		const ops = 1000
		for range ops {
			i := rng.Uint32N(limit)
			if r := (Run{i, 1}); s.Has(i) {
				s.Remove(r)
			} else {
				s.Add(r)
			}
			s.First(uint32(rng.IntN(20)+1), rng.Uint32N(limit), limit)
		}
		levels := uint64(1)
		for n := limit / wordBits; n > 1; n /= 2 {
			levels++
		}
		// A change visits one node of each level, a search up to four.
		if per := (s.Steps() - before) / ops; per > 5*levels {
			t.Errorf("%d numbers: %d steps for a change and a search; %d levels", limit, per, levels)
		}
	}
}

// BenchmarkFirst finds, takes and returns a run of 16 in a set of 4 M numbers of
// which half are free.
func BenchmarkFirst(b *testing.B) {
	const limit = 4 << 20
	s := New(limit)
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range uint32(limit) {
		if rng.IntN(2) == 0 {
			s.Add(Run{i, 1})
		}
	}
	for b.Loop() {
		if r, ok := s.First(16, rng.Uint32N(limit/2), limit); ok {
			s.Remove(r)
			s.Add(r)
		}
	}
}
