package storage_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/server/storage"
)

// dataFaults are the faults of one of two data volumes, by row of the fault matrix in
// ARCHITECTURE.md. A row has cells only for the operations that the fault can affect.
var dataFaults = map[string]string{
	"EIO":      `(Err EIO Any)`,
	"hang":     `(Delay 30s Any)`,
	"full":     `(Err ENOSPC (Or Writes Creates))`,
	"torn":     `(Torn (And Writes (File "segment-*") (Offset 4096 1073741824)))`,
	"bit flip": `(Flip (And Writes (File "segment-*") (Offset 4096 1073741824)))`,
	"fd limit": `(Err EMFILE (Or Creates Opens))`,
}

// indexFault is a fault of the volume of the index while it is armed. It makes the
// operations that kinds selects return err or, if err is nil, take the time hang.
type indexFault struct {
	kinds func(errorfs.Op) bool
	err   error
	hang  time.Duration
	// damage changes the bytes of each write to the log. The write returns success.
	damage func(p []byte) []byte
	armed  atomic.Bool
	met    atomic.Int64
}

func changes(op errorfs.Op) bool { return op.Kind.ReadOrWrite() == errorfs.OpIsWrite }

func opens(op errorfs.Op) bool {
	switch op.Kind {
	case errorfs.OpCreate, errorfs.OpOpen, errorfs.OpOpenDir, errorfs.OpReuseForWrite:
		return true
	}
	return false
}

func grows(op errorfs.Op) bool {
	return opens(op) || op.Kind == errorfs.OpFileWrite || op.Kind == errorfs.OpFilePreallocate
}

// indexFaults returns the faults of the volume of the index, by row of the second
// table.
func indexFaults() map[string]*indexFault {
	return map[string]*indexFault{
		"EIO":      {kinds: func(errorfs.Op) bool { return true }, err: syscall.EIO},
		"hang":     {kinds: changes, hang: 5 * time.Minute},
		"full":     {kinds: grows, err: syscall.ENOSPC},
		"torn":     {damage: func(p []byte) []byte { return p[:len(p)/2] }},
		"bit flip": {damage: func(p []byte) []byte { q := slices.Clone(p); q[len(q)/2] ^= 1; return q }},
		"fd limit": {kinds: opens, err: syscall.EMFILE},
	}
}

// MaybeError implements errorfs.Injector.
func (f *indexFault) MaybeError(op errorfs.Op) error {
	if !f.armed.Load() || f.kinds == nil || !f.kinds(op) {
		return nil
	}
	f.met.Add(1)
	if f.err == nil {
		time.Sleep(f.hang)
	}
	return f.err
}

func (f *indexFault) String() string { return fmt.Sprint(f.err) }

// damagedFS applies indexFault.damage to writes to the logs of the index.
type damagedFS struct {
	vfs.FS
	fault *indexFault
}

func (d damagedFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := d.FS.Create(name, c)
	if err != nil || !strings.HasSuffix(name, ".log") {
		return f, err
	}
	return &damagedFile{File: f, fault: d.fault}, nil
}

type damagedFile struct {
	vfs.File
	fault *indexFault
}

func (f *damagedFile) Write(p []byte) (int, error) {
	if !f.fault.armed.Load() || f.fault.damage == nil || len(p) == 0 {
		n, err := f.File.Write(p)
		return n, err
	}
	f.fault.met.Add(1)
	q := slices.Clone(f.fault.damage(p))
	q = append(q, make([]byte, len(p)-len(q))...) // as long as p
	n, err := f.File.Write(q)
	return n, err
}

// matrix returns the outcomes that a table of ARCHITECTURE.md promises, by fault and
// operation. of is the heading of the table's first column.
func matrix(t *testing.T, of string) map[string]map[string]string {
	page, err := os.ReadFile("../../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string]map[string]string)
	var columns []string
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case cells[0] == of:
			columns = cells
		case len(cells) != len(columns) || strings.HasPrefix(cells[0], "---"):
			if len(out) > 0 {
				return out
			}
		default:
			out[cells[0]] = make(map[string]string)
			for i, name := range columns[1:] {
				out[cells[0]][name] = cells[i+1]
			}
		}
	}
	return out
}

// operations are the columns of the tables, on a namespace m with 8 blocks.
func operations() map[string]func(*rig) string {
	return map[string]func(*rig) string{
		"read": func(r *rig) string {
			ns, err := r.node.Namespace("m")
			if err != nil {
				return err.Error()
			}
			hits := 0
			for i := range 8 {
				_, n := r.load(ns, chain(ns, 1, i))
				hits += n
			}
			return map[bool]string{true: "hit", false: "miss"}[hits == 8]
		},
		"write": func(r *rig) string {
			ns, err := r.node.Namespace("m")
			if err != nil {
				return err.Error()
			}
			for i := range 8 {
				stored, err := r.put(ns, chain(ns, 1, 100+i), 0)
				if err != nil || len(stored) != 1 || !stored[0].Stored {
					return "refused"
				}
			}
			return "stored"
		},
		"sync": func(r *rig) string { return okOr(r.node.Sync(r.t.Context())) },
		"bump": func(r *rig) string {
			_, err := r.node.BumpEpoch(r.t.Context(), "m", 0, 1)
			return okOr(err)
		},
		"create": func(r *rig) string {
			ns, err := r.node.Namespace("m")
			if err != nil {
				return err.Error()
			}
			ns.Name, ns.ID = "other", 0
			_, err = r.node.CreateNamespace(r.t.Context(), ns)
			return okOr(err)
		},
	}
}

// TestFaultMatrix: each fault of one of two data volumes has the outcome for each
// operation that ARCHITECTURE.md promises.
func TestFaultMatrix(t *testing.T) {
	testkit.Long(t, "each fault, on each volume, in each call")
	promised := matrix(t, "one of two data volumes")
	if len(promised) != len(dataFaults) {
		t.Fatalf("ARCHITECTURE.md has %d faults, the test %d", len(promised), len(dataFaults))
	}
	for fault, cells := range promised {
		for name, want := range cells {
			t.Run(fault+"/"+name, func(t *testing.T) {
				var got string
				synctest.Test(t, func(t *testing.T) {
					r, bad := newPair(t, rigOptions{})
					ns := r.namespace("m", small)
					for i := range 8 {
						r.mustPut(ns, chain(ns, 1, i))
					}
					bad.SetRules(faultio.MustParse(dataFaults[fault]))
					began := time.Now()
					got = operations()[name](r)
					if took := time.Since(began); took > 15*time.Second {
						t.Errorf("took %v", took)
					}
					bad.SetRules(nil)
					r.awaitState("bad", health.OK, 5*time.Minute) // so that Close meets no fault
				})
				if got != want {
					t.Errorf("%s; ARCHITECTURE.md promises %s", got, want)
				}
			})
		}
	}
}

// TestIndexFaultMatrix: each fault of the volume of the index has the outcome for
// each operation that ARCHITECTURE.md promises. After the fault the node serves as
// before, without a restart.
func TestIndexFaultMatrix(t *testing.T) {
	promised := matrix(t, "the volume of the index")
	if len(promised) != len(indexFaults()) {
		t.Fatalf("ARCHITECTURE.md has %d faults, the test %d", len(promised), len(indexFaults()))
	}
	for row, cells := range promised {
		for name, want := range cells {
			t.Run(row+"/"+name, func(t *testing.T) {
				var got string
				synctest.Test(t, func(t *testing.T) { got = indexCell(t, indexFaults()[row], operations()[name]) })
				if got != want {
					t.Errorf("%s; ARCHITECTURE.md promises %s", got, want)
				}
			})
		}
	}
}

// indexCell performs the operation while the index's volume has the fault, and
// returns its outcome.
func indexCell(t *testing.T, fault *indexFault, operation func(*rig) string) string {
	mem := vfs.NewMem()
	r := newRig(t, rigOptions{
		durability: blockstore.DurabilitySync,
		index:      errorfs.Wrap(damagedFS{mem, fault}, fault),
		edit:       func(o *storage.Options) { o.HotBytes = -1 },
	}, memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"}))
	ns := r.namespace("m", small)
	for i := range 8 {
		r.mustPut(ns, chain(ns, 1, i))
	}
	fault.armed.Store(true)
	began := time.Now()
	got := operation(r)
	if took := time.Since(began); took > 0 {
		got += fmt.Sprintf(", after %.0f s", took.Seconds())
	}
	serves := func(when string, blocks ...int) {
		t.Helper()
		ns, err := r.node.Namespace("m")
		if err != nil {
			t.Errorf("%s: %v", when, err)
			return
		}
		for _, i := range blocks {
			if _, n := r.load(ns, chain(ns, 1, i)); n != 1 && ns.Epoch == 1 {
				t.Errorf("%s: block %d is a miss", when, i)
			}
		}
	}
	serves("while the fault lasts", 0, 7)
	refused := r.node.Ready() != nil
	if state, why := r.node.WriteState(); refused != (state == "read_only") || refused && !strings.Contains(why, "index") {
		t.Errorf("while the fault lasts the node is %s (%s), ready: %v", state, why, !refused)
	}
	if refused != strings.HasPrefix(got, "refused") && refused != strings.HasPrefix(got, "error") {
		t.Errorf("%s, and the node refuses: %v", got, refused)
	}
	fault.armed.Store(false)
	time.Sleep(10 * time.Minute)
	if state, why := r.node.WriteState(); state != "serving" || r.node.Ready() != nil {
		t.Errorf("after the fault the node is %s: %s", state, why)
	}
	serves("after the fault", 0, 7)
	now, err := r.node.Namespace("m")
	if err != nil {
		t.Fatal(err)
	}
	r.mustPut(now, chain(now, 1, 200))
	if fault.damage != nil && fault.met.Load() > 0 {
		r.restartDamaged()
	}
	return got
}

// restartDamaged restarts the node on an index whose log is damaged. The index opens, or
// it is refused and rebuilt from the volumes. In both cases namespace m exists and reads
// return the bytes that were written (load compares them).
func (r *rig) restartDamaged() {
	r.t.Helper()
	r.close()
	r.reopenDevices()
	if err := r.tryOpen(); err != nil {
		r.t.Logf("refused: %v", err)
		r.reopenDevices()
		fresh := vfs.NewMem()
		store, index := r.offline(fresh)
		if _, err := storage.Rebuild(context.Background(), storage.RebuildOptions{Store: store, Index: index}); err != nil {
			r.t.Fatal(err)
		}
		r.online(store, index, fresh)
	}
	ns, err := r.node.Namespace("m")
	if err != nil {
		r.t.Fatal(err)
	}
	hits := 0
	for _, i := range []int{0, 1, 2, 3, 100, 200} {
		_, n := r.load(ns, chain(ns, 1, i))
		hits += n
	}
	if hits < 4 && ns.Epoch == 1 {
		r.t.Errorf("after the restart %d blocks are hits; the first 4 were stored before the fault", hits)
	}
}

func okOr(err error) string {
	if err == nil {
		return "ok"
	}
	return "error"
}
