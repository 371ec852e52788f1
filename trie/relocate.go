package trie

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
)

// relocateStep is the number of nodes that one step of Relocate examines. Index changes wait while
// a step runs, so relocateStep bounds their delay.
const relocateStep = 4096

// Relocate rebuilds the index in dir, which must not exist, and then uses the new index instead of
// the index in Dir. The new index is written from DRAM, so Relocate does not read the old drive,
// which may have failed. Matches and changes continue; a change waits for one step at most.
//
//	records in DRAM ── a step at a time ──┐
//	                                      ▼
//	commit ──► old index ── applied? ──► new index ─► sync ─► ready ─► Dir is the new one
//
// Relocate calls ready when the new index is complete and durable. ready makes the next start of
// the program choose the new index. Both indexes have the same records until ready has returned, so
// after a crash either index is correct.
//
// Then Relocate closes the old index and deletes its directory. If that takes longer than
// Options.HungAfter, because the drive hangs or fails, the deletion continues in the background
// until the drive works, and Relocate writes a warning to the log. After an error Dir still names
// the old index, and Relocate deletes the new directory in the same way.
//
// Relocate fails if there are records of missing volumes, because DRAM does not have these records.
func (t *Trie) Relocate(ctx context.Context, dir string, ready func() error) error {
	t.relocating.Lock()
	defer t.relocating.Unlock()
	if err := t.relocate(ctx, dir, ready); err != nil {
		return fmt.Errorf("trie: move the index from %s to %s: %w", t.Dir(), dir, err)
	}
	return nil
}

// Dir returns the directory of the index.
func (t *Trie) Dir() string { return t.disk.Load().dir }

func (t *Trie) relocate(ctx context.Context, dir string, ready func() error) error {
	if err := t.usable(); err != nil {
		return err
	}
	if t.load.Hidden > 0 {
		return fmt.Errorf("the index has %d records of missing volumes: bring the volumes back and restart the node", t.load.Hidden)
	}
	next, err := t.openFresh(dir)
	if err != nil {
		return err
	}
	old := t.disk.Load()
	if err = t.copyTo(ctx, next); err == nil {
		err = t.replace(next, ready)
	}
	if err != nil {
		t.stopCopying()
		t.dispose(ctx, next)
		return err
	}
	t.opts.Logger.Info("the index was moved", "from", old.dir, "to", dir)
	t.dispose(ctx, old)
	return nil
}

// openFresh creates an empty database. It fails if the drive takes longer than HungAfter.
func (t *Trie) openFresh(dir string) (*disk, error) {
	return within(t.opts.HungAfter, "make the index", func() (*disk, error) {
		if _, err := t.opts.FS.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			return nil, errors.Join(err, fs.ErrExist)
		}
		opts := t.opts
		opts.Dir = dir
		d, err := openDisk(opts, true)
		if err != nil {
			return nil, errors.Join(err, t.opts.FS.RemoveAll(dir))
		}
		d.fs.retry.Store(true)
		return d, nil
	}, func(late *disk) { t.logDisposed(late.dir, late.discard()) })
}

// within returns the results of f, or an error if f takes longer than limit. If f succeeds after
// the limit, its value is passed to late.
func within[T any](limit time.Duration, what string, f func() (T, error), late func(T)) (T, error) {
	type outcome struct {
		value T
		err   error
	}
	done := make(chan outcome, 1)
	go func() {
		value, err := f()
		done <- outcome{value, err}
	}()
	hung := time.NewTimer(limit)
	defer hung.Stop()
	select {
	case o := <-done:
		return o.value, o.err
	case <-hung.C:
	}
	go func() {
		if o := <-done; o.err == nil {
			late(o.value)
		}
	}()
	var none T
	return none, fmt.Errorf("%s: the drive has not responded for %v", what, limit)
}

// copying is an index that is being written while the old one is in use.
type copying struct {
	disk *disk
	// failed is the first error of a copied change. The copy lacks that change.
	failed atomic.Pointer[error]
}

// apply writes a change to the copy after it was committed to the index in use.
func (c *copying) apply(change []byte) {
	c.write(func(b *pebble.Batch) error { return b.SetRepr(change) })
}

// revert writes to the copy the records that the copy must hold after a change failed to commit.
func (c *copying) revert(revert func(reverts)) {
	if revert == nil {
		return
	}
	r := make(reverts)
	revert(r)
	c.write(r.stage)
}

func (c *copying) write(stage func(*pebble.Batch) error) {
	if c.failed.Load() != nil {
		return
	}
	if err := c.disk.write(stage, false); err != nil {
		c.failed.CompareAndSwap(nil, &err)
	}
}

// write fills one batch by stage and commits the batch, synced if sync is set.
func (d *disk) write(stage func(*pebble.Batch) error, sync bool) error {
	b := d.db.NewBatch()
	if err := stage(b); err != nil {
		b.Close()
		return err
	}
	return d.commit(b, sync, nil)
}

// copyTo fills next with the records of the index. From the first step of copyTo on, Trie.commit
// writes every change to both databases.
func (t *Trie) copyTo(ctx context.Context, next *disk) error {
	if err := t.startCopying(next); err != nil {
		return err
	}
	for n := uint32(1); n != 0; {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		var err error
		if n, err = t.copyStep(next, n); err != nil {
			return err
		}
	}
	// All copied records are synced here, so that changes do not wait long for the sync in replace.
	return next.sync()
}

// startCopying writes all records except those of blocks to next, and makes commit copy every later
// change to next.
func (t *Trie) startCopying(next *disk) error {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	t.records.Lock()
	defer t.records.Unlock()
	if err := next.write(t.stageDefinitions, false); err != nil {
		return err
	}
	t.copying.Store(&copying{disk: next})
	return nil
}

// stageDefinitions adds the format, the owner, the marks and the namespaces. defMu is held.
func (t *Trie) stageDefinitions(b *pebble.Batch) error {
	meta, err := json.Marshal(t.marks)
	if err != nil {
		return fmt.Errorf("trie: marks: %w", err)
	}
	err = errors.Join(b.Set(formatKey, []byte(formatVersion), nil), b.Set(marksKey, meta, nil))
	if t.opts.Owner != "" {
		err = errors.Join(err, b.Set(ownerKey, []byte(t.opts.Owner), nil))
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	for id, ns := range t.recorded {
		key, value, e := ns.stored(id)
		if e == nil {
			e = b.Set(key, value, nil)
		}
		err = errors.Join(err, e)
	}
	return err
}

// copyStep copies the records of up to relocateStep nodes, beginning with node first. It returns
// the number of the node to continue from, or 0 at the end.
func (t *Trie) copyStep(next *disk, first uint32) (rest uint32, err error) {
	t.records.Lock()
	defer t.records.Unlock()
	err = next.write(func(b *pebble.Batch) (err error) { rest, err = t.stageRecords(b, first); return err }, false)
	return rest, err
}

// stageRecords adds the records of up to relocateStep nodes. It skips a doomed (unmatchable) node,
// whose record is deleted already or is dropped by the next Open. Trie.records is held for writing,
// so no node is pending.
func (t *Trie) stageRecords(b *pebble.Batch, first uint32) (rest uint32, err error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	var key, value []byte
	for n := first; n <= t.nodes.top; n++ {
		if n-first == relocateStep {
			return n, nil
		}
		nd := t.nodes.at(n)
		if nd.space == 0 || nd.has(flagDoomed) {
			continue
		}
		rec := t.recordOf(n)
		key, value = appendBlockKey(key[:0], nd.extent), rec.append(value[:0])
		if err := b.Set(key, value, nil); err != nil {
			return 0, fmt.Errorf("%w: %w", ErrBroken, err)
		}
	}
	return 0, nil
}

// replace makes next the index in use.
func (t *Trie) replace(next *disk, ready func() error) error {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	t.records.Lock()
	defer t.records.Unlock()
	if failed := t.copying.Load().failed.Load(); failed != nil {
		return *failed
	}
	if err := next.sync(); err != nil {
		return err
	}
	// use keeps next open: until ready has returned, discard must not delete the directory.
	if !next.use() {
		return ErrClosed
	}
	_, err := within(t.opts.HungAfter, "choose the new index", func() (struct{}, error) {
		defer next.unuse()
		return struct{}{}, ready()
	}, func(struct{}) {})
	if err != nil {
		return err
	}
	t.disk.Store(next)
	t.copying.Store(nil)
	return nil
}

func (t *Trie) stopCopying() {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	t.records.Lock()
	defer t.records.Unlock()
	t.copying.Store(nil)
}

// dispose closes and deletes a database. It waits at most HungAfter; then the deletion continues in
// the background.
func (t *Trie) dispose(ctx context.Context, d *disk) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		t.logDisposed(d.dir, d.discard())
	}()
	hung := time.NewTimer(t.opts.HungAfter)
	defer hung.Stop()
	select {
	case <-done:
		return
	case <-hung.C:
	case <-ctx.Done():
	}
	t.opts.Logger.Warn("an unused index is still open because its drive does not respond: the disk cannot be unmounted until this log reports that the index was deleted, or the node has stopped", "dir", d.dir)
}

func (t *Trie) logDisposed(dir string, err error) {
	if err != nil {
		t.opts.Logger.Warn("an unused index could not be deleted: its files may be open until the node stops; delete the directory", "dir", dir, "err", err)
		return
	}
	t.opts.Logger.Info("an unused index was deleted", "dir", dir)
}
