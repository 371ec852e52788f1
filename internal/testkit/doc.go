// Package testkit has helpers that the tests of many packages need and that the standard library
// lacks: leak checks for goroutines and file descriptors, page-aligned memory, ports, test vectors,
// and paths of the shared traces. It also makes Go modules outside of the repository, which import
// the repository as a user's module does. It is not a framework: it has no assertions, no mocks and
// no clock (testing/synctest has one).
//
//	func TestMain(m *testing.M) { testkit.Main(m) }  the package's tests together leave nothing behind
//
//	func TestClose(t *testing.T) {
//		testkit.VerifyNone(t)                    this test leaves nothing behind
//		buf := testkit.AlignedBuffer(t, 1<<20)   gone when the test ends; later use faults
//		testkit.Long(t, "why it takes long")     skips with -short, as in make quick
//		rounds := testkit.Rounds(400, 60)        60 under the race detector
//		addr := testkit.Port(t)                  reserved for the test, also while it does not listen
//		…
//	}
//
// Only tests and conformance suites import it. It imports no other package of the repository, so
// every package's tests can import it.
package testkit
