package trie

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

const (
	// retryFirst and retryMax bound the time between two tries of an operation that
	// failed; it doubles with each try.
	retryFirst = 250 * time.Millisecond
	retryMax   = 5 * time.Second
	// unsyncedMax bounds the copy of what was written to a file since its last sync.
	unsyncedMax = 1 << 20
)

// driveFS is the file system under Pebble. Pebble ends the process when it cannot
// write its log, so once the index is open no operation that changes a file returns
// an error of the drive: the operation is tried again until it succeeds. Meanwhile
// trouble reports it, and also an operation that does not return.
//
// A sync that failed proves nothing when it is repeated, because the system may have
// dropped the pages that it could not write. So what was written to a log or a
// manifest since its last sync is kept, and written again before the next try. A
// table is not kept: its failed sync is returned, once the drive syncs again, and
// Pebble makes the table anew.
type driveFS struct {
	vfs.FS
	// patient: operations are tried again. While the index is being opened they are
	// not.
	patient atomic.Bool
	// hungAfter is how long an operation may take before it is trouble.
	hungAfter time.Duration

	mu sync.Mutex
	// ailing are the operations under way that failed or take too long.
	ailing int
	// trouble is called, under mu, when the first operation becomes ailing, with the
	// reason; better, when none is any more.
	trouble func(cause error)
	better  func()
}

// driveOp is one operation under way.
type driveOp struct {
	fs *driveFS
	// ailing is guarded by driveFS.mu.
	ailing, ended bool
}

// fail notes that the operation failed or hangs.
func (o *driveOp) fail(cause error) {
	o.fs.mu.Lock()
	defer o.fs.mu.Unlock()
	if o.ended || o.ailing {
		return
	}
	o.ailing = true
	if o.fs.ailing++; o.fs.ailing == 1 {
		o.fs.trouble(cause)
	}
}

func (o *driveOp) end() {
	o.fs.mu.Lock()
	defer o.fs.mu.Unlock()
	o.ended = true
	if !o.ailing {
		return
	}
	if o.fs.ailing--; o.fs.ailing == 0 {
		o.fs.better()
	}
}

// answers are errors that say something about a name and not about the drive.
func answers(err error) bool {
	return err == nil || errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrClosed)
}

// do calls f until it succeeds. mend, if not nil, is called before each try but the
// first; its error counts as f's. do returns the error of the first try.
func (d *driveFS) do(what, name string, f, mend func() error) (first error) {
	if !d.patient.Load() {
		return f()
	}
	o := &driveOp{fs: d}
	hung := time.AfterFunc(d.hungAfter, func() {
		o.fail(fmt.Errorf("%s %s has not completed for %v", what, name, d.hungAfter))
	})
	defer o.end()
	defer hung.Stop()
	err := f()
	for wait := retryFirst; !answers(err); wait = min(2*wait, retryMax) {
		if first == nil {
			first = err
		}
		o.fail(fmt.Errorf("%s %s: %w", what, name, err))
		time.Sleep(wait)
		err = nil
		if mend != nil {
			err = mend()
		}
		if err == nil {
			err = f()
		}
	}
	if err != nil {
		return err // an answer
	}
	return first
}

// must is do for an operation whose success at a later try is all that counts.
func (d *driveFS) must(what, name string, f func() error) error {
	var last error
	first := d.do(what, name, func() error { last = f(); return last }, nil)
	if last == nil {
		return nil
	}
	return first
}

// isTable reports whether Pebble makes the file anew after an error.
func isTable(name string) bool {
	return strings.HasSuffix(name, ".sst") || strings.HasSuffix(name, ".blob")
}

func (d *driveFS) file(what, name string, open func() (vfs.File, error)) (vfs.File, error) {
	var f vfs.File
	err := d.must(what, name, func() (err error) { f, err = open(); return err })
	if err != nil {
		return nil, err
	}
	return &driveFile{File: f, fs: d, name: name, table: isTable(name)}, nil
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
			// The rename of an earlier try may have succeeded.
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
	return d.must("link", to, func() error { return d.FS.Link(from, to) })
}

// Remove implements vfs.FS.
func (d *driveFS) Remove(name string) error {
	return d.must("remove", name, func() error { return d.FS.Remove(name) })
}

// Rename implements vfs.FS.
func (d *driveFS) Rename(from, to string) error {
	return d.must("rename", to, func() error { return d.FS.Rename(from, to) })
}

// Unwrap implements vfs.FS.
func (d *driveFS) Unwrap() vfs.FS { return d.FS }

// driveFile is a file that is being written. Pebble uses one from one goroutine at
// a time.
type driveFile struct {
	vfs.File
	fs    *driveFS
	name  string
	table bool
	// unsynced is what was written from offset synced on, of a file that is no table.
	synced   int64
	unsynced []byte
}

// Write implements vfs.File.
func (f *driveFile) Write(p []byte) (int, error) {
	if !f.table {
		f.unsynced = append(f.unsynced, p...) // a write that succeeds may change p
	}
	done := 0
	err := f.fs.must("write", f.name, func() error {
		n, err := f.File.Write(p[done:])
		done += n
		return err
	})
	if err == nil && len(f.unsynced) > unsyncedMax {
		err = f.SyncData()
	}
	return done, err
}

// sync calls one of File's ways to sync until it succeeds.
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

// writeAgain writes what a failed sync may have lost.
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

// SyncTo implements vfs.File. It promises nothing unless it synced all.
func (f *driveFile) SyncTo(length int64) (full bool, err error) {
	if f.table {
		return f.File.SyncTo(length)
	}
	return true, f.SyncData()
}

// Preallocate implements vfs.File.
func (f *driveFile) Preallocate(offset, length int64) error {
	return f.fs.must("preallocate", f.name, func() error { return f.File.Preallocate(offset, length) })
}
