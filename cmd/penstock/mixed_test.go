package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testetcd"
)

// blocksOf returns the number of blocks on each volume of s, by path.
func blocksOf(t *testing.T, s *served) map[string]int {
	t.Helper()
	list := decode[struct {
		Volumes []struct {
			Path   string
			Blocks int
		}
	}](t, s.run("volume", "list", "--format", "json"))
	all := make(map[string]int)
	for _, v := range list.Volumes {
		all[v.Path] = v.Blocks
	}
	return all
}

// isHit reports whether all blocks of a sequence are returned, with the bytes of the file.
func isHit(t *testing.T, s *served, dir, tokensFile, dataFile string) bool {
	t.Helper()
	out := filepath.Join(dir, "out")
	if r := s.run("block", "get", "m", "--tokens-file", tokensFile, "--out", out); r.code != exitOK {
		return false
	}
	got, err := os.ReadFile(out)
	want, wantErr := os.ReadFile(dataFile)
	if err = errors.Join(err, wantErr); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(want), string(got)) {
		t.Fatal("the returned bytes differ from the written bytes")
	}
	return len(got) == len(want)
}

// TestMixedVolumes: a node with a local and a shared volume is killed. Another node, on which the file
// system is mounted elsewhere, adopts the shared volume: the blocks on it are hits, the blocks on the
// local volume are misses. The node that starts again has both volumes, the index on the local one, and
// writes to both.
func TestMixedVolumes(t *testing.T) {
	testkit.VerifyNone(t)
	etcd, dir := testetcd.Start(t, 1), t.TempDir()
	mount, elsewhere := dir+"/mount", dir+"/elsewhere"
	if err := errors.Join(os.Mkdir(mount, 0o700), os.Symlink(mount, elsewhere)); err != nil {
		t.Fatal(err)
	}
	local, shared := dir+"/local", mount+"/a"
	mixed := append(sharedOf(etcd, "a", shared), "--cluster-mounts", "pool="+mount)
	a := startProcess(t, local, mixed...)
	b := startServed(t, dir+"/b", slowLease(etcd, "b", "--cluster-adopt", "--cluster-mounts", "pool="+elsewhere)...)
	awaitTrue(t, "both nodes serve", func() bool { return serving(t, a.client(t))() && serving(t, b)() })
	prompt(t, b, dir, 1) // makes the namespace
	// Each sequence lies on one volume, because it is shorter than a stripe.
	type sequence struct{ tokens, data string }
	written := 0
	write := func(s *served) (path string, q sequence) {
		t.Helper()
		q = sequence{fmt.Sprintf("%s/t%d", dir, written), fmt.Sprintf("%s/d%d", dir, written)}
		writeSequence(t, q.tokens, q.data, written)
		written++
		before := blocksOf(t, s)
		eventually(t, s, "block", "put", "m", "--tokens-file", q.tokens, "--data-file", q.data)
		for p, n := range blocksOf(t, s) {
			if n == before[p]+4 {
				return p, q
			}
		}
		t.Fatalf("no volume has the sequence: %v, and %v before", blocksOf(t, s), before)
		return "", q
	}
	on := make(map[string][]sequence)
	for len(on[local]) < 2 || len(on[shared]) < 2 {
		path, q := write(a.client(t))
		on[path] = append(on[path], q)
	}
	if err := a.Kill(); err != nil {
		t.Fatal(err)
	}
	guest := adoptedClient(t, a, b)
	for _, q := range on[shared] {
		fetchEventually(t, guest, dir, q.tokens, q.data)
	}
	for _, q := range on[local] {
		if isHit(t, guest, dir, q.tokens, q.data) {
			t.Error("a block on the local volume is a hit at the adopter")
		}
	}
	if out := b.run("volume", "list").must(t); !strings.Contains(out, elsewhere+"/a") {
		t.Errorf("the adopter does not have the volume at its own path:\n%s", out)
	}
	_, late := write(guest)

	again := alone(t, local, mixed...)
	awaitTrue(t, "the node has its volumes back", func() bool {
		names, _ := adoptedBy(t, b)
		return len(names) == 0 && states(t, b) == "a:serving b:serving"
	})
	for _, q := range append(on[shared], late) {
		fetchEventually(t, again, dir, q.tokens, q.data)
	}
	used := make(map[string]bool)
	for !used[local] || !used[shared] {
		path, q := write(again)
		fetchEventually(t, again, dir, q.tokens, q.data)
		used[path] = true
	}
	awaitTrue(t, "the index is on the local volume only", func() bool {
		names, err := filepath.Glob(dir + "/*/index*")
		more, err2 := filepath.Glob(dir + "/*/a/index*")
		return errors.Join(err, err2) == nil && len(more) == 0 && slices.Contains(names, local+"/index-00000003") && !slices.Contains(names, local+"/index-00000001")
	})
	b.stop()
}

// TestLocalVolumesNeedTheSharedOnes: a node does not start with the local volumes of a node that has shared
// ones too, also not with degraded.
func TestLocalVolumesNeedTheSharedOnes(t *testing.T) {
	testkit.VerifyNone(t)
	etcd, dir := testetcd.Start(t, 1), t.TempDir()
	local := dir + "/local"
	s := startServed(t, local, sharedOf(etcd, "a", dir+"/shared")...)
	awaitTrue(t, "the node serves", serving(t, s))
	s.stop()
	for _, more := range [][]string{nil, {"--degraded"}} {
		if r := penstock(t, "", nil, append(small(local), more...)...); r.code == exitOK || !strings.Contains(r.err, "list them in shared_data") {
			t.Errorf("with %q: exit %d: %s", more, r.code, r.err)
		}
	}
}

// TestAdoptionNeedsTheMount: an adopter without the mount of the volumes reports which setting or mount
// is missing.
func TestAdoptionNeedsTheMount(t *testing.T) {
	testkit.VerifyNone(t)
	e, dir := testetcd.Start(t, 1), t.TempDir()
	cfg := memberConfig(e, "a", "")
	cfg.Data, cfg.SharedData, cfg.Cluster.Mounts = nil, []string{dir + "/mount/a"}, []string{"pool=" + dir + "/mount"}
	t.Run("node a", func(t *testing.T) { openMember(t, cfg) })
	for _, tc := range []struct{ mount, want string }{
		{"other=" + dir, "cluster.mounts of this node has no mount point of pool: add pool=DIRECTORY"},
		{"pool=" + dir + "/missing", "volume pool:a of node a is not at " + dir + "/missing/a on this host: mount its file system there, or correct cluster.mounts"},
	} {
		t.Run(tc.mount, func(t *testing.T) {
			cfg := memberConfig(e, "b", t.TempDir())
			cfg.Cluster.Mounts = []string{tc.mount}
			b := openMember(t, cfg)
			if _, err := b.adopter.Adopt(t.Context(), dir+"/mount/a", true); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("by hand: %v; want %q", err, tc.want)
			}
			all := storesOf(t, b)
			b.adopter.adoptFree(all)
			if got := b.adopter.elsewhere[all[0].ID]; len(guests(b)) > 0 || !strings.Contains(got, tc.want) {
				t.Errorf("adopted %q, logged %q; want %q", guests(b), got, tc.want)
			}
		})
	}
}
