package posixio

import (
	"errors"
	"io"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/io/blockio"
)

// triesMax is how often a transfer that made no progress is tried again before
// it fails.
const triesMax = 16

// transfer moves bytes between one file and buffers.
type transfer struct {
	op   blockio.Op
	fd   int
	file string
	// hook bends the outcome of each system call, in tests.
	hook blockio.ResultHook
	// resumed is called whenever a short transfer is continued.
	resumed func()
}

// run moves all bytes of bufs, or returns how many it moved and why no more.
func (t *transfer) run(bufs [][]byte, offset int64) (moved int64, err error) {
	want := totalLen(bufs)
	for tries := 0; ; {
		n, err := t.call(bufs, offset+moved)
		if err != nil && (!temporary(err) || tries >= triesMax) {
			return moved, err
		}
		if moved+n >= want {
			return want, nil
		}
		// O_DIRECT continues at whole pages only: what is beyond is moved again.
		whole := n &^ (blockio.Align - 1)
		switch {
		case whole > 0:
			tries = 0
		case tries >= triesMax:
			return moved, t.stuck()
		default:
			tries++
			runtime.Gosched()
		}
		moved += whole
		bufs = advance(bufs, whole)
		if err == nil {
			t.resumed()
		}
	}
}

// call makes one system call and returns the bytes it moved.
func (t *transfer) call(bufs [][]byte, offset int64) (int64, error) {
	n, err := t.system(bufs, offset)
	if t.hook != nil {
		n, err = t.hook(t.op, t.file, offset, n, err)
	}
	if err != nil {
		return 0, err
	}
	return int64(n), nil
}

// system chooses the call that fits the buffers.
func (t *transfer) system(bufs [][]byte, offset int64) (int, error) {
	read, one := t.op == blockio.Read, len(bufs) == 1
	switch {
	case read && one:
		return unix.Pread(t.fd, bufs[0], offset)
	case read:
		return unix.Preadv(t.fd, bufs, offset)
	case one:
		return unix.Pwrite(t.fd, bufs[0], offset)
	}
	return unix.Pwritev(t.fd, bufs, offset)
}

// stuck is why a transfer that moves nothing, without an error, is given up: a
// file that is shorter than it was at opening, or a broken driver.
func (t *transfer) stuck() error {
	if t.op == blockio.Read {
		return io.ErrUnexpectedEOF
	}
	return io.ErrNoProgress
}

func temporary(err error) bool {
	return errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN)
}

// advance returns bufs without their first n bytes. The slice that it got, which
// is the request's, stays as it is.
func advance(bufs [][]byte, n int64) [][]byte {
	for n > 0 && n >= int64(len(bufs[0])) {
		n -= int64(len(bufs[0]))
		bufs = bufs[1:]
	}
	if n == 0 {
		return bufs
	}
	rest := append([][]byte(nil), bufs...)
	rest[0] = rest[0][n:]
	return rest
}

func totalLen(bufs [][]byte) int64 {
	var n int64
	for _, b := range bufs {
		n += int64(len(b))
	}
	return n
}
