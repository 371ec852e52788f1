package storage_test

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/io/posixio"
)

// TestFDLimit: a node without a free file descriptor has the outcomes that both tables of
// ARCHITECTURE.md promise. When it then needs new segment files and new index files, it refuses new
// blocks and reads the stored ones exactly. When descriptors are free again, it stores new blocks.
// The test runs in a child process, because it lowers the limit of the process.
func TestFDLimit(t *testing.T) {
	const child = "PENSTOCK_TEST_FD_LIMIT"
	if os.Getenv(child) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestFDLimit$", "-test.v")
		cmd.Env = append(os.Environ(), child+"=1")
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestFDLimit") {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	data, index := matrix(t, "one of two data volumes")["fd limit"], matrix(t, "the volume of the index")["fd limit"]
	t.Chdir(t.TempDir()) // the path of the index is relative
	a, errA := posixio.Open(t.TempDir(), posixio.Options{Buffered: true})
	b, errB := posixio.Open(t.TempDir(), posixio.Options{Buffered: true})
	if err := errors.Join(errA, errB); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, rigOptions{capacityBytes: 256 << 20, index: vfs.Default}, a, b)
	ns := r.namespace("m", small)
	for i := range 8 {
		r.mustPut(ns, chain(ns, 1, i))
	}
	restore := exhaustFDs(t)
	t.Cleanup(restore)
	for _, name := range []string{"read", "write", "sync", "create"} {
		if got := operations()[name](r); got != data[name] || got != index[name] {
			t.Errorf("%s: %s; ARCHITECTURE.md promises %s and %s", name, got, data[name], index[name])
		}
	}
	stored, refused := 0, 0
	for i := 1000; i < 5000; i++ {
		if pieces, err := r.put(ns, chain(ns, 1, i), 0); err != nil || len(pieces) != 1 || !pieces[0].Stored {
			refused++
			break
		}
		stored++
	}
	if stored == 0 || refused == 0 {
		t.Errorf("%d blocks were stored and %d refused; want some of each, so that the files ran out", stored, refused)
	}
	restore()
	for deadline := time.Now().Add(time.Minute); ; runtime.Gosched() {
		pieces, err := r.put(ns, chain(ns, 1, 9999), 0)
		if err == nil && len(pieces) == 1 && pieces[0].Stored {
			break
		}
		if time.Now().After(deadline) {
			state, why := r.node.WriteState()
			t.Fatalf("a minute after the descriptors were closed no block is stored: %v, %+v; the node is %s: %s", err, pieces, state, why)
		}
	}
	for i := 1000; i < 1000+stored; i++ {
		if _, n := r.load(ns, chain(ns, 1, i)); n != 1 {
			t.Fatalf("stored block %d is a miss", i)
		}
	}
	restore = exhaustFDs(t)
	t.Cleanup(restore)
	if got := operations()["bump"](r); got != data["bump"] || got != index["bump"] {
		t.Errorf("bump: %s; ARCHITECTURE.md promises %s and %s", got, data["bump"], index["bump"])
	}
	restore()
}

// exhaustFDs opens files until the process has no free descriptor. restore closes them
// and restores the limit.
func exhaustFDs(t *testing.T) (restore func()) {
	t.Helper()
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	low := old
	low.Cur = 256
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	var taken []*os.File
	for {
		f, err := os.Open(os.DevNull)
		if errors.Is(err, syscall.EMFILE) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		taken = append(taken, f)
	}
	return sync.OnceFunc(func() {
		for _, f := range taken {
			f.Close()
		}
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
			t.Error(err)
		}
	})
}
