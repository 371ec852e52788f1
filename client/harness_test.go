package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/handoff"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// geometry has pieces of 8 KiB: 4 layers of 4 tokens of 512 bytes.
var geometry = kv.SingleGroup(4, 4, 512)

// gate is a device whose reads or writes can be delayed.
type gate struct {
	blockio.Device
	mu      sync.Mutex
	held    blockio.Op
	open    chan struct{} // closed: all requests pass
	arrived chan struct{} // an element for each read or write that found the gate shut
}

func newGate(d blockio.Device) *gate {
	g := &gate{Device: d, open: make(chan struct{}), arrived: make(chan struct{}, 1024)}
	close(g.open)
	return g
}

func (g *gate) shut() { g.hold(blockio.Read) }

func (g *gate) hold(op blockio.Op) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held, g.open = op, make(chan struct{})
}

func (g *gate) lift() {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.open:
	default:
		close(g.open)
	}
}

// Do delays requests while the gate is shut for them.
func (g *gate) Do(ctx context.Context, batch []blockio.Request) error {
	g.mu.Lock()
	held, open := g.held, g.open
	g.mu.Unlock()
	if len(batch) > 0 && batch[0].Op == held {
		select {
		case <-open:
		default:
			g.arrived <- struct{}{}
			<-open
		}
	}
	return g.Device.Do(ctx, batch)
}

// localHosts gives each new host a unix socket, and each new rig connections to it. localCalls
// counts the calls of the rigs on these connections.
var (
	localHosts bool
	localCalls uint64
)

// host is a storage node in this process that can be killed and restarted with its data, on the
// same addresses.
type host struct {
	t    testing.TB
	edit func(*storage.Options, *server.Options)
	// segmentBytes is the store's segment size. The arena has 16 segments, the capacity is 32.
	segmentBytes int64
	// shared makes an arena that other processes can map.
	shared bool
	// stagingBytes is handoff.Options.StagingBytesMax.
	stagingBytes int64

	medium  *memio.Device
	faults  *faultio.Device
	gate    *gate
	index   vfs.FS
	control string // addresses, which a restart keeps
	data    string

	server *server.Server
	node   *storage.Node
	arena  *arena.Arena
	local  *handoff.Listener // nil: no unix socket
	served chan error
}

// newHost starts a node. edit, if not nil, changes its options.
func newHost(t testing.TB, edit func(*storage.Options, *server.Options)) *host {
	t.Helper()
	return newLargeHost(t, 1<<20, edit)
}

// newLargeHost is newHost with segments of another size.
func newLargeHost(t testing.TB, segmentBytes int64, edit func(*storage.Options, *server.Options)) *host {
	t.Helper()
	h := &host{t: t, edit: edit, segmentBytes: segmentBytes, medium: memio.New(memio.Options{}), index: vfs.NewMem(), control: testkit.Port(t), data: testkit.Port(t)}
	if localHosts {
		h.socket(filepath.Join(t.TempDir(), "local.sock"))
	}
	h.start()
	t.Cleanup(h.kill)
	return h
}

// socket gives the host a shared arena and a unix socket at path.
func (h *host) socket(path string) {
	h.shared = true
	edit := h.edit
	h.edit = func(so *storage.Options, o *server.Options) {
		var err error
		h.local, err = handoff.Listen(handoff.Options{Path: path, Arena: h.arena, StagingBytesMax: h.stagingBytes})
		h.must(err)
		o.Local = h.local
		if edit != nil {
			edit(so, o)
		}
	}
}

func (h *host) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) start() {
	h.t.Helper()
	ctx := context.Background()
	h.faults = faultio.Wrap(h.medium, faultio.MustParse(""))
	h.gate = newGate(h.faults)
	store, err := blockstore.Open(ctx, blockstore.Options{Devices: []blockio.Device{h.gate}, CapacityBytes: 32 * h.segmentBytes, SegmentBytes: h.segmentBytes})
	h.must(err)
	index, err := trie.Open(trie.Options{Dir: "index", FS: h.index})
	h.must(err)
	h.arena, err = arena.New(arena.Options{SizeBytes: 16 * h.segmentBytes, Shared: h.shared})
	h.must(err)
	registry := prometheus.NewRegistry()
	so := storage.Options{
		Index: index, Store: store, Arena: h.arena, Metrics: metrics.NewNode(registry),
		LoadBytesMax: 1 << 20, WriteBytesMax: 1 << 20, ChainBlocksMax: 1024, HotBytes: -1, QueueWait: 20 * time.Second, ReadWait: time.Minute,
	}
	token := make(rdma.Token, 32)
	for i := range token {
		token[i] = byte(rand.Uint32())
	}
	var opts server.Options
	sessions, err := server.NewSessions(token, func() []string {
		if opts.Tokens == nil {
			return nil
		}
		return opts.Tokens()
	}, func() *access.Policy {
		if opts.Roles == nil {
			return nil
		}
		return opts.Roles()
	}, nil)
	h.must(err)
	data := testkit.Listen(h.t, func() (*tcp.Engine, error) {
		return tcp.New(ctx, tcp.Options{Listen: h.data, Admission: sessions.Admission()})
	})
	opts = server.Options{
		Node: "test", Version: "v0", Arena: h.arena, Data: data, Sessions: sessions,
		Limits:  server.Limits{ReadBytes: 1 << 20, WriteBytes: 1 << 20, ChainBlocks: 1024, LandWithin: time.Minute},
		Volumes: []server.Volume{{Device: h.gate, Reason: "a test"}}, Durability: "batch", CapacityBytes: 32 * h.segmentBytes,
		Registry: registry, Logger: slog.New(slog.DiscardHandler),
	}
	if h.edit != nil {
		h.edit(&so, &opts)
	}
	h.node, err = storage.Open(ctx, so)
	h.must(err)
	opts.Storage, opts.Metrics = h.node, so.Metrics
	h.server, err = server.New(opts)
	h.must(err)
	control := testkit.Listen(h.t, func() (net.Listener, error) { return net.Listen("tcp", h.control) })
	h.served = make(chan error, 1)
	served, s := h.served, h.server
	go func() { served <- s.Serve(control, nil) }()
}

// kill ends the node without draining. It may be called twice.
func (h *host) kill() {
	if h.server == nil {
		return
	}
	now, cancel := context.WithCancel(context.Background())
	cancel()
	err := errors.Join(h.server.Shutdown(now), <-h.served)
	h.gate.lift()
	err = errors.Join(err, h.node.Close(context.Background()), h.arena.Close())
	if err != nil {
		h.t.Errorf("kill: %v", err)
	}
	h.server = nil
	h.medium = h.medium.Reopen()
}

func (h *host) restart() {
	h.kill()
	h.start()
}

// rig is an engine with a Store on some hosts.
type rig struct {
	t     testing.TB
	hosts []*host
	store *client.Store
	// engine is the caller's transfer engine.
	engine rdma.Engine
}

func newRig(t testing.TB, edit func(*client.Options), hosts ...*host) *rig {
	t.Helper()
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	// A dead node refuses connections at once; a slow one gets time.
	opts := client.Options{Engine: engine, DialTimeout: time.Minute, DeadFor: time.Nanosecond, ReadParallel: 4}
	for _, h := range hosts {
		opts.Servers = append(opts.Servers, h.control)
	}
	if edit != nil {
		edit(&opts)
	}
	r := &rig{t: t, hosts: hosts, engine: engine}
	r.store, err = client.Open(t.Context(), opts)
	if err != nil {
		t.Fatal(errors.Join(err, engine.Close()))
	}
	t.Cleanup(func() {
		stats := r.store.Stats()
		localCalls += stats.LocalReads + stats.LocalMatches + stats.LocalWrites
		if err := errors.Join(r.store.Close(), r.store.Close(), engine.Close()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	if localHosts {
		if err := r.store.ConnectLocal(t.Context(), opts.ReadParallel); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// admin calls a host's Admin service.
func (h *host) admin(f func(context.Context, pb.AdminClient) error) {
	h.t.Helper()
	conn, err := client.Dial(h.control, client.DialOptions{Timeout: time.Minute})
	h.must(err)
	defer conn.Close()
	h.must(f(context.Background(), pb.NewAdminClient(conn)))
}

// namespace creates a namespace on every host and returns the store's definition of it.
func (r *rig) namespace(name string, g kv.Geometry, index kv.IndexKind) kv.Namespace {
	r.t.Helper()
	for _, h := range r.hosts {
		h.admin(func(ctx context.Context, c pb.AdminClient) error {
			_, err := c.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(kv.Namespace{Name: name, Geometry: g, Index: index})})
			return err
		})
	}
	ns, err := r.store.Namespace(r.t.Context(), name)
	if err != nil {
		r.t.Fatal(err)
	}
	return ns
}

func (r *rig) bump(name string) {
	for _, h := range r.hosts {
		h.admin(func(ctx context.Context, c pb.AdminClient) error {
			_, err := c.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: name})
			return err
		})
	}
}

func (r *rig) memory(n int64) *client.Memory {
	r.t.Helper()
	m, err := r.store.Register(make([]byte, n))
	if err != nil {
		r.t.Fatal(err)
	}
	return m
}

// chain returns a prompt of n blocks. Prompts with different seeds share no block.
func chain(ns kv.Namespace, n int, seed uint32) []kv.BlockID {
	tokens := make([]kv.Token, n*ns.Geometry.BlockTokens)
	for i := range tokens {
		tokens[i] = seed<<16 + kv.Token(i)
	}
	c, err := ns.Chain()
	if err != nil {
		panic(err)
	}
	ids, _ := c.Append(nil, tokens)
	return ids
}

// keys returns n unrelated keys of a flat namespace.
func keys(n int, seed uint32) []kv.BlockID {
	ids := make([]kv.BlockID, n)
	for i := range ids {
		binary.LittleEndian.PutUint32(ids[i][:], seed)
		binary.LittleEndian.PutUint32(ids[i][8:], uint32(i)+1)
	}
	return ids
}

// fill writes the content of the piece of a group of a block to b. It depends on id, group and
// epoch, so a test detects any confusion of these.
func fill(b []byte, id kv.BlockID, group int, epoch kv.Epoch) {
	seed := [32]byte{0: byte(group), 1: byte(epoch)}
	copy(seed[16:], id[:])
	_, _ = rand.NewChaCha8(seed).Read(b) // never fails
}

// check returns an error unless b is what fill puts there.
func check(b []byte, id kv.BlockID, group int, epoch kv.Epoch) error {
	want := make([]byte, len(b))
	fill(want, id, group, epoch)
	for i := range b {
		if b[i] != want[i] {
			return fmt.Errorf("block %v, group %d: byte %d is %#x; want %#x", id, group, i, b[i], want[i])
		}
	}
	return nil
}

// put writes the blocks [first, len(ids)) of a single-group namespace.
func (r *rig) put(ns kv.Namespace, ids []kv.BlockID, first int, epoch kv.Epoch) (client.WriteResult, error) {
	r.t.Helper()
	size := ns.Geometry.PieceBytes(0)
	m := r.memory(max(1, int64(len(ids))*size))
	defer m.Close(context.Background())
	for i := first; i < len(ids); i++ {
		fill(m.Bytes()[int64(i)*size:][:size], ids[i], 0, epoch)
	}
	return r.store.Write(r.t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, First: first, Epoch: epoch, From: m})
}

func (r *rig) mustPut(ns kv.Namespace, ids []kv.BlockID) {
	r.t.Helper()
	w, err := r.put(ns, ids, 0, 0)
	if err != nil || w.Outcome != client.Hit || w.Blocks != len(ids) {
		r.t.Fatalf("write: %+v, %v", w, err)
	}
}

// get reads ids and checks every byte of the blocks that count as read.
func (r *rig) get(ns kv.Namespace, ids []kv.BlockID) client.ReadResult {
	r.t.Helper()
	size := ns.Geometry.PieceBytes(0)
	m := r.memory(int64(len(ids)) * size)
	defer m.Close(context.Background())
	got, err := r.store.Read(r.t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: m})
	if err != nil {
		r.t.Fatalf("read: %v", err)
	}
	for i := range got.Blocks {
		if err := check(m.Bytes()[int64(i)*size:][:size], ids[i], 0, 0); err != nil {
			r.t.Fatal(err)
		}
	}
	return got
}

func (r *rig) match(ns kv.Namespace, ids []kv.BlockID) client.MatchResult {
	r.t.Helper()
	m, err := r.store.Match(r.t.Context(), client.MatchRequest{Namespace: ns, IDs: ids})
	if err != nil {
		r.t.Fatal(err)
	}
	return m
}

// eventually calls f until it returns true. It is for conditions that other goroutines change
// without a signal. The test's deadline bounds it.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for !f() {
		if ctx.Err() != nil {
			t.Fatalf("%s: not within 2 min", what)
		}
		runtime.Gosched()
	}
}
