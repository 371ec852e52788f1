package trie

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/penstock-kv/penstock/kv"
)

// Moved says that the piece in slot From has been copied to slot To.
type Moved struct{ From, To kv.Ref }

// Move makes the index name the slots To instead of From, all of them in one Pebble
// batch, which is not synced. Leases, class, children, quota and the order of
// eviction stay as they are. moved[i] is false if the index no longer has a piece in
// moves[i].From that can be matched; it does not refer to moves[i].To then. After an
// error nothing was moved.
//
// The owner of the slots frees From when Move has returned. A match that was made
// before may still name it: see Find.
func (t *Trie) Move(moves []Moved) (moved []bool, err error) {
	if err := t.usable(); err != nil {
		return nil, err
	}
	t.records.Lock()
	defer t.records.Unlock()
	if err := t.disk.broken(); err != nil {
		return nil, err
	}
	m := moving{t: t, moves: moves, moved: make([]bool, len(moves))}
	if err := m.read(); err != nil {
		return nil, err
	}
	m.batch = t.disk.db.NewBatch()
	if err = m.stage(); err == nil {
		err = t.disk.commit(m.batch, false, m.owe)
	} else {
		m.batch.Close()
	}
	m.settle(err != nil)
	if err != nil {
		return nil, err
	}
	return m.moved, nil
}

// moving is one Move. Trie.records is held for writing: no other call writes the
// record of a node that is in the index.
type moving struct {
	t     *Trie
	moves []Moved
	moved []bool
	// pieces and next have the records of each slot From, and of the slot behind
	// it: the piece there may say that its parent is in the slot before.
	pieces, next []*record
	// nodes are the moved nodes, by move. guarded stay in the index until settle.
	nodes   []uint32
	guarded []uint32
	// rewritten: by move, the record of next is in the batch.
	rewritten []bool
	batch     *pebble.Batch
}

// read brings the records.
func (m *moving) read() error {
	at := func(e kv.Extent) (*record, error) {
		value, err := m.t.get(appendBlockKey(nil, e))
		if value == nil || err != nil {
			return nil, err
		}
		rec, err := decodeRecord(value)
		if err != nil {
			return nil, fmt.Errorf("trie: slot %v: %w", e, err)
		}
		return &rec, nil
	}
	for _, mv := range m.moves {
		piece, err := at(mv.From.Extent)
		if err != nil {
			return err
		}
		next, err := at(mv.From.Extent + 1)
		if err != nil {
			return err
		}
		m.pieces, m.next = append(m.pieces, piece), append(m.next, next)
	}
	return nil
}

// stage gives the nodes their new slots and fills the batch. A match finds the new
// slots from here on, which hold what the old ones do.
func (m *moving) stage() error {
	t := m.t
	t.mu.Lock()
	defer t.mu.Unlock()
	m.nodes, m.rewritten = make([]uint32, len(m.moves)), make([]bool, len(m.moves))
	for i, mv := range m.moves {
		n := t.nodeOf(m.pieces[i])
		if n == 0 || t.nodes.at(n).ref() != mv.From || t.spaces[t.nodes.at(n).space].dead || !t.rootedLocked(n) {
			continue
		}
		m.guard(n)
		t.nodes.at(n).setRef(mv.To)
		m.nodes[i], m.moved[i] = n, true
	}
	// Records say where the parent lies, so all nodes have their new slots first.
	for i, mv := range m.moves {
		n := m.nodes[i]
		if n == 0 {
			continue
		}
		if err := m.batch.Delete(appendBlockKey(nil, mv.From.Extent), nil); err != nil {
			return fmt.Errorf("%w: %w", ErrBroken, err)
		}
		if err := m.set(n); err != nil {
			return err
		}
		c := t.nodeOf(m.next[i])
		if c == 0 || t.nodes.at(c).extent != mv.From.Extent+1 || t.nodes.at(c).parent != n || t.nodes.at(c).group() != 0 {
			continue
		}
		m.guard(c)
		if err := m.set(c); err != nil {
			return err
		}
		m.rewritten[i] = true
	}
	return nil
}

// nodeOf returns the node of a record, 0 if the index has none. Trie.mu is held.
func (t *Trie) nodeOf(rec *record) uint32 {
	if rec == nil {
		return 0
	}
	return t.table.find(t.bySerial[rec.serial], rec.group, &rec.id)
}

func (m *moving) guard(n uint32) {
	if guard(m.t.nodes.at(n)) {
		m.guarded = append(m.guarded, n)
	}
}

// set writes the record of a node as it is now.
func (m *moving) set(n uint32) error {
	rec := m.t.recordOf(n)
	if err := m.batch.Set(appendBlockKey(nil, m.t.nodes.at(n).extent), rec.append(nil), nil); err != nil {
		return fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return nil
}

// owe names the records that settle goes back to.
func (m *moving) owe(o owed) {
	for i, mv := range m.moves {
		if m.nodes[i] == 0 {
			continue
		}
		o.remove(appendBlockKey(nil, mv.To.Extent))
		o.set(appendBlockKey(nil, mv.From.Extent), m.pieces[i].append(nil))
		if m.rewritten[i] {
			o.set(appendBlockKey(nil, mv.From.Extent+1), m.next[i].append(nil))
		}
	}
}

// settle lets go of the nodes, which get their old slots back if undo is set.
func (m *moving) settle(undo bool) {
	t := m.t
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, n := range m.nodes {
		if n != 0 && undo {
			t.nodes.at(n).setRef(m.moves[i].From)
		}
	}
	t.leases.unguard(t, m.guarded...)
}

// Find returns the slot of a piece that can be matched in that epoch. A reader whose
// slot was freed asks it whether the piece was moved.
func (t *Trie) Find(id kv.NamespaceID, epoch kv.Epoch, piece PieceKey) (kv.Ref, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil || ns.def.Epoch != epoch {
		return kv.Ref{}, false
	}
	n := t.table.find(ns.space.number, piece.Group, &piece.ID)
	if n == 0 || t.nodes.at(n).has(flagPending) || !t.rootedLocked(n) {
		return kv.Ref{}, false
	}
	return t.nodes.at(n).ref(), true
}
