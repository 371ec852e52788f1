package trie

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
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
	fs        *driveFS
	closeOnce sync.Once
	closeErr  error

	mu sync.Mutex
	// cause is why the drive has failed; nil if it has not. down is closed while it
	// has. ailing: driveFS has operations that fail or hang. When the last of them has
	// succeeded, repair runs, and then the drive is well.
	cause             error
	down              chan struct{}
	ailing, repairing bool
	// underWay counts commits and their callers; idle is signalled when it is 0.
	underWay int
	idle     *sync.Cond
	owed     owed
}

func openDisk(opts Options) (*disk, error) {
	d := &disk{cache: pebble.NewCache(opts.CacheBytes), log: &pebbleLog{log: opts.Logger}, down: make(chan struct{}), owed: make(owed)}
	d.idle = sync.NewCond(&d.mu)
	d.fs = &driveFS{FS: opts.FS, hungAfter: opts.HungAfter, trouble: d.trouble, better: d.better}
	po := &pebble.Options{
		FS:     d.fs,
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

// owed are records that DRAM and Pebble may differ in, by key; nil means that there
// is none. DRAM is right.
type owed map[string][]byte

func (o owed) set(key, value []byte) { o[string(key)] = slices.Clone(value) }
func (o owed) remove(key []byte)     { o[string(key)] = nil }

// commit applies the batch, and closes it. It is the only way to Pebble for writes.
//
// If the drive fails, before or during the call, commit returns ErrBroken at once.
// The batch may be applied later or not at all, so owe names the records that must
// be in Pebble instead; they are written before any other commit is taken. nil: it
// makes no difference.
func (d *disk) commit(b *pebble.Batch, sync bool, owe func(owed)) error {
	down, err := d.begin(owe)
	if err != nil {
		b.Close()
		return err
	}
	done := make(chan error, 1)
	go func() {
		err := d.apply(b, sync)
		b.Close()
		d.end(nil)
		done <- err
	}()
	select {
	case err := <-done:
		d.end(nil)
		return err
	case <-down:
	}
	select {
	case err := <-done: // the drive failed at the same time
		d.end(nil)
		return err
	default:
	}
	err = d.broken()
	d.end(owe)
	return err
}

// begin counts a commit in, or fails and notes what is owed. What begin counts in,
// its caller and the goroutine that applies the batch each count out.
func (d *disk) begin(owe func(owed)) (down <-chan struct{}, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.brokenLocked(); err != nil {
		if owe != nil {
			owe(d.owed)
		}
		return nil, err
	}
	d.underWay += 2
	return d.down, nil
}

func (d *disk) end(owe func(owed)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if owe != nil {
		owe(d.owed)
	}
	if d.underWay--; d.underWay == 0 {
		d.idle.Broadcast()
	}
}

// apply hands the batch to Pebble. Pebble calls Fatalf for what the drive's repair
// does not mend, such as a damaged manifest, and that must end here, as ErrBroken.
func (d *disk) apply(b *pebble.Batch, sync bool) (err error) {
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
	if err := b.LogData(nil, nil); err != nil {
		b.Close()
		return fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return d.commit(b, true, nil)
}

// broken returns nil, or ErrBroken and why the index cannot be written.
func (d *disk) broken() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.brokenLocked()
}

func (d *disk) brokenLocked() error {
	if msg := d.log.fatal.Load(); msg != nil {
		return fmt.Errorf("%w: %s", ErrBroken, *msg)
	}
	if d.cause != nil {
		return fmt.Errorf("%w: %w", ErrBroken, d.cause)
	}
	return nil
}

// trouble notes that the drive has failed. driveFS calls it.
func (d *disk) trouble(cause error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ailing = true
	if d.cause != nil {
		return
	}
	d.cause = cause
	close(d.down)
	d.log.log.Error("the index cannot be written; matches go on, and the drive is tried again", "cause", cause)
}

// better notes that no operation of the drive fails or hangs any more. driveFS calls
// it.
func (d *disk) better() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ailing = false
	if !d.repairing {
		d.repairing = true
		go d.repair()
	}
}

// repair waits until what was under way when the drive failed has ended, writes what
// is owed, and lets commits in again. It gives up when the drive fails anew; better
// starts the next one.
func (d *disk) repair() {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer func() { d.repairing = false }()
	for !d.ailing {
		if d.underWay > 0 {
			d.idle.Wait()
			continue
		}
		owes := d.owed
		d.owed = make(owed)
		d.mu.Unlock()
		err := d.settle(owes) // tried again by driveFS if the drive fails meanwhile
		d.mu.Lock()
		switch {
		case err != nil:
			return // not the drive: broken for good
		case !d.ailing && len(d.owed) == 0:
			d.cause, d.down = nil, make(chan struct{})
			d.log.log.Info("the index can be written again")
			return
		}
	}
}

// settle writes what is owed, and syncs.
func (d *disk) settle(owes owed) error {
	b := d.db.NewBatch()
	defer b.Close()
	for key, value := range owes {
		var err error
		if value == nil {
			err = b.Delete([]byte(key), nil)
		} else {
			err = b.Set([]byte(key), value, nil)
		}
		if err != nil {
			return fmt.Errorf("%w: %w", ErrBroken, err)
		}
	}
	if len(owes) == 0 {
		if err := b.LogData(nil, nil); err != nil {
			return fmt.Errorf("%w: %w", ErrBroken, err)
		}
	}
	return d.apply(b, true)
}

func (d *disk) close() error {
	d.closeOnce.Do(func() { d.closeErr = d.closeDB() })
	return d.closeErr
}

func (d *disk) closeDB() error {
	if err := d.broken(); err != nil {
		// A Pebble that failed half way may wait for itself or for the drive; what was
		// durable is.
		return err
	}
	err := d.sync()
	if errors.Is(err, ErrBroken) {
		return err
	}
	closed := make(chan error, 1)
	go func() { closed <- d.db.Close() }()
	select {
	case e := <-closed:
		err = errors.Join(err, e)
	case <-d.down:
		return d.broken()
	}
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
// from disk.apply it unwinds to there; in a goroutine of Pebble's it ends that.
func (l *pebbleLog) Fatalf(format string, args ...any) {
	msg := strings.TrimSpace(fmt.Sprintf(format, args...))
	l.fatal.CompareAndSwap(nil, &msg)
	l.log.Error("the index cannot be written any more; restart the node when the cause is gone", "cause", msg)
	if calledFromApply() {
		panic(fatal{msg})
	}
	runtime.Goexit()
}

func calledFromApply() bool {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	for {
		f, more := frames.Next()
		if strings.HasSuffix(f.Function, "trie.(*disk).apply") {
			return true
		}
		if !more {
			return false
		}
	}
}
