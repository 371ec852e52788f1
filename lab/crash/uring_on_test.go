//go:build uring

package crash

// buildFlags are the Makefile's flags, so that the binary under test uses the same I/O backend as
// the shipped binary.
var buildFlags = []string{"-tags=uring", "-ldflags=-checklinkname=0"}
