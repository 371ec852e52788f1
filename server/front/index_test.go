package front

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// modelIndex is the set as a list, most recently used first.
type modelIndex struct {
	capacity int
	hashes   []uint64
}

func (m *modelIndex) touch(chain []uint64) {
	for _, h := range slices.Backward(chain[:min(len(chain), m.capacity)]) {
		m.hashes = slices.DeleteFunc(m.hashes, func(o uint64) bool { return o == h })
		m.hashes = slices.Insert(m.hashes, 0, h)
		m.hashes = m.hashes[:min(len(m.hashes), m.capacity)]
	}
}

func (m *modelIndex) match(chain []uint64) int {
	n := 0
	for n < len(chain) && slices.Contains(m.hashes, chain[n]) {
		n++
	}
	return n
}

// FuzzPrefixIndex compares the index with a list. Three bytes are a step: the first chooses touch
// or match and the length of a chain, the others choose its tokens.
func FuzzPrefixIndex(f *testing.F) {
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
		index, model := newPrefixIndex(capacity), &modelIndex{capacity: capacity}
		for s := range slices.Chunk(steps[1:], 3) {
			if len(s) < 3 {
				break
			}
			var prompt []byte
			for i := range int(s[0]>>1) % 24 {
				prompt = append(prompt, slices.Repeat([]byte{s[1+i%2] >> (i % 8) & 1}, blockBytes)...)
			}
			chain := appendChain(nil, 7, prompt)
			if got, want := index.match(chain), model.match(chain); got != want {
				t.Fatalf("match of %d blocks is %d; want %d", len(chain), got, want)
			}
			if s[0]&1 == 0 {
				index.touch(chain)
				model.touch(chain)
			}
			if index.len() != len(model.hashes) {
				t.Fatalf("%d hashes; want %d", index.len(), len(model.hashes))
			}
		}
	})
}

func TestPrefixIndexDropsTheOldestLeafFirst(t *testing.T) {
	x := newPrefixIndex(5)
	a, b, c := []uint64{1, 2, 3}, []uint64{1, 2, 4}, []uint64{9}
	x.touch(a)
	x.touch(b)
	x.touch(c)
	x.touch([]uint64{8})
	if x.match(a) != 2 || x.match(b) != 3 || x.match(c) != 1 || x.len() != 5 {
		t.Errorf("matches %d, %d, %d of %d hashes; want 2, 3, 1 of 5", x.match(a), x.match(b), x.match(c), x.len())
	}
	x.clear()
	if x.match(b) != 0 || x.len() != 0 {
		t.Error("a cleared index has hashes")
	}
}
