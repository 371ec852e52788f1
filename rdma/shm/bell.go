package shm

import (
	"encoding/binary"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// bell is an eventfd. The bell's owner sleeps until another process rings the bell, which means
// that it writes to the eventfd.
type bell struct {
	file *os.File
	// fd is the descriptor of file. It is kept because a call of file.Fd would make the descriptor
	// blocking.
	fd int
}

func newBell() (bell, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return bell{}, fmt.Errorf("shm: eventfd: %w", err)
	}
	// The descriptor is nonblocking, so that the runtime's poller waits for it and no thread is
	// blocked.
	return bell{os.NewFile(uintptr(fd), "penstock-bell"), fd}, nil
}

// wait blocks until the bell has been rung since the last wait.
func (b bell) wait() error {
	var count [8]byte
	_, err := b.file.Read(count[:])
	return err
}

// ringBell rings the bell whose descriptor is fd. It does not block. The write can fail only if fd
// is not a bell, because the counter of a bell overflows only at 2^64.
func ringBell(fd int) {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(fd, one[:])
}

// checkBell rejects a peer's descriptor that is not an eventfd. A write to another kind of file
// might block, or change the file.
func checkBell(fd int) error {
	what, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return fmt.Errorf("shm: check the peer's bell: %w", err)
	}
	if what != "anon_inode:[eventfd]" {
		return fmt.Errorf("shm: the peer's bell is %s, not an eventfd", what)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return fmt.Errorf("shm: check the peer's bell: %w", err)
	}
	return nil
}
