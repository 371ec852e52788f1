package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testetcd"
)

// sharedOf returns the settings of a member with the shared volume in dir.
func sharedOf(e *testetcd.Etcd, name, dir string, more ...string) []string {
	return append(slowLease(e, name, "--shared-data", dir, "--durability", "sync"), more...)
}

// slowLease returns the settings of a member whose lease does not end on a busy machine while the member
// lives: another node would adopt its volumes.
func slowLease(e *testetcd.Etcd, name string, more ...string) []string {
	return append(append(clusterOf(e, name), "--cluster-lease-ttl", "10s"), more...)
}

// eventually runs a command until it succeeds. A node without a lease in etcd, which a busy machine can
// cause, refuses for a moment.
func eventually(t *testing.T, s *served, args ...string) {
	t.Helper()
	awaitTrue(t, strings.Join(args, " "), func() bool { return s.run(args...).code == exitOK })
}

// fetchEventually is fetchSame for a node that may have no lease for a moment.
func fetchEventually(t *testing.T, s *served, dir, tokensFile, dataFile string) {
	t.Helper()
	eventually(t, s, "block", "get", "m", "--tokens-file", tokensFile, "--out", dir+"/got")
	got, err := os.ReadFile(dir + "/got")
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(dataFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("the returned bytes differ from the written bytes")
	}
}

// adoptedBy returns the nodes that s has adopted, as node:fence, and their addresses.
func adoptedBy(t *testing.T, s *served) (names, addrs []string) {
	t.Helper()
	list := decode[struct {
		Adopted []struct {
			Node, Addr string
			Fence      int
		}
	}](t, s.run("volume", "list", "--format", "json"))
	for _, a := range list.Adopted {
		names, addrs = append(names, fmt.Sprintf("%s:%d", a.Node, a.Fence)), append(addrs, a.Addr)
	}
	return names, addrs
}

// adoptedClient waits until b has adopted the volumes of the node a and serves them. It returns a client of the adopted
// node.
func adoptedClient(t *testing.T, a *process, b *served) *served {
	t.Helper()
	var addrs []string
	awaitTrue(t, "the volumes are adopted", func() bool {
		var names []string
		names, addrs = adoptedBy(t, b)
		return len(names) == 1 && strings.HasPrefix(names[0], "a:") // on a busy machine b may lose its lease, and adopt again
	})
	awaitTrue(t, "the adopted node serves", func() bool { return states(t, b) == "a:serving b:serving" })
	guest := a.client(t)
	guest.ready.Listen = addrs[0]
	return guest
}

// TestSharedNeedsEtcd: shared volumes without etcd are refused, and a shared volume is refused without
// the setting.
func TestSharedNeedsEtcd(t *testing.T) {
	testkit.VerifyNone(t)
	dir := t.TempDir() + "/volume"
	if r := penstock(t, "", nil, append(small(""), "--shared-data", dir)...); r.code == exitOK || !strings.Contains(r.err, "needs cluster.etcd") {
		t.Errorf("exit %d: %s", r.code, r.err)
	}
	etcd := testetcd.Start(t, 1)
	s := startServed(t, "", sharedOf(etcd, "a", dir)...)
	awaitTrue(t, "the node serves", serving(t, s))
	s.stop()
	if r := penstock(t, "", nil, small(dir)...); r.code == exitOK || !strings.Contains(r.err, "shared volume") {
		t.Errorf("exit %d: %s", r.code, r.err)
	}
	startServed(t, "", sharedOf(etcd, "a", dir)...).stop()
	if names, err := filepath.Glob(dir + "/index*"); err != nil || !slices.Equal(names, []string{dir + "/index-00000002"}) {
		t.Errorf("indexes %q, %v; want that of the second owner only", names, err)
	}
}

// TestAdopt: when a node with shared volumes is killed, another node adopts the volumes, by the command
// or by itself, and the blocks are hits. The node gets its volumes back when it starts again.
func TestAdopt(t *testing.T) {
	testkit.VerifyNone(t)
	for _, auto := range []bool{false, true} {
		t.Run(fmt.Sprintf("auto=%v", auto), func(t *testing.T) {
			etcd, dir := testetcd.Start(t, 1), t.TempDir()
			volume := dir + "/a"
			a := startProcess(t, "", sharedOf(etcd, "a", volume)...)
			b := startServed(t, dir+"/b", slowLease(etcd, "b", fmt.Sprintf("--cluster-adopt=%v", auto))...)
			awaitTrue(t, "both nodes serve", func() bool { return serving(t, a.client(t))() && serving(t, b)() })
			tokensFile, dataFile := prompt(t, b, dir, 20)
			eventually(t, a.client(t), "block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile)
			if out := b.run("volume", "adopt", volume, "--dry-run").must(t); !strings.Contains(out, "a (") || !strings.Contains(out, "lease ends in") {
				t.Errorf("a dry run while the owner lives:\n%s", out)
			}
			if r := b.run("volume", "adopt", volume); r.code == exitOK || !strings.Contains(r.err, "in use by node a") {
				t.Errorf("the volumes of a living node: exit %d, %s%s", r.code, r.out, r.err)
			}
			if err := a.Kill(); err != nil {
				t.Fatal(err)
			}
			if !auto {
				awaitTrue(t, "the lease has ended", func() bool {
					return strings.Contains(b.run("volume", "adopt", volume, "--dry-run").must(t), "none: the volumes can be adopted")
				})
				if names, _ := adoptedBy(t, b); len(names) > 0 {
					t.Errorf("the dry run has adopted %q", names)
				}
				b.run("volume", "adopt", volume).must(t)
			}
			guest := adoptedClient(t, a, b)
			fetchEventually(t, guest, dir, tokensFile, dataFile)
			if out := b.run("volume", "list").must(t); !strings.Contains(out, "adopted: node a at "+guest.ready.Listen+", 20 blocks") {
				t.Errorf("no line for the adopted node:\n%s", out)
			}
			if out := guest.run("volume", "list").must(t); !strings.Contains(out, volume+": shared, fence 2") {
				t.Errorf("no fencing number:\n%s", out)
			}
			back := alone(t, "", sharedOf(etcd, "a", volume)...)
			awaitTrue(t, "the node has its volumes back", func() bool {
				names, _ := adoptedBy(t, b)
				return len(names) == 0 && states(t, b) == "a:serving b:serving"
			})
			fetchEventually(t, back, dir, tokensFile, dataFile)
			b.stop() // the adopter's own volumes are not shared, so nothing is adopted
		})
	}
}

// TestPausedOwner: a node that is stopped in the middle of writes loses its volumes to another node.
// When it continues, it ends, and its late writes are misses: each read at the new owner returns
// the bytes that were put, or is a miss.
func TestPausedOwner(t *testing.T) {
	testkit.VerifyNone(t)
	etcd, dir := testetcd.Start(t, 1), t.TempDir()
	a := startProcess(t, "", sharedOf(etcd, "a", dir+"/a")...)
	b := startServed(t, dir+"/b", slowLease(etcd, "b", "--cluster-adopt")...)
	awaitTrue(t, "both nodes serve", func() bool { return serving(t, a.client(t))() && serving(t, b)() })
	old := a.client(t)
	early, earlyData := prompt(t, b, dir, 20)
	eventually(t, old, "block", "put", "m", "--tokens-file", early, "--data-file", earlyData)

	// Puts run until the node is stopped, and are in every stage of a write then.
	type put struct{ tokens, data string }
	puts := make([]put, 24)
	for i := range puts {
		puts[i] = put{fmt.Sprintf("%s/t%d", dir, i), fmt.Sprintf("%s/d%d", dir, i)}
		writeSequence(t, puts[i].tokens, puts[i].data, i)
	}
	begun := make(chan struct{}, len(puts))
	done := make(chan bool, len(puts))
	for _, p := range puts {
		go func() {
			begun <- struct{}{}
			r := old.run("block", "put", "m", "--tokens-file", p.tokens, "--data-file", p.data, "--timeout", "10s")
			done <- r.code == exitOK
		}()
	}
	for range puts {
		<-begun
	}
	<-done // one put has ended, so others are under way
	if err := a.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	guest := adoptedClient(t, a, b)
	fetchEventually(t, guest, dir, early, earlyData)
	// The new owner uses the slots that the old one was about to write.
	for i := range 12 {
		tokens, data := fmt.Sprintf("%s/nt%d", dir, i), fmt.Sprintf("%s/nd%d", dir, i)
		writeSequence(t, tokens, data, 100+i)
		eventually(t, guest, "block", "put", "m", "--tokens-file", tokens, "--data-file", data)
		puts = append(puts, put{tokens, data})
	}
	if err := a.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	<-a.Over()
	if a.Err() == nil || !strings.Contains(a.Log(), "another process has taken its shared volumes over") {
		t.Errorf("the old owner ended with %v\n%s", a.Err(), a.Log())
	}
	for range len(puts) - 12 - 1 {
		<-done
	}
	hits := 0
	check := func(s *served) {
		t.Helper()
		hits = 0
		for _, p := range puts {
			want, err := os.ReadFile(p.data)
			if err != nil {
				t.Fatal(err)
			}
			out := dir + "/out"
			if r := s.run("block", "get", "m", "--tokens-file", p.tokens, "--out", out); r.code != exitOK {
				continue
			}
			got, err := os.ReadFile(out)
			if err != nil || len(got) > len(want) || !strings.HasPrefix(string(want), string(got)) {
				t.Fatalf("%s: other bytes were returned (%v)", p.tokens, err)
			}
			hits++
		}
	}
	awaitTrue(t, "blocks are hits", func() bool {
		check(guest)
		return hits > 0
	})
	fetchEventually(t, guest, dir, early, earlyData)
	b.stop()
	again := startServed(t, "", sharedOf(etcd, "a", dir+"/a")...)
	awaitTrue(t, "the node serves again", serving(t, again))
	check(again)
	fetchEventually(t, again, dir, early, earlyData)
}

// writeSequence writes the tokens and the bytes of a sequence of 4 blocks of the namespace m.
func writeSequence(t *testing.T, tokensFile, dataFile string, seed int) {
	t.Helper()
	var tokens strings.Builder
	for i := range 16 {
		fmt.Fprintf(&tokens, "%d ", 1000*(seed+10)+i)
	}
	if err := os.WriteFile(tokensFile, []byte(tokens.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dataFile, bytesOf(byte(seed), 4*8192), 0o600); err != nil {
		t.Fatal(err)
	}
}
