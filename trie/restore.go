package trie

import (
	"encoding/json"
	"fmt"

	"github.com/penstock-kv/penstock/kv"
)

// Fresh reports whether this index has never assigned a namespace id: the index is new, or the old
// index was lost and this one was created in its place.
func (t *Trie) Fresh() bool {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	return t.marks.NamespaceID == 0
}

// HighestNamespace returns the highest namespace id ever assigned.
func (t *Trie) HighestNamespace() kv.NamespaceID {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	return t.marks.NamespaceID
}

// RaiseHighest reserves all namespace ids up to id, durably.
func (t *Trie) RaiseHighest(id kv.NamespaceID) error {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	if id <= t.marks.NamespaceID {
		return nil
	}
	return t.raiseHighest(id)
}

// Restore creates namespaces in a fresh index, durably, with the ids and live epochs that they had
// before. Epochs that were live only because of a pin are retired. highest is the highest namespace
// id that the node may ever have assigned, for deleted namespaces too. Ids up to highest are not
// assigned again, so a slot of a deleted namespace cannot be mistaken for a slot of a later one.
// Restore fails with ErrNamespaceExists if the index is not fresh.
func (t *Trie) Restore(defs []kv.Namespace, highest kv.NamespaceID) error {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	if t.marks.NamespaceID != 0 {
		return fmt.Errorf("trie: restore: this index has had namespaces: %w", ErrNamespaceExists)
	}
	if err := t.checkRestore(defs); err != nil {
		return err
	}
	if err := t.raiseHighest(highest); err != nil {
		return err
	}
	for _, def := range defs {
		def = clone(def).Settle(unpinned)
		if err := t.writeDefinition(newNamespace(def, t.opts.SlotBytes), def, false); err != nil {
			return fmt.Errorf("trie: restore %q: %w", def.Name, err)
		}
	}
	return nil
}

func (t *Trie) checkRestore(defs []kv.Namespace) error {
	if len(defs) > t.opts.MaxNamespaces {
		return fmt.Errorf("trie: restore %d namespaces, at most %d: %w", len(defs), t.opts.MaxNamespaces, ErrTooManyNamespaces)
	}
	ids := make(map[kv.NamespaceID]bool, len(defs))
	names := make(map[string]bool, len(defs))
	for _, def := range defs {
		if err := def.Validate(); err != nil {
			return fmt.Errorf("trie: restore: %w", err)
		}
		if def.ID == 0 || ids[def.ID] || names[def.Name] {
			return fmt.Errorf("trie: restore: namespace %q with id %d: the id is 0, or the name or the id occurs twice: %w", def.Name, def.ID, ErrNamespaceExists)
		}
		ids[def.ID], names[def.Name] = true, true
	}
	return nil
}

// raiseHighest reserves the ids up to highest, durably. defMu is held.
func (t *Trie) raiseHighest(highest kv.NamespaceID) error {
	next := t.marks
	next.NamespaceID = max(next.NamespaceID, highest)
	value, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("trie: marks: %w", err)
	}
	b := t.disk.Load().db.NewBatch()
	if err := b.Set(marksKey, value, nil); err != nil {
		b.Close()
		return fmt.Errorf("trie: marks: %w", err)
	}
	if err := t.commit(b, true, nil); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.marks = next
	return nil
}
