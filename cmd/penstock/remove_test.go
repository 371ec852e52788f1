package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// TestRemoveVolumeOfIndex: after volume remove no file of the volume is open, even if the volume
// held the index. The node serves and stores blocks, and starts with all blocks whether or not its
// directories include the removed volume.
func TestRemoveVolumeOfIndex(t *testing.T) {
	testkit.Long(t, "starts three nodes")
	dir := t.TempDir()
	tokensFile, dataFile := prompt2(t, dir)
	more := writeFile(t, dir, "more", tokens(5000, 8))
	dirs := []string{filepath.Join(dir, "a"), filepath.Join(dir, "b"), filepath.Join(dir, "c")}
	holds := func(i int) bool {
		_, err := os.Stat(filepath.Join(dirs[i], indexName))
		return err == nil
	}
	s := startServed(t, strings.Join(dirs, ","))
	s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	if open := testkit.OpenBelow(t, filepath.Join(dirs[0], indexName)); !holds(0) || len(open) == 0 {
		t.Fatal("the index is not in the first directory")
	}
	verify := func(when string) {
		t.Helper()
		for _, file := range []string{tokensFile, more} {
			if out := s.run("block", "verify", "m", "--tokens-file", file).must(t); !strings.Contains(out, "intact 2, absent 0") {
				t.Errorf("%s: %s", when, out)
			}
		}
	}
	// The index moves to b, and from there to c.
	for i := range 2 {
		s.run("volume", "drain", dirs[i], "--wait").must(t)
		for range 2 {
			s.run("volume", "remove", dirs[i]).must(t)
			if open := testkit.OpenBelow(t, dirs[i]); len(open) > 0 {
				t.Errorf("after the removal of %s these files are open: %q", dirs[i], open)
			}
		}
		if holds(i) || !holds(i+1) {
			t.Errorf("after the removal of %s an index is in it: %v; in the next one: %v", dirs[i], holds(i), holds(i+1))
		}
		s.run("block", "put", "m", "--tokens-file", more, "--data-file", dataFile).must(t)
		verify("after the removal of " + dirs[i])
	}
	s.stop()
	for _, data := range []string{strings.Join(dirs, ","), dirs[2]} {
		s = startServed(t, data)
		verify("after a start with " + data)
		if log := s.log.String(); strings.Contains(log, "rebuilt") {
			t.Errorf("the index was rebuilt:\n%s", log)
		}
		s.stop()
	}
}

// TestIndexUse: of several indexes the one used last is opened, also after several moves.
func TestIndexUse(t *testing.T) {
	dir := t.TempDir()
	var data []string
	for name, content := range map[string]string{"a": "7", "b": "7 1\n", "c": "7 12\n", "d": "6 99\n", "e": "?"} {
		data = append(data, filepath.Join(dir, name))
		if err := os.MkdirAll(filepath.Join(dir, name, indexName), 0o700); err != nil {
			t.Fatal(err)
		}
		writeFile(t, filepath.Join(dir, name, indexName), indexUseName, []byte(content))
	}
	got, stale, err := indexDirs(data)
	if want := filepath.Join(dir, "c", indexName); err != nil || got != want || len(stale) != 4 {
		t.Errorf("%s, stale %s, %v; want %s", got, stale, err, want)
	}
	if err := (indexUse{8, 0}).write(filepath.Join(dir, "e", indexName)); err != nil {
		t.Fatal(err)
	}
	if got, _, err = indexDirs(data); err != nil || filepath.Dir(got) != filepath.Join(dir, "e") {
		t.Errorf("%s, %v", got, err)
	}
}
