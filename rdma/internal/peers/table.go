package peers

import (
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
)

// Key identifies a session. Two engines that dial each other at the same time get two sessions,
// one for each dialer, so that neither dial ends the other's session.
type Key struct {
	ID     rdma.EngineID
	Dialed bool
}

// Table holds the live sessions of an engine. A lookup takes no lock, because each operation on a
// session begins with a lookup. The zero value is empty.
type Table[S comparable] struct {
	mu sync.Mutex // held while m is replaced
	m  atomic.Pointer[map[Key]S]
}

func (t *Table[S]) load() map[Key]S {
	if m := t.m.Load(); m != nil {
		return *m
	}
	return nil
}

// Find returns a session with an engine. It prefers the session that this engine dialed.
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

// Put makes s the session of k.
func (t *Table[S]) Put(k Key, s S) { t.change(func(m map[Key]S) { m[k] = s }) }

// Drop removes s, if s is still the session of k.
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
