package topo

import (
	"fmt"
	"strconv"
	"strings"
)

// PCI is the position of a device. The zero value means that the device is not on PCI, or its
// position is unknown.
type PCI struct {
	// Address is domain:bus:device.function.
	Address string `json:"address,omitempty"`
	// Path holds the host bridge ("pci0000:15"), then the bridges below it, then the device
	// itself.
	Path []string `json:"path,omitempty"`
	// ID is vendor:device in hexadecimal: "15b3:1021".
	ID     string `json:"id,omitempty"`
	Driver string `json:"driver,omitempty"`
	// NUMA is the NUMA node; -1 if the firmware does not report it.
	NUMA int `json:"numa"`
	// Link is the PCIe link as negotiated with the slot, LinkMax the fastest link that the device
	// supports.
	Link    Link `json:"link,omitzero"`
	LinkMax Link `json:"link_max,omitzero"`
}

// Link is a PCIe link. The zero value is unknown.
type Link struct {
	// GTs is the signalling rate in GT/s: 32 for PCIe 5.
	GTs   float64 `json:"gts"`
	Lanes int     `json:"lanes"`
}

// String returns "32 GT/s x16".
func (l Link) String() string {
	if l == (Link{}) {
		return "?"
	}
	return fmt.Sprintf("%g GT/s x%d", l.GTs, l.Lanes)
}

// Gbps returns the capacity of the link in Gb/s, before the overhead of packets. The line code is
// 128b/130b from 8 GT/s on, and 8b/10b below (PCI Express Base Specification, section 4.2). Flit
// mode at 64 GT/s is within 2 % of 128b/130b.
func (l Link) Gbps() float64 {
	code := 128.0 / 130
	if l.GTs < 8 {
		code = 8.0 / 10
	}
	return l.GTs * float64(l.Lanes) * code
}

// readPCI reads the PCI device at the end of a path below /sys.
func (t tree) readPCI(real string) PCI {
	path := pciPath(real)
	if path == nil {
		return PCI{NUMA: -1}
	}
	dir := pciDir(real)
	p := PCI{
		Address: path[len(path)-1],
		Path:    path,
		ID:      pciID(t.text(dir+"/vendor"), t.text(dir+"/device")),
		Driver:  t.link(dir + "/driver"),
		NUMA:    -1,
		Link:    parseLink(t.text(dir+"/current_link_speed"), t.text(dir+"/current_link_width")),
		LinkMax: parseLink(t.text(dir+"/max_link_speed"), t.text(dir+"/max_link_width")),
	}
	if n, ok := t.number(dir + "/numa_node"); ok && n >= 0 {
		p.NUMA = int(n)
	}
	return p
}

func pciID(vendor, device string) string {
	v, d := strings.TrimPrefix(vendor, "0x"), strings.TrimPrefix(device, "0x")
	if v == "" || d == "" {
		return ""
	}
	return v + ":" + d
}

// parseLink parses the sysfs values "32.0 GT/s PCIe" and "16". A link that is down has the speed
// "Unknown" and a width of 0 or 255.
func parseLink(speed, width string) Link {
	rate, _, _ := strings.Cut(speed, " ")
	gts, err := strconv.ParseFloat(rate, 64)
	lanes, err2 := strconv.Atoi(width)
	if err != nil || err2 != nil || !(gts > 0 && gts < 1024) || lanes <= 0 || lanes > 32 {
		return Link{}
	}
	return Link{GTs: gts, Lanes: lanes}
}

// Distance is the distance of two devices. A smaller value is closer.
type Distance int

// The distances, as doc.go defines them.
const (
	// ViaSwitch: both are below the same PCIe bridge under the host bridge.
	ViaSwitch Distance = iota
	// ViaRoot: both are below the same host bridge.
	ViaRoot
	// ViaNUMA: both are on the same NUMA node.
	ViaNUMA
	// Far: none of the above applies, or the distance is unknown.
	Far
)

// String returns the distance as the tables show it.
func (d Distance) String() string {
	switch d {
	case ViaSwitch:
		return "switch"
	case ViaRoot:
		return "root"
	case ViaNUMA:
		return "numa"
	case Far:
		return "far"
	}
	return fmt.Sprintf("distance %d", int(d))
}

// MarshalText returns String.
func (d Distance) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// relation is the position of two devices relative to each other.
type relation struct {
	distance Distance
	// via is the lowest bridge, or the host bridge, above both.
	via string
	// hops is the number of links between the two devices, if they share a bridge or a host
	// bridge.
	hops int
}

// closer orders relations by distance, then by hops.
func (r relation) closer(than relation) bool {
	if r.distance != than.distance {
		return r.distance < than.distance
	}
	return r.hops < than.hops
}

func relate(a, b PCI) relation {
	common := 0
	for common < len(a.Path) && common < len(b.Path) && a.Path[common] == b.Path[common] {
		common++
	}
	r := relation{distance: Far}
	if common > 0 {
		r.via = a.Path[common-1]
		r.hops = len(a.Path) + len(b.Path) - 2*common
	}
	switch {
	case common > 1:
		r.distance = ViaSwitch
	case common == 1:
		r.distance = ViaRoot
	case a.NUMA >= 0 && a.NUMA == b.NUMA:
		r.distance = ViaNUMA
	}
	return r
}

// words returns the relation of a and b as text.
func (r relation) words(a, b PCI) string {
	switch r.distance {
	case ViaSwitch:
		return "under PCIe switch " + shortPCI(r.via)
	case ViaRoot:
		return "under root complex " + shortPCI(r.via)
	case ViaNUMA:
		return fmt.Sprintf("on NUMA node %d", a.NUMA)
	}
	if a.NUMA >= 0 && b.NUMA >= 0 {
		return fmt.Sprintf("across NUMA nodes %d and %d", a.NUMA, b.NUMA)
	}
	return "NUMA node not known"
}

// shortPCI removes the domain 0000 from an address.
func shortPCI(address string) string { return strings.TrimPrefix(address, "0000:") }
