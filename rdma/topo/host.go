package topo

import (
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
)

// Host holds the NICs and GPUs of a host. NICs are sorted by kind (RDMA first), then by the number
// in their names. GPUs are sorted by PCI address, as NVML sorts them.
type Host struct {
	NICs []NIC `json:"nics"`
	GPUs []GPU `json:"gpus"`
	// Skipped are interfaces that are not NICs: bridges, veth pairs, tunnels.
	Skipped []string `json:"skipped,omitempty"`
	// Modules are the loaded kernel modules of the RDMA stack.
	Modules []string `json:"modules,omitempty"`
	// Orphans are PCI devices whose RDMA driver is not loaded.
	Orphans []Orphan `json:"orphans,omitempty"`
}

// Orphan is a PCI device that supports RDMA but for which the kernel has no RDMA device.
type Orphan struct {
	PCI PCI `json:"pci"`
	// Module is the kernel module that creates the RDMA device.
	Module string `json:"module"`
}

// Options are the inputs of Read.
type Options struct {
	// Sysfs is the file tree mounted at /sys. It must support links (fs.ReadLinkFS). Nil: /sys.
	Sysfs fs.FS
	// Roles are the roles of NICs by name. They override all rules.
	Roles map[string]Role
	// Addrs returns the addresses of an interface, which are not in sysfs. Nil: addresses are
	// unknown and not checked.
	Addrs func(netdev string) []netip.Prefix
	// GPUs is the driver's data of GPUs (rdma/topo/gpus), by PCI address. Nil: only sysfs is used.
	GPUs []GPU
}

// Read reads the host.
func Read(o Options) Host {
	if o.Sysfs == nil {
		o.Sysfs = os.DirFS("/sys")
	}
	t := tree{o.Sysfs}
	h := Host{GPUs: t.gpus(o.GPUs), Modules: t.modules()}
	h.NICs = t.rdmaNICs(o)
	tcp, skipped := t.tcpNICs(o, h.NICs)
	h.NICs = append(h.NICs, tcp...)
	h.Skipped = skipped
	h.Orphans = t.orphans(h.NICs)
	slices.SortStableFunc(h.NICs, func(a, b NIC) int {
		if a.IsRDMA() != b.IsRDMA() {
			if a.IsRDMA() {
				return -1
			}
			return 1
		}
		return compareNames(a.Name, b.Name)
	})
	h.assignRoles(o.Roles)
	h.pair()
	return h
}

// modules lists the loaded modules of the RDMA stack.
func (t tree) modules() []string {
	var out []string
	for _, m := range []string{"ib_core", "ib_uverbs", "rdma_cm", "mlx5_core", "mlx5_ib", "efa", "irdma", "bnxt_re", "rdma_rxe", "siw", "nvidia", "nvidia_peermem", "gdrdrv"} {
		if t.exists("module/" + m) {
			out = append(out, m)
		}
	}
	return out
}

// hasModule reports whether the module is loaded.
func (h *Host) hasModule(name string) bool { return slices.Contains(h.Modules, name) }

// rdmaModule returns the kernel module that creates the RDMA device of a PCI device. id is
// vendor:device, as in lspci -n. The result is "" unless every function of devices with this id
// supports RDMA.
func rdmaModule(id string) string {
	switch {
	case strings.HasPrefix(id, "15b3:"): // Mellanox, NVIDIA
		return "mlx5_ib"
	case strings.HasPrefix(id, "1d0f:efa"): // Amazon
		return "efa"
	}
	return ""
}

// orphans lists network devices (PCI class 0x02) that support RDMA but for which there is no RDMA
// device.
func (t tree) orphans(nics []NIC) []Orphan {
	var out []Orphan
	for _, name := range t.names("bus/pci/devices") {
		dir := "bus/pci/devices/" + name
		if !strings.HasPrefix(t.text(dir+"/class"), "0x02") {
			continue
		}
		module := rdmaModule(pciID(t.text(dir+"/vendor"), t.text(dir+"/device")))
		has := slices.ContainsFunc(nics, func(n NIC) bool { return n.PCI.Address == name && n.IsRDMA() })
		// In a bond, the RDMA device of a port belongs to the bond.
		bonded := slices.ContainsFunc(nics, func(n NIC) bool { return n.IsRDMA() && n.Bond != nil && sameCard(n.PCI.Address, name) })
		if module != "" && !has && !bonded {
			out = append(out, Orphan{PCI: t.readPCI(t.real(dir)), Module: module})
		}
	}
	return out
}

// sameCard reports whether two functions belong to one PCI device.
func sameCard(a, b string) bool {
	return len(a) > 2 && len(a) == len(b) && a[:len(a)-2] == b[:len(b)-2]
}

// compareNames orders mlx5_2 before mlx5_10.
func compareNames(a, b string) int {
	for a != "" && b != "" {
		da, db := digits(a), digits(b)
		if da > 0 && db > 0 {
			x, y := strings.TrimLeft(a[:da], "0"), strings.TrimLeft(b[:db], "0")
			if len(x) != len(y) {
				return len(x) - len(y)
			}
			if x != y {
				return strings.Compare(x, y)
			}
			a, b = a[da:], b[db:]
			continue
		}
		if a[0] != b[0] {
			return int(a[0]) - int(b[0])
		}
		a, b = a[1:], b[1:]
	}
	return len(a) - len(b)
}

// digits returns the number of digits at the start of s.
func digits(s string) int {
	n := 0
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return n
}
