package peer

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/bench"
)

// startFiles starts the worker that keeps a file per value. It also returns the worker's directory.
func startFiles(t *testing.T) (*StoreWorker, string) {
	t.Helper()
	stores, err := NewStores(filepath.Join(t.TempDir(), "workers"), []string{testkit.Python(t)})
	if err != nil {
		t.Fatal(err)
	}
	python, err := stores.Python(t.Context(), "", "os", "json")
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "files")
	w, err := stores.Start(t.Context(), python, "file_store.py", map[string]any{"directory": dir, "area_bytes": 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w, dir
}

func files(t *testing.T, dir string) (paths []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// TestStoreWorker: a worker puts values and reads them from memory and from disk, with several
// threads and batches. It keeps the values for gets and removes the values of puts.
func TestStoreWorker(t *testing.T) {
	w, dir := startFiles(t)
	if !strings.HasPrefix(w.Client, "Python 3.") {
		t.Errorf("client %q", w.Client)
	}
	for _, l := range []StoreLoad{
		{Op: "put", ValueBytes: 16 << 10, Threads: 1, Batch: 1},
		{Op: "put", ValueBytes: 16 << 10, Threads: 4, Batch: 8},
		{Op: "get", ValueBytes: 16 << 10, Threads: 2, Batch: 8},
		{Op: "get", ValueBytes: 16 << 10, Threads: 4, Batch: 1, Cold: true},
	} {
		l.PIDs = []int{os.Getpid()}
		sample, err := w.Do(t.Context(), l)
		if err != nil || sample[bench.Rate] <= 0 || sample[bench.CPU] <= 0 {
			t.Errorf("%+v: %v, %v", l, sample, err)
		}
		want := 0
		if l.Op == "get" {
			want = 64
		}
		if n := len(files(t, dir)); n != want {
			t.Errorf("%+v left %d files, want %d", l, n, want)
		}
	}
}

// TestStoreWorkerVerifies: the load fails if a byte of a value is wrong or a value is missing.
// The worker then serves the next load.
func TestStoreWorkerVerifies(t *testing.T) {
	w, dir := startFiles(t)
	load := StoreLoad{Op: "get", ValueBytes: 64 << 10, Threads: 2, Batch: 1, PIDs: []int{}}
	if _, err := w.Do(t.Context(), load); err != nil {
		t.Fatal(err)
	}
	path := files(t, dir)[3]
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	bad := bytes.Clone(good)
	bad[len(bad)-1] ^= 1
	for _, c := range []struct {
		change func() error
		want   string
	}{
		{func() error { return os.WriteFile(path, bad, 0o600) }, "the value of " + filepath.Base(path) + " differs from the stored value"},
		{func() error { return os.Truncate(path, 100) }, "100 of 65536 bytes of " + filepath.Base(path)},
		{func() error { return os.Remove(path) }, "FileNotFoundError"},
	} {
		if err := c.change(); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Do(t.Context(), load); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("error %v, want %q", err, c.want)
		}
	}
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Do(t.Context(), load); err != nil {
		t.Errorf("after the value is whole again: %v", err)
	}
	load.Batch = 3
	if _, err := w.Do(t.Context(), load); err == nil || !strings.Contains(err.Error(), "do not divide 16 values") {
		t.Errorf("batches of 3: %v", err)
	}
}

// TestStoreWorkerEnds: if a worker cannot start, or ends, the error contains its last output.
func TestStoreWorkerEnds(t *testing.T) {
	w, dir := startFiles(t)
	w.Kill()
	if _, err := w.Do(t.Context(), StoreLoad{Op: "get", ValueBytes: 1 << 16, Threads: 1, Batch: 1, PIDs: []int{}}); err == nil || !strings.Contains(err.Error(), "signal: killed") {
		t.Errorf("after kill: %v", err)
	}
	stores := Stores{filepath.Dir(dir), []string{"python3"}}
	if err := os.WriteFile(filepath.Join(stores.dir, "broken.py"), []byte("raise SystemExit('no such store')"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := stores.Start(t.Context(), "python3", "broken.py", nil); err == nil || !strings.Contains(err.Error(), "no such store") {
		t.Errorf("a worker that does not start: %v", err)
	}
}

// TestStorePython: an interpreter without the module is skipped. The error names the modules,
// the interpreters and the provider.
func TestStorePython(t *testing.T) {
	_, dir := startFiles(t)
	s := Stores{filepath.Dir(dir), []string{"python3"}}
	if err := os.Mkdir(filepath.Join(s.dir, "nosuchmodule"), 0o700); err != nil { // a namespace package, but not the module
		t.Fatal(err)
	}
	_, err := s.Python(t.Context(), "pip installs it", "os", "nosuchmodule")
	if err == nil || err.Error() != "the module os or nosuchmodule is in none of the interpreters python3; pip installs it" {
		t.Errorf("error %v", err)
	}
	s.pythons = []string{filepath.Join(dir, "absent")}
	if _, err := s.Python(t.Context(), "", "os"); err == nil || !strings.Contains(err.Error(), "--python "+s.pythons[0]) {
		t.Errorf("an interpreter that is absent: %v", err)
	}
}
