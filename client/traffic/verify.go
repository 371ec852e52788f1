package traffic

import "math/rand/v2"

// Verify chooses the Layer Blocks that a manager compares with their sums on the way between the two
// engines of a request, and the places where it does so. It has no effect on the two ends of that way: the
// client verifies every block that storage returns, and a storage node verifies every block that it stores.
//
// A wrong byte that no comparison finds is used by the model, once: storage refuses it. Each comparison
// reads the KV once more, at the rate of XXH3-64 (BenchmarkVerify measures the cores that this takes).
type Verify int

const (
	// VerifyEveryHop compares each Layer Block in the PE's device memory, in the DE buffer and in the DE's
	// device memory. A wrong block is never used, and the error names the hop before which it was right.
	VerifyEveryHop Verify = 0
	// VerifyLastHop compares each Layer Block in the PE's and in the DE's device memory, where the engines
	// use it. If the CPU cannot address device memory, the last hop is the host memory before it. A wrong
	// block is never used.
	VerifyLastHop Verify = 1
)

// VerifyOneIn compares one Layer Block in n, chosen at random, at the places of VerifyLastHop. It bounds the
// cost, and notices hardware that damages many blocks. It does not notice every wrong block.
func VerifyOneIn(n int) Verify { return Verify(n) }

// checkHop verifies blocks of a layer at a hop after which they are verified again.
func (m *Manager) checkHop(s sumTable, mem []byte, layer int, blocks []uint32, offset func(block uint32) uint64, where string) error {
	if m.opts.Verify != VerifyEveryHop {
		return nil
	}
	return s.checkPages(mem, layer, blocks, m.geo.layerBytes, offset, where)
}

// checkLast verifies blocks of a layer in the last memory in which the CPU can address them.
func (m *Manager) checkLast(s sumTable, mem []byte, layer int, blocks []uint32, offset func(block uint32) uint64, where string) error {
	return s.checkPages(mem, layer, m.opts.Verify.sample(blocks), m.geo.layerBytes, offset, where)
}

// sample returns the blocks that are compared at the last hop.
func (v Verify) sample(blocks []uint32) []uint32 {
	if v <= VerifyLastHop {
		return blocks
	}
	var chosen []uint32
	for _, b := range blocks {
		if rand.IntN(int(v)) == 0 {
			chosen = append(chosen, b)
		}
	}
	return chosen
}
