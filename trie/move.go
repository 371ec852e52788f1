package trie

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/penstock-kv/penstock/kv"
)

// Moved names two slots: the bytes of a piece were copied from slot From to slot To.
type Moved struct{ From, To kv.Ref }

// Move replaces the slots From by the slots To in the index, in one Pebble batch that is not
// synced. The leases, class, children and quota of the pieces and the order of eviction do not
// change. moved[i] is false if the index has no matchable piece in moves[i].From; then the index
// does not refer to moves[i].To either. After an error no piece was moved.
//
// When Move has returned, the owner of the slots frees the slots From. The result of an earlier
// match may still name a slot From; its reader then calls Find.
func (t *Trie) Move(moves []Moved) (moved []bool, err error) {
	if err := t.usable(); err != nil {
		return nil, err
	}
	t.records.Lock()
	defer t.records.Unlock()
	if err := t.disk.Load().broken(); err != nil {
		return nil, err
	}
	m := moving{t: t, moves: moves, moved: make([]bool, len(moves))}
	if err := m.read(); err != nil {
		return nil, err
	}
	m.batch = t.disk.Load().db.NewBatch()
	if err = m.stage(); err == nil {
		err = t.commit(m.batch, false, m.revert)
	} else {
		m.batch.Close()
	}
	m.finish(err != nil)
	if err != nil {
		return nil, err
	}
	return m.moved, nil
}

// moving is the state of one call of Move. Trie.records is held for writing, so no other call
// writes the record of a node in the index.
type moving struct {
	t     *Trie
	moves []Moved
	moved []bool
	// pieces[i] is the record of slot moves[i].From. next[i] is the record of the slot after it:
	// that record may state that its parent is in the previous slot (recParentPrev), which the move
	// makes false.
	pieces, next []*record
	// nodes[i] is the node of moves[i], or 0 if that piece is not moved. The nodes in guarded
	// cannot be removed from the index until finish.
	nodes   []uint32
	guarded []uint32
	// rewritten[i] is set if the batch has a new record for the slot of next[i].
	rewritten []bool
	batch     *pebble.Batch
}

// read reads pieces and next from Pebble.
func (m *moving) read() error {
	at := func(e kv.Extent) (*record, error) {
		value, err := m.t.disk.Load().get(appendBlockKey(nil, e))
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

// stage sets the new slots in the nodes and fills the batch. After stage, matches return the new
// slots. Both slots of a piece hold the same bytes until From is freed.
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
	// A record may state that the parent is in the previous slot. So all nodes get their new slots
	// before the first record is made.
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

// nodeOf returns the node of a record, or 0 if the index has none. Trie.mu is held.
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

// set adds the record of a node, in its present state, to the batch.
func (m *moving) set(n uint32) error {
	rec := m.t.recordOf(n)
	if err := m.batch.Set(appendBlockKey(nil, m.t.nodes.at(n).extent), rec.append(nil), nil); err != nil {
		return fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return nil
}

// revert adds to r the records that restore the state before the batch.
func (m *moving) revert(r reverts) {
	for i, mv := range m.moves {
		if m.nodes[i] == 0 {
			continue
		}
		r.remove(appendBlockKey(nil, mv.To.Extent))
		r.set(appendBlockKey(nil, mv.From.Extent), m.pieces[i].append(nil))
		if m.rewritten[i] {
			r.set(appendBlockKey(nil, mv.From.Extent+1), m.next[i].append(nil))
		}
	}
}

// finish unpins the guarded nodes. If undo is set, it first gives the moved nodes their old slots
// back.
func (m *moving) finish(undo bool) {
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

// Find returns the slot of a matchable piece of that epoch, or false. A reader calls Find when the
// slot that it was to read has been freed, because the piece may have been moved.
func (t *Trie) Find(id kv.NamespaceID, epoch kv.Epoch, piece PieceKey) (kv.Ref, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return kv.Ref{}, false
	}
	sp := ns.version(epoch)
	if sp == nil {
		return kv.Ref{}, false
	}
	n := t.table.find(sp.number, piece.Group, &piece.ID)
	if n == 0 || t.nodes.at(n).has(flagPending) || !t.rootedLocked(n) {
		return kv.Ref{}, false
	}
	return t.nodes.at(n).ref(), true
}
