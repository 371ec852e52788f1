package trie

import "github.com/penstock-kv/penstock/kv"

// ChangeKind is the kind of a Change.
type ChangeKind uint8

const (
	// BlockAdded: the first piece of a block became matchable.
	BlockAdded ChangeKind = iota + 1
	// BlockRemoved: a block that BlockAdded reported left the index or was doomed. A descendant of
	// a doomed piece is reported only when ReclaimStep or a Put reaches it.
	BlockRemoved
	// SpaceCleared: no piece of that epoch of the namespace is matchable any more. The blocks of
	// the epoch are not reported one by one.
	SpaceCleared
)

// Change reports a change of the index to consumers that mirror the index. It covers only
// pieces of the first layer group.
type Change struct {
	Kind ChangeKind
	// Why is the reason of BlockRemoved. For SpaceCleared it is Deleted if the namespace was
	// deleted, and Cleared otherwise.
	Why       Why
	Index     kv.IndexKind
	Namespace string
	Epoch     kv.Epoch
	// ID is zero for SpaceCleared. Parent is Entry.Parent for BlockAdded, and otherwise zero.
	ID, Parent kv.BlockID
}

// OnChange makes the Trie call f with each change from now on, in the order of the
// changes. Trie.mu is held: f must not wait and must not call the Trie.
func (t *Trie) OnChange(f func(Change)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.onChange = f
}

// changeLocked reports the change of one piece of sp.
func (t *Trie) changeLocked(kind ChangeKind, why Why, sp *space, group uint8, id, parent kv.BlockID) {
	if t.onChange == nil || group != 0 {
		return
	}
	def := &sp.ns.def
	t.onChange(Change{Kind: kind, Why: why, Index: def.Index, Namespace: def.Name, Epoch: sp.epoch, ID: id, Parent: parent})
}

// addedLocked reports that the piece of an entry became matchable.
func (t *Trie) addedLocked(n uint32, e *Entry) {
	nd := t.nodes.at(n)
	if sp := t.spaces[nd.space]; !sp.dead && !nd.has(flagDoomed) {
		t.changeLocked(BlockAdded, 0, sp, nd.group(), nd.id, e.Parent)
	}
}

// goneLocked reports a piece that is about to be doomed or removed. It skips a piece whose addition
// was not reported, and a doomed piece, which was reported before.
func (t *Trie) goneLocked(nd *node, why Why) {
	if sp := t.spaces[nd.space]; !sp.dead && !nd.has(flagPending|flagDoomed) {
		t.changeLocked(BlockRemoved, why, sp, nd.group(), nd.id, kv.BlockID{})
	}
}
