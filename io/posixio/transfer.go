package posixio

import (
	"errors"
	"io"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/io/blockio"
)

// triesMax is the number of retries without progress after which a transfer fails.
const triesMax = 16

// transfer moves bytes between one file and buffers.
type transfer struct {
	op   blockio.Op
	fd   int
	file string
	// hook changes the result of each system call, in tests.
	hook blockio.ResultHook
	// resumed is called whenever a short transfer is continued.
	resumed func()
}

// run moves all bytes of bufs, or returns the number of bytes moved and the reason for stopping.
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
		// O_DIRECT can continue at whole pages only, so the bytes after the last whole page are
		// moved again.
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

// call makes one system call and returns the number of bytes moved.
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

// system chooses the system call for the number of buffers.
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

// stuck returns the error of a transfer that moves no byte although no call fails: the file has
// become shorter since it was opened, or a driver is broken.
func (t *transfer) stuck() error {
	if t.op == blockio.Read {
		return io.ErrUnexpectedEOF
	}
	return io.ErrNoProgress
}

func temporary(err error) bool {
	return errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN)
}

// advance returns bufs without their first n bytes. It does not change the slice bufs, which
// belongs to the request.
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
