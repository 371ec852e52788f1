package trie

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie/evict"
)

// Options configure a Trie. Only Dir is required; the zero value of every other
// field means its default.
type Options struct {
	// Dir holds the Pebble database; it is created if absent.
	Dir string
	// Owner names the store whose slots the index refers to. A new index records Owner. Open
	// refuses the index of another store with ErrForeign, because its refs are wrong for the slots
	// of Owner. With an empty Owner, nothing is recorded or checked.
	Owner string
	// FS is the file system of Dir. Default: the operating system's.
	FS vfs.FS
	// Policy orders eviction. Default: evict.Default.
	Policy evict.Kind
	// Tuning adjusts the policy. Default: evict's.
	Tuning evict.Tuning
	// SlotBytes returns the bytes of storage that one piece of the group occupies, with header and
	// padding. Quotas, Evict and Stats count in these bytes. Default: kv.Geometry.PieceBytes.
	SlotBytes func(g kv.Geometry, group int) int64
	// CacheBytes is the size of Pebble's block cache, in bytes. Matches are answered from DRAM, so
	// only compactions and Remove use the cache. Default 8 MiB.
	CacheBytes int64
	// MemTableBytes is the size of one Pebble memtable, in bytes; up to three exist at a time under
	// load. Default 16 MiB.
	MemTableBytes int64
	// HungAfter is the time after which a running operation of the file system counts as hung.
	// Changes of the index then fail with ErrBroken until that operation completes. Default 10 s.
	HungAfter time.Duration
	// MaxLeases is the maximum number of open leases. Default 65,536.
	MaxLeases int
	// MaxPins is the maximum number of pins of all leases together. In a namespace with a full
	// group only, a lease has one pin. In a flat namespace it has one pin for each of its pieces.
	// Default 4,194,304.
	MaxPins int
	// MaxChainBlocks is the maximum length, in blocks, of the chain that one match examines, and so
	// the maximum depth of the tree. Default 131,072.
	MaxChainBlocks int
	// MaxNamespaces is the maximum number of namespaces with a record, and MaxAnnounced of announced
	// ones (Announce). Defaults: 4,096 and 131,072.
	MaxNamespaces, MaxAnnounced int
	// Grew is called when the DRAM of the index has grown by about growthStep since the last call,
	// also while Open reads the index. bytes is the size of that DRAM. Trie.mu is held: Grew must
	// not wait and must not call the Trie. Default: not called.
	Grew func(bytes int64)
	// Absent reports whether a volume is temporarily missing. The pieces on such a volume and their
	// descendants are not matchable and may be put again. Their records stay in Pebble for the next
	// Open with that volume, except those whose slots were reused. Default: no volume is missing.
	Absent func(volume uint32) bool
	// Logger receives messages on which an operator should act. Default: discard.
	Logger *slog.Logger
}

// MaxLeasesLimit is the largest Options.MaxLeases.
const MaxLeasesLimit = 1 << 24

const (
	defaultCacheBytes     = 8 << 20
	defaultMemTableBytes  = 16 << 20
	defaultHungAfter      = 10 * time.Second
	defaultMaxLeases      = 1 << 16
	defaultMaxPins        = 4 << 20
	defaultMaxChainBlocks = 1 << 17
	defaultMaxNamespaces  = 4096
	defaultMaxAnnounced   = 1 << 17
	// growthStep is the growth of the index's DRAM, in bytes, after which Grew is called: 4 MiB,
	// the memory of about 50,000 blocks.
	growthStep = 4 << 20
	// maxSpaces is the maximum number of (namespace, epoch) pairs that are live or hold pieces. A
	// node stores its space in 16 bits, and 0 means no space.
	maxSpaces = 1<<16 - 1
)

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if o.FS == nil {
		o.FS = vfs.Default
	}
	if o.Policy == 0 {
		o.Policy = evict.Default
	}
	o.Tuning.EnsureDefaults()
	if o.SlotBytes == nil {
		o.SlotBytes = kv.Geometry.PieceBytes
	}
	options.SetDefault(&o.CacheBytes, defaultCacheBytes)
	options.SetDefault(&o.MemTableBytes, defaultMemTableBytes)
	options.SetDefault(&o.HungAfter, defaultHungAfter)
	options.SetDefault(&o.MaxLeases, defaultMaxLeases)
	options.SetDefault(&o.MaxPins, defaultMaxPins)
	options.SetDefault(&o.MaxChainBlocks, defaultMaxChainBlocks)
	options.SetDefault(&o.MaxNamespaces, defaultMaxNamespaces)
	options.SetDefault(&o.MaxAnnounced, defaultMaxAnnounced)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Validate reports the first field that is out of range, or nil.
func (o Options) Validate() error {
	switch {
	case o.Dir == "":
		return fmt.Errorf("trie: Options.Dir is empty; name the directory of the index")
	case o.CacheBytes < 0 || o.MemTableBytes < 256<<10:
		return fmt.Errorf("trie: cache of %d bytes and memtable of %d; want at least 0 and 262144", o.CacheBytes, o.MemTableBytes)
	case o.HungAfter < 0:
		return fmt.Errorf("trie: HungAfter is %v; want a positive time", o.HungAfter)
	case o.MaxLeases < 1 || o.MaxLeases > MaxLeasesLimit:
		return fmt.Errorf("trie: MaxLeases is %d; want 1 to %d", o.MaxLeases, MaxLeasesLimit)
	case o.MaxPins < 1:
		return fmt.Errorf("trie: MaxPins is %d; want at least 1", o.MaxPins)
	case o.MaxChainBlocks < 1 || o.MaxChainBlocks > 1<<24:
		return fmt.Errorf("trie: MaxChainBlocks is %d; want 1 to %d", o.MaxChainBlocks, 1<<24)
	case o.MaxNamespaces < 1 || o.MaxNamespaces > maxSpaces/2:
		return fmt.Errorf("trie: MaxNamespaces is %d; want 1 to %d", o.MaxNamespaces, maxSpaces/2)
	case o.MaxAnnounced < 0:
		return fmt.Errorf("trie: MaxAnnounced is %d; want at least 0", o.MaxAnnounced)
	}
	return o.Tuning.Validate()
}
