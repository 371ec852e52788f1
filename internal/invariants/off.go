//go:build !invariants

package invariants

// Enabled reports whether this binary was built with the tag "invariants". It is
// a constant, so "if invariants.Enabled { … }" vanishes from other builds.
const Enabled = false

// MangleByte is the byte that Mangle writes. No valid header begins with it, and it is easy to
// recognise in a hex dump.
const MangleByte = 0xCC

// Sometimes returns true for about percent of its calls, chosen at random. It is for checks that
// are too slow to run each time. It always returns false when Enabled is false.
func Sometimes(percent int) bool { return false }

// Mangle overwrites buf when Enabled. A reader that still uses a released buffer then always gets
// invalid bytes, instead of sometimes the bytes of another block. The caller must own buf.
func Mangle(buf []byte) {}

// Assert panics with the formatted message if ok is false. Arguments are
// evaluated in every build; guard calls on hot paths with Enabled.
func Assert(ok bool, format string, args ...any) {}

// A CloseChecker finds use after close and double close of the object it is
// embedded in. The zero value is open. It is safe for concurrent use.
//
// A CloseChecker is only for objects whose contract forbids these calls, not for objects whose
// Close may be called twice or whose methods return an error after Close.
type CloseChecker struct{}

// Close records that the object was closed. It panics if the object was closed already, and shows
// the stack of the first call.
func (*CloseChecker) Close() {}

// AssertNotClosed panics if the object was closed, and shows the stack of that call.
func (*CloseChecker) AssertNotClosed() {}

// AssertClosed panics if the object was not closed.
func (*CloseChecker) AssertClosed() {}

// A Value holds data that only checks read, such as the previous state of a counter that must not
// decrease. When Enabled is true it holds a T. Otherwise it holds nothing, and Get returns the zero
// T. It is not safe for concurrent use.
type Value[T any] struct{}

// Get returns the last value set, or the zero T.
func (*Value[T]) Get() (zero T) { return zero }

// Set stores inner when Enabled.
func (*Value[T]) Set(inner T) {}
