//go:build uring

package crash

// buildFlags are those of the Makefile, so that the binary under test uses the same I/O backend as
// the shipped one.
var buildFlags = []string{"-tags=uring", "-ldflags=-checklinkname=0"}
