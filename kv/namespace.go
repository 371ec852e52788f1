package kv

import (
	"errors"
	"fmt"
	"strings"
)

// ErrNamespace is wrapped by every error about a namespace that cannot be.
var ErrNamespace = errors.New("bad namespace")

// Epoch is the version of the weights under which KV was computed. Blocks of
// another epoch are never matched.
type Epoch uint64

// NamespaceID is a namespace's number on one storage node. It is never reused
// there, so the slots of a deleted namespace cannot be taken for those of a
// later one of the same name. 0 is no namespace.
type NamespaceID uint32

// IndexKind says how the blocks of a namespace are found.
type IndexKind uint8

const (
	// IndexTrie: ids are chained, a block is matchable while its ancestors are.
	IndexTrie IndexKind = iota + 1
	// IndexFlat: ids are opaque keys without parents (LMCache chunks, vLLM's
	// block hashes); a match is the run of keys that are present.
	IndexFlat
)

// String returns the kind as configuration writes it: trie, flat.
func (k IndexKind) String() string {
	switch k {
	case IndexTrie:
		return "trie"
	case IndexFlat:
		return "flat"
	}
	return fmt.Sprintf("IndexKind(%d)", uint8(k))
}

// ParseIndexKind is the inverse of IndexKind.String.
func ParseIndexKind(s string) (IndexKind, error) {
	for _, k := range []IndexKind{IndexTrie, IndexFlat} {
		if k.String() == s {
			return k, nil
		}
	}
	return 0, fmt.Errorf("kv: index kind %q; want trie or flat: %w", s, ErrNamespace)
}

// Namespace is one model's KV cache under one geometry.
type Namespace struct {
	// ID is given by the node at creation.
	ID NamespaceID
	// Name is unique on the node: 1 to 128 of [A-Za-z0-9._/-].
	Name string
	// Tenant is whose cache it is; it and Salt go into every BlockID, so that
	// equal prompts of two tenants have unrelated ids.
	Tenant string
	// Salt is mixed into every BlockID; at most 64 bytes.
	Salt     []byte
	Geometry Geometry
	Index    IndexKind
	// Epoch is the current version of the weights.
	Epoch Epoch
	// QuotaBytes caps the slots the namespace may occupy; 0 means no cap of its
	// own.
	QuotaBytes int64
}

const (
	maxNameLen = 128
	maxSaltLen = 64
)

// Validate reports the first thing that is wrong with n, or nil. ID and Epoch
// may be anything.
func (n Namespace) Validate() error {
	if err := validateName("namespace name", n.Name, 1); err != nil {
		return err
	}
	if err := validateName("tenant", n.Tenant, 0); err != nil {
		return err
	}
	switch {
	case len(n.Salt) > maxSaltLen:
		return fmt.Errorf("kv: namespace %q: salt of %d bytes; at most %d: %w", n.Name, len(n.Salt), maxSaltLen, ErrNamespace)
	case n.Index != IndexTrie && n.Index != IndexFlat:
		return fmt.Errorf("kv: namespace %q: unknown index kind %d: %w", n.Name, n.Index, ErrNamespace)
	case n.QuotaBytes < 0:
		return fmt.Errorf("kv: namespace %q: quota of %d bytes: %w", n.Name, n.QuotaBytes, ErrNamespace)
	case n.Index == IndexFlat && len(n.Geometry.Groups) > 1:
		return fmt.Errorf("kv: namespace %q: a flat index takes one layer group, not %d: %w", n.Name, len(n.Geometry.Groups), ErrNamespace)
	}
	if err := n.Geometry.validate(); err != nil {
		return fmt.Errorf("kv: namespace %q: %w", n.Name, err)
	}
	return nil
}

func validateName(what, s string, minLen int) error {
	if len(s) < minLen || len(s) > maxNameLen {
		return fmt.Errorf("kv: %s %q is %d bytes long; want %d to %d: %w", what, s, len(s), minLen, maxNameLen, ErrNamespace)
	}
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._/-"
	if i := strings.IndexFunc(s, func(r rune) bool { return !strings.ContainsRune(allowed, r) }); i >= 0 {
		return fmt.Errorf("kv: %s %q: character %d is not one of [A-Za-z0-9._/-]: %w", what, s, i, ErrNamespace)
	}
	return nil
}

// Chain returns the chain that hashes this namespace's prompts.
func (n Namespace) Chain() (Chain, error) {
	return NewChain(n.Tenant, n.Name, n.Salt, n.Geometry.BlockTokens)
}
