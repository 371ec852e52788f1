//go:build cgo && linux

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/usrbio/usrbiotest"
)

// standIn3FS builds the library of usrbiotest, for processes that the test starts.
func standIn3FS(t *testing.T) *usrbiotest.Control {
	t.Helper()
	testkit.Program(t, "gcc", "gcc")
	dir := t.TempDir()
	if _, err := usrbiotest.Build(dir); err != nil {
		t.Fatal(err)
	}
	t.Setenv("LD_LIBRARY_PATH", dir)
	t.Setenv("STANDIN_HF3FS_CONTROL", "")
	t.Setenv("STANDIN_HF3FS_MOUNTS", "")
	control, err := usrbiotest.NewControl(dir)
	if err != nil {
		t.Fatal(err)
	}
	return control
}

// await returns when the condition is true. It fails the test after a minute.
func await(t *testing.T, missed string, condition func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for limit := time.After(time.Minute); !condition(); {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal(missed)
		}
	}
}

// TestNodeOn3FS: a node writes and reads through 3FS's rings, keeps its acknowledged blocks when it
// is killed, and leaves no shared memory and no registration. When reads do not complete, the node
// declares the volume failed, and the blocks are misses.
func TestNodeOn3FS(t *testing.T) {
	testkit.VerifyNone(t)
	control := standIn3FS(t)
	mount := t.TempDir()
	if err := usrbiotest.Virtual(mount); err != nil {
		t.Fatal(err)
	}
	if err := usrbiotest.Directories(mount); err != nil {
		t.Fatal(err)
	}
	dir, volume := t.TempDir(), filepath.Join(mount, "volume")
	start := func() *process {
		p := startProcess(t, volume, "--io", "usrbio", "--durability", "sync", "--limits-hung-after", "1s")
		t.Cleanup(func() { _ = p.Kill() }) // a process that was stopped is not an error
		return p
	}
	node := start()
	tokensFile, dataFile := prompt(t, node.client(t), dir, 12)
	node.client(t).run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	fetchSame(t, node.client(t), dir, tokensFile, dataFile)
	status := node.client(t).run("status", "--format", "json").must(t)
	if !strings.Contains(status, `"io": "usrbio"`) || !strings.Contains(status, "a page was written and read through 3FS's rings") {
		t.Errorf("status:\n%s", status)
	}
	if n := control.Counters(); n.Prepared < 6 || n.Files == 0 {
		t.Errorf("the node did not use the library: %+v", n)
	}
	if err := node.Kill(); err != nil {
		t.Fatal(err)
	}
	await(t, "registrations are left after the kill", func() bool { return len(usrbiotest.Links(t, mount)) == 0 })

	node = start()
	control.Set(usrbiotest.Fault{Kind: usrbiotest.Stuck, Reads: true, Count: 1 << 40})
	r := node.client(t).run("block", "get", "m", "--tokens-file", tokensFile, "--out", dir+"/got")
	if r.code == exitOK {
		t.Errorf("a read that does not complete returned\n%s", r.out)
	}
	await(t, "the volume does not fail", func() bool {
		return strings.Contains(node.client(t).run("status").must(t), "failed")
	})
	control.Set(usrbiotest.Fault{})
	await(t, "the volume does not work again", func() bool {
		return node.client(t).run("block", "verify", "m", "--tokens-file", tokensFile).code == exitOK
	})
	fetchSame(t, node.client(t), dir, tokensFile, dataFile)
	if err := node.Stop(); err != nil {
		t.Fatal(err)
	}
	if links := usrbiotest.Links(t, mount); len(links) != 0 {
		t.Errorf("registrations are left after the stop: %v", links)
	}
	// Any backend opens the volume.
	check := decode[checked](t, penstock(t, "", nil, "store", "check", "--data", volume, "--io", "posix", "--verify", "--format", "json"))
	if check.Blocks != 12 || check.Verified != 12 || len(check.Findings) != 0 {
		t.Errorf("check: %+v", check)
	}
}

// TestAutoOn3FS: on a mount of type fuse.hf3fs, io auto uses 3FS's library. Without the library it
// uses posix, with the reason, and io usrbio is refused.
func TestAutoOn3FS(t *testing.T) {
	testkit.VerifyNone(t)
	standIn3FS(t)
	mount := usrbiotest.Mount(t)
	dir, volume := t.TempDir(), filepath.Join(mount, "volume")
	start := func() *process {
		p := startProcess(t, volume, "--io", "auto")
		t.Cleanup(func() { _ = p.Kill() }) // a process that was stopped is not an error
		return p
	}
	node := start()
	tokensFile, dataFile := prompt(t, node.client(t), dir, 12)
	node.client(t).run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	fetchSame(t, node.client(t), dir, tokensFile, dataFile)
	if status := node.client(t).run("status", "--format", "json").must(t); !strings.Contains(status, `"io": "usrbio"`) {
		t.Errorf("status:\n%s", status)
	}
	if err := node.Stop(); err != nil {
		t.Fatal(err)
	}

	if err := os.Unsetenv("LD_LIBRARY_PATH"); err != nil {
		t.Fatal(err)
	}
	node = start()
	fetchSame(t, node.client(t), dir, tokensFile, dataFile)
	status := node.client(t).run("status", "--format", "json").must(t)
	if !strings.Contains(status, `"io": "posix"`) || !strings.Contains(status, usrbiotest.LibraryName+": cannot open shared object file") {
		t.Errorf("status without the library:\n%s", status)
	}
	if r := node.client(t).run("doctor"); !strings.Contains(r.out, "docs/3fs.md") {
		t.Errorf("doctor without the library: exit %d\n%s", r.code, r.out)
	}
	if err := node.Stop(); err != nil {
		t.Fatal(err)
	}
	for where, want := range map[string]string{volume: usrbiotest.LibraryName, filepath.Join(dir, "volume"): "io auto uses posix"} {
		r := penstock(t, "", nil, append(small(where), "--io", "usrbio")...)
		if r.code != exitFailed || !strings.Contains(r.err, "io is usrbio, which does not work") || !strings.Contains(r.err, want) {
			t.Errorf("serve --io usrbio on %s: exit %d\n%s", where, r.code, r.err)
		}
	}
}
