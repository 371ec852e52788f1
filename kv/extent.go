package kv

import "fmt"

// Extent identifies the slot of a storage node that holds one piece: the volume, the segment of the
// volume, and the slot of the segment. The next slot of the same segment is Extent+1, so pieces
// written to consecutive slots have consecutive extents. Only package blockstore interprets the
// three parts; in other packages an Extent is an opaque, unique key.
//
//	63      56 55               32 31                              0
//	┌─────────┬───────────────────┬────────────────────────────────┐
//	│ volume  │ segment           │ slot                           │
//	└─────────┴───────────────────┴────────────────────────────────┘
type Extent uint64

const (
	// MaxVolumes is the maximum number of volumes of one storage node.
	MaxVolumes = 1 << 8
	// MaxSegments is the maximum number of segments of one volume.
	MaxSegments = 1 << 24
)

// MakeExtent returns the Extent of a slot. The caller must have checked volume and segment against
// MaxVolumes and MaxSegments, because MakeExtent drops excess bits.
func MakeExtent(volume, segment, slot uint32) Extent {
	return Extent(uint64(volume)&(MaxVolumes-1)<<56 | uint64(segment)&(MaxSegments-1)<<32 | uint64(slot))
}

// Volume returns the index of the volume on its node.
func (e Extent) Volume() uint32 { return uint32(e >> 56) }

// Segment returns the number of the segment on its volume.
func (e Extent) Segment() uint32 { return uint32(e>>32) & (MaxSegments - 1) }

// Slot returns the number of the slot in its segment.
func (e Extent) Slot() uint32 { return uint32(e) }

// String prints volume/segment/slot, as the CLI does.
func (e Extent) String() string {
	return fmt.Sprintf("v%d/s%d/%d", e.Volume(), e.Segment(), e.Slot())
}

// Generation distinguishes the successive contents of one slot. A storage node never assigns the
// same generation twice, not even after a restart. The generation 0 is invalid. Only the low
// GenerationBits bits are used.
type Generation uint64

// GenerationBits is the width of a Generation: 16 bits count the starts of the store, 32 bits count
// the writes since the last start. Package blockstore assigns generations.
const GenerationBits = 48

// Ref is an Extent and the Generation that the slot is expected to have. If the slot has been
// overwritten, its generation differs, so a reader with a Ref detects the overwrite.
type Ref struct {
	Extent     Extent
	Generation Generation
}

// String prints extent and generation.
func (r Ref) String() string { return fmt.Sprintf("%v@%d", r.Extent, r.Generation) }
