// Package runs keeps a set of numbers, such as the free pages of an arena or the free slots of a
// segment, and finds runs of consecutive numbers in the set. It is not a memory allocator: it has
// no bytes, no owners and no waiting. A Set is not safe for concurrent use.
//
//	words    1110 1101 1111 0000 …        one bit for each number
//	           ╲  ╱      ╲  ╱
//	tree      [3|1|3]   [4|0|4]           [prefix | suffix | best]: the run that the
//	               ╲     ╱                 node's range begins with, the one it ends
//	              [3|0|5]                  with, and the longest in it
//
// The node at the root has the length of the longest run. A change updates the words that it covers
// and their ancestors. The search for the first run of a given length goes down the tree once. A
// change and a search take O(log n) steps of a few instructions. A change takes one more step for
// each 64 numbers that it covers. The tree takes 3 bits of memory for each number below the limit.
package runs
