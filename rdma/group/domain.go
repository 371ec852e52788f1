package group

import (
	"errors"

	"github.com/penstock-kv/penstock/rdma"
)

// Domain is one NIC as the engine uses it: memory keys, endpoints and one completion queue. It has
// no information about peers, sessions or other NICs.
//
// The engine calls Register, NewEndpoint and the methods of memories and endpoints from any
// goroutine. It calls Poll, Wait and PostRecv from one goroutine at a time, the domain's poller.
// The poller also calls Post and Shut, so neither may wait for a Poll. Any other blocking method
// may wait for a running Poll to return, but not for the next Poll.
type Domain interface {
	// Name is the NIC's name in logs and status: "mlx5_0", "rxe0", "shm".
	Name() string
	// Limits are constant.
	Limits() Limits

	// Register makes mem usable as the source of writes, and writable for peers that hold its key.
	// If mem is nil, Register uses opts.DMABuf, whose descriptor stays open until the Memory's
	// Close has returned. The memory stays at its address until Close has returned. With opts.Local
	// the engine gives the key of the whole memory to no peer, so Register need not allow remote
	// access to it, if Memory.Window works (Limits.Windows).
	Register(mem []byte, opts rdma.RegisterOptions) (Memory, error)

	// NewEndpoint makes an endpoint that is not connected yet, for traffic of one class. cookie is
	// in the completions of the peer's Works on this endpoint.
	NewEndpoint(cookie uint64, class rdma.Class) (Endpoint, error)

	// PostRecv lends buf, a part of mem, to the domain for one message on any endpoint. The
	// KindMessage completion with this slot returns buf to the caller. If the domain is closed
	// first, no completion returns buf.
	PostRecv(slot uint32, mem Memory, buf []byte) error

	// Poll moves up to len(dst) completions to dst and returns their number. It does not block. In
	// a domain implemented in software Poll also does the transfers, so it may copy payload. An
	// error wraps ErrDead and is the end of the domain: all completions have already been
	// returned, no remaining Work touches memory, and the engine calls only Shut and Close
	// afterwards.
	Poll(dst []Completion) (int, error)
	// Wait blocks until Poll may have a completion, or until Wake has been called since the last
	// Wait returned. Wait may return early without a reason.
	Wait()
	// Wake makes the current or the next Wait return. Any goroutine may call it.
	Wake()

	// Close releases the domain. The engine has closed all endpoints and memories, and neither
	// Poll nor Wait is running.
	Close() error
}

// Limits of a domain.
type Limits struct {
	// MaxWrite is the longest payload of one Work, and MaxMessage the longest payload of one
	// OpSend, in bytes.
	MaxWrite   uint64
	MaxMessage int
	// QueueDepth is the largest number of Works of one endpoint whose completions have not been
	// polled.
	QueueDepth int
	// Ordered: when Poll returns a KindImmediate, the payload of every Work posted before its
	// OpWriteImm on that endpoint is in place, and Poll returns the immediates of an endpoint in
	// the order posted. Payloads may be placed in any order. RC is ordered, EFA's SRD is not.
	Ordered bool
	// RefusalBreaks: if the target's NIC refuses a Work, the Work's endpoint breaks, and the Works
	// posted after this Work are not performed.
	RefusalBreaks bool
	// CloseIsFinal: after Memory.Close has returned, no remote write changes the memory, not even
	// a write that was in flight. Poll can then return the immediates of writes that landed before
	// (as after Endpoint.Shut). If CloseIsFinal is false, the memory is safe only after Shut of
	// each endpoint that may write to it.
	CloseIsFinal bool
	// Windows: Memory.Window works, except where it returns ErrUnsupported, and is cheap: it does
	// not pin pages again.
	Windows bool
	// Spans: the domain's memories implement SpanMemory.
	Spans bool
	// EmptyUnchecked: the target's NIC does not check the key of a Work without payload (RC). The
	// engine then sends an immediate without payload as a message, and the target's engine checks
	// the key. A Work without payload always has a key, because EFA requires a valid key
	// (fabric-lib section 3.5).
	EmptyUnchecked bool
	// KeyBits is the width of a key in bits; 0 means 64. The engine refuses a wider RemoteKey and
	// key 0, and passes neither to Post.
	KeyBits int
}

// Memory is memory that is registered with one domain.
type Memory interface {
	// Key is the key with which peers access the memory on this domain. It is never 0.
	Key() uint64
	// Base is the value of Work.RemoteAddr for the first byte of the memory. A Desc has one Base
	// for all NICs, so all domains of one engine must use the same base for the same memory (all
	// 0, or all the virtual address).
	Base() uint64
	// Window makes a window of n bytes from off. The window has its own key, which gives access to
	// no other byte. The window is closed before the memory. Window returns ErrUnsupported if this
	// part of the memory cannot be a window (it is too long, or it is device memory). The engine
	// then registers the part separately.
	Window(off, n uint64) (Memory, error)
	// Close invalidates the key: the NIC refuses Works that arrive later. Limits.CloseIsFinal
	// states what happens to Works that are landing. When Close is called, no local Work reads
	// from the memory. Close is called once.
	Close() error
}

// SpanMemory is a Memory that can give access to several parts of itself with one key. WindowSpans
// is Window with access to spans only. The offsets of spans count from off, and the NIC refuses
// writes between the spans. A Domain sets Limits.Spans if its memories implement SpanMemory.
type SpanMemory interface {
	WindowSpans(off, n uint64, spans []rdma.Span) (Memory, error)
}

// Endpoint is one end of a connection between two domains: a queue pair or its equivalent. One
// goroutine at a time calls Post. Any goroutine may call Shut and Close.
type Endpoint interface {
	// Local returns the address that the peer passes to its Connect, at most MaxEndpointAddr
	// bytes. The address is sent over the control connection and never changes.
	Local() []byte
	// Connect connects the endpoint to the peer's endpoint; remote is the result of Local of that
	// endpoint. Each engine calls Connect once, and posts only after Connect has returned at both
	// engines. Connect may block for a few seconds. The peer has proved that it holds the token,
	// but remote is still untrusted input: Connect returns an error if remote is invalid.
	Connect(remote []byte) error

	// Post submits works in order and returns how many the endpoint accepted: fewer than
	// len(works) if its queue is full. Each accepted Work has exactly one completion, in every
	// case. The caller may reuse the slice works when Post returns. The domain may read the
	// payload until the completion. An error means that the endpoint is broken and did not accept
	// works[n:].
	Post(works []Work) (n int, err error)

	// Shut disconnects the endpoint. After Shut has returned, no Work that the peer posted on the
	// endpoint changes local memory or is counted. Every local Work that had not completed
	// completes with StatusBroken. Poll still returns the immediates and messages that had arrived
	// before Shut returned. All of them have been returned once a Poll that began after Shut had
	// returned moves fewer than len(dst) completions. Shut may be called twice, and before Connect.
	Shut()
	// Close releases the endpoint. Shut has returned, and the completion of every Work has been
	// polled. After Close no completion carries the endpoint's cookie.
	Close() error
}

// MaxEndpointAddr is the longest Endpoint.Local, in bytes.
const MaxEndpointAddr = 1 << 10

// Op is the operation of a Work.
type Op uint8

const (
	// OpWrite places payload in the peer's memory. The peer gets no completion.
	OpWrite Op = 1
	// OpWriteImm places payload and then delivers Imm as a KindImmediate.
	OpWriteImm Op = 2
	// OpSend delivers the payload as a message into a buffer of PostRecv.
	OpSend Op = 3
)

// Work is one request to a NIC.
type Work struct {
	// Cookie is returned in the completion.
	Cookie uint64
	Op     Op
	Imm    uint32
	// Src is the source, SrcOff the offset of the payload in the source, and Len the length of the
	// payload in bytes. Src is nil if Len is 0.
	Src    Memory
	SrcOff uint64
	Len    uint64
	// RemoteAddr (the target's Base plus an offset) and RemoteKey are the destination. Both come
	// from the peer and may be wrong; RemoteAddr plus Len may exceed 64 bits.
	RemoteAddr, RemoteKey uint64
}

// Kind is the type of a completion.
type Kind uint8

const (
	// KindDone: a local Work has ended. Cookie is the Work's.
	KindDone Kind = 1
	// KindImmediate: the payload of a peer's OpWriteImm is in place and visible. Cookie is the
	// endpoint's, Imm the immediate, Len the length of the payload.
	KindImmediate Kind = 2
	// KindMessage: a peer's OpSend is in the buffer of Slot. Cookie is the endpoint's, Len the
	// length of the message. The buffer belongs to the caller again.
	KindMessage Kind = 3
	// KindBroken: the endpoint with this Cookie has broken (the peer is gone, the link is down, or
	// a Work was refused) and accepts no more Works. KindBroken is reported at most once for an
	// endpoint. The engine polls the remaining completions (the completion of a refused Work
	// should be StatusRefused), shuts and closes the endpoint, and makes another endpoint when it
	// tries again.
	KindBroken Kind = 4
)

// Status is the result of a Work.
type Status uint8

const (
	// StatusOK: the payload is in place at the target.
	StatusOK Status = 0
	// StatusRefused: the target's NIC refused the key or the address range. It placed nothing or a
	// part of the payload, and delivered no immediate.
	StatusRefused Status = 1
	// StatusBroken: the endpoint broke before the result was known. The payload may or may not
	// be in place, and the immediate may or may not have been delivered.
	StatusBroken Status = 2
	// StatusNoBuffer: the peer had no buffer for an OpSend, or the peer's buffer was too small.
	StatusNoBuffer Status = 3
)

// Completion is one event of a domain.
type Completion struct {
	Kind   Kind
	Status Status
	Cookie uint64
	Imm    uint32
	Slot   uint32
	Len    uint64
	// Err is the reason as text for logs, if Status is not StatusOK or Kind is KindBroken. It may
	// be nil.
	Err error
}

// ErrDead is wrapped by the error that Poll returns when the domain's NIC has failed. The engine
// continues with the other NICs and calls Options.Reopen for a replacement.
var ErrDead = errors.New("nic is dead")
