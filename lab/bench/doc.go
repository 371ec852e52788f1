// Package bench compares ways to do the same work by turns, in one run, and reports the results as
// ratios.
//
// A rate of Penstock alone means little on a machine whose disk and other load change by the
// minute. So a result is the quotient of the figures of two contenders that were measured seconds
// apart.
//
//	Comparison: contenders A, B, C and the measures A/B, A/C
//
//	round 1    B 1.02   A 0.98   C 0.51      order shuffled in each round
//	round 2    A 0.60   C 0.33   B 0.63      a slow minute affects all of them
//	round 3    C 0.52   B 1.01   A 0.99
//	             │
//	             └─► A/B of each round: 0.96 0.95 0.98 ─► median 0.96, spread 0.95–0.98
//
// Package peer starts the programs for comparison (fio, iperf3, Redis, a gRPC stream); package suite
// has the measured work. Only cmd/penstock imports all three packages.
//
// A contender that cannot run is listed in the result with the reason. A measure that needs a missing
// contender is left out.
//
// The package has no lock. Contenders of one comparison never run concurrently.
package bench
