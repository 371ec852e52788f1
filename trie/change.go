package trie

import "github.com/penstock-kv/penstock/kv"

// ChangeKind is the kind of a Change.
type ChangeKind uint8

const (
	// BlockAdded: the first piece of a block became matchable.
	BlockAdded ChangeKind = iota + 1
	// BlockRemoved: a block that BlockAdded reported left the index or was doomed (cannot be
	// matched and waits for ReclaimStep). A descendant of a doomed piece is reported only when
	// ReclaimStep or a Put finds it.
	BlockRemoved
	// SpaceCleared: no piece of Epoch in Namespace is matchable any more. No BlockRemoved is
	// reported for the blocks of that epoch.
	SpaceCleared
)

// Change is a change of the index, for consumers that mirror the index. Only pieces of the first
// layer group are reported.
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

// goneLocked reports that a piece is about to be doomed (made unmatchable) or removed. It does not
// report a pending piece, whose addition was not reported, or a doomed piece, which was reported
// when it was doomed.
func (t *Trie) goneLocked(nd *node, why Why) {
	if sp := t.spaces[nd.space]; !sp.dead && !nd.has(flagPending|flagDoomed) {
		t.changeLocked(BlockRemoved, why, sp, nd.group(), nd.id, kv.BlockID{})
	}
}
