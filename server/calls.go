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
	// callBytes is the maximum size of a call that is sent as a message, enough for a chain of
	// about 3,500 blocks. Longer calls go over gRPC.
	callBytes = 64 << 10
	// callBuffers is the number of receive buffers, with 8 MiB in total. If none is free, the
	// transfer engine refuses the message, and the client makes the call over gRPC.
	callBuffers = 128
	// callsMax is the maximum number of calls by message in progress. Above it, further messages
	// stay in the receive buffers.
	callsMax = 1024
	// callsPerPeer is the maximum number of calls in progress of one peer. The client of this
	// version makes at most half as many. A peer that exceeds the limit violates the protocol,
	// because it does not wait for replies; its session is ended.
	callsPerPeer = 128
	// idleWorkers is the maximum number of worker goroutines that are kept between calls.
	idleWorkers = 64
)

// The transports other than gRPC, as in the labels of metrics and the attributes of spans.
const (
	transportMessage = "message"
	transportSocket  = "socket"
)

// caller identifies the sender of a call that did not come over gRPC.
type caller struct {
	transport string
	// peer is the engine at the other end of the data-plane session.
	peer rdma.EngineID
	// session is the session on the unix socket.
	session api.LocalID
}

// owner returns the caller's name for the list of pins.
func (by caller) owner(ctx context.Context) string {
	if id, ok := identityOf(ctx); ok {
		return id.Principal.Name() + " at " + by.address(ctx)
	}
	return by.address(ctx)
}

// address returns the caller's address.
func (by caller) address(ctx context.Context) string {
	switch by.transport {
	case transportMessage:
		return "engine " + by.peer.String()
	case transportSocket:
		return "local socket"
	}
	return callerName(ctx)
}

// calls serves calls that arrive as messages over the data plane. A peer with a data-plane session
// has presented the token that Describe returned to its client, so its calls are allowed or refused
// like calls of that client over gRPC. The blocks that it reads are written only to its own memory.
type calls struct {
	service *cacheService
	// slots has an element for each call by message in progress. Its capacity is callsMax.
	slots chan struct{}
	// jobs passes calls to idle workers. idlers has an element for each idle worker.
	jobs   chan job
	idlers chan struct{}
	// ctx is the context of all calls. drain cancels it when the time for calls in progress is
	// over.
	ctx    context.Context
	cancel context.CancelFunc

	mu sync.Mutex
	// draining is set while new calls are refused with an error. closed is set while messages are
	// dropped without a reply. running is the number of calls in progress.
	draining, closed bool
	running          int
	// idle, if not nil, is closed when running becomes 0.
	idle chan struct{}
	by   map[rdma.EngineID]int
}

func newCalls(s *cacheService) *calls {
	c := &calls{service: s, slots: make(chan struct{}, callsMax), jobs: make(chan job), idlers: make(chan struct{}, idleWorkers), by: make(map[rdma.EngineID]int)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c
}

// listen posts the receive buffers. It returns false if the transfer engine does not support
// messages, or has another receiver of messages. Then all calls come over gRPC.
func (c *calls) listen() bool {
	err := c.service.data.Recv(callBuffers, callBytes, c.take)
	if err != nil {
		c.service.opts.Logger.Warn("calls come over gRPC only: the data plane takes no messages", "err", err)
	}
	return err == nil
}

// drain refuses new calls, waits until the calls in progress have ended or ctx ends, and then
// cancels the remaining calls.
func (c *calls) drain(ctx context.Context) {
	select {
	case <-c.refuse(false):
	case <-ctx.Done():
	}
	c.cancel()
	<-c.refuse(true)
}

// refuse makes take refuse new calls or, if drop is set, drop them. The returned channel is closed
// when no call is in progress.
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

// enter adds a call of a peer to the counts of calls in progress. ok is false if the call must not
// be answered, because the node is closed or the peer has too many calls in progress. In the second
// case enter ends the session of the peer. draining is set if the reply must be a refusal.
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
		c.expel(from, fmt.Errorf("the peer has %d concurrent calls, the maximum", callsPerPeer))
	}
	return ok, draining
}

// leave removes a call that has ended from the counts of calls in progress.
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

// take handles one message. The transfer engine calls take for one message after another. take
// blocks while callsMax calls are in progress.
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

// job is one call for a worker. enter has counted the call.
type job struct {
	a        *answer
	req      proto.Message
	draining bool
}

// work performs calls, one after another. A worker is kept between calls, because growing the stack
// of a new goroutine takes longer than a call.
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

// expel ends the session of a peer that violates the protocol.
func (c *calls) expel(from rdma.EngineID, why error) {
	c.service.opts.Metrics.CallsMalformed.Inc()
	c.service.opts.Logger.Warn("data-plane session ended: the peer violates the protocol", "peer", from.String(), "err", why)
	c.service.data.Disconnect(from)
}

// perform performs a call and sends its reply. If the client of the session is not admitted any more,
// perform ends the session.
func (c *calls) perform(a *answer, req proto.Message) {
	by := caller{transport: transportMessage, peer: a.to}
	ctx := c.service.sessions.caller(c.ctx, a.to)
	method := "/" + pb.Cache_ServiceDesc.ServiceName + "/" + a.call.Method.String()
	err := c.service.sessions.verified(a.to)
	if err == nil {
		err = c.service.guard.check(ctx, method, req)
	}
	if err != nil {
		c.service.audit.refusal(ctx, a.call.Method.String(), by.address(ctx), req, err)
		if status.Code(err) == codes.Unauthenticated {
			// There is no reply, because the reply could wait for a client that does not read.
			c.service.endSession(a.to)
			return
		}
		a.fail(err)
		return
	}
	resp, err := c.service.perform(ctx, by, a.call, req)
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
		err = status.Errorf(codes.OutOfRange, "the reply has %d bytes and the caller has room for %d; repeat the call over gRPC", len(msg), a.call.ReplyMax)
		if r, ok := resp.(*pb.ReserveResponse); ok && r.GetReservation() != 0 {
			// The client does not receive the id of this reservation, so the reservation is
			// aborted. If it has expired already, Abort returns an error, which is ignored.
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

// post sends a reply. If the session has no room for the reply, post waits until there is room or
// the session ends. The caller makes room: it waits for the reply, or keeps a receive buffer for
// it.
func (a *answer) post(msg []byte) {
	c := a.calls
	err := c.service.data.Send(c.ctx, a.to, msg, func(err error) {
		if errors.Is(err, rdma.ErrRefused) {
			c.expel(a.to, fmt.Errorf("the peer has no receive buffer for the reply: %w", err))
		}
	})
	if err != nil && !errors.Is(err, rdma.ErrNoPeer) && c.ctx.Err() == nil {
		c.service.opts.Logger.Warn("a reply could not be sent", "peer", a.to.String(), "method", a.call.Method.String(), "err", err)
	}
}

// appendReply appends a reply with the message resp.
func appendReply(dst []byte, call api.Call, resp proto.Message) ([]byte, error) {
	r := api.Reply{ID: call.ID}
	if read, ok := resp.(*pb.ReadResponse); ok {
		r.Immediates = read.GetImmediates()
	}
	return proto.MarshalOptions{}.MarshalAppend(r.Append(dst), resp)
}

// failureTextMax is the maximum length of an error text in a reply, in bytes. The text may contain
// text that the caller sent.
const failureTextMax = 1 << 10

// appendFailure appends a reply with an error. It shortens the error's text to failureTextMax and
// to the room that the caller has for the reply.
func appendFailure(dst []byte, call api.Call, err error) []byte {
	st := status.Convert(err)
	text := st.Message()
	text = text[:min(len(text), failureTextMax, int(call.ReplyMax)-api.ReplyHeaderBytes)]
	return append(api.Reply{ID: call.ID, Code: uint32(st.Code())}.Append(dst), text...)
}

// perform performs a call that did not come over gRPC, with its deadline, a span and a count in the
// metrics.
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
	if err := s.admit(req); err != nil {
		return nil, err
	}
	resp, err = s.dispatch(ctx, by, call, req)
	if err == nil {
		err = s.admitResult(req)
	}
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// dispatch performs an admitted call.
func (s *cacheService) dispatch(ctx context.Context, by caller, call api.Call, req proto.Message) (proto.Message, error) {
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

// startSpan begins the trace span of a call. If the call contains the caller's span, that span is
// the parent.
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

// answerLocal performs the call in msg, which came over the unix socket, and appends the reply to
// dst. A caller on the socket has presented neither token nor certificate. It may make reads,
// matches, existence checks and writes (package handoff). It may not make pins, because a pin has
// no expiry.
func (s *cacheService) answerLocal(ctx context.Context, session api.LocalID, msg, dst []byte) []byte {
	call, request, err := api.ParseCall(msg)
	if err != nil {
		return appendFailure(dst, api.Call{ReplyMax: api.LocalFrameMax}, invalid(err))
	}
	if call.Method == api.MethodReserve || call.Method == api.MethodCommit {
		return appendFailure(dst, call, status.Errorf(codes.PermissionDenied, "the local socket serves only %v, %v, %v and %v; make %v over gRPC or the data plane", api.MethodRead, api.MethodMatch, api.MethodExists, api.MethodWrite, call.Method))
	}
	req := call.Method.Request()
	if err := proto.Unmarshal(request, req); err != nil {
		return appendFailure(dst, call, invalid(err))
	}
	if match, ok := req.(*pb.MatchRequest); ok && match.GetPin() {
		return appendFailure(dst, call, status.Error(codes.PermissionDenied, "a pin can be requested only over gRPC or the data plane"))
	}
	resp, err := s.perform(ctx, caller{transport: transportSocket, session: session}, call, req)
	if err != nil {
		return appendFailure(dst, call, err)
	}
	out, err := appendReply(dst, call, resp)
	if err == nil && len(out)-len(dst) > int(call.ReplyMax) {
		err = status.Errorf(codes.OutOfRange, "the reply has %d bytes and the caller has room for %d; repeat the call over gRPC", len(out)-len(dst), call.ReplyMax)
	}
	if err != nil {
		return appendFailure(dst, call, err)
	}
	return out
}
