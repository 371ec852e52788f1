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

// Options say which nodes a Store talks to, and how. Servers and Engine are
// required; the zero value of every other field is its default.
type Options struct {
	// Servers are the gRPC addresses of the storage nodes, host:port, or another
	// target that Dial takes. Their spelling decides which node a sequence belongs to: give every client the
	// same list, in any order.
	Servers []string
	// Engine moves the bytes. It stays the caller's, and is closed by the caller
	// after the Store. One Store for each engine: they share its immediates, and
	// its receive buffers can be posted only once. Where somebody else has done
	// so, every call goes over gRPC.
	Engine rdma.Engine
	// Messages is called with messages of the Engine's peers that are not for the
	// Store, those whose first byte is not api.KindReply, as by Engine.Recv. nil:
	// they are errors, and end the peer's session.
	Messages func(from rdma.EngineID, msg []byte)

	// LocalSocket is the unix socket of the node on this host (its setting
	// local_socket), for ReadLocal, and for Read, Match, Exists and Write in place of the path that the
	// node reports. Empty: no ReadLocal, and the others use the node's path.
	LocalSocket string
	// NoLocal makes Read, Match, Exists and Write use the transfer engine also where the node is on
	// this host and has a unix socket.
	NoLocal bool

	// BearerToken is sent with every call. It is refused over plaintext to a
	// host that is not loopback unless Insecure is set.
	BearerToken string
	// TLS, if set, protects gRPC. Nodes with TLS want it of the data plane too,
	// unless they are told otherwise: give the Engine the same (tcp.Options.TLS).
	TLS *tls.Config
	// Insecure allows a bearer token over plaintext.
	Insecure bool

	// Logger takes what a person should act on. Default: discard, but for a Store
	// that no node has answered: slog.Default says so, once.
	Logger *slog.Logger
	// DialTimeout bounds one attempt to reach a node. Default 3 s.
	DialTimeout time.Duration
	// DeadFor is how long a node that failed is a miss before it is tried
	// again. Default 5 s.
	DeadFor time.Duration
	// RetryMax is how often a Match or a part of a Read is tried again after
	// its connection broke. Default 2; negative: never.
	RetryMax int

	// ReadParallel is how many Read RPCs one Read has under way. Default 4.
	ReadParallel int
	// ReadTaskBytes and WriteChunkBytes are the payload of one Read RPC and of
	// one Reserve; the node's own limits apply as well. Smaller tasks overlap
	// checking with transfer, larger ones cost fewer calls. Defaults 8 MiB and
	// 16 MiB.
	ReadTaskBytes, WriteChunkBytes int64
	// BatchParallel is how many sequences ReadBatch and WriteBatch work on at
	// once. Default 4.
	BatchParallel int
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	options.SetDefault(&o.DialTimeout, 3*time.Second)
	options.SetDefault(&o.DeadFor, 5*time.Second)
	options.SetDefault(&o.RetryMax, 2)
	options.SetDefault(&o.ReadParallel, 4)
	options.SetDefault(&o.ReadTaskBytes, 8<<20)
	options.SetDefault(&o.WriteChunkBytes, 16<<20)
	options.SetDefault(&o.BatchParallel, 4)
	options.SetDefault(&o.Logger, slog.New(slog.DiscardHandler))
}

// Validate reports the first thing that is wrong with o, or nil.
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
	case o.DialTimeout <= 0 || o.DeadFor <= 0:
		return fmt.Errorf("client: DialTimeout %v and DeadFor %v must be positive", o.DialTimeout, o.DeadFor)
	case o.ReadParallel < 1 || o.BatchParallel < 1:
		return fmt.Errorf("client: ReadParallel %d and BatchParallel %d must be positive", o.ReadParallel, o.BatchParallel)
	case o.ReadTaskBytes < 1 || o.WriteChunkBytes < 1:
		return fmt.Errorf("client: ReadTaskBytes %d and WriteChunkBytes %d must be positive", o.ReadTaskBytes, o.WriteChunkBytes)
	}
	return nil
}
