//go:build !uring

package crash

// buildFlags is empty: a plain build uses system calls for I/O.
var buildFlags []string
