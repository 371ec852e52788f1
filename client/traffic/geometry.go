package traffic

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
)

// geometry is the geometry of the namespace, with the layers in the order of their computation.
type geometry struct {
	kv.Geometry
	layers int
	// fullBytes is the size of a Full Block, and maxBytes that of the largest Layer Block.
	fullBytes, maxBytes uint64
	// places has, by layer, the layer's index in a Full Block, groups its group, offsets its offset
	// in a Full Block, and bytes the size of its Layer Block.
	places, groups []int
	offsets, bytes []uint64
	// partial: a group does not need all blocks of a cached prefix.
	partial bool
	// digest identifies the geometry and the order of computation.
	digest []byte
}

// newGeometry returns the geometry for Options.Order.
func newGeometry(of kv.Geometry, order []int) geometry {
	digest := of.Digest()
	g := geometry{Geometry: of, fullBytes: uint64(of.BlockBytes()), partial: len(of.Groups) > 1, digest: digest[:]}
	var groups []int
	var offsets []uint64
	for i, group := range of.Groups {
		for l := range group.Layers {
			groups, offsets = append(groups, i), append(offsets, uint64(of.PieceOffset(0, i)+int64(l)*of.LayerBytes(i)))
		}
		g.maxBytes = max(g.maxBytes, uint64(of.LayerBytes(i)))
	}
	g.layers = len(groups)
	for l := range groups {
		place := l
		if order != nil {
			place = order[l]
		}
		g.places, g.groups = append(g.places, place), append(g.groups, groups[place])
		g.offsets, g.bytes = append(g.offsets, offsets[place]), append(g.bytes, uint64(of.LayerBytes(groups[place])))
	}
	if !slices.IsSorted(g.places) {
		raw := slices.Clone(g.digest)
		for _, place := range g.places {
			raw = binary.LittleEndian.AppendUint32(raw, uint32(place))
		}
		sum := sha256.Sum256(raw)
		g.digest = sum[:len(digest)]
	}
	return g
}

// checkGroups returns an error for layer groups that a manager does not support.
func checkGroups(g kv.Geometry) error {
	if g.Groups[0].Kind != kv.Full {
		return fmt.Errorf("layer group 0 is %s; a manager needs a group of full attention: %w", g.Groups[0].Kind, ErrJob)
	}
	for i, group := range g.Groups[1:] {
		if group.Kind == kv.Full {
			return fmt.Errorf("layer group %d is %s, as group 0; a manager supports one group of full attention, beside sliding windows and recurrent state: %w", i+1, group.Kind, ErrJob)
		}
	}
	return nil
}

// checkOrder returns an error for an Options.Order that does not list each layer once.
func checkOrder(order []int, g kv.Geometry) error {
	layers, sorted := g.LayerCount(), slices.Sorted(slices.Values(order))
	for i, l := range sorted {
		if l != i || len(sorted) != layers {
			return fmt.Errorf("the order lists %d layers, %v; want each of %d once: %w", len(order), order, layers, ErrJob)
		}
	}
	return nil
}

// at returns the offset of a layer in a Full Block.
func (g *geometry) at(layer int) uint64 { return g.offsets[layer] }

// state reports whether a layer has recurrent state.
func (g *geometry) state(layer int) bool { return g.Groups[g.groups[layer]].Kind == kv.State }

// first returns the first block of a cached prefix of hit blocks that a layer of the prefill engine
// needs. The blocks before it are outside of the layer's window, or before the last state.
func (g *geometry) first(layer, hit int) int { return g.FirstNeeded(g.groups[layer], hit) }

// firstSent returns the first block of a prompt that a layer of the decode engine needs: of recurrent
// state only the last block. again: the prefill engine has computed the hit blocks again.
func (g *geometry) firstSent(layer, hit, blocks int, again bool) int {
	switch {
	case g.state(layer):
		return blocks - 1
	case again:
		return 0
	}
	return g.first(layer, hit)
}

// pieces appends the pieces of a block of a Full Block at offset, of all groups for which needs returns
// true. sums are the checksums of the Full Block's layers, in their order there; each piece gets its
// part of them.
func (g *geometry) pieces(to []client.Piece, toSums [][]uint64, block int, needs func(group int) bool, offset int64, sums []uint64) ([]client.Piece, [][]uint64) {
	for i, group := range g.Groups {
		if needs(i) {
			to, toSums = append(to, client.Piece{Block: block, Group: i, Offset: offset + g.PieceOffset(0, i)}), append(toSums, sums[:group.Layers:group.Layers])
		}
		sums = sums[group.Layers:]
	}
	return to, toSums
}

// needed returns the blocks from the block first on. blocks must be ascending.
func needed(blocks []uint32, first int) []uint32 {
	i, _ := slices.BinarySearch(blocks, uint32(first))
	return blocks[i:]
}
