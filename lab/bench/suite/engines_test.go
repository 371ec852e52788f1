package suite

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/lab/bench"
)

// TestStoreLoads: the comparisons have different names, and each of their stores a
// target where the design names one.
func TestStoreLoads(t *testing.T) {
	seen := make(map[string]bool)
	for _, l := range storeLoads() {
		if seen[l.String()] {
			t.Errorf("two comparisons are named %s", l)
		}
		seen[l.String()] = true
		if got := l.target(mooncakeName); got != bench.AtLeast(3) {
			t.Errorf("%s: target against Mooncake %v", l, got)
		}
		if got, disk := l.target(filesName).Kind != "", l.where != getFromMemory; got != disk {
			t.Errorf("%s: a target against files: %v, want %v", l, got, disk)
		}
	}
	for _, want := range []string{"get 1 MiB from memory, 1 thread, single", "get 4 MiB from disk, 4 threads, batches of 8", "put 4 MiB, 1 thread, batches of 8"} {
		if !seen[want] {
			t.Errorf("no comparison is named %q", want)
		}
	}
	if len(seen) != 20 {
		t.Errorf("%d comparisons, want 20", len(seen))
	}
}

// TestEngines runs the suite with the stores that need no package. The Python tests run
// it with Penstock (python/tests/test_bench.py).
func TestEngines(t *testing.T) {
	w := testWorld(t)
	w.Only = regexp.MustCompile("^(get 1 MiB from disk|put 1 MiB), 1 thread, single$")
	w.Contenders = regexp.MustCompile("^file per block|^HiCacheFile$")
	r, err := Engines(t.Context(), w, EnginesOptions{Pythons: []string{"python3"}, AreaBytes: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.NotRun) != 1 || r.NotRun[0].What != hicacheName || !strings.Contains(r.NotRun[0].Why, "sglang.lock") {
		t.Errorf("not run: %v", r.NotRun)
	}
	var ran []string
	for _, res := range r.Results {
		for _, a := range res.Absolute {
			if a.Metrics[bench.Rate].Median <= 0 || a.Metrics[bench.CPU].Median <= 0 {
				t.Errorf("%s, %s: %v", res.Name, a.Contender, a.Metrics)
			}
			ran = append(ran, res.Name+": "+a.Contender)
		}
		if len(res.NotRun) > 0 {
			t.Errorf("%s: not run: %v", res.Name, res.NotRun)
		}
	}
	if want := "get 1 MiB from disk, 1 thread, single: file per block;put 1 MiB, 1 thread, single: file per block;put 1 MiB, 1 thread, single: file per block, synced"; strings.Join(ran, ";") != want {
		t.Errorf("ran %s\nwant %s", strings.Join(ran, ";"), want)
	}
}

// TestEnginesNeedPenstock: without Penstock's package there is nothing to compare with,
// and the error names the command that installs the package.
func TestEnginesNeedPenstock(t *testing.T) {
	w := testWorld(t)
	w.Contenders = regexp.MustCompile("^penstock$")
	python := filepath.Join(t.TempDir(), "python") // it finds no module
	if err := os.WriteFile(python, []byte("#!/bin/sh\nexit 1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := Engines(t.Context(), w, EnginesOptions{Pythons: []string{python}, AreaBytes: 4 << 20})
	if err == nil || !strings.Contains(err.Error(), "the module penstock is in none of the interpreters "+python) || !strings.Contains(err.Error(), "make wheel") {
		t.Errorf("error %v", err)
	}
}
