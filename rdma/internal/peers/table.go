package peers

import (
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
)

// Key names a session. Two engines that dial each other at the same moment end up
// with one session in each direction, rather than killing both.
type Key struct {
	ID     rdma.EngineID
	Dialed bool
}

// Table is the live sessions of an engine. Looking up takes no lock: each write
// does it. The zero value is empty.
type Table[S comparable] struct {
	mu sync.Mutex // of those who change it
	m  atomic.Pointer[map[Key]S]
}

func (t *Table[S]) load() map[Key]S {
	if m := t.m.Load(); m != nil {
		return *m
	}
	return nil
}

// Find returns a session with an engine, best the one that we dialed.
func (t *Table[S]) Find(id rdma.EngineID) (S, bool) {
	m := t.load()
	if s, ok := m[Key{id, true}]; ok {
		return s, true
	}
	s, ok := m[Key{id, false}]
	return s, ok
}

// At returns the session of a key.
func (t *Table[S]) At(k Key) (S, bool) {
	s, ok := t.load()[k]
	return s, ok
}

// All returns the sessions, in no order.
func (t *Table[S]) All() []S {
	m := t.load()
	out := make([]S, 0, len(m))
	for _, s := range m {
		out = append(out, s)
	}
	return out
}

// Put makes s the session of a key.
func (t *Table[S]) Put(k Key, s S) { t.change(func(m map[Key]S) { m[k] = s }) }

// Drop takes s out, if it is the key's.
func (t *Table[S]) Drop(k Key, s S) {
	t.change(func(m map[Key]S) {
		if m[k] == s {
			delete(m, k)
		}
	})
}

// change replaces the map by a changed copy.
func (t *Table[S]) change(f func(map[Key]S)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.load()
	m := make(map[Key]S, len(old)+1)
	for k, s := range old {
		m[k] = s
	}
	f(m)
	t.m.Store(&m)
}
