package qos

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/penstock-kv/penstock/rdma"
)

// Lane holds the marks of the packets of one class.
type Lane struct {
	// SL is the service level on InfiniBand, 0 to 15.
	SL uint8
	// DSCP is the code point (DSCP) of RoCE v2 and of TCP packets, 0 to 63.
	DSCP uint8
	// Priority is the priority of 802.1p, 0 to 7, and the SO_PRIORITY of a socket. RoCE devices
	// derive their priority from the DSCP.
	Priority uint8
}

// Limits of the fields.
const (
	MaxSL       = 15
	MaxDSCP     = 63
	MaxPriority = 7
)

// ectCapable is ECT(0), in the two low bits of the traffic class byte: the sender reacts to
// congestion marks (RFC 3168, section 5).
const ectCapable = 0b10

// TrafficClass returns the traffic class byte for an address handle of RoCE v2: the DSCP, and the
// bits for ECN-capable, because DCQCN reacts to congestion marks. Devices that set the ECN bits
// themselves ignore these bits.
func (l Lane) TrafficClass() uint8 { return l.DSCP<<2 | ectCapable }

// TOS returns the value for IP_TOS and IPV6_TCLASS: the DSCP without ECN bits, which the kernel
// sets.
func (l Lane) TOS() int { return int(l.DSCP) << 2 }

// Map holds the marks of each class. With the zero value packets are not marked.
type Map [rdma.Classes]Lane

// Default returns the map for which the files in deploy/qos are written. On InfiniBand, unmarked
// traffic, such as NCCL's, is on the high-priority lane, and only cache traffic is moved to VL 2,
// the low-priority lane in appendix A.1 of the DualPath paper. On Ethernet, cache traffic has CS1
// and priority 1, which 802.1Q and RFC 3662 rank below best effort. Collectives have DSCP 26 and
// priority 3, which RoCE deployments keep lossless.
func Default() Map {
	var m Map
	m[rdma.ClassKV] = Lane{SL: 2, DSCP: 8, Priority: 1}
	m[rdma.ClassCollective] = Lane{SL: 0, DSCP: 26, Priority: 3}
	return m
}

// Lane returns the marks of a class. For an unknown class it returns the marks of ClassKV.
func (m *Map) Lane(c rdma.Class) Lane {
	if int(c) >= len(m) {
		c = rdma.ClassKV
	}
	return m[c]
}

// String returns the map in the format of Parse: "kv=sl:2,dscp:8,prio:1
// collective=sl:0,dscp:26,prio:3".
func (m Map) String() string {
	var parts []string
	for c, l := range m {
		parts = append(parts, fmt.Sprintf("%v=sl:%d,dscp:%d,prio:%d", rdma.Class(c), l.SL, l.DSCP, l.Priority))
	}
	return strings.Join(parts, " ")
}

// Parse reads a map: classes with their settings, in any order, separated by blanks. A class or a
// setting that is left out has its default. "" is Default, and with "off" packets are not marked.
func Parse(text string) (Map, error) {
	m := Default()
	if strings.TrimSpace(text) == "off" {
		return Map{}, nil
	}
	var seen [rdma.Classes]bool
	for _, part := range strings.Fields(text) {
		name, settings, _ := strings.Cut(part, "=")
		c, err := parseClass(name)
		if err != nil {
			return Map{}, err
		}
		if seen[c] {
			return Map{}, fmt.Errorf("qos: class %v is given twice", c)
		}
		seen[c] = true
		if err := m[c].parse(settings); err != nil {
			return Map{}, fmt.Errorf("qos: class %v: %w", c, err)
		}
	}
	return m, m.Validate()
}

func parseClass(name string) (rdma.Class, error) {
	for c := range rdma.Class(rdma.Classes) {
		if c.String() == name {
			return c, nil
		}
	}
	return 0, fmt.Errorf("qos: %q is no class; write kv=… or collective=…", name)
}

func (l *Lane) parse(settings string) error {
	for s := range strings.SplitSeq(settings, ",") {
		key, value, _ := strings.Cut(s, ":")
		field, most := l.field(key)
		if field == nil {
			return fmt.Errorf("%q is no setting; write sl:N, dscp:N or prio:N", s)
		}
		n, err := strconv.ParseUint(value, 10, 8)
		if err != nil || n > uint64(most) {
			return fmt.Errorf("%s is %q; it goes from 0 to %d", key, value, most)
		}
		*field = uint8(n)
	}
	return nil
}

func (l *Lane) field(key string) (field *uint8, most uint8) {
	switch key {
	case "sl":
		return &l.SL, MaxSL
	case "dscp":
		return &l.DSCP, MaxDSCP
	case "prio":
		return &l.Priority, MaxPriority
	}
	return nil, 0
}

// Validate returns an error unless every field is in its range. Two classes may have the same
// marks.
func (m Map) Validate() error {
	for c, l := range m {
		if l.SL > MaxSL || l.DSCP > MaxDSCP || l.Priority > MaxPriority {
			return fmt.Errorf("qos: class %v is sl:%d,dscp:%d,prio:%d; the most are sl:%d, dscp:%d, prio:%d",
				rdma.Class(c), l.SL, l.DSCP, l.Priority, MaxSL, MaxDSCP, MaxPriority)
		}
	}
	return nil
}

// MarshalText returns String, for configuration files.
func (m Map) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText reads what Parse does.
func (m *Map) UnmarshalText(text []byte) error {
	parsed, err := Parse(string(text))
	if err != nil {
		return err
	}
	*m = parsed
	return nil
}
