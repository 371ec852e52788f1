package metrics

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// series returns the number of series in r that have a label namespace, and their sum.
func series(t *testing.T, r *prometheus.Registry) (n int, sum float64) {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "namespace" {
					n++
					sum += m.GetCounter().GetValue()
				}
			}
		}
	}
	return n, sum
}

func TestSeriesEndWithTheirNamespace(t *testing.T) {
	r := prometheus.NewRegistry()
	m := NewNode(r)
	counters := []*NamespaceCounter{m.MatchRequests, m.QueriedTokens, m.HitTokens, m.QueriedBlocks, m.HitBlocks,
		m.ReadRequests, m.ReadBlocks, m.ReadBytes, m.WriteRequests, m.WrittenBlocks, m.WrittenBytes}
	if len(counters) != len(m.namespaces.counters) {
		t.Fatalf("%d counters by namespace; this test names %d", len(m.namespaces.counters), len(counters))
	}
	m.AddNamespace("a")
	m.AddNamespace("b")
	late := m.ReadBytes.Of("a")
	for _, c := range counters {
		c.Of("a").Inc()
		c.Of("b").Inc()
		c.Of("never there").Inc()
	}
	if n, sum := series(t, r); n != 22 || sum != 22 {
		t.Errorf("%d series with a sum of %v; want 11 for each of a and b, 1 in each", n, sum)
	}
	m.RemoveNamespace("a")
	late.Inc()
	for _, c := range counters {
		c.Of("a").Inc()
	}
	if n, sum := series(t, r); n != 11 || sum != 11 {
		t.Errorf("%d series with a sum of %v after a was deleted; want the 11 of b", n, sum)
	}
	m.AddNamespace("a")
	m.ReadBytes.Of("a").Inc()
	if n, sum := series(t, r); n != 12 || sum != 12 {
		t.Errorf("%d series with a sum of %v after another a was created; want 12, counted from 0", n, sum)
	}
}
