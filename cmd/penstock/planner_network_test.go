package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/server/config"
)

// TestNetworkOf: a planner's network section becomes a cost model, or an error that names the
// missing part.
func TestNetworkOf(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	if m, o, err := networkOf(config.DefaultPlanner().Network, log, nil); m != nil || o != nil || err != nil {
		t.Errorf("without a source: %v, %v, %v", m, o, err)
	}
	path := filepath.Join(t.TempDir(), "network.yaml")
	c := config.DefaultPlanner().Network
	c.File, c.BytesPerToken = path, 327_680
	try := func(text, says string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := networkOf(c, log, prometheus.NewRegistry()); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", text, err, says)
		}
	}
	try("places: {a: {pod: x}}", "tiers' bandwidth")
	try("tires: []", ":1: unknown key")
	text := "tiers: [{bandwidth_gbps: 3600, latency: 1us}, {bandwidth_gbps: 100, latency: 3us}, {bandwidth_gbps: 50, latency: 8us}, {bandwidth_gbps: 25, latency: 15us}]\n" +
		"places: {a: {pod: x, rack: r}}\n"
	c.MaxBatch = -1
	try(text, "MaxBatch")
	c.MaxBatch = 64
	m, o, err := networkOf(c, log, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	if m.Oracle().Snapshot().Fabric != netcost.FatTree() || m.Oracle().Model().Iteration(0) != 0.0123 {
		t.Errorf("%+v", m.Oracle().Snapshot())
	}
	n := networkOfState(o.State())
	if n.Bandwidth != netcost.FatTree().Bandwidth || n.Places["a"].Pod != "x" || n.Places["a"].Host != "a" || !n.Measured.IsZero() {
		t.Errorf("%+v", n)
	}
	c.Prometheus = "http://127.0.0.1:1"
	if _, err := networkSources(c); err == nil || !strings.Contains(err.Error(), "no query") {
		t.Errorf("Prometheus without a query: %v", err)
	}
	c.PodQuery = "x"
	if s, err := networkSources(c); err != nil || len(s) != 2 {
		t.Errorf("%d sources, %v", len(s), err)
	}
}
