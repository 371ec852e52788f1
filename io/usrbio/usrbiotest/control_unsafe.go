package usrbiotest

import (
	"sync/atomic"
	"unsafe"
)

// Kind is the way in which a request or call fails.
type Kind int64

// The kinds of faults, in the order of testdata/standin.c. Arg is an errno for Errno and the
// refusals, a number of bytes for Short, a time in microseconds for Slow, and a mask of the bits
// that change in userdata for Foreign.
const (
	None Kind = iota
	Errno
	Short
	Slow
	// Stuck requests complete after the fault was cleared, or one after each Release.
	Stuck
	// Long reports more bytes than the request has.
	Long
	// Foreign returns a userdata that was not submitted.
	Foreign
	// Full reports a full ring.
	Full
	RefusedSubmit
	RefusedWait
	RefusedIOV
	RefusedFD
	RefusedRing
)

// Fault is the fault that the library injects.
type Fault struct {
	Kind Kind
	// Reads or Writes limits the fault to one direction.
	Reads, Writes bool
	// After is the number of operations before the first fault, and Count the number of faults.
	After, Count int64
	Arg          int64
}

// Words of the control file, in the order of testdata/standin.c.
const (
	wordKind = iota
	wordOp
	wordSkip
	wordCount
	wordArg
	wordHoles
	wordRelease
	counters = 16
	words    = counters + 11
)

// Counters are the library's counters.
type Counters struct {
	// Prepared, Completed and Submitted count requests prepared and completed, and calls that
	// submitted; Faults counts the faults injected.
	Prepared, Completed, Submitted, Faults int64
	// InFlight is the number of requests in flight, and Peak its maximum.
	InFlight, Peak int64
	// Crossed counts requests across the blocks of a buffer, and Destroyed the rings and buffers
	// that were destroyed while requests were in flight.
	Crossed, Destroyed int64
	// Files, Buffers and Rings are the numbers of existing files, buffers and rings. A ring is a buffer as well.
	Files, Buffers, Rings int64
}

// Control controls the libraries of this process and of its children.
type Control struct {
	// Path is the file in the variable STANDIN_HF3FS_CONTROL.
	Path string
	mem  []byte
}

// word returns one word of the file.
func (c *Control) word(i int) *atomic.Int64 {
	// Safety: mem is a mapping of words*8 bytes that starts at a page, and is never unmapped.
	return (*atomic.Int64)(unsafe.Pointer(&c.mem[8*i]))
}

// Set injects a fault, instead of an earlier one. The zero Fault ends all faults. Set resets
// Counters.Peak.
func (c *Control) Set(f Fault) {
	c.word(wordKind).Store(int64(None))
	op := int64(0)
	switch {
	case f.Reads && !f.Writes:
		op = 1
	case f.Writes && !f.Reads:
		op = 2
	}
	c.word(wordOp).Store(op)
	c.word(wordSkip).Store(f.After)
	c.word(wordCount).Store(f.Count)
	c.word(wordArg).Store(f.Arg)
	c.word(wordRelease).Store(0)
	c.word(counters + 5).Store(0)
	c.word(wordKind).Store(int64(f.Kind))
}

// Release completes n stuck requests.
func (c *Control) Release(n int64) { c.word(wordRelease).Add(n) }

// SetHoles makes reads end at holes, as those of 3FS's rings do.
func (c *Control) SetHoles(on bool) {
	v := int64(0)
	if on {
		v = 1
	}
	c.word(wordHoles).Store(v)
}

// Counters returns the counters. The counters of a process that was killed stay.
func (c *Control) Counters() Counters {
	v := func(i int) int64 { return c.word(counters + i).Load() }
	return Counters{
		Prepared: v(0), Completed: v(1), Submitted: v(2), Faults: v(3), InFlight: v(4), Peak: v(5),
		Crossed: v(6), Destroyed: v(7), Files: v(8), Buffers: v(9), Rings: v(10),
	}
}
