// Package invariants has the checks that run only in builds with the tag "invariants", which the
// tests of CI use and releases do not. Without the tag, Enabled is the constant false, so the
// compiler removes the checks and the code that prepares their arguments, and every type of the
// package is empty.
//
// The package is not an assertion library. A violated invariant is a bug of Penstock, found under
// test, and the check panics. A condition that a disk, a peer or a user can cause is an error, and
// is never checked here.
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
// The package imports the standard library only, and every package of this repository may import
// it.
package invariants
