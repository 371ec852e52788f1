package kv

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// Limits of a geometry. They keep every size computed from it below 2^62, so
// that no sum or product in the code can overflow an int64.
const (
	MaxBlockTokens = 1 << 16
	MaxLayers      = 1 << 12
	MaxTokenBytes  = 1 << 24
	MaxGroups      = 8
	// MaxPieceBytes is the maximum size of a piece, which is one group of one block: 1 GiB. It
	// is also the maximum size of one device request and of one transfer.
	MaxPieceBytes = 1 << 30
	maxTagLen     = 64
)

// ErrGeometry is wrapped by every error about an invalid geometry.
var ErrGeometry = errors.New("bad geometry")

// GroupKind determines which blocks of a prefix a layer group needs before the prefix can be
// reused.
type GroupKind uint8

const (
	// Full attention: the group needs every block from the start of the prompt.
	Full GroupKind = iota + 1
	// Window attention: the group needs the blocks that hold the last WindowTokens tokens.
	Window
	// State is recurrent (linear attention, SSM): the group needs one snapshot, which is valid only
	// for a prefix of exactly the length at which the snapshot was taken (PrfaaS, section 3.2).
	State
)

// String returns the kind as configuration writes it: full, window, state.
func (k GroupKind) String() string {
	switch k {
	case Full:
		return "full"
	case Window:
		return "window"
	case State:
		return "state"
	}
	return fmt.Sprintf("GroupKind(%d)", uint8(k))
}

// ParseGroupKind is the inverse of GroupKind.String.
func ParseGroupKind(s string) (GroupKind, error) {
	for _, k := range []GroupKind{Full, Window, State} {
		if k.String() == s {
			return k, nil
		}
	}
	return 0, fmt.Errorf("kv: layer group kind %q; want full, window or state: %w", s, ErrGeometry)
}

// Group is a set of layers whose KV is reused under the same rule (Kind).
type Group struct {
	Kind GroupKind
	// Layers is the number of layers in the group.
	Layers int
	// TokenBytes is the size of the KV of one token in one layer, in bytes. For a State group it is
	// the size of one layer's snapshot, which does not depend on the number of tokens.
	TokenBytes int
	// WindowTokens is the length of a Window group's window; 0 for other kinds.
	WindowTokens int
}

// Geometry is the shape of every block of a namespace. Two engines with the same geometry use the
// same byte offsets in a Full Block.
type Geometry struct {
	// BlockTokens is the number of tokens in one block, 64 for example.
	BlockTokens int
	// DType and Layout are free text ("fp8_e4m3", "tp1") that describes the bytes. Writer and
	// reader must use the same text: with another text the geometry is another one, even if all
	// sizes are equal.
	DType, Layout string
	// Groups are the layer groups, at most MaxGroups, in the order of their pieces within a block.
	Groups []Group
}

// SingleGroup returns the geometry of a model that has full attention only.
func SingleGroup(layers, blockTokens, tokenBytes int) Geometry {
	return Geometry{BlockTokens: blockTokens, Groups: []Group{{Kind: Full, Layers: layers, TokenBytes: tokenBytes}}}
}

// Validate returns an error that names the first invalid field of g, or nil. Every other method
// expects a valid geometry.
func (g Geometry) Validate() error {
	if err := g.validate(); err != nil {
		return fmt.Errorf("kv: %w", err)
	}
	return nil
}

func (g Geometry) validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf(format+": %w", append(args, ErrGeometry)...)
	}
	if g.BlockTokens < 1 || g.BlockTokens > MaxBlockTokens {
		return bad("block of %d tokens; want 1 to %d", g.BlockTokens, MaxBlockTokens)
	}
	if len(g.DType) > maxTagLen || len(g.Layout) > maxTagLen {
		return bad("dtype %q and layout %q must be at most %d bytes long", g.DType, g.Layout, maxTagLen)
	}
	if len(g.Groups) < 1 || len(g.Groups) > MaxGroups {
		return bad("%d layer groups; want 1 to %d", len(g.Groups), MaxGroups)
	}
	for i, gr := range g.Groups {
		if err := gr.validate(g.BlockTokens); err != nil {
			return fmt.Errorf("layer group %d: %w", i, err)
		}
		if gr.Kind == Full && i != 0 {
			return bad("layer group %d is full; the one full group comes first", i)
		}
	}
	return nil
}

func (gr Group) validate(blockTokens int) error {
	switch {
	case gr.Kind != Full && gr.Kind != Window && gr.Kind != State:
		return fmt.Errorf("unknown kind %d: %w", gr.Kind, ErrGeometry)
	case gr.Layers < 1 || gr.Layers > MaxLayers:
		return fmt.Errorf("%d layers; want 1 to %d: %w", gr.Layers, MaxLayers, ErrGeometry)
	case gr.TokenBytes < 1 || gr.TokenBytes > MaxTokenBytes:
		return fmt.Errorf("%d bytes a token and layer; want 1 to %d: %w", gr.TokenBytes, MaxTokenBytes, ErrGeometry)
	case (gr.Kind == Window) != (gr.WindowTokens > 0) || gr.WindowTokens < 0:
		return fmt.Errorf("%s group with a window of %d tokens: %w", gr.Kind, gr.WindowTokens, ErrGeometry)
	}
	// At most 2^16 × 2^24 × 2^12 = 2^52: the product cannot overflow.
	if n := gr.layerBytes(blockTokens) * int64(gr.Layers); n > MaxPieceBytes {
		return fmt.Errorf("a block would be %d bytes; at most %d: %w", n, MaxPieceBytes, ErrGeometry)
	}
	return nil
}

func (gr Group) layerBytes(blockTokens int) int64 {
	if gr.Kind == State {
		return int64(gr.TokenBytes)
	}
	return int64(gr.TokenBytes) * int64(blockTokens)
}

// LayerBytes is the size of one Layer Block of the group, in bytes.
func (g Geometry) LayerBytes(group int) int64 { return g.Groups[group].layerBytes(g.BlockTokens) }

// PieceBytes is the size of the group's piece of one block, in bytes: at most
// MaxPieceBytes.
func (g Geometry) PieceBytes(group int) int64 {
	return g.LayerBytes(group) * int64(g.Groups[group].Layers)
}

// LayerCount is the number of layers in all groups.
func (g Geometry) LayerCount() int {
	n := 0
	for _, group := range g.Groups {
		n += group.Layers
	}
	return n
}

// BlockBytes is the size of one block with all its groups, in bytes.
func (g Geometry) BlockBytes() int64 {
	var n int64
	for i := range g.Groups {
		n += g.PieceBytes(i)
	}
	return n
}

// PieceOffset returns the offset in bytes of the group's piece of a block, if all blocks of a
// prompt lie one after the other, beginning with the prompt's first block.
func (g Geometry) PieceOffset(block, group int) int64 {
	at := int64(block) * g.BlockBytes()
	for i := range group {
		at += g.PieceBytes(i)
	}
	return at
}

// WindowBlocks returns the number of blocks at the end of a prefix that the group needs:
// ceil(WindowTokens / BlockTokens) for a Window group and 1 for State. For Full, which needs all
// blocks, it returns 0.
func (g Geometry) WindowBlocks(group int) int {
	switch gr := g.Groups[group]; gr.Kind {
	case Window:
		return (gr.WindowTokens + g.BlockTokens - 1) / g.BlockTokens
	case State:
		return 1
	}
	return 0
}

// FirstNeeded returns the index of the first block whose piece in the given group is needed to
// reuse a prefix of the given number of blocks. The result is 0 for a Full group.
func (g Geometry) FirstNeeded(group, blocks int) int {
	w := g.WindowBlocks(group)
	if w == 0 {
		return 0
	}
	return max(0, blocks-w)
}

// NeededBytes is the size, in bytes, of all pieces that are needed to reuse a prefix of the given
// number of blocks.
func (g Geometry) NeededBytes(blocks int) int64 { return g.PartBytes(0, blocks, blocks) }

// PartBytes is the size, in bytes, of those pieces of the blocks [from, to) that are needed to
// reuse a prefix of the given number of blocks.
func (g Geometry) PartBytes(from, to, blocks int) int64 {
	var n int64
	for i := range g.Groups {
		n += int64(max(0, to-max(from, g.FirstNeeded(i, blocks)))) * g.PieceBytes(i)
	}
	return n
}

// Digest identifies the geometry: the first 16 bytes of the SHA-256 of its
// canonical encoding. It is stored in every slot's header.
func (g Geometry) Digest() GeometryDigest {
	b := []byte("penstock geometry v1\x00")
	u32 := func(v int) { b = binary.LittleEndian.AppendUint32(b, uint32(v)) }
	u32(g.BlockTokens)
	for _, tag := range []string{g.DType, g.Layout} {
		u32(len(tag))
		b = append(b, tag...)
	}
	u32(len(g.Groups))
	for _, gr := range g.Groups {
		u32(int(gr.Kind))
		u32(gr.Layers)
		u32(gr.TokenBytes)
		u32(gr.WindowTokens)
	}
	sum := sha256.Sum256(b)
	return GeometryDigest(sum[:16])
}

// Equal reports whether both geometries describe the same bytes.
func (g Geometry) Equal(o Geometry) bool { return g.Digest() == o.Digest() }

// String prints the geometry on one line: "64 tokens × [full 61×656 B]".
func (g Geometry) String() string {
	var parts []string
	for _, gr := range g.Groups {
		s := fmt.Sprintf("%s %d×%d B", gr.Kind, gr.Layers, gr.TokenBytes)
		if gr.Kind == Window {
			s += fmt.Sprintf(" window %d", gr.WindowTokens)
		}
		parts = append(parts, s)
	}
	return fmt.Sprintf("%d tokens × [%s]", g.BlockTokens, strings.Join(parts, ", "))
}

// GeometryDigest is the identity of a Geometry.
type GeometryDigest [16]byte

// String returns the digest in hexadecimal.
func (d GeometryDigest) String() string { return hex.EncodeToString(d[:]) }
