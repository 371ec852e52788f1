package traffic

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/internal/arena"
)

// sumBytes is one XXH3-64.
const sumBytes = 8

// sumTable holds the sums of a job's Layer Blocks, layer by layer, where the
// other side can write them and the NIC can read them: the sum of block b in
// layer l is at (l blocks + b) sumBytes.
type sumTable struct {
	mem    []byte
	blocks int
}

// tableBytes is the size of a table.
func tableBytes(layers, blocks int) uint64 { return uint64(layers) * uint64(blocks) * sumBytes }

// at is the offset of a layer's row.
func (s sumTable) at(layer int) uint64 { return uint64(layer) * uint64(s.blocks) * sumBytes }

// set enters the sum of one Layer Block.
func (s sumTable) set(layer, block int, sum uint64) {
	binary.LittleEndian.PutUint64(s.mem[s.at(layer)+uint64(block)*sumBytes:], sum)
}

// get returns it.
func (s sumTable) get(layer, block int) uint64 {
	return binary.LittleEndian.Uint64(s.mem[s.at(layer)+uint64(block)*sumBytes:])
}

// block returns the sums of one block, from layer 0 on.
func (s sumTable) block(block, layers int) []uint64 {
	sums := make([]uint64, layers)
	for l := range sums {
		sums[l] = s.get(l, block)
	}
	return sums
}

// setBlock enters the sums of one block, from layer 0 on.
func (s sumTable) setBlock(block int, sums []uint64) {
	for l, sum := range sums {
		s.set(l, block, sum)
	}
}

// tableIn makes a table of a buffer's bytes from off on.
func tableIn(b arena.Buffer, off uint64, layers, blocks int) sumTable {
	return sumTable{b.Bytes()[off : off+tableBytes(layers, blocks)], blocks}
}

// checkPages compares the pages of blocks with their sums. offset returns the offset of a block's page
// in mem.
func (s sumTable) checkPages(mem []byte, layer int, blocks []uint32, layerBytes uint64, offset func(block uint32) uint64, where string) error {
	for _, b := range blocks {
		off := offset(b)
		if xxh3.Hash(mem[off:off+layerBytes]) != s.get(layer, int(b)) {
			return &BlockError{Block: int(b), Layer: layer, Where: where}
		}
	}
	return nil
}
