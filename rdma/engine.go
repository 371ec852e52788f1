package rdma

import (
	"context"
	"time"
)

// Engine is one transfer engine: the memory it registered, its sessions with
// peers, its immediates. All methods may be called concurrently.
type Engine interface {
	// Addr returns how to reach this engine; it does not change. An engine that
	// does not listen has an ID and no NICs: peers reach it over the sessions
	// that it opens.
	Addr() Addr

	// Register makes mem usable as the source of writes and, unless opts say
	// otherwise, as a destination for peers. The memory must stay allocated
	// until the region's Close has returned; memory outside the Go heap is
	// expected (an arena), memory inside it works.
	Register(mem []byte, opts RegisterOptions) (Region, error)

	// Connect opens a session with the engine at addr and proves token to it,
	// and it in turn proves the token to us. It returns the ID of the engine
	// that answered: addr.Engine, or, where that is zero, whoever is there.
	// When it returns, both sides can write and send to each other. A session
	// that exists already is used again.
	Connect(ctx context.Context, addr Addr, token Token) (EngineID, error)
	// AddPeerGroup resolves the sessions with peers once, for Scatter and
	// Barrier. ErrNoPeer names the first peer without a session.
	AddPeerGroup(peers []EngineID) (PeerGroup, error)
	// Disconnect ends the session, if there is one: operations in flight end
	// with ErrPeerDied, on both sides.
	Disconnect(peer EngineID)
	// Peers returns the sessions that are alive, in no order.
	Peers() []Peer

	// Send submits a small message. msg is copied: it may be reused when Send
	// returns. done, which may be nil, is called once the peer has taken it
	// into a receive buffer or refused it. If the peer's budget is used up,
	// Send waits until ctx ends. A non-nil error: not submitted, done is not
	// called.
	Send(ctx context.Context, to EngineID, msg []byte, done func(error)) error
	// Recv posts count receive buffers of sizeBytes each, for messages of any
	// peer. Each message takes one, handler runs on it, one message after the
	// other, and the buffer is posted again when handler returns: msg is not
	// valid after that. handler may block; a message that finds no buffer free
	// is refused. Once per engine: ErrExists after that.
	Recv(count, sizeBytes int, handler func(from EngineID, msg []byte)) error

	// Write submits one contiguous write. If the peer's in-flight budget is
	// used up it waits for room until ctx ends, or answers ErrBusy at once where
	// w.NoWait is set. A non-nil error: nothing was submitted, Done is not
	// called. Otherwise w.Done is called exactly once.
	Write(ctx context.Context, w Write) error
	// WritePaged submits one write of equally long pages, taken from and put to
	// places given by index. Otherwise as Write; the index slices may be reused
	// when it returns.
	WritePaged(ctx context.Context, w PagedWrite) error
	// Scatter writes one slice of the source to each of several destinations,
	// of one or several peers. The immediate is counted once at each
	// destination; Done is called once, when all have ended, with the errors
	// joined. A non-nil error: nothing was submitted.
	Scatter(ctx context.Context, s Scatter) error
	// Barrier delivers an immediate to each destination, without payload.
	Barrier(ctx context.Context, b Barrier) error

	// ExpectImm arranges for e.Done to be called once e.Imm has been counted
	// e.Count times. Immediates that came earlier count (a bounded number is
	// kept). e.Done may be called before ExpectImm returns. ErrExists if this
	// immediate is expected already.
	ExpectImm(e Expect) (*Expectation, error)

	// Info says what the engine is; it does not change.
	Info() Info
	// NICs returns the engine's NICs, in the order of Addr().NICs, as they are
	// now.
	NICs() []NIC
	// Stats returns counters since the start.
	Stats() Stats
	// Close ends all sessions, calls Done of everything in flight with
	// ErrClosed, revokes all regions, and returns when the engine's goroutines
	// have ended. It may be called twice.
	Close() error
}

// RegisterOptions is the zero value for host memory that peers may write.
type RegisterOptions struct {
	// Local keeps the region closed to peers as a whole: Desc opens nothing,
	// only windows do.
	Local bool
	// Device names the device that holds the memory, as its provider writes it
	// ("cuda:0"); "" is the host.
	Device string
	// DMABuf is device memory that the process can't address: Register's mem is
	// then nil. ErrUnsupported where the provider or the kernel can't.
	DMABuf *DMABuf
}

// DMABuf is a range of device memory, exported by its driver.
type DMABuf struct {
	// FD is the dma-buf. It may be closed when Register has returned: the engine has
	// its own descriptor of the same buffer, for windows and for NICs that come later.
	FD int
	// Offset of the range in the dma-buf, and its length, in bytes.
	Offset, Len uint64
	// Addr is the device's virtual address of the first byte.
	Addr uint64
}

// Region is registered memory.
type Region interface {
	// Bytes returns the memory; nil for memory that the process can't address.
	Bytes() []byte
	// Len is the size in bytes.
	Len() uint64
	// Desc opens the whole region to whoever holds it. Of a Local region it
	// carries a key that opens nothing.
	Desc() Desc
	// Window opens the sub-range of n bytes from off with a key of its own, to the peers
	// whose engines are named; without a name it is open to every peer. Writes of other
	// peers are refused: by the target where it sees each write, otherwise by the engine of
	// the sender, which finds the names in the Desc. Revoke may have to ask the peers to
	// whom a window is open, so a window for one transfer names its peer.
	//
	// What it costs is the provider's: a map entry and some random bits over tcp and shm,
	// commands of the card over verbs, a registration where the memory or the card has no
	// cheaper window (rdma/verbs and rdma/fabric say which).
	Window(off, n uint64, peers ...EngineID) (Window, error)
	// WindowSpans opens several parts of the region with one key: its Desc counts from
	// the first byte of the lowest span and reaches to the end of the highest. It
	// costs what Window does, and 16 bytes a span. A write that touches a byte between
	// the spans is refused with ReasonBounds where Info.Spans is set. Elsewhere the NIC
	// checks one range for each key, and what lies between the spans is open too. The
	// Window's Bytes are nil. spans may be reused when it returns.
	WindowSpans(spans []Span, peers ...EngineID) (Window, error)
	// Close revokes the region and all its windows, then waits until the last
	// write that reads from it has ended and its Done has returned. If ctx ends
	// first, the revocation stands, and Close may be called again to wait on.
	Close(ctx context.Context) error
}

// Window is a part of a region that peers may write until it is revoked.
type Window interface {
	// Desc opens the window to whoever holds it: offset 0 is the window's first
	// byte.
	Desc() Desc
	// Bytes returns the window's memory.
	Bytes() []byte
	// Revoke closes the window. From the call on, writes that arrive are
	// refused; it returns once no payload is being placed in it any more, so
	// that after nil the bytes belong to the caller alone. If ctx ends first the
	// revocation stands, the bytes are not yet safe to reuse, and Revoke may be
	// called again to wait on. Revoking twice is no error.
	Revoke(ctx context.Context) error
}

// Peer is one live session.
type Peer struct {
	ID EngineID
	// Remote is the peer's network address as this side sees it.
	Remote string
	// Dialed is whether this side opened the session.
	Dialed bool
	// InFlightOps and InFlightBytes are what this side has submitted and not
	// yet seen the end of.
	InFlightOps   int
	InFlightBytes int64
}

// NIC is the state of one NIC of an engine.
type NIC struct {
	// Name is the provider's: "eth1", "mlx5_0", "rxe0".
	Name string
	Addr NetAddr
	// Up is whether operations use it now; Reason says why not.
	Up     bool
	Reason string
	// BytesOut and BytesIn are the payload it carried since the start.
	BytesOut, BytesIn uint64
}

// Info describes an engine.
type Info struct {
	// Provider is tcp, shm, verbs, fabric, sim.
	Provider string
	// Detail is one line for people: connections per peer, congestion control.
	Detail string
	// Spans: what lies between the spans of a window (Region.WindowSpans) is closed.
	Spans bool
	// HeartbeatInterval and IdleTimeout: a peer silent for IdleTimeout is dead.
	HeartbeatInterval, IdleTimeout time.Duration
}

// Stats are counters of an engine since its start. "Out" is what this engine
// submitted, "In" what its peers did.
type Stats struct {
	WritesOut, WriteBytesOut, WriteFailuresOut uint64
	// A target whose NICs write past its CPU sees only what an immediate tells it:
	// WritesIn and WriteBytesIn are then less than what came.
	WritesIn, WriteBytesIn             uint64
	SendsOut, SendFailuresOut, SendsIn uint64
	// ImmediatesIn were counted; ImmediatesDropped came before they were
	// expected and found no room.
	ImmediatesIn, ImmediatesDropped uint64
	// RefusedIn are operations of peers that this engine refused, by reason;
	// index with Reason.
	RefusedIn [6]uint64
	// DrainedBytesIn is the payload of refused operations, read and dropped.
	DrainedBytesIn uint64
	// AuthFailures are handshakes that ended without proof of the token.
	AuthFailures uint64
	// MalformedFrames ended their session each.
	MalformedFrames uint64
	// SessionsOpened and SessionsClosed are both dialed and accepted ones;
	// PeersTimedOut is the share of closed ones that ended by silence.
	SessionsOpened, SessionsClosed, PeersTimedOut uint64
	// InFlightOps and InFlightBytes are gauges over all peers.
	InFlightOps, InFlightBytes int64
}
