package kv

import (
	"encoding/hex"
	"fmt"
)

// BlockIDSize is the length of a BlockID in bytes.
const BlockIDSize = 16

// BlockID names one block of one namespace: the chained hash of all tokens up
// to the end of the block (see Chain), or, in a flat namespace, an opaque key
// that the engine chose. The zero BlockID names nothing.
type BlockID [BlockIDSize]byte

// IsZero reports whether id is the zero BlockID, which names no block.
func (id BlockID) IsZero() bool { return id == BlockID{} }

// String returns the id as 32 lower-case hexadecimal digits.
func (id BlockID) String() string { return hex.EncodeToString(id[:]) }

// MarshalText encodes the id as String does.
func (id BlockID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (id *BlockID) UnmarshalText(text []byte) error {
	v, err := ParseBlockID(string(text))
	if err != nil {
		return err
	}
	*id = v
	return nil
}

// ParseBlockID reads the form that String prints.
func ParseBlockID(s string) (BlockID, error) {
	var id BlockID
	if len(s) != 2*BlockIDSize {
		return id, fmt.Errorf("kv: block id %q has %d characters; want %d hexadecimal digits", s, len(s), 2*BlockIDSize)
	}
	if _, err := hex.Decode(id[:], []byte(s)); err != nil {
		return BlockID{}, fmt.Errorf("kv: block id %q: %w", s, err)
	}
	return id, nil
}

// BlockIDFromBytes copies b, which must be exactly BlockIDSize bytes.
func BlockIDFromBytes(b []byte) (BlockID, error) {
	if len(b) != BlockIDSize {
		return BlockID{}, fmt.Errorf("kv: block id of %d bytes; want %d", len(b), BlockIDSize)
	}
	return BlockID(b), nil
}
