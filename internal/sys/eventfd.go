package sys

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Eventfd is a file descriptor that is readable from Signal until Clear. It signals an event to an
// event loop outside of Go. Its methods do not block.
type Eventfd struct{ fd int }

// NewEventfd opens an Eventfd with the close-on-exec flag.
func NewEventfd() (Eventfd, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return Eventfd{}, fmt.Errorf("eventfd: %w", err)
	}
	return Eventfd{fd}, nil
}

// FD returns the descriptor. Close closes it.
func (e Eventfd) FD() int { return e.fd }

// Signal makes the descriptor readable.
func (e Eventfd) Signal() error {
	_, err := unix.Write(e.fd, binary.NativeEndian.AppendUint64(nil, 1))
	if errors.Is(err, unix.EAGAIN) {
		return nil // the counter is at its maximum, so the descriptor is readable
	}
	return err
}

// Clear makes the descriptor not readable.
func (e Eventfd) Clear() error {
	_, err := unix.Read(e.fd, make([]byte, 8))
	if errors.Is(err, unix.EAGAIN) {
		return nil // the descriptor was not readable
	}
	return err
}

// Close closes the descriptor.
func (e Eventfd) Close() error { return unix.Close(e.fd) }
