package traffic

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/internal/arena"
)

// sumBytes is the size of one XXH3-64.
const sumBytes = 8

// sumTable holds the sums of a job's Layer Blocks, layer by layer, in memory that the peer engine
// can write and the NIC can read. The sum of block b in layer l is at offset (l × blocks + b) ×
// sumBytes of mem.
type sumTable struct {
	mem    []byte
	blocks int
}

// tableBytes returns the size of a table.
func tableBytes(layers, blocks int) uint64 { return uint64(layers) * uint64(blocks) * sumBytes }

// at returns the offset in mem of the sums of a layer.
func (s sumTable) at(layer int) uint64 { return uint64(layer) * uint64(s.blocks) * sumBytes }

// set stores the sum of one Layer Block.
func (s sumTable) set(layer, block int, sum uint64) {
	binary.LittleEndian.PutUint64(s.mem[s.at(layer)+uint64(block)*sumBytes:], sum)
}

// get returns the sum of one Layer Block.
func (s sumTable) get(layer, block int) uint64 {
	return binary.LittleEndian.Uint64(s.mem[s.at(layer)+uint64(block)*sumBytes:])
}

// block returns the sums of one block in the order of a Full Block, in which layer l has the index
// places[l].
func (s sumTable) block(block int, places []int) []uint64 {
	sums := make([]uint64, len(places))
	for l, place := range places {
		sums[place] = s.get(l, block)
	}
	return sums
}

// setBlock stores the sums of one block, which are in the order of a Full Block.
func (s sumTable) setBlock(block int, sums []uint64, places []int) {
	for l, place := range places {
		s.set(l, block, sums[place])
	}
}

// tableIn returns a table in a buffer's bytes from off on.
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
