// Package lab has no code. Its folders hold the instruments: programs and packages that measure,
// emulate or break Penstock, and the nodes that tests run in their own process. No user of Penstock
// needs them, and their APIs change without notice.
//
//	measure      bench (suite, peer), roundtrip, profile
//	replay       replay, content, hitsim
//	emulate      emulate, cluster, netlab
//	break        crash, rounds, rdmalab
//	for tests    testnode, testplanner, testetcd
//	the papers   reproduce
//
// Instruments use the product, and the product does not use instruments. Outside of tests, only
// cmd/penstock may import an instrument (internal/lint checks this).
package lab
