package client_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/zeebo/xxh3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// fake is a node that a test controls. It can do things that no correct node does.
type fake struct {
	pb.UnimplementedCacheServer
	pb.UnimplementedAdminServer
	t      testing.TB
	engine rdma.Engine
	mem    []byte
	region rdma.Region
	token  rdma.Token
	addr   string
	// members is the fake's list of members.
	members []*pb.Member
	// describe edits the fake's response to Describe.
	describe func(*pb.DescribeResponse)

	read    func(context.Context, *fake, *pb.ReadRequest) (*pb.ReadResponse, error)
	reserve func(context.Context, *fake, *pb.ReserveRequest) (*pb.ReserveResponse, error)
	commit  func(context.Context, *fake, *pb.CommitRequest) (*pb.CommitResponse, error)
	abort   func(*pb.AbortRequest)
	// demote is the fake's Demote. If nil, the fake has an earlier version, without this call.
	demote func(*pb.DemoteRequest) error
}

func (f *fake) Demote(ctx context.Context, req *pb.DemoteRequest) (*pb.DemoteResponse, error) {
	if f.demote == nil {
		return f.UnimplementedCacheServer.Demote(ctx, req)
	}
	return &pb.DemoteResponse{}, f.demote(req)
}

// ListMembers returns the list members.
func (f *fake) ListMembers(context.Context, *pb.ListMembersRequest) (*pb.ListMembersResponse, error) {
	return &pb.ListMembersResponse{Members: f.members}, nil
}

func newFake(t testing.TB) *fake {
	t.Helper()
	f := &fake{t: t, token: rdma.Token("a token of enough bytes"), mem: make([]byte, 1<<20)}
	var err error
	if f.engine, err = tcp.New(t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: f.token}); err != nil {
		t.Fatal(err)
	}
	if f.region, err = f.engine.Register(f.mem, rdma.RegisterOptions{}); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f.addr = l.Addr().String()
	t.Cleanup(func() {
		if err := f.engine.Close(); err != nil {
			t.Errorf("fake: %v", err)
		}
	})
	f.serveAt(l)
	return f
}

// serveAt serves the fake at a listener, until the test ends.
func (f *fake) serveAt(l net.Listener) {
	s := grpc.NewServer()
	pb.RegisterCacheServer(s, f)
	pb.RegisterAdminServer(s, f)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	f.t.Cleanup(func() {
		s.Stop()
		if err := <-served; err != nil {
			f.t.Errorf("fake: %v", err)
		}
	})
}

func (f *fake) Describe(context.Context, *pb.DescribeRequest) (*pb.DescribeResponse, error) {
	addr, err := f.engine.Addr().MarshalBinary()
	d := &pb.DescribeResponse{Node: "fake", DataAddress: addr, DataToken: f.token, MaxReadBytes: 1 << 20, MaxWriteBytes: 1 << 20, MaxChainBlocks: 1024}
	if f.describe != nil {
		f.describe(d)
	}
	return d, err
}

func (f *fake) GetNamespace(context.Context, *pb.GetNamespaceRequest) (*pb.Namespace, error) {
	return api.NamespaceProto(kv.Namespace{ID: 1, Name: "m", Geometry: geometry, Index: kv.IndexTrie, Epoch: 1}), nil
}

func (f *fake) Read(ctx context.Context, req *pb.ReadRequest) (*pb.ReadResponse, error) {
	return f.read(ctx, f, req)
}

func (f *fake) Reserve(ctx context.Context, req *pb.ReserveRequest) (*pb.ReserveResponse, error) {
	return f.reserve(ctx, f, req)
}

func (f *fake) Commit(ctx context.Context, req *pb.CommitRequest) (*pb.CommitResponse, error) {
	return f.commit(ctx, f, req)
}

func (f *fake) Abort(_ context.Context, req *pb.AbortRequest) (*pb.AbortResponse, error) {
	if f.abort != nil {
		f.abort(req)
	}
	return &pb.AbortResponse{}, nil
}

// post writes n bytes of the fake's memory into the client's window and returns the result of the
// write.
func (f *fake) post(dst []byte, offset, n uint64, imm rdma.Imm) error {
	var desc rdma.Desc
	if err := desc.UnmarshalBinary(dst); err != nil {
		return err
	}
	flag := rdma.NewFlag()
	if err := f.engine.Write(context.Background(), rdma.Write{Src: f.region, Dst: desc, DstOffset: offset, Len: n, Imm: imm, Done: flag.Set}); err != nil {
		return err
	}
	return flag.Wait(context.Background())
}

// sums returns the layer checksums of the piece at the start of the fake's memory.
func (f *fake) sums() (sums []uint64) {
	for k := range 4 {
		sums = append(sums, xxh3.Hash(f.mem[k*2048:][:2048]))
	}
	return sums
}

// serve responds to a Read with the piece at the start of the fake's memory, for every block.
func (f *fake) serve(req *pb.ReadRequest, epoch uint64) (*pb.ReadResponse, error) {
	resp := &pb.ReadResponse{Outcome: pb.Outcome_OUTCOME_HIT, MatchedBlocks: uint32(len(req.GetBlockIds()) / 16), Cut: "complete", Epoch: epoch}
	for _, p := range req.GetPieces() {
		if err := f.post(req.GetDestination(), p.GetOffset(), 8192, rdma.ImmOf(req.GetImm())); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		resp.Immediates++
		resp.Pieces = append(resp.Pieces, &pb.PieceResult{Block: p.GetBlock(), State: pb.PieceResult_STATE_DELIVERED, LayerSums: f.sums()})
	}
	return resp, nil
}

func fakeRig(t *testing.T, f *fake, edit func(*client.Options)) (*rig, kv.Namespace, []kv.BlockID) {
	t.Helper()
	r := newRig(t, func(o *client.Options) {
		o.Servers = []string{f.addr}
		if edit != nil {
			edit(o)
		}
	})
	ns, err := r.store.Namespace(t.Context(), "m")
	if err != nil {
		t.Fatal(err)
	}
	return r, ns, chain(ns, 4, 1)
}

// TestNothingLandsAfterRead: ctx ends while the node is about to write. After Read has returned,
// the node's writes are refused and the memory is unchanged.
func TestNothingLandsAfterRead(t *testing.T) {
	f := newFake(t)
	arrived, late, posted := make(chan []byte), make(chan struct{}), make(chan error)
	f.read = func(_ context.Context, f *fake, req *pb.ReadRequest) (*pb.ReadResponse, error) {
		arrived <- req.GetDestination()
		<-late
		posted <- f.post(req.GetDestination(), 0, 8192, rdma.ImmOf(req.GetImm()))
		return &pb.ReadResponse{}, nil
	}
	r, ns, ids := fakeRig(t, f, nil)
	for i := range f.mem {
		f.mem[i] = 0xee
	}
	mem := r.memory(4 * 8192)
	ctx, cancel := context.WithCancel(t.Context())
	returned := make(chan error)
	go func() {
		got, err := r.store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: ids, Into: mem})
		if got.Outcome != client.Miss || len(got.Lost) != 4 || got.Lost[0].Reason != client.LostSkipped {
			t.Errorf("read: %+v", got)
		}
		returned <- err
	}()
	<-arrived
	cancel()
	if err := <-returned; !errors.Is(err, context.Canceled) {
		t.Fatalf("read: %v", err)
	}
	close(late)
	if err := <-posted; !errors.Is(err, rdma.ErrRefused) {
		t.Errorf("a write after the read: %v; want it refused", err)
	}
	if !bytes.Equal(mem.Bytes(), make([]byte, 4*8192)) {
		t.Error("memory changed after Read had returned")
	}
	if n := r.engine.Stats().RefusedIn[rdma.ReasonKey]; n != 1 {
		t.Errorf("%d writes were refused", n)
	}
}

// TestLastHop: bytes that differ from the writer's checksums are never delivered, even
// if the node reports them as good.
func TestLastHop(t *testing.T) {
	f := newFake(t)
	answer := func(bad func(*pb.ReadResponse)) {
		f.read = func(_ context.Context, f *fake, req *pb.ReadRequest) (*pb.ReadResponse, error) {
			resp, err := f.serve(req, 1)
			bad(resp)
			return resp, err
		}
	}
	r, ns, ids := fakeRig(t, f, nil)
	fill(f.mem[:8192], ids[0], 0, 1)
	mem := r.memory(4 * 8192)
	read := func() (client.ReadResult, error) {
		return r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: mem})
	}
	answer(func(*pb.ReadResponse) {})
	if got, err := read(); err != nil || got.Blocks != 4 {
		t.Fatalf("an honest node: %+v, %v", got, err)
	}
	answer(func(m *pb.ReadResponse) { m.Pieces[2].LayerSums[3] ^= 1 })
	if got, err := read(); err != nil || got.Blocks != 2 || got.Cut != client.CutLost || len(got.Lost) != 1 || got.Lost[0].Block != 2 || got.Lost[0].Reason != client.LostChecksum || got.Bytes != 3*8192 {
		t.Fatalf("one wrong checksum: %+v, %v", got, err)
	}
	answer(func(m *pb.ReadResponse) { m.Pieces[0].LayerSums = m.Pieces[0].LayerSums[:3] })
	if got, err := read(); err != nil || got.Blocks != 0 || got.Outcome != client.Miss || got.Lost[0].Reason != client.LostChecksum {
		t.Fatalf("a checksum short: %+v, %v", got, err)
	}
	if s := r.store.Stats(); s.LostChecksum != 2 || s.LostPieces != 2 {
		t.Errorf("stats: %v", s)
	}
	answer(func(m *pb.ReadResponse) { m.Pieces = m.Pieces[:3] })
	if got, err := read(); err == nil {
		t.Fatalf("an answer for too few pieces: %+v", got)
	}
}

// TestTwoEpochsDoNotMix: the epoch changes between two tasks of one Read.
func TestTwoEpochsDoNotMix(t *testing.T) {
	f := newFake(t)
	r, ns, ids := fakeRig(t, f, func(o *client.Options) { o.ReadTaskBytes, o.ReadParallel = 2*8192, 1 })
	calls := uint64(0)
	f.read = func(_ context.Context, f *fake, req *pb.ReadRequest) (*pb.ReadResponse, error) {
		calls++
		return f.serve(req, calls)
	}
	got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: r.memory(4 * 8192)})
	if err != nil || got.Blocks != 2 || got.Epoch != 1 || got.Cut != client.CutEpoch || len(got.Lost) != 2 || got.Lost[0].Reason != client.LostEpoch || got.Bytes != 2*8192 {
		t.Fatalf("read: %+v, %v", got, err)
	}
}

// TestRetries: a Read whose connection breaks is tried again, a Reserve is not.
func TestRetries(t *testing.T) {
	f := newFake(t)
	r, ns, ids := fakeRig(t, f, nil)
	calls := 0
	f.read = func(_ context.Context, f *fake, req *pb.ReadRequest) (*pb.ReadResponse, error) {
		if calls++; calls == 1 {
			return nil, status.Error(codes.Unavailable, "not now")
		}
		return f.serve(req, 1)
	}
	if got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: r.memory(4 * 8192)}); err != nil || got.Blocks != 4 || calls != 2 {
		t.Fatalf("read: %+v, %v after %d calls", got, err, calls)
	}
	if s := r.store.Stats(); s.Retries != 1 {
		t.Errorf("stats: %v", s)
	}
	calls = 0
	f.reserve = func(context.Context, *fake, *pb.ReserveRequest) (*pb.ReserveResponse, error) {
		calls++
		return nil, status.Error(codes.Unavailable, "node takes no writes")
	}
	w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: r.memory(4 * 8192)})
	if err != nil || w.Outcome != client.Miss || calls != 1 || len(w.Refused) != 4 || w.Detail == "" {
		t.Fatalf("write: %+v, %v after %d calls", w, err, calls)
	}
	if n := r.store.Nodes(); !n[0].Up {
		t.Error("a node that takes no writes is avoided for reads")
	}
}

// TestAnotherProvider: if the Store's engine has another provider than the node, the
// error names the node's provider. A node that names none is an old one and uses tcp.
func TestAnotherProvider(t *testing.T) {
	for provider, want := range map[string]error{"": nil, "tcp": nil, "verbs": client.ErrProvider} {
		f := newFake(t)
		f.describe = func(d *pb.DescribeResponse) { d.DataProvider = provider }
		engine, err := tcp.New(t.Context(), tcp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		s, err := client.Open(t.Context(), client.Options{Servers: []string{f.addr}, Engine: engine})
		if !errors.Is(err, want) || want != nil && !strings.Contains(err.Error(), "open an engine of provider "+provider) {
			t.Errorf("a node with provider %q: %v, want %v", provider, err, want)
		}
		if err == nil {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
		if err := engine.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestDeadDataPlane: the data plane's session ends during a Read. The client opens it
// again, and the Read succeeds. It takes a third call if the node has not yet noticed
// the end of the old session.
func TestDeadDataPlane(t *testing.T) {
	f := newFake(t)
	r, ns, ids := fakeRig(t, f, nil)
	calls := 0
	f.read = func(_ context.Context, f *fake, req *pb.ReadRequest) (*pb.ReadResponse, error) {
		if calls++; calls > 1 {
			return f.serve(req, 1)
		}
		r.engine.Disconnect(f.engine.Addr().Engine)
		resp := &pb.ReadResponse{MatchedBlocks: 4}
		for _, p := range req.GetPieces() {
			resp.Pieces = append(resp.Pieces, &pb.PieceResult{Block: p.GetBlock(), State: pb.PieceResult_STATE_FAILED, Reason: "transfer: no session"})
		}
		return resp, nil
	}
	if got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: r.memory(4 * 8192)}); err != nil || got.Blocks != 4 || calls < 2 {
		t.Fatalf("read: %+v, %v after %d calls", got, err, calls)
	}
}

// TestWriteGivenUp: ctx ends during the transfer of the pieces of a Write to a node that does not
// read them. Write returns, the reservation is aborted, and the caller's memory is no longer read.
func TestWriteGivenUp(t *testing.T) {
	f := newFake(t)
	ctx, cancel := context.WithCancel(t.Context())
	aborted := make(chan uint64, 1)
	f.abort = func(req *pb.AbortRequest) { aborted <- req.GetReservation() }
	f.reserve = func(_ context.Context, f *fake, req *pb.ReserveRequest) (*pb.ReserveResponse, error) {
		window, err := f.region.Desc().MarshalBinary()
		resp := &pb.ReserveResponse{Outcome: pb.Outcome_OUTCOME_HIT, Reservation: 77, Window: window, Imm: 5}
		for i, p := range req.GetPieces() {
			resp.Pieces = append(resp.Pieces, &pb.PieceResult{Block: p.GetBlock(), State: pb.PieceResult_STATE_GRANTED, Offset: uint64(i) * 8192})
		}
		return resp, err
	}
	f.commit = func(ctx context.Context, _ *fake, _ *pb.CommitRequest) (*pb.CommitResponse, error) {
		cancel()
		<-ctx.Done()
		return nil, ctx.Err()
	}
	r, ns, ids := fakeRig(t, f, nil)
	mem := r.memory(4 * 8192)
	w, err := r.store.Write(ctx, client.WriteRequest{Namespace: ns, IDs: ids, From: mem})
	if !errors.Is(err, context.Canceled) || w.Stored != 0 || len(w.Refused) != 4 {
		t.Fatalf("write: %+v, %v", w, err)
	}
	if err := mem.Close(t.Context()); err != nil {
		t.Errorf("the memory is still in use: %v", err)
	}
	// The target now refuses the writes, because the window does not exist.
	reserve := f.reserve
	f.reserve = func(ctx context.Context, f *fake, req *pb.ReserveRequest) (*pb.ReserveResponse, error) {
		resp, err := reserve(ctx, f, req)
		desc := f.region.Desc()
		desc.NICs = slices.Clone(desc.NICs)
		desc.NICs[0].Key ^= 1
		resp.Window, _ = desc.MarshalBinary()
		return resp, err
	}
	mem = r.memory(4 * 8192)
	w, err = r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: mem})
	if err != nil || w.Outcome != client.Miss || len(w.Refused) != 4 {
		t.Fatalf("write: %+v, %v", w, err)
	}
	if id := <-aborted; id != 77 {
		t.Errorf("reservation %d was given back; want 77", id)
	}
}

// TestCommitAnswers: the caller gets the node's result for each piece. A piece without a
// result counts as not stored.
func TestCommitAnswers(t *testing.T) {
	f := newFake(t)
	f.reserve = func(_ context.Context, f *fake, req *pb.ReserveRequest) (*pb.ReserveResponse, error) {
		window, err := f.region.Desc().MarshalBinary()
		resp := &pb.ReserveResponse{Outcome: pb.Outcome_OUTCOME_HIT, Reservation: 1, Window: window, Imm: 5}
		for i, p := range req.GetPieces() {
			resp.Pieces = append(resp.Pieces, &pb.PieceResult{Block: p.GetBlock(), State: pb.PieceResult_STATE_GRANTED, Offset: uint64(i) * 8192})
		}
		return resp, err
	}
	f.commit = func(_ context.Context, _ *fake, req *pb.CommitRequest) (*pb.CommitResponse, error) {
		return &pb.CommitResponse{Outcome: pb.Outcome_OUTCOME_HIT, Pieces: []*pb.PieceResult{
			{Block: 1, State: pb.PieceResult_STATE_EXISTS},
			{Block: 0, State: pb.PieceResult_STATE_STORED},
			{Block: 2, State: pb.PieceResult_STATE_REFUSED, Reason: "over_quota: the namespace may have 1 byte"},
		}}, nil
	}
	r, ns, ids := fakeRig(t, f, nil)
	mem := r.memory(4 * 8192)
	w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: mem})
	if err != nil || w.Outcome != client.Hit || w.Stored != 1 || w.Existed != 1 || w.Blocks != 2 || len(w.Refused) != 2 {
		t.Fatalf("write: %+v, %v", w, err)
	}
	if r := w.Refused[0]; r.Block != 2 || r.Reason != "over_quota" || r.Detail != "the namespace may have 1 byte" {
		t.Errorf("refused: %+v", r)
	}
	if r := w.Refused[1]; r.Block != 3 || r.Reason != "failed" {
		t.Errorf("not mentioned: %+v", r)
	}
	f.commit = func(context.Context, *fake, *pb.CommitRequest) (*pb.CommitResponse, error) {
		return nil, status.Error(codes.NotFound, "reservation 1: expired")
	}
	if w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: mem}); err != nil || w.Outcome != client.Miss || len(w.Refused) != 4 || w.Refused[0].Reason != "failed" {
		t.Fatalf("write into an expired reservation: %+v, %v", w, err)
	}
}
