// Package scenario runs the simulators from files that people write: what a cluster
// is like, what it is asked to do, who decides. It is a reader and a runner; what a
// scenario means is said by the simulator that it names.
//
//	scenarios/*.yaml (built in)  ─┐                      ┌─► sim/agentic     DualPath's cluster
//	FILE.yaml ────────────────────┴─ Load ─► Scenario ───┼─► sim/netkv       NetKV's
//	                                │         Run        ├─► sim/datacenters PrfaaS's
//	     file:line: what is wrong ◄─┘          │         └─ one run a seed, as many at once as there are workers
//	     and what would do                     ▼
//	                              Result: metrics with mean and standard deviation over the seeds
//
//	name: link-at-half
//	about: a link that falls to half, with the short-term controller
//	simulator: datacenters        # and a section of that name
//	seeds: 5
//	datacenters: …
//
// Everything is checked by Load: keys, ranges, topologies, traces to their last
// line. What a file asks for and cannot be is an error that names file and line.
//
// The package has no lock; Run starts a goroutine a worker and waits for them.
package scenario
