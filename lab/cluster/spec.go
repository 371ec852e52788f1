package cluster

import (
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/batch"
	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/emulate"
)

// Spec describes a cluster. EnsureDefaults sets fields that are zero.
type Spec struct {
	// Prefill and Decode are the numbers of nodes; each node has one engine. Default 1 and 1.
	Prefill, Decode int
	// SNICBits and CNICBits are the rates of a node's storage and compute NIC, each direction, in
	// bits per second. SNICBits defaults to 200 Mbit/s, CNICBits to 8 times SNICBits, because a
	// node of the DualPath paper has eight compute NICs and one storage NIC (section 4.2).
	SNICBits, CNICBits uint64
	// Layers is the number of layers of the model, BlockTokens the tokens of a block,
	// TokenBytes the bytes of one token in one layer. Defaults 8, 32 and 256, which make
	// blocks of 64 KiB.
	Layers, BlockTokens, TokenBytes int
	// Model is the emulated compute time. Default: zero, so that storage is the limit.
	Model emulate.Model
	// HBMBytes is the device memory of an engine, BufferBytes the size of its KV buffer in host
	// memory. Defaults 256 MiB and 128 MiB.
	HBMBytes, BufferBytes int64
	// Window is the number of layers of a request that a prefill engine holds in device memory
	// (layerwise prefill). 0 means 2. Window = Layers holds all layers, as without layerwise
	// prefill.
	Window int
	// Policy determines whether prefill nodes, decode nodes or both read from storage.
	Policy dualpath.ReadPolicy
	// Oracle makes loads and transfers almost free. Each token has one byte in each layer in place
	// of TokenBytes, and NICs have no limit. The rest is unchanged, including the messages of
	// planner and engines.
	Oracle bool
	// Beta is the maximum number of unfinished tokens of a prefill engine. Default 32,768.
	Beta int
	// GroupTimeout is the time without a fetch after which the planner considers a group of engines
	// gone. Default 5 s.
	GroupTimeout time.Duration
	// Deadline is the time limit of a turn (one request of an agent). Default 2 min.
	Deadline time.Duration
	// Classes gives collectives their own traffic class on the compute network, with priority over
	// KV, as deploy/qos does.
	Classes bool
	// Loopback runs the processes on loopback with rate-limited connections, without network
	// namespaces.
	Loopback bool
	// Dir is the directory of the storage volume, CapacityBytes its capacity. Default 8 GiB.
	Dir           string
	CapacityBytes int64
	// ArenaBytes is the storage node's memory for bytes in flight. Default 256 MiB. A load that
	// gets no memory for two seconds returns Busy. If the request's other engine does not read the
	// missing KV either, this KV is recomputed.
	ArenaBytes int64
	// Env is the environment of the processes.
	Env []string
}

// EnsureDefaults sets each field that is zero to its default.
func (s *Spec) EnsureDefaults() {
	options.SetDefault(&s.Prefill, 1)
	options.SetDefault(&s.Decode, 1)
	options.SetDefault(&s.SNICBits, 200e6)
	options.SetDefault(&s.CNICBits, 8*s.SNICBits)
	options.SetDefault(&s.Layers, 8)
	options.SetDefault(&s.BlockTokens, 32)
	options.SetDefault(&s.TokenBytes, 256)
	options.SetDefault(&s.HBMBytes, 256<<20)
	options.SetDefault(&s.BufferBytes, 128<<20)
	options.SetDefault(&s.Window, 2)
	options.SetDefault(&s.Beta, 32<<10)
	options.SetDefault(&s.GroupTimeout, 5*time.Second)
	options.SetDefault(&s.Deadline, 2*time.Minute)
	options.SetDefault(&s.CapacityBytes, 8<<30)
	options.SetDefault(&s.ArenaBytes, 256<<20)
	s.Model.Layers = s.Layers
	options.SetDefault(&s.Model.Attention.PerToken, 1e-9)
	options.SetDefault(&s.Model.Quota, batch.DefaultQuota)
}

// maxNodes is the maximum number of nodes of a kind, because all nodes share one machine.
const maxNodes = 32

// Validate returns an error that names the invalid setting.
func (s *Spec) Validate() error {
	if s.Prefill < 1 || s.Prefill > maxNodes || s.Decode < 1 || s.Decode > maxNodes {
		return fmt.Errorf("cluster: %d prefill and %d decode nodes; there must be 1 to %d of each", s.Prefill, s.Decode, maxNodes)
	}
	if s.SNICBits < 1e6 || s.CNICBits < 1e6 {
		return fmt.Errorf("cluster: storage NIC of %d bit/s and compute NIC of %d bit/s; each needs at least 1 Mbit/s", s.SNICBits, s.CNICBits)
	}
	if s.Window < 1 || s.Window > s.Layers {
		return fmt.Errorf("cluster: window of %d layers; must be 1 to %d", s.Window, s.Layers)
	}
	g := kv.SingleGroup(s.Layers, s.BlockTokens, s.TokenBytes)
	if err := g.Validate(); err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	return s.Model.Validate()
}

// Shape returns the cluster's shape in the paper's notation, for example 2P4D.
func (s *Spec) Shape() string { return fmt.Sprintf("%dP%dD", s.Prefill, s.Decode) }

// Network returns a description of the network on which the processes would run: namespaces, or
// loopback and the reason for its use.
func (s *Spec) Network() (text string, isLoopback bool, err error) {
	n, err := openNetwork(s.Loopback)
	if err != nil {
		return "", false, err
	}
	_, isLoopback = n.(*loopback)
	return n.String(), isLoopback, n.close()
}

// tokenBytes returns the bytes of one token in one layer.
func (s *Spec) tokenBytes() int {
	if s.Oracle {
		return 1
	}
	return s.TokenBytes
}

// blockBytes returns the size of one block with all layers, in bytes (a Full Block of the DualPath
// paper).
func (s *Spec) blockBytes() int64 {
	return int64(s.Layers) * int64(s.BlockTokens) * int64(s.tokenBytes())
}

// blocks returns how many blocks of the given number of layers fit in HBM.
func (s *Spec) blocks(layers int) int {
	bytes := s.HBMBytes
	if s.Oracle {
		bytes /= int64(s.TokenBytes)
	}
	return int(bytes / (s.blockBytes() / int64(s.Layers) * int64(layers)))
}

// ReadTokens returns the greatest number of tokens per second that one storage NIC can read.
func (s *Spec) ReadTokens() float64 {
	return float64(s.SNICBits) / 8 / float64(s.Layers*s.TokenBytes)
}
