package trie

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
)

// onDisk restricts a fault to the paths below a directory.
type onDisk struct {
	dir   string
	fault *driveFault
}

func (o onDisk) MaybeError(op errorfs.Op) error {
	if op.Path != o.dir && !strings.HasPrefix(op.Path, o.dir+"/") {
		return nil
	}
	return o.fault.MaybeError(op)
}

func (o onDisk) String() string { return o.dir + ": " + o.fault.String() }

// relocation is an index in /a/index with a chain of which the first 10 blocks are put. Its
// file system has a fault below one directory.
type relocation struct {
	t       *testing.T
	tr      *Trie
	mem     vfs.FS
	fault   *driveFault
	log     *testkit.Log
	ns      kv.Namespace
	ids     []kv.BlockID
	entries []Entry
}

func newRelocation(t *testing.T, dir string, fault *driveFault) *relocation {
	mem := vfs.NewMem()
	if err := errors.Join(mem.MkdirAll("/a", 0o700), mem.MkdirAll("/b", 0o700)); err != nil {
		t.Fatal(err)
	}
	r := &relocation{t: t, mem: mem, fault: fault, log: new(testkit.Log)}
	r.tr = openTest(t, Options{
		Dir: "/a/index", FS: errorfs.Wrap(mem, onDisk{dir, fault}), Logger: slog.New(slog.NewTextHandler(r.log, nil)),
		CacheBytes: 1 << 20, MemTableBytes: 256 << 10,
	})
	r.ns = benchNamespace(t, r.tr)
	r.ids = benchIDs(0)
	r.entries = benchEntries(r.ids, 0)
	r.put(0, 10)
	return r
}

func (r *relocation) put(from, to int) {
	r.t.Helper()
	if _, err := r.tr.Put(nil, r.ns.ID, r.ns.Epoch, r.entries[from:to], true); err != nil {
		r.t.Errorf("put of blocks %d to %d: %v", from, to, err)
	}
}

func (r *relocation) relocate(dir string) error {
	return r.tr.Relocate(r.t.Context(), dir, func() error { return nil })
}

// holds checks that exactly the first blocks of the chain match, now and after a restart in dir,
// and that no other index directory exists.
func (r *relocation) holds(dir string, blocks int) {
	r.t.Helper()
	match := func(when string) {
		r.t.Helper()
		if m, err := r.tr.Match(r.ns.ID, r.ids, MatchOptions{}); err != nil || m.Blocks != blocks {
			r.t.Errorf("%s %d blocks match, %v; want %d", when, m.Blocks, err, blocks)
		}
	}
	match("now")
	if got := r.tr.Dir(); got != dir {
		r.t.Errorf("the index is in %s; want %s", got, dir)
	}
	closeTest(r.t, r.tr)
	for _, d := range []string{"/a/index", "/b/index"} {
		if _, err := r.mem.Stat(d); d != dir && !errors.Is(err, fs.ErrNotExist) {
			r.t.Errorf("%s is still there: %v", d, err)
		}
	}
	r.tr = openTest(r.t, Options{Dir: dir, FS: r.mem})
	match("after a restart")
	closeTest(r.t, r.tr)
}

// driveFaults are faults of all operations that write, or of syncs, and of reads.
func driveFaults() map[string]*driveFault {
	return map[string]*driveFault{
		"EIO":            {err: syscall.EIO},
		"ENOSPC":         {err: syscall.ENOSPC},
		"EIO of syncs":   {err: syscall.EIO, kinds: syncKinds},
		"EIO of reads":   {err: syscall.EIO, kinds: readKinds},
		"hang":           {hang: 10 * time.Minute},
		"hung syncs":     {hang: 10 * time.Minute, kinds: syncKinds},
		"hung creates":   {hang: 10 * time.Minute, kinds: createKinds},
		"EIO of creates": {err: syscall.EIO, kinds: createKinds},
	}
}

// TestRelocateFromFailedDrive: an index whose drive fails or hangs moves to another directory, and
// accepts changes at once. When the old drive works again, the old directory is deleted.
func TestRelocateFromFailedDrive(t *testing.T) {
	for name, fault := range driveFaults() {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRelocation(t, "/a", fault)
				fault.armed.Store(true)
				// This Put fails, unless only reads fail.
				_, err := r.tr.Put(nil, r.ns.ID, r.ns.Epoch, r.entries[10:12], true)
				kept := r.blocks()
				if want := map[bool]int{true: 12, false: 10}[err == nil]; kept != want {
					t.Errorf("after a put with error %v %d blocks match; want %d", err, kept, want)
				}
				began := time.Now()
				if err := r.relocate("/b/index"); err != nil {
					t.Fatal(err)
				}
				if d := time.Since(began); d > 2*defaultHungAfter {
					t.Errorf("Relocate took %v", d)
				}
				if err := r.tr.Writable(); err != nil {
					t.Errorf("after Relocate: %v", err)
				}
				r.put(kept, 20)
				fault.armed.Store(false)
				r.log.Await(`was deleted" dir=/a/index`)
				r.holds("/b/index", 20)
			})
		})
	}
}

func (r *relocation) blocks() int {
	m, err := r.tr.Match(r.ns.ID, r.ids, MatchOptions{})
	if err != nil {
		r.t.Error(err)
	}
	return m.Blocks
}

// TestRelocateToFailedDrive: if the new drive fails or hangs, Relocate returns an error within its
// time limit, and the old index stays in use and accepts changes. The new directory is deleted when
// the drive works again. A second Relocate then succeeds.
func TestRelocateToFailedDrive(t *testing.T) {
	for name, fault := range driveFaults() {
		if name == "EIO of reads" { // Relocate reads nothing from the new drive
			continue
		}
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRelocation(t, "/b", fault)
				fault.armed.Store(true)
				began := time.Now()
				err := r.relocate("/b/index")
				if err == nil || !strings.Contains(err.Error(), "/b/index") {
					t.Errorf("Relocate: %v", err)
				}
				if d := time.Since(began); d > 3*defaultHungAfter {
					t.Errorf("Relocate took %v", d)
				}
				r.put(10, 20)
				fault.armed.Store(false)
				if fault.err == nil {
					r.log.Await(`was deleted" dir=/b/index`)
				}
				if err := r.relocate("/b/index"); err != nil {
					t.Fatal(err)
				}
				r.holds("/b/index", 20)
			})
		})
	}
}

// TestRelocateFailsHalfWay: the new drive fails when a change is copied, or ready returns an error
// or hangs, or the context has ended. The old index is complete and stays in use.
func TestRelocateFailsHalfWay(t *testing.T) {
	late := errors.New("late")
	for name, ready := range map[string]func(lifted chan struct{}) error{
		"ready fails": func(chan struct{}) error { return late },
		"ready hangs": func(lifted chan struct{}) error { <-lifted; return nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRelocation(t, "/b", &driveFault{})
				lifted := make(chan struct{})
				if err := r.tr.Relocate(t.Context(), "/b/index", func() error { return ready(lifted) }); err == nil {
					t.Error("Relocate succeeded")
				}
				r.put(10, 20)
				close(lifted)
				r.log.Await(`was deleted" dir=/b/index`)
				r.holds("/a/index", 20)
			})
		})
	}
	t.Run("canceled", func(t *testing.T) {
		r := newRelocation(t, "/b", &driveFault{})
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(late)
		if err := r.tr.Relocate(ctx, "/b/index", nil); !errors.Is(err, late) {
			t.Errorf("Relocate: %v", err)
		}
		r.log.Await(`was deleted" dir=/b/index`) // Relocate does not wait for the deletion if its context has ended
		if err := r.relocate("/b/other"); err != nil {
			t.Fatal(err)
		}
		r.put(10, 20)
		r.holds("/b/other", 20)
	})
	t.Run("a change is not copied", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			fault := &driveFault{err: syscall.EIO}
			r := newRelocation(t, "/b", fault)
			next, err := r.tr.openFresh("/b/index")
			if err != nil {
				t.Fatal(err)
			}
			if err := r.tr.copyTo(t.Context(), next); err != nil {
				t.Fatal(err)
			}
			fault.armed.Store(true)
			if err := next.sync(); !errors.Is(err, ErrBroken) {
				t.Fatalf("sync of the copy: %v", err)
			}
			r.put(10, 20) // written to the old index only
			fault.armed.Store(false)
			r.log.Await("the index accepts changes again")
			if err := r.tr.replace(next, func() error { return nil }); !errors.Is(err, ErrBroken) {
				t.Errorf("replace by an index that lacks a change: %v", err)
			}
			r.tr.stopCopying()
			r.tr.dispose(t.Context(), next)
			r.holds("/a/index", 20)
		})
	})
}

// TestRelocateRefused: Relocate overwrites no directory, and refuses if DRAM lacks records.
func TestRelocateRefused(t *testing.T) {
	r := newRelocation(t, "/b", &driveFault{})
	if err := r.mem.MkdirAll("/b/index/other", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := r.relocate("/b/index"); !errors.Is(err, fs.ErrExist) {
		t.Errorf("into a directory that exists: %v", err)
	}
	if _, err := r.mem.Stat("/b/index/other"); err != nil {
		t.Error(err)
	}
	if err := r.tr.Close(); err != nil {
		t.Fatal(err)
	}
	if err := r.relocate("/b/new"); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	r.tr = openTest(t, Options{Dir: "/a/index", FS: r.mem, Absent: func(volume uint32) bool { return volume == 0 }})
	if err := r.relocate("/b/new"); err == nil || !strings.Contains(err.Error(), "10 records of missing volumes") {
		t.Errorf("with records of a missing volume: %v", err)
	}
	closeTest(t, r.tr)
}

// TestRelocateCrash: after a crash at any time of a Relocate, the index that ready has chosen, or
// the old one if ready had not returned, has every block that was put durably.
func TestRelocateCrash(t *testing.T) {
	mem := vfs.NewCrashableMem()
	if err := errors.Join(mem.MkdirAll("/a", 0o700), mem.MkdirAll("/b", 0o700)); err != nil {
		t.Fatal(err)
	}
	sync := func(dir string) {
		d, err := mem.OpenDir(dir)
		if err == nil {
			err = errors.Join(d.Sync(), d.Close())
		}
		if err != nil {
			t.Error(err)
		}
	}
	sync("/")
	tr := openTest(t, Options{Dir: "/a/index", FS: mem})
	sync("/a")
	ns, ids := benchNamespace(t, tr), benchIDs(0)
	entries := benchEntries(ids, 0)
	if _, err := tr.Put(nil, ns.ID, ns.Epoch, entries[:10], true); err != nil {
		t.Fatal(err)
	}
	check := func(when, dir string, want int) {
		t.Helper()
		clone := mem.CrashClone(vfs.CrashCloneCfg{})
		crashed := openTest(t, Options{Dir: dir, FS: clone})
		if m, err := crashed.Match(ns.ID, ids, MatchOptions{}); err != nil || m.Blocks != want {
			t.Errorf("%s: %d blocks match in %s, %v; want %d", when, m.Blocks, dir, err, want)
		}
		closeTest(t, crashed)
	}
	err := tr.Relocate(t.Context(), "/b/index", func() error {
		sync("/b")
		check("before the switch", "/a/index", 10)
		check("before the switch", "/b/index", 10)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	check("after the switch", "/b/index", 10)
	if _, err := tr.Put(nil, ns.ID, ns.Epoch, entries[10:20], true); err != nil {
		t.Fatal(err)
	}
	check("after a put", "/b/index", 20)
	closeTest(t, tr)
}

// TestRelocateClosesFiles: when Relocate has returned, no file below the old directory is
// open, and the directory is gone.
func TestRelocateClosesFiles(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	tr := openTest(t, Options{Dir: filepath.Join(a, "index"), FS: vfs.Default, MemTableBytes: 256 << 10})
	ns := benchNamespace(t, tr)
	fillFrom(t, tr, ns, 0, 4)
	if err := tr.disk.Load().db.Flush(); err != nil {
		t.Fatal(err)
	}
	if open := testkit.OpenBelow(t, a); len(open) == 0 {
		t.Fatalf("no file below %s is open before", a)
	}
	if err := tr.Relocate(t.Context(), filepath.Join(b, "index"), func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	if open := testkit.OpenBelow(t, a); len(open) > 0 {
		t.Errorf("open below the old directory: %q", open)
	}
	if left, err := filepath.Glob(filepath.Join(a, "*")); err != nil || len(left) > 0 {
		t.Errorf("left below the old directory: %q, %v", left, err)
	}
	closeTest(t, tr)
}
