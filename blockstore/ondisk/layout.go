package ondisk

import (
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/kv"
)

// ErrLayout is wrapped by errors about a payload that no slot can hold.
var ErrLayout = errors.New("impossible slot layout")

// slotFixedBytes is the part of a slot header before the layer sums.
const slotFixedBytes = 128

// MaxSlotHeaderBytes is the longest slot header: that of kv.MaxLayers layers.
const MaxSlotHeaderBytes = (slotFixedBytes + 8*kv.MaxLayers + Page - 1) / Page * Page

// Layout is the shape of a slot: the positions of header, layers and padding. It is made with
// NewLayout; the zero Layout is not valid.
type Layout struct {
	// PayloadBytes is the length of the payload without padding.
	PayloadBytes int64
	// Layers is the number of equal parts of the payload.
	Layers int
}

// NewLayout checks the two numbers. The payload must be a whole number of
// equal, non-empty layers.
func NewLayout(payloadBytes int64, layers int) (Layout, error) {
	l := Layout{PayloadBytes: payloadBytes, Layers: layers}
	switch {
	case layers < 1 || layers > kv.MaxLayers:
		return Layout{}, fmt.Errorf("ondisk: %d layers; want 1 to %d: %w", layers, kv.MaxLayers, ErrLayout)
	case payloadBytes < 1 || payloadBytes > kv.MaxPieceBytes:
		return Layout{}, fmt.Errorf("ondisk: payload of %d bytes; want 1 to %d: %w", payloadBytes, kv.MaxPieceBytes, ErrLayout)
	case payloadBytes%int64(layers) != 0:
		return Layout{}, fmt.Errorf("ondisk: payload of %d bytes is not %d equal layers: %w", payloadBytes, layers, ErrLayout)
	}
	return l, nil
}

// HeaderBytes returns the offset of the payload in the slot: a multiple of Page.
func (l Layout) HeaderBytes() int64 { return roundUp(slotFixedBytes + 8*int64(l.Layers)) }

// SlotBytes is the size of the whole slot: a multiple of Page.
func (l Layout) SlotBytes() int64 { return l.HeaderBytes() + roundUp(l.PayloadBytes) }

// LayerBytes is the size of one layer.
func (l Layout) LayerBytes() int64 { return l.PayloadBytes / int64(l.Layers) }

// Range returns the bytes to read for count layers from layer first on. offset, in the slot, and
// bytes are multiples of Page; the first layer starts skip bytes after offset. The caller must have
// checked that 0 <= first, 1 <= count and first+count <= Layers.
func (l Layout) Range(first, count int) (offset, bytes, skip int64) {
	from := l.HeaderBytes() + int64(first)*l.LayerBytes()
	to := from + int64(count)*l.LayerBytes()
	offset = from / Page * Page
	return offset, roundUp(to) - offset, from - offset
}
