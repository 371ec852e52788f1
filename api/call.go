package api

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// A gRPC call takes several times as long as the operation itself if the blocks are in memory. So
// the calls for which an engine waits can also be sent over two other transports, on which a call
// takes two context switches: the data-plane session (rdma Send and Recv), and the node's unix
// socket. Both transports carry the same two messages. All integers are little endian:
//
//	call   0      1        2        4            8      16           24         40        48
//	       │ kind │ method │ flags  │ reply max  │ id   │ timeout    │ trace id │ span id │ request (protobuf)
//	       │ 1    │ 1      │ 2      │ 4          │ 8    │ 8, in ns   │ 16       │ 8       │
//
//	reply  0      1      2         4      8            12     16     24
//	       │ kind │ zero │ version │ code │ immediates │ zero │ id   │ response (protobuf), or text
//	       │ 1    │ 1    │ 2       │ 4    │ 4          │ 4    │ 8    │
//
//	kind        KindCall or KindReply
//	flags       bit 0: the caller's span is sampled
//	reply max   maximum size of the reply, in bytes
//	id          the caller's number for the call, repeated in the reply
//	timeout     maximum wait of the caller; 0: no maximum
//	code        gRPC status code; if it is not 0, the text of the error follows
//	immediates  in the reply to a read: the number of RDMA immediates that the caller
//	            must receive before all bytes of the read have arrived. The reply may
//	            arrive before the immediates.
//
// If a node cancels or does not accept a call, it replies with a gRPC code or refuses the message
// (rdma.ErrRefused). In both cases the call had no effect, and the client can make it over gRPC.
const (
	// CallVersion is the DescribeResponse.call_version of this package.
	CallVersion = 1
	// CallHeaderBytes and ReplyHeaderBytes are the sizes of the headers before the request and the
	// response.
	CallHeaderBytes  = 48
	ReplyHeaderBytes = 24
)

// The kinds of messages. A client that receives a message of another kind over the data plane
// passes the message on to the program that uses the client.
const (
	// KindCall is a Call. KindReply is the reply to a call. KindReturn, on the unix socket only,
	// ends loans of the node's memory: the numbers of the loans follow, 8 bytes each. KindStage, on
	// the unix socket only, requests the memory for the bytes of Write calls.
	KindCall   = 1
	KindReturn = 2
	KindReply  = 3
	KindStage  = 4
)

// Method is the operation of a Call: a call of penstock.v1.Cache, or Write.
type Method uint8

const (
	MethodMatch Method = iota + 1
	MethodRead
	MethodReserve
	MethodCommit
	// MethodWrite is Reserve and Commit in one call. It is available only on the unix socket.
	MethodWrite
	MethodExists
)

// String returns the method's name. A call of penstock.v1.Cache has the same name there.
func (m Method) String() string {
	switch m {
	case MethodMatch:
		return "Match"
	case MethodRead:
		return "Read"
	case MethodReserve:
		return "Reserve"
	case MethodCommit:
		return "Commit"
	case MethodWrite:
		return "Write"
	case MethodExists:
		return "Exists"
	}
	return fmt.Sprintf("Method(%d)", uint8(m))
}

// Request returns a new empty request of the method, or nil for an unknown method.
func (m Method) Request() proto.Message {
	switch m {
	case MethodMatch:
		return new(pb.MatchRequest)
	case MethodRead:
		return new(pb.ReadRequest)
	case MethodReserve:
		return new(pb.ReserveRequest)
	case MethodCommit:
		return new(pb.CommitRequest)
	case MethodWrite:
		return new(pb.WriteRequest)
	case MethodExists:
		return new(pb.ExistsRequest)
	}
	return nil
}

// ErrCall is wrapped by every error about a malformed message.
var ErrCall = errors.New("malformed message")

// Trace is the caller's trace span, as in W3C trace context. The zero value means no span.
type Trace struct {
	TraceID [16]byte
	SpanID  [8]byte
	Sampled bool
}

// Call is the header of a call.
type Call struct {
	Method Method
	ID     uint64
	// Timeout is the time for which the caller waits for the reply; 0 means no limit.
	Timeout time.Duration
	// ReplyMax is the maximum size of the reply in bytes, header included.
	ReplyMax uint32
	Trace    Trace
}

// flagSampled is bit 0 of a call's flags.
const flagSampled = 1

// Append appends the call with its request. It fails if a string of the request is not valid UTF-8.
func (c Call) Append(dst []byte, request proto.Message) ([]byte, error) {
	var flags uint16
	if c.Trace.Sampled {
		flags |= flagSampled
	}
	dst = append(dst, KindCall, byte(c.Method))
	dst = binary.LittleEndian.AppendUint16(dst, flags)
	dst = binary.LittleEndian.AppendUint32(dst, c.ReplyMax)
	dst = binary.LittleEndian.AppendUint64(dst, c.ID)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(max(0, c.Timeout)))
	dst = append(dst, c.Trace.TraceID[:]...)
	dst = append(dst, c.Trace.SpanID[:]...)
	dst, err := proto.MarshalOptions{}.MarshalAppend(dst, request)
	if err != nil {
		return nil, fmt.Errorf("api: %v request: %w", c.Method, err)
	}
	return dst, nil
}

// ParseCall splits a call into its header and its request, which is a part of msg. An error wraps
// ErrCall.
func ParseCall(msg []byte) (c Call, request []byte, err error) {
	if len(msg) < CallHeaderBytes || msg[0] != KindCall {
		return c, nil, fmt.Errorf("api: a message of %d bytes is not a call; a call has at least %d bytes and the kind %d: %w", len(msg), CallHeaderBytes, KindCall, ErrCall)
	}
	c = Call{
		Method:   Method(msg[1]),
		ReplyMax: binary.LittleEndian.Uint32(msg[4:]),
		ID:       binary.LittleEndian.Uint64(msg[8:]),
		Trace:    Trace{TraceID: [16]byte(msg[24:40]), SpanID: [8]byte(msg[40:48])},
	}
	flags := binary.LittleEndian.Uint16(msg[2:])
	timeout := binary.LittleEndian.Uint64(msg[16:])
	switch {
	case c.Method.Request() == nil:
		return Call{}, nil, fmt.Errorf("api: a call of method %d, which version %d does not have: %w", msg[1], CallVersion, ErrCall)
	case flags&^flagSampled != 0:
		return Call{}, nil, fmt.Errorf("api: a call with flags %#x, which version %d does not have: %w", flags, CallVersion, ErrCall)
	case timeout > math.MaxInt64:
		return Call{}, nil, fmt.Errorf("api: a call with a timeout of %d ns: %w", timeout, ErrCall)
	case c.ReplyMax < ReplyHeaderBytes:
		return Call{}, nil, fmt.Errorf("api: a call with room for %d bytes of reply; an empty one has %d: %w", c.ReplyMax, ReplyHeaderBytes, ErrCall)
	}
	c.Timeout, c.Trace.Sampled = time.Duration(timeout), flags&flagSampled != 0
	return c, msg[CallHeaderBytes:], nil
}

// Reply is the header of a reply.
type Reply struct {
	ID uint64
	// Code is the gRPC status code. If it is not 0, the body is the text of the error.
	Code uint32
	// Immediates is the number of RDMA immediates that the caller of a read must receive before all
	// bytes of the read have arrived.
	Immediates uint32
}

// Append appends the header. The caller then appends the response or the text of the error.
func (r Reply) Append(dst []byte) []byte {
	dst = append(dst, KindReply, 0)
	dst = binary.LittleEndian.AppendUint16(dst, CallVersion)
	dst = binary.LittleEndian.AppendUint32(dst, r.Code)
	dst = binary.LittleEndian.AppendUint32(dst, r.Immediates)
	dst = binary.LittleEndian.AppendUint32(dst, 0)
	return binary.LittleEndian.AppendUint64(dst, r.ID)
}

// ParseReply splits a reply into its header and its body, which is a part of msg. An error wraps
// ErrCall.
func ParseReply(msg []byte) (r Reply, body []byte, err error) {
	if len(msg) < ReplyHeaderBytes || msg[0] != KindReply {
		return r, nil, fmt.Errorf("api: a message of %d bytes is not a reply; a reply has at least %d bytes and the kind %d: %w", len(msg), ReplyHeaderBytes, KindReply, ErrCall)
	}
	if version := binary.LittleEndian.Uint16(msg[2:]); version != CallVersion || msg[1] != 0 || binary.LittleEndian.Uint32(msg[12:]) != 0 {
		return r, nil, fmt.Errorf("api: a reply of version %d, or with reserved bytes that are not zero; this program has version %d: %w", version, CallVersion, ErrCall)
	}
	r = Reply{
		ID:         binary.LittleEndian.Uint64(msg[16:]),
		Code:       binary.LittleEndian.Uint32(msg[4:]),
		Immediates: binary.LittleEndian.Uint32(msg[8:]),
	}
	return r, msg[ReplyHeaderBytes:], nil
}
