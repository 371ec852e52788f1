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

// disk is the Pebble database of the index.
type disk struct {
	dir       string
	db        *pebble.DB
	cache     *pebble.Cache
	log       *pebbleLog
	fs        *driveFS
	closeOnce sync.Once
	closeErr  error

	mu sync.Mutex
	// cause is the error of the drive that makes commits fail; nil while commits are accepted. The
	// channel failed is closed exactly while cause is set.
	cause  error
	failed chan struct{}
	// faulty is set while an operation of driveFS fails or hangs. When the last such operation has
	// succeeded, repair runs and clears cause. repairing is set while repair runs.
	faulty, repairing bool
	// inFlight counts the callers of commit and the goroutines that apply a batch. idle is
	// signalled when inFlight reaches 0.
	inFlight int
	idle     *sync.Cond
	reverts  reverts
	// users counts the calls in progress that read from Pebble. retired is set when Relocate has
	// replaced this database. Pebble may be closed when retired is set and users is 0.
	users   int
	retired bool
}

// openDisk opens the Pebble database in opts.Dir. If fresh is set, an existing database is an
// error.
func openDisk(opts Options, fresh bool) (*disk, error) {
	d := &disk{dir: opts.Dir, cache: pebble.NewCache(opts.CacheBytes), log: &pebbleLog{log: opts.Logger}, failed: make(chan struct{}), reverts: make(reverts)}
	d.idle = sync.NewCond(&d.mu)
	d.fs = &driveFS{FS: opts.FS, hungAfter: opts.HungAfter, onFault: d.driveFailed, onRecovery: d.driveRecovered}
	po := &pebble.Options{
		FS:                          d.fs,
		Cache:                       d.cache,
		Logger:                      d.log,
		MemTableSize:                uint64(opts.MemTableBytes),
		MemTableStopWritesThreshold: 3,
		// A burst of evictions deletes in key order, which fills Pebble's level L0. The threshold
		// is high, so that a full L0 does not stall Put.
		L0StopWritesThreshold: 24,
		MaxOpenFiles:          512,
		FormatMajorVersion:    pebble.FormatNewest,
		ErrorIfExists:         fresh,
	}
	// Ids are random and do not compress.
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

// reverts has the records, by key, that make Pebble equal to DRAM again after commits of unknown
// outcome. A nil value deletes the record.
type reverts map[string][]byte

func (r reverts) set(key, value []byte) { r[string(key)] = slices.Clone(value) }
func (r reverts) remove(key []byte)     { r[string(key)] = nil }

// stage adds the records to the batch.
func (r reverts) stage(b *pebble.Batch) error {
	for key, value := range r {
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
	return nil
}

// commit applies the batch and closes it. All writes to Pebble go through commit.
//
// If the drive fails before or during the call, or Pebble has not accepted the batch after
// hungAfter, commit returns ErrBroken at once. Pebble may then apply the batch later or never.
// revert adds the records that Pebble must hold instead, and repair writes them before any other
// commit is accepted. revert may be nil if the index is correct both with and without the batch.
func (d *disk) commit(b *pebble.Batch, sync bool, revert func(reverts)) error {
	failed, err := d.begin(revert)
	if err != nil {
		b.Close()
		return err
	}
	done := make(chan error, 1)
	op := d.fs.begin("commit", "to the index")
	go func() {
		err := d.apply(b, sync)
		b.Close()
		op.end()
		d.end(nil)
		done <- err
	}()
	select {
	case err := <-done:
		d.end(nil)
		return err
	case <-failed:
	}
	select {
	case err := <-done: // the batch completed while the drive failed
		d.end(nil)
		return err
	default:
	}
	err = d.broken()
	d.end(revert)
	return err
}

// begin adds 2 to inFlight: the caller of commit and the goroutine that applies the batch each
// subtract 1 with end. If the drive has failed, begin adds nothing: it calls revert and returns
// ErrBroken.
func (d *disk) begin(revert func(reverts)) (failed <-chan struct{}, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.brokenLocked(); err != nil {
		if revert != nil {
			revert(d.reverts)
		}
		return nil, err
	}
	d.inFlight += 2
	return d.failed, nil
}

func (d *disk) end(revert func(reverts)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if revert != nil {
		revert(d.reverts)
	}
	if d.inFlight--; d.inFlight == 0 {
		d.idle.Broadcast()
	}
}

// apply commits the batch to Pebble. Pebble calls Fatalf on faults that repair cannot fix, such as
// a damaged manifest, and Fatalf panics. apply recovers that panic and returns ErrBroken.
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

// sync makes all committed batches durable.
func (d *disk) sync() error {
	b := d.db.NewBatch()
	if err := b.LogData(nil, nil); err != nil {
		b.Close()
		return fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return d.commit(b, true, nil)
}

// get returns a copy of the value, or nil if the key is absent. It returns ErrBroken
// while the drive cannot be read.
func (d *disk) get(key []byte) ([]byte, error) {
	type found struct {
		value []byte
		err   error
	}
	done := make(chan found, 1)
	if !d.use() {
		return nil, ErrClosed
	}
	go func() {
		defer d.unuse()
		var f found
		v, closer, err := d.db.Get(key)
		switch {
		case err == pebble.ErrNotFound:
		case err != nil:
			f.err = fmt.Errorf("trie: read index: %w", err)
		default:
			f.value = slices.Clone(v)
			f.err = closer.Close()
		}
		done <- f
	}()
	for {
		select {
		case f := <-done:
			return f.value, f.err
		case <-d.fs.readFault():
		}
		// broken returns nil if the drive has recovered since; then the loop reads again.
		if err := d.broken(); err != nil {
			return nil, err
		}
	}
}

// use keeps Pebble open until the caller calls unuse. It returns false if Pebble is closed or is
// about to be closed.
func (d *disk) use() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.retired {
		return false
	}
	d.users++
	return true
}

func (d *disk) unuse() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.users--
	d.idle.Broadcast()
}

// broken returns nil, or ErrBroken with the reason why the index cannot be written.
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

// driveFailed is driveFS.onFault: it makes commits fail with ErrBroken.
func (d *disk) driveFailed(cause error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faulty = true
	if d.cause != nil {
		return
	}
	d.cause = cause
	close(d.failed)
	if !d.retired {
		d.log.log.Error("the drive of the index failed: prefixes are still matched, changes are refused until a retry succeeds", "cause", cause)
	}
}

// driveRecovered is driveFS.onRecovery: it starts repair.
func (d *disk) driveRecovered() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faulty = false
	if !d.repairing {
		d.repairing = true
		go d.repair()
	}
}

// repair waits until inFlight is 0, writes the reverts, and makes the index accept commits again.
// It returns early if the drive fails again; driveRecovered then starts repair again.
func (d *disk) repair() {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer func() { d.repairing = false }()
	for !d.faulty {
		if d.inFlight > 0 {
			d.idle.Wait()
			continue
		}
		rs := d.reverts
		d.reverts = make(reverts)
		d.mu.Unlock()
		err := d.writeReverts(rs) // driveFS retries while the drive fails
		d.mu.Lock()
		switch {
		case err != nil:
			return // Pebble is damaged: commits fail until a restart
		case !d.faulty && len(d.reverts) == 0:
			d.cause, d.failed = nil, make(chan struct{})
			d.idle.Broadcast()
			if !d.retired {
				d.log.log.Info("the index accepts changes again")
			}
			return
		}
	}
}

// writeReverts writes the records of rs durably.
func (d *disk) writeReverts(rs reverts) error {
	b := d.db.NewBatch()
	defer b.Close()
	if err := rs.stage(b); err != nil {
		return err
	}
	if len(rs) == 0 {
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
		// db.Close could wait forever: for the drive, or for a goroutine of Pebble that Fatalf
		// ended. Synced data is durable even if Pebble is not closed.
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
	case <-d.failed:
		return d.broken()
	}
	d.cache.Unref()
	if err != nil {
		return fmt.Errorf("trie: close index: %w", err)
	}
	return nil
}

// discard closes Pebble and deletes the directory. It first waits until no call uses Pebble and the
// drive works, because Pebble's Close would wait for the drive. No commit may begin after the call
// of discard.
func (d *disk) discard() error {
	if err := d.awaitIdle(); err != nil {
		return err
	}
	err := d.db.Close()
	d.cache.Unref()
	return errors.Join(err, d.fs.RemoveAll(d.dir))
}

// awaitIdle sets retired and waits until Pebble can be closed. It fails if Pebble is damaged.
func (d *disk) awaitIdle() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.retired = true
	for d.inFlight > 0 || d.users > 0 || d.repairing || d.cause != nil {
		if d.log.fatal.Load() != nil {
			return d.brokenLocked()
		}
		d.idle.Wait()
	}
	return nil
}

// pebbleLog writes Pebble's messages to slog. After Fatalf the process continues.
type pebbleLog struct {
	log   *slog.Logger
	fatal atomic.Pointer[string]
}

// fatal is the value that Fatalf passes to panic.
type fatal struct{ msg string }

// Infof implements pebble.Logger.
func (l *pebbleLog) Infof(format string, args ...any) {
	l.log.Debug("pebble: " + strings.TrimSpace(fmt.Sprintf(format, args...)))
}

// Errorf implements pebble.Logger.
func (l *pebbleLog) Errorf(format string, args ...any) {
	l.log.Warn("pebble: " + strings.TrimSpace(fmt.Sprintf(format, args...)))
}

// Fatalf implements pebble.Logger. Pebble requires that Fatalf does not return, and only main may
// exit. Afterwards every commit fails with ErrBroken; matches are still answered from DRAM. If
// apply is on the call stack, Fatalf panics, and apply recovers. In a goroutine of Pebble, Fatalf
// ends that goroutine.
func (l *pebbleLog) Fatalf(format string, args ...any) {
	msg := strings.TrimSpace(fmt.Sprintf(format, args...))
	l.fatal.CompareAndSwap(nil, &msg)
	l.log.Error("Pebble reported a fatal error: the index refuses changes until a restart; remove the cause and restart the node", "cause", msg)
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
