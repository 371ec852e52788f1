//go:build !uring

package crash

// buildFlags: a plain build, which drives the disk by system calls.
var buildFlags []string
