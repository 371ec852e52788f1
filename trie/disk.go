package trie

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/sstable"
)

// disk is Pebble as the index uses it.
type disk struct {
	db        *pebble.DB
	cache     *pebble.Cache
	log       *pebbleLog
	closeOnce sync.Once
	closeErr  error
}

func openDisk(opts Options) (*disk, error) {
	d := &disk{cache: pebble.NewCache(opts.CacheBytes), log: &pebbleLog{log: opts.Logger}}
	po := &pebble.Options{
		FS:     opts.FS,
		Cache:  d.cache,
		Logger: d.log,
		// Ids are random and do not compress.
		MemTableSize:                uint64(opts.MemTableBytes),
		MemTableStopWritesThreshold: 3,
		// A burst of evictions is all deletes in key order; it must not stall Put.
		L0StopWritesThreshold: 24,
		MaxOpenFiles:          512,
		FormatMajorVersion:    pebble.FormatNewest,
	}
	for i := range po.Levels {
		po.Levels[i].Compression = func() *sstable.CompressionProfile { return sstable.NoCompression }
	}
	db, err := pebble.Open(opts.Dir, po)
	if err != nil {
		d.cache.Unref()
		return nil, fmt.Errorf("trie: open index in %s: %w", opts.Dir, err)
	}
	d.db = db
	return d, nil
}

// commit applies the batch. It is the only way to Pebble for writes: Pebble calls
// Fatalf when it cannot write its log, and that must end here, as ErrBroken.
func (d *disk) commit(b *pebble.Batch, sync bool) (err error) {
	if err := d.broken(); err != nil {
		return err
	}
	defer func() {
		switch f := recover().(type) {
		case nil:
		case fatal:
			err = fmt.Errorf("%w: %s", ErrBroken, f.msg)
		default:
			panic(f)
		}
	}()
	opts := pebble.NoSync
	if sync {
		opts = pebble.Sync
	}
	if err := b.Commit(opts); err != nil {
		return fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return nil
}

// sync makes all that was committed durable.
func (d *disk) sync() error {
	b := d.db.NewBatch()
	defer b.Close()
	if err := b.LogData(nil, nil); err != nil {
		return fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return d.commit(b, true)
}

func (d *disk) broken() error {
	if msg := d.log.fatal.Load(); msg != nil {
		return fmt.Errorf("%w: %s", ErrBroken, *msg)
	}
	return nil
}

func (d *disk) close() error {
	d.closeOnce.Do(func() { d.closeErr = d.closeDB() })
	return d.closeErr
}

func (d *disk) closeDB() error {
	if err := d.broken(); err != nil {
		// A Pebble that failed half way may wait for itself; what was durable is.
		return err
	}
	err := errors.Join(d.sync(), d.db.Close())
	d.cache.Unref()
	if err != nil {
		return fmt.Errorf("trie: close index: %w", err)
	}
	return nil
}

// pebbleLog hands Pebble's words to slog and survives its Fatalf.
type pebbleLog struct {
	log   *slog.Logger
	fatal atomic.Pointer[string]
}

// fatal is what Fatalf panics with.
type fatal struct{ msg string }

// Infof implements pebble.Logger.
func (l *pebbleLog) Infof(format string, args ...any) {
	l.log.Debug("pebble: " + strings.TrimSpace(fmt.Sprintf(format, args...)))
}

// Errorf implements pebble.Logger.
func (l *pebbleLog) Errorf(format string, args ...any) {
	l.log.Warn("pebble: " + strings.TrimSpace(fmt.Sprintf(format, args...)))
}

// Fatalf implements pebble.Logger: it must not return, and only main exits. The
// index is broken from now on and goes on serving matches from DRAM. In a call
// from disk.commit it unwinds to there; in a goroutine of Pebble's it ends that.
func (l *pebbleLog) Fatalf(format string, args ...any) {
	msg := strings.TrimSpace(fmt.Sprintf(format, args...))
	l.fatal.CompareAndSwap(nil, &msg)
	l.log.Error("the index cannot be written any more; restart the node when the cause is gone", "cause", msg)
	if calledFromCommit() {
		panic(fatal{msg})
	}
	runtime.Goexit()
}

func calledFromCommit() bool {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	for {
		f, more := frames.Next()
		if strings.HasSuffix(f.Function, "trie.(*disk).commit") {
			return true
		}
		if !more {
			return false
		}
	}
}
