// Package top turns samples of nodes into rates: the rows of `penstock top`. A sample has counters
// that only grow, and the meter divides their growth by the time between two samples.
//
//	          node a          node b          node c
//	sample 1  up 10 s, 500    up 90 s, 7000   up 30 s, 40
//	sample 2  up 12 s, 700    no answer       up  1 s, 3
//	sample 3  up 14 s, 700    up 94 s, 7400   up  3 s, 9
//	          │               │               └ 2: unknown, because the node started again; 3: 3/s
//	          │               └ 3: 100/s over the 4 s since its last answer
//	          └ 2: 100/s; 3: 0/s
//
// The time between two samples is the growth of the node's own uptime, so that an answer that was
// late on its way does not change a rate. A rate is unknown, and never negative or absurd, if the
// node has no earlier sample of the same start, or if a counter is smaller than before.
//
// The package is pure: no I/O, no clock, no goroutine, no lock. It does not draw: package screen
// does.
package top
