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
	layers                int
	layerBytes, fullBytes uint64
	// places has, by layer, the layer's index in a Full Block, and groups its group.
	places, groups []int
	// windows: a group has a sliding window.
	windows bool
	// digest identifies the geometry and the order of computation.
	digest []byte
}

// newGeometry returns the geometry for Options.Order.
func newGeometry(of kv.Geometry, order []int) geometry {
	digest := of.Digest()
	g := geometry{Geometry: of, layerBytes: uint64(of.LayerBytes(0)), fullBytes: uint64(of.BlockBytes()), windows: len(of.Groups) > 1, digest: digest[:]}
	var groups []int
	for i, group := range of.Groups {
		groups = append(groups, slices.Repeat([]int{i}, group.Layers)...)
	}
	g.layers = len(groups)
	for l := range groups {
		place := l
		if order != nil {
			place = order[l]
		}
		g.places, g.groups = append(g.places, place), append(g.groups, groups[place])
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
		switch {
		case group.Kind != kv.Window:
			return fmt.Errorf("layer group %d is %s; a manager supports full attention and sliding windows: %w", i+1, group.Kind, ErrJob)
		case g.LayerBytes(i+1) != g.LayerBytes(0):
			return fmt.Errorf("a Layer Block of group %d has %d bytes, and one of group 0 %d; a manager needs equal ones: %w", i+1, g.LayerBytes(i+1), g.LayerBytes(0), ErrJob)
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
func (g *geometry) at(layer int) uint64 { return uint64(g.places[layer]) * g.layerBytes }

// first returns the first block of a cached prefix of hit blocks that a layer needs. The blocks
// before it are outside of the layer's window.
func (g *geometry) first(layer, hit int) int { return g.FirstNeeded(g.groups[layer], hit) }

// pieces appends the pieces of a block of a Full Block at offset: those of all groups that need the
// block for a prefix of hit blocks. sums are the checksums of the Full Block's layers, in their
// order there; each piece gets its part of them.
func (g *geometry) pieces(to []client.Piece, toSums [][]uint64, block, hit int, offset int64, sums []uint64) ([]client.Piece, [][]uint64) {
	for i, group := range g.Groups {
		if block >= g.FirstNeeded(i, hit) {
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
