package server_test

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
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
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// host is a complete node on loopback with a client.
type host struct {
	t       testing.TB
	server  *server.Server
	node    *storage.Node
	control string
	web     string
	served  chan error
	conn    *grpc.ClientConn
	cache   pb.CacheClient
	admin   pb.AdminClient
	engine  rdma.Engine // the client's engine
	memory  rdma.Region
	// faults injects faults into the volume. indexFault makes every write of the index fail.
	faults     *faultio.Device
	indexFault *errorfs.Toggle
}

var geometry = kv.SingleGroup(4, 4, 512)

func newHost(t testing.TB, edit func(*server.Options), creds credentials.TransportCredentials) *host {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ctx := context.Background()
	device := faultio.Wrap(memio.New(memio.Options{}), nil)
	store, err := blockstore.Open(ctx, blockstore.Options{Devices: []blockio.Device{device}, CapacityBytes: 16 << 20, SegmentBytes: 1 << 20})
	must(err)
	indexFault := &errorfs.Toggle{Injector: errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			return syscall.EIO
		}
		return nil
	})}
	index, err := trie.Open(trie.Options{Dir: "index", FS: errorfs.Wrap(vfs.NewMem(), indexFault)})
	must(err)
	mem, err := arena.New(arena.Options{SizeBytes: 8 << 20, Shared: true})
	must(err)
	registry := prometheus.NewRegistry()
	counters := metrics.NewNode(registry)
	node, err := storage.Open(ctx, storage.Options{Index: index, Store: store, Arena: mem, Metrics: counters, LoadBytesMax: 1 << 20, WriteBytesMax: 1 << 20, ChainBlocksMax: 64})
	must(err)
	token := rdma.Token("sixteen bytes at least")
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
	}, func() [][sha256.Size]byte {
		if opts.ClientCAs == nil {
			return nil
		}
		return opts.ClientCAs()
	})
	must(err)
	data, err := tcp.New(ctx, tcp.Options{Listen: "127.0.0.1:0", Admission: sessions.Admission()})
	must(err)
	opts = server.Options{
		Node: "test", Version: "v0", Storage: node, Arena: mem, Data: data, Sessions: sessions,
		Limits:  server.Limits{ReadBytes: 1 << 20, WriteBytes: 1 << 20, ChainBlocks: 64, LandWithin: time.Minute},
		Volumes: []server.Volume{{Device: device, Reason: "a test"}}, Durability: "batch", CapacityBytes: 16 << 20,
		Metrics: counters, Registry: registry, Logger: slog.New(slog.DiscardHandler),
	}
	if edit != nil {
		edit(&opts)
	}
	h := &host{t: t, node: node, faults: device, indexFault: indexFault, served: make(chan error, 1)}
	h.server, err = server.New(opts)
	must(err)
	control, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	web, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	h.control, h.web = control.Addr().String(), "http://"+web.Addr().String()
	go func() { h.served <- h.server.Serve(control, web) }()
	if creds == nil {
		creds = insecure.NewCredentials()
	}
	h.conn, err = grpc.NewClient(h.control, grpc.WithTransportCredentials(creds))
	must(err)
	h.cache, h.admin = pb.NewCacheClient(h.conn), pb.NewAdminClient(h.conn)
	h.engine, err = tcp.New(ctx, tcp.Options{})
	must(err)
	h.memory, err = h.engine.Register(make([]byte, 1<<20), rdma.RegisterOptions{})
	must(err)
	t.Cleanup(func() {
		if h.engine.Close() != nil || h.conn.Close() != nil {
			t.Error("client does not close")
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		for what, err := range map[string]error{"shutdown": h.server.Shutdown(ctx), "serve": <-h.served, "node": node.Close(ctx), "arena": mem.Close()} {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return h
}

// namespace creates namespace m and connects the client's engine.
func (h *host) namespace() kv.Namespace {
	h.t.Helper()
	m, err := h.admin.CreateNamespace(h.t.Context(), &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: "m", Geometry: api.GeometryProto(geometry)}})
	if err != nil {
		h.t.Fatal(err)
	}
	ns, err := api.Namespace(m)
	if err != nil {
		h.t.Fatal(err)
	}
	h.connect()
	return ns
}

// connect opens the client's data-plane session.
func (h *host) connect() {
	h.t.Helper()
	if err := h.connectAs(h.t.Context(), h.engine); err != nil {
		h.t.Fatal(err)
	}
}

// connectAs opens a data-plane session of an engine, with the token that Describe returns to the
// principal of ctx.
func (h *host) connectAs(ctx context.Context, e rdma.Engine) error {
	h.t.Helper()
	d, err := h.cache.Describe(ctx, &pb.DescribeRequest{})
	if err != nil {
		h.t.Fatal(err)
	}
	var addr rdma.Addr
	if err := addr.UnmarshalBinary(d.GetDataAddress()); err != nil {
		h.t.Fatal(err)
	}
	_, err = e.Connect(ctx, addr, d.GetDataToken())
	return err
}

func chain(ns kv.Namespace, blocks int) []byte {
	c, err := ns.Chain()
	if err != nil {
		panic(err)
	}
	ids, _ := c.Append(nil, make([]kv.Token, blocks*ns.Geometry.BlockTokens))
	return api.AppendIDs(nil, ids)
}

// write stores the chain. Block i is filled with the byte i+1.
func (h *host) write(ns kv.Namespace, blocks int) *pb.CommitResponse {
	h.t.Helper()
	ctx := h.t.Context()
	digest := ns.Geometry.Digest()
	res, err := h.cache.Reserve(ctx, &pb.ReserveRequest{Namespace: "m", BlockIds: chain(ns, blocks), GeometryDigest: digest[:]})
	if err != nil {
		h.t.Fatal(err)
	}
	var window rdma.Desc
	if err := window.UnmarshalBinary(res.GetWindow()); err != nil {
		h.t.Fatal(err)
	}
	size := int(ns.Geometry.BlockBytes())
	commit := &pb.CommitRequest{Reservation: res.GetReservation()}
	for i, p := range res.GetPieces() {
		block := h.memory.Bytes()[i*size : (i+1)*size]
		for j := range block {
			block[j] = byte(i + 1)
		}
		done := rdma.NewFlag()
		if err := h.engine.Write(ctx, rdma.Write{Src: h.memory, SrcOffset: uint64(i * size), Dst: window, DstOffset: p.GetOffset(), Len: uint64(size), Imm: rdma.ImmOf(res.GetImm()), Done: done.Set}); err != nil {
			h.t.Fatal(err)
		}
		if err := done.Wait(ctx); err != nil {
			h.t.Fatal(err)
		}
		commit.Pieces = append(commit.Pieces, &pb.PieceSums{Block: p.GetBlock(), LayerSums: ondisk.AppendLayerSums(nil, block, ns.Geometry.Groups[0].Layers)})
	}
	resp, err := h.cache.Commit(ctx, commit)
	if err != nil {
		h.t.Fatal(err)
	}
	return resp
}

// TestReserveNamesWriter: the window of a reservation over gRPC is open only to the engine that the
// request names. A malformed engine name is refused.
func TestReserveNamesWriter(t *testing.T) {
	h := newHost(t, nil, nil)
	ns := h.namespace()
	own := h.engine
	stranger, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	h.engine = stranger
	h.connect()
	h.engine = own
	src, err := stranger.Register(make([]byte, 64), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	id := own.Addr().Engine
	req := &pb.ReserveRequest{Namespace: "m", BlockIds: chain(ns, 1), GeometryDigest: digestOf(ns), DataEngine: id[:]}
	res, err := h.cache.Reserve(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	var window rdma.Desc
	if err := window.UnmarshalBinary(res.GetWindow()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		e    rdma.Engine
		src  rdma.Region
		want error
	}{{stranger, src, rdma.ErrRefused}, {own, h.memory, nil}} {
		done := rdma.NewFlag()
		if err := c.e.Write(t.Context(), rdma.Write{Src: c.src, Dst: window, Len: 64, Done: done.Set}); err != nil {
			t.Fatal(err)
		}
		if err := done.Wait(t.Context()); !errors.Is(err, c.want) {
			t.Errorf("write of engine %v: %v; want %v", c.e.Addr().Engine, err, c.want)
		}
	}
	req.DataEngine = id[:15]
	if _, err := h.cache.Reserve(t.Context(), req); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "data_engine of 15 bytes") {
		t.Errorf("a name of 15 bytes: %v", err)
	}
}

func TestBytesGoThereAndBack(t *testing.T) {
	h := newHost(t, nil, nil)
	ns := h.namespace()
	for _, p := range h.write(ns, 3).GetPieces() {
		if p.GetState() != pb.PieceResult_STATE_STORED {
			t.Fatalf("commit: %v", p)
		}
	}
	clear(h.memory.Bytes())
	window, err := h.memory.Window(4096, 3*uint64(ns.Geometry.BlockBytes()))
	if err != nil {
		t.Fatal(err)
	}
	dst, err := window.Desc().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	req := &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, 4), Destination: dst, Imm: 77}
	for i := range 4 {
		req.Pieces = append(req.Pieces, &pb.PieceRef{Block: uint32(i), Offset: uint64(i) * uint64(ns.Geometry.BlockBytes())})
	}
	resp, err := h.cache.Read(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if resp.GetMatchedBlocks() != 3 || resp.GetImmediates() != 3 || resp.GetCut() != "absent" || resp.GetPieces()[3].GetState() != pb.PieceResult_STATE_MISS {
		t.Fatalf("read: %v", resp)
	}
	landed := rdma.NewFlag()
	if _, err := h.engine.ExpectImm(rdma.Expect{Imm: 77, Count: 3, Done: landed.Set}); err != nil {
		t.Fatal(err)
	}
	if err := landed.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, b := range window.Bytes() {
		if want := byte(i/int(ns.Geometry.BlockBytes()) + 1); b != want {
			t.Fatalf("byte %d is %d; want %d", i, b, want)
		}
	}
	for i, p := range resp.GetPieces()[:3] {
		block := window.Bytes()[i*int(ns.Geometry.BlockBytes()):][:ns.Geometry.BlockBytes()]
		if !slices.Equal(p.GetLayerSums(), ondisk.AppendLayerSums(nil, block, 4)) {
			t.Errorf("block %d: the reply's checksums are not those of the bytes", i)
		}
	}
	again, err := h.cache.Reserve(t.Context(), &pb.ReserveRequest{Namespace: "m", BlockIds: chain(ns, 3), GeometryDigest: digestOf(ns)})
	if err != nil || again.GetReservation() != 0 || again.GetPieces()[0].GetState() != pb.PieceResult_STATE_EXISTS {
		t.Errorf("a second reservation: %v, %v", again, err)
	}
}

func digestOf(ns kv.Namespace) []byte {
	d := ns.Geometry.Digest()
	return d[:]
}

func TestBadCallsGetClearCodes(t *testing.T) {
	h := newHost(t, nil, nil)
	ns := h.namespace()
	ctx := t.Context()
	ids := chain(ns, 2)
	window, err := h.memory.Window(0, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	dst, err := window.Desc().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	one := []*pb.PieceRef{{}}
	calls := map[string]struct {
		code codes.Code
		call func() error
	}{
		"match unknown namespace": {codes.NotFound, func() error {
			_, err := h.cache.Match(ctx, &pb.MatchRequest{Namespace: "x", BlockIds: ids})
			return err
		}},
		"match half an id": {codes.InvalidArgument, func() error {
			_, err := h.cache.Match(ctx, &pb.MatchRequest{Namespace: "m", BlockIds: ids[:20]})
			return err
		}},
		"match nothing": {codes.InvalidArgument, func() error { _, err := h.cache.Match(ctx, &pb.MatchRequest{Namespace: "m"}); return err }},
		"match too long a chain": {codes.InvalidArgument, func() error {
			_, err := h.cache.Match(ctx, &pb.MatchRequest{Namespace: "m", BlockIds: make([]byte, 65*16)})
			return err
		}},
		"read no pieces": {codes.InvalidArgument, func() error {
			_, err := h.cache.Read(ctx, &pb.ReadRequest{Namespace: "m", BlockIds: ids, Destination: dst})
			return err
		}},
		"read into garbage": {codes.InvalidArgument, func() error {
			_, err := h.cache.Read(ctx, &pb.ReadRequest{Namespace: "m", BlockIds: ids, Pieces: one, Destination: []byte("garbage")})
			return err
		}},
		"read block out of range": {codes.InvalidArgument, func() error {
			_, err := h.cache.Read(ctx, &pb.ReadRequest{Namespace: "m", BlockIds: ids, Pieces: []*pb.PieceRef{{Block: 1 << 31}}, Destination: dst})
			return err
		}},
		"read layers out of range": {codes.InvalidArgument, func() error {
			_, err := h.cache.Read(ctx, &pb.ReadRequest{Namespace: "m", BlockIds: ids, Pieces: one, Destination: dst, Layers: 1 << 31})
			return err
		}},
		"reserve another geometry": {codes.FailedPrecondition, func() error {
			_, err := h.cache.Reserve(ctx, &pb.ReserveRequest{Namespace: "m", BlockIds: ids, GeometryDigest: make([]byte, 16)})
			return err
		}},
		"reserve without geometry": {codes.InvalidArgument, func() error {
			_, err := h.cache.Reserve(ctx, &pb.ReserveRequest{Namespace: "m", BlockIds: ids})
			return err
		}},
		"reserve a later epoch": {codes.FailedPrecondition, func() error {
			_, err := h.cache.Reserve(ctx, &pb.ReserveRequest{Namespace: "m", Epoch: 9, BlockIds: ids, GeometryDigest: digestOf(ns)})
			return err
		}},
		"reserve with half parent": {codes.InvalidArgument, func() error {
			_, err := h.cache.Reserve(ctx, &pb.ReserveRequest{Namespace: "m", Parent: []byte{1}, BlockIds: ids, GeometryDigest: digestOf(ns)})
			return err
		}},
		"commit nothing reserved": {codes.NotFound, func() error { _, err := h.cache.Commit(ctx, &pb.CommitRequest{Reservation: 7}); return err }},
		"abort nothing reserved":  {codes.NotFound, func() error { _, err := h.cache.Abort(ctx, &pb.AbortRequest{Reservation: 7}); return err }},
		"renew no lease": {codes.NotFound, func() error {
			_, err := h.cache.RenewLease(ctx, &pb.RenewLeaseRequest{Lease: 7, TtlMs: 1000})
			return err
		}},
		"renew for no time": {codes.InvalidArgument, func() error { _, err := h.cache.RenewLease(ctx, &pb.RenewLeaseRequest{Lease: 7}); return err }},
		"create without geometry": {codes.InvalidArgument, func() error {
			_, err := h.admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: "n"}})
			return err
		}},
		"create nothing": {codes.InvalidArgument, func() error { _, err := h.admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{}); return err }},
		"create huge": {codes.InvalidArgument, func() error {
			_, err := h.admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: "n", Geometry: api.GeometryProto(kv.SingleGroup(64, 64, 1<<16))}})
			return err
		}},
		"create m otherwise": {codes.AlreadyExists, func() error {
			_, err := h.admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: "m", Geometry: api.GeometryProto(kv.SingleGroup(1, 1, 1))}})
			return err
		}},
		"show unknown": {codes.NotFound, func() error { _, err := h.admin.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: "x"}); return err }},
		"delete unknown": {codes.NotFound, func() error {
			_, err := h.admin.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: "x"})
			return err
		}},
		"bump unknown": {codes.NotFound, func() error { _, err := h.admin.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: "x"}); return err }},
		"negative quota": {codes.InvalidArgument, func() error {
			_, err := h.admin.SetQuota(ctx, &pb.SetQuotaRequest{Name: "m", QuotaBytes: -1})
			return err
		}},
		"delete half a block id": {codes.InvalidArgument, func() error {
			_, err := h.admin.DeleteBlocks(ctx, &pb.DeleteBlocksRequest{Namespace: "m", BlockId: []byte{1}})
			return err
		}},
		"delete an absent block": {codes.NotFound, func() error {
			_, err := h.admin.DeleteBlocks(ctx, &pb.DeleteBlocksRequest{Namespace: "m", BlockId: ids[:16]})
			return err
		}},
		"evict nothing": {codes.InvalidArgument, func() error { _, err := h.admin.Evict(ctx, &pb.EvictRequest{}); return err }},
		"list from a wrong cursor": {codes.InvalidArgument, func() error {
			_, err := h.admin.ListBlocks(ctx, &pb.ListBlocksRequest{Namespace: "m", Cursor: []byte{1}})
			return err
		}},
		"stat an absent block": {codes.NotFound, func() error {
			_, err := h.admin.StatBlock(ctx, &pb.StatBlockRequest{Namespace: "m", BlockId: ids[:16]})
			return err
		}},
		"read into a foreign engine": {codes.OK, func() error {
			return nil // a failed piece is not an error of the call; its state is checked below
		}},
	}
	for name, tc := range calls {
		if err := tc.call(); status.Code(err) != tc.code {
			t.Errorf("%s: %v; want %v", name, err, tc.code)
		}
	}
	h.write(ns, 1)
	var foreign rdma.Desc
	if err := foreign.UnmarshalBinary(dst); err != nil {
		t.Fatal(err)
	}
	for name, edit := range map[string]func(*rdma.Desc){
		"an engine without a session": func(d *rdma.Desc) { d.Engine[0]++; d.NICs = nil },
		"a key that opens nothing":    func(d *rdma.Desc) { d.NICs[0].Key++ },
		"a window that is too short":  func(d *rdma.Desc) { d.Len = 1 << 40; d.NICs[0].Key += 0 },
	} {
		d := foreign
		d.NICs = slices.Clone(foreign.NICs)
		edit(&d)
		bad, err := d.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		offset := uint64(0)
		if d.Len == 1<<40 {
			offset = 1 << 30
		}
		resp, err := h.cache.Read(ctx, &pb.ReadRequest{Namespace: "m", BlockIds: ids, Pieces: []*pb.PieceRef{{Offset: offset}}, Destination: bad, Imm: 1})
		if err != nil || resp.GetImmediates() != 0 || resp.GetPieces()[0].GetState() != pb.PieceResult_STATE_FAILED || resp.GetPieces()[0].GetReason() == "" {
			t.Errorf("%s: %v, %v", name, resp, err)
		}
	}
}

func TestBearerToken(t *testing.T) {
	h := newHost(t, func(o *server.Options) { o.Tokens = func() []string { return []string{"secret"} } }, nil)
	for given, want := range map[string]codes.Code{"": codes.Unauthenticated, "Bearer wrong": codes.Unauthenticated, "secret": codes.Unauthenticated, "Bearer secret": codes.OK} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", given)
		if _, err := h.cache.Describe(ctx, &pb.DescribeRequest{}); status.Code(err) != want {
			t.Errorf("token %q: %v; want %v", given, err, want)
		}
		stream, err := h.cache.Events(ctx, &pb.EventsRequest{After: 99})
		if err == nil {
			_, err = stream.Recv() // the first event is a Gap, because sequence 99 is from another run
		}
		if status.Code(err) != want {
			t.Errorf("stream with token %q: %v; want %v", given, err, want)
		}
	}
}

func TestMutualTLS(t *testing.T) {
	ca, stranger := testkit.NewAuthority(t), testkit.NewAuthority(t)
	client := credentials.NewTLS(&tls.Config{RootCAs: ca.Pool, Certificates: []tls.Certificate{ca.Issue(nil)}})
	h := newHost(t, func(o *server.Options) {
		o.TLS = &tls.Config{Certificates: []tls.Certificate{ca.Issue(nil)}, ClientCAs: ca.Pool, ClientAuth: tls.RequireAndVerifyClientCert}
	}, client)
	if _, err := h.cache.Describe(t.Context(), &pb.DescribeRequest{}); err != nil {
		t.Fatalf("with a certificate: %v", err)
	}
	for name, creds := range map[string]credentials.TransportCredentials{
		"no certificate":      credentials.NewTLS(&tls.Config{RootCAs: ca.Pool}),
		"another authority's": credentials.NewTLS(&tls.Config{RootCAs: ca.Pool, Certificates: []tls.Certificate{stranger.Issue(nil)}}),
		"no TLS":              insecure.NewCredentials(),
	} {
		conn, err := grpc.NewClient(h.control, grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pb.NewCacheClient(conn).Describe(t.Context(), &pb.DescribeRequest{}); err == nil {
			t.Errorf("%s: let in", name)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestHTTP(t *testing.T) {
	h := newHost(t, nil, nil)
	for path, want := range map[string]string{
		"/healthz": "ok", "/health": "ok", "/readyz": `"serving"`, "/metrics": "penstock_store_capacity_bytes 1.6777216e+07",
		"/metrics/summary": "state=serving", "/debug/pprof/": "goroutine",
	} {
		if code, body := get(t, h.web+path); code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: %d, %.200q; want %q in it", path, code, body, want)
		}
	}
	h.node.Drain()
	code, body := get(t, h.web+"/readyz")
	var state struct{ State string }
	if err := json.Unmarshal([]byte(body), &state); err != nil || code != http.StatusServiceUnavailable || state.State != "draining" {
		t.Errorf("while draining: %d, %s, %v", code, body, err)
	}
}

// TestReadyWhileFaulty: while its volumes or its index cannot be written, a node is not ready and
// /readyz has the reason. The node is ready again after the fault.
func TestReadyWhileFaulty(t *testing.T) {
	h := newHost(t, nil, nil)
	ns := h.namespace()
	h.write(ns, 2)
	ready := func(want int, reason string) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; runtime.Gosched() {
			code, body := get(t, h.web+"/readyz")
			if code == want && strings.Contains(body, reason) {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("/readyz stays %d: %s; want %d and %q", code, body, want, reason)
			}
		}
	}
	create := func(name string) error {
		_, err := h.admin.CreateNamespace(t.Context(), &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: name, Geometry: api.GeometryProto(ns.Geometry)}})
		return err
	}
	writable := func(want string) {
		t.Helper()
		if _, body := get(t, h.web+"/metrics"); !strings.Contains(body, "penstock_index_writable "+want+"\n") {
			t.Errorf("penstock_index_writable is not %s", want)
		}
	}
	// state checks that status and metrics show this state of the volume, and no other.
	state := func(want string) {
		t.Helper()
		st, err := h.admin.Status(t.Context(), &pb.StatusRequest{})
		if err != nil || len(st.GetVolumes()) != 1 || st.GetVolumes()[0].GetState() != want || (st.GetVolumes()[0].GetStateReason() == "") != (want == "ok") {
			t.Errorf("status: %v, %v; want a volume that is %s", st.GetVolumes(), err, want)
		}
		_, body := get(t, h.web+"/metrics")
		for _, s := range health.States() {
			is := "0"
			if s.String() == want {
				is = "1"
			}
			if !regexp.MustCompile(`(?m)^penstock_volume_state\{state="` + s.String() + `",volume="[^"]+"\} ` + is + `$`).MatchString(body) {
				t.Errorf("the volume is %s, and penstock_volume_state of %v is not %s", want, s, is)
			}
		}
	}
	ready(http.StatusOK, "serving")
	state("ok")
	h.indexFault.On()
	if err := create("x"); err == nil || !strings.Contains(err.Error(), "input/output error") {
		t.Errorf("create while the index fails: %v", err)
	}
	ready(http.StatusServiceUnavailable, "index cannot be written")
	writable("0")
	if st, err := h.admin.Status(t.Context(), &pb.StatusRequest{}); err != nil || st.GetState() != "read_only" || !strings.Contains(st.GetStateReason(), "index") {
		t.Errorf("status: %s (%s), %v", st.GetState(), st.GetStateReason(), err)
	}
	h.indexFault.Off()
	ready(http.StatusOK, "serving")
	writable("1")
	h.faults.SetRules(faultio.MustParse(`(Err EIO (Or Writes Syncs))`))
	if err := create("x"); err == nil {
		t.Error("a namespace was created on a volume that fails")
	}
	ready(http.StatusServiceUnavailable, "of 1 volumes, 1 must be healthy")
	state("failed")
	h.faults.SetRules(nil)
	ready(http.StatusOK, "serving")
	if err := create("x"); err != nil {
		t.Errorf("create after the faults: %v", err)
	}
}

func TestStatus(t *testing.T) {
	h := newHost(t, nil, nil)
	ns := h.namespace()
	h.write(ns, 3)
	st, err := h.admin.Status(t.Context(), &pb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if st.GetBlocks() != 3 || st.GetNamespaces() != 1 || st.GetIo() != "mem" || st.GetIoReason() != "a test" || st.GetState() != "serving" || st.GetUsedBytes() < 3*8192 || st.GetUsedBytes() > st.GetCapacityBytes() {
		t.Errorf("status: %v", st)
	}
}

// TestCounters: Status and ListNamespaces report the same work; the node's counters go on after the
// namespace was deleted. The epoch's begin and the rates of the links are reported too.
func TestCounters(t *testing.T) {
	h := newHost(t, func(o *server.Options) {
		o.LinkRate = func(n rdma.NIC) int64 { return 25e9 }
	}, nil)
	ctx := t.Context()
	ns := h.namespace()
	h.write(ns, 3)
	if _, err := h.cache.Match(ctx, &pb.MatchRequest{Namespace: "m", BlockIds: chain(ns, 4)}); err != nil {
		t.Fatal(err)
	}
	dst, err := h.memory.Desc().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.cache.Read(ctx, &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, 2), Destination: dst, Pieces: []*pb.PieceRef{{Block: 0}, {Block: 1, Offset: uint64(ns.Geometry.BlockBytes())}}}); err != nil {
		t.Fatal(err)
	}
	evicted, err := h.admin.Evict(ctx, &pb.EvictRequest{Namespace: "m", Bytes: 1})
	if err != nil || evicted.GetBlocks() == 0 {
		t.Fatalf("evicted %v, %v", evicted, err)
	}
	block := uint64(ns.Geometry.BlockBytes())
	want := &pb.Counters{
		QueriedTokens: 16, HitTokens: 12, ReadBlocks: 2, ReadBytes: 2 * block, WrittenBlocks: 3, WrittenBytes: 3 * block,
		EvictedBlocks: uint64(evicted.GetBlocks()), EvictedBytes: uint64(evicted.GetBytes()),
	}
	status := func() *pb.StatusResponse {
		t.Helper()
		st, err := h.admin.Status(ctx, &pb.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
	first := status()
	if !proto.Equal(first.GetCounters(), want) {
		t.Errorf("the node counted %v; want %v", first.GetCounters(), want)
	}
	if first.GetUptimeUs() <= 0 || first.GetRunningReadsLimit() <= 0 || first.GetNics()[0].GetLinkBitsPerSecond() != 25e9 {
		t.Errorf("status: %v", first)
	}
	if _, err := h.admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: "unused", Geometry: api.GeometryProto(geometry)}}); err != nil {
		t.Fatal(err)
	}
	list, err := h.admin.ListNamespaces(ctx, &pb.ListNamespacesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	m, unused := list.GetNamespaces()[0], list.GetNamespaces()[1]
	if !proto.Equal(m.GetCounters(), want) || !proto.Equal(unused.GetCounters(), &pb.Counters{}) {
		t.Errorf("the namespaces counted %v and %v; want %v and nothing", m.GetCounters(), unused.GetCounters(), want)
	}
	created := m.GetEpochSinceUnixMs()
	if _, err := h.admin.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: "m", Keep: 1}); err != nil {
		t.Fatal(err)
	}
	bumped, err := h.admin.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: "m"})
	if err != nil || created == 0 || bumped.GetEpochSinceUnixMs() < created {
		t.Errorf("the epoch began at %d, and after a bump at %d, %v", created, bumped.GetEpochSinceUnixMs(), err)
	}
	if start := h.node.EpochStart(ns.ID); start.At.UnixMilli() != bumped.GetEpochSinceUnixMs() || start.QueriedTokens != 16 || start.HitTokens != 12 {
		t.Errorf("the epoch began as %+v; want the counters of the namespace", start)
	}
	if _, err := h.admin.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: "m"}); err != nil {
		t.Fatal(err)
	}
	if last := status(); !proto.Equal(last.GetCounters(), want) || last.GetUptimeUs() < first.GetUptimeUs() {
		t.Errorf("after the namespace was deleted, the node counted %v at %d; want %v after %d", last.GetCounters(), last.GetUptimeUs(), want, first.GetUptimeUs())
	}
}

// TestMetricsPage: docs/metrics.md has a row with the help text for every metric of the registry,
// and no other row.
func TestMetricsPage(t *testing.T) {
	h := newHost(t, nil, nil)
	h.write(h.namespace(), 1)
	// A vector is collected only once a label value is used, but it is always described.
	ch := make(chan *prometheus.Desc, 1024)
	server.DescribeMetrics(ch)
	close(ch)
	described := regexp.MustCompile(`fqName: "([^"]+)", help: "([^"]+)"`)
	want := map[string]string{}
	for d := range ch {
		m := described.FindStringSubmatch(d.String())
		want[m[1]] = m[2]
	}
	_, body := get(t, h.web+"/metrics")
	for _, m := range regexp.MustCompile(`(?m)^# HELP (penstock_\S+) (.*)$`).FindAllStringSubmatch(body, -1) {
		want[m[1]] = m[2]
	}
	page, err := os.ReadFile("../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(penstock_[a-z0-9_]+)` \\|[^|]*\\| (.*) \\|$").FindAllStringSubmatch(string(page), -1) {
		got[m[1]] = m[2]
	}
	var rows []string
	for name, help := range want {
		rows = append(rows, fmt.Sprintf("| `%s` | | %s |", name, help))
		if got[name] != help {
			t.Errorf("docs/metrics.md: %s is %q; the registry has %q", name, got[name], help)
		}
	}
	elsewhere := regexp.MustCompile("^penstock_(planner|network|gateway|offload)_") // these packages have tests of their own
	for name := range got {
		if _, ok := want[name]; !ok && !elsewhere.MatchString(name) {
			t.Errorf("docs/metrics.md documents %s, which does not exist", name)
		}
	}
	if t.Failed() {
		slices.Sort(rows)
		t.Logf("rows:\n%s", strings.Join(rows, "\n"))
	}
}

func TestMetricNames(t *testing.T) {
	h := newHost(t, nil, nil)
	h.write(h.namespace(), 1)
	_, body := get(t, h.web+"/metrics")
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (penstock_\S+) (\S+)$`).FindAllStringSubmatch(body, -1) {
		name, kind := m[1], m[2]
		if (kind == "counter") != strings.HasSuffix(name, "_total") {
			t.Errorf("%s is a %s", name, kind)
		}
		if strings.Contains(name, "ratio") || strings.Contains(name, "percent") || strings.HasSuffix(name, "_ms") || strings.HasSuffix(name, "_us") {
			t.Errorf("%s is a ratio or not in base units", name)
		}
	}
}

func TestEventsStreamEndsOnShutdown(t *testing.T) {
	h := newHost(t, nil, nil)
	ns := h.namespace()
	stream, err := h.cache.Events(t.Context(), &pb.EventsRequest{After: 1 << 40, Namespace: "m"})
	if err != nil {
		t.Fatal(err)
	}
	if e, err := stream.Recv(); err != nil || e.GetKind() != pb.Event_KIND_GAP || e.GetTimeUnixMs() <= 0 {
		t.Fatalf("first: %v, %v", e, err)
	}
	h.write(ns, 2)
	e, err := stream.Recv()
	if err != nil || e.GetKind() != pb.Event_KIND_BLOCK_STORED || len(e.GetBlockIds()) != 32 || e.GetMedium() != "ssd" {
		t.Fatalf("stored: %v, %v", e, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := h.server.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("after the shutdown: %v", err)
	}
	if ctx.Err() != nil {
		t.Error("the shutdown waited for the stream")
	}
}

// TestNoConfiguration: a node without a Reloader refuses to compare and reload its configuration.
func TestNoConfiguration(t *testing.T) {
	h := newHost(t, nil, nil)
	_, diff := h.admin.DiffConfig(t.Context(), &pb.DiffConfigRequest{})
	_, reload := h.admin.ReloadConfig(t.Context(), &pb.ReloadConfigRequest{})
	for _, err := range []error{diff, reload} {
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "restart it") {
			t.Errorf("%v", err)
		}
	}
}
