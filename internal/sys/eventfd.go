package sys

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Eventfd is a file descriptor that is readable from Signal until Clear: an event for a
// loop outside of Go. Its methods do not block.
type Eventfd struct{ fd int }

// NewEventfd opens one. Programs that are executed do not inherit it.
func NewEventfd() (Eventfd, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return Eventfd{}, fmt.Errorf("eventfd: %w", err)
	}
	return Eventfd{fd}, nil
}

// FD returns the descriptor, which Close ends.
func (e Eventfd) FD() int { return e.fd }

// Signal makes it readable.
func (e Eventfd) Signal() error {
	_, err := unix.Write(e.fd, binary.NativeEndian.AppendUint64(nil, 1))
	if errors.Is(err, unix.EAGAIN) {
		return nil // its counter is full: readable
	}
	return err
}

// Clear makes it unreadable.
func (e Eventfd) Clear() error {
	_, err := unix.Read(e.fd, make([]byte, 8))
	if errors.Is(err, unix.EAGAIN) {
		return nil // it was
	}
	return err
}

// Close closes it.
func (e Eventfd) Close() error { return unix.Close(e.fd) }
