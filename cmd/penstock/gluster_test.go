package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

var withGluster = flag.Bool("gluster", false, "run TestGluster, which takes minutes and needs root and GlusterFS")

// gluster is a GlusterFS of three bricks, each on a host of its own (a network and a mount namespace),
// with a volume of three replicas.
type gluster struct {
	*testing.T
	dir string
}

// hosts are the numbers of the hosts with a brick. Host 9 has the mounts.
var glusterHosts = []int{1, 2, 3}

const glusterMountHost = 9

func (g *gluster) namespace(host int) string { return fmt.Sprintf("psgl%d", host) }
func (g *gluster) address(host int) string   { return fmt.Sprintf("10.77.9.%d", host) }

// sh runs a shell command and returns its output.
func (g *gluster) sh(format string, args ...any) string {
	g.Helper()
	script := fmt.Sprintf(format, args...)
	out, err := exec.Command("sh", "-ec", script).CombinedOutput()
	if err != nil {
		g.Fatalf("%s: %v\n%s", script, err, out)
	}
	return string(out)
}

// cli runs a command of gluster on host 1.
func (g *gluster) cli(args string) {
	g.Helper()
	pid, err := os.ReadFile(g.dir + "/1/pid")
	if err != nil {
		g.Fatal(err)
	}
	g.sh("nsenter -t %s -m -n gluster --mode=script %s", strings.TrimSpace(string(pid)), args)
}

// startGluster makes the hosts and the volume v0. The test's cleanup ends them.
func startGluster(t *testing.T) *gluster {
	g := &gluster{t, t.TempDir()}
	hub := g.namespace(0)
	t.Cleanup(func() {
		for _, host := range append([]int{0, glusterMountHost}, glusterHosts...) {
			ns := g.namespace(host)
			_ = exec.Command("sh", "-c", fmt.Sprintf("for p in $(ip netns pids %s); do kill -9 $p; done; ip netns del %s", ns, ns)).Run() // some hosts may not exist
		}
	})
	g.sh("ip netns add %s; ip -n %s link add br0 type bridge; ip -n %s link set br0 up", hub, hub, hub)
	for _, host := range append([]int{glusterMountHost}, glusterHosts...) {
		ns := g.namespace(host)
		g.sh("ip netns add %s; ip -n %s link add v%d type veth peer name eth0 netns %s; ip -n %s link set v%d master br0 up; ip -n %s addr add %s/24 dev eth0; ip -n %s link set eth0 up; ip -n %s link set lo up",
			ns, hub, host, ns, hub, host, ns, g.address(host), ns, ns)
	}
	for _, host := range glusterHosts {
		b := fmt.Sprintf("%s/%d", g.dir, host)
		g.sh("mkdir -p %s/lib %s/log/bricks %s/run/gluster %s/brick", b, b, b, b)
		script := fmt.Sprintf("mount --bind %s/lib /var/lib/glusterd; mount --bind %s/log /var/log/glusterfs; mount --bind %s/run /run; exec glusterd -N", b, b, b)
		cmd := exec.Command("nsenter", "--net=/run/netns/"+g.namespace(host), "unshare", "-m", "--propagation", "private", "sh", "-ec", script)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill() // the test may have killed it
			_ = cmd.Wait()
		})
		if err := os.WriteFile(b+"/pid", []byte(strconv.Itoa(cmd.Process.Pid)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	g.await("glusterd answers on each host", func() bool {
		for _, host := range glusterHosts {
			pid, _ := os.ReadFile(fmt.Sprintf("%s/%d/pid", g.dir, host))
			if exec.Command("nsenter", "-t", string(pid), "-m", "-n", "gluster", "--mode=script", "pool", "list").Run() != nil {
				return false
			}
		}
		return true
	})
	g.cli("peer probe " + g.address(2))
	g.cli("peer probe " + g.address(3))
	var bricks []string
	for _, host := range glusterHosts {
		bricks = append(bricks, fmt.Sprintf("%s:%s/%d/brick", g.address(host), g.dir, host))
	}
	create := "volume create v0 replica 3 " + strings.Join(bricks, " ") + " force"
	g.await("the peers are connected and the volume is made", func() bool {
		pid, _ := os.ReadFile(g.dir + "/1/pid")
		return exec.Command("sh", "-c", fmt.Sprintf("nsenter -t %s -m -n gluster --mode=script %s", pid, create)).Run() == nil
	})
	// docs/shared-storage.md has these options.
	for _, o := range []string{"performance.write-behind off", "performance.quick-read off", "performance.io-cache off", "performance.stat-prefetch off",
		"performance.read-ahead off", "performance.open-behind off", "performance.strict-o-direct on", "network.ping-timeout 3"} {
		g.cli("volume set v0 " + o)
	}
	g.cli("volume start v0")
	return g
}

func (g *gluster) await(what string, ok func() bool) {
	g.Helper()
	awaitTrue(g.T, what, ok)
}

// glusterMount is a mount namespace with a mount of the volume at path, as another host has it.
type glusterMount struct {
	g      *gluster
	path   string
	holder *exec.Cmd
}

// mount mounts the volume at path in a mount namespace of its own.
func (g *gluster) mount(path, server, log string) *glusterMount {
	g.Helper()
	script := fmt.Sprintf("nsenter --net=/run/netns/%s glusterfs --volfile-server=%s --volfile-id=v0 --attribute-timeout=0 --entry-timeout=0 --direct-io-mode=enable -l %s %s; touch %s/mounted; exec sleep infinity",
		g.namespace(glusterMountHost), server, log, path, g.dir)
	if err := os.RemoveAll(g.dir + "/mounted"); err != nil {
		g.Fatal(err)
	}
	m := &glusterMount{g: g, path: path, holder: exec.Command("unshare", "-m", "--propagation", "private", "sh", "-ec", script)}
	if err := m.holder.Start(); err != nil {
		g.Fatal(err)
	}
	g.Cleanup(func() {
		_ = m.holder.Process.Kill() // the mount ends with its namespace
		_ = m.holder.Wait()
	})
	g.await("the volume is mounted", func() bool {
		_, err := os.Stat(g.dir + "/mounted")
		return err == nil
	})
	return m
}

// start starts a node that sees the mount and has the settings more.
func (m *glusterMount) start(name string, more ...string) *process {
	m.g.Helper()
	p, err := cluster.StartProcess(m.g.Context(), cluster.ProcessOptions{
		Name: "node " + name, Args: append(small(""), more...), Env: append(os.Environ(), childEnv),
		Start: func(cmd *exec.Cmd) error {
			nsenter, err := exec.LookPath("nsenter")
			if err != nil {
				return err
			}
			cmd.Args = append([]string{nsenter, "-t", strconv.Itoa(m.holder.Process.Pid), "-m", cmd.Path}, cmd.Args[1:]...)
			cmd.Path = nsenter
			return cmd.Start()
		},
	})
	if err != nil {
		m.g.Fatal(err)
	}
	m.g.Cleanup(func() { _ = p.Kill() }) // the test may have killed it
	return &process{p}
}

// killBrick kills the brick process of a host, and glusterd on it.
func (g *gluster) killBrick(host int) {
	g.Helper()
	g.sh("for p in $(ip netns pids %s); do kill -9 $p; done", g.namespace(host))
}

// glusterLoad writes sequences of one block and reads them back, and compares all bytes.
type glusterLoad struct {
	*testing.T
	store *client.Store
	ns    kv.Namespace

	mu    sync.Mutex
	acked []int // sequences that were stored
	next  atomic.Int64

	writes, hits, misses, wrong atomic.Int64
}

func (l *glusterLoad) tokens(i int) []uint32 { return []uint32{uint32(i), 7, 7, 7} }

func (l *glusterLoad) content(i int) []byte {
	b := make([]byte, l.ns.Geometry.BlockBytes())
	rand.NewChaCha8([32]byte{byte(i), byte(i >> 8), byte(i >> 16), 1}).Read(b)
	return b
}

// TestGluster: two nodes with shared volumes on a GlusterFS of three bricks. Under load one brick is
// killed, then one node. The other node adopts its volumes, and all acknowledged blocks are hits. Then
// a second brick is killed, so that the file system has no quorum, and both are started again: the
// nodes take writes again without a restart. No read returns other bytes than were written.
//
// It takes minutes, so it runs with -gluster (make test-gluster).
func TestGluster(t *testing.T) {
	if !*withGluster {
		t.Skip("this test takes minutes, root and GlusterFS: run make test-gluster")
	}
	for program, from := range map[string]string{"glusterd": "glusterfs-server", "glusterfs": "glusterfs-client", "ip": "iproute2", "nsenter": "util-linux"} {
		testkit.Program(t, program, from)
	}
	etcd := testetcd.Start(t, 1)
	g := startGluster(t)
	path := g.dir + "/shared"
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	first := g.mount(path, g.address(1), g.dir+"/a.log")
	second := g.mount(path, g.address(1), g.dir+"/b.log")
	a := first.start("a", sharedOf(etcd, "a", path+"/a", "--cluster-adopt", "--capacity", "256MiB", "--cluster-lease-ttl", "4s")...)
	b := second.start("b", sharedOf(etcd, "b", path+"/b", "--cluster-adopt", "--capacity", "256MiB", "--cluster-lease-ttl", "4s")...)
	sb := b.client(t)
	awaitTrue(t, "both nodes serve", func() bool { return states(t, sb) == "a:serving b:serving" })
	sb.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "8192").must(t)

	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = engine.Close() })
	store, err := client.Open(t.Context(), client.Options{Servers: []string{sb.ready.Listen}, Discover: true, MembersEvery: 100 * time.Millisecond, DeadFor: 100 * time.Millisecond, Engine: engine})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	ns, err := store.Namespace(t.Context(), "m")
	if err != nil {
		t.Fatal(err)
	}
	l := &glusterLoad{T: t, store: store, ns: ns}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for i := range 4 {
		running.Go(func() { l.run(ctx, i < 2) })
	}
	stopLoad := sync.OnceFunc(func() { stop(); running.Wait() })
	t.Cleanup(stopLoad)
	grow := func(what string, n int64) {
		t.Helper()
		was, since := l.writes.Load(), time.Now()
		awaitTrue(t, what, func() bool { return l.writes.Load() >= was+n })
		t.Logf("%s: %d writes in %v; in all %s", what, n, time.Since(since).Round(time.Millisecond), l)
	}
	grow("load with three bricks", 200)
	g.killBrick(2)
	grow("load with one brick killed", 200)

	onA := l.only(t, engine, a.Ready.Listen)
	killed := time.Now()
	if err := a.Kill(); err != nil {
		t.Fatal(err)
	}
	awaitTrue(t, "the volumes are adopted", func() bool {
		names, _ := adoptedBy(t, sb)
		return slices.Equal(names, []string{"a:2"})
	})
	adopted := time.Since(killed)
	awaitTrue(t, "the adopted node serves", func() bool { return states(t, sb) == "a:serving b:serving" })
	serves := time.Since(killed)
	awaitTrue(t, "the blocks of the dead node are hits", func() bool { return l.count(onA) == len(onA) })
	t.Logf("takeover: volumes adopted %v after the kill, served after %v, all %d blocks of the dead node are hits after %v (lease 4 s)",
		adopted.Round(time.Millisecond), serves.Round(time.Millisecond), len(onA), time.Since(killed).Round(time.Millisecond))
	for line := range strings.Lines(b.Log()) {
		if strings.Contains(line, "adopted the shared volumes") {
			t.Log(line)
		}
	}
	grow("load at the adopter", 200)

	g.killBrick(3)
	awaitTrue(t, "the node takes no writes without a quorum of bricks", func() bool {
		code, body := readiness(t, sb)
		return code != 200 || strings.Contains(body, "read_only") || strings.Contains(body, "failed")
	})
	l.mu.Lock()
	before := len(l.acked)
	l.mu.Unlock()
	for _, host := range []int{2, 3} {
		g.restart(host)
	}
	back := time.Now()
	awaitTrue(t, "the node takes writes again", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.acked) > before+20
	})
	t.Logf("writes go on %v after the bricks are back, without a restart", time.Since(back).Round(time.Millisecond))
	stopLoad()
	t.Logf("in all %s", l)
	if n := l.wrong.Load(); n != 0 {
		t.Errorf("%d reads returned wrong bytes", n)
	}
}

// restart starts the brick of a host that was killed.
func (g *gluster) restart(host int) {
	g.Helper()
	b := fmt.Sprintf("%s/%d", g.dir, host)
	script := fmt.Sprintf("mount --bind %s/lib /var/lib/glusterd; mount --bind %s/log /var/log/glusterfs; mount --bind %s/run /run; exec glusterd -N", b, b, b)
	cmd := exec.Command("nsenter", "--net=/run/netns/"+g.namespace(host), "unshare", "-m", "--propagation", "private", "sh", "-ec", script)
	if err := cmd.Start(); err != nil {
		g.Fatal(err)
	}
	g.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
}

func (l *glusterLoad) String() string {
	return fmt.Sprintf("%d writes, %d hits, %d misses, %d wrong", l.writes.Load(), l.hits.Load(), l.misses.Load(), l.wrong.Load())
}

// run writes or reads until ctx ends.
func (l *glusterLoad) run(ctx context.Context, writes bool) {
	memory, err := l.store.Register(make([]byte, l.ns.Geometry.BlockBytes()))
	if err != nil {
		l.Error(err)
		return
	}
	defer func() { _ = memory.Close(context.Background()) }()
	for ctx.Err() == nil {
		if writes {
			i := int(l.next.Add(1))
			copy(memory.Bytes(), l.content(i))
			w, err := l.store.Write(ctx, client.WriteRequest{Namespace: l.ns, Tokens: l.tokens(i), From: memory})
			if err == nil && w.Stored == 1 {
				l.writes.Add(1)
				l.mu.Lock()
				l.acked = append(l.acked, i)
				l.mu.Unlock()
			}
			continue
		}
		l.mu.Lock()
		i := 0
		if len(l.acked) > 0 {
			i = l.acked[rand.IntN(len(l.acked))]
		}
		l.mu.Unlock()
		if i > 0 {
			l.read(ctx, i, memory)
		}
	}
}

// read reads a sequence, compares the bytes, and reports a hit.
func (l *glusterLoad) read(ctx context.Context, i int, memory *client.Memory) bool {
	m, err := l.store.Match(ctx, client.MatchRequest{Namespace: l.ns, Tokens: l.tokens(i)})
	if err != nil || len(m.IDs) == 0 {
		l.misses.Add(1)
		return false
	}
	clear(memory.Bytes())
	r, err := l.store.Read(ctx, client.ReadRequest{Namespace: l.ns, IDs: m.IDs, Into: memory})
	if err != nil || r.Blocks == 0 {
		l.misses.Add(1)
		return false
	}
	if !bytes.Equal(memory.Bytes(), l.content(i)) {
		l.wrong.Add(1)
		return false
	}
	l.hits.Add(1)
	return true
}

// only returns the stored sequences that lie on the node at an address.
func (l *glusterLoad) only(t *testing.T, engine rdma.Engine, addr string) (found []int) {
	t.Helper()
	alone, err := client.Open(t.Context(), client.Options{Servers: []string{addr}, Engine: engine})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = alone.Close() }()
	l.mu.Lock()
	all := slices.Clone(l.acked)
	l.mu.Unlock()
	for _, i := range all {
		if m, err := alone.Match(t.Context(), client.MatchRequest{Namespace: l.ns, Tokens: l.tokens(i)}); err == nil && m.Blocks == 1 {
			found = append(found, i)
		}
	}
	return found
}

// count returns the number of the sequences that are hits.
func (l *glusterLoad) count(all []int) (n int) {
	memory, err := l.store.Register(make([]byte, l.ns.Geometry.BlockBytes()))
	if err != nil {
		l.Fatal(err)
	}
	defer func() { _ = memory.Close(context.Background()) }()
	for _, i := range all {
		if l.read(l.Context(), i, memory) {
			n++
		}
	}
	return n
}
