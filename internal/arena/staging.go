package arena

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/penstock-kv/penstock/internal/sys"
)

// StagingMaxBytes is the maximum size of a Staging, in bytes.
const StagingMaxBytes = 1 << 30

// A Staging is memory outside of any arena through which another process passes bytes to this one.
// Its pages are allocated when they are first used. The owner of the Staging maps it read-only, and
// must expect that the other process changes the bytes at any time. The size of its file is sealed:
// neither process can shrink the file, so no access faults.
type Staging struct {
	mem  []byte
	file *os.File // of the owner, until Send
}

// NewStaging makes a Staging of this process. sizeBytes is a multiple of 2 MiB.
func NewStaging(sizeBytes int64) (*Staging, error) {
	if !validStaging(sizeBytes) {
		return nil, fmt.Errorf("arena: staging memory of %d bytes; choose a multiple of %d, at most %d", sizeBytes, sys.HugePageSize, StagingMaxBytes)
	}
	file, err := sys.Memfd("penstock-staging", sizeBytes, false)
	if err != nil {
		return nil, fmt.Errorf("arena: %w", err)
	}
	s := &Staging{file: file}
	if s.mem, err = sys.MapSharedRead(int(file.Fd()), int(sizeBytes)); err == nil {
		err = sys.DontDump(s.mem)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("arena: %w", err), s.Close())
	}
	return s, nil
}

func validStaging(sizeBytes int64) bool {
	return sizeBytes > 0 && sizeBytes <= StagingMaxBytes && sizeBytes%sys.HugePageSize == 0
}

// Send sends msg, which is not empty, and the memory's descriptor over a unix socket. It is called
// once.
func (s *Staging) Send(conn *net.UnixConn, msg []byte) error {
	err := errors.Join(sys.SendFile(conn, msg, s.file), s.file.Close())
	s.file = nil
	return err
}

// MapStaging maps the Staging of another process for reading and writing, and closes file, its
// descriptor. It refuses a file that is not a Staging, or that its owner could shrink.
func MapStaging(file *os.File) (*Staging, error) {
	s, err := mapStaging(int(file.Fd()))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("arena: map staging memory: %w", err), file.Close())
	}
	if err := file.Close(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func mapStaging(fd int) (*Staging, error) {
	size, err := sys.FileSize(fd)
	if err != nil {
		return nil, err
	}
	sealed, err := sys.SizeSealed(fd)
	if err != nil {
		return nil, err
	}
	if !validStaging(size) || !sealed {
		return nil, fmt.Errorf("a file of %d bytes, its size sealed: %t; want a multiple of %d, sealed", size, sealed, sys.HugePageSize)
	}
	mem, err := sys.MapShared(fd, int(size))
	if err != nil {
		return nil, err
	}
	s := &Staging{mem: mem}
	if err := sys.DontDump(mem); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Bytes returns the memory; nil after Close.
func (s *Staging) Bytes() []byte { return s.mem }

// Close unmaps the memory. It may be called twice.
func (s *Staging) Close() error {
	var errs []error
	if s.mem != nil {
		errs = append(errs, sys.Unmap(s.mem))
		s.mem = nil
	}
	if s.file != nil {
		errs = append(errs, s.file.Close())
		s.file = nil
	}
	return errors.Join(errs...)
}
