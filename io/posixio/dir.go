package posixio

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/io/blockio"
)

// Dir is the directory of a volume: its files, names, lock and durability. It implements
// blockio.Device except Do, Info, Stats and the transfer of bytes. A backend embeds Dir, and calls
// Admit before its transfers and Done after them.
type Dir struct {
	path   string
	fd     int    // of the directory
	fs     string // the file system's name
	direct bool
	detail string
	// readOnly is set if the volume must not be changed.
	readOnly bool
	gate     blockio.Gate
	closing  sync.Once
	counters blockio.Counters
	// entries syncs the directory. It is dirty while a Create or Remove is not durable yet.
	entries flusher

	// descriptors is nil, or follows the descriptors of the files.
	descriptors Descriptors

	// naming serialises creates, opens, removes and closes of files, Lock, and the calls of
	// descriptors.
	naming sync.Mutex
	lockFD int // -1 if not held

	mu     sync.Mutex
	inodes map[string]*inode // the open files, by name
	files  map[*File]struct{}
}

// OpenDir opens an existing directory as a volume. It tests whether the file system supports
// O_DIRECT, unless buffered is set.
func OpenDir(path string, buffered bool) (*Dir, error) {
	d, err := newDir(path)
	if err != nil {
		return nil, err
	}
	if err := d.probe(buffered); err != nil {
		unix.Close(d.fd)
		return nil, err
	}
	return d, nil
}

// openReadOnly opens an existing directory for reading.
func openReadOnly(path string) (*Dir, error) {
	d, err := newDir(path)
	if err != nil {
		return nil, err
	}
	d.readOnly, d.detail = true, d.fs+", page cache, for reading only"
	return d, nil
}

func newDir(path string) (*Dir, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("posixio: open volume %s (an existing directory is needed): %w", path, err)
	}
	return &Dir{path: path, fd: fd, fs: fsName(fd), inodes: make(map[string]*inode), files: make(map[*File]struct{}), lockFD: -1}, nil
}

// Descriptors follows the descriptors of a Dir's files, for a backend that registers them with a
// driver. One call at a time is made.
type Descriptors interface {
	// Opened is called before the first transfer on fd. After an error, fd is closed, and the
	// Create or Open that opened fd fails.
	Opened(fd int) error
	// Closing is called before fd is closed. No transfer on fd is in flight.
	Closing(fd int)
}

// Follow makes the Dir call w. It must be called before the first file is opened.
func (d *Dir) Follow(w Descriptors) { d.descriptors = w }

func (d *Dir) opened(fd int) error {
	if d.descriptors == nil {
		return nil
	}
	return d.descriptors.Opened(fd)
}

// Path returns the directory as it was given to OpenDir.
func (d *Dir) Path() string { return d.path }

// Direct reports whether files are opened with O_DIRECT.
func (d *Dir) Direct() bool { return d.direct }

// Volatile reports whether the file system is in memory.
func (d *Dir) Volatile() bool { return d.fs == tmpfs || d.fs == ramfs }

// Detail returns the name of the file system and, if the page cache is used, the reason.
func (d *Dir) Detail() string { return d.detail }

// Counters returns the counters that Done and Sync update. The backend itself calls
// Counters.Resumed.
func (d *Dir) Counters() *blockio.Counters { return &d.counters }

// Admit checks a batch, and keeps its files and the volume open until Done. After an error nothing
// may be submitted, and Done must not be called.
func (d *Dir) Admit(batch []blockio.Request) error {
	if err := d.enter("do", "a batch"); err != nil {
		return err
	}
	err := blockio.CheckBatch(batch)
	if err == nil && d.readOnly && writes(batch) {
		err = d.fail("write to", "a file", errReadOnly)
	}
	if err == nil {
		err = blockio.EnterFiles(batch, d.gateOf)
	}
	if err != nil {
		d.gate.Leave()
	}
	return err
}

// Done ends the effect of Admit. No transfer of the batch may be in flight. completed is set if the
// batch was submitted; Done then counts the outcomes.
func (d *Dir) Done(batch []blockio.Request, completed bool) {
	for i := range batch {
		if !completed {
			break
		}
		if batch[i].Op == blockio.Write {
			batch[i].File.(*File).ino.content.mark()
		}
		d.counters.Done(&batch[i])
	}
	blockio.LeaveFiles(batch, d.gateOf)
	d.gate.Leave()
}

// gateOf returns the gate of a file of this volume, and nil for any other file.
func (d *Dir) gateOf(f blockio.File) *blockio.Gate {
	if f, ok := f.(*File); ok && f.dir == d {
		return &f.gate
	}
	return nil
}

// enter admits a call that is not a batch.
func (d *Dir) enter(doing, what string) error {
	if !d.gate.Enter() {
		return fmt.Errorf("posixio: %s %s on %s: %w", doing, what, d.path, blockio.ErrClosed)
	}
	return nil
}

// enterChange admits a call that changes the volume.
func (d *Dir) enterChange(doing, what string) error {
	if d.readOnly {
		return d.fail(doing, what, errReadOnly)
	}
	return d.enter(doing, what)
}

var errReadOnly = fmt.Errorf("the volume was opened for reading only: %w", blockio.ErrRequest)

func writes(batch []blockio.Request) bool {
	return slices.ContainsFunc(batch, func(r blockio.Request) bool { return r.Op == blockio.Write })
}

// fail adds context to an error.
func (d *Dir) fail(doing, what string, err error) error {
	return fmt.Errorf("posixio: %s %s on %s: %w", doing, what, d.path, err)
}

// Create implements blockio.Device.
func (d *Dir) Create(name string, sizeBytes int64) (blockio.File, error) {
	if err := d.enterChange("create", name); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	if err := errors.Join(blockio.CheckName(name), blockio.CheckSize(name, sizeBytes)); err != nil {
		return nil, err
	}
	d.naming.Lock()
	defer d.naming.Unlock()
	fd, err := d.openat(name, unix.O_CREAT|unix.O_EXCL)
	if err != nil {
		return nil, d.fail("create", name, err)
	}
	if err := d.reserve(fd, sizeBytes); err != nil {
		unix.Close(fd)
		err = errors.Join(err, d.unlink(name))
		return nil, d.fail(fmt.Sprintf("reserve %d bytes for", sizeBytes), name, err)
	}
	if err := d.opened(fd); err != nil {
		unix.Close(fd)
		return nil, d.fail("create", name, errors.Join(err, d.unlink(name)))
	}
	d.entries.mark()
	return d.admitFile(name, fd, sizeBytes), nil
}

// Open implements blockio.Device.
func (d *Dir) Open(name string) (blockio.File, error) {
	if err := d.enter("open", name); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	if err := blockio.CheckName(name); err != nil {
		return nil, err
	}
	d.naming.Lock()
	defer d.naming.Unlock()
	if f := d.again(name); f != nil {
		return f, nil
	}
	fd, err := d.openat(name, 0)
	if err != nil {
		return nil, d.fail("open", name, err)
	}
	size, err := regularSize(fd)
	if err == nil {
		err = d.opened(fd)
	}
	if err != nil {
		unix.Close(fd)
		return nil, d.fail("open", name, err)
	}
	return d.admitFile(name, fd, size), nil
}

// Remove implements blockio.Device.
func (d *Dir) Remove(name string) error {
	if err := d.enterChange("remove", name); err != nil {
		return err
	}
	defer d.gate.Leave()
	if err := blockio.CheckName(name); err != nil {
		return err
	}
	d.naming.Lock()
	defer d.naming.Unlock()
	if d.inode(name) != nil {
		return d.fail("remove", name, blockio.ErrOpen)
	}
	if err := d.unlink(name); err != nil {
		return d.fail("remove", name, err)
	}
	d.entries.mark()
	return nil
}

// List implements blockio.Device.
func (d *Dir) List() ([]string, error) {
	if err := d.enter("list", "files"); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	// Each call has its own descriptor: concurrent Lists must not share a position.
	fd, err := unix.Openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, d.fail("list", "files", err)
	}
	dir := os.NewFile(uintptr(fd), d.path)
	defer dir.Close()
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return nil, d.fail("list", "files", err)
	}
	var names []string
	for _, e := range entries {
		if e.Type().IsRegular() && blockio.CheckName(e.Name()) == nil {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

// Stat implements blockio.Device. Free is the space available to an unprivileged user.
func (d *Dir) Stat() (blockio.SpaceStat, error) {
	if err := d.enter("stat", "volume"); err != nil {
		return blockio.SpaceStat{}, err
	}
	defer d.gate.Leave()
	s, err := d.space()
	if err != nil {
		return blockio.SpaceStat{}, d.fail("stat", "volume", err)
	}
	return s, nil
}

// Close refuses new calls, waits for calls in flight, closes the files and releases the lock. It
// may be called twice; every call waits.
func (d *Dir) Close() (err error) {
	d.gate.Close()
	d.closing.Do(func() { err = d.closeAll() })
	return err
}

func (d *Dir) closeAll() error {
	var errs []error
	for _, f := range d.openFiles() {
		errs = append(errs, f.Close())
	}
	errs = append(errs, d.unlock(), unix.Close(d.fd))
	if err := errors.Join(errs...); err != nil {
		return d.fail("close", "volume", err)
	}
	return nil
}

func (d *Dir) openFiles() []*File {
	d.mu.Lock()
	defer d.mu.Unlock()
	files := make([]*File, 0, len(d.files))
	for f := range d.files {
		files = append(files, f)
	}
	return files
}
