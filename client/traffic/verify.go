package traffic

import "math/rand/v2"

// Verify selects the Layer Blocks that a manager compares with their sums between the two engines
// of a request, and the places of the comparisons. It does not change the verification at storage:
// the client verifies every block that storage returns, and a storage node verifies every block
// that it stores.
//
// If a wrong byte is not found, the model uses the byte for this one request, but storage refuses
// the block. Each comparison reads the KV once more, at the rate of XXH3-64. BenchmarkVerify
// measures the number of cores that the comparisons take.
type Verify int

const (
	// VerifyEveryHop compares each Layer Block in the PE's device memory, in the DE buffer and in
	// the DE's device memory. A wrong block is never used, and the error shows after which hop the
	// block was found wrong.
	VerifyEveryHop Verify = 0
	// VerifyLastHop compares each Layer Block in the PE's and in the DE's device memory, where the engines
	// use it. If the CPU cannot address device memory, the last hop is the host memory before it. A wrong
	// block is never used.
	VerifyLastHop Verify = 1
)

// VerifyOneIn compares one Layer Block in n, chosen at random, at the places of VerifyLastHop. It
// limits the cost and detects hardware that damages many blocks, but it does not detect every wrong
// block.
func VerifyOneIn(n int) Verify { return Verify(n) }

// checkHop verifies blocks of a layer in a memory on their way, unless Options.Verify leaves out
// such checks; checkLast verifies the blocks again at the end of the way.
func (m *Manager) checkHop(s sumTable, mem []byte, layer int, blocks []uint32, offset func(block uint32) uint64, where string) error {
	if m.opts.Verify != VerifyEveryHop {
		return nil
	}
	return s.checkPages(mem, layer, blocks, m.geo.bytes[layer], offset, where)
}

// checkLast verifies blocks of a layer in the last memory in which the CPU can address them.
func (m *Manager) checkLast(s sumTable, mem []byte, layer int, blocks []uint32, offset func(block uint32) uint64, where string) error {
	return s.checkPages(mem, layer, m.opts.Verify.sample(blocks), m.geo.bytes[layer], offset, where)
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
