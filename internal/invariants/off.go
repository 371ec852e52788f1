//go:build !invariants

package invariants

// Enabled reports whether this binary was built with the tag "invariants". It is
// a constant, so "if invariants.Enabled { … }" vanishes from other builds.
const Enabled = false

// MangleByte is what Mangle writes: a pattern that no valid header begins with
// and that a hex dump shows at a glance.
const MangleByte = 0xCC

// Sometimes returns true for about percent of its calls, drawn at random: for
// checks too slow to run each time. It is always false when Enabled is false.
func Sometimes(percent int) bool { return false }

// Mangle overwrites buf when Enabled, so that a reader that still holds a
// buffer after giving it back sees garbage at once and not, once in a while,
// another block's bytes. The caller must own buf.
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

// Close records that the object was closed. It panics if it already was, and
// shows the stack of the first time.
func (*CloseChecker) Close() {}

// AssertNotClosed panics if the object was closed, and shows where.
func (*CloseChecker) AssertNotClosed() {}

// AssertClosed panics if the object was not closed.
func (*CloseChecker) AssertClosed() {}

// A Value carries data that only checks read, such as the previous state of a
// counter that must not go back. It holds a T when Enabled and nothing otherwise;
// Get then returns the zero T. It is not safe for concurrent use.
type Value[T any] struct{}

// Get returns the last value set, or the zero T.
func (*Value[T]) Get() (zero T) { return zero }

// Set stores inner when Enabled.
func (*Value[T]) Set(inner T) {}
