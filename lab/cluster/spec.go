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

// Spec describes a cluster. EnsureDefaults fills what is zero.
type Spec struct {
	// Prefill and Decode are nodes of one engine each. Default 1 and 1.
	Prefill, Decode int
	// SNICBits and CNICBits are the rates of a node's storage and compute NIC, each
	// direction, in bits a second. Defaults 200 Mbit/s, and 8 times SNICBits: a node
	// of DualPath's has eight compute NICs for one storage NIC (section 4.2).
	SNICBits, CNICBits uint64
	// Layers of the model, BlockTokens of a block, TokenBytes of one token in one
	// layer. Defaults 8, 32 and 256: blocks of 64 KiB.
	Layers, BlockTokens, TokenBytes int
	// Model is what compute takes. Default: nothing, so that storage is the limit.
	Model emulate.Model
	// HBMBytes is the device memory of an engine, BufferBytes its PE or DE buffer.
	// Defaults 256 MiB and 128 MiB.
	HBMBytes, BufferBytes int64
	// Window is how many layers of a request a prefill engine holds (layerwise
	// prefill); 0: default 2; Layers: all, as without layerwise prefill.
	Window int
	// Policy is which side reads.
	Policy dualpath.ReadPolicy
	// Oracle: no loads and no transfers to speak of. Blocks have a byte a token and
	// layer, which is TokenBytes times less, and NICs have no limit; everything
	// else is as it is, the messages of planner and engines too.
	Oracle bool
	// Beta is the most unfinished tokens of a prefill engine. Default 32,768.
	Beta int
	// GroupTimeout is the planner's. Default 5 s.
	GroupTimeout time.Duration
	// Deadline of a turn. Default 2 min.
	Deadline time.Duration
	// Classes gives collectives a class of their own on the compute network, above
	// the KV's, as deploy/qos does.
	Classes bool
	// Loopback shapes connections on loopback instead of making namespaces.
	Loopback bool
	// Dir is where storage lies; CapacityBytes of it. Default 8 GiB.
	Dir           string
	CapacityBytes int64
	// ArenaBytes is the storage node's memory for bytes in flight. A load that finds none for two seconds is Busy, and
	// where no other side reads, its rest is recomputed. Default 256 MiB.
	ArenaBytes int64
	// Env of the processes.
	Env []string
}

// EnsureDefaults fills what is zero.
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

// most is how many nodes of a kind a cluster may have: this is one machine.
const most = 32

// Validate returns an error that names what is wrong.
func (s *Spec) Validate() error {
	if s.Prefill < 1 || s.Prefill > most || s.Decode < 1 || s.Decode > most {
		return fmt.Errorf("cluster: %d prefill and %d decode nodes; there must be 1 to %d of each", s.Prefill, s.Decode, most)
	}
	if s.SNICBits < 1e6 || s.CNICBits < 1e6 {
		return fmt.Errorf("cluster: NICs of %d and %d bit/s; at least 1 Mbit/s is needed", s.SNICBits, s.CNICBits)
	}
	if s.Window < 1 || s.Window > s.Layers {
		return fmt.Errorf("cluster: a window of %d layers of %d", s.Window, s.Layers)
	}
	g := kv.SingleGroup(s.Layers, s.BlockTokens, s.TokenBytes)
	if err := g.Validate(); err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	return s.Model.Validate()
}

// Shape is the cluster's as the paper writes it: 2P4D.
func (s *Spec) Shape() string { return fmt.Sprintf("%dP%dD", s.Prefill, s.Decode) }

// Network says what the processes would run on: namespaces, or loopback and why.
func (s *Spec) Network() (text string, isLoopback bool, err error) {
	n, err := openNetwork(s.Loopback)
	if err != nil {
		return "", false, err
	}
	_, isLoopback = n.(*loopback)
	return n.String(), isLoopback, n.close()
}

// tokenBytes is what a token takes in one layer.
func (s *Spec) tokenBytes() int {
	if s.Oracle {
		return 1
	}
	return s.TokenBytes
}

// blockBytes is a Full Block.
func (s *Spec) blockBytes() int64 {
	return int64(s.Layers) * int64(s.BlockTokens) * int64(s.tokenBytes())
}

// blocks is how many blocks of layers many layers fit in HBM.
func (s *Spec) blocks(layers int) int {
	bytes := s.HBMBytes
	if s.Oracle {
		bytes /= int64(s.TokenBytes)
	}
	return int(bytes / (s.blockBytes() / int64(s.Layers) * int64(layers)))
}

// ReadTokens is what one storage NIC reads at best, in tokens a second.
func (s *Spec) ReadTokens() float64 {
	return float64(s.SNICBits) / 8 / float64(s.Layers*s.TokenBytes)
}
