package storage_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// failingDirs makes writes of the index fail with err, or hang, in the directories for which fail
// returns true.
type failingDirs struct {
	fail   atomic.Pointer[func(dir string) bool]
	err    error         // nil: the writes hang until lift
	lifted chan struct{} // closed by lift
}

func (f *failingDirs) arm(fail func(dir string) bool) {
	f.lifted = make(chan struct{})
	f.fail.Store(&fail)
}

func (f *failingDirs) lift() {
	f.fail.Store(nil)
	close(f.lifted)
}

func (f *failingDirs) inject(op errorfs.Op) error {
	dir, _, _ := strings.Cut(op.Path, "/")
	if fail := f.fail.Load(); fail == nil || op.Kind.ReadOrWrite() != errorfs.OpIsWrite || !(*fail)(dir) {
		return nil
	}
	if f.err == nil {
		<-f.lifted
	}
	return f.err
}

// TestRemoveVolumeWithFailedIndex: a disk that holds a volume and the index fails or hangs,
// so the node refuses writes. When the volume has been removed by force, the index is on
// another volume and the node takes writes again.
func TestRemoveVolumeWithFailedIndex(t *testing.T) {
	for name, rules := range map[string]string{"EIO": `(Err EIO (And (Or Reads Writes Syncs)))`, "hang": ""} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fault := &failingDirs{}
				if rules != "" {
					fault.err = syscall.EIO
				}
				bad := faultio.Wrap(memio.New(memio.Options{Path: "a"}), faultio.MustParse(""))
				devices := three()
				devices[0] = bad
				r := newRig(t, rigOptions{index: errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(fault.inject)), indexDir: "a/index"}, devices...)
				prompts := r.fillTenants(8)
				fault.arm(func(dir string) bool { return dir == "a" })
				bad.SetRules(faultio.MustParse(rules))
				if err := r.trie.Sync(); err == nil || r.trie.Writable() == nil {
					t.Fatalf("the index takes writes: %v", err)
				}
				lost, err := r.node.RemoveVolume(t.Context(), 0, true)
				if err != nil || lost.Blocks == 0 {
					t.Fatalf("%+v, %v", lost, err)
				}
				if dir := r.trie.Dir(); dir != "b/index" {
					t.Errorf("the index is in %s", dir)
				}
				after := r.matches(prompts)
				full := r.namespace("after", kv.SingleGroup(3, 4, 700))
				r.mustPut(full, chain(full, 2, 1))
				fault.lift()
				bad.SetRules(faultio.MustParse(""))
				r.indexLog.Await(`was deleted" dir=a/index`)
				r.close()
				r.reopenDevices()
				r.devices, r.opts.indexDir = r.devices[1:], "b/index"
				r.open()
				r.matchAs(prompts, after)
			})
		})
	}
}

// TestRemoveVolumeIndexStays: no other volume can take the index. RemoveVolume returns an error and
// succeeds when it is repeated later. Meanwhile the node takes writes.
func TestRemoveVolumeIndexStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fault := &failingDirs{err: syscall.ENOSPC}
		var asked []string
		refuse := errors.New("not now")
		r := newRig(t, rigOptions{
			index: errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(fault.inject)), indexDir: "a/index",
			edit: func(o *storage.Options) {
				o.IndexMoved = func(dir string) error { asked = append(asked, dir); return refuse }
			},
		}, three()...)
		ns := r.namespace("m", small)
		r.mustPut(ns, chain(ns, 4, 1))
		fault.arm(func(dir string) bool { return dir != "a" })
		remove := func() error { _, err := r.node.RemoveVolume(t.Context(), 0, true); return err }
		if err := remove(); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "volume 0 is removed") {
			t.Errorf("without room elsewhere: %v", err)
		}
		r.mustPut(ns, chain(ns, 4, 2))
		fault.lift()
		if err := remove(); !errors.Is(err, refuse) || len(asked) != 2 || asked[0] != "b/index" || asked[1] != "c/index" {
			t.Errorf("refused by IndexMoved: %v, asked for %s", err, asked)
		}
		r.mustPut(ns, chain(ns, 4, 3))
		refuse = nil
		if err := remove(); err != nil || r.trie.Dir() != "b/index" {
			t.Errorf("with room: %v; the index is in %s", err, r.trie.Dir())
		}
		r.mustPut(ns, chain(ns, 4, 4))
		for seed := range 3 {
			ids := chain(ns, 4, seed+2)
			if _, delivered := r.load(ns, ids); delivered != len(ids) {
				t.Errorf("prompt %d: %d blocks delivered", seed+2, delivered)
			}
		}
	})
}
