package scale

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/placement"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/storage"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// size sets the numbers of members and namespaces, and if it has a third number, the lifetime of the leases in seconds: "1000,100000,60".
const size = "PENSTOCK_SCALE"

// run measures one cluster of a given size.
type run struct {
	*testing.T
	ctx                 context.Context
	members, namespaces int
	ttl                 time.Duration // of the leases
	etcd                *testetcd.Etcd
	seed                *testnode.Node
	admin               pb.AdminClient
	crowd               *storage.Node
	followed            membership.Followed // of crowd
}

// TestCluster brings up a cluster of members and namespaces, and measures it. Without PENSTOCK_SCALE it is small. It
// asserts what each watcher must have at the end, and how many requests idle members make.
func TestCluster(t *testing.T) {
	testkit.Long(t, "fifty members, and five seconds without a change")
	r := &run{T: t, members: 50, namespaces: 1000, ttl: 10 * time.Second} // the default of server/membership
	rounds, idle := 5, r.ttl/2
	limit := 5 * time.Minute
	if text := os.Getenv(size); text != "" {
		seconds := int(r.ttl / time.Second)
		if n, err := fmt.Sscanf(text, "%d,%d,%d", &r.members, &r.namespaces, &seconds); n < 2 || n < 3 && strings.Count(text, ",") > 1 || r.members < 3 || r.namespaces < 1 || seconds < 2 {
			t.Fatalf("%s=%q: %v; want MEMBERS,NAMESPACES or MEMBERS,NAMESPACES,SECONDS, with 3 members and 2 seconds at least", size, text, err)
		}
		r.ttl = time.Duration(seconds) * time.Second
		rounds, idle, limit = 50, 3*r.ttl, time.Hour
		if r.members >= 500 {
			rounds = 10 // each takes seconds on two processors
		}
	}
	var cancel context.CancelFunc
	r.ctx, cancel = context.WithTimeout(context.Background(), limit)
	defer cancel()
	testkit.VerifyNone(t)
	r.etcd = testetcd.Start(t, 1)
	r.row("members, namespaces, lifetime of the leases", "%d, %d, %v", r.members, r.namespaces, r.ttl)

	r.seed = testnode.Start(t, testnode.Options{Name: "seed", Etcd: r.etcd.Endpoints, LeaseTTL: r.ttl})
	conn, err := client.Dial(r.seed.Addr, client.DialOptions{Timeout: time.Minute})
	r.must(err)
	defer conn.Close()
	r.admin = pb.NewAdminClient(conn)
	r.crowd = testnode.Storage(r)
	// A creation with all members costs etcd an event and a put for each member, so most namespaces are there before the members.
	early := max(0, r.namespaces-max(10, 50_000/r.members))
	r.create(0, early, 1)
	r.joinCrowd()
	r.create(early, r.namespaces, r.members-1)
	watcher := r.joinLast()
	r.discover()
	r.latencies(watcher, rounds)
	r.idle(idle)
	r.row("etcd: memory of the process", "%.0f MiB", r.gauge("process_resident_memory_bytes")/(1<<20))
	r.row("etcd: size of the database", "%.1f MiB", r.gauge("etcd_mvcc_db_total_size_in_use_in_bytes")/(1<<20))
}

func (r *run) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *run) row(what, format string, args ...any) {
	r.Helper()
	r.Logf("| %s | %s |", what, fmt.Sprintf(format, args...))
}

// join makes a storage a member. The caller waits for Joined. followed is what the memberships of the storage share, nil if it has
// one.
func (r *run) join(name string, node *storage.Node, followed *membership.Followed) *membership.Cluster {
	r.Helper()
	c, err := membership.Join(membership.Options{
		Endpoints: r.etcd.Endpoints, TTL: r.ttl, Node: node, Followed: followed,
		Member: membership.Member{Name: name, Addr: "192.0.2.1:7420", Store: name, Zone: "rack", Version: "v0"},
		Usage:  func() membership.Usage { return membership.Usage{CapacityBytes: 4 << 40, UsedBytes: 1 << 40} },
	})
	r.must(err)
	return c
}

// leave ends memberships. Their leases are revoked.
func (r *run) leave(all ...*membership.Cluster) {
	var g errgroup.Group
	for _, c := range all {
		g.Go(func() error {
			within, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			return c.Close(within)
		})
	}
	if err := g.Wait(); err != nil {
		r.Error(err)
	}
}

func (r *run) joined(c *membership.Cluster) {
	r.Helper()
	select {
	case <-c.Joined():
	case <-r.ctx.Done():
		r.Fatal("a member has not joined")
	}
}

// joinCrowd makes all members but the seed and the last one join: the first of them reads the namespaces, and the others then join,
// several at a time if there are many namespaces, because etcd examines all of them for each member.
func (r *run) joinCrowd() {
	start, all := time.Now(), make([]*membership.Cluster, r.members-2)
	all[0] = r.join(crowdName(0), r.crowd, &r.followed)
	r.joined(all[0])
	r.row("the first member of the crowd has joined", "%v", time.Since(start).Round(time.Millisecond))
	r.Cleanup(func() { r.leave(slices.DeleteFunc(all, func(c *membership.Cluster) bool { return c == nil })...) })
	if r.members == 3 {
		return
	}
	parallel := max(1, min(r.members, 300_000/r.namespaces))
	heap, sent, start := heapOf(), r.requests(), time.Now()
	var g errgroup.Group
	g.SetLimit(parallel)
	for i := 1; i < len(all); i++ {
		g.Go(func() error {
			all[i] = r.join(crowdName(i), r.crowd, &r.followed)
			select {
			case <-all[i].Joined():
				return nil
			case <-r.ctx.Done():
				return fmt.Errorf("%s has not joined", crowdName(i))
			}
		})
	}
	r.must(g.Wait())
	took, n := time.Since(start), float64(len(all)-1)
	r.row(fmt.Sprintf("the other members have joined, %d at a time", parallel), "%v", took.Round(time.Millisecond))
	r.row("etcd: requests for a member that joins", "%.1f", (r.requests()-sent)/n)
	r.row("memory of a membership with its connection", "%.0f KiB", (heapOf()-heap)/n/1024)
}

func crowdName(i int) string { return fmt.Sprintf("node-%04d", i) }

// heapOf returns the size of the live heap.
func heapOf() float64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

func name(i int) string { return fmt.Sprintf("tenant-%03d/model-%06d", i%500, i) }

// create makes the namespaces [from, to) through the seed while the cluster has a number of members. It makes several at a time:
// 64, fewer with many members, because etcd and all members share the processors of one machine.
func (r *run) create(from, to, members int) {
	if from == to {
		return
	}
	parallel := max(1, min(64, 2_000/members))
	start, sent, puts := time.Now(), r.requests(), r.gauge("etcd_debugging_mvcc_put_total")
	g, ctx := errgroup.WithContext(r.ctx)
	g.SetLimit(parallel)
	for i := from; i < to; i++ {
		g.Go(func() error { return r.createOne(ctx, name(i)) })
	}
	r.must(g.Wait())
	took, n := time.Since(start), float64(to-from)
	r.row(fmt.Sprintf("%d namespaces created, %d at a time, each applied by all %d members", to-from, parallel, members), "%.1f/s", n/took.Seconds())
	r.row("etcd: requests for a namespace", "%.1f", (r.requests()-sent)/n)
	r.row("etcd: puts for a namespace", "%.1f", (r.gauge("etcd_debugging_mvcc_put_total")-puts)/n)
}

func (r *run) createOne(ctx context.Context, name string) error {
	def := kv.Namespace{Name: name, Tenant: "tenant", Geometry: kv.SingleGroup(61, 16, 656), Epoch: 1, Index: kv.IndexTrie}
	_, err := r.admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(def)})
	return err
}

// joinLast joins a storage that has no namespaces yet, and measures its list.
func (r *run) joinLast() *storage.Node {
	node := testnode.Storage(r)
	before, start := heapOf(), time.Now()
	c := r.join("watcher", node, nil)
	r.Cleanup(func() { r.leave(c) })
	r.joined(c)
	took := time.Since(start)
	if n := len(node.Namespaces()); n != r.namespaces {
		r.Errorf("a node that has joined has %d namespaces; want %d", n, r.namespaces)
	}
	r.row("a node that joins has all namespaces after", "%v", took.Round(time.Millisecond))
	after := heapOf()
	c2 := r.join("beside", node, nil)
	r.joined(c2)
	if r.namespaces >= 10_000 { // fewer take less than the heap of the other members varies
		r.row("memory of a node for a namespace without blocks", "%.0f B", (after-before)/float64(r.namespaces))
	}
	if r.namespaces >= 10_000*max(1, r.members/100) {
		r.row("of that, of its membership", "%.0f B", (heapOf()-after)/float64(r.namespaces))
	}
	r.leave(c2)
	return node
}

// discover opens a client that has the list of members from the seed.
func (r *run) discover() {
	engine, err := tcp.New(r.ctx, tcp.Options{})
	r.must(err)
	defer engine.Close()
	start := time.Now()
	store, err := client.Open(r.ctx, client.Options{Servers: []string{r.seed.Addr}, Discover: true, Engine: engine})
	r.must(err)
	defer store.Close()
	took := time.Since(start)
	list, err := r.admin.ListMembers(r.ctx, &pb.ListMembersRequest{})
	r.must(err)
	if n := len(list.GetMembers()); n != r.members {
		r.Errorf("the list has %d members; want %d", n, r.members)
	}
	r.row("a client with Discover has all members after", "%v", took.Round(100*time.Microsecond))
	var calls []time.Duration
	for range 50 {
		start := time.Now()
		_, err := r.admin.ListMembers(r.ctx, &pb.ListMembersRequest{})
		r.must(err)
		calls = append(calls, time.Since(start))
	}
	r.quantiles("one reading of the list of members through a node", calls)
	r.place(list.GetMembers())
}

// place measures the choice of the nodes of a sequence from the list of members, as a client makes it.
func (r *run) place(members []*pb.Member) {
	places := make([]placement.Place, len(members))
	for i, m := range members {
		places[i] = placement.Place{Seed: placement.PlaceSeed(m.GetName()), Capacity: m.GetCapacityBytes(), Used: m.GetUsedBytes(), Zone: m.GetZone()}
	}
	const sequences = 10_000
	homes := make(map[int]bool)
	var room []int
	start := time.Now()
	for i := range sequences {
		var root kv.BlockID
		binary.LittleEndian.PutUint64(root[:], uint64(i))
		room = placement.Homes(room[:0], places, root, 1)
		homes[room[0]] = true
	}
	r.row("the place of a sequence, from that list", "%.2fµs", float64(time.Since(start).Nanoseconds())/sequences/1000)
	if len(homes) < len(places)/2 {
		r.Errorf("%d sequences are on %d of %d members", sequences, len(homes), len(places))
	}
}

// await polls until f holds.
func (r *run) await(f func() bool) {
	r.Helper()
	tick := time.NewTicker(200 * time.Microsecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-tick.C:
		case <-r.ctx.Done():
			r.Fatal("a change has not arrived")
		}
	}
}

// latencies measures the time from the call of a change to its arrival at another node, and to its end, when all
// members have applied it.
func (r *run) latencies(watcher *storage.Node, rounds int) {
	var creationSeen, creationDone, bumpSeen, bumpDone, joins []time.Duration
	change := func(call func() error, arrived func() bool) (seen, done time.Duration) {
		start := time.Now()
		ended := make(chan error, 1)
		go func() {
			err := call()
			done = time.Since(start)
			ended <- err
		}()
		r.await(arrived)
		seen = time.Since(start)
		r.must(<-ended)
		return seen, done
	}
	for i := range rounds {
		made := fmt.Sprint("late/", i)
		seen, done := change(func() error { return r.createOne(r.ctx, made) }, func() bool { _, err := watcher.Namespace(made); return err == nil })
		creationSeen, creationDone = append(creationSeen, seen), append(creationDone, done)
		bumped := name(i % r.namespaces)
		was, err := watcher.Namespace(bumped)
		r.must(err)
		seen, done = change(func() error {
			_, err := r.admin.BumpEpoch(r.ctx, &pb.BumpEpochRequest{Name: bumped})
			return err
		}, func() bool { ns, err := watcher.Namespace(bumped); return err == nil && ns.Epoch > was.Epoch })
		bumpSeen, bumpDone = append(bumpSeen, seen), append(bumpDone, done)
	}
	for i := range min(rounds, 20) {
		start := time.Now()
		c := r.join(fmt.Sprint("late-", i), r.crowd, &r.followed)
		r.joined(c)
		joins = append(joins, time.Since(start))
		r.leave(c)
	}
	r.quantiles("a creation arrives at another node", creationSeen)
	r.quantiles("a creation ends: all members have applied it", creationDone)
	r.quantiles("an epoch bump arrives at another node", bumpSeen)
	r.quantiles("an epoch bump ends: no member serves the old epoch", bumpDone)
	r.quantiles("a member that has the namespaces joins: it is in the list", joins)
}

func (r *run) quantiles(what string, all []time.Duration) {
	slices.Sort(all)
	unit := 10 * time.Microsecond
	r.row(what+" (median, p99)", "%v, %v", all[len(all)/2].Round(unit), all[(len(all)*99+99)/100-1].Round(unit))
}

// idle measures what the members cost etcd while nothing changes.
func (r *run) idle(window time.Duration) {
	sent, kept, start := r.requests(), r.gauge(`grpc_server_msg_received_total{grpc_method="LeaseKeepAlive"`), time.Now()
	<-time.After(window)
	took := time.Since(start).Seconds()
	renewals := (r.gauge(`grpc_server_msg_received_total{grpc_method="LeaseKeepAlive"`) - kept) / took
	rate := (r.requests() - sent) / took
	r.row("etcd: leases renewed while idle", "%.0f/s", renewals)
	r.row("etcd: requests while idle, renewals included", "%.0f/s", rate)
	// Each member renews its lease and checks its record once in a quarter of the TTL. Two more rounds may fall
	// into the window.
	if most := 2 * float64(r.members) * (took/(r.ttl.Seconds()/4) + 2); rate*took > most {
		r.Errorf("%d idle members make %.0f requests in %.1f s; want at most %.0f", r.members, rate*took, took, most)
	}
}

// requests returns the number of requests that etcd has got.
func (r *run) requests() float64 { return r.gauge("grpc_server_msg_received_total") }

// gauge returns the sum of the series of etcd's metrics that begin with prefix.
func (r *run) gauge(prefix string) (sum float64) {
	r.Helper()
	req, err := http.NewRequestWithContext(r.ctx, http.MethodGet, "http://"+r.etcd.Endpoints[0]+"/metrics", nil)
	r.must(err)
	resp, err := http.DefaultClient.Do(req)
	r.must(err)
	defer resp.Body.Close()
	found := false
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if !strings.HasPrefix(lines.Text(), prefix) {
			continue
		}
		at := strings.LastIndexByte(lines.Text(), ' ')
		v, err := strconv.ParseFloat(lines.Text()[at+1:], 64)
		r.must(err)
		sum, found = sum+v, true
	}
	if !found {
		r.Fatalf("etcd has no metric %s", prefix)
	}
	return sum
}
