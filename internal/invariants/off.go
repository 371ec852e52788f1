//go:build !invariants

package invariants

// Enabled reports whether this binary was built with the tag "invariants". It is
// a constant, so "if invariants.Enabled { … }" vanishes from other builds.
const Enabled = false

// MangleByte is the byte that Mangle writes. No valid header begins with it, and it is easy to
// recognise in a hex dump.
const MangleByte = 0xCC

// Sometimes returns true for about percent of its calls, chosen at random. It is for checks that
// are too slow to run each time. It is always false when Enabled is false.
func Sometimes(percent int) bool { return false }

// Mangle overwrites buf when Enabled. A reader that still uses a buffer after giving it back then
// sees invalid bytes at once, instead of another block's bytes now and then. The caller must own
// buf.
func Mangle(buf []byte) {}

// Assert panics with the formatted message if ok is false. Arguments are
// evaluated in every build; guard calls on hot paths with Enabled.
func Assert(ok bool, format string, args ...any) {}

// A CloseChecker finds use after close and double close of the object it is
// embedded in. The zero value is open. It is safe for concurrent use.
//
// Only for objects whose contract forbids those calls; where Close may be called
// twice, or a call after Close returns an error, use that error instead.
type CloseChecker struct{}

// Close records that the object was closed. It panics if the object was closed already, and shows
// the stack of the first call.
func (*CloseChecker) Close() {}

// AssertNotClosed panics if the object was closed, and shows the stack of that call.
func (*CloseChecker) AssertNotClosed() {}

// AssertClosed panics if the object was not closed.
func (*CloseChecker) AssertClosed() {}

// A Value holds data that only checks read, such as the previous state of a counter that must not
// decrease. It holds a T when Enabled, and otherwise nothing; Get then returns the zero T. It is
// not safe for concurrent use.
type Value[T any] struct{}

// Get returns the last value set, or the zero T.
func (*Value[T]) Get() (zero T) { return zero }

// Set stores inner when Enabled.
func (*Value[T]) Set(inner T) {}
