package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/membership"
)

// memberConfig is the configuration of a small member of a cluster.
func memberConfig(e *testetcd.Etcd, name, dir string) config.Config {
	cfg := config.Default()
	cfg.Node, cfg.Data, cfg.IO = name, []string{dir}, "posix"
	cfg.Listen, cfg.DataListen, cfg.HTTP = "127.0.0.1:0", "127.0.0.1:0", ""
	cfg.Capacity, cfg.Arena, cfg.IndexCache, cfg.FreeFloor = 64<<20, 32<<20, 4<<20, 1<<20
	cfg.Prewrite, cfg.ScrubRate = false, 0
	cfg.Cluster.Etcd, cfg.Cluster.AdoptArena = e.Endpoints, 32<<20
	return cfg
}

// openMember opens a member without serving its ports, and closes it when the test ends.
func openMember(t *testing.T, cfg config.Config) *node {
	t.Helper()
	cfg.EnsureDefaults()
	n, err := startNode(t.Context(), source[config.Config]{cfg: cfg, read: func() (config.Config, error) { return cfg, nil }}, new(slog.LevelVar), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	<-n.cluster.Joined()
	return n
}

// freeStore returns the directory of shared volumes of node a, which has ended.
func freeStore(t *testing.T, e *testetcd.Etcd) string {
	t.Helper()
	dir := t.TempDir() + "/a"
	cfg := memberConfig(e, "a", "")
	cfg.Data, cfg.SharedData = nil, []string{dir}
	t.Run("node a", func(t *testing.T) { openMember(t, cfg) })
	return dir
}

// storesOf returns the stores on shared volumes.
func storesOf(t *testing.T, n *node) []membership.StoreState {
	t.Helper()
	all, err := n.cluster.Stores(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// guests returns the nodes that n has adopted, as node:fence.
func guests(n *node) (all []string) {
	for _, g := range n.adopter.Adopted() {
		all = append(all, fmt.Sprintf("%s:%d", g.GetNode(), g.GetFence()))
	}
	return all
}

// TestAdoptionOutlivesItsCaller: an adoption continues when its caller no longer waits. If it stopped,
// this process would own the volumes and not serve them. The adopted node follows changes of the file
// of tokens.
func TestAdoptionOutlivesItsCaller(t *testing.T) {
	testkit.VerifyNone(t)
	e := testetcd.Start(t, 1)
	dir := freeStore(t, e)
	cfg := memberConfig(e, "b", t.TempDir()+"/b")
	cfg.Auth.TokenFile = writeFile(t, t.TempDir(), "token", []byte("first-token-of-the-test-0123456789\n"))
	b := openMember(t, cfg)
	// The copy of the index waits until the test writes to the pipe.
	pipe := dir + "/index-00000001/pipe"
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, leave := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := b.adopter.Adopt(ctx, dir, false)
		ended <- err
	}()
	var writer *os.File
	awaitTrue(t, "the index is copied", func() (ok bool) {
		var err error
		writer, err = os.OpenFile(pipe, os.O_WRONLY|syscall.O_NONBLOCK, 0)
		return err == nil
	})
	leave()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the caller that left got %v", err)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	awaitTrue(t, "the volumes are adopted", func() bool { return slices.Equal(guests(b), []string{"a:2"}) })

	b.adopter.mu.Lock()
	guest := b.adopter.guests[storesOf(t, b)[0].ID].node
	b.adopter.mu.Unlock()
	const next = "second-token-of-the-test-0123456789"
	if err := os.WriteFile(cfg.Auth.TokenFile, []byte(next+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	awaitTrue(t, "the adopted node uses the new token", func() bool { return slices.Equal(guest.live.credentials.Tokens(), []string{next}) })
}

// TestAdoptionFails: an adoption that fails is tried again after a wait only, because each attempt uses up
// a fencing number. A node whose name belongs to other volumes is not adopted.
func TestAdoptionFails(t *testing.T) {
	testkit.VerifyNone(t)
	e := testetcd.Start(t, 1)
	dir := freeStore(t, e)
	b := openMember(t, memberConfig(e, "b", t.TempDir()+"/b"))
	link := dir + "/index-00000001/link"
	if err := os.Symlink("missing", link); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		b.adopter.adoptFree(storesOf(t, b))
	}
	if all := storesOf(t, b); len(all) != 1 || all[0].Fence != 2 || all[0].Owner != nil {
		t.Fatalf("after attempts that fail: %+v; want the fencing number 2 and no owner", all)
	}
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	clear(b.adopter.retries)
	all := storesOf(t, b)
	newer := all[0]
	newer.ID, newer.Revision = "another", newer.Revision+1
	b.adopter.adoptFree(append(all, newer))
	if got := guests(b); len(got) > 0 {
		t.Errorf("adopted %q although the node has other volumes", got)
	}
	changed := all[0]
	changed.Revision++
	if err := b.adopter.replaced([]membership.StoreState{changed}, all[0]); err != nil {
		t.Errorf("a store that has changed meanwhile counts as another: %v", err)
	}
	own := all[0]
	own.Node = "b"
	if b.adopter.replaced(all, own) == nil {
		t.Error("volumes with the name of the adopter itself can be adopted")
	}
	b.adopter.adoptFree(all)
	if got := guests(b); !slices.Equal(got, []string{"a:3"}) {
		t.Errorf("adopted %q; want a with the fencing number 3", got)
	}
	awaitTrue(t, "the indexes of earlier owners are removed", func() bool {
		names, err := filepath.Glob(dir + "/index*")
		return err == nil && slices.Equal(names, []string{dir + "/index-00000003"})
	})
}

// TestRetry: the waits between attempts to adopt a store grow up to a limit.
func TestRetry(t *testing.T) {
	now := time.Unix(1000, 0)
	var r retry
	var waits []time.Duration
	for range 8 {
		r = r.failed(now, 10*time.Second)
		if want := now.Add(r.wait); !r.after.Equal(want) {
			t.Errorf("the next attempt is at %v; want %v", r.after, want)
		}
		waits = append(waits, r.wait/time.Second)
	}
	if want := []time.Duration{10, 20, 40, 80, 160, 320, 600, 600}; !slices.Equal(waits, want) {
		t.Errorf("waits of %d seconds; want %d", waits, want)
	}
}

// TestIndexesOfOwners: an interrupted start leaves the indexes of two owners that were last used at the same
// start. The next start uses that of the later owner. A process refuses the index of a later owner.
func TestIndexesOfOwners(t *testing.T) {
	dir := t.TempDir()
	index := func(fence uint32, boot uint64) string {
		name := fmt.Sprintf("%s/index-%08x", dir, fence)
		if err := errors.Join(os.Mkdir(name, 0o700), indexUse{boot: boot}.write(name)); err != nil {
			t.Fatal(err)
		}
		return name
	}
	first, second := index(1, 1), index(2, 1)
	newest, stale, err := indexDirs([]string{dir})
	if err != nil || newest != second || !slices.Equal(stale, []string{first}) {
		t.Fatalf("index %s, older ones %q, %v", newest, stale, err)
	}
	later := index(4, 4)
	newest, stale, err = indexDirs([]string{dir})
	if err != nil || newest != later {
		t.Fatalf("index %s, %v", newest, err)
	}
	if _, _, err := new(node).ownIndex(newest, dir, stale, 3); !errors.Is(err, membership.ErrTaken) {
		t.Errorf("an owner takes the index of a later owner: %v", err)
	}
	if own, stale, err := new(node).ownIndex(newest, dir, stale, 5); err != nil || own != dir+"/index-00000005" || !slices.Contains(stale, later) {
		t.Errorf("the next owner: index %s, older ones %q, %v", own, stale, err)
	}
}

// TestStuckGuest: an adopted node gives the ownership up even if a device may still write to the volumes.
// The process of the adopter lives on, so the lease would not end.
func TestStuckGuest(t *testing.T) {
	testkit.VerifyNone(t)
	e := testetcd.Start(t, 1)
	cfg := memberConfig(e, "a", "")
	cfg.Data, cfg.SharedData = nil, []string{t.TempDir()}
	const store = "00112233445566778899aabbccddeeff"
	for range 2 {
		n := &node{cfg: cfg, log: slog.New(slog.DiscardHandler), adoptedBy: "b", stuck: true}
		if err := errors.Join(n.openOwner(), n.owner.Acquire(t.Context(), store), n.owner.Held(), n.closeParts(context.Background())); err != nil {
			t.Fatal(err)
		}
		if n.owner.Held() == nil {
			t.Error("the process still holds the store")
		}
	}
}

// TestAdopterClose: the end of a node does not wait without limit for an adopted node.
func TestAdopterClose(t *testing.T) {
	testkit.VerifyNone(t)
	a := &adopter{}
	a.life, a.stop = context.WithCancel(context.Background())
	hang := make(chan struct{})
	a.begin(func() { <-hang })
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := a.close(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("close while an adopted node hangs: %v", err)
	}
	if a.begin(func() {}) {
		t.Error("an adoption begins while the node ends")
	}
	close(hang)
	if err := a.close(context.Background()); err != nil {
		t.Error(err)
	}
}

// TestGuestConfig: an adopted node drains within one lease_ttl, because its own node waits for three.
func TestGuestConfig(t *testing.T) {
	cfg := config.Default()
	cfg.Cluster.LeaseTTL, cfg.Cluster.Etcd = config.Duration(4*time.Second), []string{"127.0.0.1:1"}
	cfg.Node, cfg.Listen, cfg.DataListen = "b", "127.0.0.1:0", "127.0.0.1:0"
	guest, err := guestConfig(cfg, membership.StoreState{StoreRecord: membership.StoreRecord{Node: "a", Dirs: []string{"/mnt/a"}, CapacityBytes: 64 << 20}}, []string{"/mnt/b"})
	if err != nil {
		t.Fatal(err)
	}
	if got := guest.DrainWithin.Std(); got != 4*time.Second {
		t.Errorf("the adopted node drains within %v; want 4s", got)
	}
	if dirs := guest.Dirs(); !slices.Equal(dirs, []string{"/mnt/b"}) {
		t.Errorf("the adopted node has the volumes %q; want that of this host", dirs)
	}
}

// TestUnusableIndexIsClosed: a start that fails after the index was opened closes the index.
func TestUnusableIndexIsClosed(t *testing.T) {
	testkit.VerifyNone(t)
	dir := t.TempDir()
	if err := os.MkdirAll(dir+"/index/"+indexUseName, 0o700); err != nil {
		t.Fatal(err)
	}
	if r := penstock(t, "", nil, small(dir)...); r.code == exitOK || !strings.Contains(r.err, indexUseName) {
		t.Errorf("exit %d: %s", r.code, r.err)
	}
}
