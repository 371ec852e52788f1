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
	// spanMax is the longest transfer that Linux makes in one go
	// (MAX_RW_COUNT), rounded down to our alignment; the rest is resumed.
	spanMax = (1<<31 - 1) &^ (blockio.Align - 1)
	// triesMax bounds how often one request is submitted again without having
	// made progress. The kernel gives EAGAIN for a moment's shortage only.
	triesMax = 16
)

// op is one request on its way through a ring: how far it has come.
type op struct {
	req *blockio.Request
	fd  int
	// want is the request's length, done what was transferred, in bytes.
	want, done int64
	// tries counts submissions since the last progress.
	tries int
	// admitted is whether the budget holds the request's bytes.
	admitted bool
	// vecs is what remains of several buffers; the memory is used again.
	vecs []unix.Iovec
}

// start makes o the progress of r, on descriptor fd.
func (o *op) start(r *blockio.Request, fd int) {
	o.req, o.fd, o.want, o.done, o.tries, o.admitted = r, fd, r.Len(), 0, 0, false
}

// admit takes the op's bytes from the budget, as the bytes of each request are
// bounded on their own: a batch larger than the budget goes in parts. It waits
// only if wait says so.
func (o *op) admit(v *env, wait bool) bool {
	if o.admitted || v.budget.TryAcquire(o.want) {
		o.admitted = true
	} else if wait {
		// Cannot fail: this context never ends.
		_ = v.budget.Acquire(context.Background(), o.want)
		o.admitted = true
	}
	return o.admitted
}

// resize returns n ops, the memory of ops being used again where it suffices.
func resize(ops []op, n int) []op {
	if n > cap(ops) {
		ops = append(ops[:cap(ops)], make([]op, n-cap(ops))...)
	}
	return ops[:n]
}

// forget drops what ops refer to, or an idle table would keep a batch alive.
func forget(ops []op) {
	for i := range ops {
		ops[i].req = nil
		clear(ops[i].vecs)
	}
}

// env is what ops need of their device.
type env struct {
	regions [][]byte
	budget  *blockio.Budget
	count   *blockio.Counters
	// hook, in tests, changes what the kernel answered.
	hook blockio.ResultHook
}

// prepare fills e with what remains of o. registered says whether the ring knows
// the device's regions.
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
		// Second tries leave the submitting thread: what had no room there may
		// block in a worker.
		e.Flags |= giouring.SqeAsync
	}
	o.tries++
}

// remaining appends the iovecs of n bytes of bufs after the first skip.
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

// complete takes the result of one completion. It returns whether o is over, with
// its outcome in the request; if not, the rest is to be submitted.
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
	// O_DIRECT goes on at a multiple of Align only; the bytes beyond are moved again.
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

// noProgress is why a transfer that moves nothing, without an error, is given up:
// a file that something else has cut, or a broken driver.
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

// passing reports whether the same request may succeed when submitted again.
// ECANCELED is what the kernel makes of requests whose submitting thread ended.
func passing(err error) bool {
	return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECANCELED)
}

// end records the outcome and gives the bytes back. Nothing of o is in flight.
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
