package blockio

// ResultHook is called between the kernel and the device for each transfer. It receives the number
// of bytes that the kernel moved and the error, and returns the values that the device then uses.
// Tests use it to shorten transfers (a smaller n), to fail them (EIO) or to interrupt them (EINTR),
// and check that the device resumes them. faultio.Hook makes a ResultHook from rules. After a
// shortened write the kernel has moved more bytes than the device sees: the device writes the same
// bytes again, which is harmless. A ResultHook may be called concurrently. It is nil in production.
type ResultHook func(op Op, file string, offset int64, n int, err error) (int, error)
