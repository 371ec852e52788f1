// Package invariants holds the checks that run only in builds with the tag
// "invariants": the tests of CI, never a release. Without the tag Enabled is the
// constant false, so the compiler removes the checks and what feeds them, and
// every type here is empty.
//
// It is not an assertion library: a violated invariant is our bug, found under
// test, and the check panics. Whatever a disk, a peer or a user can cause is an
// error and is never checked here.
//
//	go build                    Enabled == false   checks cost nothing
//	go test -tags invariants    Enabled == true    checks run, freed buffers read 0xCC
//
// The usual form keeps an expensive check out of the common path:
//
//	if invariants.Enabled && invariants.Sometimes(10) {
//		q.check() // walks the queue and panics if it is broken
//	}
//
// The package imports the standard library only and every package of ours may
// import it.
package invariants
