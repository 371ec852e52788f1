//go:build invariants

package invariants

import (
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"sync/atomic"
)

// Enabled reports whether this binary was built with the tag "invariants". It is
// a constant, so "if invariants.Enabled { … }" vanishes from other builds.
const Enabled = true

// MangleByte is the byte that Mangle writes. No valid header begins with it, and it is easy to
// recognise in a hex dump.
const MangleByte = 0xCC

// Sometimes returns true for about percent of its calls, chosen at random. It is for checks that
// are too slow to run each time. It always returns false when Enabled is false.
func Sometimes(percent int) bool {
	return rand.IntN(100) < percent
}

// Mangle overwrites buf when Enabled. A reader that still uses a released buffer then always gets
// invalid bytes, instead of sometimes the bytes of another block. The caller must own buf.
func Mangle(buf []byte) {
	for i := range buf {
		buf[i] = MangleByte
	}
}

// Assert panics with the formatted message if ok is false. Arguments are
// evaluated in every build; guard calls on hot paths with Enabled.
func Assert(ok bool, format string, args ...any) {
	if !ok {
		panic("invariant violated: " + fmt.Sprintf(format, args...))
	}
}

// A CloseChecker finds use after close and double close of the object it is
// embedded in. The zero value is open. It is safe for concurrent use.
//
// A CloseChecker is only for objects whose contract forbids these calls, not for objects whose
// Close may be called twice or whose methods return an error after Close.
type CloseChecker struct {
	closedAt atomic.Pointer[[]byte]
}

// Close records that the object was closed. It panics if the object was closed already, and shows
// the stack of the first call.
func (c *CloseChecker) Close() {
	stack := debug.Stack()
	if !c.closedAt.CompareAndSwap(nil, &stack) {
		panic(fmt.Sprintf("invariant violated: closed twice; first closed at:\n%s", *c.closedAt.Load()))
	}
}

// AssertNotClosed panics if the object was closed, and shows the stack of that call.
func (c *CloseChecker) AssertNotClosed() {
	if stack := c.closedAt.Load(); stack != nil {
		panic(fmt.Sprintf("invariant violated: used after it was closed at:\n%s", *stack))
	}
}

// AssertClosed panics if the object was not closed.
func (c *CloseChecker) AssertClosed() {
	if c.closedAt.Load() == nil {
		panic("invariant violated: not closed")
	}
}

// A Value holds data that only checks read, such as the previous state of a counter that must not
// decrease. When Enabled is true it holds a T. Otherwise it holds nothing, and Get returns the zero
// T. It is not safe for concurrent use.
type Value[T any] struct {
	v T
}

// Get returns the last value set, or the zero T.
func (v *Value[T]) Get() T { return v.v }

// Set stores inner when Enabled.
func (v *Value[T]) Set(inner T) { v.v = inner }
