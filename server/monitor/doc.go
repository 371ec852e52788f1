// Package monitor has the Grafana dashboard and the Prometheus rules of Penstock: recording rules,
// alerts with their instructions, and panels. `penstock metrics` prints them, and deploy/monitoring
// has copies.
//
//	server, server/planner, server/front, … ── DescribeMetrics ──► Metrics
//	                                                                 │ name, labels, help
//	records ──┐                                                      ▼
//	alerts ───┴─► Rules ──► YAML or JSON for Prometheus     tests: each expression has
//	panels ─────► Dashboard(help texts) ──► JSON for Grafana only metrics and labels that exist
//
// The components define the metrics. This package only reads the definitions. It has no connection
// to Prometheus or Grafana. docs/monitoring.md describes the use.
package monitor
