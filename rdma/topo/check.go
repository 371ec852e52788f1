package topo

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Severity is the severity of a finding.
type Severity string

// The severities.
const (
	// Failure: the NIC or function does not work.
	Failure Severity = "fail"
	// Warning: the NIC or function works, but slower or less safely than it could.
	Warning Severity = "warn"
)

// Finding is one problem and its remedy.
type Finding struct {
	Severity Severity `json:"severity"`
	// NIC is the name of the NIC or GPU with the problem; "" is the host.
	NIC string `json:"nic,omitempty"`
	// Code is the name of the check: "port-down". It does not change between versions.
	Code string `json:"code"`
	What string `json:"what"`
	Do   string `json:"do"`
}

// Facts are the inputs of Check that are not in sysfs. A nil pointer, a nil map or a zero value
// means that the input was not collected; it is then not checked.
type Facts struct {
	// MemlockBytes is the process's limit of locked memory, in bytes; math.MaxUint64 means
	// unlimited.
	MemlockBytes *uint64
	// RateGbps is the expected rate of each RDMA NIC in Gb/s; 0: the rate of the other NICs of its
	// model.
	RateGbps float64
	// Kernel is the release, "6.1.0-28-amd64".
	Kernel string
	// DeviceErr holds, by RDMA device, the reason why the device's file in /dev/infiniband cannot
	// be used.
	DeviceErr map[string]error
	// Before and After are the driver's counters of each interface (ethtool -S). They were read
	// with the time Interval between them.
	Before, After map[string]map[string]uint64
	Interval      time.Duration
}

// MemlockMin is the least limit of locked memory that an RDMA NIC needs, in bytes: the smallest
// arena that the node accepts, plus the queues.
const MemlockMin = 64 << 20

// Check returns the findings about the host, the failures first.
func Check(h Host, f Facts) []Finding {
	c := &checker{host: h, facts: f, out: []Finding{}}
	c.hostWide()
	for _, n := range h.NICs {
		c.nic(n)
	}
	for _, g := range h.GPUs {
		c.gpu(g)
	}
	slices.SortStableFunc(c.out, func(a, b Finding) int { return cmp.Compare(rank(a.Severity), rank(b.Severity)) })
	return c.out
}

func rank(s Severity) int {
	if s == Failure {
		return 0
	}
	return 1
}

// Failed reports whether a finding is a failure.
func Failed(findings []Finding) bool {
	return slices.ContainsFunc(findings, func(f Finding) bool { return f.Severity == Failure })
}

// Report returns the text that `penstock nic check` prints: a line for each finding, followed by a
// line with its remedy.
func Report(findings []Finding) string {
	if len(findings) == 0 {
		return "nothing to complain of\n"
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	for _, f := range findings {
		row(w, string(f.Severity), orHost(f.NIC), f.Code, f.What)
		row(w, "", "", "", "→ "+f.Do)
	}
	_ = w.Flush() // writes to memory cannot fail
	return trimLines(b.String())
}

func orHost(nic string) string {
	if nic == "" {
		return "host"
	}
	return nic
}

type checker struct {
	host  Host
	facts Facts
	out   []Finding
}

func (c *checker) add(s Severity, nic, code, do, format string, args ...any) {
	c.out = append(c.out, Finding{Severity: s, NIC: nic, Code: code, What: fmt.Sprintf(format, args...), Do: do})
}

// hostWide checks properties of the host that concern all NICs.
func (c *checker) hostWide() {
	h := &c.host
	rdma := slices.ContainsFunc(h.NICs, func(n NIC) bool { return n.IsRDMA() })
	if !slices.ContainsFunc(h.NICs, func(n NIC) bool { return n.Usable && n.Role != Unused }) {
		c.add(Failure, "", "no-nic", "mend the findings below; in a container, pass the devices in (/dev/infiniband, the host's network)",
			"no NIC can be used")
	}
	for _, o := range h.Orphans {
		c.add(Warning, "", "module", "modprobe "+o.Module, "%s (%s, driver %s) has no RDMA device", shortPCI(o.PCI.Address), o.PCI.ID, dash(o.PCI.Driver))
	}
	if !rdma {
		return
	}
	if !h.hasModule("ib_uverbs") {
		c.add(Failure, "", "module", "modprobe ib_uverbs", "ib_uverbs is not loaded: programs can't open RDMA devices")
	}
	if m := c.facts.MemlockBytes; m != nil && *m != math.MaxUint64 {
		do := "LimitMEMLOCK=infinity in the unit, memlock in /etc/security/limits.conf, or --ulimit memlock=-1 for the container"
		switch {
		case *m < MemlockMin:
			c.add(Failure, "", "memlock", do, "%d KiB may be locked: RDMA memory can't be registered", *m>>10)
		default:
			c.add(Warning, "", "memlock", do, "%d MiB may be locked, which bounds the registered memory", *m>>20)
		}
	}
	if slices.ContainsFunc(h.NICs, func(n NIC) bool { return n.IsRDMA() && n.Kind != EFA }) {
		c.gpuMemory()
	}
}

// gpuMemory checks that NICs can access GPU memory. They do so through nvidia_peermem, or through
// dma-buf, which requires kernel 5.12 or later and NVIDIA's open modules. EFA's driver requires
// neither.
func (c *checker) gpuMemory() {
	if len(c.host.GPUs) == 0 {
		return
	}
	switch {
	case !c.host.hasModule("nvidia"):
		c.add(Warning, "", "gpu-driver", "install the GPU driver", "%d GPUs and no nvidia module", len(c.host.GPUs))
	case c.host.hasModule("nvidia_peermem"):
	case c.facts.Kernel != "" && kernelBefore(c.facts.Kernel, 5, 12):
		c.add(Failure, "", "gpu-memory", "modprobe nvidia_peermem", "NICs can't reach GPU memory: nvidia_peermem is not loaded, and kernel %s has no dma-buf for RDMA", c.facts.Kernel)
	default:
		c.add(Warning, "", "gpu-memory", "modprobe nvidia_peermem, unless the driver is of NVIDIA's open modules (version in /proc/driver/nvidia/version)",
			"nvidia_peermem is not loaded: NICs reach GPU memory by dma-buf only")
	}
}

// kernelBefore reports whether a kernel release is older than major.minor.
func kernelBefore(release string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a, &b); n != 2 {
		return false
	}
	return a < major || a == major && b < minor
}

// nic checks one NIC, unless its role is Unused.
func (c *checker) nic(n NIC) {
	if n.Role == Unused {
		return
	}
	if !n.Usable {
		c.unusable(n)
		return
	}
	if n.IsRDMA() {
		if err := c.facts.DeviceErr[n.Name]; err != nil {
			c.add(Failure, n.Name, "device", "let the user in (group rdma), or pass /dev/infiniband into the container", "%v", err)
		}
		c.rate(n)
	}
	c.slot(n)
	c.mtu(n)
	c.bond(n)
	c.pause(n)
}

func (c *checker) unusable(n NIC) {
	code, do := "port-down", "look at the cable, the transceiver and the switch's port"
	switch {
	case !n.IsRDMA():
	case n.State == "active":
		code, do = "gid", "give "+dash(n.Netdev)+" an IP address"
	case n.Netdev != "" && !n.NetdevUp && n.Kind == RoCE:
		do = "ip link set dev " + n.Netdev + " up"
	case n.Kind == InfiniBand && n.Physical == "LinkUp":
		do = "the link is there and no subnet manager has set the port up: start opensm"
	case n.Physical == "Disabled":
		do = "the port is switched off: rdma link, or ibportstate enable"
	}
	c.add(Failure, n.Name, code, do, "%s", n.Problem)
}

// rate reports a link with fewer than four lanes. It also reports a rate below the expected rate,
// or below the rate of other NICs of the same model.
func (c *checker) rate(n NIC) {
	want, why := c.facts.RateGbps, "as expected"
	if want == 0 {
		for _, o := range c.host.NICs {
			if o.model() == n.model() && o.Role == n.Role && o.Usable && o.RateGbps > want {
				want, why = o.RateGbps, "as "+o.Name+", the same model, does"
			}
		}
	}
	do := "look at the cable and the switch's port (mlxlink -d " + n.PCI.Address + " shows what was negotiated, and errors)"
	switch {
	case n.RateGbps > 0 && n.RateGbps < want:
		c.add(Failure, n.Name, "rate", do, "%g Gb/s instead of %g, %s", n.RateGbps, want, why)
	case n.Lanes > 0 && n.Lanes < 4 && !n.Software && n.Kind == InfiniBand:
		c.add(Warning, n.Name, "rate", do, "%d of 4 lanes: %g Gb/s", n.Lanes, n.RateGbps)
	}
}

// slot reports a PCIe link that is slower than the NIC's maximum, or slower than the NIC's port
// needs.
func (c *checker) slot(n NIC) {
	now, most := n.PCI.Link, n.PCI.LinkMax
	if now == (Link{}) || n.Software || n.VFOf != "" { // a VF has no link of its own
		return
	}
	do := "seat the card anew, look at the slot's width and at the BIOS's PCIe setting"
	switch {
	case n.RateGbps > now.Gbps():
		c.add(Failure, n.Name, "pcie", do, "PCIe at %v carries %.0f Gb/s, the port %g", now, now.Gbps(), n.RateGbps)
	case now.Lanes < most.Lanes:
		c.add(Warning, n.Name, "pcie", do, "PCIe at %v, the NIC can %v", now, most)
	case now.GTs < most.GTs && n.RateGbps > 0:
		c.add(Warning, n.Name, "pcie", do, "PCIe at %v, the NIC can %v; enough for the port's %g Gb/s", now, most, n.RateGbps)
	}
}

// RoCEMTU is the least MTU of an interface, in bytes, at which RoCE packets carry 4096 bytes. The
// headers take 96 (GRH 40, UDP 8, BTH 12, XRC 4, atomic 28, ICRC 4; iboe_get_mtu in the kernel).
const RoCEMTU = 4096 + 96

func (c *checker) mtu(n NIC) {
	if n.Kind == RoCE && n.MTUBytes > 0 && n.MTUBytes < RoCEMTU {
		c.add(Warning, n.Name, "mtu", fmt.Sprintf("ip link set dev %s mtu 9000, if the switches carry it", n.Netdev),
			"MTU of %d: RoCE packets carry %d bytes instead of 4096", n.MTUBytes, rocePayload(n.MTUBytes))
	}
	for _, o := range c.host.NICs {
		if o.Role == n.Role && o.Kind == n.Kind && o.Usable && o.MTUBytes > n.MTUBytes && n.MTUBytes > 0 {
			c.add(Warning, n.Name, "mtu-differs", fmt.Sprintf("ip link set dev %s mtu %d", n.Netdev, o.MTUBytes),
				"MTU of %d, %s of the same role has %d", n.MTUBytes, o.Name, o.MTUBytes)
			return
		}
	}
}

// rocePayload returns the largest InfiniBand MTU that fits into an interface's MTU, in bytes.
func rocePayload(mtu int) int {
	for _, p := range []int{4096, 2048, 1024, 512} {
		if mtu >= p+RoCEMTU-4096 {
			return p
		}
	}
	return 256
}

// bond checks the hash policy of a bond. A hash over MAC or IP addresses sends all traffic between
// two hosts over one member.
func (c *checker) bond(n NIC) {
	if n.Bond == nil || len(n.Bond.Members) < 2 {
		return
	}
	switch {
	case n.Bond.Mode == "active-backup":
		c.add(Warning, n.Name, "bond", "802.3ad if the switch can, or give each member an address and use them as NICs of their own",
			"bond in active-backup: one of %d members carries traffic", len(n.Bond.Members))
	case n.Bond.HashPolicy == "layer2" || n.Bond.HashPolicy == "layer2+3":
		c.add(Warning, n.Name, "bond", fmt.Sprintf("ip link set dev %s type bond xmit_hash_policy layer3+4", n.Netdev),
			"bond hashes by %s: all traffic to one peer takes one of %d members", n.Bond.HashPolicy, len(n.Bond.Members))
	}
}

// pause reports PFC pause frames between the two reads of the counters. If frames were sent, this
// host does not drain its NIC. If frames were received, the network throttles the host.
func (c *checker) pause(n NIC) {
	interfaces := []string{n.Netdev}
	if n.Bond != nil {
		interfaces = append(interfaces, n.Bond.Members...)
	}
	for _, netdev := range interfaces {
		c.pauseOf(n, netdev)
	}
}

func (c *checker) pauseOf(n NIC, netdev string) {
	before, after := c.facts.Before[netdev], c.facts.After[netdev]
	names := make([]string, 0, len(after))
	for name := range after {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		was, ok := before[name]
		if !ok || after[name] <= was || !isPause(name) {
			continue
		}
		do := "the peers send faster than this host takes: lower the windows, look at NUMA and PCIe; then at the buffers (mlnx_qos)"
		if strings.HasPrefix(name, "rx_") {
			do = "the switch holds this host back: look for the congested port behind it, and whether ECN and DCQCN are on there"
		}
		c.add(Warning, n.Name, "pause", do, "%s of %s grew by %d in %v", name, netdev, after[name]-was, c.facts.Interval)
	}
}

// isPause reports whether a counter of that name counts PFC pause frames. mlx5 and bnxt name these
// counters by priority (rx_prio3_pause), ice and others rx_priority_3_xoff.
func isPause(name string) bool {
	return strings.Contains(name, "prio") && (strings.HasSuffix(name, "_pause") || strings.Contains(name, "xoff") && strings.HasPrefix(strings.TrimLeft(name, "rt"), "x_"))
}

// gpu checks the path from a GPU to its NIC.
func (c *checker) gpu(g GPU) {
	serving := slices.ContainsFunc(c.host.NICs, func(n NIC) bool { return n.IsRDMA() && n.Role != Unused })
	if !serving {
		return
	}
	do := "move the card to a slot of the same PCIe switch or socket; until then expect less bandwidth"
	switch {
	case len(g.Pairs) == 0:
		c.add(Failure, g.Name, "gpu-nic", "mend the NICs of role cnic", "no usable NIC")
	case g.Pairs[0].Distance == Far && g.PCI.NUMA >= 0:
		c.add(Warning, g.Name, "numa", do, "its NIC %s is %s", g.Pairs[0].NIC, g.Pairs[0].Reason)
	}
	for _, p := range g.Pairs {
		if lost := c.lostNIC(g); lost != "" && p.Distance != ViaSwitch {
			c.add(Warning, g.Name, "gpu-nic", "mend "+lost, "its own NIC %s is not usable; %s stands in, %s", lost, p.NIC, p.Reason)
			return
		}
	}
}

// lostNIC returns the name of an unusable NIC under the GPU's switch.
func (c *checker) lostNIC(g GPU) string {
	for _, n := range c.host.NICs {
		if n.IsRDMA() && !n.Usable && n.Role != Unused && relate(n.PCI, g.PCI).distance == ViaSwitch {
			return n.Name
		}
	}
	return ""
}
