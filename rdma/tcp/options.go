package tcp

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/qos"
)

// Options configure an Engine. The zero value is a client: it opens sessions
// and accepts none.
type Options struct {
	// Listen is the host:port to accept sessions on; port 0 picks one. Empty:
	// none are accepted.
	Listen string
	// Advertise is the host:port that peers are told to dial, where it is not
	// the one listened on. Default: the listener's own address.
	Advertise string
	// NICs are the network interfaces to use, instead of Listen and Advertise,
	// which are those of one. A session has a rail for each pair of NICs.
	// Default: one, wherever the system's routes lead.
	NICs []NIC
	// Token is what a peer must prove to open a session here. Needed with
	// Listen.
	Token rdma.Token
	// TLS, if set, protects the connections of this engine: as the server's
	// configuration every one that it accepts, as the client's those that it
	// dials to an address whose listener speaks TLS. The address says so
	// (HostPort), so that one engine reaches nodes with TLS and nodes without;
	// what is behind the address was authenticated by whoever handed it out.
	// Payload is then copied once more on each side.
	TLS *tls.Config

	// Wrap, if set, stands between the engine and each of its sockets, below TLS:
	// to limit or count what goes over them. The result must do deadlines as the
	// socket does, and return that one from NetConn. Payload then goes by plain
	// Read and Write.
	Wrap func(net.Conn) net.Conn

	// Conns is the number of connections for payload that this side opens for each
	// session, on each pair of NICs, and for each class where QoS is set; and one more:
	// that of the highest class carries messages and acks, which do not wait behind
	// payload. Default 4, at most MaxConns.
	Conns int
	// QoS, if set, gives each rdma.Class connections of its own, in the sessions
	// that this side opens, and marks what this side sends on them; the peer marks
	// what it sends by its own QoS. Otherwise all classes share connections,
	// which are not marked.
	QoS *qos.Map
	// Congestion is the TCP congestion control of every connection. Default
	// "cubic" (bbr, a common system default, costs 10 to 35 % on fast links);
	// "system" leaves the system's.
	Congestion string
	// PieceBytes is the size that a large write is cut into, to be spread over
	// the connections. Default 1 MiB, 64 KiB to 16 MiB.
	PieceBytes int
	// ZeroCopy sends runs of 64 KiB and more without copying them: the socket's queue
	// refers to the pages of the source (vmsplice). It takes a quarter of both sides'
	// processor time off. A write that has failed because its session ended may leave
	// bytes in the peer's window that were not written: what the source was changed to
	// since. No immediate is counted for them. Linux only, not over TLS, and not where the
	// system calls are refused (gVisor, seccomp): there it changes nothing.
	ZeroCopy bool
	// InFlightBytes and InFlightOps bound what is submitted to one peer and has
	// not ended. An operation larger than InFlightBytes is admitted alone.
	// Defaults 64 MiB and 1024 (at most MaxOps).
	InFlightBytes int64
	InFlightOps   int
	// MaxMessage is the longest Send, in bytes. Default 64 KiB, at most 1 MiB.
	MaxMessage int
	// MaxPeers bounds the sessions; one more is turned away. An idle one costs
	// about 40 KiB for each connection. Default 1024.
	MaxPeers int
	// EarlyImmediates is how many unexpected immediates are kept for each peer.
	// Default rdma.DefaultEarlyImmediates.
	EarlyImmediates int

	// HeartbeatInterval is how long a connection may be idle before a heartbeat
	// is sent on it. Default 2 s.
	HeartbeatInterval time.Duration
	// IdleTimeout is the silence after which a peer is dead. Default 10 s, at
	// least twice the HeartbeatInterval.
	IdleTimeout time.Duration
	// NICTimeout is the silence after which a pair of NICs is dead, while others
	// of the session are not silent. Default twice the HeartbeatInterval, and at
	// least that.
	NICTimeout time.Duration
	// TransferTimeout is the age at which an operation without an answer ends
	// its session, though heartbeats arrive: a peer must not hold our buffers
	// for ever. Default 60 s.
	TransferTimeout time.Duration
	// HandshakeTimeout bounds the opening of a session on the accepting side.
	// Default 10 s.
	HandshakeTimeout time.Duration

	// OnPeerUp and OnPeerDown, if set, are called when a session begins and
	// when it has ended, with why; after OnPeerDown nothing of that session
	// touches memory any more. They must not block.
	OnPeerUp   func(rdma.EngineID)
	OnPeerDown func(rdma.EngineID, error)
	// OnPost, if set, is called before each system call that carries frames, by
	// the goroutine that makes it: for measurements.
	OnPost func()
	// Logger takes refused peers and dead sessions, rate-limited. Default: none.
	Logger *slog.Logger
}

// NIC is a network interface of an engine, one of several.
type NIC struct {
	// Name is for people. Default: Device, or the address.
	Name string
	// Listen and Advertise are as in Options. All NICs listen, or none does.
	Listen, Advertise string
	// Device binds the sockets of this NIC to an interface (SO_BINDTODEVICE): what
	// they send leaves there, whatever the routes say, and the NIC is taken out of
	// service as soon as the interface has no carrier.
	Device string
	// Local is the IP address that connections are dialed from. Default: what the
	// routes choose; with Listen, its host, unless that is a wildcard.
	Local string
}

// Limits of the protocol.
const (
	// MaxConns is the largest number of connections on one pair of NICs, for one
	// class.
	MaxConns = 16
	// MaxNICs is the largest number of NICs of one engine, and of rails of one
	// session.
	MaxNICs = 16
	// MaxOps is the largest number of operations of one session in flight in
	// one direction; a peer that exceeds it is cut off.
	MaxOps = 4096
	// maxPiece bounds the payload of one frame.
	maxPiece = 16 << 20
)

// EnsureDefaults fills what is zero.
func (o *Options) EnsureDefaults() {
	options.SetDefault(&o.Conns, 4)
	options.SetDefault(&o.Congestion, "cubic")
	options.SetDefault(&o.PieceBytes, 1<<20)
	options.SetDefault(&o.InFlightBytes, 64<<20)
	options.SetDefault(&o.InFlightOps, 1024)
	options.SetDefault(&o.MaxMessage, 64<<10)
	options.SetDefault(&o.MaxPeers, 1024)
	options.SetDefault(&o.EarlyImmediates, rdma.DefaultEarlyImmediates)
	options.SetDefault(&o.HeartbeatInterval, 2*time.Second)
	options.SetDefault(&o.IdleTimeout, max(10*time.Second, 2*o.HeartbeatInterval))
	options.SetDefault(&o.NICTimeout, 2*o.HeartbeatInterval)
	options.SetDefault(&o.TransferTimeout, 60*time.Second)
	options.SetDefault(&o.HandshakeTimeout, 10*time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Validate returns an error that names the first option out of its range.
func (o *Options) Validate() error {
	if err := o.validateNICs(); err != nil {
		return err
	}
	return options.CheckRanges("tcp", []options.Range{
		{Name: "Conns", Value: int64(o.Conns), Min: 1, Max: MaxConns},
		{Name: "PieceBytes", Value: int64(o.PieceBytes), Min: 64 << 10, Max: maxPiece},
		{Name: "InFlightBytes", Value: o.InFlightBytes, Min: 1, Max: 1 << 40},
		{Name: "InFlightOps", Value: int64(o.InFlightOps), Min: 1, Max: MaxOps},
		{Name: "MaxMessage", Value: int64(o.MaxMessage), Min: 1, Max: 1 << 20},
		{Name: "MaxPeers", Value: int64(o.MaxPeers), Min: 1, Max: 1 << 20},
		{Name: "EarlyImmediates", Value: int64(o.EarlyImmediates), Min: 1, Max: 1 << 24},
		{Name: "HeartbeatInterval", Value: int64(o.HeartbeatInterval), Min: int64(time.Millisecond), Max: int64(time.Hour)},
		{Name: "IdleTimeout", Value: int64(o.IdleTimeout), Min: 2 * int64(o.HeartbeatInterval), Max: int64(24 * time.Hour)},
		{Name: "NICTimeout", Value: int64(o.NICTimeout), Min: 2 * int64(o.HeartbeatInterval), Max: int64(24 * time.Hour)},
		{Name: "TransferTimeout", Value: int64(o.TransferTimeout), Min: int64(time.Millisecond), Max: int64(24 * time.Hour)},
		{Name: "HandshakeTimeout", Value: int64(o.HandshakeTimeout), Min: int64(time.Millisecond), Max: int64(time.Hour)},
	})
}

// validateNICs is Validate for the NICs and how classes are marked.
func (o *Options) validateNICs() error {
	if len(o.NICs) > 0 && o.Listen+o.Advertise != "" {
		return fmt.Errorf("tcp: options NICs and Listen or Advertise (%q, %q): give each NIC its own", o.Listen, o.Advertise)
	}
	if len(o.NICs) > MaxNICs {
		return fmt.Errorf("tcp: %d NICs, at most %d", len(o.NICs), MaxNICs)
	}
	for i, n := range o.nics() {
		if (n.Listen == "") != (o.nics()[0].Listen == "") {
			return fmt.Errorf("tcp: NIC %d listens on %q, NIC 0 on %q: all listen, or none does", i, n.Listen, o.nics()[0].Listen)
		}
		if n.Local != "" && net.ParseIP(n.Local) == nil {
			return fmt.Errorf("tcp: NIC %d dials from %q, which is no IP address", i, n.Local)
		}
		if n.Listen != "" {
			if err := o.Token.Validate(); err != nil {
				return fmt.Errorf("tcp: listening on %s needs a token: %w", n.Listen, err)
			}
		}
	}
	if o.QoS != nil {
		if err := o.QoS.Validate(); err != nil {
			return fmt.Errorf("tcp: option QoS: %w", err)
		}
	}
	return nil
}

// nics returns the NICs, of which there is always one.
func (o *Options) nics() []NIC {
	if len(o.NICs) > 0 {
		return o.NICs
	}
	return []NIC{{Listen: o.Listen, Advertise: o.Advertise}}
}
