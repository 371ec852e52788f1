package client

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/rdma"
)

// Options name the storage nodes of a Store and configure the calls to them. Servers and Engine are
// required; the zero value of every other field selects its default.
type Options struct {
	// Servers are the gRPC addresses of the storage nodes, host:port, or another target that Dial
	// takes. The spelling of the addresses decides on which node a sequence is stored, so every
	// client must have the same list, in any order.
	Servers []string
	// Discover makes Servers the addresses of some members of a cluster, in any spelling: the Store
	// gets the list of all members from them (docs/cluster.md), stores sequences on all members in
	// proportion to their capacities, and follows changes of the list. All clients of a cluster
	// must have the same value.
	Discover bool
	// MembersEvery is the interval at which the list of members is read. Default 5 s.
	MembersEvery time.Duration
	// GoneFor is the time for which a member that has left the list keeps its sequences, which are
	// misses: a node that restarts in this time finds them where they were. Default 10 min.
	GoneFor time.Duration
	// SkipDraining makes members that drain no nodes of the Store, so that it finds only the blocks on
	// the members that get new sequences. For programs that copy the blocks of a draining member. It
	// has no effect without Discover.
	SkipDraining bool
	// Zone is the zone of the client's host, as in the nodes' setting cluster.zone. Sequences with
	// replicas are read from a node of the same zone if there is one.
	Zone string
	// Engine moves the bytes. The caller owns it and closes it after the Store. Use one Store for
	// each engine: Stores would share the engine's immediates, and the engine's receive buffers can
	// be posted only once. If another user of the engine has posted them, every call goes over
	// gRPC.
	Engine rdma.Engine
	// Messages is called with messages of the Engine's peers that are not for the Store, that is,
	// whose first byte is not api.KindReply. The contract is that of the callback of Engine.Recv.
	// If Messages is nil, such a message is an error and ends the peer's session.
	Messages func(from rdma.EngineID, msg []byte)

	// LocalSocket is the path of the unix socket of the node on this host (the node's setting
	// local_socket). ReadLocal requires it. Read, Match, Exists and Write use it instead of the
	// path that the node reports. Empty: ReadLocal is not supported, and the other calls use the
	// node's path.
	LocalSocket string
	// NoLocal makes Read, Match, Exists and Write use the transfer engine even if the node is on
	// this host and has a unix socket.
	NoLocal bool

	// BearerToken is sent with every call. It is refused over plaintext to a
	// host that is not loopback unless Insecure is set.
	BearerToken string
	// TokenSource, if not nil, returns the token of each call instead of BearerToken (DialOptions.TokenSource).
	TokenSource func() string
	// TLS, if set, protects gRPC. By default a node with TLS requires TLS on the data plane too:
	// give the Engine the same configuration (tcp.Options.TLS).
	TLS *tls.Config
	// Insecure allows a bearer token over plaintext.
	Insecure bool

	// Logger receives events that a person should act on. Default: events are discarded. Exception:
	// if no node answers Open, one warning goes to slog.Default.
	Logger *slog.Logger
	// DialTimeout bounds one attempt to reach a node. Default 3 s.
	DialTimeout time.Duration
	// DeadFor is the time after a node's failure during which its blocks are misses, before the
	// node is tried again. It is also the time for which other replicas are asked before a silent
	// node, unless the node answers meanwhile. Default 5 s.
	DeadFor time.Duration
	// SilentAfter is the time after which a node is silent: it has let Match and Read calls wait until
	// their deadlines for as long in all, and has answered none meanwhile. A call with a shorter deadline
	// alone does not make a node silent. Default 1 s.
	SilentAfter time.Duration
	// RetryMax is the number of retries of a Match, or of a part of a Read, after its connection
	// broke. Default 2; negative: no retry.
	RetryMax int

	// ReadParallel is the largest number of Read RPCs that one Read runs at a time. Default 4.
	ReadParallel int
	// ReadTaskBytes and WriteChunkBytes are the largest payload of one Read RPC and of one Reserve,
	// in bytes; a single larger piece is still sent. The node's own limits apply as well. With
	// smaller values, verification overlaps more with transfer; larger values need fewer calls.
	// Defaults: 8 MiB and 16 MiB.
	ReadTaskBytes, WriteChunkBytes int64
	// BatchParallel is the number of sequences that ReadBatch and WriteBatch process at once.
	// Default 4.
	BatchParallel int
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	options.SetDefault(&o.DialTimeout, 3*time.Second)
	options.SetDefault(&o.DeadFor, 5*time.Second)
	options.SetDefault(&o.SilentAfter, time.Second)
	options.SetDefault(&o.MembersEvery, 5*time.Second)
	options.SetDefault(&o.GoneFor, 10*time.Minute)
	options.SetDefault(&o.RetryMax, 2)
	options.SetDefault(&o.ReadParallel, 4)
	options.SetDefault(&o.ReadTaskBytes, 8<<20)
	options.SetDefault(&o.WriteChunkBytes, 16<<20)
	options.SetDefault(&o.BatchParallel, 4)
	options.SetDefault(&o.Logger, slog.New(slog.DiscardHandler))
}

// Validate returns the first error in o, or nil.
func (o *Options) Validate() error {
	if len(o.Servers) == 0 {
		return errors.New("client: no servers; give Options.Servers the gRPC address of at least one storage node")
	}
	seen := make(map[string]bool, len(o.Servers))
	for _, s := range o.Servers {
		if err := CheckServer(s); err != nil {
			return fmt.Errorf("client: Options.Servers: %w", err)
		}
		if seen[s] {
			return fmt.Errorf("client: Options.Servers: %q is listed twice", s)
		}
		seen[s] = true
	}
	switch {
	case o.Engine == nil:
		return errors.New("client: Options.Engine is required: bytes move through a transfer engine, tcp.New for example")
	case o.MembersEvery <= 0 || o.GoneFor < 0:
		return fmt.Errorf("client: MembersEvery %v must be positive, and GoneFor %v not negative", o.MembersEvery, o.GoneFor)
	case o.DialTimeout <= 0 || o.DeadFor <= 0 || o.SilentAfter <= 0:
		return fmt.Errorf("client: DialTimeout %v, DeadFor %v and SilentAfter %v must be positive", o.DialTimeout, o.DeadFor, o.SilentAfter)
	case o.ReadParallel < 1 || o.BatchParallel < 1:
		return fmt.Errorf("client: ReadParallel %d and BatchParallel %d must be positive", o.ReadParallel, o.BatchParallel)
	case o.ReadTaskBytes < 1 || o.WriteChunkBytes < 1:
		return fmt.Errorf("client: ReadTaskBytes %d and WriteChunkBytes %d must be positive", o.ReadTaskBytes, o.WriteChunkBytes)
	}
	return nil
}

// dial returns the options of the connections to nodes.
func (o *Options) dial() DialOptions {
	return DialOptions{BearerToken: o.BearerToken, TokenSource: o.TokenSource, TLS: o.TLS, Insecure: o.Insecure, Timeout: o.DialTimeout}
}
