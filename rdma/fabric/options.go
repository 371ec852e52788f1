package fabric

import (
	"fmt"

	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Provider is the Info.Provider of an engine of this package.
const Provider = "fabric"

// DomainOptions configures one NIC.
type DomainOptions struct {
	// Provider is libfabric's name of the provider: tcp or efa. The default tcp is the provider
	// with its own reliable datagrams, which was called net before libfabric 1.18. shm is refused.
	Provider string
	// NIC is the domain to open. Default: the provider's first.
	NIC NIC
	// QueueDepth is the largest number of posted works of an endpoint, 1 to 128. The provider may
	// allow fewer. Default 128.
	QueueDepth int
	// MaxMessage is the longest message in bytes. The hub (the endpoint for messages) has 64
	// buffers of that size. Default 64 KiB and 64 bytes; 256 bytes to 1 MiB and 64 bytes.
	MaxMessage int
	// TrafficClass holds libfabric's FI_TC value for each class; 0 is unspecified. Open fails if
	// the provider is known to mark no packets (tcp before libfabric 1.18). NewEndpoint fails if
	// the provider does not support the value.
	TrafficClass [rdma.Classes]uint32
}

// maxQueueDepth is the largest queue depth. A key query (hub.go) must have space for all works of
// a queue.
const maxQueueDepth = 128

// EnsureDefaults sets each zero field to its default.
func (o *DomainOptions) EnsureDefaults() {
	if o.Provider == "" {
		o.Provider = "tcp"
	}
	if o.QueueDepth == 0 {
		o.QueueDepth = maxQueueDepth
	}
	if o.MaxMessage == 0 {
		o.MaxMessage = 64<<10 + 64
	}
}

// Validate returns an error that names the first invalid option. It refuses libfabric's shm: there
// the target copies from the source's memory, possibly after the source got its completion. If the
// source's owner then changes the memory, the target counts a write with wrong bytes.
func (o *DomainOptions) Validate() error {
	if o.Provider == "shm" {
		return fmt.Errorf("fabric: option Provider is shm: libfabric's shm may deliver bytes that were overwritten after their write; between processes of one host use rdma/shm (data_plane.provider: shm): %w",
			rdma.ErrUnsupported)
	}
	return options.CheckRanges("fabric", []options.Range{
		{Name: "QueueDepth", Value: int64(o.QueueDepth), Min: 1, Max: maxQueueDepth},
		{Name: "MaxMessage", Value: int64(o.MaxMessage), Min: 256, Max: 1<<20 + 64},
	})
}

// Options configures an engine.
type Options struct {
	// Domain holds the options of each NIC; its field NIC is overwritten.
	Domain DomainOptions
	// NICs are the engine's NICs. Default: every domain of the provider except the
	// loopback, or only the loopback if there is no other.
	NICs []NIC
	// Group holds the engine's other options. Provider, Detail, Domains and Reopen are
	// overwritten, and SeparateClasses is set if Domain.TrafficClass differs between the classes.
	// Control should come from group.TCP or group.Unix.
	Group group.Options
}

// separate reports whether each class needs its own endpoints.
func (o *Options) separate() bool {
	marks := o.Domain.TrafficClass
	return o.Group.SeparateClasses || marks[rdma.ClassKV] != marks[rdma.ClassCollective]
}

// NIC names one domain of a provider.
type NIC struct {
	// Domain is libfabric's name of the domain: eth0 (tcp), rdmap0s6-rdm (efa).
	// Empty: the domain that has Addr, or the first.
	Domain string
	// Addr is the local address to use, if the provider uses IP addresses. Empty: the first
	// address of the domain.
	Addr string
}

// String returns the domain and, if there is one, the address.
func (n NIC) String() string {
	if n.Addr == "" {
		return n.Domain
	}
	return fmt.Sprintf("%s(%s)", n.Domain, n.Addr)
}
