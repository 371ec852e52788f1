package trie

import (
	"errors"
	"iter"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

var errUnbuilt = errors.New("trie: not built yet")

// A Trie is the prefix index of one storage node. All methods may be called
// concurrently unless they say otherwise.
type Trie struct{}

// Open reads the index in opts.Dir into DRAM, or starts an empty one. Records
// that cannot be matched any more (an old epoch, a deleted namespace, an ancestor
// lost in a crash) are dropped; LoadStats counts them. The owner of the slots must
// afterwards take everything that Refs does not name for free.
func Open(opts Options) (*Trie, error) { return nil, errUnbuilt }

// Close syncs and closes Pebble. No other call may be in progress. It is safe
// to call twice.
func (t *Trie) Close() error { return errUnbuilt }

// Sync makes everything put, evicted or deleted before the call durable.
func (t *Trie) Sync() error { return errUnbuilt }

// Create adds a namespace under def.Name, gives it an id that was never used
// before in this index, and makes it durable. def.ID is ignored. When the name is
// taken it returns the namespace that has it and ErrNamespaceExists.
func (t *Trie) Create(def kv.Namespace) (kv.Namespace, error) { return kv.Namespace{}, errUnbuilt }

// Namespace returns the definition of a namespace with its current epoch, or
// ErrNamespaceUnknown.
func (t *Trie) Namespace(name string) (kv.Namespace, error) { return kv.Namespace{}, errUnbuilt }

// NamespaceByID is Namespace by id.
func (t *Trie) NamespaceByID(id kv.NamespaceID) (kv.Namespace, error) {
	return kv.Namespace{}, errUnbuilt
}

// Namespaces returns every definition, sorted by name.
func (t *Trie) Namespaces() []kv.Namespace { return nil }

// DeleteNamespace removes the definition durably; nothing in it can be matched
// any more, and ReclaimStep returns its pieces.
func (t *Trie) DeleteNamespace(name string) error { return errUnbuilt }

// BumpEpoch moves a namespace to a later epoch with one synced write, whatever
// the number of blocks: they all become unmatchable, and ReclaimStep returns
// them. to 0 means the current epoch + 1; any other must be greater than the
// current one (ErrEpoch).
func (t *Trie) BumpEpoch(name string, to kv.Epoch) (old, current kv.Epoch, err error) {
	return 0, 0, errUnbuilt
}

// SetQuota changes a namespace's quota durably; 0 means none. A quota below
// what is stored evicts nothing by itself: Evict takes from such namespaces
// first, and Put refuses until there is room.
func (t *Trie) SetQuota(name string, bytes int64) error { return errUnbuilt }

// Room is how many bytes of slots may still be put into the namespace before
// its quota is reached: math.MaxInt64 without a quota, 0 when it is over.
func (t *Trie) Room(id kv.NamespaceID) (int64, error) { return 0, errUnbuilt }

// Class says how long a piece is wanted.
type Class uint8

const (
	// Prefix pieces are kept until they are evicted.
	Prefix Class = iota
	// Transfer pieces only pass through: Delivered drops them, and eviction takes
	// them before anything else.
	Transfer
)

// String returns prefix or transfer.
func (c Class) String() string { return "" }

// Entry is one piece to be put.
type Entry struct {
	// ID names the block; not zero.
	ID kv.BlockID
	// Parent is the block before it; zero for the first block of a prompt and in
	// a flat namespace.
	Parent kv.BlockID
	// Group is the index of the layer group in the namespace's geometry.
	Group int
	Class Class
	// Ref is the slot that holds the piece. Its device write is complete
	// (invariant data-before-index).
	Ref kv.Ref
}

// PutStatus says what became of one entry. Only after Added does the index
// refer to the entry's slot; after any other the caller frees it.
type PutStatus uint8

const (
	// Added: the piece is indexed.
	Added PutStatus = iota + 1
	// Exists: the piece is indexed already, in another slot.
	Exists
	// ParentAbsent: the parent, or for a window or state piece the full piece of
	// its block, is not indexed.
	ParentAbsent
	// ParentMismatch: the block is indexed under another parent.
	ParentMismatch
	// TooDeep: the block would be more than MaxChainBlocks from the root.
	TooDeep
	// StaleEpoch: the epoch is not the namespace's current one.
	StaleEpoch
	// OverQuota: the namespace's quota has no room for it.
	OverQuota
)

// String returns the status in lower-case words: added, exists, parent_absent…
func (s PutStatus) String() string { return "" }

// Put indexes pieces whose bytes are on storage. Entries of one call may be
// parents of later ones. They become matchable after the one Pebble batch that
// holds them was applied, and, if durable, synced; a durable Put that finds an
// entry of a concurrent Put waits for it. dst is appended to and returned: one
// status per entry. An error (ErrEntry, ErrNamespaceUnknown, ErrFull, ErrBroken,
// ErrClosed) means that none of the entries was added.
func (t *Trie) Put(dst []PutStatus, id kv.NamespaceID, epoch kv.Epoch, entries []Entry, durable bool) ([]PutStatus, error) {
	return dst, errUnbuilt
}

// Known appends to dst what Put would say now, without putting anything: Added
// for an entry that would be. Ref is ignored.
func (t *Trie) Known(dst []PutStatus, id kv.NamespaceID, epoch kv.Epoch, entries []Entry) ([]PutStatus, error) {
	return dst, errUnbuilt
}

// Cut says why a match ended.
type Cut uint8

const (
	// CutComplete: every block asked for matched.
	CutComplete Cut = iota
	// CutAbsent: the next block is not stored.
	CutAbsent
	// CutEpoch: the epoch asked for is not the namespace's current one.
	CutEpoch
	// CutLeaseDenied: a lease was asked for and there are too many; nothing is
	// matched, since nothing would hold it.
	CutLeaseDenied
	// CutStateMissing: the blocks are there, but no state snapshot at that length.
	CutStateMissing
	// CutWindowMissing: the blocks are there, but not the last of the window.
	CutWindowMissing
	// CutLimit: MatchOptions.MaxBlocks was reached.
	CutLimit
	// CutTooLong: Options.MaxChainBlocks was reached.
	CutTooLong
)

// String returns the stable name that the API and the CLI show: complete,
// absent, epoch, lease_denied, state_missing, window_missing, limit, too_long.
func (c Cut) String() string { return "" }

// Piece is where one layer group of one matched block lies.
type Piece struct {
	Ref kv.Ref
	// Block is the index in the chain that was asked for.
	Block uint32
	// Group is the index of the layer group.
	Group uint8
}

// MatchOptions say what to match. The zero value matches the current epoch
// without a lease.
type MatchOptions struct {
	// Epoch must be the namespace's current one; 0 accepts any.
	Epoch kv.Epoch
	// MaxBlocks shortens the match; 0 means no limit.
	MaxBlocks int
	// Lease asks for a lease on what matched. A match of 0 blocks gets none.
	Lease bool
	// TTL is the length of the lease; 0 means until Release.
	TTL time.Duration
	// Now is the current time; needed with Lease.
	Now time.Time
	// Pieces is appended to and becomes Match.Pieces, so that a caller who reuses
	// it makes the match free of allocation.
	Pieces []Piece
	// NoTouch leaves the order of eviction alone: for inspection.
	NoTouch bool
}

// Match is the answer to a match.
type Match struct {
	// Blocks is the length of the prefix that can be reused, Tokens the same in
	// tokens.
	Blocks, Tokens int
	// Cut says why it is not longer; the block at index Blocks is the one that
	// was missing.
	Cut Cut
	// Stored is how many blocks of the chain are stored consecutively in the full
	// group, at least Blocks: a writer need not send those again.
	Stored int
	// Epoch is the namespace's current epoch.
	Epoch kv.Epoch
	// Lease holds the pieces until it is released or expires; 0 if none.
	Lease LeaseID
	// Pieces are those that reuse at this length needs, group by group and in
	// order of blocks: all of a full group, the last ones of a window group, the
	// last of a state group.
	Pieces []Piece
}

// Match finds the longest prefix of the chain ids for which every layer group
// has what it needs; in a flat namespace, the longest run of keys from the first.
// It fails only with ErrNamespaceUnknown or ErrClosed.
func (t *Trie) Match(id kv.NamespaceID, ids []kv.BlockID, opts MatchOptions) (Match, error) {
	return Match{}, errUnbuilt
}

// MatchTokens hashes the whole blocks of tokens and matches their chain. The
// ids are appended to dst and returned.
func (t *Trie) MatchTokens(dst []kv.BlockID, id kv.NamespaceID, tokens []kv.Token, opts MatchOptions) (Match, []kv.BlockID, error) {
	return Match{}, dst, errUnbuilt
}

// LeaseID names a lease. 0 is none; an id is not reused while the process lives.
type LeaseID uint64

// Renew makes the lease end ttl after now; 0 means at Release. It fails with
// ErrLeaseUnknown if the lease has ended, even if nobody called ExpireLeases.
func (t *Trie) Renew(id LeaseID, ttl time.Duration, now time.Time) error { return errUnbuilt }

// Release ends the lease. Ending it twice is ErrLeaseUnknown.
func (t *Trie) Release(id LeaseID) error { return errUnbuilt }

// ExpireLeases ends every lease whose time has come and returns how many. Evict
// does so too.
func (t *Trie) ExpireLeases(now time.Time) int { return 0 }

// Evicted is one piece that left the index; the caller frees its slot.
type Evicted struct {
	Ref       kv.Ref
	ID        kv.BlockID
	Namespace kv.NamespaceID
	Epoch     kv.Epoch
	Group     int
	Class     Class
	// SlotBytes is what Options.SlotBytes says of it.
	SlotBytes int64
}

// Evict removes pieces until they make up want bytes of slots, and appends them
// to dst. What is unmatchable goes first, then transfer pieces, then namespaces
// over their quota, then the policy's order; always leaf first, never what a
// lease holds. With only != 0 it takes from that namespace alone. Fewer bytes
// than wanted means that nothing else may go.
func (t *Trie) Evict(dst []Evicted, want int64, only kv.NamespaceID, now time.Time) ([]Evicted, error) {
	return dst, errUnbuilt
}

// Delivered drops the transfer pieces of the given blocks, deepest last in ids,
// as far as they are leaves without a lease, and appends them to dst. The others
// go as soon as they are evictable.
func (t *Trie) Delivered(dst []Evicted, id kv.NamespaceID, ids []kv.BlockID) ([]Evicted, error) {
	return dst, errUnbuilt
}

// Delete makes a block and everything below it unmatchable, durably, and returns
// ErrAbsent if it is not there. ReclaimStep returns the pieces.
func (t *Trie) Delete(id kv.NamespaceID, block kv.BlockID) error { return errUnbuilt }

// DeleteAll makes every block of the namespace unmatchable, durably. The epoch
// stays.
func (t *Trie) DeleteAll(id kv.NamespaceID) error { return errUnbuilt }

// Remove makes the piece in that slot, and everything below its block,
// unmatchable: the store found it corrupt or refused it. It is ErrAbsent if the
// index does not refer to ref. ReclaimStep returns the pieces, this one too.
func (t *Trie) Remove(ref kv.Ref) error { return errUnbuilt }

// ReclaimStep takes up to max unmatchable pieces (old epochs, deleted or corrupt
// subtrees) out of the index and appends them to dst. more false means that
// nothing is left to do now: what remains is held by leases.
func (t *Trie) ReclaimStep(dst []Evicted, max int) (out []Evicted, more bool, err error) {
	return dst, false, errUnbuilt
}

// Refs yields the slot, namespace and group of every indexed piece. The index
// may be changed meanwhile, also from inside the loop; what changes may or may not
// be seen.
func (t *Trie) Refs() iter.Seq2[kv.Ref, Place] { return nil }

// Place says whose a slot is.
type Place struct {
	Namespace kv.NamespaceID
	Group     int
}

// Info describes one stored piece.
type Info struct {
	ID        kv.BlockID
	Parent    kv.BlockID // zero for a root
	Group     int
	Depth     int // 0 for the first block of a prompt
	Ref       kv.Ref
	Class     Class
	Children  int // blocks and pieces that hang on it
	Leases    int // that pin this very piece
	SlotBytes int64
}

// Stat returns the pieces of one block, by group, or ErrAbsent.
func (t *Trie) Stat(id kv.NamespaceID, block kv.BlockID) ([]Info, error) { return nil, errUnbuilt }

// List returns up to limit pieces of the namespace in no particular order, and
// the cursor for the next call; the first cursor and the last one returned are 0.
// Pieces put or removed between two calls may be missed.
func (t *Trie) List(id kv.NamespaceID, cursor uint32, limit int) (infos []Info, next uint32, err error) {
	return nil, 0, errUnbuilt
}

// NamespaceStats are the figures of one namespace.
type NamespaceStats struct {
	ID    kv.NamespaceID
	Name  string
	Epoch kv.Epoch
	// Blocks are pieces of the first group, Pieces those of every group.
	Blocks, Pieces int64
	// Bytes are the slots of the pieces and of what was not reclaimed yet.
	Bytes, QuotaBytes int64
}

// Stats are the figures of an index.
type Stats struct {
	Blocks, Pieces, Bytes int64
	// Unmatchable are pieces that wait for ReclaimStep.
	Unmatchable int64
	// Leases are open, Pins the pieces that they hold.
	Leases, Pins int64
	Policy       string
	// NodeBytes, TableBytes, PolicyBytes and LeaseBytes are the DRAM of the index.
	NodeBytes, TableBytes, PolicyBytes, LeaseBytes int64
	// DiskBytes is what Pebble occupies, MemTableBytes and CacheBytes its memory.
	DiskBytes, MemTableBytes, CacheBytes int64
	// Load is what Open found.
	Load LoadStats
	// Namespaces are sorted by name.
	Namespaces []NamespaceStats
}

// LoadStats say what Open found.
type LoadStats struct {
	Loaded int64
	// StaleEpoch records belong to an old epoch or a deleted namespace, Orphans
	// lost an ancestor, Duplicates name a piece that another slot holds too,
	// Corrupt ones do not decode. All were dropped.
	StaleEpoch, Orphans, Duplicates, Corrupt int64
	Took                                     time.Duration
}

// Stats returns the current figures.
func (t *Trie) Stats() Stats { return Stats{} }

// String draws the index, for tests and small indexes: one line a piece, children
// below their parents, with slot, leases and class.
func (t *Trie) String() string { return "" }

// Check verifies every invariant of the index in DRAM, and that Pebble holds
// exactly the same pieces. It is slow and must not run concurrently with writes.
func (t *Trie) Check() error { return errUnbuilt }
