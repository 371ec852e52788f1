// Package bench compares ways to do the same work by turns, in one run, and says
// what came of it as ratios.
//
// It is not a timer of our own code alone: a figure of one contender means little
// on a machine whose disk and neighbours change by the minute, so what counts is a
// quotient of two figures taken seconds apart.
//
//	Comparison: contenders A, B, C and the measures A/B, A/C
//
//	round 1    B 1.02   A 0.98   C 0.51      order shuffled in each round
//	round 2    A 0.60   C 0.33   B 0.63      a slow minute hits all of them
//	round 3    C 0.52   B 1.01   A 0.99
//	             │
//	             └─► A/B of each round: 0.96 0.95 0.98 ─► median 0.96, spread 0.95–0.98
//
// Package peer starts what we compare with (fio, iperf3, Redis, a gRPC stream),
// package suite holds the work itself. Only cmd/penstock imports the three.
//
// A contender that cannot run here is named in the result with the reason. A
// measure of which a contender is missing is left out, not guessed.
//
// The package has no lock; contenders of one comparison never run together.
package bench
