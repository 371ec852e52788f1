package ondisk

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/penstock-kv/penstock/kv"
	"github.com/zeebo/xxh3"
)

// Class determines how long a block is stored.
type Class uint8

const (
	// ClassPrefix blocks stay until they are evicted or deleted.
	ClassPrefix Class = iota + 1
	// ClassTransfer blocks are dropped after their delivery.
	ClassTransfer
)

// String returns prefix or transfer.
func (c Class) String() string {
	switch c {
	case ClassPrefix:
		return "prefix"
	case ClassTransfer:
		return "transfer"
	}
	return fmt.Sprintf("Class(%d)", uint8(c))
}

// SlotKey is the content that a reader expects in a slot. If a field of the slot's header differs,
// the slot has other content, even if its checksums are right.
type SlotKey struct {
	Namespace kv.NamespaceID
	Epoch     kv.Epoch
	ID        kv.BlockID
	Group     uint8
	Geometry  kv.GeometryDigest
	// PayloadBytes and Layers follow from the geometry. They are compared too, because
	// the lengths of requests are computed from them.
	PayloadBytes int64
	Layers       int
}

// SlotHeader describes the content of a slot. It is stored in the slot.
type SlotHeader struct {
	SlotKey
	// Generation and Extent are filled in by blockstore when it writes.
	Generation kv.Generation
	Extent     kv.Extent
	// Born is the generation of the slot to which the content was first written, or zero if the
	// content was never moved. The method Origin returns that generation in both cases.
	Born  kv.Generation
	Class Class
	// Parent is the id of the previous block, zero for the first block of a chain. Depth is the
	// number of blocks before this one.
	Parent kv.BlockID
	Depth  uint32
	// LayerSums is the XXH3-64 of each layer, as computed by the writer. DecodeSlotHeader leaves them
	// empty if the slot is encrypted.
	LayerSums []uint64
	// Key is the id of the key that encrypts the slot, zero if the slot is plain.
	Key KeyID
}

// Sealed has the parts of an encrypted slot's header, as slices of the header.
type Sealed struct {
	// Context has every field that describes the block, in plain.
	Context []byte
	// Salt is random.
	Salt []byte
	// Sums has the checksums of the layers, in 8 bytes each, and a tag of 16 bytes.
	Sums []byte
	// Tags has a tag of 16 bytes for each layer.
	Tags []byte
}

// Tag returns the tag of a layer.
func (s *Sealed) Tag(layer int) []byte { return s.Tags[layer*tagBytes:][:tagBytes] }

const (
	tagBytes  = 16
	saltBytes = 32
	// sealedFixedBytes is the part of an encrypted slot's header before the checksums.
	sealedFixedBytes = slotFixedBytes + len(KeyID{}) + saltBytes

	// MaxSealedLayers is the maximum number of layers of an encrypted slot: more tags and checksums
	// do not fit the header's page.
	MaxSealedLayers = (Page - sealedFixedBytes - tagBytes) / (8 + tagBytes)
)

// SealedParts returns the parts of the header of an encrypted slot with a number of layers. b begins
// with the header.
func SealedParts(b []byte, layers int) Sealed {
	sums := sealedFixedBytes + 8*layers + tagBytes
	return Sealed{
		Context: b[frameBytes:slotFixedBytes],
		Salt:    b[sealedFixedBytes-saltBytes : sealedFixedBytes],
		Sums:    b[sealedFixedBytes:sums],
		Tags:    b[sums:][:tagBytes*layers],
	}
}

// DecodeSums reads the checksums from Sums, when these are decrypted, and appends them to dst.
func (s *Sealed) DecodeSums(dst []uint64) []uint64 {
	for b := s.Sums[:len(s.Sums)-tagBytes]; len(b) > 0; b = b[8:] {
		dst = append(dst, binary.LittleEndian.Uint64(b))
	}
	return dst
}

// Ref returns the slot and the generation that the header claims.
func (h *SlotHeader) Ref() kv.Ref { return kv.Ref{Extent: h.Extent, Generation: h.Generation} }

// Origin returns the generation of the slot to which the content was first written. Moving a block
// does not change its origin. The origin orders the versions of a block that was deleted and put
// again: a deletion covers content whose origin is at most a given generation.
func (h *SlotHeader) Origin() kv.Generation {
	if h.Born != 0 {
		return h.Born
	}
	return h.Generation
}

// Layout returns the shape of the slot. It fails with ErrLayout.
func (k SlotKey) Layout() (Layout, error) { return NewLayout(k.PayloadBytes, k.Layers) }

// EncodeTo writes the header to the start of b, which has at least Layout.HeaderBytes bytes, and
// clears the rest of the header's last page. If DecodeSlotHeader would refuse the header, EncodeTo
// fails and does not change b.
func (h *SlotHeader) EncodeTo(b []byte) error {
	b, err := h.encodeFixed(b)
	if err != nil {
		return err
	}
	putSums(b[slotFixedBytes:], h.LayerSums)
	seal(b, magicSlot)
	return nil
}

// EncodeSealed is EncodeTo for an encrypted slot; Key is not zero. It calls encrypt with the parts.
// Sums has the plain checksums at that time; encrypt sets Salt, encrypts Sums, and sets Tags.
func (h *SlotHeader) EncodeSealed(b []byte, encrypt func(Sealed) error) error {
	if h.Layers > MaxSealedLayers {
		return fmt.Errorf("ondisk: encrypted slot of %d layers; at most %d: %w", h.Layers, MaxSealedLayers, ErrLayout)
	}
	b, err := h.encodeFixed(b)
	if err != nil {
		return err
	}
	copy(b[slotFixedBytes:], h.Key[:])
	parts := SealedParts(b, h.Layers)
	putSums(parts.Sums, h.LayerSums)
	if err := encrypt(parts); err != nil {
		return err
	}
	sealAs(b, magicSlot, sealedVersion)
	return nil
}

func putSums(b []byte, sums []uint64) {
	for i, sum := range sums {
		binary.LittleEndian.PutUint64(b[8*i:], sum)
	}
}

// encodeFixed clears the header's pages and writes the fields before the checksums. It returns the
// header's bytes.
func (h *SlotHeader) encodeFixed(b []byte) ([]byte, error) {
	l, err := h.Layout()
	if err != nil {
		return nil, err
	}
	if err := h.validate(); err != nil {
		return nil, err
	}
	if len(h.LayerSums) != h.Layers {
		return nil, fmt.Errorf("ondisk: slot header with %d checksums for %d layers: %w", len(h.LayerSums), h.Layers, ErrLayout)
	}
	n := l.HeaderBytes()
	if int64(len(b)) < n {
		return nil, fmt.Errorf("ondisk: slot header of %d bytes into %d: %w", n, len(b), ErrLayout)
	}
	b = b[:n]
	clear(b)
	le := binary.LittleEndian
	le.PutUint64(b[24:], uint64(h.Generation))
	le.PutUint64(b[32:], uint64(h.Extent))
	le.PutUint32(b[40:], uint32(h.Namespace))
	b[44], b[45] = byte(h.Class), h.Group
	le.PutUint64(b[48:], uint64(h.Epoch))
	copy(b[56:], h.ID[:])
	copy(b[72:], h.Parent[:])
	copy(b[88:], h.Geometry[:])
	le.PutUint64(b[104:], uint64(h.PayloadBytes))
	le.PutUint32(b[112:], uint32(h.Layers))
	le.PutUint32(b[116:], h.Depth)
	le.PutUint64(b[120:], uint64(h.Born))
	return b, nil
}

// SlotHeaderBytes returns the length that the header at the start of page claims, or 0 if page does
// not start with a header. Headers longer than one page need a second read before DecodeSlotHeader.
func SlotHeaderBytes(page []byte) int { return recordBytes(page, magicSlot, MaxSlotHeaderBytes) }

// DecodeSlotHeader is the inverse of EncodeTo. It fails with ErrBlank,
// ErrVersion or ErrDamaged. sums, if not nil, is reused for LayerSums.
func DecodeSlotHeader(b []byte, sums []uint64) (SlotHeader, error) {
	b, err := unseal(b, magicSlot, MaxSlotHeaderBytes)
	if err != nil {
		return SlotHeader{}, err
	}
	le := binary.LittleEndian
	h := SlotHeader{
		SlotKey: SlotKey{
			Namespace:    kv.NamespaceID(le.Uint32(b[40:])),
			Epoch:        kv.Epoch(le.Uint64(b[48:])),
			ID:           kv.BlockID(b[56:72]),
			Group:        b[45],
			Geometry:     kv.GeometryDigest(b[88:104]),
			PayloadBytes: int64(le.Uint64(b[104:])),
			Layers:       int(le.Uint32(b[112:])),
		},
		Generation: kv.Generation(le.Uint64(b[24:])),
		Extent:     kv.Extent(le.Uint64(b[32:])),
		Class:      Class(b[44]),
		Parent:     kv.BlockID(b[72:88]),
		Depth:      le.Uint32(b[116:]),
		Born:       kv.Generation(le.Uint64(b[120:])),
	}
	l, err := h.Layout()
	if err != nil {
		return SlotHeader{}, fmt.Errorf("%w: %w", err, ErrDamaged)
	}
	if int64(len(b)) != l.HeaderBytes() {
		return SlotHeader{}, fmt.Errorf("ondisk: slot header of %d bytes for %d layers; want %d: %w", len(b), h.Layers, l.HeaderBytes(), ErrDamaged)
	}
	end := slotFixedBytes + 8*h.Layers
	sealed := versionOf(b) == sealedVersion
	if sealed {
		if h.Key = KeyID(b[slotFixedBytes:]); h.Key == (KeyID{}) || h.Layers > MaxSealedLayers {
			return SlotHeader{}, fmt.Errorf("ondisk: encrypted slot of %d layers with key %q: %w", h.Layers, h.Key, ErrDamaged)
		}
		end = sealedFixedBytes + tagBytes + (8+tagBytes)*h.Layers
	}
	if !allZero(b[46:48]) || !allZero(b[end:]) {
		return SlotHeader{}, fmt.Errorf("ondisk: slot header with bytes in reserved space: %w", ErrDamaged)
	}
	h.LayerSums = sums[:0]
	if !sealed {
		for i := range h.Layers {
			h.LayerSums = append(h.LayerSums, le.Uint64(b[slotFixedBytes+8*i:]))
		}
	}
	if err := h.validate(); err != nil {
		return SlotHeader{}, fmt.Errorf("%w: %w", err, ErrDamaged)
	}
	return h, nil
}

// validate checks the fields that Layout does not check.
func (h *SlotHeader) validate() error {
	switch {
	case h.Class != ClassPrefix && h.Class != ClassTransfer:
		return fmt.Errorf("ondisk: slot header with class %d: %w", h.Class, ErrLayout)
	case h.Generation == 0 || h.Generation >= 1<<kv.GenerationBits:
		return fmt.Errorf("ondisk: slot header with generation %d: %w", h.Generation, ErrLayout)
	case h.Born >= h.Generation:
		return fmt.Errorf("ondisk: slot header of generation %d with content of generation %d: %w", h.Generation, h.Born, ErrLayout)
	case h.Namespace == 0:
		return fmt.Errorf("ondisk: slot header without a namespace: %w", ErrLayout)
	case int(h.Group) >= kv.MaxGroups:
		return fmt.Errorf("ondisk: slot header with layer group %d; at most %d: %w", h.Group, kv.MaxGroups-1, ErrLayout)
	}
	return nil
}

// String prints one field per line, as `penstock store inspect` does.
func (h *SlotHeader) String() string {
	var w strings.Builder
	fmt.Fprintf(&w, "slot %v %v\n", h.Ref(), h.Class)
	if h.Born != 0 {
		fmt.Fprintf(&w, "  moved      from a slot of generation %v\n", h.Born)
	}
	fmt.Fprintf(&w, "  namespace  %d epoch %d group %d\n", h.Namespace, h.Epoch, h.Group)
	fmt.Fprintf(&w, "  block      %v depth %d\n", h.ID, h.Depth)
	fmt.Fprintf(&w, "  parent     %v\n", h.Parent)
	fmt.Fprintf(&w, "  geometry   %v\n", h.Geometry)
	fmt.Fprintf(&w, "  payload    %d bytes in %d layers\n", h.PayloadBytes, h.Layers)
	if h.Key != (KeyID{}) {
		fmt.Fprintf(&w, "  key        %v\n", h.Key)
	}
	for i, sum := range h.LayerSums {
		fmt.Fprintf(&w, "  layer %-4d %016x\n", i, sum)
	}
	return w.String()
}

// LayerSum is the checksum of one layer: XXH3-64.
func LayerSum(layer []byte) uint64 { return xxh3.Hash(layer) }

// AppendLayerSums divides payload into equal parts, as many as layers, and appends the checksum of
// each part to dst.
func AppendLayerSums(dst []uint64, payload []byte, layers int) []uint64 {
	n := len(payload) / layers
	for i := range layers {
		dst = append(dst, LayerSum(payload[i*n:(i+1)*n]))
	}
	return dst
}
