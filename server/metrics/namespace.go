package metrics

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// A NamespaceCounter is a counter with a series for each namespace that exists. An increment for a
// namespace that was deleted meanwhile is dropped; otherwise it would create the series again,
// permanently.
type NamespaceCounter struct {
	vec   *prometheus.CounterVec
	known *namespaces
	// series has the counter of each namespace that has counted, by name. ended is the sum of the
	// counters of deleted namespaces. namespaces.mu guards both.
	series map[string]prometheus.Counter
	ended  uint64
}

// Of returns the counter of a namespace, by its name.
func (c *NamespaceCounter) Of(namespace string) prometheus.Counter {
	c.known.mu.RLock()
	counter, known := c.series[namespace], c.known.names[namespace]
	c.known.mu.RUnlock()
	if counter != nil {
		return counter
	}
	if !known {
		return c.known.dropped
	}
	return c.begin(namespace)
}

// begin makes the series of a namespace.
func (c *NamespaceCounter) begin(namespace string) prometheus.Counter {
	c.known.mu.Lock()
	defer c.known.mu.Unlock()
	if !c.known.names[namespace] {
		return c.known.dropped
	}
	counter := c.vec.WithLabelValues(namespace)
	c.series[namespace] = counter
	return counter
}

// Value returns the count of a namespace. It does not make a series.
func (c *NamespaceCounter) Value(namespace string) uint64 {
	c.known.mu.RLock()
	defer c.known.mu.RUnlock()
	return valueOf(c.series[namespace])
}

// Total returns the sum over all namespaces, including deleted ones, so that it never decreases.
func (c *NamespaceCounter) Total() uint64 {
	c.known.mu.RLock()
	defer c.known.mu.RUnlock()
	sum := c.ended
	for _, counter := range c.series {
		sum += valueOf(counter)
	}
	return sum
}

// ByLabel returns the values of the series of a counter with one label, by the value of the label.
func ByLabel(c *prometheus.CounterVec) map[string]uint64 {
	all := make(chan prometheus.Metric)
	go func() {
		defer close(all)
		c.Collect(all)
	}()
	values := make(map[string]uint64)
	for series := range all {
		var m dto.Metric
		if err := series.Write(&m); err != nil {
			panic(err) // a counter without an exemplar has no error
		}
		values[m.GetLabel()[0].GetValue()] = uint64(m.GetCounter().GetValue())
	}
	return values
}

// valueOf returns the count of a counter; nil counts 0.
func valueOf(c prometheus.Counter) uint64 {
	if c == nil {
		return 0
	}
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		panic(err) // a counter without an exemplar has no error
	}
	return uint64(m.GetCounter().GetValue())
}

// namespaces has the names of the namespaces that exist, and all counters with a series for each of
// them.
type namespaces struct {
	mu       sync.RWMutex
	names    map[string]bool
	counters []*NamespaceCounter
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
	c := &NamespaceCounter{vec: r.vec(name, help, "namespace"), known: n, series: make(map[string]prometheus.Counter)}
	n.counters = append(n.counters, c)
	return c
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
		c.ended += valueOf(c.series[name])
		delete(c.series, name)
		c.vec.DeleteLabelValues(name)
	}
}
