// Package scenario runs the simulators from hand-written YAML files. A file describes a cluster,
// its load and its policy. The package of each simulator defines the meaning of its section of the
// file.
//
//	scenarios/*.yaml (built in)  ─┐                      ┌─► sim/agentic     DualPath's cluster
//	FILE.yaml ────────────────────┴─ Load ─► Scenario ───┼─► sim/netkv       NetKV's
//	                                │         Run        ├─► sim/datacenters PrfaaS's
//	     file:line: error, and the ◄┘          │         └─ one run per seed, Workers runs at a time
//	     allowed values                        ▼
//	                              Result: metrics with mean and standard deviation over the seeds
//
//	name: link-at-half
//	about: a link that falls to half, with the short-term controller
//	simulator: datacenters        # and a section of that name
//	seeds: 5
//	datacenters: …
//
// Load checks everything: keys, ranges, topologies, and traces to their last line. An impossible
// value is an error with file and line.
//
// The package has no lock. Run starts one goroutine per worker and waits for them.
package scenario
