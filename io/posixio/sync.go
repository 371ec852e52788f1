package posixio

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/io/blockio"
)

// flushMax is the number of files that one Sync flushes at a time. It is large enough for a journal
// to commit several files together.
const flushMax = 4

// flusher makes a file or directory durable when it is dirty. Concurrent callers share one sync.
type flusher struct {
	dirty atomic.Bool
	mu    sync.Mutex
}

// mark records that a change is not durable yet. The change must be complete before the call.
func (s *flusher) mark() { s.dirty.Store(true) }

// flush returns when all changes marked before the call are durable. A caller that arrives during
// another flush waits for that flush. If changes were marked too late for that flush, the caller
// then flushes again.
func (s *flusher) flush(sync func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.dirty.Swap(false) {
		return nil
	}
	err := retry(sync)
	if err != nil {
		s.mark()
	}
	return err
}

// retry repeats a system call that was interrupted.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Sync implements blockio.Device: fdatasync of the files, then fsync of the
// directory if names have changed.
func (d *Dir) Sync(ctx context.Context, files ...blockio.File) error {
	if err := d.enter("sync", "files"); err != nil {
		return err
	}
	defer d.gate.Leave()
	err := d.sync(ctx, files)
	d.counters.Synced(err)
	return err
}

func (d *Dir) sync(ctx context.Context, files []blockio.File) error {
	if err := ctx.Err(); err != nil {
		return d.fail("sync", "files", err)
	}
	held, err := d.hold(files)
	if err != nil {
		return err
	}
	defer release(held)
	if err := d.flushFiles(held); err != nil {
		return err
	}
	if err := d.entries.flush(func() error { return unix.Fsync(d.fd) }); err != nil {
		return d.fail("sync", "the directory", err)
	}
	return nil
}

// hold keeps the files open until they are released. Without files, it holds all open files.
func (d *Dir) hold(files []blockio.File) ([]*File, error) {
	var held []*File
	if len(files) == 0 {
		for _, f := range d.openFiles() {
			if f.gate.Enter() {
				held = append(held, f)
			}
		}
		return held, nil
	}
	for _, bf := range files {
		f, ok := bf.(*File)
		if !ok || f.dir != d {
			release(held)
			return nil, fmt.Errorf("posixio: sync of a file (%T) of another device: %w", bf, blockio.ErrRequest)
		}
		if !f.gate.Enter() {
			release(held)
			return nil, d.fail("sync", f.Name(), blockio.ErrClosed)
		}
		held = append(held, f)
	}
	return held, nil
}

func release(files []*File) {
	for _, f := range files {
		f.gate.Leave()
	}
}

// flushFiles flushes several files at a time and returns all errors.
func (d *Dir) flushFiles(files []*File) error {
	errs := make([]error, len(files))
	var wg sync.WaitGroup
	turns := make(chan struct{}, flushMax)
	for i, f := range files {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			errs[i] = d.flushFile(f.ino)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (d *Dir) flushFile(ino *inode) error {
	err := ino.content.flush(func() error { return unix.Fdatasync(ino.fd) })
	if err != nil {
		return d.fail("sync", ino.name, sentinel(err))
	}
	return nil
}
