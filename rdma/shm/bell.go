package shm

import (
	"encoding/binary"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// bell is an eventfd: the owner sleeps on it, others ring it.
type bell struct {
	file *os.File
	// fd is file's descriptor: file.Fd would make it blocking.
	fd int
}

func newBell() (bell, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return bell{}, fmt.Errorf("shm: eventfd: %w", err)
	}
	// Nonblocking: the runtime's poller waits for it, no thread does.
	return bell{os.NewFile(uintptr(fd), "penstock-bell"), fd}, nil
}

// wait blocks until the bell was rung since the last wait.
func (b bell) wait() error {
	var count [8]byte
	_, err := b.file.Read(count[:])
	return err
}

// ringBell rings the bell behind fd. It does not block, and fails only if the fd is no
// bell: one that nobody answers counts to 2^64.
func ringBell(fd int) {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(fd, one[:])
}

// checkBell refuses descriptors of the peer's that are no eventfd: a write to them
// might block, or go anywhere.
func checkBell(fd int) error {
	what, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return fmt.Errorf("shm: bell of the peer: %w", err)
	}
	if what != "anon_inode:[eventfd]" {
		return fmt.Errorf("shm: bell of the peer is %s, not an eventfd", what)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return fmt.Errorf("shm: bell of the peer: %w", err)
	}
	return nil
}
