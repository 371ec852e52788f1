package rdma

import (
	"context"
	"time"
)

// Engine is one transfer engine: its registered memory, its sessions with peers, and its
// immediates. All methods may be called concurrently.
type Engine interface {
	// Addr returns the address of this engine; it does not change. An engine that does not listen
	// has an ID and no NICs in its Addr: peers reach it only over sessions that it opened.
	Addr() Addr

	// Register makes mem usable as the source of writes and, unless opts exclude it, as a
	// destination for writes of peers. The memory must stay allocated until the region's Close has
	// returned. Memory outside the Go heap (an arena) is recommended; memory in the Go heap works
	// too.
	Register(mem []byte, opts RegisterOptions) (Region, error)

	// Connect opens a session with the engine at addr. Both engines prove to each other that they
	// have the token. Connect returns the ID of the engine that answered. If addr.Engine is not
	// zero, only that engine is accepted. When Connect returns, both engines can write and send to
	// each other. An existing session is reused.
	Connect(ctx context.Context, addr Addr, token Token) (EngineID, error)
	// AddPeerGroup looks up the sessions with peers once, for use by Scatter and Barrier. If any of
	// the peers has no session, AddPeerGroup returns ErrNoPeer, and the error text names the first
	// such peer.
	AddPeerGroup(peers []EngineID) (PeerGroup, error)
	// Disconnect ends the session with peer, if there is one. Operations in flight end with
	// ErrPeerDied at both engines.
	Disconnect(peer EngineID)
	// Peers returns the sessions that are alive, in no order.
	Peers() []Peer

	// Send submits a small message. It copies msg, so the caller may reuse msg when Send returns.
	// done, which may be nil, is called once, when the peer has received the message into a buffer
	// or refused it. If the peer's in-flight budget is used up, Send waits until ctx ends. If Send
	// returns an error, nothing was submitted and done is not called.
	Send(ctx context.Context, to EngineID, msg []byte, done func(error)) error
	// Recv posts count receive buffers of sizeBytes each, for messages of any peer. Each message
	// occupies one buffer. handler runs on one message after another. When handler returns, msg is
	// not valid any more, because its buffer is posted again. handler may block. A message that
	// finds no free buffer is refused. Recv may be called once per engine; later calls return
	// ErrExists.
	Recv(count, sizeBytes int, handler func(from EngineID, msg []byte)) error

	// Write submits one contiguous write. If the peer's in-flight budget is used up, Write waits
	// until ctx ends. If w.NoWait is set, it returns ErrBusy at once instead. If Write returns an
	// error, nothing was submitted and Done is not called. Otherwise w.Done is called exactly
	// once.
	Write(ctx context.Context, w Write) error
	// WritePaged submits one write of pages of equal length. Indices give the source and the
	// destination of each page. The caller may reuse the index slices when WritePaged returns. In
	// all other respects it is like Write.
	WritePaged(ctx context.Context, w PagedWrite) error
	// Scatter writes one slice of the source to each of several destinations, at one or several
	// peers. The immediate is counted once at each destination. Done is called once, when all
	// writes have ended, with their errors joined. If Scatter returns an error, nothing was
	// submitted.
	Scatter(ctx context.Context, s Scatter) error
	// Barrier delivers an immediate to each destination, without payload.
	Barrier(ctx context.Context, b Barrier) error

	// ExpectImm arranges that e.Done is called once e.Imm has been counted e.Count times.
	// Immediates that arrived before the call count too (the engine keeps a limited number of
	// them). e.Done may be called before ExpectImm returns. ExpectImm returns ErrExists if this
	// immediate is already expected.
	ExpectImm(e Expect) (*Expectation, error)

	// Info returns a description of the engine, which does not change.
	Info() Info
	// NICs returns the current state of the engine's NICs, in the order of Addr().NICs.
	NICs() []NIC
	// Stats returns counters since the start.
	Stats() Stats
	// Close ends all sessions, calls Done of all operations in flight with ErrClosed, and revokes
	// all regions. It returns when the engine's goroutines have ended. It may be called twice.
	Close() error
}

// RegisterOptions configures a region. The zero value is for host memory to which peers may write.
type RegisterOptions struct {
	// Local prevents writes of peers to the region as a whole: its Desc has an invalid key, and
	// peers can write only to its windows.
	Local bool
	// Device is the device that holds the memory, in the provider's notation ("cuda:0"); "" is the
	// host.
	Device string
	// DMABuf is device memory that has no address in this process; Register's mem is then nil.
	// Register returns ErrUnsupported if the provider or the kernel does not support dma-bufs.
	DMABuf *DMABuf
}

// DMABuf is a range of device memory that the device's driver has exported as a dma-buf.
type DMABuf struct {
	// FD is the descriptor of the dma-buf. The caller may close it when Register has returned: the
	// engine has its own descriptor of the same buffer, for windows and for NICs that are added
	// later.
	FD int
	// Offset and Len are the range's offset in the dma-buf and its length, in bytes.
	Offset, Len uint64
	// Addr is the device's virtual address of the first byte.
	Addr uint64
}

// Region is registered memory.
type Region interface {
	// Bytes returns the memory; nil for memory that has no address in this process.
	Bytes() []byte
	// Len returns the size in bytes.
	Len() uint64
	// Desc returns the Desc with which a peer may write to the whole region. The Desc of a Local
	// region has an invalid key.
	Desc() Desc
	// Window makes a window: the range of n bytes from off, with its own key. Only the engines in
	// peers may write to the window; if peers is empty, every engine with a session may. Writes of
	// other engines are refused: by the target if its CPU processes each write, otherwise by the
	// sender's engine, which reads the permitted engines from Desc.Peers. Revoke may have to send
	// requests to the peers that may write to the window, so a window for one transfer should name
	// its peer.
	//
	// The cost of a window depends on the provider. Over tcp and shm it is a map entry and some
	// random bits. Over verbs it is a few commands to the NIC. It is a registration if the memory
	// or the NIC supports no cheaper window (see rdma/verbs and rdma/fabric).
	Window(off, n uint64, peers ...EngineID) (Window, error)
	// WindowSpans makes one window of several parts of the region, with one key. The offsets of
	// its Desc count from the first byte of the lowest span, and its length ends with the highest
	// span. The cost is that of Window plus 16 bytes per span. If Info.Spans is set, a write that
	// touches a byte between the spans is refused with ReasonBounds. Otherwise the NIC checks one
	// range per key, and peers may also write to the bytes between the spans. The Window's Bytes
	// are nil. The caller may reuse spans when WindowSpans returns.
	WindowSpans(spans []Span, peers ...EngineID) (Window, error)
	// Close revokes the region and all its windows. It then waits until the last write whose
	// source is this region has ended and its Done has returned. If ctx ends first, the revocation
	// remains in effect, and Close may be called again to continue waiting.
	Close(ctx context.Context) error
}

// Window is a part of a region to which peers may write until the window is revoked.
type Window interface {
	// Desc returns the Desc with which peers may write to the window. Offset 0 is the window's
	// first byte.
	Desc() Desc
	// Bytes returns the window's memory.
	Bytes() []byte
	// Revoke ends all access of peers to the window. Writes that arrive after the call has begun
	// are refused. Revoke returns nil once no payload is being placed in the window any more, so
	// after that the bytes belong to the caller alone. If ctx ends first, the revocation remains
	// in effect, the bytes are not yet safe to reuse, and Revoke may be called again to continue
	// waiting. Revoking a window twice is not an error.
	Revoke(ctx context.Context) error
}

// Peer is one live session.
type Peer struct {
	ID EngineID
	// Remote is the peer's network address as the connection reports it.
	Remote string
	// Dialed: this engine opened the session, and the peer accepted it.
	Dialed bool
	// InFlightOps is the number of operations that this engine has submitted in the session and that
	// have not ended. InFlightBytes are the bytes of the writes among them.
	InFlightOps   int
	InFlightBytes int64
}

// NIC is the state of one NIC of an engine.
type NIC struct {
	// Name is the provider's name of the NIC: "eth1", "mlx5_0", "rxe0".
	Name string
	Addr NetAddr
	// Up: operations use the NIC at the moment. If not, Reason is the reason.
	Up     bool
	Reason string
	// BytesOut and BytesIn are the payload bytes that the NIC has sent and received since the
	// start.
	BytesOut, BytesIn uint64
}

// Info describes an engine.
type Info struct {
	// Provider is the provider's name: tcp, shm, verbs, fabric or sim.
	Provider string
	// Detail is a one-line description for logs and status, for example connections per peer and
	// congestion control.
	Detail string
	// Spans: peers cannot write to the bytes between the spans of a window (Region.WindowSpans).
	Spans bool
	// HeartbeatInterval is the interval at which heartbeats are sent. A peer is declared dead if
	// nothing arrives from it for IdleTimeout.
	HeartbeatInterval, IdleTimeout time.Duration
}

// Stats are counters of an engine since its start. Names with "Out" count the operations that this
// engine submitted, names with "In" the operations of its peers.
type Stats struct {
	WritesOut, WriteBytesOut, WriteFailuresOut uint64
	// WritesIn and WriteBytesIn are the peers' writes, and their bytes, that the target's CPU has
	// observed. If the NICs write without the CPU, only writes with an immediate are observed, so
	// both values are too small.
	WritesIn, WriteBytesIn             uint64
	SendsOut, SendFailuresOut, SendsIn uint64
	// ImmediatesIn is the number of immediates that were counted. ImmediatesDropped is the number
	// of immediates that arrived before they were expected, when the limit of kept immediates had
	// been reached.
	ImmediatesIn, ImmediatesDropped uint64
	// RefusedIn is the number of operations of peers that this engine refused, by Reason.
	RefusedIn [6]uint64
	// DrainedBytesIn is the payload of refused operations in bytes, which was read and discarded.
	DrainedBytesIn uint64
	// AuthFailures is the number of handshakes that ended without proof of the token. A handshake that the
	// peer ended before it sent a proof does not count.
	AuthFailures uint64
	// MalformedFrames is the number of malformed frames; each of them ended its session.
	MalformedFrames uint64
	// SessionsOpened and SessionsClosed are the numbers of sessions, dialed or accepted, that
	// began and ended. PeersTimedOut is the number of sessions that ended because nothing arrived
	// from the peer for IdleTimeout.
	SessionsOpened, SessionsClosed, PeersTimedOut uint64
	// InFlightOps and InFlightBytes are the sums of Peer.InFlightOps and Peer.InFlightBytes over all peers at the moment.
	InFlightOps, InFlightBytes int64
}
