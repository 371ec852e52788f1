// Package blockiotest is the conformance suite of blockio.Device. Each sentence of the contract is
// one case, and uring, posixio, usrbio, memio and faultio (without rules) pass all of them. A bug
// found in one backend becomes a case of the suite, for all backends.
//
// Create, Pattern, One, PageReads and CloseUnderLoad are parts of tests that backends have beside the suite.
//
// The suite does not test speed, nor the state after a crash, which the tests of memio cover.
//
//	func TestConformance(t *testing.T) {
//		blockiotest.Run(t, func(t *testing.T) blockiotest.Volume {
//			dir := t.TempDir()
//			return blockiotest.Volume{Open: func() (blockio.Device, error) {
//				return posixio.Open(dir, posixio.Options{})
//			}}
//		})
//	}
package blockiotest
