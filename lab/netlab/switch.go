package netlab

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// Switch is a network to which namespaces are attached.
type Switch struct {
	lab    *Lab
	ns     *Namespace
	bridge netlink.Link
	net    netip.Prefix
	ports  int
}

// switched is the address range that is divided into one network per switch.
var switched = netip.MustParsePrefix("10.78.0.0/16")

// The maximum number of switches in a lab, and of ports of a switch.
const (
	switchesMax = 256
	portsMax    = 250
)

// Switch creates a switch: a Linux bridge in a new namespace.
func (l *Lab) Switch(name string) (*Switch, error) {
	if l.switches == switchesMax {
		return nil, fmt.Errorf("netlab: a lab has at most %d switches, the networks in %v", switchesMax, switched)
	}
	ns, err := l.Namespace(name)
	if err != nil {
		return nil, err
	}
	const device = "bridge"
	err = ns.nl.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: device}})
	if err == nil {
		err = ns.up(device)
	}
	var bridge netlink.Link
	if err == nil {
		bridge, err = ns.nl.LinkByName(device)
	}
	if err != nil {
		return nil, fmt.Errorf("netlab: switch %s (kernel module bridge): %w", name, err)
	}
	base := switched.Addr().As4()
	base[2] = byte(l.switches)
	l.switches++
	return &Switch{lab: l, ns: ns, bridge: bridge, net: netip.PrefixFrom(netip.AddrFrom4(base), 24)}, nil
}

// Attach connects a namespace to the switch by a link. A of the link is the namespace's end.
func (s *Switch) Attach(n *Namespace, o LinkOptions) (*Link, error) {
	if s.ports == portsMax {
		return nil, fmt.Errorf("netlab: switch %s has %d ports, the maximum", s.ns.name, portsMax)
	}
	s.ports++
	ip := s.net.Addr().As4()
	ip[3] = byte(s.ports)
	k := &Link{A: End{n, n.nextDevice(), netip.PrefixFrom(netip.AddrFrom4(ip), s.net.Bits())}, B: End{Namespace: s.ns, Device: s.ns.nextDevice()}}
	if err := k.lay(o); err != nil {
		return nil, err
	}
	port, err := k.B.device()
	if err == nil {
		err = s.ns.nl.LinkSetMaster(port, s.bridge)
	}
	if err != nil {
		return nil, fmt.Errorf("netlab: port %d of switch %s: %w", s.ports, s.ns.name, err)
	}
	return k, nil
}
