package rounds

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
)

var (
	roundsSeed   = flag.Uint64("rounds.seed", 1, "seed of TestRounds")
	roundsCount  = flag.Int("rounds.count", 6, "number of rounds of TestRounds")
	roundsFaults = flag.String("rounds.faults", "", "regular expression of the faults that TestRounds makes; empty: all")
	roundsSettle = flag.Int("rounds.settle", proof, "number of hits in each namespace that TestRounds awaits at the start and after each fault")
	roundsOut    = flag.String("rounds.out", "", "directory for the table and the pictures of TestRounds; empty: they are not written")
	roundsBinary = flag.String("rounds.binary", "", "the program penstock that TestRounds runs; empty: it is built")
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	// limit is the longest wait for one event.
	limit = time.Minute
	// proof is the number of hits in each namespace that show that it is served.
	proof = 6
	// fewest and most are the numbers of nodes.
	fewest, most = 3, 5
)

// cluster is the cluster under test.
type cluster struct {
	t      *testing.T
	binary string
	dir    string
	etcd   *testetcd.Etcd
	rng    *rand.Rand
	load   *load
	made   int // nodes
	began  time.Time
	events []string

	planners []*planner
	requests *requests

	// mu guards the changes of nodes, and turn, the number of calls of next. The test's goroutine reads
	// nodes without it.
	mu    sync.Mutex
	nodes []*node
	turn  int
}

// TestRounds makes one fault after the other in a cluster under load. No read returns wrong bytes, no
// call returns an epoch after it has ended, the sequences of the other nodes are found during a fault,
// and the sequences of all nodes after it.
func TestRounds(t *testing.T) {
	testkit.Long(t, "each fault lasts longer than a lease")
	binary := *roundsBinary
	if binary == "" {
		binary = testkit.BuildPenstock(t)
	}
	c := &cluster{t: t, binary: binary, dir: t.TempDir(), etcd: testetcd.Start(t, 3), rng: rand.New(rand.NewPCG(*roundsSeed, 0x5EED)), began: time.Now()}
	t.Cleanup(func() {
		if t.Failed() {
			c.explain()
		}
	})
	for range fewest {
		c.add()
	}
	c.awaitMembers()
	c.load = &load{t: t, through: c.next, spaces: []*space{
		{name: "one", replicas: 1, sequences: 48},
		{name: "two", replicas: 2, sequences: 48},
		// Few, so that engines read most of them again within an epoch.
		{name: "bumped", replicas: 2, sequences: 12},
	}}
	for _, s := range c.load.spaces {
		c.create(s)
	}
	ctx, end := context.WithCancel(context.Background())
	t.Cleanup(c.load.close)
	t.Cleanup(end)
	var seeds []string
	for _, n := range c.nodes {
		seeds = append(seeds, n.advertised)
	}
	c.load.start(ctx, *roundsSeed, seeds, c.await)
	c.began = c.load.began
	var addrs []string
	for i := range 2 {
		p := newPlanner(t, binary, c.dir, fmt.Sprintf("p%d", i+1), c.etcd.Endpoints)
		c.planners, addrs = append(c.planners, p), append(addrs, p.addr)
	}
	c.requests = c.load.startRequests(*roundsSeed, seeds, strings.Join(addrs, ","))
	c.leads(0)
	c.planned("at the start")
	c.grow("hits at the start", hit, int64(*roundsSettle), c.load.spaces...)
	r := &report{dir: *roundsOut, load: c.load}
	for i, f := range c.faults(*roundsCount) {
		c.round(i, f, r)
	}
	end()
	c.load.close()
	c.load.closers = nil
	for _, p := range c.processes() {
		if err := p.stop(); err != nil {
			t.Error(err)
		}
	}
	t.Logf("seed %d, %d rounds in %v: %d blocks compared, %d wrong; %d epochs, %d requests of old or newest epochs, %d answers of an old epoch\n%v\n%s",
		*roundsSeed, *roundsCount, time.Since(c.began).Round(time.Second), c.load.blocks.Load(), c.load.wrong.Load(), c.load.bumps.Load(), c.load.tooOld.Load(), c.load.old.Load(), c.requests, r.table())
	if err := r.write(*roundsSeed, c.events); err != nil {
		t.Error(err)
	}
	c.sound()
	if c.load.tooOld.Load() == 0 {
		t.Error("no request of an old epoch was made")
	}
}

// explain logs the command that repeats the faults, the events, the violations, and the ends of the nodes' logs.
func (c *cluster) explain() {
	c.t.Logf("go test ./lab/rounds -run TestRounds -rounds.seed=%d -rounds.count=%d -rounds.faults=%q\n%s", *roundsSeed, *roundsCount, *roundsFaults, strings.Join(c.events, "\n"))
	if c.load != nil {
		c.t.Logf("violations:\n%s", strings.Join(c.load.violations(), "\n"))
	}
	for _, p := range c.processes() {
		log, err := os.ReadFile(p.logFile)
		if err != nil {
			c.t.Log(err)
		}
		c.t.Logf("log of %s, its end:\n%s", p.name, log[max(0, len(log)-4096):])
	}
}

// processes returns the nodes and the planners.
func (c *cluster) processes() (all []*process) {
	for _, n := range c.nodes {
		all = append(all, &n.process)
	}
	for _, p := range c.planners {
		all = append(all, &p.process)
	}
	return all
}

// event records a step of a round.
func (c *cluster) event(format string, args ...any) {
	c.events = append(c.events, fmt.Sprintf("%7.2f s  ", time.Since(c.began).Seconds())+fmt.Sprintf(format, args...))
}

// await waits until the condition holds.
func (c *cluster) await(what string, ok func() bool) {
	c.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			c.event("NOT REACHED within %v: %s", limit, what)
			var stacks strings.Builder
			if err := pprof.Lookup("goroutine").WriteTo(&stacks, 1); err != nil {
				c.t.Error(err)
			}
			c.t.Fatalf("not reached: %s\n%s", what, &stacks)
		}
		for _, p := range c.processes() {
			if !p.down && !p.running() {
				c.t.Fatalf("%s has ended: %v", p.name, p.err)
			}
		}
		c.sound()
	}
	c.event("%s", what)
}

// sound fails the test if a guarantee was violated.
func (c *cluster) sound() {
	c.t.Helper()
	if c.load != nil && len(c.load.violations()) > 0 {
		c.t.Fatalf("%d wrong blocks, %d answers of an old epoch, or lost requests or unexpected errors", c.load.wrong.Load(), c.load.old.Load())
	}
}

// add starts a new node.
func (c *cluster) add() *node {
	c.t.Helper()
	c.made++
	n := newNode(c.t, c.binary, filepath.Join(c.dir, fmt.Sprintf("n%d", c.made)), c.etcd.Endpoints)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes = append(c.nodes, n)
	return n
}

// next returns the running nodes in turn. A stopped node would let a call wait for its deadline.
func (c *cluster) next() *node {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		c.turn++
		if n := c.nodes[c.turn%len(c.nodes)]; !n.stopped {
			return n
		}
	}
}

// other returns a node other than n.
func (c *cluster) other(n *node) *node {
	return c.nodes[(slices.Index(c.nodes, n)+1)%len(c.nodes)]
}

// awaitMembers waits until each node's list has all nodes, and all of them serve.
func (c *cluster) awaitMembers() {
	c.t.Helper()
	want := make(map[string]string)
	for _, n := range c.nodes {
		want[n.name] = "serving"
	}
	c.await("all nodes serve", func() bool {
		for _, n := range c.nodes {
			if !maps.Equal(n.states(), want) || c.load != nil && !n.serves(c.load.spaces[0].name) {
				return false
			}
		}
		return true
	})
}

// create creates a namespace.
func (c *cluster) create(s *space) {
	c.t.Helper()
	def := api.NamespaceProto(kv.Namespace{Name: s.name, Geometry: geometry, Replicas: s.replicas})
	c.await("namespace "+s.name+" exists", func() bool {
		return c.nodes[0].admin(context.Background(), 3*leaseTTL, func(ctx context.Context, admin pb.AdminClient) error {
			_, err := admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: def})
			return err
		}) == nil
	})
}

// served waits until reads find whole sequences in each of the namespaces.
func (c *cluster) served(when string, spaces ...*space) {
	c.t.Helper()
	c.grow("hits "+when, hit, proof, spaces...)
}

// grow waits until each namespace has n more calls of one outcome.
func (c *cluster) grow(what string, o outcome, n int64, spaces ...*space) {
	c.t.Helper()
	before := make([]int64, len(spaces))
	for i, s := range spaces {
		before[i] = s.tally()[o]
	}
	c.await(what, func() bool {
		for i, s := range spaces {
			if s.tally()[o] < before[i]+n {
				return false
			}
		}
		return true
	})
}

// surfaced waits until calls report the fault.
func (c *cluster) surfaced() {
	c.t.Helper()
	count := func() (n int64) {
		for _, s := range c.load.spaces {
			n += s.tally().surfaced()
		}
		return n
	}
	before := count()
	c.await("calls report the fault", func() bool { return count() > before })
}

// bumped waits until another bump has succeeded.
func (c *cluster) bumped(when string) {
	c.t.Helper()
	before := c.load.bumps.Load()
	c.await("an epoch begins "+when, func() bool { return c.load.bumps.Load() > before })
}

// gone waits until a node has left the list of members.
func (c *cluster) gone(n *node) {
	c.t.Helper()
	c.await("the lease of "+n.name+" has ended", func() bool {
		states := c.other(n).states()
		return states != nil && states[n.name] == ""
	})
}

// round makes a fault and repairs it. Then all nodes serve, epochs begin, and reads find whole sequences
// in all namespaces.
func (c *cluster) round(i int, f fault, r *report) {
	c.t.Helper()
	before := make([]tally, len(c.load.spaces))
	for k, s := range c.load.spaces {
		before[k] = s.tally()
	}
	began := time.Since(c.load.began)
	c.event("round %d: %s", i+1, f.name)
	detail := f.do(c)
	c.awaitMembers()
	c.bumped("after the fault")
	c.leads(0)
	c.planned("after the fault")
	c.grow("hits after the fault", hit, int64(*roundsSettle), c.load.spaces...)
	r.add(f.name, detail, began, time.Since(c.load.began), before)
}
