package sys

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Space returns the size of the file system that holds path, and the bytes of it that are free for
// an unprivileged user.
func Space(path string) (totalBytes, freeBytes int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, 0, fmt.Errorf("sys: space of %s: %w", path, err)
	}
	unit := int64(st.Frsize)
	return int64(st.Blocks) * unit, int64(st.Bavail) * unit, nil
}

// DropCache writes back f and drops its clean pages from the page cache, so that the next buffered
// read reaches the device. Pages that a process has mapped stay in the cache.
func DropCache(f *os.File) error {
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sys: drop cached pages: %w", err)
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return fmt.Errorf("sys: drop cached pages of %s: %w", f.Name(), err)
	}
	return nil
}

// SetCongestion sets the congestion control algorithm of one TCP socket, such as "cubic". It fails
// with ENOENT if the kernel lacks the algorithm, and with EPERM if the kernel does not allow it.
func SetCongestion(c syscall.RawConn, name string) error {
	var err error
	if cerr := c.Control(func(fd uintptr) {
		err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, name)
	}); cerr != nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("sys: congestion control %q: %w", name, err)
	}
	return nil
}

// Congestion returns the congestion control of one TCP socket.
func Congestion(c syscall.RawConn) (string, error) {
	var name string
	var err error
	if cerr := c.Control(func(fd uintptr) {
		name, err = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	}); cerr != nil {
		err = cerr
	}
	if err != nil {
		return "", fmt.Errorf("sys: congestion control of a socket: %w", err)
	}
	return name, nil
}
