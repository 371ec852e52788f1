package server_test

import (
	"context"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server"
)

// replies collects the node's replies to h.engine.
type replies struct {
	h    *host
	node rdma.EngineID
	ch   chan []byte
}

func (h *host) replies() *replies {
	h.t.Helper()
	d, err := h.cache.Describe(h.t.Context(), &pb.DescribeRequest{})
	if err != nil {
		h.t.Fatal(err)
	}
	if d.GetCallVersion() != api.CallVersion || d.GetCallBytes() == 0 {
		h.t.Fatalf("the node takes calls of version %d, %d bytes", d.GetCallVersion(), d.GetCallBytes())
	}
	var addr rdma.Addr
	if err := addr.UnmarshalBinary(d.GetDataAddress()); err != nil {
		h.t.Fatal(err)
	}
	r := &replies{h: h, node: addr.Engine, ch: make(chan []byte, 256)}
	err = h.engine.Recv(256, 64<<10, func(_ rdma.EngineID, msg []byte) { r.ch <- append([]byte(nil), msg...) })
	if err != nil {
		h.t.Fatal(err)
	}
	return r
}

func (r *replies) send(c api.Call, req proto.Message) {
	r.h.t.Helper()
	msg, err := c.Append(nil, req)
	if err != nil {
		r.h.t.Fatal(err)
	}
	if err := r.h.engine.Send(r.h.t.Context(), r.node, msg, nil); err != nil {
		r.h.t.Fatal(err)
	}
}

// ask makes one call and returns the code and text of its error, and decodes the response into
// resp.
func (r *replies) ask(m api.Method, req, resp proto.Message) (codes.Code, string) {
	r.h.t.Helper()
	r.send(api.Call{Method: m, ID: 42, ReplyMax: 64 << 10}, req)
	reply, body, err := api.ParseReply(<-r.ch)
	if err != nil || reply.ID != 42 {
		r.h.t.Fatalf("reply %+v, %v", reply, err)
	}
	if reply.Code != 0 {
		return codes.Code(reply.Code), string(body)
	}
	if err := proto.Unmarshal(body, resp); err != nil {
		r.h.t.Fatal(err)
	}
	return codes.OK, ""
}

// connected waits until the data-plane session exists or, if want is false, has ended.
func (r *replies) connected(want bool) {
	r.h.t.Helper()
	for (len(r.h.engine.Peers()) == 1) != want {
		if r.h.t.Context().Err() != nil {
			r.h.t.Fatal("the data session stays")
		}
		runtime.Gosched()
	}
}

// TestReadByMessage: the reply may arrive before the bytes, and the bytes that it announces arrive.
func TestReadByMessage(t *testing.T) {
	h := newHost(t, nil, nil)
	ns := h.namespace()
	h.write(ns, 3)
	r := h.replies()
	var m pb.MatchResponse
	if code, text := r.ask(api.MethodMatch, &pb.MatchRequest{Namespace: "m", BlockIds: chain(ns, 4)}, &m); code != codes.OK || m.GetMatchedBlocks() != 3 {
		t.Fatalf("match: %v %s, %v", code, text, &m)
	}
	window, err := h.memory.Window(0, 4*uint64(ns.Geometry.BlockBytes()))
	if err != nil {
		t.Fatal(err)
	}
	dst, err := window.Desc().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	clear(h.memory.Bytes())
	for round, blocks := range []int{3, 4} {
		req := &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, blocks), Destination: dst, Imm: uint32(70 + round)}
		for i := range blocks {
			req.Pieces = append(req.Pieces, &pb.PieceRef{Block: uint32(i), Offset: uint64(i) * uint64(ns.Geometry.BlockBytes())})
		}
		var resp pb.ReadResponse
		if code, text := r.ask(api.MethodRead, req, &resp); code != codes.OK || resp.GetImmediates() != 3 || resp.GetMatchedBlocks() != 3 || len(resp.GetPieces()) != blocks {
			t.Fatalf("read of %d blocks: %v %s, %v", blocks, code, text, &resp)
		}
		landed := rdma.NewFlag()
		if _, err := h.engine.ExpectImm(rdma.Expect{Imm: req.GetImm(), Count: 3, Done: landed.Set}); err != nil {
			t.Fatal(err)
		}
		if err := landed.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i, b := range window.Bytes()[:3*ns.Geometry.BlockBytes()] {
			if want := byte(i/int(ns.Geometry.BlockBytes()) + 1); b != want {
				t.Fatalf("byte %d is %d; want %d", i, b, want)
			}
		}
	}
}

// TestBadMessages: an invalid request gets the same code as over gRPC. A message that is not a call
// ends the session of its sender and no other session.
func TestBadMessages(t *testing.T) {
	var options server.Options
	h := newHost(t, func(o *server.Options) { options = *o }, nil)
	ns := h.namespace()
	h.write(ns, 1)
	r := h.replies()
	one := []*pb.PieceRef{{}}
	other, err := tcp.New(t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: rdma.Token("sixteen bytes at least")})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	region, err := other.Register(make([]byte, 8192), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := region.Desc().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		method api.Method
		req    proto.Message
		code   codes.Code
		text   string
	}{
		"unknown namespace":  {api.MethodMatch, &pb.MatchRequest{Namespace: "x", BlockIds: chain(ns, 1)}, codes.NotFound, "x"},
		"no pieces":          {api.MethodRead, &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, 1)}, codes.InvalidArgument, "pieces"},
		"garbage to go to":   {api.MethodRead, &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, 1), Pieces: one, Destination: []byte("garbage")}, codes.InvalidArgument, "destination"},
		"another's memory":   {api.MethodRead, &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, 1), Pieces: one, Destination: foreign}, codes.InvalidArgument, "is written to its sender"},
		"a loan":             {api.MethodRead, &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, 1), Pieces: one, LocalSession: make([]byte, 16)}, codes.InvalidArgument, "local socket"},
		"another geometry":   {api.MethodReserve, &pb.ReserveRequest{Namespace: "m", BlockIds: chain(ns, 1), GeometryDigest: make([]byte, 16)}, codes.FailedPrecondition, "geometry"},
		"another's window":   {api.MethodReserve, &pb.ReserveRequest{Namespace: "m", BlockIds: chain(ns, 1), GeometryDigest: digestOf(ns), DataEngine: make([]byte, 16)}, codes.InvalidArgument, "by message"},
		"nothing to commit":  {api.MethodCommit, &pb.CommitRequest{Reservation: 7}, codes.NotFound, "7"},
		"half an id":         {api.MethodMatch, &pb.MatchRequest{Namespace: "m", BlockIds: []byte{1}}, codes.InvalidArgument, "16"},
		"more than is known": {api.MethodMatch, &pb.MatchRequest{Namespace: strings.Repeat("n", 40<<10), BlockIds: chain(ns, 1)}, codes.NotFound, "nnn"},
	} {
		if code, text := r.ask(c.method, c.req, &pb.ReadResponse{}); code != c.code || !strings.Contains(text, c.text) || len(text) > 1<<10 {
			t.Errorf("%s: %v %.100q; want %v with %q", name, code, text, c.code, c.text)
		}
	}
	// A deadline in the past.
	r.send(api.Call{Method: api.MethodRead, ID: 43, ReplyMax: 1 << 10, Timeout: 1}, &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, 1), Pieces: one, Destination: h.destination()})
	if reply, _, err := api.ParseReply(<-r.ch); err != nil || codes.Code(reply.Code) != codes.DeadlineExceeded || reply.ID != 43 {
		t.Errorf("a call whose time is over: %+v, %v", reply, err)
	}
	// A reply that is larger than the caller's room.
	r.send(api.Call{Method: api.MethodMatch, ID: 44, ReplyMax: api.ReplyHeaderBytes + 2}, &pb.MatchRequest{Namespace: "m", BlockIds: chain(ns, 1)})
	if reply, text, err := api.ParseReply(<-r.ch); err != nil || codes.Code(reply.Code) != codes.OutOfRange || len(text) != 2 {
		t.Errorf("no room for the reply: %+v, %q, %v", reply, text, err)
	}
	garbage := [][]byte{{}, {1}, []byte("GET / HTTP/1.1\r\n\r\n"), api.Reply{}.Append(nil), make([]byte, 64<<10)}
	good, err := api.Call{Method: api.MethodMatch, ReplyMax: 100}.Append(nil, &pb.MatchRequest{Namespace: "m"})
	if err != nil {
		t.Fatal(err)
	}
	garbage = append(garbage, append(good, 0xff), good[:len(good)-1], good[:30])
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		b := make([]byte, rng.IntN(4096))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		garbage = append(garbage, b)
	}
	for i, msg := range garbage {
		h.connect()
		if err := h.engine.Send(t.Context(), r.node, msg, nil); err != nil {
			t.Fatal(err)
		}
		r.connected(false)
		if got := testutil.ToFloat64(options.Metrics.CallsMalformed); got != float64(i+1) {
			t.Fatalf("message %d, %.40q: %v counted; want %d", i, msg, got, i+1)
		}
	}
	h.connect()
	if code, text := r.ask(api.MethodMatch, &pb.MatchRequest{Namespace: "m", BlockIds: chain(ns, 1)}, &pb.MatchResponse{}); code != codes.OK {
		t.Errorf("after all of that: %v %s", code, text)
	}
}

// destination is the whole registered memory of the client.
func (h *host) destination() []byte {
	h.t.Helper()
	dst, err := h.memory.Desc().MarshalBinary()
	if err != nil {
		h.t.Fatal(err)
	}
	return dst
}

// TestShutdownRefusesMessages: while running calls end, new calls are refused with Unavailable.
func TestShutdownRefusesMessages(t *testing.T) {
	h := newHost(t, nil, nil)
	ns := h.namespace()
	h.write(ns, 1)
	r := h.replies()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	stream, err := h.cache.Events(ctx, &pb.EventsRequest{}) // a stream that ends at shutdown
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, err := stream.Recv()
		done <- err
	}()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := h.server.Shutdown(t.Context()); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
	<-done
	cancel()
	// Until the node's engine has closed, every call is performed or refused with Unavailable.
	for id := uint64(1); ; id++ {
		msg, err := api.Call{Method: api.MethodMatch, ID: id, ReplyMax: 64 << 10}.Append(nil, &pb.MatchRequest{Namespace: "m", BlockIds: chain(ns, 1)})
		if err != nil {
			t.Fatal(err)
		}
		gone := rdma.NewFlag()
		if err := h.engine.Send(t.Context(), r.node, msg, gone.Set); err != nil {
			break
		}
		if err := gone.Wait(t.Context()); err != nil {
			break
		}
	}
	wg.Wait()
	for len(r.ch) > 0 {
		reply, text, err := api.ParseReply(<-r.ch)
		if err != nil || reply.Code != 0 && codes.Code(reply.Code) != codes.Unavailable {
			t.Errorf("reply %+v, %s, %v", reply, text, err)
		}
	}
}

// TestSpans: a call by message has a server span under the caller's span, with the transport and
// the error.
func TestSpans(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	before := otel.GetTracerProvider()
	otel.SetTracerProvider(trace.NewTracerProvider(trace.WithSpanProcessor(recorder)))
	defer otel.SetTracerProvider(before)
	h := newHost(t, nil, nil)
	h.namespace()
	r := h.replies()
	parent := api.Trace{TraceID: [16]byte{1, 2, 3}, SpanID: [8]byte{4, 5}, Sampled: true}
	r.send(api.Call{Method: api.MethodMatch, ID: 1, ReplyMax: 1 << 10, Trace: parent}, &pb.MatchRequest{Namespace: "absent"})
	<-r.ch
	for _, s := range recorder.Ended() {
		if s.Name() != "penstock.v1.Cache/Match" || s.Parent().SpanID() != parent.SpanID {
			continue
		}
		if s.SpanContext().TraceID() != parent.TraceID || !s.Parent().IsRemote() || len(s.Events()) != 1 || len(s.Attributes()) != 1 || s.Attributes()[0].Value.AsString() != "message" {
			t.Errorf("span %v under %v: attributes %v, events %v", s.SpanContext(), s.Parent(), s.Attributes(), s.Events())
		}
		return
	}
	t.Errorf("no span of the call among %d", len(recorder.Ended()))
}

// FuzzMessages: for every input of a peer, the node replies or ends the session, and continues to
// serve.
func FuzzMessages(f *testing.F) {
	h := newHost(f, nil, nil)
	ns := h.namespace()
	h.write(ns, 2)
	r := h.replies()
	block := uint64(ns.Geometry.BlockBytes())
	// add adds a call unchanged, a shortened one, and one whose request lacks its first bytes. Each
	// call reads into a window of its own, because a read may continue while the next input runs.
	var at uint64
	add := func(method api.Method, request func(destination []byte) proto.Message) {
		for _, damage := range []func([]byte) []byte{
			func(msg []byte) []byte { return msg },
			func(msg []byte) []byte { return msg[:len(msg)-3] },
			func(msg []byte) []byte {
				return append(msg[:api.CallHeaderBytes:api.CallHeaderBytes], msg[api.CallHeaderBytes+2:]...)
			},
		} {
			window, err := h.memory.Window(at, 2*block)
			if err != nil {
				f.Fatal(err)
			}
			at += 2 * block
			dst, err := window.Desc().MarshalBinary()
			if err != nil {
				f.Fatal(err)
			}
			msg, err := api.Call{Method: method, ID: 7, ReplyMax: 4096, Timeout: time.Second}.Append(nil, request(dst))
			if err != nil {
				f.Fatal(err)
			}
			f.Add(damage(msg))
		}
	}
	add(api.MethodMatch, func([]byte) proto.Message {
		return &pb.MatchRequest{Namespace: "m", BlockIds: chain(ns, 2), LeaseTtlMs: 1}
	})
	add(api.MethodRead, func(dst []byte) proto.Message {
		return &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, 2), Pieces: []*pb.PieceRef{{Block: 1, Offset: block}, {}}, Destination: dst, Imm: 9, Layers: 2}
	})
	add(api.MethodReserve, func([]byte) proto.Message {
		return &pb.ReserveRequest{Namespace: "m", BlockIds: chain(ns, 3), GeometryDigest: digestOf(ns), Pieces: []*pb.PieceRef{{Block: 2}}}
	})
	add(api.MethodCommit, func([]byte) proto.Message {
		return &pb.CommitRequest{Reservation: 1, Pieces: []*pb.PieceSums{{Block: 2, LayerSums: []uint64{1, 2, 3, 4}}}}
	})
	f.Add([]byte{})
	probes := uint64(1 << 63)
	f.Fuzz(func(t *testing.T, msg []byte) {
		h.t = t
		defer func() { h.t = f }()
		h.connect()
		if len(msg) > 64<<10 {
			return
		}
		if err := h.engine.Send(t.Context(), r.node, msg, nil); err != nil {
			t.Fatal(err)
		}
		// The node replies to the input or ends the session, and then serves. The reply to the
		// input may come late. Each probe has its own number, because the reply to a probe whose
		// session ended may arrive over the next session.
		alive := func() bool {
			probes++
			probe, err := api.Call{Method: api.MethodMatch, ID: probes, ReplyMax: 4096}.Append(nil, &pb.MatchRequest{Namespace: "m", BlockIds: chain(ns, 2)})
			if err != nil {
				t.Fatal(err)
			}
			gone := rdma.NewFlag()
			if err := h.engine.Send(t.Context(), r.node, probe, gone.Set); err != nil || gone.Wait(t.Context()) != nil {
				return false
			}
			for {
				select {
				case m := <-r.ch:
					reply, _, err := api.ParseReply(m)
					if err != nil {
						t.Fatalf("%x is no reply: %v", m, err)
					}
					if reply.ID == probes {
						return reply.Code == 0
					}
				default:
					if len(h.engine.Peers()) == 0 {
						return false
					}
					runtime.Gosched()
				}
			}
		}
		if !alive() {
			h.connect()
			if !alive() {
				t.Fatalf("the node does not serve after %x", msg)
			}
		}
	})
}
