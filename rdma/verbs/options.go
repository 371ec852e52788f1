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

// Provider is what Info tells of an engine of this package.
const Provider = "verbs"

// NICOptions configure one port.
type NICOptions struct {
	// Device names the port: "mlx5_0", "mlx5_0/2" for its second port, with
	// "@3" at the end to use row 3 of its GID table and not the best one.
	Device string
	// QoS says how the packets of each traffic class are marked: the service
	// level on InfiniBand, which RoCE cards take a priority from, and the traffic
	// class byte of the GRH and, for RoCE v2, of the IP header. nil marks nothing.
	QoS *qos.Map
	// QueueDepth is how many Works an endpoint takes: a power of two, 16 to
	// 4096, no more than the device's. Default 256.
	QueueDepth int
	// ReceiveEntries is the size of each of the two shared receive queues: how
	// many immediates, and how many message buffers, there can be before they
	// are polled. Default 4096, or what the device has; at least 64.
	ReceiveEntries int
	// TimeoutCode and Retries say how long an unanswered packet is repeated
	// before the endpoint breaks: about 4 * Retries * 4.096 µs * 2^TimeoutCode,
	// by the card. Defaults 14 and 6, so one or two seconds. Codes 8 to 21,
	// retries 1 to 6: rdma_rxe takes a 7 for ever, which is not the standard's.
	TimeoutCode, Retries int
	// Spin is how long the poller polls on, taking a processor, before it sleeps,
	// where completions have lately come sooner than that: to sleep and be woken
	// through the kernel takes longer than a card takes for a small write. Where
	// nothing comes nothing is polled, and with GOMAXPROCS 1 never. Default 50 µs,
	// at most 10 ms; less than 0 is never.
	Spin time.Duration
}

// maxSpin is the largest Spin.
const maxSpin = 10 * time.Millisecond

// EnsureDefaults fills what is zero.
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

// Validate returns an error that names the first option out of its range.
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

// place is what Device names.
type place struct {
	name string
	port uint8
	// gid is the row of the GID table; -1: the best is chosen.
	gid int
}

// parseDevice reads "name[/port][@gid]". The port is 1 where it is not given.
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

// Options configure an engine.
type Options struct {
	// Devices are its NICs, as NICOptions.Device writes them. Default: every
	// port that is up.
	Devices []string
	// NIC is the rest of the options of each of them; Device is overwritten.
	NIC NICOptions
	// Group is the rest of the engine's options; Provider, Detail, Domains and
	// Reopen are overwritten, and SeparateClasses is set where NIC.QoS is.
	// Control should be group.TCP's or group.Unix's.
	Group group.Options
}

// Device is what List tells of one port.
type Device struct {
	// Name is as NICOptions.Device takes it.
	Name string
	// Up is whether it can be used; Reason says why not.
	Up     bool
	Reason string
	// Link is InfiniBand or Ethernet, GID the address that would be used and why
	// that one, MTU in bytes.
	Link, GID, GIDReason string
	MTU                  int
	// MaxWrite is the longest write of one request, in bytes; 0 where the port
	// could not be asked. The engine cuts longer ones.
	MaxWrite int64
	// Windows is whether the device has memory windows of type 1.
	Windows bool
}
