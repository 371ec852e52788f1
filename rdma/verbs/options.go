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
	// Device names the port: "mlx5_0", or "mlx5_0/2" for its second port. With "@3" at the
	// end, row 3 of its GID table is used instead of the best row.
	Device string
	// QoS determines the marking of each traffic class's packets: the service level on
	// InfiniBand, from which RoCE cards derive a priority, and the traffic class byte of
	// the GRH and, for RoCE v2, of the IP header. nil: packets are not marked.
	QoS *qos.Map
	// QueueDepth is the number of Works that an endpoint accepts: a power of two, 16 to
	// 4096, at most the device's limit. Default 256.
	QueueDepth int
	// ReceiveEntries is the size of each of the two shared receive queues: the largest
	// number of immediates, and of message buffers, between two polls. Default 4096, or
	// the device's limit if that is less; at least 64.
	ReceiveEntries int
	// TimeoutCode and Retries determine how long the card repeats an unanswered packet
	// before the endpoint breaks: about 4 * Retries * 4.096 µs * 2^TimeoutCode. Defaults
	// 14 and 6, which is one or two seconds. Codes 8 to 21, retries 1 to 6: rdma_rxe
	// treats 7 as unlimited, which deviates from the standard.
	TimeoutCode, Retries int
	// Spin is how long the poller continues to poll, which occupies a processor, before it
	// sleeps. It polls only if recent completions arrived sooner than that: sleeping and
	// waking through the kernel takes longer than a card takes for a small write. On an
	// idle port, and with GOMAXPROCS 1, it does not poll. Default 50 µs, at most 10 ms;
	// negative: never poll.
	Spin time.Duration
}

// maxSpin is the largest Spin.
const maxSpin = 10 * time.Millisecond

// EnsureDefaults sets each option that is zero to its default.
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
	// gid is the row of the GID table; -1: choose the best.
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
	// Devices are the engine's NICs in the notation of NICOptions.Device. Default: every
	// port that is up.
	Devices []string
	// NIC has the other options of each NIC; Device is overwritten.
	NIC NICOptions
	// Group has the engine's other options. Provider, Detail, Domains and Reopen are
	// overwritten, and SeparateClasses is set if NIC.QoS is set. Control should be
	// group.TCP's or group.Unix's.
	Group group.Options
}

// Device describes one port. List returns it.
type Device struct {
	// Name is the port's name in the notation of NICOptions.Device.
	Name string
	// Up is set if the port can be used; otherwise Reason is set.
	Up     bool
	Reason string
	// Link is InfiniBand or Ethernet. GID is the address that would be used, GIDReason why
	// it is chosen. MTU is in bytes.
	Link, GID, GIDReason string
	MTU                  int
	// MaxWrite is the longest write of one request, in bytes; 0 if the port could not be
	// queried. The engine splits longer writes.
	MaxWrite int64
	// Windows is set if the device has memory windows of type 1.
	Windows bool
}
