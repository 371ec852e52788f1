package trie

import (
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/penstock-kv/penstock/kv"
)

// driveFault makes the operations of some kinds return err while it is armed. If err
// is nil, the operations take the time hang instead.
type driveFault struct {
	kinds []errorfs.OpKind // nil selects all operations that write
	err   error
	hang  time.Duration

	armed    atomic.Bool
	injected atomic.Int64
}

func (f *driveFault) MaybeError(op errorfs.Op) error {
	selected := f.kinds == nil && op.Kind.ReadOrWrite() == errorfs.OpIsWrite
	for _, k := range f.kinds {
		selected = selected || k == op.Kind
	}
	if !selected || !f.armed.Load() {
		return nil
	}
	f.injected.Add(1)
	if f.err == nil {
		time.Sleep(f.hang)
	}
	return f.err
}

func (f *driveFault) String() string { return fmt.Sprintf("%v, %v", f.err, f.hang) }

// openWithPrefix opens an index and puts the first 10 entries of a chain into a
// namespace. It returns the whole chain.
func openWithPrefix(t *testing.T, fs vfs.FS, durable bool) (*Trie, kv.Namespace, []kv.BlockID, []Entry) {
	t.Helper()
	tr := openTest(t, Options{FS: fs})
	ns := benchNamespace(t, tr)
	ids := benchIDs(0)
	entries := benchEntries(ids, 0)
	if _, err := tr.Put(nil, ns.ID, ns.Epoch, entries[:10], durable); err != nil {
		t.Fatal(err)
	}
	return tr, ns, ids, entries
}

var (
	syncKinds   = []errorfs.OpKind{errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo}
	createKinds = []errorfs.OpKind{errorfs.OpCreate, errorfs.OpReuseForWrite, errorfs.OpOpenDir}
)

// TestDriveFails: while the drive of the index fails or hangs, the pieces put before
// are matched and every change is refused within HungAfter. When the drive works
// again, the index accepts changes again. It then holds exactly the pieces that it had
// in DRAM, also after it was closed and opened.
func TestDriveFails(t *testing.T) {
	for name, fault := range map[string]*driveFault{
		"EIO":          {err: syscall.EIO},
		"ENOSPC":       {err: syscall.ENOSPC},
		"EIO of syncs": {err: syscall.EIO, kinds: syncKinds},
		"hang":         {hang: 10 * time.Minute},
		"hung syncs":   {hang: 10 * time.Minute, kinds: syncKinds},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mem := vfs.NewMem()
				tr, ns, ids, entries := openWithPrefix(t, errorfs.Wrap(mem, fault), true)
				fault.armed.Store(true)
				began := time.Now()
				refused := func(what string, err error) {
					t.Helper()
					if !errors.Is(err, ErrBroken) {
						t.Errorf("%s: %v; want ErrBroken", what, err)
					}
					if d := time.Since(began); d > defaultHungAfter {
						t.Errorf("%s: after %v", what, d)
					}
				}
				_, err := tr.Put(nil, ns.ID, ns.Epoch, entries[10:20], true)
				refused("the put that meets the fault", err)
				refused("writable", tr.Writable())
				_, err = tr.Put(nil, ns.ID, ns.Epoch, entries[20:30], false)
				refused("put", err)
				_, err = bumpEpoch(tr, ns.Name, 0, 1)
				refused("bump", err)
				_, err = tr.Create(kv.Namespace{Name: "other", Geometry: ns.Geometry, Index: ns.Index})
				refused("create", err)
				refused("sync", tr.Sync())
				gone, err := tr.Evict(nil, 3*tr.Stats().Bytes/10, 0, epoch0)
				refused("evict", err)
				kept := 10 - len(gone)
				if m, err := tr.Match(ns.ID, ids, MatchOptions{}); err != nil || m.Blocks != kept || kept == 10 {
					t.Errorf("while the drive fails %d blocks match (%v); want the %d that were not evicted", m.Blocks, err, kept)
				}
				fault.armed.Store(false)
				time.Sleep(15 * time.Minute)
				if err := tr.Writable(); err != nil || fault.injected.Load() == 0 {
					t.Fatalf("when the drive works again: %v; %d operations failed", err, fault.injected.Load())
				}
				check := func(when string, want int) {
					t.Helper()
					if m, err := tr.Match(ns.ID, ids, MatchOptions{}); err != nil || m.Blocks != want {
						t.Errorf("%s %d blocks match (%v), want %d", when, m.Blocks, err, want)
					}
					if err := tr.Check(); err != nil {
						t.Errorf("%s: %v", when, err)
					}
				}
				check("after the fault", kept)
				if _, err := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(ids, 100)[kept:25], true); err != nil {
					t.Errorf("put after the fault: %v", err)
				}
				check("after a put", 25)
				if now, err := tr.Namespace(ns.Name); err != nil || now.Epoch != ns.Epoch {
					t.Errorf("epoch %d (%v); the bump was refused at %d", now.Epoch, err, ns.Epoch)
				}
				closeTest(t, tr)
				tr = openTest(t, Options{FS: mem})
				check("after a restart", 25)
				if _, err := tr.Namespace("other"); !errors.Is(err, ErrNamespaceUnknown) {
					t.Errorf("the namespace that was refused: %v", err)
				}
				closeTest(t, tr)
			})
		})
	}
}

// TestDriveFailsAtRotation: the drive refuses to create files when Pebble rotates its
// log. Pebble would end the process if it saw that error.
func TestDriveFailsAtRotation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fault := &driveFault{err: syscall.ENOSPC, kinds: createKinds}
		tr := openTest(t, Options{FS: errorfs.Wrap(vfs.NewMem(), fault), MemTableBytes: 256 << 10})
		ns := benchNamespace(t, tr)
		fault.armed.Store(true)
		stored := 0
		for i := 0; tr.Writable() == nil && i < 10_000; i++ {
			ids := benchIDs(i)[:10]
			if _, err := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(ids, 10*i), true); err == nil {
				stored++
			}
		}
		if err := tr.Writable(); !errors.Is(err, syscall.ENOSPC) || stored == 0 {
			t.Fatalf("%v after %d puts; want the error of the new log", err, stored)
		}
		fault.armed.Store(false)
		time.Sleep(time.Minute)
		if err := tr.Check(); err != nil {
			t.Error(err)
		}
		for i := range stored {
			if m, err := tr.Match(ns.ID, benchIDs(i)[:10], MatchOptions{}); err != nil || m.Blocks != 10 {
				t.Fatalf("%d blocks of chain %d match, %v", m.Blocks, i, err)
			}
		}
		if _, err := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(benchIDs(1 << 20)[:10], 1<<20), true); err != nil {
			t.Errorf("put after the fault: %v", err)
		}
		closeTest(t, tr)
	})
}

// lossySyncFS is a file system whose failed sync loses the bytes written since the
// last sync, as the page cache of Linux does.
type lossySyncFS struct {
	vfs.FS
	fail   atomic.Bool
	failed atomic.Int64
}

func (f *lossySyncFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	file, err := f.FS.Create(name, c)
	return &lossySyncFile{File: file, fs: f}, err
}

type lossySyncFile struct {
	vfs.File
	fs              *lossySyncFS
	written, synced int64
}

func (f *lossySyncFile) Write(p []byte) (int, error) {
	n, err := f.File.Write(p)
	f.written += int64(n)
	return n, err
}

func (f *lossySyncFile) sync(how func() error) error {
	if f.fs.fail.Load() {
		f.fs.failed.Add(1)
		if _, err := f.WriteAt(make([]byte, f.written-f.synced), f.synced); err != nil {
			return err
		}
		return syscall.EIO
	}
	f.synced = f.written
	return how()
}

func (f *lossySyncFile) Sync() error     { return f.sync(f.File.Sync) }
func (f *lossySyncFile) SyncData() error { return f.sync(f.File.SyncData) }
func (f *lossySyncFile) SyncTo(int64) (bool, error) {
	return true, f.sync(f.File.SyncData)
}

// TestDriveLosesUnsynced: once the index accepts changes again, the bytes that a
// failed sync lost are durable: the index has them after a crash.
func TestDriveLosesUnsynced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := vfs.NewCrashableMem()
		fs := &lossySyncFS{FS: mem}
		tr, ns, ids, entries := openWithPrefix(t, fs, false)
		fs.fail.Store(true)
		if err := tr.Sync(); !errors.Is(err, ErrBroken) {
			t.Errorf("the sync that fails: %v", err)
		}
		fs.fail.Store(false)
		time.Sleep(time.Minute)
		if _, err := tr.Put(nil, ns.ID, ns.Epoch, entries[10:20], true); err != nil || fs.failed.Load() == 0 {
			t.Fatalf("put after the fault: %v; %d syncs failed", err, fs.failed.Load())
		}
		crashed := mem.CrashClone(vfs.CrashCloneCfg{})
		closeTest(t, tr)
		tr = openTest(t, Options{FS: crashed})
		if m, err := tr.Match(ns.ID, ids, MatchOptions{}); err != nil || m.Blocks != 20 {
			t.Errorf("after the crash %d blocks match (%v); 20 were durable", m.Blocks, err)
		}
		closeTest(t, tr)
	})
}

// preallocatingFile returns errors of Preallocate, one after the other.
type preallocatingFile struct {
	vfs.File
	errs []error
}

func (f *preallocatingFile) Preallocate(int64, int64) error {
	err := f.errs[0]
	f.errs = f.errs[1:]
	return err
}

// TestDriveWithoutPreallocation: a file system that cannot preallocate is no failure of the drive. A
// full one is.
func TestDriveWithoutPreallocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		faults := 0
		d := &driveFS{onFault: func(error) { faults++ }, onRecovery: func() {}}
		d.retry.Store(true)
		for _, err := range []error{syscall.EOPNOTSUPP, syscall.ENOSYS} {
			f := &driveFile{File: &preallocatingFile{errs: []error{err}}, fs: d}
			if err := f.Preallocate(0, 1<<20); err != nil || faults != 0 {
				t.Errorf("%v, %d faults", err, faults)
			}
		}
		f := &driveFile{File: &preallocatingFile{errs: []error{syscall.EIO, nil}}, fs: d}
		if err := f.Preallocate(0, 1<<20); err != nil || faults == 0 {
			t.Errorf("%v, %d faults; want the error to be reported and the call to be repeated", err, faults)
		}
	})
}

// TestDriveFailsDuringMove: Pebble applies the batch of a Move that has returned
// ErrBroken. Once the index accepts changes again, Pebble has the same slots as DRAM.
func TestDriveFailsDuringMove(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := vfs.NewMem()
		tr, ns, ids, entries := openWithPrefix(t, mem, true)
		moves := make([]Moved, 4)
		for i := range moves {
			from := entries[i+2].Ref
			moves[i] = Moved{From: from, To: kv.Ref{Extent: from.Extent + 1000, Generation: from.Generation + 1}}
		}
		m := moving{t: tr, moves: moves, moved: make([]bool, len(moves)), batch: tr.disk.Load().db.NewBatch()}
		if err := errors.Join(m.read(), m.stage()); err != nil {
			t.Fatal(err)
		}
		o := tr.disk.Load().fs.begin("write", "the log")
		o.fail(syscall.EIO)
		m.revert(tr.disk.Load().reverts)
		if err := tr.disk.Load().apply(m.batch, true); err != nil {
			t.Fatal(err)
		}
		m.batch.Close()
		m.finish(true)
		if _, err := tr.Move(moves); !errors.Is(err, ErrBroken) {
			t.Errorf("move while the drive fails: %v", err)
		}
		o.end()
		synctest.Wait()
		for _, when := range []string{"after the fault", "after a restart"} {
			found, err := tr.Match(ns.ID, ids, MatchOptions{})
			if err != nil || found.Blocks != 10 {
				t.Fatalf("%s %d blocks match, %v", when, found.Blocks, err)
			}
			for i, p := range found.Pieces {
				if p.Ref != entries[i].Ref {
					t.Errorf("%s block %d lies in %v, want %v", when, i, p.Ref, entries[i].Ref)
				}
			}
			closeTest(t, tr)
			tr = openTest(t, Options{FS: mem})
		}
		if moved, err := tr.Move(moves); err != nil || !moved[0] || !moved[3] {
			t.Errorf("move after the fault: %v, %v", moved, err)
		}
		closeTest(t, tr)
	})
}

// readKinds are the operations that read the index from the drive.
var readKinds = []errorfs.OpKind{errorfs.OpOpen, errorfs.OpFileRead, errorfs.OpFileReadAt}

// TestDriveReadsFail: while the drive of the index cannot be read, prefixes are matched.
// A call that changes the index returns at once, or after HungAfter at the latest, even
// if the call only waits for a compaction. When reads work again, the index accepts
// changes again and has all records.
func TestDriveReadsFail(t *testing.T) {
	for name, fault := range map[string]*driveFault{
		"EIO":  {kinds: readKinds, err: syscall.EIO},
		"hang": {kinds: readKinds, hang: 30 * time.Minute},
	} {
		for _, compactions := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, compactions first: %v", name, compactions), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { driveReadsFail(t, fault, compactions) })
			})
		}
	}
}

func driveReadsFail(t *testing.T, fault *driveFault, compactions bool) {
	const chains = 16 // more than a memtable holds
	mem := vfs.NewMem()
	tr := openTest(t, Options{FS: errorfs.Wrap(mem, fault), MemTableBytes: 256 << 10, CacheBytes: 1})
	ns, churn := benchNamespace(t, tr), benchNamed(t, tr, "churn")
	fillFrom(t, tr, ns, 0, chains)
	if err := tr.disk.Load().db.Flush(); err != nil {
		t.Fatal(err)
	}
	fault.armed.Store(true)
	timed := func(what string, call func() error) {
		t.Helper()
		began := time.Now()
		err := call()
		if d := time.Since(began); d > defaultHungAfter {
			t.Errorf("%s took %v: %v", what, d, err)
		}
		if err != nil && !errors.Is(err, ErrBroken) {
			t.Errorf("%s: %v; want ErrBroken", what, err)
		}
	}
	// Each round writes records for the same slots, so Pebble has to compact them.
	for range 300 {
		if !compactions || tr.Writable() != nil {
			break
		}
		timed("bump", func() error {
			_, err := bumpEpoch(tr, churn.Name, churn.Epoch+1, 1)
			if err == nil {
				churn.Epoch++
			}
			return err
		})
		timed("reclaim", func() (err error) {
			for more := true; more && err == nil; {
				_, more, err = tr.ReclaimStep(nil, benchChain)
			}
			return err
		})
		timed("put", func() error {
			_, err := tr.Put(nil, churn.ID, churn.Epoch, benchEntries(benchIDs(1000), 1000*benchChain), true)
			return err
		})
	}
	ref := func(i int) kv.Ref { return benchEntries(benchIDs(0), 0)[i].Ref }
	timed("owner", func() error { tr.Owner(ref(3)); return nil })
	timed("remove", func() error { return tr.Remove(ref(benchChain-1), Dropped) })
	timed("move", func() error {
		_, err := tr.Move([]Moved{{From: ref(5), To: kv.Ref{Extent: kv.MakeExtent(1, 0, 0), Generation: 9 << 32}}})
		return err
	})
	timed("delete", func() error { return tr.Delete(ns.ID, benchIDs(0)[benchChain-2]) })
	timed("sync", tr.Sync)
	if err := tr.Writable(); !errors.Is(err, ErrBroken) {
		t.Errorf("while reads fail, Writable returns %v; want ErrBroken", err)
	}
	whole := func(when string) {
		t.Helper()
		for i := 1; i < chains; i++ {
			if m, err := tr.Match(ns.ID, benchIDs(i), MatchOptions{}); err != nil || m.Blocks != benchChain {
				t.Errorf("%s: %d blocks of chain %d match, %v; want %d", when, m.Blocks, i, err, benchChain)
			}
		}
	}
	timed("match", func() error { whole("while reads fail"); return nil })
	fault.armed.Store(false)
	time.Sleep(2 * time.Hour)
	if err := tr.Writable(); err != nil || fault.injected.Load() == 0 {
		t.Fatalf("when reads work again: %v; %d operations failed", err, fault.injected.Load())
	}
	if _, err := tr.Put(nil, churn.ID, churn.Epoch, benchEntries(benchIDs(1001), 1001*benchChain), true); err != nil {
		t.Errorf("put when reads work again: %v", err)
	}
	closeTest(t, tr)
	tr = openTest(t, Options{FS: mem})
	whole("after a restart")
	if m, err := tr.Match(churn.ID, benchIDs(1001), MatchOptions{}); err != nil || m.Blocks != benchChain {
		t.Errorf("chain put when reads worked again: %d blocks match, %v; want %d", m.Blocks, err, benchChain)
	}
	closeTest(t, tr)
}
