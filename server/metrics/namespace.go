package metrics

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// A NamespaceCounter is a counter with a series for each namespace that exists. An increment for a
// namespace that was deleted meanwhile is dropped; otherwise it would create the series again,
// permanently.
type NamespaceCounter struct {
	vec   *prometheus.CounterVec
	known *namespaces
}

// Of returns the counter of a namespace, by its name.
func (c *NamespaceCounter) Of(namespace string) prometheus.Counter {
	c.known.mu.RLock()
	defer c.known.mu.RUnlock()
	if !c.known.names[namespace] {
		return c.known.dropped
	}
	return c.vec.WithLabelValues(namespace)
}

// namespaces has the names of the namespaces that exist, and all counters with a series for each of
// them.
type namespaces struct {
	mu       sync.RWMutex
	names    map[string]bool
	counters []*prometheus.CounterVec
	// dropped gets the increments for namespaces that do not exist; it is not exported.
	dropped prometheus.Counter
}

func newNamespaces() *namespaces {
	return &namespaces{
		names:   make(map[string]bool),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "dropped"}),
	}
}

// counter registers a new NamespaceCounter with r.
func (n *namespaces) counter(r registrar, name, help string) *NamespaceCounter {
	vec := r.vec(name, help, "namespace")
	n.counters = append(n.counters, vec)
	return &NamespaceCounter{vec: vec, known: n}
}

// AddNamespace creates the series of a namespace. An existing namespace keeps its counts.
func (m *Node) AddNamespace(name string) {
	m.namespaces.mu.Lock()
	defer m.namespaces.mu.Unlock()
	m.namespaces.names[name] = true
}

// RemoveNamespace removes the series of a deleted namespace.
func (m *Node) RemoveNamespace(name string) {
	m.namespaces.mu.Lock()
	defer m.namespaces.mu.Unlock()
	delete(m.namespaces.names, name)
	for _, c := range m.namespaces.counters {
		c.DeleteLabelValues(name)
	}
}
