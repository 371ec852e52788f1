package server

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/rdma"
)

const (
	// callBytes is the longest call that is taken as a message: a chain of some
	// 3,500 blocks. Longer ones come over gRPC.
	callBytes = 64 << 10
	// callBuffers are the receive buffers, 8 MiB altogether. A message that finds
	// none free is refused by the transfer engine, and the call comes over gRPC.
	callBuffers = 128
	// callsMax bounds the calls under way that came as messages. While so many
	// are, arriving ones stay in the receive buffers.
	callsMax = 1024
	// callsPerPeer bounds those of one peer, twice what this version's clients
	// have. One that sends more does not wait for its replies.
	callsPerPeer = 128
	// idleWorkers are kept between calls.
	idleWorkers = 64
)

// The roads by which calls come that are not gRPC's, as metrics and spans name
// them.
const (
	transportMessage = "message"
	transportSocket  = "socket"
)

// caller is who made a call that did not come over gRPC.
type caller struct {
	transport string
	// peer is the data-plane session's other end.
	peer rdma.EngineID
	// session is the one on the unix socket.
	session api.LocalID
}

// owner names the caller in the list of pins.
func (by caller) owner(ctx context.Context) string {
	switch by.transport {
	case transportMessage:
		return "engine " + by.peer.String()
	case transportSocket:
		return "local socket"
	}
	return callerName(ctx)
}

// calls takes calls that come as messages over the data plane. Who has a session
// there has proved the token that Describe hands out, and may ask for what he
// could over gRPC; what is read goes to his own memory only.
type calls struct {
	service *cacheService
	// slots bounds the calls under way.
	slots chan struct{}
	// jobs hands calls to idle workers; idlers has an element for each of them.
	jobs   chan job
	idlers chan struct{}
	// ctx ends when those that are left at shutdown have to.
	ctx    context.Context
	cancel context.CancelFunc

	mu sync.Mutex
	// draining: calls are refused. closed: messages are dropped.
	draining, closed bool
	running          int
	// idle, if set, is closed when running becomes 0.
	idle chan struct{}
	by   map[rdma.EngineID]int
}

func newCalls(s *cacheService) *calls {
	c := &calls{service: s, slots: make(chan struct{}, callsMax), jobs: make(chan job), idlers: make(chan struct{}, idleWorkers), by: make(map[rdma.EngineID]int)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c
}

// listen posts the receive buffers. It reports false where the engine has no
// messages, or somebody else has them: then calls come over gRPC.
func (c *calls) listen() bool {
	err := c.service.data.Recv(callBuffers, callBytes, c.take)
	if err != nil {
		c.service.opts.Logger.Warn("calls come over gRPC only: the data plane takes no messages", "err", err)
	}
	return err == nil
}

// drain refuses new calls, waits for those under way until ctx ends, and then ends
// them.
func (c *calls) drain(ctx context.Context) {
	select {
	case <-c.refuse(false):
	case <-ctx.Done():
	}
	c.cancel()
	<-c.refuse(true)
}

// refuse refuses calls from now on, or drops them, and returns what is closed when
// none is under way.
func (c *calls) refuse(drop bool) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.draining, c.closed = true, c.closed || drop
	if c.running == 0 {
		none := make(chan struct{})
		close(none)
		return none
	}
	if c.idle == nil {
		c.idle = make(chan struct{})
	}
	return c.idle
}

// enter counts a call of a peer. It reports false for one that is not to be
// answered: the node is closed, or the peer has too many, and loses its session.
func (c *calls) enter(from rdma.EngineID) (ok, draining bool) {
	c.mu.Lock()
	many := c.by[from] >= callsPerPeer
	ok, draining = !c.closed && !many, c.draining
	if ok {
		c.by[from]++
		c.running++
	}
	c.mu.Unlock()
	if many {
		c.expel(from, fmt.Errorf("%d calls under way at once", callsPerPeer))
	}
	return ok, draining
}

// leave is the end of a call that has entered.
func (c *calls) leave(from rdma.EngineID) {
	c.mu.Lock()
	if c.by[from]--; c.by[from] == 0 {
		delete(c.by, from)
	}
	c.running--
	if c.running == 0 && c.idle != nil {
		close(c.idle)
		c.idle = nil
	}
	c.mu.Unlock()
	<-c.slots
}

// take is called with one message after the other. It blocks while as many calls
// are under way as may be.
func (c *calls) take(from rdma.EngineID, msg []byte) {
	call, request, err := api.ParseCall(msg)
	if err != nil {
		c.expel(from, err)
		return
	}
	req := call.Method.Request()
	if err := proto.Unmarshal(request, req); err != nil {
		c.expel(from, fmt.Errorf("%v request: %w", call.Method, err))
		return
	}
	select {
	case c.slots <- struct{}{}:
	case <-c.ctx.Done():
		return
	}
	ok, draining := c.enter(from)
	if !ok {
		<-c.slots
		return
	}
	j := job{a: &answer{calls: c, to: from, call: call}, req: req, draining: draining}
	select {
	case c.jobs <- j:
	default:
		go c.work(j)
	}
}

// job is a call that has entered.
type job struct {
	a        *answer
	req      proto.Message
	draining bool
}

// work performs calls, one after the other: a goroutine's stack grows to what a
// call needs, which takes longer than the call does.
func (c *calls) work(j job) {
	for {
		if j.draining {
			j.a.fail(status.Error(codes.Unavailable, errStopping.Error()))
		} else {
			c.perform(j.a, j.req)
		}
		select {
		case c.idlers <- struct{}{}:
		default:
			c.leave(j.a.to)
			return
		}
		c.leave(j.a.to)
		select {
		case j = <-c.jobs:
			<-c.idlers
		case <-c.ctx.Done():
			return
		}
	}
}

// expel ends the session of a peer that does not keep to the protocol.
func (c *calls) expel(from rdma.EngineID, why error) {
	c.service.opts.Metrics.CallsMalformed.Inc()
	c.service.opts.Logger.Warn("data-plane session ended: its messages are not to be understood", "peer", from.String(), "err", why)
	c.service.data.Disconnect(from)
}

// perform performs a call and answers it.
func (c *calls) perform(a *answer, req proto.Message) {
	resp, err := c.service.perform(c.ctx, caller{transport: transportMessage, peer: a.to}, a.call, req)
	if err != nil {
		a.fail(err)
		return
	}
	a.send(resp)
}

// answer is the reply to one call.
type answer struct {
	calls *calls
	to    rdma.EngineID
	call  api.Call
}

// send replies with a message.
func (a *answer) send(resp proto.Message) {
	msg, err := appendReply(make([]byte, 0, 256), a.call, resp)
	if err == nil && len(msg) > int(a.call.ReplyMax) {
		err = status.Errorf(codes.OutOfRange, "a reply of %d bytes; the caller has room for %d: call over gRPC", len(msg), a.call.ReplyMax)
		if r, ok := resp.(*pb.ReserveResponse); ok && r.GetReservation() != 0 {
			// Nobody will hear of it. That it has ended by itself is no error.
			_, _ = a.calls.service.Abort(a.calls.ctx, &pb.AbortRequest{Reservation: r.GetReservation()})
		}
	}
	if err != nil {
		a.fail(err)
		return
	}
	a.post(msg)
}

// fail replies with an error.
func (a *answer) fail(err error) { a.post(appendFailure(nil, a.call, err)) }

// post sends a reply, waiting for room on the session as long as that lives: the
// caller waits for it, or keeps a receive buffer for it.
func (a *answer) post(msg []byte) {
	c := a.calls
	err := c.service.data.Send(c.ctx, a.to, msg, func(err error) {
		if errors.Is(err, rdma.ErrRefused) {
			c.expel(a.to, fmt.Errorf("it has no room for a reply that it asked for: %w", err))
		}
	})
	if err != nil && !errors.Is(err, rdma.ErrNoPeer) && c.ctx.Err() == nil {
		c.service.opts.Logger.Warn("a reply could not be sent", "peer", a.to.String(), "method", a.call.Method.String(), "err", err)
	}
}

// appendReply appends the reply with a message.
func appendReply(dst []byte, call api.Call, resp proto.Message) ([]byte, error) {
	r := api.Reply{ID: call.ID}
	if read, ok := resp.(*pb.ReadResponse); ok {
		r.Immediates = read.GetImmediates()
	}
	return proto.MarshalOptions{}.MarshalAppend(r.Append(dst), resp)
}

// failureTextMax bounds the text of a failure, which names what the caller sent.
const failureTextMax = 1 << 10

// appendFailure appends the reply with an error, as far as there is room.
func appendFailure(dst []byte, call api.Call, err error) []byte {
	st := status.Convert(err)
	text := st.Message()
	text = text[:min(len(text), failureTextMax, int(call.ReplyMax)-api.ReplyHeaderBytes)]
	return append(api.Reply{ID: call.ID, Code: uint32(st.Code())}.Append(dst), text...)
}

// perform performs a call that came by another road than gRPC: with its deadline,
// in a span, and counted.
func (s *cacheService) perform(ctx context.Context, by caller, call api.Call, req proto.Message) (resp proto.Message, err error) {
	if call.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, call.Timeout)
		defer cancel()
	}
	ctx, span := startSpan(ctx, by.transport, call)
	defer func() {
		s.opts.Metrics.Calls.WithLabelValues(by.transport, call.Method.String()).Inc()
		endSpan(span, err)
	}()
	switch req := req.(type) {
	case *pb.MatchRequest:
		return s.match(ctx, by, req)
	case *pb.ReadRequest:
		return s.read(ctx, by, req)
	case *pb.ReserveRequest:
		return s.reserve(ctx, by, req)
	case *pb.CommitRequest:
		return s.Commit(ctx, req)
	case *pb.ExistsRequest:
		return s.Exists(ctx, req)
	case *pb.WriteRequest:
		if by.transport == transportSocket {
			return s.write(ctx, by, req)
		}
	}
	return nil, status.Errorf(codes.Unimplemented, "%v is not served over this transport", call.Method)
}

// startSpan begins the span of a call, under the caller's if he has one.
func startSpan(ctx context.Context, transport string, call api.Call) (context.Context, trace.Span) {
	remote := trace.NewSpanContext(trace.SpanContextConfig{TraceID: call.Trace.TraceID, SpanID: call.Trace.SpanID, Remote: true}).
		WithTraceFlags(trace.TraceFlags(0).WithSampled(call.Trace.Sampled))
	if remote.IsValid() {
		ctx = trace.ContextWithRemoteSpanContext(ctx, remote)
	}
	return otel.Tracer("github.com/penstock-kv/penstock/server").Start(ctx, "penstock.v1.Cache/"+call.Method.String(),
		trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(attribute.String("penstock.transport", transport)))
}

func endSpan(span trace.Span, err error) {
	if err != nil {
		span.RecordError(err)
	}
	span.End()
}

// answerLocal answers a call over the unix socket: msg is an api.Call, the reply
// is appended to dst. A caller there has shown no token and no certificate, and may
// ask for reads, matches, existence and writes alone (package handoff), and not for pins, which do not end by
// themselves.
func (s *cacheService) answerLocal(ctx context.Context, session api.LocalID, msg, dst []byte) []byte {
	call, request, err := api.ParseCall(msg)
	if err != nil {
		return appendFailure(dst, api.Call{ReplyMax: api.LocalFrameMax}, invalid(err))
	}
	if call.Method == api.MethodReserve || call.Method == api.MethodCommit {
		return appendFailure(dst, call, status.Errorf(codes.PermissionDenied, "the local socket takes calls of %v, %v, %v and %v; %v comes over gRPC or the data plane", api.MethodRead, api.MethodMatch, api.MethodExists, api.MethodWrite, call.Method))
	}
	req := call.Method.Request()
	if err := proto.Unmarshal(request, req); err != nil {
		return appendFailure(dst, call, invalid(err))
	}
	if match, ok := req.(*pb.MatchRequest); ok && match.GetPin() {
		return appendFailure(dst, call, status.Error(codes.PermissionDenied, "a pin is asked for over gRPC or the data plane"))
	}
	resp, err := s.perform(ctx, caller{transport: transportSocket, session: session}, call, req)
	if err != nil {
		return appendFailure(dst, call, err)
	}
	out, err := appendReply(dst, call, resp)
	if err == nil && len(out)-len(dst) > int(call.ReplyMax) {
		err = status.Errorf(codes.OutOfRange, "a reply of %d bytes; the caller has room for %d: call over gRPC", len(out)-len(dst), call.ReplyMax)
	}
	if err != nil {
		return appendFailure(dst, call, err)
	}
	return out
}
