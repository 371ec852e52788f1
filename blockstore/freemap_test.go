package blockstore

import (
	"slices"
	"testing"
)

// naiveMap is a free map without bits: one bool a slot.
type naiveMap []bool

func (n naiveMap) longest() run {
	var best, cur run
	for i, free := range n {
		if !free {
			cur = run{}
			continue
		}
		if cur.n == 0 {
			cur.start = uint32(i)
		}
		if cur.n++; cur.n > best.n {
			best = cur
		}
	}
	return best
}

func (n naiveMap) runFrom(start, limit uint32) uint32 {
	var c uint32
	for int(start+c) < len(n) && c < limit && n[start+c] {
		c++
	}
	return c
}

// FuzzFreeMap drives the bitmap and the naive map with the same calls. Each
// byte pair is one: take the longest run, take from a place, give one back.
func FuzzFreeMap(f *testing.F) {
	f.Add(uint16(1), []byte{0, 1, 2, 0})
	f.Add(uint16(64), []byte{0, 64, 2, 5, 2, 6, 1, 5})
	f.Add(uint16(129), []byte{0, 200, 2, 63, 2, 64, 2, 65, 0, 2, 2, 128})
	f.Add(uint16(300), []byte{1, 60, 1, 130, 0, 100, 2, 70, 2, 71, 2, 72, 0, 3})
	f.Fuzz(func(t *testing.T, size uint16, ops []byte) {
		slots := uint32(size)%1000 + 1
		m := newFreeMap(slots)
		naive := slices.Repeat(naiveMap{true}, int(slots))
		take := func(r run) {
			m.take(r)
			for i := r.start; i < r.start+r.n; i++ {
				if !naive[i] {
					t.Fatalf("took slot %d twice", i)
				}
				naive[i] = false
			}
		}
		for i := 0; i+1 < len(ops); i += 2 {
			arg := uint32(ops[i+1])
			switch ops[i] % 3 {
			case 0:
				r := m.longestRun()
				if want := naive.longest(); r != want {
					t.Fatalf("longest run %v; want %v", r, want)
				}
				r.n = min(r.n, arg)
				take(r)
			case 1:
				start := arg * 3 % slots
				n := m.runFrom(start, arg)
				if want := naive.runFrom(start, arg); n != want {
					t.Fatalf("run from %d of at most %d is %d; want %d", start, arg, n, want)
				}
				take(run{start, n})
			case 2:
				if slot := arg * 3 % slots; !naive[slot] {
					m.give(slot)
					naive[slot] = true
				}
			}
			var free uint32
			for s, is := range naive {
				if m.isFree(uint32(s)) != is {
					t.Fatalf("slot %d is free: %v; want %v", s, !is, is)
				}
				if is {
					free++
				}
			}
			if m.free != free || m.isFree(slots) {
				t.Fatalf("%d free; want %d", m.free, free)
			}
		}
	})
}

// BenchmarkLongestRun is the worst case of a search: a segment of 64 KiB slots
// with every second one taken.
func BenchmarkLongestRun(b *testing.B) {
	m := newFreeMap(16383)
	for i := uint32(0); i < m.slots; i += 2 {
		m.take(run{i, 1})
	}
	for b.Loop() {
		m.stale = true
		m.longestRun()
	}
}
