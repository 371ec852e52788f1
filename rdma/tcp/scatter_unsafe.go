//go:build linux

package tcp

import (
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// scatter reads from one socket into many destinations with one system call: the pages of a frame
// and then the header of the next frame. Only the reader goroutine uses it.
type scatter struct {
	raw   syscall.RawConn
	iov   []unix.Iovec
	n     int
	errno syscall.Errno
	// step is the method value of readv, bound once to avoid an allocation per read.
	step func(fd uintptr) bool
}

// newScatter returns nil if nc is not a plain TCP socket (TLS). It also returns nil in builds with
// the race detector, which does not observe writes by the kernel through vectors.
func newScatter(nc net.Conn) *scatter {
	t, ok := nc.(*net.TCPConn)
	if !ok || raceEnabled {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return nil // closed already: the first plain read returns the error
	}
	s := &scatter{raw: raw}
	s.step = s.readv
	return s
}

// read is net.Conn's Read with many destinations, none of them empty. It returns the number of
// bytes read and obeys the connection's read deadline.
func (s *scatter) read(into [][]byte) (int, error) {
	s.iov = s.iov[:0]
	for _, b := range into {
		v := unix.Iovec{Base: &b[0]}
		v.SetLen(len(b))
		s.iov = append(s.iov, v)
	}
	err := s.raw.Read(s.step)
	clear(s.iov)
	switch {
	case err != nil:
		return 0, err
	case s.errno != 0:
		return 0, os.NewSyscallError("readv", s.errno)
	case s.n == 0:
		return 0, io.EOF
	}
	return s.n, nil
}

// readv returns true if it read bytes or got an error. If it returns false, the runtime calls it
// again when the socket is readable.
func (s *scatter) readv(fd uintptr) bool {
	for {
		// Safety: iov is not empty and holds its base addresses as pointers. Each length is the
		// length of the slice from which the base comes.
		n, _, errno := syscall.Syscall(unix.SYS_READV, fd, uintptr(unsafe.Pointer(&s.iov[0])), uintptr(len(s.iov)))
		switch errno {
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			return false
		}
		s.n, s.errno = int(n), errno
		return true
	}
}
