//go:build uring

package uring

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"

	"github.com/pawelgaczynski/giouring"
	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/io/blockio"
)

const (
	// spanMax is the longest transfer that Linux makes in one request (MAX_RW_COUNT), rounded down
	// to the alignment. The remaining bytes are submitted again.
	spanMax = (1<<31 - 1) &^ (blockio.Align - 1)
	// triesMax is the maximum number of submissions of one request without progress. The kernel
	// returns EAGAIN only for shortages that end soon.
	triesMax = 16
)

// op is the progress of one request on a ring.
type op struct {
	req *blockio.Request
	fd  int
	// want is the length of the request in bytes, and done the bytes transferred so far.
	want, done int64
	// tries counts submissions since the last progress.
	tries int
	// admitted is set while the budget holds the request's bytes.
	admitted bool
	// vecs has the remaining buffers; its memory is reused.
	vecs []unix.Iovec
}

// start initialises o for r, on descriptor fd.
func (o *op) start(r *blockio.Request, fd int) {
	o.req, o.fd, o.want, o.done, o.tries, o.admitted = r, fd, r.Len(), 0, 0, false
}

// admit takes the bytes of the op from the budget. Each request takes its bytes separately, so a
// batch larger than the budget is submitted in parts. If the budget has too few free bytes, admit
// waits if wait is set, and otherwise returns false.
func (o *op) admit(v *env, wait bool) bool {
	if o.admitted || v.budget.TryAcquire(o.want) {
		o.admitted = true
	} else if wait {
		// This cannot fail, because the context never ends.
		_ = v.budget.Acquire(context.Background(), o.want)
		o.admitted = true
	}
	return o.admitted
}

// resize returns n ops. It reuses the memory of ops if that suffices.
func resize(ops []op, n int) []op {
	if n > cap(ops) {
		ops = append(ops[:cap(ops)], make([]op, n-cap(ops))...)
	}
	return ops[:n]
}

// forget clears the references to requests and buffers. Otherwise an unused table would keep them
// alive.
func forget(ops []op) {
	for i := range ops {
		ops[i].req = nil
		clear(ops[i].vecs)
	}
}

// env has the parts of the device that ops need.
type env struct {
	regions [][]byte
	budget  *blockio.Budget
	count   *blockio.Counters
	// hook, in tests, changes the kernel's results.
	hook blockio.ResultHook
}

// prepare fills e with the part of o that has not been transferred. registered is set if the
// device's regions are registered with the ring.
func (o *op) prepare(e *giouring.SubmissionQueueEntry, v *env, registered bool) {
	n := min(o.want-o.done, spanMax)
	write, at := o.req.Op == blockio.Write, o.req.Offset+o.done
	if bufs := o.req.Bufs; len(bufs) == 1 {
		b, index := bufs[0][o.done:o.done+n], -1
		if registered {
			index = within(v.regions, b)
		}
		prepareSpan(e, write, o.fd, b, at, index)
	} else {
		o.vecs = remaining(o.vecs[:0], bufs, o.done, n)
		prepareVecs(e, write, o.fd, o.vecs, at)
	}
	if o.tries > 0 {
		// Retries run in a worker thread of the kernel, where they may block for resources.
		e.Flags |= giouring.SqeAsync
	}
	o.tries++
}

// remaining appends the iovecs of n bytes of bufs, beginning after the first skip bytes.
func remaining(vecs []unix.Iovec, bufs [][]byte, skip, n int64) []unix.Iovec {
	for _, b := range bufs {
		if skip >= int64(len(b)) {
			skip -= int64(len(b))
			continue
		}
		b = b[skip:]
		skip = 0
		if int64(len(b)) >= n {
			return append(vecs, vec(b[:n]))
		}
		n -= int64(len(b))
		vecs = append(vecs, vec(b))
	}
	return vecs
}

// complete processes the result of one completion. It returns true if o is finished, with its
// outcome in the request. Otherwise the remaining bytes must be submitted.
func (o *op) complete(res int32, v *env) (over bool) {
	n, err := outcome(res)
	if v.hook != nil {
		n, err = v.hook(o.req.Op, o.req.File.Name(), o.req.Offset+o.done, n, err)
	}
	if err != nil {
		if o.tries < triesMax && passing(err) {
			return false
		}
		return o.end(err, v)
	}
	// O_DIRECT can continue at a multiple of Align only, so the bytes after that are moved again.
	moved := int64(n) &^ (blockio.Align - 1)
	if moved > 0 {
		o.tries = 0
	}
	if o.done += moved; o.done >= o.want {
		return o.end(nil, v)
	}
	if o.tries >= triesMax {
		return o.end(noProgress(o.req.Op), v)
	}
	v.count.Resumed()
	return false
}

// noProgress returns the error of a transfer that moves no byte although no call fails: another
// process truncated the file, or a driver is broken.
func noProgress(op blockio.Op) error {
	if op == blockio.Read {
		return io.ErrUnexpectedEOF
	}
	return io.ErrNoProgress
}

// outcome translates the result of a completion: bytes, or a negative errno.
func outcome(res int32) (int, error) {
	if res < 0 {
		return 0, syscall.Errno(-res)
	}
	return int(res), nil
}

// passing reports whether err is temporary, so that the request may succeed when it is submitted
// again. The kernel returns ECANCELED for requests whose submitting thread has ended.
func passing(err error) bool {
	return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECANCELED)
}

// end sets the outcome and releases the budget. Nothing of o is in flight.
func (o *op) end(err error, v *env) bool {
	r := o.req
	r.Err = nil
	if err != nil {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			err = fmt.Errorf("%w (%w)", blockio.ErrNoSpace, err)
		}
		r.Err = fmt.Errorf("uring: %v of %d bytes at %d of %s, after %d: %w", r.Op, o.want, r.Offset, r.File.Name(), o.done, err)
	}
	if o.admitted {
		v.budget.Release(o.want)
		o.admitted = false
	}
	return true
}
