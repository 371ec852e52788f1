//go:build uring

package uring

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/io/blockio"
)

// Probe reports whether io_uring works in dir. It writes and reads a page of an unnamed file there
// through a ring. If io_uring does not work, reason has the cause and a remedy.
func Probe(dir string) (ok bool, reason string) {
	if err := probe(dir); err != nil {
		return false, err.Error()
	}
	return true, "a page was written and read through a ring in " + dir
}

func probe(dir string) error {
	r, err := newRing(1)
	if err != nil {
		return explain(err)
	}
	defer r.close()
	fd, err := scratch(dir)
	if err != nil {
		return fmt.Errorf("scratch file in %s: %w", dir, err)
	}
	defer unix.Close(fd)
	page, err := sys.MapAnon(sys.HugePageSize, false)
	if err != nil {
		return err
	}
	defer sys.Unmap(page)
	page = page[:blockio.Align]
	const mark = "penstock"
	copy(page, mark)
	if err := transfer(r, true, fd, page); err != nil {
		return fmt.Errorf("write to %s through a ring: %w", dir, err)
	}
	clear(page)
	if err := transfer(r, false, fd, page); err != nil {
		return fmt.Errorf("read from %s through a ring: %w", dir, err)
	}
	if string(page[:len(mark)]) != mark {
		return fmt.Errorf("a page read from %s through a ring is not what was written", dir)
	}
	return nil
}

// scratch opens a file without a name in dir, with O_DIRECT if the file system supports it.
func scratch(dir string) (int, error) {
	const flags = unix.O_RDWR | unix.O_CLOEXEC | unix.O_TMPFILE
	fd, err := unix.Open(dir, flags|unix.O_DIRECT, 0o600)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.Open(dir, flags, 0o600)
	}
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) {
		return fd, err
	}
	// NFS and FUSE have no unnamed files.
	f, err := os.CreateTemp(dir, "PROBE.")
	if err != nil {
		return -1, err
	}
	defer f.Close()
	if err := os.Remove(f.Name()); err != nil {
		return -1, err
	}
	return unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
}

// transfer moves one page at the beginning of the file.
func transfer(r *ring, write bool, fd int, page []byte) error {
	prepareSpan(r.next(), write, fd, page, 0, -1)
	res, n := int32(0), uint32(0)
	for n == 0 {
		if err := r.enter(1); err != nil {
			return err
		}
		n = r.reap(func(_ uint64, got int32) { res = got })
	}
	moved, err := outcome(res)
	if err == nil && moved != len(page) {
		err = fmt.Errorf("%d bytes of %d moved", moved, len(page))
	}
	return err
}

// explain adds blockio.ErrUnsupported to the error with which the kernel refused a ring, and names
// the likely reason for the refusal.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES):
		why := "a seccomp profile (Docker's and Kubernetes' default) or a security module"
		if v, rerr := os.ReadFile("/proc/sys/kernel/io_uring_disabled"); rerr == nil && strings.TrimSpace(string(v)) != "0" {
			why = "sysctl kernel.io_uring_disabled=" + strings.TrimSpace(string(v))
		}
		return fmt.Errorf("%w: refused by %s: %w", err, why, blockio.ErrUnsupported)
	case errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("%w: this kernel, or sandbox, has no io_uring: %w", err, blockio.ErrUnsupported)
	case errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("%w: out of memory, or of locked memory (ulimit -l) on kernels before 5.12: %w", err, blockio.ErrUnsupported)
	}
	return fmt.Errorf("%w: %w", err, blockio.ErrUnsupported)
}
