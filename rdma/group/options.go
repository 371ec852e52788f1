package group

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/rdma"
)

// Options configure an Engine. A provider sets the fields from Provider to Alloc itself. Its
// caller sets the other fields.
type Options struct {
	// Provider is the value of Info.Provider: shm, verbs, fabric or sim. Both engines of a session
	// must have the same provider.
	Provider string
	// Detail is the provider's part of Info.Detail.
	Detail string
	// Domains are the engine's NICs, 1 to MaxDomains. New takes ownership of the domains and
	// closes them even if it fails.
	Domains []Domain
	// Reopen, if set, is called in the background to replace domain i after the domain has died. It
	// is called again after a failure, with the pauses of RetryInterval, until it succeeds. ctx
	// ends with the engine.
	Reopen func(ctx context.Context, i int) (Domain, error)
	// Alloc returns memory for the engine's message buffers that the domains can register, and a
	// function that frees the memory. Default: the Go heap.
	Alloc func(bytes int) (mem []byte, free func(), err error)

	// Control listens and dials for sessions. On its connections two engines prove the token to
	// each other, exchange the addresses of endpoints, and detect each other's death.
	Control Control
	// Token is the secret that a peer must prove to open a session with this engine. It is
	// required if Control has a Listener.
	Token rdma.Token
	// Admission, if not nil, decides which peers get sessions, and Token is not used.
	Admission *rdma.Admission

	// SeparateClasses gives each traffic class its own endpoints in sessions in which at least one
	// engine requests it. Otherwise all traffic is ClassKV.
	SeparateClasses bool
	// PieceBytes is the size of the pieces into which a large write is cut, to spread the write
	// over the NICs. An endpoint has at most 4 pieces posted, so a message waits for at most 4
	// pieces. Default 1 MiB, 64 KiB to 1 GiB.
	PieceBytes int
	// InFlightBytes and InFlightOps bound the bytes and the number of writes that are submitted to
	// one peer and have not ended. A write larger than InFlightBytes runs alone. Messages have a
	// bound of their own, so that no message waits for the end of a write. Defaults 64 MiB and 1024
	// (at most MaxOps).
	InFlightBytes int64
	InFlightOps   int
	// MaxMessage is the longest Send, in bytes. Default 64 KiB, at most 1 MiB,
	// and no more than the domains' MaxMessage less 32 bytes.
	MaxMessage int
	// MessageBuffers is the number of receive buffers of MaxMessage bytes for each NIC, and the
	// number of send buffers for the engine. Default 64.
	MessageBuffers int
	// MaxPeers is the largest number of sessions. The engine refuses further sessions. Default
	// 1024.
	MaxPeers int
	// EarlyImmediates is the number of unexpected immediates that are kept for each peer. Default
	// rdma.DefaultEarlyImmediates.
	EarlyImmediates int

	// HeartbeatInterval is the idle time of the control connection after which a heartbeat is
	// sent. Default 2 s.
	HeartbeatInterval time.Duration
	// IdleTimeout is the silence of the control connection after which the peer is declared dead.
	// It is also the longest time for which operations may be in flight while no NIC transfers any
	// of their bytes. Default 10 s, at least twice the HeartbeatInterval.
	IdleTimeout time.Duration
	// TransferTimeout is the longest duration of an operation. An operation that takes longer ends
	// its session, even if heartbeats arrive. Default 60 s.
	TransferTimeout time.Duration
	// StallTimeout is the longest time from the post of a Work to its completion. A Work that
	// takes longer breaks its endpoint, and its payload is sent again on another endpoint. Default
	// 10 s.
	StallTimeout time.Duration
	// HandshakeTimeout bounds the opening of a session. Default 10 s.
	HandshakeTimeout time.Duration
	// RevokeTimeout applies to NICs that cannot themselves stop writes to a revoked window. It is
	// the time in which a peer must confirm that it has stopped these writes; then the engine
	// shuts the peer's endpoints. Default 1 s.
	RevokeTimeout time.Duration
	// RetryInterval is the pause before a failed NIC or endpoint is opened again. The pause doubles
	// after each failure, up to 64 times RetryInterval. Default 100 ms.
	RetryInterval time.Duration
	// SpinPolls is the number of consecutive empty polls after which a poller sleeps in
	// Domain.Wait. A larger value lowers latency and uses more CPU. Default 32; -1: the poller
	// sleeps after the first empty poll.
	SpinPolls int

	// OnPeerUp and OnPeerDown, if set, are called when a session begins and after it has ended;
	// the error is the reason of the end. After OnPeerDown no NIC touches memory for that session.
	// The callbacks must not block.
	OnPeerUp   func(rdma.EngineID)
	OnPeerDown func(rdma.EngineID, error)
	// OnPost, if set, is called under locks immediately before Works are posted to a NIC, for
	// latency measurements. It must not block.
	OnPost func()
	// Logger receives refused peers, dead NICs and dead sessions, rate-limited. Default: no log.
	Logger *slog.Logger
}

// Limits.
const (
	// MaxDomains is the largest number of NICs of one engine.
	MaxDomains = 16
	// MaxOps is the largest number of writes of one session in flight in one
	// direction.
	MaxOps = 4096
)

// EnsureDefaults sets each zero field to its default.
func (o *Options) EnsureDefaults() {
	options.SetDefault(&o.PieceBytes, 1<<20)
	options.SetDefault(&o.InFlightBytes, 64<<20)
	options.SetDefault(&o.InFlightOps, 1024)
	options.SetDefault(&o.MaxMessage, 64<<10)
	options.SetDefault(&o.MessageBuffers, 64)
	options.SetDefault(&o.MaxPeers, 1024)
	options.SetDefault(&o.EarlyImmediates, rdma.DefaultEarlyImmediates)
	options.SetDefault(&o.HeartbeatInterval, 2*time.Second)
	options.SetDefault(&o.IdleTimeout, max(10*time.Second, 2*o.HeartbeatInterval))
	options.SetDefault(&o.TransferTimeout, 60*time.Second)
	options.SetDefault(&o.StallTimeout, 10*time.Second)
	options.SetDefault(&o.HandshakeTimeout, 10*time.Second)
	options.SetDefault(&o.RevokeTimeout, time.Second)
	options.SetDefault(&o.RetryInterval, 100*time.Millisecond)
	options.SetDefault(&o.SpinPolls, 32)
	if o.Alloc == nil {
		o.Alloc = func(n int) ([]byte, func(), error) { return make([]byte, n), func() {}, nil }
	}
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
	if o.Control.Listener != nil {
		if err := o.checkToken(); err != nil {
			return fmt.Errorf("group: listening on %s needs a token: %w", o.Control.Listener.Addr(), err)
		}
	}
	return options.CheckRanges("group", []options.Range{
		{Name: "Domains", Value: int64(len(o.Domains)), Min: 1, Max: MaxDomains},
		{Name: "Provider", Value: int64(len(o.Provider)), Min: 1, Max: 32},
		{Name: "PieceBytes", Value: int64(o.PieceBytes), Min: 64 << 10, Max: 1 << 30},
		{Name: "InFlightBytes", Value: o.InFlightBytes, Min: 1, Max: 1 << 40},
		{Name: "InFlightOps", Value: int64(o.InFlightOps), Min: 1, Max: MaxOps},
		{Name: "MaxMessage", Value: int64(o.MaxMessage), Min: 1, Max: 1 << 20},
		{Name: "MessageBuffers", Value: int64(o.MessageBuffers), Min: 2, Max: 1 << 14},
		{Name: "MaxPeers", Value: int64(o.MaxPeers), Min: 1, Max: 1 << 20},
		{Name: "EarlyImmediates", Value: int64(o.EarlyImmediates), Min: 1, Max: 1 << 24},
		{Name: "HeartbeatInterval", Value: int64(o.HeartbeatInterval), Min: int64(time.Millisecond), Max: int64(time.Hour)},
		{Name: "IdleTimeout", Value: int64(o.IdleTimeout), Min: 2 * int64(o.HeartbeatInterval), Max: int64(24 * time.Hour)},
		{Name: "TransferTimeout", Value: int64(o.TransferTimeout), Min: int64(time.Millisecond), Max: int64(24 * time.Hour)},
		{Name: "StallTimeout", Value: int64(o.StallTimeout), Min: int64(time.Millisecond), Max: int64(24 * time.Hour)},
		{Name: "HandshakeTimeout", Value: int64(o.HandshakeTimeout), Min: int64(time.Millisecond), Max: int64(time.Hour)},
		{Name: "RevokeTimeout", Value: int64(o.RevokeTimeout), Min: int64(time.Millisecond), Max: int64(time.Hour)},
		{Name: "RetryInterval", Value: int64(o.RetryInterval), Min: int64(time.Millisecond), Max: int64(time.Hour)},
		{Name: "SpinPolls", Value: int64(o.SpinPolls), Min: -1, Max: 1 << 20},
	})
}
