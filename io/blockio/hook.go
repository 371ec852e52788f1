package blockio

// ResultHook sits between the kernel's answer to one transfer and the device:
// it receives the bytes that the kernel says it moved, and the error, and
// returns what the device shall see instead. Tests shorten (a smaller n), fail
// (EIO) or interrupt (EINTR) transfers with it, so that resumption is tested
// where it lives; faultio.Hook makes one from rules. A shortened write has in
// truth moved more: the device writes the same bytes again, which is harmless.
// It may be called concurrently. It is nil in production.
type ResultHook func(op Op, file string, offset int64, n int, err error) (int, error)
