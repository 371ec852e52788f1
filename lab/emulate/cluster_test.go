package emulate

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/batch"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/lab/testplanner"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server/planner"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// geo has Full Blocks of 16 KiB: 4 layers of 16 tokens of 256 bytes.
var geo = kv.SingleGroup(4, 16, 256)

var model = Model{Layers: 4, Attention: batch.Model{PerToken: 1e-7}, Linear: 1e-7, PerRequest: time.Microsecond}

// cluster is a storage node, a planner, groups of one engine each, and a gateway.
type cluster struct {
	t       *testing.T
	storage *testnode.Node
	conn    *grpc.ClientConn
	engines []*Engine
	gateway *Gateway
	// restart replaces the planner by a new planner without state.
	restart func()
	// record, if set, records the events of the first planner.
	record *planner.Record
	// copier, if set, makes the copier of each engine.
	copier func() copier.Copier
	// wrap, if set, wraps the sockets of the prefill engines' storage NICs.
	wrap func(net.Conn) net.Conn
	// buffer, if set, is the size of each engine's buffer, in bytes.
	buffer int64
	// tiny, if set, is the engines' device memory in blocks. The namespace then has two
	// layers and Layer Blocks of 64 bytes.
	tiny int
	// linear, if set, is the compute time per token, in seconds.
	linear float64
	// compute, if set, wraps the compute NIC of each engine.
	compute func(rdma.Engine) rdma.Engine
	// quota, if set, is the quota of prefill engines that hold all layers.
	quota time.Duration
	// close stops the planner and writes its record.
	close func()
	// stops holds a function per engine that ends its node; each may be called twice.
	stops []func()
}

var token = rdma.Token("the compute network of a test")

// newCluster starts p prefill and d decode nodes.
func newCluster(t *testing.T, p, d int) *cluster {
	t.Helper()
	return (&cluster{t: t}).start(p, d)
}

// newRecordedCluster is newCluster with a planner that records its events.
func newRecordedCluster(t *testing.T, p, d int, record *planner.Record) *cluster {
	t.Helper()
	return (&cluster{t: t, record: record}).start(p, d)
}

// start starts all processes of a cluster.
func (c *cluster) start(p, d int) *cluster {
	c.t.Helper()
	if c.tiny > 0 {
		c.storage = testnode.Start(c.t, testnode.Options{CapacityBytes: 1 << 30, SegmentBytes: 32 << 20})
		c.storage.Namespace(c.t, "m", kv.SingleGroup(2, geo.BlockTokens, 4))
	} else {
		c.storage = testnode.Start(c.t, testnode.Options{})
		c.storage.Namespace(c.t, "m", geo)
	}
	c.startPlanner()
	for i := range p + d {
		c.stops = append(c.stops, sync.OnceFunc(c.node(i, i < p)))
	}
	c.t.Cleanup(func() {
		for _, stop := range c.stops {
			stop()
		}
	})
	store, ns := c.store()
	c.gateway = &Gateway{Namespace: ns, Store: store, Planner: c.conn, Deadline: time.Minute}
	return c
}

// must fails the test if err is not nil.
func (c *cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// startPlanner starts a planner; restart replaces it by a new planner without state.
func (c *cluster) startPlanner() {
	p := testplanner.Start(c.t, testplanner.Options{Planner: planner.Options{
		Record: c.record, Planner: dualpath.Options{BlockTokens: geo.BlockTokens, MinPart: 32, ReadRate: 1e6, PrefillRate: 1e5, GroupTimeout: 10 * time.Second},
	}})
	c.conn, c.restart, c.close = p.Conn, p.Restart, p.Stop
}

// store opens a client of the storage node.
func (c *cluster) store() (*client.Store, kv.Namespace) { return c.storeOver(nil) }

// storeOver is store with a wrapper around the client's sockets.
func (c *cluster) storeOver(wrap func(net.Conn) net.Conn) (*client.Store, kv.Namespace) {
	c.t.Helper()
	engine, err := tcp.New(c.t.Context(), tcp.Options{Wrap: wrap})
	c.must(err)
	s, err := client.Open(c.t.Context(), client.Options{Engine: engine, Servers: []string{c.storage.Addr}, DialTimeout: time.Minute})
	c.must(err)
	c.t.Cleanup(func() {
		if err := errors.Join(s.Close(), engine.Close()); err != nil {
			c.t.Error(err)
		}
	})
	ns, err := s.Namespace(c.t.Context(), "m")
	c.must(err)
	return s, ns
}

// node starts an engine and its leader.
func (c *cluster) node(i int, prefill bool) (stop func()) {
	c.t.Helper()
	role, name, window := leader.Decode, fmt.Sprintf("D%d", i), 0
	if prefill {
		role, name, window = leader.Prefill, fmt.Sprintf("P%d", i), 2
	}
	nic, err := tcp.New(c.t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: token})
	c.must(err)
	var compute rdma.Engine = nic
	if c.compute != nil {
		compute = c.compute(nic)
	}
	var wrap func(net.Conn) net.Conn
	if prefill {
		wrap = c.wrap
	}
	store, ns := c.storeOver(wrap)
	opts := EngineOptions{Name: name, Model: model, Namespace: ns, Store: store, Compute: compute, BufferBytes: 8 << 20, DeviceBlocks: 1024, Window: window}
	if c.copier != nil {
		opts.Copier = c.copier()
	}
	if c.linear > 0 {
		opts.Model.Linear = c.linear
	}
	if c.buffer > 0 {
		opts.BufferBytes = c.buffer
	}
	if c.tiny > 0 {
		opts.DeviceBlocks, opts.Model.Layers = c.tiny, 2
		opts.Model.Linear = 1e-9
	}
	if c.quota > 0 {
		opts.Window, opts.Model.Quota = 0, c.quota
	}
	e, err := NewEngine(opts)
	c.must(err)
	c.engines = append(c.engines, e)
	l, err := leader.New(leader.Options{
		Group: name, Node: "node-" + name, Role: role, Geometry: ns.Geometry, Members: []leader.Member{e.Member(compute.Addr(), token)}, Planner: c.conn,
		FetchEvery: 2 * time.Millisecond,
		SwitchRole: func(_ context.Context, to leader.Role) ([]leader.Member, error) { return nil, e.SwitchRole(to) },
	})
	c.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	var led sync.WaitGroup
	led.Go(func() { l.Run(ctx) })
	return func() {
		cancel()
		led.Wait()
		if err := errors.Join(e.Close(), compute.Close()); err != nil {
			c.t.Errorf("%s: %v", name, err)
		}
	}
}

// sessions returns n agents with the given number of turns.
func sessions(n, turns int) []Session {
	out := make([]Session, n)
	for i := range out {
		out[i].Name = fmt.Sprintf("agent-%d", i)
		for range turns {
			out[i].Turns = append(out[i].Turns, Turn{Append: 100 + 7*i, Output: 20})
		}
	}
	return out
}

// check fails the test unless every turn succeeded, storage returned all the KV of earlier
// turns, and no byte on a device was wrong.
func (c *cluster) check(results []TurnResult, turns int) {
	c.t.Helper()
	if len(results) != turns {
		c.t.Errorf("%d turns of %d", len(results), turns)
	}
	context := map[string]int{}
	for _, r := range results {
		if r.Err != nil {
			c.t.Errorf("%s, turn %d: %v", r.Session, r.Turn, r.Err)
		}
		// Read your writes: all full blocks of the earlier turns are hits.
		if want := context[r.Session] / geo.BlockTokens * geo.BlockTokens; r.Hit < want {
			c.t.Errorf("%s, turn %d: %d tokens hit; the turns before left %d", r.Session, r.Turn, r.Hit, want)
		}
		context[r.Session] = r.Prompt + 20
	}
	var sum Counts
	for _, e := range c.engines {
		n := e.Counts()
		sum.CheckedBytes += n.CheckedBytes
		sum.WrongBlocks += n.WrongBlocks
	}
	if sum.WrongBlocks != 0 || sum.CheckedBytes == 0 {
		c.t.Errorf("%d wrong blocks among %d bytes on devices", sum.WrongBlocks, sum.CheckedBytes)
	}
}

// checkSides fails the test unless both sides have read KV.
func (c *cluster) checkSides(results []TurnResult) {
	c.t.Helper()
	prefill, decode := 0, 0
	for _, r := range results {
		prefill, decode = prefill+r.PrefillSide, decode+r.DecodeSide
	}
	if prefill == 0 || decode == 0 {
		c.t.Errorf("the prefill side read %d tokens, the decode side %d", prefill, decode)
	}
}

// TestCluster replays agents on 2P2D with real storage, planner and transfers. Both sides read.
func TestCluster(t *testing.T) {
	testkit.VerifyNone(t)
	c := newCluster(t, 2, 2)
	results := c.gateway.Run(t.Context(), sessions(6, 5), 4)
	c.check(results, 30)
	c.checkSides(results)
}

// TestNewWeights changes the weights while a turn's prefix is read or its suffix computed.
// The whole turn is computed with the new weights and stored under the new epoch. The next
// turn finds its blocks there and compares every byte.
func TestNewWeights(t *testing.T) {
	c := (&cluster{t: t, linear: 5e-3}).start(1, 1)
	conn, err := grpc.NewClient(c.storage.Addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	c.must(err)
	defer func() { c.must(conn.Close()) }()
	bumped := map[int]bool{}
	c.gateway.Started = func(_ string, turn int) {
		if turn == 0 || turn == 2 || bumped[turn] {
			return
		}
		bumped[turn] = true
		r, err := pb.NewAdminClient(conn).BumpEpoch(t.Context(), &pb.BumpEpochRequest{Name: "m"})
		c.must(err)
		_, err = pb.NewPlannerClient(c.conn).BumpWeights(t.Context(), &pb.BumpWeightsRequest{Namespace: "m", Epoch: r.NewEpoch})
		c.must(err)
	}
	results := c.gateway.Run(t.Context(), sessions(1, 5), 1)
	replans := 0
	for _, r := range results {
		replans += r.Replans
	}
	if replans == 0 {
		t.Errorf("no turn was planned again: nothing was tested")
	}
	c.check(results, 5)
}

// TestPinnedWeights: the weights change while requests that name their version are served.
// The namespace keeps that version, so the requests continue with its weights and find its
// blocks, and no request is planned again.
func TestPinnedWeights(t *testing.T) {
	c := newCluster(t, 1, 1)
	c.gateway.Epoch = c.gateway.Namespace.Epoch
	c.gateway.Started = func(string, int) {
		next, err := c.gateway.Store.BumpEpoch(t.Context(), "m", 0, kv.MaxLive)
		c.must(err)
		_, err = pb.NewPlannerClient(c.conn).BumpWeights(t.Context(), &pb.BumpWeightsRequest{Namespace: "m", Epoch: uint64(next)})
		c.must(err)
	}
	results := c.gateway.Run(t.Context(), sessions(2, 5), 1)
	for _, r := range results {
		if r.Replans != 0 || r.Turn > 0 && r.Hit == 0 {
			t.Errorf("turn %d of %s: hit %d tokens, planned again %d times", r.Turn, r.Session, r.Hit, r.Replans)
		}
	}
	c.check(results, 10)
	// After the version is retired, storage neither finds nor stores its blocks; requests
	// are still served.
	c.gateway.Started = nil
	c.must(c.gateway.Store.RetireEpoch(t.Context(), "m", c.gateway.Epoch, false))
	for _, r := range c.gateway.Run(t.Context(), []Session{{Name: "late", Turns: []Turn{{Append: 64, Output: 8}, {Append: 64, Output: 8}}}}, 1) {
		if r.Err != nil || r.Hit != 0 {
			t.Errorf("turn %d with a retired version: %+v", r.Turn, r)
		}
	}
	for _, e := range c.engines {
		if n := e.Counts(); len(n.ByEpoch) > 1 || n.Requests != n.ByEpoch[c.gateway.Epoch] {
			t.Errorf("requests by epoch %v; want all of epoch %d", n.ByEpoch, c.gateway.Epoch)
		}
	}
}

// TestSmallBuffers uses buffers that hold little more than one prompt. Both sides allocate
// memory of both engines. The planner allocates for a request on both engines or on
// neither, so two requests cannot wait for each other.
func TestSmallBuffers(t *testing.T) {
	const longest = 3*(100+7*7) + 2*20 // tokens of the last agent's last prompt
	blocks := (longest + geo.BlockTokens - 1) / geo.BlockTokens
	f := traffic.Footprint{Block: geo.PieceBytes(0), Sums: int64(8 * geo.Groups[0].Layers), Request: 4 * 4096}
	c := (&cluster{t: t, buffer: f.Of(blocks, blocks) * 5 / 4}).start(2, 2)
	c.check(c.gateway.Run(t.Context(), sessions(8, 3), 8), 24)
}

// TestTooLong checks that a prompt that no engine's buffer can hold is rejected at once,
// with the bytes that it needs and the largest buffer.
func TestTooLong(t *testing.T) {
	c := (&cluster{t: t, buffer: 64 << 10}).start(1, 1)
	r := c.gateway.Run(t.Context(), []Session{{Name: "long", Turns: []Turn{{Append: 100 * geo.BlockTokens, Output: 1}}}}, 1)
	if len(r) != 1 || r[0].Err == nil || !strings.Contains(r[0].Err.Error(), "larger than any engine's buffer") || !strings.Contains(r[0].Err.Error(), "at most 65536 fit") {
		t.Errorf("%+v", r)
	}
}

// TestMillionTokens runs a turn of 1 M tokens (65,536 blocks) through planner, storage
// node and transfers. The second turn finds all blocks of the first, reads them on both
// sides and compares every byte. The decoded blocks are stored too. A request that no
// engine can take is rejected at once, with its size and the largest possible size.
func TestMillionTokens(t *testing.T) {
	testkit.Long(t, "prompts of a million tokens")
	testkit.VerifyNone(t)
	const turn = 1 << 20
	c := (&cluster{t: t, tiny: traffic.MaxBlocks + 64, buffer: 64 << 20}).start(1, 1)
	c.gateway.Deadline = 5 * time.Minute
	results := c.gateway.Run(t.Context(), []Session{{Name: "long", Turns: []Turn{{Append: turn, Output: 20}, {Append: 100, Output: 20}, {Append: 100, Output: 20}}}}, 1)
	c.check(results, 3)
	c.checkSides(results)
	const most = traffic.MaxBlocks * 16
	r := c.gateway.Run(t.Context(), []Session{{Name: "longer", Turns: []Turn{{Append: most + 1, Output: 1}}}}, 1)
	if want := fmt.Sprintf("%d tokens, and at most %d fit", most+1, most); len(r) != 1 || r[0].Err == nil || !strings.Contains(r[0].Err.Error(), want) {
		t.Errorf("%+v, want %q", r, want)
	}
}

// TestChunks sets a compute quota of 30 tokens, which splits every request. The test checks
// that all KV of earlier parts and of the current part is at its place, and that there are
// at least as many batches as the quota requires.
func TestChunks(t *testing.T) {
	testkit.VerifyNone(t)
	const tokens = 30
	c := (&cluster{t: t, quota: time.Duration(tokens * model.Attention.PerToken * float64(time.Second))}).start(1, 1)
	results := c.gateway.Run(t.Context(), sessions(4, 3), 4)
	c.check(results, 12)
	computed := 0
	for _, r := range results {
		computed += r.Prompt - r.Hit
	}
	if n := c.engines[0].Counts().Batches; n < uint64(computed/tokens) {
		t.Errorf("%d tokens were computed in %d batches of at most %d", computed, n, tokens)
	}
}

// TestChunksEnd ends nodes of both kinds while split requests are computed. All requests are
// served by other nodes.
func TestChunksEnd(t *testing.T) {
	testkit.VerifyNone(t)
	(&cluster{t: t, quota: time.Microsecond}).start(2, 2).nodesLeave()
}

// nicCopier returns a copier over the loopback of a NIC; the NIC is emulated by sockets.
func (c *cluster) nicCopier() copier.Copier {
	c.t.Helper()
	near, err := tcp.New(c.t.Context(), tcp.Options{Token: token})
	c.must(err)
	far, err := tcp.New(c.t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: token})
	c.must(err)
	nic, err := copier.NewNIC(c.t.Context(), copier.NICOptions{Near: near, Far: far, Token: token})
	c.must(err)
	c.t.Cleanup(func() {
		if err := errors.Join(nic.Close(), near.Close(), far.Close()); err != nil {
			c.t.Error(err)
		}
	})
	return nic
}

// TestNICCopies runs the cluster with engines that copy by a NIC.
func TestNICCopies(t *testing.T) {
	testkit.VerifyNone(t)
	c := &cluster{t: t}
	c.copier = c.nicCopier
	c.start(1, 1)
	c.check(c.gateway.Run(t.Context(), sessions(4, 3), 4), 12)
}

// TestPlannerRestart replaces the planner by one without state in the middle of the replay.
// Leaders and gateways send it the state again.
func TestPlannerRestart(t *testing.T) {
	testkit.VerifyNone(t)
	c := newCluster(t, 1, 1)
	turns := 0
	c.gateway.Done = func(TurnResult) {
		if turns++; turns == 4 || turns == 9 {
			c.restart()
		}
	}
	c.check(c.gateway.Run(t.Context(), sessions(4, 4), 3), 16)
}

// TestNodesLeave ends a prefill and a decode node in the middle of the replay. Their requests
// are planned again; no turn is lost and no byte is wrong.
func TestNodesLeave(t *testing.T) {
	testkit.VerifyNone(t)
	newCluster(t, 2, 2).nodesLeave()
}

// nodesLeave replays on 2P2D while one decode and one prefill node end.
func (c *cluster) nodesLeave() {
	c.t.Helper()
	turns := 0
	var left sync.WaitGroup
	c.gateway.Done = func(TurnResult) {
		switch turns++; turns {
		case 5:
			left.Go(c.stops[3])
		case 12:
			left.Go(c.stops[0])
		}
	}
	c.check(c.gateway.Run(c.t.Context(), sessions(6, 5), 6), 30)
	left.Wait()
}
