package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
	"github.com/penstock-kv/penstock/rdma"
)

const (
	// callsMax is the largest number of calls of a Store that wait for a reply message. Further
	// calls go over gRPC. There is a receive buffer of replyBytes for each such call; all buffers
	// together take 4 MiB.
	callsMax   = 64
	replyBytes = 64 << 10
)

// calls holds the running calls that go as messages over the data plane. It uses the engine's
// receive buffers.
type calls struct {
	store *Store
	// on reports whether the receive buffers are posted. It is set before Open returns.
	on  bool
	ids atomic.Uint64
	// slots has an element for each call whose reply may still arrive, including calls that the
	// caller has given up. So every reply finds a receive buffer.
	slots chan struct{}

	mu      sync.Mutex
	pending map[uint64]*call
}

// call is one running call. The goroutine that removes it from calls.pending finishes it.
type call struct {
	transport *transport
	// imm is the immediate of the node's writes for this call. It is used only if the reply
	// announces immediates.
	imm uint32

	// done receives one value, when reply, body and err are set.
	done  chan struct{}
	reply api.Reply
	body  []byte
	err   error

	// calls.mu guards the fields below. late cancels expect if the immediates that the reply
	// announced do not arrive in time. landed is set when expect has ended.
	givenUp, landed bool
	expect          *rdma.Expectation
	late            *time.Timer
}

func (c *call) finish(err error) {
	c.err = err
	c.done <- struct{}{}
}

// transport is the message transport to one node. It lasts as long as the data-plane session.
type transport struct {
	calls *calls
	peer  rdma.EngineID
	// callBytes is the size of the longest call that the node accepts as a message; 0: the node
	// accepts none.
	callBytes int
	// gone is set when the data-plane session has ended.
	gone atomic.Bool
	// watch expects an immediate that is never sent, so it ends when the session ends.
	watch *rdma.Expectation
}

// errNoTransport: the call was not made as a message and had no effect. It can go over
// gRPC. The error never leaves the package.
var errNoTransport = errors.New("not by message")

func (c *calls) init(s *Store) {
	c.store, c.slots, c.pending = s, make(chan struct{}, callsMax), make(map[uint64]*call)
}

// listen posts the engine's receive buffers. Open calls it last, so that after a failed Open the
// next Store can post the receive buffers of the same engine.
func (c *calls) listen() {
	s := c.store
	err := s.opts.Engine.Recv(callsMax, replyBytes, c.receive)
	c.on = err == nil
	if err != nil {
		s.opts.Logger.Info("calls go over gRPC only: the transfer engine's receive buffers cannot be used", "err", err)
	}
}

// openTransport returns the message transport to a node and watches the data-plane session. version and
// bytes are the call version and the longest call that the node returned from Describe.
func (c *calls) openTransport(peer rdma.EngineID, version, bytes uint32) (*transport, error) {
	r := &transport{calls: c, peer: peer}
	if version == api.CallVersion {
		r.callBytes = int(bytes)
	}
	for {
		var err error
		r.watch, err = c.store.opts.Engine.ExpectImm(rdma.Expect{Imm: c.store.imms.Add(1), Count: 1, From: []rdma.EngineID{peer}, Done: func(error) { r.end() }})
		if !errors.Is(err, rdma.ErrExists) {
			return r, err
		}
	}
}

// close ends the transport. The data-plane session may continue.
func (r *transport) close() {
	r.watch.Cancel()
	r.end()
}

// end fails the running calls, because their replies will not arrive or are not needed any more.
func (r *transport) end() {
	r.gone.Store(true)
	c := r.calls
	var ended []*call
	c.mu.Lock()
	for id, x := range c.pending {
		if x.transport == r {
			delete(c.pending, id)
			ended = append(ended, x)
		}
	}
	c.mu.Unlock()
	for _, x := range ended {
		<-c.slots
		x.finish(status.Error(codes.Unavailable, "the data-plane session has ended"))
	}
}

// take removes a call from pending and returns the call, or nil if pending does not have it.
func (c *calls) take(id uint64, from rdma.EngineID) *call {
	c.mu.Lock()
	defer c.mu.Unlock()
	x := c.pending[id]
	if x == nil || x.transport.peer != from {
		return nil
	}
	delete(c.pending, id)
	return x
}

// receive handles one message of a peer. The transfer engine calls it, one call at a time.
func (c *calls) receive(from rdma.EngineID, msg []byte) {
	if len(msg) > 0 && msg[0] != api.KindReply && c.store.opts.Messages != nil {
		c.store.opts.Messages(from, msg)
		return
	}
	reply, body, err := api.ParseReply(msg)
	if err != nil {
		// It is unknown to which call the message belongs. So the session is ended: then all of its
		// calls fail and are retried.
		c.store.opts.Logger.Error("data-plane session ended: a message cannot be decoded", "peer", from.String(), "err", err)
		c.store.opts.Engine.Disconnect(from)
		return
	}
	x := c.take(reply.ID, from)
	if x == nil {
		return // its transport has ended
	}
	<-c.slots
	x.reply, x.body = reply, bytes.Clone(body)
	if reply.Immediates == 0 || reply.Code != 0 {
		x.finish(nil)
		return
	}
	c.awaitImmediates(x)
}

// awaitImmediates finishes x when the immediates that the reply announced have arrived. Then the
// bytes are in place too, so the caller is woken only once.
func (c *calls) awaitImmediates(x *call) {
	expect, err := c.store.opts.Engine.ExpectImm(rdma.Expect{Imm: x.imm, Count: x.reply.Immediates, From: []rdma.EngineID{x.transport.peer}, Done: func(err error) { c.landed(x, err) }})
	if err != nil {
		x.finish(err)
		return
	}
	c.mu.Lock()
	x.expect = expect
	givenUp := x.givenUp
	if !givenUp && !x.landed {
		since := time.Now()
		x.late = time.AfterFunc(landWithin/2, func() { c.checkLate(x, since, math.MaxUint64) })
	}
	c.mu.Unlock()
	if givenUp {
		expect.Cancel()
	}
}

// checkLate runs every half of landWithin while a call waits for its immediates. before is the
// number of immediates that the engine had counted at the previous check. checkLate ends the wait if
// the engine has counted none since, or if the wait, which began at since, has taken landAtMost.
func (c *calls) checkLate(x *call, since time.Time, before uint64) {
	counted := c.store.opts.Engine.Stats().ImmediatesIn
	c.mu.Lock()
	late := counted == before || time.Since(since) >= landAtMost
	if !late && !x.landed {
		x.late = time.AfterFunc(landWithin/2, func() { c.checkLate(x, since, counted) })
	}
	c.mu.Unlock()
	if late {
		x.expect.Cancel()
	}
}

// landed ends a call whose reply has come. err is the result of the call's expectation of
// immediates.
func (c *calls) landed(x *call, err error) {
	c.mu.Lock()
	x.landed = true
	if x.late != nil {
		x.late.Stop()
	}
	c.mu.Unlock()
	switch {
	case errors.Is(err, rdma.ErrCanceled):
		err = status.Errorf(codes.Unavailable, "not all of %d immediates arrived", x.reply.Immediates)
	case errors.Is(err, rdma.ErrPeerDied):
		err = status.Error(codes.Unavailable, err.Error())
	case errors.Is(err, rdma.ErrClosed):
		err = fmt.Errorf("transfer engine: %w", err)
	}
	x.finish(err)
}

// giveUp ends the caller's wait. The caller does not use x after it.
func (c *calls) giveUp(x *call) {
	c.mu.Lock()
	x.givenUp = true
	expect := x.expect
	c.mu.Unlock()
	if expect != nil {
		expect.Cancel()
	}
}

// replyMax returns an upper bound of the size of a reply in bytes. pieces is the number of pieces
// of the call, sums the number of checksums in the reply to a Read.
func replyMax(pieces, sums int) int {
	const head, piece = 1 << 10, 192
	return head + piece*pieces + 8*sums
}

// do makes a call as a message. It returns the body of the reply when the reply, and the immediates
// imm that it announces, have arrived. replyMax is the largest size that the reply may have.
// Errors: errNoTransport, a gRPC status, the error of ctx, errors of package rdma.
func (r *transport) do(ctx context.Context, m api.Method, req proto.Message, imm uint32, replyMax int) (_ []byte, err error) {
	c := r.calls
	size := api.CallHeaderBytes + proto.Size(req)
	if !c.on || size > r.callBytes || replyMax > replyBytes || r.gone.Load() {
		return nil, errNoTransport
	}
	select {
	case c.slots <- struct{}{}:
	default:
		return nil, errNoTransport
	}
	ctx, span := startSpan(ctx, transportMessage, m)
	defer func() { endSpan(span, err) }()
	head := newCall(ctx, m, c.ids.Add(1), replyBytes, span)
	msg, err := head.Append(make([]byte, 0, size), req)
	if err != nil {
		<-c.slots
		return nil, err
	}
	x := &call{transport: r, imm: imm, done: make(chan struct{}, 1)}
	c.mu.Lock()
	if r.gone.Load() {
		// end removes the calls from pending under this lock. A call entered after end has run
		// would never be finished.
		c.mu.Unlock()
		<-c.slots
		return nil, errNoTransport
	}
	c.pending[head.ID] = x
	c.mu.Unlock()
	err = c.store.opts.Engine.Send(ctx, r.peer, msg, func(err error) { c.sent(head.ID, r, err) })
	if err != nil {
		if c.take(head.ID, r.peer) == nil {
			<-x.done // the session ended meanwhile
		} else {
			<-c.slots
		}
		switch {
		case errors.Is(err, rdma.ErrRange): // the message is longer than the engine can send
			err = errNoTransport
		case errors.Is(err, rdma.ErrNoPeer):
			err = status.Error(codes.Unavailable, err.Error())
		}
		return nil, err
	}
	select {
	case <-x.done:
	case <-ctx.Done():
		c.giveUp(x)
		return nil, ctx.Err()
	}
	switch {
	case x.err != nil:
		return nil, x.err
	case codes.Code(x.reply.Code) == codes.OutOfRange && (m == api.MethodRead || m == api.MethodMatch || m == api.MethodExists):
		return nil, errNoTransport
	}
	c.store.stats.messages.Add(1)
	if x.reply.Code != 0 {
		return nil, status.Error(codes.Code(x.reply.Code), string(x.body))
	}
	return x.body, nil
}

// sent is the completion function of a call's message. If err is not nil, the message was not
// delivered, and sent ends the call.
func (c *calls) sent(id uint64, r *transport, err error) {
	if err == nil {
		return
	}
	x := c.take(id, r.peer)
	if x == nil {
		return
	}
	<-c.slots
	if errors.Is(err, rdma.ErrRefused) {
		x.finish(errNoTransport)
		return
	}
	x.finish(status.Error(codes.Unavailable, err.Error()))
}

// newCall returns the header of a call, with the time until ctx's deadline and the span.
func newCall(ctx context.Context, m api.Method, id uint64, replyMax uint32, span trace.Span) api.Call {
	c := api.Call{Method: m, ID: id, ReplyMax: replyMax}
	if deadline, ok := ctx.Deadline(); ok {
		c.Timeout = max(1, time.Until(deadline))
	}
	if sc := span.SpanContext(); sc.IsValid() {
		c.Trace = api.Trace{TraceID: sc.TraceID(), SpanID: sc.SpanID(), Sampled: sc.IsSampled()}
	}
	return c
}

// The values of a span's transport attribute for calls that do not go over gRPC.
const (
	transportMessage = "message"
	transportSocket  = "socket"
)

// startSpan begins the span of a call that does not go over gRPC.
func startSpan(ctx context.Context, transport string, m api.Method) (context.Context, trace.Span) {
	return otel.Tracer("github.com/penstock-kv/penstock/client").Start(ctx, "penstock.v1.Cache/"+m.String(),
		trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(attribute.String("penstock.transport", transport)))
}

func endSpan(span trace.Span, err error) {
	if err != nil && !errors.Is(err, errNoTransport) {
		span.RecordError(err)
	}
	span.End()
}

// message is a pointer to a response of penstock.v1.
type message[T any] interface {
	*T
	proto.Message
}

// ask makes a call by message, or over gRPC if the message transport is not open or is full.
// byMessage is true if the call went by message. Then the immediates of a Read have arrived
// already.
func ask[T any, R message[T]](ctx context.Context, sess *session, m api.Method, req proto.Message, imm uint32, replyMax int, overGRPC func() (R, error)) (_ R, byMessage bool, _ error) {
	body, err := sess.transport.do(ctx, m, req, imm, replyMax)
	if errors.Is(err, errNoTransport) {
		resp, err := overGRPC()
		return resp, false, err
	}
	if err != nil {
		return nil, true, err
	}
	resp := R(new(T))
	if err := proto.Unmarshal(body, resp); err != nil {
		return nil, true, fmt.Errorf("%v reply: %w: %w", m, api.ErrCall, err)
	}
	return resp, true, nil
}
