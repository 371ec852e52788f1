package posixio

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/io/blockio"
)

// zeroBytes is the size, in bytes, of one write of zeroes where fallocate is refused.
const zeroBytes = 1 << 20

// reserve sets the size of the empty file and reserves its space. It checks the free space first,
// so that a request that cannot succeed does not fill the file system before it fails.
func (d *Dir) reserve(fd int, sizeBytes int64) error {
	s, err := d.space()
	if err != nil {
		return err
	}
	if sizeBytes > s.FreeBytes {
		return fmt.Errorf("%d bytes are free: %w", s.FreeBytes, blockio.ErrNoSpace)
	}
	for {
		err := unix.Fallocate(fd, 0, 0, sizeBytes)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
			return zero(fd, sizeBytes)
		default:
			return sentinel(err)
		}
	}
}

// zero writes zeroes over the first sizeBytes of the file.
func zero(fd int, sizeBytes int64) error {
	buf, err := unix.Mmap(-1, 0, zeroBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return fmt.Errorf("memory for %d zeroes: %w", zeroBytes, err)
	}
	defer unix.Munmap(buf)
	t := transfer{op: blockio.Write, fd: fd, resumed: func() {}}
	for at := int64(0); at < sizeBytes; at += zeroBytes {
		if _, err := t.run([][]byte{buf[:min(sizeBytes-at, zeroBytes)]}, at); err != nil {
			return fmt.Errorf("zero at %d: %w", at, sentinel(err))
		}
	}
	return nil
}

func (d *Dir) space() (blockio.SpaceStat, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.fd, &st); err != nil {
		return blockio.SpaceStat{}, err
	}
	unit := int64(st.Frsize)
	return blockio.SpaceStat{TotalBytes: int64(st.Blocks) * unit, FreeBytes: int64(st.Bavail) * unit}, nil
}

// probe decides whether to use O_DIRECT. It writes and reads a file without a name, or a file whose
// name is removed at once.
func (d *Dir) probe(buffered bool) error {
	if buffered {
		d.detail = d.fs + ", page cache, as requested"
		return nil
	}
	fd, err := d.probeFile(unix.O_DIRECT)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		d.detail = fmt.Sprintf("%s, page cache (O_DIRECT refused: %v)", d.fs, err)
		return nil
	}
	if full(err) {
		// The volume is full, but existing files can still be read. If O_DIRECT does not work,
		// opening a file returns an error.
		d.direct, d.detail = true, d.fs+", O_DIRECT (not tried: the volume is full)"
		return nil
	}
	if err != nil {
		return d.fail("try", "to write", err)
	}
	defer unix.Close(fd)
	if err := tryTransfer(fd); err != nil {
		d.detail = fmt.Sprintf("%s, page cache (O_DIRECT of %d bytes refused: %v)", d.fs, blockio.Align, err)
		return nil
	}
	d.direct, d.detail = true, d.fs+", O_DIRECT"
	return nil
}

// probeFile opens an unnamed file. If the file system has no unnamed files (NFS, FUSE), it creates a
// file with a name that List does not return, and unlinks it.
func (d *Dir) probeFile(flags int) (int, error) {
	flags |= unix.O_RDWR | unix.O_CLOEXEC
	fd, err := unix.Openat(d.fd, ".", flags|unix.O_TMPFILE, 0o600)
	if err == nil {
		return fd, nil
	}
	name := "PROBE." + strconv.Itoa(os.Getpid())
	fd, err = unix.Openat(d.fd, name, flags|unix.O_CREAT|unix.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err == nil {
		err = unix.Unlinkat(d.fd, name, 0)
	} else if errors.Is(err, unix.EINVAL) {
		// Some file systems create the file before they check O_DIRECT.
		_ = unix.Unlinkat(d.fd, name, 0)
	}
	return fd, err
}

// tryTransfer returns an error if an aligned page cannot be written and read. A full volume is no
// error, because it can still be read.
func tryTransfer(fd int) error {
	buf, err := unix.Mmap(-1, 0, blockio.Align, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	defer unix.Munmap(buf)
	_, err = unix.Pwrite(fd, buf, 0)
	if err == nil {
		_, err = unix.Pread(fd, buf, 0)
	}
	if full(err) {
		return nil
	}
	return err
}

func full(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// tmpfs and ramfs are the file systems in memory.
const tmpfs, ramfs = "tmpfs", "ramfs"

// fsName returns the name of the directory's file system.
func fsName(fd int) string {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return "unknown file system"
	}
	switch int64(st.Type) {
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	case unix.TMPFS_MAGIC:
		return tmpfs
	case unix.RAMFS_MAGIC:
		return ramfs
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlayfs"
	case unix.NFS_SUPER_MAGIC:
		return "nfs"
	case unix.FUSE_SUPER_MAGIC:
		return "fuse"
	case unix.F2FS_SUPER_MAGIC:
		return "f2fs"
	}
	return fmt.Sprintf("file system %#x", st.Type)
}
