package topo

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Kind is the transport of a NIC.
type Kind string

// The kinds.
const (
	InfiniBand Kind = "ib"
	RoCE       Kind = "roce"
	IWARP      Kind = "iwarp"
	EFA        Kind = "efa"
	TCP        Kind = "tcp"
)

// NIC is a port of an RDMA device, or an interface without an RDMA device.
type NIC struct {
	// Name is the name of the RDMA device, with ":port" if the device has several ports. For a NIC
	// without an RDMA device it is the name of the interface.
	Name string `json:"name"`
	Kind Kind   `json:"kind"`
	Role Role   `json:"role"`
	// Reason explains the role.
	Reason string `json:"reason"`
	// Usable: the NIC can carry traffic now. If it cannot, Problem is the reason.
	Usable  bool   `json:"usable"`
	Problem string `json:"problem,omitempty"`

	PCI PCI `json:"pci"`
	// Software: the CPU performs the RDMA (rxe, siw).
	Software bool `json:"software,omitempty"`
	// VerbsDevice is the name of the device's file in /dev/infiniband: uverbs0.
	VerbsDevice string `json:"verbs_device,omitempty"`
	// Port is the number of the port on the RDMA device, from 1.
	Port int `json:"port,omitempty"`
	// State is the state in lower case: active, init or down for an RDMA port, up or down for an
	// interface without RDMA.
	State string `json:"state"`
	// Physical is the physical state of an RDMA port: LinkUp, Polling, Disabled.
	Physical string `json:"physical,omitempty"`
	// RateGbps is the rate of the port in Gb/s; 0: unknown. Lanes is the number of lanes: 4 for
	// 4X.
	RateGbps float64 `json:"rate_gbps"`
	Lanes    int     `json:"lanes,omitempty"`

	// Netdev is the name of the port's interface; "" if it has none (EFA).
	Netdev string `json:"netdev,omitempty"`
	// NetdevUp: an administrator has set the interface up.
	NetdevUp bool `json:"netdev_up,omitempty"`
	// MTUBytes is the MTU of the interface in bytes.
	MTUBytes int            `json:"mtu_bytes,omitempty"`
	Addrs    []netip.Prefix `json:"addrs,omitempty"`
	Bond     *Bond          `json:"bond,omitempty"`

	// GIDs are the non-empty GIDs of the port, and GID is the GID to use.
	GIDs []GID `json:"gids,omitempty"`
	GID  *GID  `json:"gid,omitempty"`

	// VFOf is, for a virtual function, the PCI address of its physical function. VFs is, for a
	// physical function, the number of its virtual functions.
	VFOf string `json:"vf_of,omitempty"`
	VFs  int    `json:"vfs,omitempty"`

	// GPUs are the GPUs that this NIC serves.
	GPUs []string `json:"gpus,omitempty"`
}

// IsRDMA reports whether the NIC is a port of an RDMA device.
func (n *NIC) IsRDMA() bool { return n.Kind != TCP }

// GID is an address (global identifier) of an RDMA port.
type GID struct {
	Index int        `json:"index"`
	Addr  netip.Addr `json:"addr"`
	// Type is the kernel's name of the type: "RoCE v2", "IB/RoCE v1".
	Type   string `json:"type"`
	Netdev string `json:"netdev,omitempty"`
}

// String returns "3 10.0.0.1".
func (g GID) String() string { return fmt.Sprintf("%d %s", g.Index, g.Addr.Unmap()) }

const typeRoCEv2 = "RoCE v2"

// Bond is a group of interfaces combined into one interface.
type Bond struct {
	// Mode and HashPolicy are the kernel's names: "802.3ad", "layer3+4".
	Mode       string   `json:"mode"`
	HashPolicy string   `json:"hash_policy,omitempty"`
	Members    []string `json:"members"`
}

// rdmaNICs reads class/infiniband.
func (t tree) rdmaNICs(o Options) []NIC {
	nics := []NIC{}
	for _, name := range t.names("class/infiniband") {
		ports := t.names("class/infiniband/" + name + "/ports")
		for _, p := range ports {
			number, err := strconv.Atoi(p)
			if err != nil {
				continue
			}
			n := t.rdmaPort(name, number, o)
			if len(ports) > 1 {
				n.Name += ":" + p
			}
			nics = append(nics, n)
		}
	}
	return nics
}

func (t tree) rdmaPort(device string, port int, o Options) NIC {
	dev := "class/infiniband/" + device
	dir := fmt.Sprintf("%s/ports/%d", dev, port)
	real := t.real(dev)
	n := NIC{
		Name:     device,
		PCI:      t.readPCI(real),
		Port:     port,
		State:    afterColon(strings.ToLower(t.text(dir + "/state"))),
		Physical: afterColon(t.text(dir + "/phys_state")),
		GIDs:     t.gids(dir),
	}
	n.Software = n.PCI.Address == ""
	n.VerbsDevice = t.verbsDevice(device)
	n.Kind = kindOf(n.PCI.Driver, t.text(dir+"/link_layer"), t.text(dev+"/node_type"))
	n.RateGbps, n.Lanes = parseRate(t.text(dir + "/rate"))
	n.GID = bestGID(n.Kind, n.GIDs)
	if n.Netdev = t.netdevOf(dev, real, port, n); n.Netdev != "" {
		d := t.readNetdev(n.Netdev)
		n.NetdevUp, n.MTUBytes, n.Bond = d.up, d.mtu, d.bond
		n.Addrs = t.addrs(n.Netdev, o, 0)
		if n.Software {
			n.PCI = d.pci
		}
	}
	t.readFunctions(&n, pciDir(real))
	n.Problem = n.rdmaProblem()
	n.Usable = n.Problem == ""
	return n
}

// verbsDevice returns the name of the character device of an RDMA device.
func (t tree) verbsDevice(device string) string {
	for _, name := range t.names("class/infiniband_verbs") {
		if t.text("class/infiniband_verbs/"+name+"/ibdev") == device {
			return name
		}
	}
	return ""
}

// readFunctions reads VFOf and VFs of n from the directory of a PCI function.
func (t tree) readFunctions(n *NIC, dir string) {
	if dir == "" {
		return
	}
	n.VFOf = t.link(dir + "/physfn")
	if vfs, ok := t.number(dir + "/sriov_numvfs"); ok {
		n.VFs = int(vfs)
	}
}

func kindOf(driver, layer, node string) Kind {
	switch {
	case driver == "efa":
		return EFA
	case layer == "InfiniBand":
		return InfiniBand
	case strings.HasSuffix(node, "RNIC"):
		return IWARP
	}
	return RoCE
}

// rdmaProblem returns why the port cannot carry traffic now, or "".
func (n *NIC) rdmaProblem() string {
	switch {
	case n.State == "":
		return "state not known"
	case n.State != "active":
		if n.Physical == "" || n.Physical == "LinkUp" {
			return "port is " + n.State
		}
		return "port is " + n.State + " (" + n.Physical + ")"
	case n.GID == nil && n.Kind == RoCE:
		return "no RoCE v2 GID"
	case n.GID == nil:
		return "no GID"
	}
	return ""
}

// afterColon returns the word after the colon: "ACTIVE" for "4: ACTIVE".
func afterColon(s string) string {
	_, word, _ := strings.Cut(s, ": ")
	return word
}

// parseRate reads "400 Gb/sec (4X NDR)" as 400 and 4.
func parseRate(s string) (gbps float64, lanes int) {
	number, rest, _ := strings.Cut(s, " ")
	gbps, err := strconv.ParseFloat(number, 64)
	if err != nil || !(gbps > 0 && gbps < 1e6) || !strings.HasPrefix(rest, "Gb/sec") {
		return 0, 0
	}
	if _, width, ok := strings.Cut(rest, "("); ok {
		count, _, _ := strings.Cut(width, "X")
		if n, err := strconv.Atoi(count); err == nil && n > 0 && n <= 16 {
			lanes = n
		}
	}
	return gbps, lanes
}

// gids lists the non-empty GIDs of a port.
func (t tree) gids(dir string) []GID {
	var out []GID
	for _, name := range t.names(dir + "/gids") {
		index, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		addr, err := netip.ParseAddr(t.text(dir + "/gids/" + name))
		if err != nil || !gidIsSet(addr) {
			continue
		}
		out = append(out, GID{
			Index: index, Addr: addr,
			Type:   t.text(dir + "/gid_attrs/types/" + name),
			Netdev: t.text(dir + "/gid_attrs/ndevs/" + name),
		})
	}
	slices.SortFunc(out, func(a, b GID) int { return a.Index - b.Index })
	return out
}

// gidIsSet reports whether an entry of the GID table is in use. An unused entry is all zeroes, or
// a prefix with an interface id of zeroes.
func gidIsSet(a netip.Addr) bool {
	b := a.As16()
	return [8]byte(b[8:]) != [8]byte{}
}

// bestGID returns the GID to use. For RoCE it prefers version 2, which can be routed and carries a
// DSCP. Among GIDs of version 2 it prefers an IPv4 address, because administrators assign IPv4
// addresses and the peer's GID table then has an IPv4 address too. A global IPv6 address comes
// next, and then a link-local address. For other kinds it returns the first GID.
func bestGID(kind Kind, gids []GID) *GID {
	best, rank := -1, 0
	for i, g := range gids {
		if r := gidRank(kind, g); r > rank {
			best, rank = i, r
		}
	}
	if best < 0 {
		return nil
	}
	g := gids[best]
	return &g
}

func gidRank(kind Kind, g GID) int {
	switch {
	case kind != RoCE:
		return 1
	case g.Type != typeRoCEv2:
		return 0
	case g.Addr.Is4In6():
		return 3
	case !g.Addr.IsLinkLocalUnicast():
		return 2
	}
	return 1
}

// netdevOf returns the interface of an RDMA port: the interface in the GID table, otherwise the
// interface of the same PCI function. A software device (rxe, siw) has the name of its interface
// in the sysfs attribute parent.
func (t tree) netdevOf(dev, real string, port int, n NIC) string {
	if n.GID != nil && n.GID.Netdev != "" {
		return n.GID.Netdev
	}
	for _, g := range n.GIDs {
		if g.Netdev != "" {
			return g.Netdev
		}
	}
	if parent := t.text(dev + "/parent"); parent != "" {
		return parent
	}
	dir := pciDir(real)
	if dir == "" {
		return ""
	}
	for _, name := range t.names(dir + "/net") {
		at, _ := t.number(dir + "/net/" + name + "/dev_port")
		if at == int64(port-1) {
			return name
		}
	}
	return ""
}

// netdev is the state of one interface in sysfs.
type netdev struct {
	name     string
	pci      PCI
	dir      string // directory of the PCI device; "" if there is none
	virtual  bool
	loopback bool
	up       bool // set up by an administrator
	oper     string
	carrier  bool
	gbps     float64
	mtu      int
	master   string
	bond     *Bond
}

// The kernel's numbers (if.h, if_arp.h).
const (
	flagUp       = 0x1
	typeLoopback = 772
)

func (t tree) readNetdev(name string) netdev {
	dir := "class/net/" + name
	real := t.real(dir)
	d := netdev{
		name: name, pci: t.readPCI(real), dir: pciDir(real),
		virtual: strings.HasPrefix(real, "devices/virtual/"),
		oper:    t.text(dir + "/operstate"),
		master:  t.link(dir + "/master"),
	}
	if flags, ok := t.number(dir + "/flags"); ok {
		d.up = flags&flagUp != 0
	}
	if kind, ok := t.number(dir + "/type"); ok {
		d.loopback = kind == typeLoopback
	}
	if carrier, ok := t.number(dir + "/carrier"); ok {
		d.carrier = carrier == 1
	}
	if mbps, ok := t.number(dir + "/speed"); ok && mbps > 0 && mbps < 1e9 {
		d.gbps = float64(mbps) / 1000
	}
	if mtu, ok := t.number(dir + "/mtu"); ok && mtu > 0 && mtu < 1<<20 {
		d.mtu = int(mtu)
	}
	if t.exists(dir + "/bonding") {
		d.bond = &Bond{
			Mode:       firstWord(t.text(dir + "/bonding/mode")),
			HashPolicy: firstWord(t.text(dir + "/bonding/xmit_hash_policy")),
			Members:    strings.Fields(t.text(dir + "/bonding/slaves")),
		}
		if len(d.bond.Members) > 0 {
			first := t.real("class/net/" + d.bond.Members[0])
			d.pci, d.dir = t.readPCI(first), pciDir(first)
		}
	}
	return d
}

func firstWord(s string) string {
	word, _, _ := strings.Cut(s, " ")
	return word
}

// uppersMax is the largest number of interfaces that are stacked on each other: VLAN on bridge on
// bond on NIC.
const uppersMax = 4

// addrs returns the addresses of an interface, and of the interfaces stacked on that interface. If
// a NIC is in a bridge, its addresses belong to the bridge.
func (t tree) addrs(name string, o Options, depth int) []netip.Prefix {
	if o.Addrs == nil || depth > uppersMax {
		return nil
	}
	out := o.Addrs(name)
	for _, entry := range t.names("class/net/" + name) {
		if upper, ok := strings.CutPrefix(entry, "upper_"); ok {
			out = append(out, t.addrs(upper, o, depth+1)...)
		}
	}
	return out
}

// tcpNICs lists the interfaces without an RDMA device. Virtual interfaces are included only if
// there are no others, as in a container.
func (t tree) tcpNICs(o Options, rdma []NIC) (nics []NIC, skipped []string) {
	var virtual []netdev
	found := len(rdma) > 0
	for _, name := range t.names("class/net") {
		d := t.readNetdev(name)
		taken := slices.ContainsFunc(rdma, func(n NIC) bool {
			return n.Netdev == name || n.Bond != nil && slices.Contains(n.Bond.Members, name)
		})
		switch {
		case d.loopback || taken || t.exists("class/net/"+d.master+"/bonding") && d.master != "":
		case d.bond == nil && d.virtual:
			virtual = append(virtual, d)
		default:
			found = true
			nics = append(nics, t.tcpNIC(d, o))
		}
	}
	for _, d := range virtual {
		if found || !d.up {
			skipped = append(skipped, d.name)
			continue
		}
		nics = append(nics, t.tcpNIC(d, o))
	}
	return nics, skipped
}

func (t tree) tcpNIC(d netdev, o Options) NIC {
	n := NIC{
		Name: d.name, Kind: TCP, PCI: d.pci, State: d.oper, RateGbps: d.gbps,
		Netdev: d.name, NetdevUp: d.up, MTUBytes: d.mtu, Bond: d.bond,
		Addrs: t.addrs(d.name, o, 0),
	}
	// A driver that does not detect a link reports the state unknown.
	if d.oper == "unknown" && d.up && d.carrier {
		n.State = "up"
	}
	t.readFunctions(&n, d.dir)
	switch {
	case n.State != "up":
		n.Problem = "interface is " + orUnknown(n.State)
	case o.Addrs != nil && !slices.ContainsFunc(n.Addrs, func(p netip.Prefix) bool { return !p.Addr().IsLinkLocalUnicast() }):
		n.Problem = "no address"
	}
	n.Usable = n.Problem == ""
	return n
}

func orUnknown(s string) string {
	if s == "" {
		return "in an unknown state"
	}
	return s
}

// model returns a string that is equal for NICs with the same kind and PCI id.
func (n *NIC) model() string { return path.Join(string(n.Kind), n.PCI.ID) }
