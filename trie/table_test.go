package trie

import (
	"encoding/binary"
	"testing"

	"github.com/penstock-kv/penstock/kv"
)

// tableModel is a table and a map with the expected content.
type tableModel struct {
	t     *testing.T
	nodes slab
	table *table
	want  map[pieceKey]uint32
}

func newTableModel(t *testing.T) *tableModel {
	m := &tableModel{t: t, want: make(map[pieceKey]uint32)}
	m.table = newTable(&m.nodes, [2]uint64{1, 2})
	return m
}

// toggle inserts the key if it is absent and removes it if it is there.
func (m *tableModel) toggle(id kv.BlockID, group int) {
	key := pieceKey{id, group}
	n, there := m.want[key]
	if got := m.table.find(1, uint8(group), &id); got != n {
		m.t.Fatalf("%v: found %d; want %d", key, got, n)
	}
	if there {
		if !m.table.remove(n) {
			m.t.Fatalf("%v: node %d is not there to be removed", key, n)
		}
		m.nodes.release(n)
		delete(m.want, key)
		return
	}
	n = m.nodes.alloc()
	nd := m.nodes.at(n)
	nd.id, nd.space = id, 1
	nd.state.Store(uint32(group) << groupShift)
	m.table.insert(n)
	m.want[key] = n
}

func (m *tableModel) check() {
	for key, n := range m.want {
		if got := m.table.find(1, uint8(key.group), &key.id); got != n {
			m.t.Fatalf("%v: found %d; want %d", key, got, n)
		}
	}
	used, distinct := 0, 0
	m.table.segments(func(s *segment) {
		distinct++
		used += s.used
		if s.used > segmentMax {
			m.t.Errorf("a segment holds %d; want at most %d", s.used, segmentMax)
		}
	})
	if used != len(m.want) || m.table.count != used || m.table.distinct != distinct {
		m.t.Errorf("%d segments, counted %d, hold %d, counted %d; want %d", distinct, m.table.distinct, used, m.table.count, len(m.want))
	}
}

func FuzzTable(f *testing.F) {
	f.Add([]byte{0, 0, 1, 0, 0, 0, 2, 1, 0, 0}, uint16(0))
	f.Add([]byte{1, 2, 3, 4, 5, 6, 1, 2}, uint16(9000))
	f.Fuzz(func(t *testing.T, keys []byte, many uint16) {
		m := newTableModel(t)
		// Ids that count up are the pattern that a weak hash would not distribute.
		for i := range int(many) {
			var id kv.BlockID
			binary.BigEndian.PutUint32(id[:], uint32(i)+1<<16)
			m.toggle(id, i%2)
		}
		for ; len(keys) >= 2; keys = keys[2:] {
			var id kv.BlockID
			id[3], id[15] = keys[0]%8+1, keys[1]%8
			m.toggle(id, int(keys[0]>>7))
		}
		m.check()
		// The emptied table finds nothing.
		for key := range m.want {
			m.toggle(key.id, key.group)
		}
		m.check()
	})
}
