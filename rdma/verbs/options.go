package verbs

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/qos"
)

// Provider is the Info.Provider of engines of this package.
const Provider = "verbs"

// NICOptions configures one port.
type NICOptions struct {
	// Device names the port: "mlx5_0", or "mlx5_0/2" for the device's second port. With "@3" at
	// the end, row 3 of the port's GID table is used instead of the best row.
	Device string
	// QoS maps each traffic class to the marks of its packets: the service level on InfiniBand,
	// from which RoCE cards derive a priority, and the traffic class byte of the GRH and, for RoCE
	// v2, of the IP header. nil: packets are not marked.
	QoS *qos.Map
	// QueueDepth is the largest number of Works in flight on an endpoint: a power of two, 16 to
	// 4096, at most the device's limit. Default 256.
	QueueDepth int
	// ReceiveEntries is the number of entries in each of the two shared receive queues. It bounds
	// the immediates, and the messages, that may arrive between two polls. Default 4096, or the
	// device's limit if that is less; at least 64.
	ReceiveEntries int
	// TimeoutCode and Retries are InfiniBand's timeout code and number of retries. The endpoint
	// breaks if a packet remains unanswered for about 4 * Retries * 4.096 µs * 2^TimeoutCode.
	// Defaults 14 and 6, which is one or two seconds. Codes 8 to 21, retries 1 to 6: rdma_rxe
	// treats 7 as unlimited, which deviates from the standard.
	TimeoutCode, Retries int
	// Spin is the longest time for which the poller continues to poll before it sleeps. Polling
	// occupies a processor. The poller polls only if recent completions arrived in less than this
	// time, because to sleep and wake up through the kernel takes longer than a card takes for a
	// small write. It does not poll on an idle port, nor with GOMAXPROCS 1. Default 50 µs, at most
	// 10 ms; negative: never poll.
	Spin time.Duration
}

// maxSpin is the largest Spin.
const maxSpin = 10 * time.Millisecond

// EnsureDefaults sets each zero option to its default.
func (o *NICOptions) EnsureDefaults() {
	for _, d := range []struct {
		p *int
		v int
	}{{&o.QueueDepth, 256}, {&o.ReceiveEntries, 4096}, {&o.TimeoutCode, 14}, {&o.Retries, 6}} {
		if *d.p == 0 {
			*d.p = d.v
		}
	}
	if o.Spin == 0 {
		o.Spin = 50 * time.Microsecond
	}
}

// Validate returns an error that names the first option that is out of range.
func (o *NICOptions) Validate() error {
	if _, err := parseDevice(o.Device); err != nil {
		return err
	}
	if err := options.CheckRanges("verbs", []options.Range{
		{Name: "QueueDepth", Value: int64(o.QueueDepth), Min: 16, Max: 4096},
		{Name: "ReceiveEntries", Value: int64(o.ReceiveEntries), Min: 64, Max: 1 << 16},
		{Name: "TimeoutCode", Value: int64(o.TimeoutCode), Min: 8, Max: 21},
		{Name: "Retries", Value: int64(o.Retries), Min: 1, Max: 6},
	}); err != nil {
		return err
	}
	if o.QueueDepth&(o.QueueDepth-1) != 0 {
		return fmt.Errorf("verbs: option QueueDepth is %d; it must be a power of two", o.QueueDepth)
	}
	if o.Spin > maxSpin {
		return fmt.Errorf("verbs: option Spin is %v; it must be %v at most", o.Spin, maxSpin)
	}
	if o.QoS != nil {
		if err := o.QoS.Validate(); err != nil {
			return fmt.Errorf("verbs: %w", err)
		}
	}
	return nil
}

// place is the parsed form of Device.
type place struct {
	name string
	port uint8
	// gid is the index of the row in the GID table; -1: choose the best row.
	gid int
}

// parseDevice parses "name[/port][@gid]". The default port is 1.
func parseDevice(s string) (place, error) {
	rest, gidText, hasGID := strings.Cut(s, "@")
	name, portText, hasPort := strings.Cut(rest, "/")
	at := place{name: name, port: 1, gid: -1}
	if name == "" {
		return place{}, fmt.Errorf("verbs: device %q has no name; want NAME[/PORT][@GID-INDEX]", s)
	}
	if hasPort {
		n, err := strconv.ParseUint(portText, 10, 8)
		if err != nil || n == 0 {
			return place{}, fmt.Errorf("verbs: device %q: port %q is not a number from 1 to 255", s, portText)
		}
		at.port = uint8(n)
	}
	if hasGID {
		n, err := strconv.ParseUint(gidText, 10, 8)
		if err != nil {
			return place{}, fmt.Errorf("verbs: device %q: GID index %q is not a number from 0 to 255", s, gidText)
		}
		at.gid = int(n)
	}
	return at, nil
}

// Options configures an engine.
type Options struct {
	// Devices are the ports that are the engine's NICs, in the notation of NICOptions.Device.
	// Default: every port that is up.
	Devices []string
	// NIC holds the other options of each NIC; its field Device is overwritten.
	NIC NICOptions
	// Group holds the engine's other options. Provider, Detail, Domains and Reopen are
	// overwritten, and SeparateClasses is set if NIC.QoS is set. Control should come from
	// group.TCP or group.Unix.
	Group group.Options
}

// Device is the description of one port that List returns.
type Device struct {
	// Name is the port's name in the notation of NICOptions.Device.
	Name string
	// Up: the port can be used. If not, Reason is the reason.
	Up     bool
	Reason string
	// Link is InfiniBand or Ethernet. GID is the address that would be used, and GIDReason the
	// reason for this choice. MTU is in bytes.
	Link, GID, GIDReason string
	MTU                  int
	// MaxWrite is the longest write of one request, in bytes; 0 if the port could not be
	// queried. The engine splits longer writes.
	MaxWrite int64
	// Windows: the device has memory windows of type 1.
	Windows bool
}
