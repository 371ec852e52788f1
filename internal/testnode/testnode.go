// Package testnode is a storage node inside a test's process: the real server,
// store, index and data plane, on a device in memory. Only tests import it.
package testnode

import (
	"context"
	"errors"
	"log/slog"
	"net"
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
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// Options of a Node.
type Options struct {
	// CapacityBytes of the store, a multiple of SegmentBytes; defaults 64 MiB and
	// 1 MiB.
	CapacityBytes, SegmentBytes int64
	// Device, if set, is used in place of one in memory.
	Device blockio.Device
}

// Node is a running storage node.
type Node struct {
	// Addr is its gRPC address.
	Addr string
}

// Start starts one, which the end of the test stops.
func Start(t testing.TB, o Options) *Node {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	if o.SegmentBytes == 0 {
		o.SegmentBytes = 1 << 20
	}
	if o.CapacityBytes == 0 {
		o.CapacityBytes = 64 << 20
	}
	if o.Device == nil {
		o.Device = memio.New(memio.Options{})
	}
	ctx := context.Background()
	store, err := blockstore.Open(ctx, blockstore.Options{Devices: []blockio.Device{o.Device}, CapacityBytes: o.CapacityBytes, SegmentBytes: o.SegmentBytes})
	must(err)
	index, err := trie.Open(trie.Options{Dir: "index", FS: vfs.NewMem()})
	must(err)
	memory, err := arena.New(arena.Options{SizeBytes: 16 << 20})
	must(err)
	registry := prometheus.NewRegistry()
	counters := metrics.NewNode(registry)
	node, err := storage.Open(ctx, storage.Options{
		Index: index, Store: store, Arena: memory, Metrics: counters, LoadBytesMax: 4 << 20, WriteBytesMax: 4 << 20, ChainBlocksMax: 4096, QueueWait: 20 * time.Second,
	})
	must(err)
	token := rdma.Token("the data plane's token of a test")
	data, err := tcp.New(ctx, tcp.Options{Listen: "127.0.0.1:0", Token: token})
	must(err)
	s, err := server.New(server.Options{
		Node: "test", Version: "v0", Storage: node, Arena: memory, Data: data, DataToken: token,
		Limits:  server.Limits{ReadBytes: 4 << 20, WriteBytes: 4 << 20, ChainBlocks: 4096, LandWithin: time.Minute},
		Volumes: []server.Volume{{Device: o.Device, Reason: "a test"}}, Durability: "batch", CapacityBytes: o.CapacityBytes,
		Metrics: counters, Registry: registry, Logger: slog.New(slog.DiscardHandler),
	})
	must(err)
	control, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	served := make(chan error, 1)
	go func() { served <- s.Serve(control, nil) }()
	t.Cleanup(func() {
		within, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := errors.Join(s.Shutdown(within), <-served, node.Close(within), memory.Close()); err != nil {
			t.Errorf("storage node: %v", err)
		}
	})
	return &Node{Addr: control.Addr().String()}
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
