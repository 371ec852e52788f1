package sys

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

const (
	// PageSize is the unit of mappings and of direct I/O, in bytes. x86-64 has no other page size;
	// package arena refuses arm64 kernels with pages of 16 or 64 KiB.
	PageSize = 4096
	// HugePageSize is the size in bytes of the huge pages in use.
	HugePageSize = 2 << 20
)

// MapAnon returns a private anonymous mapping of sizeBytes that starts at a multiple of
// HugePageSize; sizeBytes is a multiple of HugePageSize too. With hugetlb the memory comes from the
// reserved pool (vm.nr_hugepages). If the pool is too small, MapAnon fails with ENOMEM and leaves
// nothing mapped.
func MapAnon(sizeBytes int, hugetlb bool) ([]byte, error) {
	if hugetlb {
		return mapReserved(sizeBytes)
	}
	return mapAligned(sizeBytes, -1, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
}

// MapShared maps the first sizeBytes of fd, a memfd of this process, readable
// and writable, at a multiple of HugePageSize.
func MapShared(fd, sizeBytes int) ([]byte, error) {
	return mapAligned(sizeBytes, fd, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// MapSharedRead is MapShared for the memfd of another process, read-only: a write to the memory
// faults.
func MapSharedRead(fd, sizeBytes int) ([]byte, error) {
	return mapAligned(sizeBytes, fd, unix.PROT_READ, unix.MAP_SHARED)
}

// Unmap undoes MapAnon, MapShared or MapSharedRead; b is the result of one of them.
func Unmap(b []byte) error {
	if err := munmap(b); err != nil {
		return fmt.Errorf("sys: munmap of %d bytes: %w", len(b), err)
	}
	return nil
}

// Memfd returns an anonymous file of sizeBytes in memory. This process maps it with MapShared.
// Other processes receive it over a unix socket and then map it. With hugetlb its pages come from
// the reserved pool; if the pool is too small, mapping fails. The size of the file is sealed, so a
// peer cannot truncate the file and cause a SIGBUS in this process. Freeze adds the other seals.
func Memfd(name string, sizeBytes int64, hugetlb bool) (*os.File, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	if hugetlb {
		flags |= unix.MFD_HUGETLB | unix.MFD_HUGE_2MB
	}
	fd, err := unix.MemfdCreate(name, flags)
	if err != nil {
		return nil, fmt.Errorf("sys: memfd_create %q (hugetlb %t): %w", name, hugetlb, err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.Truncate(sizeBytes); err != nil {
		return nil, errors.Join(fmt.Errorf("sys: memfd %q of %d bytes: %w", name, sizeBytes, err), f.Close())
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, sizeSeals); err != nil {
		return nil, errors.Join(fmt.Errorf("sys: seal memfd %q: %w", name, err), f.Close())
	}
	return f, nil
}

// sizeSeals fix the size of a memfd. frozenSeals also fix its content, except through mappings that
// exist already.
const (
	sizeSeals   = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	frozenSeals = sizeSeals | unix.F_SEAL_FUTURE_WRITE | unix.F_SEAL_SEAL
)

// Freeze forbids new writable mappings of the memfd f; existing mappings stay writable. No seal can
// be added or removed afterwards. A process that receives a descriptor of f, or opens f below
// /proc, can only read it.
func Freeze(f *os.File) error {
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, frozenSeals); err != nil {
		return fmt.Errorf("sys: freeze memfd %q: %w", f.Name(), err)
	}
	return nil
}

// SizeSealed reports whether fd is a memfd whose size is sealed against shrinking, so that a
// mapping of it cannot fault.
func SizeSealed(fd int) (bool, error) {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return false, fmt.Errorf("sys: seals of descriptor %d: %w", fd, err)
	}
	return seals&unix.F_SEAL_SHRINK != 0, nil
}

// Reopen opens the file of f again, for reading only.
func Reopen(f *os.File) (*os.File, error) {
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
}

// AdviseHuge requests transparent huge pages for b. The kernel may ignore the request; HugeBytes
// returns the result.
func AdviseHuge(b []byte) error {
	if err := unix.Madvise(b, unix.MADV_HUGEPAGE); err != nil {
		return fmt.Errorf("sys: madvise huge pages for %d bytes: %w", len(b), err)
	}
	return nil
}

// DontDump excludes b from core dumps.
func DontDump(b []byte) error {
	if err := unix.Madvise(b, unix.MADV_DONTDUMP); err != nil {
		return fmt.Errorf("sys: madvise no core dump of %d bytes: %w", len(b), err)
	}
	return nil
}

// Populate makes every page of the new mapping b, which is all zero, present and writable. So a
// lack of memory is an error of this call, and not a fault or a SIGBUS during later I/O.
func Populate(b []byte) error {
	for {
		err := unix.Madvise(b, unix.MADV_POPULATE_WRITE)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			// Pages already present stay; the next call continues after them.
		case errors.Is(err, unix.EINVAL):
			touch(b) // kernels before 5.14 lack MADV_POPULATE_WRITE
			return nil
		default:
			return fmt.Errorf("sys: populate %d bytes: %w", len(b), err)
		}
	}
}

// PopulateRead enters every page of the mapping b into the page tables. On kernels before 5.14 it
// does nothing, and a page is entered at its first access.
func PopulateRead(b []byte) error {
	for {
		err := unix.Madvise(b, unix.MADV_POPULATE_READ)
		switch {
		case err == nil, errors.Is(err, unix.EINVAL):
			return nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			// Pages already entered stay; the next call continues after them.
		default:
			return fmt.Errorf("sys: populate %d bytes: %w", len(b), err)
		}
	}
}

// touch writes one byte of every page of a mapping that is all zero.
func touch(b []byte) {
	for i := 0; i < len(b); i += PageSize {
		b[i] = 0
	}
}

// FileSize returns the size in bytes of an open descriptor.
func FileSize(fd int) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("sys: size of descriptor %d: %w", fd, err)
	}
	return st.Size, nil
}
