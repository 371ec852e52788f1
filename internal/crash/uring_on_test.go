//go:build uring

package crash

// buildFlags are those of the Makefile: the binary under test drives the disk
// the way the one that is shipped does.
var buildFlags = []string{"-tags=uring", "-ldflags=-checklinkname=0"}
