package trie

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

const (
	// retryFirst is the delay before the first retry of an operation. The delay doubles
	// with each retry, up to retryMax.
	retryFirst = 250 * time.Millisecond
	retryMax   = 5 * time.Second
	// unsyncedMax is the size of driveFile.unsynced, in bytes, above which Write syncs the file.
	unsyncedMax = 1 << 20
)

// driveFS is the file system under Pebble. It exists because Pebble ends the process when it cannot
// write its log. If the reads of a compaction fail, Pebble repeats the compaction without a pause,
// and commits wait for the compaction. So once the index is open, driveFS does not return the
// drive's error: it retries each operation on a file until the operation succeeds. driveFS calls
// onFault when an operation fails or hangs.
//
// After a failed sync, a second sync may succeed without the data: the kernel may have dropped the
// pages that it could not write. So driveFS keeps the bytes written to a log or a manifest since
// the file's last sync, and writes them again before it repeats the sync. For a table driveFS keeps
// no bytes: when the drive works again, driveFS returns the error of the failed sync, and Pebble
// writes a new table.
type driveFS struct {
	vfs.FS
	// retry is false while the index is being opened: an error then fails Open.
	retry atomic.Bool
	// hungAfter is the duration after which an operation counts as faulty.
	hungAfter time.Duration

	mu sync.Mutex
	// faulty is the number of operations in progress that have failed or have exceeded hungAfter,
	// and faultyReads the number of reads among them. unreadable is closed exactly while
	// faultyReads is not 0; it is nil before the first call of readFault.
	faulty, faultyReads int
	unreadable          chan struct{}
	// onFault is called under mu with the cause when faulty becomes 1. onRecovery is
	// called under mu when faulty becomes 0.
	onFault    func(cause error)
	onRecovery func()
}

// driveOp is one operation in progress.
type driveOp struct {
	fs   *driveFS
	read bool
	hung *time.Timer
	// faulty and ended are guarded by driveFS.mu.
	faulty, ended bool
}

// begin starts an operation. The operation counts as faulty if it has not ended after hungAfter.
// what and name describe the operation in the error.
func (d *driveFS) begin(what, name string) *driveOp {
	o := &driveOp{fs: d, read: what == opRead}
	o.hung = time.AfterFunc(d.hungAfter, func() {
		o.fail(fmt.Errorf("%s %s has not completed for %v", what, name, d.hungAfter))
	})
	return o
}

// opRead is the name of operations that read from the drive.
const opRead = "read"

// fail counts the operation as faulty.
func (o *driveOp) fail(cause error) {
	o.fs.mu.Lock()
	defer o.fs.mu.Unlock()
	if o.ended || o.faulty {
		return
	}
	o.faulty = true
	if o.read {
		if o.fs.faultyReads++; o.fs.faultyReads == 1 {
			close(o.fs.unreadableLocked())
		}
	}
	if o.fs.faulty++; o.fs.faulty == 1 {
		o.fs.onFault(cause)
	}
}

func (o *driveOp) end() {
	o.hung.Stop()
	o.fs.mu.Lock()
	defer o.fs.mu.Unlock()
	o.ended = true
	if !o.faulty {
		return
	}
	if o.read {
		if o.fs.faultyReads--; o.fs.faultyReads == 0 {
			o.fs.unreadable = nil
		}
	}
	if o.fs.faulty--; o.fs.faulty == 0 {
		o.fs.onRecovery()
	}
}

// readFault returns a channel that is closed while the drive cannot be read.
func (d *driveFS) readFault() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.unreadableLocked()
}

func (d *driveFS) unreadableLocked() chan struct{} {
	if d.unreadable == nil {
		d.unreadable = make(chan struct{})
	}
	return d.unreadable
}

// driveWorks reports whether the drive works: err is nil, or an error that a retry cannot change
// (about a file's name, handle or end).
func driveWorks(err error) bool {
	return err == nil || errors.Is(err, io.EOF) || errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrClosed)
}

// do calls f until driveWorks accepts the error of f. Before each retry it calls beforeRetry, if
// not nil; an error of beforeRetry counts as an error of f. do returns the error of the last call of
// f if that is not nil, else the error of the first call.
func (d *driveFS) do(what, name string, f, beforeRetry func() error) (first error) {
	if !d.retry.Load() {
		return f()
	}
	o := d.begin(what, name)
	defer o.end()
	err := f()
	for wait := retryFirst; !driveWorks(err); wait = min(2*wait, retryMax) {
		if first == nil {
			first = err
		}
		o.fail(fmt.Errorf("%s %s: %w", what, name, err))
		time.Sleep(wait)
		err = nil
		if beforeRetry != nil {
			err = beforeRetry()
		}
		if err == nil {
			err = f()
		}
	}
	if err != nil {
		return err
	}
	return first
}

// untilDone calls f again while f fails because of the drive (see driveWorks). It returns nil if the
// last call of f succeeded.
func (d *driveFS) untilDone(what, name string, f func() error) error {
	var last error
	first := d.do(what, name, func() error { last = f(); return last }, nil)
	if last == nil {
		return nil
	}
	return first
}

// isTable reports whether the file is an SST or a blob file. After an error on such a file, Pebble
// writes a new file.
func isTable(name string) bool {
	return strings.HasSuffix(name, ".sst") || strings.HasSuffix(name, ".blob")
}

func (d *driveFS) file(what, name string, open func() (vfs.File, error)) (vfs.File, error) {
	var f vfs.File
	err := d.untilDone(what, name, func() (err error) { f, err = open(); return err })
	if err != nil {
		return nil, err
	}
	return &driveFile{File: f, fs: d, name: name, table: isTable(name)}, nil
}

// Open implements vfs.FS.
func (d *driveFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	var f vfs.File
	err := d.untilDone(opRead, name, func() (err error) { f, err = d.FS.Open(name, opts...); return err })
	if err != nil {
		return nil, err
	}
	return &driveReader{File: f, fs: d, name: name}, nil
}

// Create implements vfs.FS.
func (d *driveFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.file("create", name, func() (vfs.File, error) { return d.FS.Create(name, c) })
}

// ReuseForWrite implements vfs.FS.
func (d *driveFS) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.file("reuse", from, func() (vfs.File, error) {
		f, err := d.FS.ReuseForWrite(from, to, c)
		if errors.Is(err, fs.ErrNotExist) {
			// An earlier try may have renamed the file and then failed.
			return d.FS.Create(to, c)
		}
		return f, err
	})
}

// OpenDir implements vfs.FS.
func (d *driveFS) OpenDir(name string) (vfs.File, error) {
	return d.file("open", name, func() (vfs.File, error) { return d.FS.OpenDir(name) })
}

// Link implements vfs.FS.
func (d *driveFS) Link(from, to string) error {
	return d.untilDone("link", to, func() error { return d.FS.Link(from, to) })
}

// Remove implements vfs.FS.
func (d *driveFS) Remove(name string) error {
	return d.untilDone("remove", name, func() error { return d.FS.Remove(name) })
}

// Rename implements vfs.FS.
func (d *driveFS) Rename(from, to string) error {
	return d.untilDone("rename", to, func() error { return d.FS.Rename(from, to) })
}

// Unwrap implements vfs.FS.
func (d *driveFS) Unwrap() vfs.FS { return d.FS }

// driveReader is a file opened for reading.
type driveReader struct {
	vfs.File
	fs   *driveFS
	name string
}

// ReadAt implements vfs.File.
func (f *driveReader) ReadAt(p []byte, offset int64) (n int, err error) {
	err = f.fs.untilDone(opRead, f.name, func() (err error) { n, err = f.File.ReadAt(p, offset); return err })
	return n, err
}

// Read implements vfs.File.
func (f *driveReader) Read(p []byte) (done int, err error) {
	err = f.fs.untilDone(opRead, f.name, func() error {
		n, err := f.File.Read(p[done:])
		done += n
		return err
	})
	return done, err
}

// driveFile is a file opened for writing. Pebble uses each driveFile from one goroutine at a time.
type driveFile struct {
	vfs.File
	fs    *driveFS
	name  string
	table bool
	// synced is the offset up to which the file is durable. unsynced holds the bytes written after
	// that offset; it is always empty for a table.
	synced   int64
	unsynced []byte
}

// Write implements vfs.File.
func (f *driveFile) Write(p []byte) (int, error) {
	if !f.table {
		f.unsynced = append(f.unsynced, p...) // before File.Write, which may change p
	}
	done := 0
	err := f.fs.untilDone("write", f.name, func() error {
		n, err := f.File.Write(p[done:])
		done += n
		return err
	})
	if err == nil && len(f.unsynced) > unsyncedMax {
		err = f.SyncData()
	}
	return done, err
}

// sync syncs the file with how, a sync method of File, and repeats how until it succeeds. For a
// table it returns the error of the first failed sync.
func (f *driveFile) sync(how func() error) error {
	var last error
	first := f.fs.do("sync", f.name, func() error { last = how(); return last }, f.writeAgain)
	if last == nil {
		f.synced += int64(len(f.unsynced))
		f.unsynced = f.unsynced[:0]
		if !f.table {
			return nil
		}
	}
	return first
}

// writeAgain repeats the write of the bytes that a failed sync may have lost.
func (f *driveFile) writeAgain() error {
	if len(f.unsynced) == 0 {
		return nil
	}
	_, err := f.File.WriteAt(append([]byte(nil), f.unsynced...), f.synced)
	return err
}

// Sync implements vfs.File.
func (f *driveFile) Sync() error { return f.sync(f.File.Sync) }

// SyncData implements vfs.File.
func (f *driveFile) SyncData() error { return f.sync(f.File.SyncData) }

// SyncTo implements vfs.File. For a file other than a table it syncs the whole file.
func (f *driveFile) SyncTo(length int64) (full bool, err error) {
	if f.table {
		return f.File.SyncTo(length)
	}
	return true, f.SyncData()
}

// Preallocate implements vfs.File. If the file system cannot preallocate (fallocate, which many FUSE
// file systems lack), it does nothing: the writes then take the space.
func (f *driveFile) Preallocate(offset, length int64) error {
	return f.fs.untilDone("preallocate", f.name, func() error {
		err := f.File.Preallocate(offset, length)
		if errors.Is(err, errors.ErrUnsupported) {
			return nil
		}
		return err
	})
}
