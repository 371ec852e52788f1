package server_test

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/handoff"
)

// localEngine is an engine that is connected to the local socket of a host.
type localEngine struct {
	t     testing.TB
	conn  *net.UnixConn
	in    *bufio.Reader
	arena *arena.View
	// local is the node's listener.
	local *handoff.Listener
	// staging is nil before stage is called.
	staging *arena.Staging
}

func newNeighbour(t testing.TB) (*localEngine, *host) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "local.sock")
	e := &localEngine{t: t}
	h := newHost(t, func(o *server.Options) {
		var err error
		if o.Local, err = handoff.Listen(handoff.Options{Path: path, Arena: o.Arena}); err != nil {
			t.Fatal(err)
		}
		e.local = o.Local
	}, nil)
	var err error
	if e.conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.conn.Close() })
	if e.arena, err = arena.Receive(e.conn, make([]byte, api.LocalHelloBytes)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.arena.Close() })
	e.in = bufio.NewReader(e.conn)
	return e, h
}

// stage requests staging memory.
func (e *localEngine) stage() []byte {
	e.t.Helper()
	if _, err := e.conn.Write(api.AppendStage(nil)); err != nil {
		e.t.Fatal(err)
	}
	head := make([]byte, api.LocalFrameHeaderBytes)
	file, err := sys.ReceiveFile(e.conn, head)
	if err != nil || file == nil {
		e.t.Fatalf("no staging memory: %v", err)
	}
	if _, err := api.ReadLocalFrame(bufio.NewReader(io.MultiReader(bytes.NewReader(head), e.in))); err != nil {
		e.t.Fatal(err)
	}
	if e.staging, err = arena.MapStaging(file); err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { _ = e.staging.Close() })
	return e.staging.Bytes()
}

// raw makes a call with arbitrary request bytes.
func (e *localEngine) raw(m api.Method, request []byte) (codes.Code, []byte) {
	e.t.Helper()
	frame, err := api.Call{Method: m, ID: 7, ReplyMax: 1 << 20}.Append(make([]byte, api.LocalFrameHeaderBytes), m.Request())
	if err != nil {
		e.t.Fatal(err)
	}
	frame = append(frame, request...)
	api.PutLocalFrame(frame)
	if _, err := e.conn.Write(frame); err != nil {
		e.t.Fatal(err)
	}
	msg, err := api.ReadLocalFrame(e.in)
	if err != nil {
		e.t.Fatal(err)
	}
	reply, body, err := api.ParseReply(msg)
	if err != nil || reply.ID != 7 {
		e.t.Fatalf("reply %+v, %v", reply, err)
	}
	return codes.Code(reply.Code), body
}

// call makes a call. resp receives the response if there is no error.
func (e *localEngine) call(m api.Method, req, resp proto.Message) (codes.Code, string) {
	e.t.Helper()
	request, err := proto.Marshal(req)
	if err != nil {
		e.t.Fatal(err)
	}
	code, body := e.raw(m, request)
	if code != codes.OK {
		return code, string(body)
	}
	if err := proto.Unmarshal(body, resp); err != nil {
		e.t.Fatal(err)
	}
	return code, ""
}

// writeOf returns the request that writes the blocks [first, blocks) of a chain, with the sums of
// bytes.
func writeOf(ns kv.Namespace, first, blocks int, bytes []byte) *pb.WriteRequest {
	ids := chain(ns, blocks)
	req := &pb.WriteRequest{Reserve: &pb.ReserveRequest{Namespace: "m", BlockIds: ids[16*first:], GeometryDigest: digestOf(ns)}}
	if first > 0 {
		req.Reserve.Parent = ids[16*(first-1):][:16]
	}
	for i := range blocks - first {
		block := bytes[int64(i)*ns.Geometry.BlockBytes():][:ns.Geometry.BlockBytes()]
		req.Reserve.Pieces = append(req.Reserve.Pieces, &pb.PieceRef{Block: uint32(i)})
		req.Sums = append(req.Sums, &pb.PieceSums{Block: uint32(i), LayerSums: ondisk.AppendLayerSums(nil, block, ns.Geometry.Groups[0].Layers)})
	}
	return req
}

// TestLocalSocket: a caller on the local socket has no token. It may make reads, matches, existence
// checks and writes. Every other call, and a pin, is refused and changes nothing.
func TestLocalSocket(t *testing.T) {
	e, h := newNeighbour(t)
	ns := h.namespace()
	h.write(ns, 1)
	mem := e.stage()
	for _, c := range []struct {
		m    api.Method
		req  proto.Message
		resp proto.Message
		code codes.Code
	}{
		{api.MethodRead, &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, 1), Pieces: []*pb.PieceRef{{}}, Loan: 1}, new(pb.ReadResponse), codes.OK},
		{api.MethodMatch, &pb.MatchRequest{Namespace: "m", BlockIds: chain(ns, 1), LeaseTtlMs: 1000}, new(pb.MatchResponse), codes.OK},
		{api.MethodWrite, writeOf(ns, 1, 2, mem), new(pb.WriteResponse), codes.OK},
		{api.MethodExists, &pb.ExistsRequest{Namespace: "m", BlockIds: chain(ns, 1)}, new(pb.ExistsResponse), codes.OK},
		{api.MethodMatch, &pb.MatchRequest{Namespace: "m", BlockIds: chain(ns, 1), Pin: true}, nil, codes.PermissionDenied},
		{api.MethodReserve, &pb.ReserveRequest{Namespace: "m", BlockIds: chain(ns, 2), GeometryDigest: digestOf(ns), Pieces: []*pb.PieceRef{{Block: 1}}}, nil, codes.PermissionDenied},
		{api.MethodCommit, &pb.CommitRequest{Reservation: 1}, nil, codes.PermissionDenied},
	} {
		code, text := e.call(c.m, c.req, c.resp)
		if code != c.code {
			t.Errorf("%v: %v %q; want %v", c.m, code, text, c.code)
		}
		if c.code != codes.OK && !strings.Contains(text, "gRPC") {
			t.Errorf("%v: %q does not name the alternative", c.m, text)
		}
	}
	if s := h.node.Stats(); s.Reservations != 0 {
		t.Errorf("%d reservations were made over the socket", s.Reservations)
	}
}

// TestLocalWrite: a write stores the granted pieces from their places in the staging memory. A
// write that does not fit the memory, the namespace or its sums is refused and leaves nothing
// behind.
func TestLocalWrite(t *testing.T) {
	e, h := newNeighbour(t)
	ns := h.namespace()
	h.write(ns, 2) // blocks of ones and twos
	size := int(ns.Geometry.BlockBytes())
	content := make([]byte, 4*size)
	for i := range content {
		content[i] = byte(i/size + 1)
	}
	if code, text := e.call(api.MethodWrite, writeOf(ns, 0, 4, content), nil); code != codes.InvalidArgument || !strings.Contains(text, "32768 bytes and the staging memory has 0") {
		t.Errorf("without staging memory: %v %q", code, text)
	}
	mem := e.stage()
	copy(mem, content)
	edit := func(f func(*pb.WriteRequest)) *pb.WriteRequest {
		req := writeOf(ns, 0, 4, content)
		f(req)
		return req
	}
	for name, c := range map[string]struct {
		req  *pb.WriteRequest
		code codes.Code
		text string
	}{
		"no request":       {new(pb.WriteRequest), codes.InvalidArgument, "0 pieces"},
		"no sums":          {edit(func(r *pb.WriteRequest) { r.Sums = nil }), codes.InvalidArgument, "4 pieces and sums for 0"},
		"others' sums":     {edit(func(r *pb.WriteRequest) { r.Sums[1].Block = 3 }), codes.InvalidArgument, "sums are for block 3, group 0, but piece 1"},
		"another geometry": {edit(func(r *pb.WriteRequest) { r.Reserve.GeometryDigest[0] ^= 1 }), codes.FailedPrecondition, "geometry"},
		"no geometry":      {edit(func(r *pb.WriteRequest) { r.Reserve.GeometryDigest = nil }), codes.InvalidArgument, "digest of 0 bytes"},
		"another epoch":    {edit(func(r *pb.WriteRequest) { r.Reserve.Epoch = 9 }), codes.FailedPrecondition, "the epoch is 9"},
		"no namespace":     {edit(func(r *pb.WriteRequest) { r.Reserve.Namespace = "x" }), codes.NotFound, `"x"`},
		"no such group":    {edit(func(r *pb.WriteRequest) { r.Reserve.Pieces[3].Group, r.Sums[3].Group = 7, 7 }), codes.InvalidArgument, "group 7"},
	} {
		if code, text := e.call(api.MethodWrite, c.req, nil); code != c.code || !strings.Contains(text, c.text) {
			t.Errorf("%s: %v %q; want %v and %q", name, code, text, c.code, c.text)
		}
	}
	resp := new(pb.WriteResponse)
	few := edit(func(r *pb.WriteRequest) { r.Sums[2].LayerSums = r.Sums[2].LayerSums[1:] })
	if code, text := e.call(api.MethodWrite, few, resp); code != codes.OK || resp.GetCommit() != nil || codes.Code(resp.GetCommitCode()) != codes.InvalidArgument || !strings.Contains(resp.GetCommitError(), "3 layer checksums") {
		t.Errorf("too few sums: %v %q, %v", code, text, resp)
	}
	if s := h.node.Stats(); s.Reservations != 0 || s.Index.Pieces != 2 {
		t.Errorf("after refusals: %d reservations, %d blocks", s.Reservations, s.Index.Pieces)
	}
	wrong := edit(func(r *pb.WriteRequest) { r.Sums[2].LayerSums[0]++ })
	proto.Reset(resp)
	e.call(api.MethodWrite, wrong, resp)
	if got := resp.GetCommit().GetPieces(); len(got) != 2 || !strings.HasPrefix(got[0].GetReason(), "corrupt: ") || got[1].GetReason() != "parent_absent" {
		t.Errorf("a wrong sum: %v", resp)
	}
	proto.Reset(resp)
	e.call(api.MethodWrite, writeOf(ns, 0, 4, content), resp)
	var states []pb.PieceResult_State
	for _, p := range resp.GetReserve().GetPieces() {
		states = append(states, p.GetState())
	}
	if len(states) != 4 || states[0] != pb.PieceResult_STATE_EXISTS || states[3] != pb.PieceResult_STATE_GRANTED || len(resp.GetCommit().GetPieces()) != 2 || resp.GetReserve().GetReservation() != 0 || resp.GetReserve().GetWindow() != nil {
		t.Errorf("the write: %v", resp)
	}
	h.readsAs(e, ns, content)
	if s := h.node.Stats(); s.Reservations != 0 {
		t.Errorf("%d reservations are left", s.Reservations)
	}
}

// readsAs fails unless the blocks of a chain have the content.
func (h *host) readsAs(e *localEngine, ns kv.Namespace, content []byte) {
	h.t.Helper()
	size := int(ns.Geometry.BlockBytes())
	blocks := len(content) / size
	req := &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, blocks), Loan: 9}
	for i := range blocks {
		req.Pieces = append(req.Pieces, &pb.PieceRef{Block: uint32(i)})
	}
	resp := new(pb.ReadResponse)
	if code, text := e.call(api.MethodRead, req, resp); code != codes.OK {
		h.t.Fatalf("read: %v %q", code, text)
	}
	for i, p := range resp.GetPieces() {
		if p.GetState() != pb.PieceResult_STATE_DELIVERED || !bytes.Equal(e.arena.Bytes()[p.GetArenaOffset():][:size], content[i*size:][:size]) {
			h.t.Errorf("block %d: %v, or other bytes", i, p)
		}
	}
	if _, err := e.conn.Write(api.AppendReturn(nil, []uint64{9})); err != nil {
		h.t.Fatal(err)
	}
}

// TestStagingChangesDuringWrite: an engine changes its staging memory while the node copies from
// it. The node stores a block whose bytes match its sums, or refuses the block as corrupt.
func TestStagingChangesDuringWrite(t *testing.T) {
	e, h := newNeighbour(t)
	ns := h.namespace()
	size := int(ns.Geometry.BlockBytes())
	mem := e.stage()[:size]
	content := bytes.Repeat([]byte{1}, size)
	var changer sync.WaitGroup
	end := make(chan struct{})
	changer.Go(func() {
		for value := byte(0); ; value ^= 1 {
			select {
			case <-end:
				return
			default:
			}
			for i := range mem {
				mem[i] = value
			}
		}
	})
	stored := 0
	for n := 1; n <= 200; n++ {
		req := writeOf(ns, 0, 1, content)
		req.Reserve.BlockIds[0], req.Reserve.BlockIds[1] = byte(n), byte(n>>8)
		resp := new(pb.WriteResponse)
		if code, text := e.call(api.MethodWrite, req, resp); code != codes.OK || len(resp.GetCommit().GetPieces()) != 1 {
			t.Fatalf("write: %v %q, %v", code, text, resp)
		}
		p := resp.GetCommit().GetPieces()[0]
		if p.GetState() != pb.PieceResult_STATE_STORED {
			if !strings.HasPrefix(p.GetReason(), "corrupt: ") {
				t.Errorf("%v", p)
			}
			continue
		}
		stored++
		read := new(pb.ReadResponse)
		e.call(api.MethodRead, &pb.ReadRequest{Namespace: "m", BlockIds: req.Reserve.BlockIds, Pieces: []*pb.PieceRef{{}}, Loan: uint64(n)}, read)
		if got := read.GetPieces(); len(got) != 1 || got[0].GetState() != pb.PieceResult_STATE_DELIVERED || !bytes.Equal(e.arena.Bytes()[got[0].GetArenaOffset():][:size], content) {
			t.Fatalf("the stored block: %v, or other bytes", got)
		}
		if _, err := e.conn.Write(api.AppendReturn(nil, []uint64{uint64(n)})); err != nil {
			t.Fatal(err)
		}
	}
	close(end)
	changer.Wait()
	t.Logf("%d of 200 blocks were stored", stored)
	if s := h.node.Stats(); s.Reservations != 0 {
		t.Errorf("%d reservations are left", s.Reservations)
	}
}

// FuzzLocalCalls: the node replies to every request on the local socket, continues to serve, and
// keeps no reservation.
func FuzzLocalCalls(f *testing.F) {
	e, h := newNeighbour(f)
	ns := h.namespace()
	mem := e.stage()
	for _, req := range []*pb.WriteRequest{writeOf(ns, 0, 3, mem), writeOf(ns, 1, 2, mem), {}} {
		request, err := proto.Marshal(req)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(byte(api.MethodWrite), request)
		f.Add(byte(api.MethodWrite), request[:len(request)/2])
	}
	f.Add(byte(api.MethodMatch), []byte{0x0a, 1, 'm'})
	f.Add(byte(api.MethodRead), []byte{0x0a, 1, 'm', 0x60, 1})
	f.Fuzz(func(t *testing.T, m byte, request []byte) {
		method := api.Method(m)
		if method.Request() == nil || len(request) > 1<<20 {
			return
		}
		e.t = t
		defer func() { e.t = f }()
		code, body := e.raw(method, request)
		if code == codes.Internal || code == codes.Unknown {
			t.Errorf("%v %x: %v %q", method, request, code, body)
		}
		if s := h.node.Stats(); s.Reservations != 0 {
			t.Errorf("%v %x: %d reservations are left", method, request, s.Reservations)
		}
		// The read may have opened a loan. Later loans have other numbers.
		var read pb.ReadRequest
		if proto.Unmarshal(request, &read) == nil && method == api.MethodRead {
			if _, err := e.conn.Write(api.AppendReturn(nil, []uint64{read.GetLoan()})); err != nil {
				t.Fatal(err)
			}
		}
	})
}
