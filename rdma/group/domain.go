package group

import (
	"errors"

	"github.com/penstock-kv/penstock/rdma"
)

// Domain is one NIC, as the engine drives it: memory keys, endpoints, one queue
// of completions. It knows neither peers nor sessions nor other NICs.
//
// The engine calls Register, NewEndpoint and the methods of memories and
// endpoints from any goroutine; Poll, Wait and PostRecv from one goroutine at a
// time, the domain's poller. Because Post and Shut are called by the poller too,
// neither may wait for a Poll; what else blocks may wait for a running Poll to
// return, never for the next one.
type Domain interface {
	// Name is the NIC's, for people: "mlx5_0", "rxe0", "shm".
	Name() string
	// Limits are constant.
	Limits() Limits

	// Register makes mem, or opts.DMABuf where mem is nil (its descriptor stays open until
	// the Memory's Close has returned), usable as a source
	// and open to whoever is given its key. The memory stays where it is until
	// the Memory's Close has returned. With opts.Local nobody is given the key
	// of the whole: remote access may stay closed as far as windows still work.
	Register(mem []byte, opts rdma.RegisterOptions) (Memory, error)

	// NewEndpoint makes an endpoint that is not connected yet, for traffic of
	// one class. cookie comes back in completions that the peer caused.
	NewEndpoint(cookie uint64, class rdma.Class) (Endpoint, error)

	// PostRecv lends buf, a part of mem, to the domain for one message of any
	// endpoint; slot comes back with it, in a KindMessage, or never if the
	// domain is closed first.
	PostRecv(slot uint32, mem Memory, buf []byte) error

	// Poll moves up to len(dst) completions to dst and returns how many. It
	// also makes progress where software must (it may copy payload). It does
	// not block. An error, which wraps ErrDead, is the end of the domain: every
	// completion that there is has been returned before, no Work that is left
	// touches memory from here on, and nothing but Shut and Close is called.
	Poll(dst []Completion) (int, error)
	// Wait blocks until Poll may have something to do, or Wake was called since
	// the last Wait returned. It may return early for no reason.
	Wait()
	// Wake makes the current or the next Wait return. Any goroutine.
	Wake()

	// Close releases the domain. All endpoints and memories are closed before,
	// and neither Poll nor Wait is running.
	Close() error
}

// Limits of a domain.
type Limits struct {
	// MaxWrite is the longest payload of one Work, MaxMessage of one OpSend, in
	// bytes.
	MaxWrite   uint64
	MaxMessage int
	// QueueDepth is how many Works an endpoint takes before the completion of
	// the first has been polled.
	QueueDepth int
	// Ordered: the Works of one endpoint are placed in the order posted as far
	// as immediates can tell: when a KindImmediate is polled, every Work posted
	// before its OpWriteImm on that endpoint is in place too, and immediates
	// of an endpoint are polled in the order posted. RC is ordered, EFA's SRD
	// is not. (Payloads alone are never ordered.)
	Ordered bool
	// RefusalBreaks: a Work that the target's NIC refuses breaks its endpoint;
	// what was posted behind it was not performed.
	RefusalBreaks bool
	// CloseIsFinal: once Memory.Close has returned no remote write touches the
	// memory any more, whatever was in flight, and the immediates of those that
	// landed before are there to be polled (as after Endpoint.Shut). Where it is
	// false only shutting the endpoints that may write there guarantees that.
	CloseIsFinal bool
	// Windows: Memory.Window works, but for what it calls ErrUnsupported, and is cheap
	// (no page is pinned again).
	Windows bool
	// Spans: its memories are SpanMemory.
	Spans bool
	// EmptyUnchecked: the key of a Work without payload is not checked by the
	// target's NIC (RC). The engine then sends an immediate without payload as a
	// message, whose key it checks itself. (A key is always named: EFA wants a
	// valid one, fabric-lib section 3.5.)
	EmptyUnchecked bool
	// KeyBits is how wide a key is; 0 is 64. A wider RemoteKey never comes to
	// Post: the engine knows that it opens nothing. Nor does key 0.
	KeyBits int
}

// Memory is memory that one domain knows.
type Memory interface {
	// Key opens the memory to peers on this domain; never 0.
	Key() uint64
	// Base is the address of the first byte as Work.RemoteAddr counts. A Desc
	// has one Base for all NICs, so that the domains of one engine must count
	// the same memory the same way (all from 0, or all by virtual address).
	Base() uint64
	// Window makes a part of the memory, n bytes from off, with a key of its
	// own that opens nothing else. It is closed before the memory is. ErrUnsupported where
	// this part can be no window (it is long, or of a device): the engine then registers
	// the part by itself.
	Window(off, n uint64) (Memory, error)
	// Close takes the key back: Works that arrive later are refused. What it
	// guarantees of Works that are landing is Limits.CloseIsFinal. No Work of
	// ours reads from the memory any more. It is called once.
	Close() error
}

// SpanMemory is a Memory that can open several parts of itself with one key:
// Window for the bytes from the first to the last of spans, which count from off.
// What lies between them is refused. A Domain that has it sets Limits.Spans.
type SpanMemory interface {
	WindowSpans(off, n uint64, spans []rdma.Span) (Memory, error)
}

// Endpoint is one end of a connection between two domains: a queue pair, or
// what stands for it. Post is called by one goroutine at a time; Shut and Close
// by any.
type Endpoint interface {
	// Local is what the peer's endpoint must be given, at most MaxEndpointAddr
	// bytes; it travels over the control connection. It is constant.
	Local() []byte
	// Connect joins the endpoint to the one whose Local is remote. Both sides
	// call it, once; the engine posts only after it has returned on both. It may
	// block for a few seconds. The peer proved the token, but remote is still
	// bytes from outside: what makes no sense is an error.
	Connect(remote []byte) error

	// Post submits works in order and returns how many were taken: fewer than
	// len(works) if the queue is full. Each Work taken gives exactly one
	// completion, whatever happens. The slice may be reused at once; payload
	// is the domain's until the completion. An error: the endpoint is broken,
	// and the works from n on were not taken.
	Post(works []Work) (n int, err error)

	// Shut cuts the endpoint off: after it has returned nothing that the peer
	// posted on it touches our memory or is counted, and every Work that we
	// posted completes, with StatusBroken if not done before. Immediates and
	// messages that had arrived before are still polled, and soon: none of them
	// is left after a Poll that began when Shut had returned and that moved
	// fewer than len(dst). It may be called twice, and before Connect.
	Shut()
	// Close releases the endpoint, after Shut and after the completion of every
	// Work has been polled. No completion names it afterwards.
	Close() error
}

// MaxEndpointAddr is the longest Endpoint.Local, in bytes.
const MaxEndpointAddr = 1 << 10

// Op is what a Work does.
type Op uint8

const (
	// OpWrite places payload in the peer's memory; the peer does not notice.
	OpWrite Op = 1
	// OpWriteImm does the same, then delivers Imm as a KindImmediate.
	OpWriteImm Op = 2
	// OpSend delivers the payload as a message, into a buffer of PostRecv.
	OpSend Op = 3
)

// Work is one request to a NIC.
type Work struct {
	// Cookie comes back in the completion.
	Cookie uint64
	Op     Op
	Imm    uint32
	// Src and SrcOff are the source; Len in bytes. Src is nil if Len is 0.
	Src    Memory
	SrcOff uint64
	Len    uint64
	// RemoteAddr (Base plus offset) and RemoteKey name the destination; both are
	// what a peer claimed and wrap around where it lied.
	RemoteAddr, RemoteKey uint64
}

// Kind says what a completion tells.
type Kind uint8

const (
	// KindDone: a Work that we posted has ended; Cookie is the Work's.
	KindDone Kind = 1
	// KindImmediate: the payload of a peer's OpWriteImm is in place and visible;
	// Cookie is the endpoint's, Imm its immediate, Len the payload.
	KindImmediate Kind = 2
	// KindMessage: a peer's OpSend lies in the buffer of Slot; Cookie is the
	// endpoint's, Len the message's. The buffer is the caller's again.
	KindMessage Kind = 3
	// KindBroken: the endpoint whose Cookie it is has broken (the peer is gone,
	// the link is down, a refusal); nothing more can be posted. Once at most.
	// The engine polls what is left (a Work that was refused should say so), then
	// shuts and closes it, and makes another when it tries again.
	KindBroken Kind = 4
)

// Status is how a Work ended.
type Status uint8

const (
	// StatusOK: the payload is in place at the target.
	StatusOK Status = 0
	// StatusRefused: the target's NIC refused key or bounds; nothing was placed,
	// or a part of it, and no immediate was delivered.
	StatusRefused Status = 1
	// StatusBroken: the endpoint broke before the end was known: payload may or
	// may not be in place, an immediate may or may not have been delivered.
	StatusBroken Status = 2
	// StatusNoBuffer: the peer had no buffer for an OpSend, or too small a one.
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
	// Err says why for people, where Status is not StatusOK or Kind is
	// KindBroken; may be nil.
	Err error
}

// ErrDead is wrapped by what Poll returns when the domain's NIC is gone; the
// engine goes on with the others, and asks Options.Reopen for a new one.
var ErrDead = errors.New("nic is dead")
