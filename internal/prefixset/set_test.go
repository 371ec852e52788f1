package prefixset

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// modelSet is the set as a list, most recently used first.
type modelSet struct {
	capacity int
	hashes   []uint64
}

func (m *modelSet) touch(chain []uint64) {
	for _, h := range slices.Backward(chain[:min(len(chain), m.capacity)]) {
		m.hashes = slices.DeleteFunc(m.hashes, func(o uint64) bool { return o == h })
		m.hashes = slices.Insert(m.hashes, 0, h)
		m.hashes = m.hashes[:min(len(m.hashes), m.capacity)]
	}
}

func (m *modelSet) match(chain []uint64) int {
	n := 0
	for n < len(chain) && slices.Contains(m.hashes, chain[n]) {
		n++
	}
	return n
}

// FuzzSet compares the set with a list. Three bytes are a step: the first chooses touch
// or match and the length of a chain, the others choose its tokens.
func FuzzSet(f *testing.F) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		seed := make([]byte, 301)
		for i := range seed {
			seed[i] = byte(random.Uint32())
		}
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, steps []byte) {
		if len(steps) == 0 {
			return
		}
		capacity := 1 + int(steps[0])%20
		set, model := New(capacity), &modelSet{capacity: capacity}
		for s := range slices.Chunk(steps[1:], 3) {
			if len(s) < 3 {
				break
			}
			var chain []uint64
			for i, hash := 0, uint64(7); i < int(s[0]>>1)%24; i++ {
				hash = (hash ^ uint64(1+s[1+i%2]>>(i%8)&1)) * 0x100000001b3 // FNV-1a
				chain = append(chain, hash)
			}
			if got, want := set.Match(chain), model.match(chain); got != want {
				t.Fatalf("match of %d blocks is %d; want %d", len(chain), got, want)
			}
			if s[0]&1 == 0 {
				set.Touch(chain)
				model.touch(chain)
			}
			if set.Len() != len(model.hashes) {
				t.Fatalf("%d hashes; want %d", set.Len(), len(model.hashes))
			}
		}
	})
}

func TestSetDropsTheOldestLeafFirst(t *testing.T) {
	x := New(5)
	a, b, c := []uint64{1, 2, 3}, []uint64{1, 2, 4}, []uint64{9}
	x.Touch(a)
	x.Touch(b)
	x.Touch(c)
	x.Touch([]uint64{8})
	if x.Match(a) != 2 || x.Match(b) != 3 || x.Match(c) != 1 || x.Len() != 5 {
		t.Errorf("matches %d, %d, %d of %d hashes; want 2, 3, 1 of 5", x.Match(a), x.Match(b), x.Match(c), x.Len())
	}
	x.Clear()
	if x.Match(b) != 0 || x.Len() != 0 {
		t.Error("a cleared set has hashes")
	}
}
