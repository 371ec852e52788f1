package kv

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// ErrNamespace is wrapped by every error about an invalid namespace.
var ErrNamespace = errors.New("bad namespace")

// Epoch is the version of the model's weights with which KV was computed. A block of one epoch is
// never served to a reader that requests another epoch.
type Epoch uint64

// EpochRun is a run of consecutive blocks of a chain that have the same epoch.
type EpochRun struct {
	Epoch  Epoch
	Blocks int
}

// MaxLive is the maximum number of live epochs of a namespace.
const MaxLive = 16

// MaxEpoch is the highest epoch that a caller may name. A bump to the next epoch may exceed it, so
// that one more bump is always possible.
const MaxEpoch Epoch = math.MaxInt64

// NamespaceID is the number of a namespace on one storage node. The node never reuses it, so slots
// of a deleted namespace cannot be mistaken for slots of a later namespace with the same name. The
// id 0 is invalid.
type NamespaceID uint32

// IndexKind determines how the blocks of a namespace are found.
type IndexKind uint8

const (
	// IndexTrie: ids are chained. A block can be matched as long as all blocks before it in the
	// chain are stored.
	IndexTrie IndexKind = iota + 1
	// IndexFlat: ids are opaque keys without parents (LMCache chunks, vLLM's
	// block hashes). A match is the run of stored keys at the start of the requested list of keys.
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
	// ID is assigned by the node at creation.
	ID NamespaceID
	// Name is unique on the node. It has 1 to 128 characters of [A-Za-z0-9._/-].
	Name string
	// Tenant owns the cache. Tenant and Salt are hashed into every BlockID, so equal prompts of two
	// tenants have unrelated ids.
	Tenant string
	// Salt is hashed into every BlockID; at most 64 bytes.
	Salt     []byte
	Geometry Geometry
	Index    IndexKind
	// Epoch is the newest version of the weights. It is live: its blocks can be
	// matched and stored.
	Epoch Epoch
	// Older are the other live epochs, newest first. Blocks of an epoch that is not
	// live can be neither matched nor stored.
	// Invariant: strictly descending, below Epoch, fewer than MaxLive.
	Older []Epoch `json:",omitempty"`
	// Keep is the number of newest live epochs that stay live without a pin, until a bump or Retire
	// ends them; 0 means 1. All older live epochs are pinned, and end with their pins.
	// Invariant: at most 1 + len(Older).
	Keep int `json:",omitempty"`
	// QuotaBytes is the maximum size of the slots of the namespace, in bytes; 0 means that only the
	// size of the store limits it.
	QuotaBytes int64
	// Replicas is the number of nodes of a cluster that store each sequence; 0 means 1.
	Replicas int `json:",omitempty"`
}

// MaxReplicas is the largest Namespace.Replicas.
const MaxReplicas = 4

// Copies returns the number of nodes that store each sequence.
func (n Namespace) Copies() int { return max(1, n.Replicas) }

const (
	maxNameLen = 128
	maxSaltLen = 64
)

// descending reports whether newest and the epochs of older are in strictly descending order.
func descending(newest Epoch, older []Epoch) bool {
	for _, e := range older {
		if e >= newest {
			return false
		}
		newest = e
	}
	return true
}

// Live returns the live epochs, newest first.
func (n Namespace) Live() []Epoch { return append([]Epoch{n.Epoch}, n.Older...) }

// IsLive reports whether blocks of epoch e can be matched and stored.
func (n Namespace) IsLive(e Epoch) bool { return e == n.Epoch || slices.Contains(n.Older, e) }

// kept is the number of live epochs that do not need a pin.
func (n Namespace) kept() int { return max(1, n.Keep) }

// Bump returns n with the argument to as the newest epoch; to must be greater than n.Epoch. Of the
// epochs that were live without a pin, the newest keep-1 stay live. Of the other live epochs, the
// pinned ones stay live. If more than MaxLive epochs would be live, the oldest are dropped.
func (n Namespace) Bump(to Epoch, keep int, pinned func(Epoch) bool) Namespace {
	was := n.Live()
	keep = 1 + min(keep-1, n.kept())
	n.Epoch, n.Older, n.Keep = to, nil, keep
	for i, e := range was {
		if (i < keep-1 || pinned(e)) && len(n.Older) < MaxLive-1 {
			n.Older = append(n.Older, e)
		}
	}
	return n
}

// Settle returns n without the older epochs that need a pin to stay live but have none.
func (n Namespace) Settle(pinned func(Epoch) bool) Namespace {
	was := n.Older
	n.Older = nil
	for i, e := range was {
		if i < n.kept()-1 || pinned(e) {
			n.Older = append(n.Older, e)
		}
	}
	return n
}

// Retire returns n without the older epoch e.
func (n Namespace) Retire(e Epoch) Namespace {
	i := slices.Index(n.Older, e)
	if i < 0 {
		return n
	}
	if i < n.kept()-1 {
		n.Keep--
	}
	n.Older = slices.Delete(slices.Clone(n.Older), i, i+1)
	return n
}

// Validate returns an error that names the first invalid field of n, or nil. It accepts every ID
// and every Epoch.
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
	case n.Keep < 0 || n.Keep > 1+len(n.Older):
		return fmt.Errorf("kv: namespace %q: keeps %d of %d live epochs: %w", n.Name, n.Keep, 1+len(n.Older), ErrNamespace)
	case len(n.Older) >= MaxLive || !descending(n.Epoch, n.Older):
		return fmt.Errorf("kv: namespace %q: older epochs %d of epoch %d; want at most %d, descending: %w", n.Name, n.Older, n.Epoch, MaxLive-1, ErrNamespace)
	case n.QuotaBytes < 0:
		return fmt.Errorf("kv: namespace %q: quota of %d bytes: %w", n.Name, n.QuotaBytes, ErrNamespace)
	case n.Replicas < 0 || n.Replicas > MaxReplicas:
		return fmt.Errorf("kv: namespace %q: %d replicas; want at most %d: %w", n.Name, n.Replicas, MaxReplicas, ErrNamespace)
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
