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
		m.ReadRequests, m.ReadBlocks, m.ReadBytes, m.WriteRequests, m.WrittenBlocks, m.WrittenBytes, m.EvictedBlocks, m.EvictedBytes}
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
	if n, sum := series(t, r); n != 26 || sum != 26 {
		t.Errorf("%d series with a sum of %v; want 13 for each of a and b, 1 in each", n, sum)
	}
	m.RemoveNamespace("a")
	late.Inc()
	for _, c := range counters {
		c.Of("a").Inc()
	}
	if n, sum := series(t, r); n != 13 || sum != 13 {
		t.Errorf("%d series with a sum of %v after a was deleted; want the 13 of b", n, sum)
	}
	m.AddNamespace("a")
	m.ReadBytes.Of("a").Inc()
	if n, sum := series(t, r); n != 14 || sum != 14 {
		t.Errorf("%d series with a sum of %v after another a was created; want 14, counted from 0", n, sum)
	}
}

// TestTotalNeverDecreases: the total of a counter includes deleted namespaces, and a namespace that
// is created again counts from 0. Reading makes no series.
func TestTotalNeverDecreases(t *testing.T) {
	r := prometheus.NewRegistry()
	m := NewNode(r)
	want := func(value, total uint64) {
		t.Helper()
		if v, sum := m.HitTokens.Value("a"), m.HitTokens.Total(); v != value || sum != total {
			t.Errorf("a has counted %d, and all namespaces %d; want %d and %d", v, sum, value, total)
		}
	}
	m.AddNamespace("a")
	m.AddNamespace("b")
	want(0, 0)
	if n, _ := series(t, r); n != 0 {
		t.Errorf("reading made %d series", n)
	}
	m.HitTokens.Of("a").Add(5)
	m.HitTokens.Of("b").Add(3)
	want(5, 8)
	m.RemoveNamespace("a")
	want(0, 8)
	m.AddNamespace("a")
	want(0, 8)
	m.HitTokens.Of("a").Add(2)
	want(2, 10)
}

// TestBusyCalls: calls of both kinds that were refused because of a limit are busy, and calls that
// failed for another reason are not.
func TestBusyCalls(t *testing.T) {
	m := NewNode(prometheus.NewRegistry())
	m.ReadFailures.WithLabelValues("busy").Add(2)
	m.WriteFailures.WithLabelValues("busy").Inc()
	m.ReadFailures.WithLabelValues("deadline").Inc()
	if n := m.BusyCalls(); n != 3 {
		t.Errorf("%d calls were busy; want 3", n)
	}
}
