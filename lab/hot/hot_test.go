package hot

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/content"
	"github.com/penstock-kv/penstock/lab/netlab"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

var (
	hotBinary  = flag.String("hot.binary", "", "the program penstock that TestHot runs; empty: it is built")
	hotRounds  = flag.Int("hot.rounds", 0, "number of turns of each cluster in TestHot; 0: the test is skipped")
	hotSeconds = flag.Float64("hot.seconds", 3, "duration of a turn of TestHot, in seconds")
	hotMbits   = flag.Uint64("hot.mbits", 100, "rate of a node's link in TestHot, in Mbit/s")
	// seeds is set in the process of the clients: the addresses of one node of each cluster.
	seeds = flag.String("hot.seeds", "", "for TestHot's own use")
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	nodes = 3
	// blocks is the length of the prefix, 2 MiB.
	blocks = 32
	// clients is the largest number of clients that read at a time.
	clients = 12
	// limit is the longest wait for one event.
	limit = time.Minute
)

var geometry = kv.SingleGroup(4, 4, 4096) // 64 KiB a block

// copies are the values of cluster.hot_copies of the clusters. 0: no prefix is hot.
var copies = []int{0, 1, 2}

// TestHot reads one prefix in three clusters by turns, and compares every byte. Clusters with copies deliver a part
// of the reads from their copies.
func TestHot(t *testing.T) {
	if *seeds != "" {
		measure(t)
		return
	}
	if *hotRounds == 0 {
		t.Skip("-hot.rounds is 0: this measurement takes minutes and no test depends on it; run make bench-hot")
	}
	testkit.VerifyNone(t)
	etcd := testkit.Program(t, "etcd", "etcd-server")
	lab := netlab.ForTest(t)
	binary := *hotBinary
	if binary == "" {
		binary = testkit.BuildPenstock(t)
	}
	network, err := lab.Switch("network")
	must(t, err)
	attach := func(name string, rate uint64) (*netlab.Namespace, string) {
		n, err := lab.Namespace(name)
		must(t, err)
		link, err := network.Attach(n, netlab.LinkOptions{RateBits: rate})
		must(t, err)
		return n, link.A.IP().String()
	}
	dir := t.TempDir()
	apart, ip := attach("clients", 0)
	// The data of etcd is in memory: it syncs each write.
	memory, err := os.MkdirTemp("/dev/shm", "penstock-etcd-")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(memory)) })
	endpoint := net.JoinHostPort(ip, "2379")
	start(t, apart, filepath.Join(dir, "etcd.log"), etcd, "--data-dir", memory, "--listen-client-urls", "http://"+endpoint, "--advertise-client-urls", "http://"+endpoint, "--logger", "zap")
	var first []string
	for i := range nodes {
		n, ip := attach(fmt.Sprintf("node %d", i+1), *hotMbits*1_000_000)
		for k, c := range copies {
			name := fmt.Sprintf("n%d-%d", i+1, c)
			args := []string{
				"serve", "--node", name, "--data", filepath.Join(dir, name), "--capacity", "128MiB", "--segment", "8MiB", "--arena", "48MiB", "--index-cache", "8MiB",
				"--free-floor", "0", "--prewrite=false", "--scrub-rate", "0", "--http", "", "--insecure", "--advertise", ip,
				"--listen", net.JoinHostPort(ip, strconv.Itoa(7420+10*k)), "--data-listen", net.JoinHostPort(ip, strconv.Itoa(7421+10*k)),
				"--cluster-etcd", endpoint, "--cluster-prefix", fmt.Sprintf("/copies-%d", c), "--cluster-lease-ttl", "60s",
			}
			if c > 0 {
				args = append(args, "--cluster-hot-matches", "1", "--cluster-hot-copies", strconv.Itoa(c))
			}
			start(t, n, filepath.Join(dir, name+".log"), binary, args...)
			if i == 0 {
				first = append(first, net.JoinHostPort(ip, strconv.Itoa(7420+10*k)))
			}
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			logs, err := filepath.Glob(filepath.Join(dir, "*.log"))
			must(t, err)
			for _, path := range logs {
				text, err := os.ReadFile(path)
				must(t, err)
				t.Logf("%s, its end:\n%s", filepath.Base(path), text[max(0, len(text)-2048):])
			}
		}
	})
	cmd := exec.Command(os.Args[0], "-test.run=^TestHot$", "-test.v", fmt.Sprintf("-hot.rounds=%d", *hotRounds), fmt.Sprintf("-hot.seconds=%v", *hotSeconds), fmt.Sprintf("-hot.mbits=%d", *hotMbits), "-hot.seeds="+strings.Join(first, ","))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	must(t, apart.Start(cmd))
	err = cmd.Wait()
	t.Logf("%s", &out)
	if err != nil {
		t.Fatalf("the clients: %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// start starts a process in a namespace, and kills it when the test ends.
func start(t *testing.T, n *netlab.Namespace, log, program string, args ...string) {
	t.Helper()
	file, err := os.Create(log)
	must(t, err)
	defer file.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = file, file
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "PENSTOCK_") })
	must(t, n.Start(cmd))
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // it was killed
	})
}

// reader is a client of one cluster, with memory for the prefix.
type reader struct {
	store  *client.Store
	memory *client.Memory
	ns     kv.Namespace
	ids    []kv.BlockID
}

// cluster is one cluster in the process of the clients. read is the payload that its clients have read.
type cluster struct {
	t       *testing.T
	copies  int
	admins  []pb.AdminClient
	readers []*reader
	read    atomic.Int64
}

// measure is the process of the clients.
func measure(t *testing.T) {
	var all []*cluster
	for i, addr := range strings.Split(*seeds, ",") {
		c := connect(t, addr, copies[i])
		c.heat()
		all = append(all, c)
	}
	report := bench.Report{Suite: "hot", Setup: []string{fmt.Sprintf("%d nodes with links of %d Mbit/s; turns of %v s", nodes, *hotMbits, *hotSeconds)}}
	for _, readers := range []int{4, clients} {
		var contenders []bench.Contender
		var measures []bench.Measure
		for _, c := range all {
			contenders = append(contenders, bench.Contender{Name: c.name(), Turn: func(ctx context.Context) (bench.Sample, error) { return c.turn(ctx, readers) }})
			if c.copies > 0 {
				measures = append(measures, bench.Ratio(c.name()+" / "+all[0].name(), bench.Rate, c.name(), all[0].name(), bench.Target{}))
			}
		}
		result, err := bench.Run(t.Context(), bench.Comparison{
			Name: fmt.Sprintf("%d clients read a prefix of 2 MiB", readers), Unit: "MiB/s", Contenders: contenders, Measures: measures,
		}, bench.RunOptions{Rounds: *hotRounds, Warmup: 1, Rand: rand.New(rand.NewPCG(1, 2))})
		must(t, err)
		for _, m := range result.NotRun {
			t.Errorf("%s: %s", m.What, m.Why)
		}
		report.Results = append(report.Results, result)
	}
	fmt.Println(report.Markdown())
}

func (c *cluster) name() string {
	if c.copies == 0 {
		return "no copies"
	}
	return fmt.Sprintf("hot_copies %d", c.copies)
}

// await waits until the condition holds.
func (c *cluster) await(what string, ok func() bool) {
	c.t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(limit); !ok(); {
		select {
		case <-tick.C:
		case <-deadline:
			c.t.Fatalf("%s: not reached: %s", c.name(), what)
		}
	}
}

// connect waits for a cluster, creates the namespace, opens the clients, and stores the prefix.
func connect(t *testing.T, addr string, copies int) *cluster {
	t.Helper()
	c := &cluster{t: t, copies: copies}
	dial := func(addr string) pb.AdminClient {
		conn, err := client.Dial(addr, client.DialOptions{})
		must(t, err)
		t.Cleanup(func() { must(t, conn.Close()) })
		return pb.NewAdminClient(conn)
	}
	first := dial(addr)
	var list *pb.ListMembersResponse
	c.await("all nodes serve", func() bool {
		var err error
		list, err = first.ListMembers(t.Context(), &pb.ListMembersRequest{})
		return err == nil && len(list.GetMembers()) == nodes && !slices.ContainsFunc(list.GetMembers(), func(m *pb.Member) bool { return m.GetState() != "serving" })
	})
	for _, m := range list.GetMembers() {
		c.admins = append(c.admins, dial(m.GetAddr()))
	}
	def := kv.Namespace{Name: "m", Geometry: geometry}
	_, err := first.CreateNamespace(t.Context(), &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(def)})
	must(t, err)
	for range clients {
		engine, err := tcp.New(t.Context(), tcp.Options{})
		must(t, err)
		r := new(reader)
		r.store, err = client.Open(t.Context(), client.Options{Servers: []string{addr}, Discover: true, Engine: engine, NoLocal: true})
		must(t, err)
		t.Cleanup(func() { must(t, errors.Join(r.store.Close(), engine.Close())) })
		r.memory, err = r.store.Register(make([]byte, blocks*geometry.BlockBytes()))
		must(t, err)
		t.Cleanup(func() { must(t, r.memory.Close(context.Background())) })
		c.readers = append(c.readers, r)
		r.ns, err = r.store.Namespace(t.Context(), def.Name)
		must(t, err)
		chain, err := r.ns.Chain()
		must(t, err)
		tokens := make([]kv.Token, blocks*geometry.BlockTokens)
		for i := range tokens {
			tokens[i] = kv.Token(i)
		}
		r.ids, _ = chain.Append(nil, tokens)
	}
	w := c.readers[0]
	for b, id := range w.ids {
		content.Of(id, w.ns.Epoch).Fill(w.block(b))
	}
	res, err := w.store.Write(t.Context(), client.WriteRequest{Namespace: w.ns, IDs: w.ids, From: w.memory})
	must(t, err)
	if res.Stored != blocks {
		t.Fatalf("%d of %d blocks are stored", res.Stored, blocks)
	}
	return c
}

func (r *reader) block(b int) []byte {
	return r.memory.Bytes()[int64(b)*geometry.BlockBytes():][:geometry.BlockBytes()]
}

// use matches the prefix and reads it, as an engine does. It returns an error unless every byte is right.
func (r *reader) use(ctx context.Context) error {
	if _, err := r.store.Match(ctx, client.MatchRequest{Namespace: r.ns, IDs: r.ids}); err != nil {
		return err
	}
	clear(r.memory.Bytes())
	res, err := r.store.Read(ctx, client.ReadRequest{Namespace: r.ns, IDs: r.ids, Into: r.memory})
	if err != nil {
		return err
	}
	if res.Blocks != blocks {
		return fmt.Errorf("a read found %d of %d blocks: %v, %v", res.Blocks, blocks, res.Outcome, res.Cut)
	}
	for b, id := range r.ids {
		if content.Of(id, r.ns.Epoch).Differs(r.block(b)) >= 0 {
			return fmt.Errorf("wrong bytes in block %d", b)
		}
	}
	return nil
}

// delivered returns the payload that each node has delivered.
func (c *cluster) delivered() (all []uint64) {
	for _, a := range c.admins {
		s, err := a.Status(c.t.Context(), &pb.StatusRequest{})
		must(c.t, err)
		all = append(all, s.GetCounters().GetReadBytes())
	}
	return all
}

// heat reads the prefix until the home and the nodes with copies have delivered it.
func (c *cluster) heat() {
	before := c.delivered()
	c.await("copies are read", func() bool {
		for _, r := range c.readers[:4] {
			must(c.t, r.use(c.t.Context()))
		}
		n := 0
		for i, bytes := range c.delivered() {
			if bytes > before[i] {
				n++
			}
		}
		return n == 1+c.copies
	})
}

// turn starts the given number of clients, which read the prefix for hot.seconds, and returns the payload of all in MiB per second.
func (c *cluster) turn(ctx context.Context, readers int) (bench.Sample, error) {
	c.read.Store(0)
	var g errgroup.Group
	began := time.Now()
	for _, r := range c.readers[:readers] {
		g.Go(func() error {
			for time.Since(began).Seconds() < *hotSeconds {
				if err := r.use(ctx); err != nil {
					return err
				}
				c.read.Add(blocks * geometry.BlockBytes())
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return bench.Sample{bench.Rate: float64(c.read.Load()) / (1 << 20) / time.Since(began).Seconds()}, nil
}
