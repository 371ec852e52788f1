// Package testnode runs a storage node inside a test's process: the real server,
// store, index and data plane, on a device in memory or on directories. Only
// tests import it.
package testnode

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/io/posixio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// Options configures a Node.
type Options struct {
	// CapacityBytes is the store's capacity, a multiple of SegmentBytes. Defaults:
	// 64 MiB and 1 MiB.
	CapacityBytes, SegmentBytes int64
	// Device, if set, replaces the device in memory.
	Device blockio.Device
	// Dirs, if set, are the directories of the volumes, which replace the device in memory. As with
	// penstock serve, the index is in the subdirectory "index" of the first directory.
	Dirs []string
	// Durability is the store's durability. Default: batch.
	Durability blockstore.Durability
	// Name is the node's name. Default: test.
	Name string
	// EventHistory is storage.Options.EventHistory.
	EventHistory int
	// HotPrefix is storage.Options.HotPrefix.
	HotPrefix storage.HotOptions
	// BearerToken, if not empty, is the node's only bearer token.
	BearerToken string
	// Etcd, if set, are the endpoints of etcd, which makes the node a member of a cluster. Each member
	// needs a Name of its own.
	Etcd []string
	// LeaseTTL is membership.Options.TTL.
	LeaseTTL time.Duration
	// OtherVersion makes the node's data plane speak another version of its protocol.
	OtherVersion bool
	// Web makes the node serve HTTP, at Node.Web. ConsoleInterval is that of server.Options.
	Web             bool
	ConsoleInterval time.Duration
	// Roles is server.Options.Roles.
	Roles server.Roles
	// Logger is the node's logger. Default: discard.
	Logger *slog.Logger
}

// Node is a running storage node.
type Node struct {
	// Addr is the node's gRPC address, and Web the URL of its HTTP listener, "" if it has none.
	Addr, Web string
	// Storage is the node's storage.
	Storage *storage.Node

	closers []func(context.Context) error
}

// Start starts a node and stops it when the test ends.
func Start(t testing.TB, o Options) *Node {
	t.Helper()
	n := &Node{}
	err := n.open(context.Background(), o)
	t.Cleanup(func() {
		within, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := n.Stop(within); err != nil {
			t.Errorf("storage node: %v", err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func (n *Node) open(ctx context.Context, o Options) error {
	engine, err := OpenEngine(ctx, o)
	if err != nil {
		return err
	}
	n.Storage = engine.Node
	n.closers = append(n.closers, engine.Close)
	token := rdma.Token("the data plane's token of a test")
	sessions, err := server.NewSessions(token, o.tokens, o.Roles, nil)
	if err != nil {
		return err
	}
	plane := tcp.Options{Listen: "127.0.0.1:0", Admission: sessions.Admission()}
	if o.OtherVersion {
		plane.Wrap = func(nc net.Conn) net.Conn { return &otherVersion{Conn: nc} }
	}
	data, err := tcp.New(ctx, plane)
	if err != nil {
		return err
	}
	volumes := make([]server.Volume, len(engine.devices))
	for i, d := range engine.devices {
		volumes[i] = server.Volume{Device: d, Reason: "a test"}
	}
	control, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return errors.Join(err, data.Close())
	}
	member, err := n.join(engine, o, control.Addr().String())
	if err != nil {
		return errors.Join(err, control.Close(), data.Close())
	}
	s, err := server.New(server.Options{
		Cluster: member,
		Node:    cmp.Or(o.Name, "test"), Version: "v0", Storage: engine.Node, Arena: engine.memory, Data: data, Sessions: sessions, Tokens: o.tokens,
		Limits:  server.Limits{ReadBytes: 4 << 20, WriteBytes: 4 << 20, ChainBlocks: 131072, LandWithin: time.Minute},
		Volumes: volumes, Durability: o.Durability.String(), CapacityBytes: engine.capacityBytes,
		Roles: o.Roles, ConsoleInterval: o.ConsoleInterval,
		Metrics: engine.counters, Registry: engine.registry, Logger: engine.log,
	})
	if err != nil {
		return errors.Join(err, control.Close(), data.Close())
	}
	var web net.Listener
	if o.Web {
		if web, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			return errors.Join(err, control.Close(), s.Shutdown(ctx))
		}
		n.Web = "http://" + web.Addr().String()
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(control, web) }()
	n.closers = append(n.closers, func(ctx context.Context) error { return errors.Join(s.Shutdown(ctx), <-served) })
	n.Addr = control.Addr().String()
	if member == nil {
		return nil
	}
	within, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	select {
	case <-member.Joined():
		return nil
	case <-within.Done():
		return errors.New("the node has not joined its cluster within a minute")
	}
}

// join begins to make the node a member of a cluster. It returns nil if the node stands alone.
func (n *Node) join(engine *Engine, o Options, addr string) (*membership.Cluster, error) {
	if len(o.Etcd) == 0 {
		return nil, nil
	}
	member, err := membership.Join(membership.Options{
		Endpoints: o.Etcd, TTL: o.LeaseTTL, Node: engine.Node, Logger: engine.log,
		Member: membership.Member{Name: o.Name, Addr: addr, Store: addr, Version: "v0"},
		Usage: func() membership.Usage {
			st := engine.Stats()
			return membership.Usage{CapacityBytes: engine.capacityBytes, UsedBytes: st.Store.Slots.UsedBytes() + st.Index.DiskBytes}
		},
	})
	if err == nil {
		n.closers = append(n.closers, member.Close)
	}
	return member, err
}

// Stop stops the node before the test ends. A member of a cluster leaves it.
func (n *Node) Stop(ctx context.Context) error {
	closers := n.closers
	n.closers = nil
	return closeAll(ctx, closers)
}

func closeAll(ctx context.Context, closers []func(context.Context) error) error {
	var errs []error
	for _, c := range slices.Backward(closers) {
		errs = append(errs, c(ctx))
	}
	return errors.Join(errs...)
}

// Engine is a storage node without its network.
type Engine struct {
	*storage.Node

	devices       []blockio.Device
	memory        *arena.Arena
	registry      *prometheus.Registry
	counters      *metrics.Node
	capacityBytes int64
	log           *slog.Logger
}

// Storage opens a storage on devices in memory, and closes it at the end of the test.
func Storage(t testing.TB) *storage.Node {
	t.Helper()
	e, err := OpenEngine(t.Context(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return e.Node
}

// OpenEngine opens an Engine.
func OpenEngine(ctx context.Context, o Options) (e *Engine, err error) {
	e = &Engine{log: o.Logger, registry: prometheus.NewRegistry(), capacityBytes: cmp.Or(o.CapacityBytes, 64<<20)}
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	e.counters = metrics.NewNode(e.registry)
	indexOptions := trie.Options{Dir: "index", FS: vfs.NewMem(), Logger: e.log}
	if len(o.Dirs) > 0 {
		indexOptions.Dir, indexOptions.FS = filepath.Join(o.Dirs[0], "index"), vfs.Default
	}
	if e.devices, err = openDevices(o); err != nil {
		return nil, err
	}
	store, err := blockstore.Open(ctx, blockstore.Options{
		Devices: e.devices, CapacityBytes: e.capacityBytes, SegmentBytes: cmp.Or(o.SegmentBytes, 1<<20), Logger: e.log,
	})
	if err != nil {
		return nil, err
	}
	indexOptions.Owner = store.Node().String()
	index, err := trie.Open(indexOptions)
	if err != nil {
		return nil, errors.Join(err, store.Close(ctx))
	}
	if e.memory, err = arena.New(arena.Options{SizeBytes: 16 << 20}); err != nil {
		return nil, errors.Join(err, index.Close(), store.Close(ctx))
	}
	e.Node, err = storage.Open(ctx, storage.Options{
		Index: index, Store: store, Arena: e.memory, Metrics: e.counters, LoadBytesMax: 4 << 20, WriteBytesMax: 4 << 20,
		QueueWait: 20 * time.Second, Durability: o.Durability, EventHistory: o.EventHistory, HotPrefix: o.HotPrefix, Logger: e.log,
	})
	if err != nil {
		return nil, errors.Join(err, index.Close(), store.Close(ctx), e.memory.Close())
	}
	return e, nil
}

// Close stops the engine and releases its memory.
func (e *Engine) Close(ctx context.Context) error {
	return errors.Join(e.Node.Close(ctx), e.memory.Close())
}

func openDevices(o Options) ([]blockio.Device, error) {
	if o.Device != nil {
		return []blockio.Device{o.Device}, nil
	}
	if len(o.Dirs) == 0 {
		return []blockio.Device{memio.New(memio.Options{})}, nil
	}
	var devices []blockio.Device
	for _, dir := range o.Dirs {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		d, err := posixio.Open(dir, posixio.Options{})
		if err != nil {
			return nil, err
		}
		devices = append(devices, d)
	}
	return devices, nil
}

// Namespace creates a namespace.
func (n *Node) Namespace(t testing.TB, name string, g kv.Geometry) {
	t.Helper()
	conn, err := client.Dial(n.Addr, client.DialOptions{Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = pb.NewAdminClient(conn).CreateNamespace(t.Context(), &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(kv.Namespace{Name: name, Geometry: g})})
	if err != nil {
		t.Fatal(err)
	}
}

// otherVersion is a connection of a data plane whose protocol has the next version. The first
// bytes in each direction are a magic whose fourth byte is the version. otherVersion sends the
// node's magic with the next version. It changes the magic received from the client to the
// previous version, because a client is one version behind a node of the next version.
type otherVersion struct {
	net.Conn
	read, written bool
}

// NetConn returns the socket.
func (c *otherVersion) NetConn() net.Conn { return c.Conn }

func (c *otherVersion) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if !c.read && n >= 4 {
		c.read = true
		b[3]--
	}
	return n, err
}

func (c *otherVersion) Write(b []byte) (int, error) {
	if !c.written && len(b) >= 4 {
		c.written = true
		b = slices.Clone(b)
		b[3]++
	}
	return c.Conn.Write(b)
}

// Open opens a client of the node with a new transfer engine, and returns the client and the namespace
// with the given name. The client is closed when the test ends.
func (n *Node) Open(t testing.TB, namespace string) (*client.Store, kv.Namespace) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	engine, err := tcp.New(context.Background(), tcp.Options{})
	must(err)
	t.Cleanup(func() {
		if err := engine.Close(); err != nil {
			t.Error(err)
		}
	})
	store, err := client.Open(context.Background(), client.Options{Engine: engine, Servers: []string{n.Addr}, DialTimeout: time.Minute})
	must(err)
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	ns, err := store.Namespace(t.Context(), namespace)
	must(err)
	return store, ns
}

// tokens returns the node's bearer tokens.
func (o *Options) tokens() []string {
	if o.BearerToken == "" {
		return nil
	}
	return []string{o.BearerToken}
}
