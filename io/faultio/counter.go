package faultio

import (
	"errors"
	"fmt"
	"sync"
	"syscall"

	"github.com/penstock-kv/penstock/io/blockio"
)

// Injection is one fault that was injected.
type Injection struct {
	// Number is the number of the fault, from 1.
	Number int
	// Rule is the rule that injected the fault, in the rules' language.
	Rule   string
	Action Action
	Kind   Kind
	// File is the file's name; for a Sync, the name of its first file, or "".
	File string
	// Offset and Bytes are the range of wrong or missing data: for a Flip the changed byte, for
	// every other action the whole range of the request.
	Offset, Bytes int64
}

// String describes the fault, for a test's message.
func (i Injection) String() string {
	return fmt.Sprintf("fault %d: %s on %v of %d bytes at %d of %q", i.Number, i.Rule, i.Kind, i.Bytes, i.Offset, i.File)
}

// Error is returned by a call that a rule made fail. It wraps the errno, or io.ErrUnexpectedEOF for
// a Short.
type Error struct {
	Injection Injection
	Err       error
}

// Error names the fault and its cause.
func (e *Error) Error() string { return fmt.Sprintf("faultio: %v: %v", e.Injection, e.Err) }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// cause returns the error that the device's caller sees for an errno.
func cause(errno syscall.Errno) error {
	if errno == syscall.ENOSPC || errno == syscall.EDQUOT {
		return fmt.Errorf("%w (%w)", blockio.ErrNoSpace, errno)
	}
	return errno
}

// Counter records each injected fault until the fault is settled, which means that a test has
// accounted for it. Its methods may be called concurrently.
type Counter struct {
	mu      sync.Mutex
	all     []Injection
	settled map[int]bool // by Number
}

func newCounter() *Counter { return &Counter{settled: make(map[int]bool)} }

// add records a fault. A Delay or a Stall is settled at once, because it does no damage.
func (c *Counter) add(i Injection) Injection {
	c.mu.Lock()
	defer c.mu.Unlock()
	i.Number = len(c.all) + 1
	c.all = append(c.all, i)
	if i.Action.waits() {
		c.settled[i.Number] = true
	}
	return i
}

// Injected returns all faults so far.
func (c *Counter) Injected() []Injection {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Injection(nil), c.all...)
}

// Count returns the number of faults of one action.
func (c *Counter) Count(a Action) int {
	n := 0
	for _, i := range c.Injected() {
		if i.Action == a {
			n++
		}
	}
	return n
}

// Surfaced settles (marks as accounted for) the faults whose errors are in err, including joined
// errors. It returns the number of these faults: 0 if err has another cause.
func (c *Counter) Surfaced(err error) int {
	n := 0
	for _, e := range injectedIn(err) {
		n++
		c.settle(e.Injection.Number)
	}
	return n
}

// injectedIn finds every *Error in the tree of err.
func injectedIn(err error) []*Error {
	switch e := err.(type) {
	case nil:
		return nil
	case *Error:
		return []*Error{e}
	case interface{ Unwrap() []error }:
		var out []*Error
		for _, child := range e.Unwrap() {
			out = append(out, injectedIn(child)...)
		}
		return out
	}
	return injectedIn(errors.Unwrap(err))
}

// Repaired settles (marks as accounted for) the faults that touched the given bytes of a file. It
// returns the number of faults that it settled. A test calls it for damage that a checksum
// detected, that was overwritten, or that was never read.
func (c *Counter) Repaired(file string, offset, bytes int64) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, i := range c.all {
		if i.File == file && i.Offset < offset+bytes && offset < i.Offset+i.Bytes && !c.settled[i.Number] {
			c.settled[i.Number] = true
			n++
		}
	}
	return n
}

func (c *Counter) settle(number int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settled[number] = true
}

// Pending returns the faults for which the test has not accounted (Surfaced, Repaired). It leaves
// out Delays and Stalls.
func (c *Counter) Pending() []Injection {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []Injection
	for _, i := range c.all {
		if !c.settled[i.Number] {
			out = append(out, i)
		}
	}
	return out
}
