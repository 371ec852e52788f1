package tcp

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/qos"
)

// Options configure an Engine. The zero value is a client: it opens sessions and accepts none.
type Options struct {
	// Listen is the host:port to accept sessions on; port 0 picks a free port. Empty: no
	// sessions are accepted.
	Listen string
	// Advertise is the host:port that peers dial, if it differs from Listen. Default: the
	// listener's own address.
	Advertise string
	// NICs are the network interfaces to use, each with its own Listen and Advertise. A session
	// has a rail (a group of connections) for each pair of NICs. Default: one interface, chosen by
	// the system's routes.
	NICs []NIC
	// Token is the secret that a peer must prove to open a session with this engine. It is
	// required if Listen is set.
	Token rdma.Token
	// Admission, if not nil, decides which peers get sessions, and Token is not used.
	Admission *rdma.Admission
	// TLS, if set, protects the connections of this engine. It is the server's configuration for
	// accepted connections. For dialed connections it is the client's configuration, used if the
	// address states that its listener uses TLS (HostPort). So one engine can reach nodes with and
	// without TLS; the source of the addresses must be authenticated. With TLS, payload is copied
	// once more at each engine.
	TLS *tls.Config
	// TLSOnly makes the engine dial only peers whose address states TLS. It needs TLS.
	TLSOnly bool

	// Wrap, if set, wraps each of the engine's sockets, below TLS, to limit or count its traffic.
	// The result must support deadlines as the socket does, and its method NetConn must return the
	// socket. Payload is then sent and received with plain Write and Read.
	Wrap func(net.Conn) net.Conn

	// Conns is the number of payload connections in each session that this engine opens, for each
	// pair of NICs, and for each class if QoS is set. Each pair has one more connection in each
	// class. The additional connection of the highest class carries the messages and acks, which
	// therefore do not wait behind payload. Default 4, at most MaxConns.
	Conns int
	// QoS, if set, gives each rdma.Class its own connections in the sessions that this engine
	// opens. It also marks the packets that this engine sends on these connections. The peer marks
	// its packets by its own QoS. Without QoS all classes share unmarked connections.
	QoS *qos.Map
	// Congestion is the name of the TCP congestion control of every connection. Default "cubic"
	// (bbr, a common system default, costs 10 to 35 % of the throughput on fast links); "system"
	// keeps the system's default.
	Congestion string
	// PieceBytes is the size of the pieces into which a large write is cut, to spread the write
	// over the connections. Default 1 MiB, 64 KiB to 16 MiB.
	PieceBytes int
	// ZeroCopy sends runs of 64 KiB and more without copying them: the socket's queue refers to
	// the pages of the source (vmsplice). This saves a quarter of the CPU time of both engines. If
	// a write fails because its session ended, the peer's window may contain later contents of the
	// source instead of the bytes that were written. No immediate is counted for these bytes.
	// ZeroCopy has an effect only on Linux, without TLS, and where the system calls are permitted
	// (not under gVisor or some seccomp filters).
	ZeroCopy bool
	// InFlightBytes and InFlightOps bound the bytes and the number of writes that are submitted to
	// one peer and have not ended. A write larger than InFlightBytes runs alone. Messages are
	// bounded by MaxMessages, so that no message waits for the end of a write. Defaults 64 MiB and
	// 1024 (at most MaxOps - MaxMessages).
	InFlightBytes int64
	InFlightOps   int
	// MaxMessage is the longest Send, in bytes. Default 64 KiB, at most 1 MiB.
	MaxMessage int
	// MaxPeers is the largest number of sessions. The engine refuses further sessions. An idle
	// session costs about 40 KiB for each connection. Default 1024.
	MaxPeers int
	// EarlyImmediates is the number of unexpected immediates that are kept for each peer. Default
	// rdma.DefaultEarlyImmediates.
	EarlyImmediates int

	// HeartbeatInterval is the idle time of a connection after which a heartbeat is sent on it.
	// Default 2 s.
	HeartbeatInterval time.Duration
	// IdleTimeout is the time without a byte from a peer after which the peer is declared dead.
	// Default 10 s, at least twice the HeartbeatInterval.
	IdleTimeout time.Duration
	// NICTimeout is the time without a byte on a rail after which the rail is declared dead while
	// other rails of the session receive. Default twice the HeartbeatInterval, which is also the
	// minimum.
	NICTimeout time.Duration
	// TransferTimeout is the longest time from the start of an operation to its ack. An operation
	// that takes longer ends its session, even if heartbeats arrive, because a peer must not hold
	// source buffers for ever. Default 60 s.
	TransferTimeout time.Duration
	// HandshakeTimeout is the longest time for the opening of a session at the accepting engine.
	// Default 10 s.
	HandshakeTimeout time.Duration

	// OnPeerUp and OnPeerDown, if set, are called when a session begins and after it has ended;
	// the error is the reason of the end. After OnPeerDown no goroutine touches memory for that
	// session. The callbacks must not block.
	OnPeerUp   func(rdma.EngineID)
	OnPeerDown func(rdma.EngineID, error)
	// OnPost, if set, is called before each system call that sends frames, by the goroutine that
	// makes the call, for measurements.
	OnPost func()
	// Logger receives refused peers and dead sessions, rate-limited. Default: no log.
	Logger *slog.Logger
}

// NIC is one network interface of an engine.
type NIC struct {
	// Name is the name in logs and status. Default: Device, or the address.
	Name string
	// Listen and Advertise are as in Options. Either all NICs listen or none.
	Listen, Advertise string
	// Device is the interface to which the sockets of this NIC are bound (SO_BINDTODEVICE). Their
	// packets leave through this interface whatever the routes are, and the NIC is taken out of
	// service as soon as the interface has no carrier.
	Device string
	// Local is the source IP address of dialed connections. Default: the host in Listen, if there
	// is one and it is not a wildcard; otherwise the routes choose.
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
	// MaxOps is the largest number of operations of one session in flight in one direction. A peer
	// that exceeds this number is disconnected.
	MaxOps = 4096
	// MaxMessages is the largest number of messages that are submitted to one peer and have not
	// ended. Send waits for the end of a message if this number is reached.
	MaxMessages = 256
	// maxPiece is the largest payload of one frame, in bytes.
	maxPiece = 16 << 20
)

// EnsureDefaults sets each zero field to its default.
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

// checkToken returns an error if an engine with these options would accept peers without a secret.
func (o *Options) checkToken() error {
	if o.Admission != nil {
		return nil
	}
	return o.Token.Validate()
}

// Validate returns an error that names the first option out of its range.
func (o *Options) Validate() error {
	if err := o.validateNICs(); err != nil {
		return err
	}
	if o.TLSOnly && o.TLS == nil {
		return errors.New("tcp: TLSOnly needs TLS")
	}
	return options.CheckRanges("tcp", []options.Range{
		{Name: "Conns", Value: int64(o.Conns), Min: 1, Max: MaxConns},
		{Name: "PieceBytes", Value: int64(o.PieceBytes), Min: 64 << 10, Max: maxPiece},
		{Name: "InFlightBytes", Value: o.InFlightBytes, Min: 1, Max: 1 << 40},
		{Name: "InFlightOps", Value: int64(o.InFlightOps), Min: 1, Max: MaxOps - MaxMessages},
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

// validateNICs checks the NICs and the QoS map.
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
			if err := o.checkToken(); err != nil {
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

// nics returns the NICs, at least one.
func (o *Options) nics() []NIC {
	if len(o.NICs) > 0 {
		return o.NICs
	}
	return []NIC{{Listen: o.Listen, Advertise: o.Advertise}}
}
