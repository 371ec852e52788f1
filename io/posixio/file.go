package posixio

import (
	"errors"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/io/blockio"
)

// inode is a file of the directory that is open, once or several times.
type inode struct {
	name string
	fd   int
	size int64
	// content syncs the file. It is dirty while a completed write is not durable yet.
	content flusher
	opens   int // guarded by Dir.mu
}

// File is one opening of a volume's file.
type File struct {
	dir  *Dir
	ino  *inode
	gate blockio.Gate
}

var _ blockio.File = (*File)(nil)

// Name implements blockio.File.
func (f *File) Name() string { return f.ino.name }

// Size implements blockio.File.
func (f *File) Size() int64 { return f.ino.size }

// FD returns the file descriptor, for the transfers of a backend. It is valid between Dir.Admit and
// Dir.Done of a batch that uses the file.
func (f *File) FD() int { return f.ino.fd }

// Close implements blockio.File.
func (f *File) Close() error {
	if !f.gate.Close() {
		return nil
	}
	d := f.dir
	d.naming.Lock()
	defer d.naming.Unlock()
	if !d.forget(f) {
		return nil
	}
	if d.descriptors != nil {
		d.descriptors.Closing(f.ino.fd)
	}
	if err := unix.Close(f.ino.fd); err != nil {
		return d.fail("close", f.ino.name, err)
	}
	return nil
}

// forget removes f from the tables and reports whether its inode has no other opening.
func (d *Dir) forget(f *File) (last bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.files, f)
	f.ino.opens--
	if f.ino.opens > 0 {
		return false
	}
	delete(d.inodes, f.ino.name)
	return true
}

// admitFile adds a newly opened descriptor to the tables.
func (d *Dir) admitFile(name string, fd int, size int64) *File {
	ino := &inode{name: name, fd: fd, size: size, opens: 1}
	// Writes through an earlier opening of the file may not have been synced.
	ino.content.mark()
	f := &File{dir: d, ino: ino}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.inodes[name] = ino
	d.files[f] = struct{}{}
	return f
}

// again returns another opening of a file that is open; nil if the file is not open.
func (d *Dir) again(name string) *File {
	d.mu.Lock()
	defer d.mu.Unlock()
	ino := d.inodes[name]
	if ino == nil {
		return nil
	}
	ino.opens++
	f := &File{dir: d, ino: ino}
	d.files[f] = struct{}{}
	return f
}

func (d *Dir) inode(name string) *inode {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.inodes[name]
}

// openat opens a file of the directory, also for writing unless the volume is read-only.
func (d *Dir) openat(name string, flags int) (int, error) {
	flags |= unix.O_CLOEXEC | unix.O_NOFOLLOW
	if !d.readOnly { // O_RDONLY is 0
		flags |= unix.O_RDWR
	}
	if d.direct {
		flags |= unix.O_DIRECT
	}
	for {
		fd, err := unix.Openat(d.fd, name, flags, 0o600)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil {
			keepAccessTime(fd, flags)
		}
		return fd, sentinel(err)
	}
}

// keepAccessTime sets O_NOATIME on fd, which was opened with flags, so that reads do not change the
// file's access time. ext4 writes a new access time to its journal during the read, so reads would
// wait for a drive whose writes hang. The kernel refuses O_NOATIME to a process that does not own
// the file (open(2)). That error is ignored: reads work without O_NOATIME.
func keepAccessTime(fd, flags int) {
	_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags|unix.O_NOATIME)
}

func (d *Dir) unlink(name string) error { return sentinel(unix.Unlinkat(d.fd, name, 0)) }

// regularSize returns the size of a regular file. It rounds the size down to whole pages, because a
// crash may have left any size.
func regularSize(fd int) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return 0, fmt.Errorf("not a regular file (mode %o): %w", st.Mode, blockio.ErrNotExist)
	}
	return st.Size &^ (blockio.Align - 1), nil
}

// sentinel wraps err with the sentinel error of blockio for its errno, if there is one.
func sentinel(err error) error {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return err
	}
	var s error
	switch errno {
	case unix.ENOSPC, unix.EDQUOT, unix.EFBIG:
		s = blockio.ErrNoSpace
	case unix.EEXIST:
		s = blockio.ErrExist
	case unix.ENOENT, unix.EISDIR, unix.ELOOP:
		s = blockio.ErrNotExist
	default:
		return err
	}
	return fmt.Errorf("%w (%w)", s, err)
}
