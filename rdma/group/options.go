package group

import (
	"context"
	"fmt"
	"log/slog"
	"time"

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
	setDefault(&o.PieceBytes, 1<<20)
	setDefault(&o.InFlightBytes, 64<<20)
	setDefault(&o.InFlightOps, 1024)
	setDefault(&o.MaxMessage, 64<<10)
	setDefault(&o.MessageBuffers, 64)
	setDefault(&o.MaxPeers, 1024)
	setDefault(&o.EarlyImmediates, rdma.DefaultEarlyImmediates)
	setDefault(&o.HeartbeatInterval, 2*time.Second)
	setDefault(&o.IdleTimeout, max(10*time.Second, 2*o.HeartbeatInterval))
	setDefault(&o.TransferTimeout, 60*time.Second)
	setDefault(&o.StallTimeout, 10*time.Second)
	setDefault(&o.HandshakeTimeout, 10*time.Second)
	setDefault(&o.RevokeTimeout, time.Second)
	setDefault(&o.RetryInterval, 100*time.Millisecond)
	setDefault(&o.SpinPolls, 32)
	if o.Alloc == nil {
		o.Alloc = func(n int) ([]byte, func(), error) { return make([]byte, n), func() {}, nil }
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// setDefault sets *p to v if it is zero.
func setDefault[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// Validate returns an error that names the first option out of its range.
func (o *Options) Validate() error {
	if o.Control.Listener != nil {
		if err := o.Token.Validate(); err != nil {
			return fmt.Errorf("group: listening on %s needs a token: %w", o.Control.Listener.Addr(), err)
		}
	}
	for _, r := range []struct {
		name            string
		value, min, max int64
	}{
		{"Domains", int64(len(o.Domains)), 1, MaxDomains},
		{"Provider", int64(len(o.Provider)), 1, 32},
		{"PieceBytes", int64(o.PieceBytes), 64 << 10, 1 << 30},
		{"InFlightBytes", o.InFlightBytes, 1, 1 << 40},
		{"InFlightOps", int64(o.InFlightOps), 1, MaxOps},
		{"MaxMessage", int64(o.MaxMessage), 1, 1 << 20},
		{"MessageBuffers", int64(o.MessageBuffers), 2, 1 << 14},
		{"MaxPeers", int64(o.MaxPeers), 1, 1 << 20},
		{"EarlyImmediates", int64(o.EarlyImmediates), 1, 1 << 24},
		{"HeartbeatInterval", int64(o.HeartbeatInterval), int64(time.Millisecond), int64(time.Hour)},
		{"IdleTimeout", int64(o.IdleTimeout), 2 * int64(o.HeartbeatInterval), int64(24 * time.Hour)},
		{"TransferTimeout", int64(o.TransferTimeout), int64(time.Millisecond), int64(24 * time.Hour)},
		{"StallTimeout", int64(o.StallTimeout), int64(time.Millisecond), int64(24 * time.Hour)},
		{"HandshakeTimeout", int64(o.HandshakeTimeout), int64(time.Millisecond), int64(time.Hour)},
		{"RevokeTimeout", int64(o.RevokeTimeout), int64(time.Millisecond), int64(time.Hour)},
		{"RetryInterval", int64(o.RetryInterval), int64(time.Millisecond), int64(time.Hour)},
		{"SpinPolls", int64(o.SpinPolls), -1, 1 << 20},
	} {
		if r.value < r.min || r.value > r.max {
			return fmt.Errorf("group: option %s is %d; it must be %d to %d", r.name, r.value, r.min, r.max)
		}
	}
	return nil
}
