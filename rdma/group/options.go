package group

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/rdma"
)

// Options configure an Engine. A provider fills in what is its own (Provider to
// Alloc) and passes the rest on from its caller.
type Options struct {
	// Provider is what Info tells: shm, verbs, fabric, sim. Both ends of a
	// session must be of one provider.
	Provider string
	// Detail is the provider's part of Info.Detail.
	Detail string
	// Domains are the engine's NICs, 1 to MaxDomains. They are the engine's from
	// the call of New on, even if it fails: it closes them.
	Domains []Domain
	// Reopen, if set, is called in the background to replace domain i after it
	// has died, every RetryInterval until it succeeds. ctx ends with the engine.
	Reopen func(ctx context.Context, i int) (Domain, error)
	// Alloc returns memory that the domains can register, for the engine's own
	// buffers of messages, and how to free it. Default: the Go heap.
	Alloc func(bytes int) (mem []byte, free func(), err error)

	// Control says how sessions begin: the connection on which two engines prove
	// the token to each other, exchange the addresses of endpoints, and notice
	// each other's death.
	Control Control
	// Token is what a peer must prove to open a session here. Needed with
	// Control.Listener.
	Token rdma.Token

	// SeparateClasses gives each traffic class endpoints of its own, in sessions
	// where either side asks for it. Without it all traffic is ClassKV.
	SeparateClasses bool
	// PieceBytes is the size that a large write is cut into, to be spread over the NICs.
	// An endpoint has at most 4 pieces posted, which is what a message may have to wait
	// for. Default 1 MiB, 64 KiB to 1 GiB.
	PieceBytes int
	// InFlightBytes and InFlightOps bound what is submitted to one peer and has
	// not ended. An operation larger than InFlightBytes is admitted alone.
	// Defaults 64 MiB and 1024 (at most MaxOps).
	InFlightBytes int64
	InFlightOps   int
	// MaxMessage is the longest Send, in bytes. Default 64 KiB, at most 1 MiB,
	// and no more than the domains' MaxMessage less 32 bytes.
	MaxMessage int
	// MessageBuffers is how many buffers of MaxMessage each NIC has for what
	// arrives, and the engine for what is sent. Default 64.
	MessageBuffers int
	// MaxPeers bounds the sessions; one more is turned away. Default 1024.
	MaxPeers int
	// EarlyImmediates is how many unexpected immediates are kept for each peer.
	// Default rdma.DefaultEarlyImmediates.
	EarlyImmediates int

	// HeartbeatInterval is how long the control connection may be idle before a
	// heartbeat is sent on it. Default 2 s.
	HeartbeatInterval time.Duration
	// IdleTimeout is the silence after which a peer is dead, and how long work
	// may be in flight while no NIC gets any of it through. Default 10 s, at
	// least twice the HeartbeatInterval.
	IdleTimeout time.Duration
	// TransferTimeout is the age at which an operation that has not ended ends
	// its session, though heartbeats arrive. Default 60 s.
	TransferTimeout time.Duration
	// StallTimeout is the age at which a Work that has not completed condemns
	// its endpoint: what it carried is sent again on another. Default 10 s.
	StallTimeout time.Duration
	// HandshakeTimeout bounds the opening of a session. Default 10 s.
	HandshakeTimeout time.Duration
	// RevokeTimeout is how long a peer has to confirm that it writes to a
	// revoked window no more, where a NIC can't promise that; its endpoints are
	// shut after that. Default 1 s.
	RevokeTimeout time.Duration
	// RetryInterval is the pause before a NIC, or an endpoint, that died is
	// tried again; it doubles up to 64 times that. Default 100 ms.
	RetryInterval time.Duration
	// SpinPolls is how many polls in a row find nothing before a poller sleeps
	// in Domain.Wait: more is lower latency for more CPU. Default 32; -1 is none.
	SpinPolls int

	// OnPeerUp and OnPeerDown, if set, are called when a session begins and
	// when it has ended, with why; after OnPeerDown nothing of that session
	// touches memory any more. They must not block.
	OnPeerUp   func(rdma.EngineID)
	OnPeerDown func(rdma.EngineID, error)
	// OnPost, if set, is called when Works are about to be handed to a NIC, under
	// locks: for measuring how long that took. It must not block.
	OnPost func()
	// Logger takes refused peers, dead NICs and dead sessions, rate-limited.
	// Default: none.
	Logger *slog.Logger
}

// Limits.
const (
	// MaxDomains is the largest number of NICs of one engine.
	MaxDomains = 16
	// MaxOps is the largest number of operations of one session in flight in
	// one direction.
	MaxOps = 4096
)

// EnsureDefaults fills what is zero.
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

// Validate returns an error that names the first option out of its range.
func (o *Options) Validate() error {
	if o.Control.Listener != nil {
		if err := o.Token.Validate(); err != nil {
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
