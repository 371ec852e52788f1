package ondisk

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"

	"github.com/penstock-kv/penstock/kv"
)

// MaxSegmentBytes is the maximum size of a segment file: 1 TiB.
const MaxSegmentBytes = 1 << 40

const segmentPrefix = "segment-"

// SegmentName returns the name of the file of a segment.
func SegmentName(number uint32) string { return fmt.Sprintf("%s%08d", segmentPrefix, number) }

// ParseSegmentName is the inverse of SegmentName.
func ParseSegmentName(name string) (number uint32, ok bool) {
	digits, ok := strings.CutPrefix(name, segmentPrefix)
	if !ok || len(digits) != 8 {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	if err != nil || n >= kv.MaxSegments {
		return 0, false
	}
	return uint32(n), true
}

// SegmentHeader describes how a segment file is divided into slots.
type SegmentHeader struct {
	// Volume and Number identify the file.
	Volume UUID
	Number uint32
	// Slots is the number of slots of SlotBytes after the header page.
	Slots     uint32
	SlotBytes int64
	// Cut is the generation at which the segment was divided into these slots; the slots have later
	// generations.
	Cut kv.Generation
}

// SlotOffset returns the start of a slot in the file.
func (h SegmentHeader) SlotOffset(slot uint32) int64 { return Page + int64(slot)*h.SlotBytes }

// SegmentSlots returns the number of slots of slotBytes in a segment file of fileBytes.
func SegmentSlots(fileBytes, slotBytes int64) uint32 {
	if slotBytes < 1 || fileBytes < Page {
		return 0
	}
	return uint32(min((fileBytes-Page)/slotBytes, 1<<32-1))
}

// Encode returns the page that holds h.
func (h SegmentHeader) Encode() []byte {
	b := make([]byte, Page)
	le := binary.LittleEndian
	copy(b[24:], h.Volume[:])
	le.PutUint32(b[40:], h.Number)
	le.PutUint32(b[44:], h.Slots)
	le.PutUint64(b[48:], uint64(h.SlotBytes))
	le.PutUint64(b[56:], uint64(h.Cut))
	seal(b, magicSegment)
	return b
}

// DecodeSegmentHeader is the inverse of Encode. It fails with ErrBlank, ErrVersion or ErrDamaged.
// The caller checks whether the slots fit the file.
func DecodeSegmentHeader(b []byte) (SegmentHeader, error) {
	b, err := unseal(b, magicSegment, Page)
	if err != nil {
		return SegmentHeader{}, err
	}
	le := binary.LittleEndian
	h := SegmentHeader{
		Volume:    UUID(b[24:40]),
		Number:    le.Uint32(b[40:]),
		Slots:     le.Uint32(b[44:]),
		SlotBytes: int64(le.Uint64(b[48:])),
		Cut:       kv.Generation(le.Uint64(b[56:])),
	}
	switch {
	case h.Number >= kv.MaxSegments || h.Cut >= 1<<kv.GenerationBits:
		return SegmentHeader{}, fmt.Errorf("ondisk: segment number %d, cut at generation %d: %w", h.Number, h.Cut, ErrDamaged)
	case h.SlotBytes < 2*Page || h.SlotBytes%Page != 0 || h.SlotBytes > MaxSegmentBytes || h.Slots < 1 ||
		int64(h.Slots) > MaxSegmentBytes/h.SlotBytes:
		return SegmentHeader{}, fmt.Errorf("ondisk: segment of %d slots of %d bytes: %w", h.Slots, h.SlotBytes, ErrDamaged)
	case !allZero(b[64:]):
		return SegmentHeader{}, fmt.Errorf("ondisk: segment header with bytes in reserved space: %w", ErrDamaged)
	}
	return h, nil
}

// String prints the header on one line.
func (h SegmentHeader) String() string {
	return fmt.Sprintf("segment %d of volume %v: %d slots of %d bytes, cut at generation %d\n", h.Number, h.Volume, h.Slots, h.SlotBytes, h.Cut)
}
