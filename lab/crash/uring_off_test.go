//go:build !uring

package crash

// buildFlags are empty: a plain build uses system calls for I/O.
var buildFlags []string
