package posixio

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/io/blockio"
)

// lockName is the file whose flock gives the ownership of the volume. The file is not removed at
// release: that could invalidate the lock of a process that has just opened the file.
const lockName = "LOCK"

// Lock implements blockio.Device with flock. The kernel releases the lock when the process ends for
// any reason.
func (d *Dir) Lock(identity string) error {
	if err := d.enterChange("lock", "volume"); err != nil {
		return err
	}
	defer d.gate.Leave()
	d.naming.Lock()
	defer d.naming.Unlock()
	if d.lockFD >= 0 {
		return fmt.Errorf("posixio: volume %s is locked by this device already", d.path)
	}
	fd, err := unix.Openat(d.fd, lockName, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return d.fail("open", lockName, err)
	}
	if err := d.take(fd, identity); err != nil {
		unix.Close(fd)
		return err
	}
	d.lockFD = fd
	return nil
}

func (d *Dir) take(fd int, identity string) error {
	err := retry(func() error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return &blockio.OwnedError{Volume: d.path, Owner: d.readOwner(fd)}
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOLCK):
		return d.fail("lock", "volume", fmt.Errorf("the file system has no locks (mount it with them): %w (%w)", blockio.ErrUnsupported, err))
	case err != nil:
		return d.fail("lock", "volume", err)
	}
	return d.writeOwner(fd, blockio.OneLine(identity)+"\n")
}

// writeOwner records the owner of the lock. It overwrites the identity of an earlier owner, so that
// the file needs no new disk block. If the volume is full and the file has no block, the owner is
// not recorded. The lock is valid nevertheless, because reads must continue on a full volume.
func (d *Dir) writeOwner(fd int, line string) error {
	n, err := unix.Pwrite(fd, []byte(line), 0)
	keep := int64(len(line))
	if full(err) {
		keep, err = 0, nil
	} else if err == nil && n != len(line) {
		err = fmt.Errorf("%d of %d bytes written", n, len(line))
	}
	if err = errors.Join(err, unix.Ftruncate(fd, keep)); err != nil {
		return d.fail("write the identity to", lockName, err)
	}
	return nil
}

// readOwner reads the identity that the lock's holder wrote.
func (d *Dir) readOwner(fd int) string {
	buf := make([]byte, 1024)
	n, err := unix.Pread(fd, buf, 0)
	owner := ""
	if err == nil {
		owner, _, _ = strings.Cut(string(buf[:n]), "\n")
	}
	if owner = blockio.OneLine(owner); owner == "" {
		return "a process that has not named itself (see who has " + filepath.Join(d.path, lockName) + " open)"
	}
	return owner
}

// unlock releases the ownership, if this device has it.
func (d *Dir) unlock() error {
	d.naming.Lock()
	defer d.naming.Unlock()
	if d.lockFD < 0 {
		return nil
	}
	fd := d.lockFD
	d.lockFD = -1
	// An error is ignored: an old identity has no effect while no process holds the lock. The file
	// keeps its disk block for the identity of the next owner.
	_, _ = unix.Pwrite(fd, []byte("\n"), 0)
	return unix.Close(fd)
}
