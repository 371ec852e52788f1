package topo

import (
	"fmt"
	"slices"
	"strings"
)

// Role is the use of a NIC.
type Role string

// The roles.
const (
	// CNIC: a GPU's NIC on the compute network.
	CNIC Role = "cnic"
	// SNIC: a NIC on the storage network.
	SNIC Role = "snic"
	// Shared: a NIC for both compute and storage traffic.
	Shared Role = "shared"
	// Unused: the NIC is not used.
	Unused Role = "none"
)

// ParseRole reads a role from configuration.
func ParseRole(s string) (Role, error) {
	if r := Role(s); slices.Contains([]Role{CNIC, SNIC, Shared, Unused}, r) {
		return r, nil
	}
	return "", fmt.Errorf("topo: %q is no role of a NIC; roles are cnic, snic, shared and none", s)
}

// assignRoles gives every NIC the role of the first rule that applies:
//
//  1. the role in the configuration;
//  2. a virtual function is unused if its physical function is on this host, and
//     software RDMA is unused if there is hardware RDMA;
//  3. without GPUs, an RDMA NIC is an SNIC;
//  4. an RDMA NIC under a GPU's PCIe switch is a CNIC;
//  5. the other RDMA NICs of a host with such CNICs are SNICs;
//  6. if no RDMA NIC is under a GPU's switch, an RDMA NIC is shared;
//  7. a TCP NIC is unused if a usable RDMA NIC serves storage, if another usable TCP NIC is
//     faster, or if the TCP NIC itself is not usable; otherwise it is shared if there are GPUs
//     and no RDMA NIC is usable, else an SNIC;
//  8. if there is still no SNIC, the CNICs serve storage too.
func (h *Host) assignRoles(config map[string]Role) {
	anyCNIC := slices.ContainsFunc(h.NICs, func(n NIC) bool {
		r, _ := h.nearestGPU(n)
		return n.IsRDMA() && r.distance == ViaSwitch
	})
	for i := range h.NICs {
		if n := &h.NICs[i]; n.IsRDMA() {
			n.Role, n.Reason = h.rdmaRole(*n, anyCNIC)
		}
	}
	h.configured(config)
	h.assignTCP()
	h.configured(config)
	h.shareCNICs(config)
}

// configured applies rule 1. It runs before the TCP NICs get their role, because their role depends
// on the roles of the RDMA NICs, and again afterwards for the TCP NICs themselves.
func (h *Host) configured(config map[string]Role) {
	for i := range h.NICs {
		n := &h.NICs[i]
		if r, ok := config[n.Name]; ok {
			n.Role, n.Reason = r, "configured"
		}
	}
}

// nearestGPU returns the relation of n to the closest GPU, and the indices of all GPUs at that
// distance.
func (h *Host) nearestGPU(n NIC) (best relation, gpus []int) {
	best = relation{distance: Far, hops: 1 << 30}
	for i, g := range h.GPUs {
		r := relate(n.PCI, g.PCI)
		if r.closer(best) {
			best, gpus = r, nil
		}
		if !best.closer(r) {
			gpus = append(gpus, i)
		}
	}
	return best, gpus
}

func (h *Host) rdmaRole(n NIC, anyCNIC bool) (Role, string) {
	if n.VFOf != "" && slices.ContainsFunc(h.NICs, func(pf NIC) bool { return pf.PCI.Address == n.VFOf }) {
		return Unused, "virtual function of " + shortPCI(n.VFOf) + ", which is here itself"
	}
	if n.Software && slices.ContainsFunc(h.NICs, func(o NIC) bool { return o.IsRDMA() && !o.Software }) {
		return Unused, "software RDMA, beside NICs that do it in hardware"
	}
	if len(h.GPUs) == 0 {
		return SNIC, "no GPU on this host"
	}
	r, gpus := h.nearestGPU(n)
	if r.distance == ViaSwitch {
		return CNIC, fmt.Sprintf("under PCIe switch %s, as %s", shortPCI(r.via), h.gpuNames(gpus))
	}
	if anyCNIC {
		return SNIC, "under no GPU's PCIe switch"
	}
	return Shared, "no NIC is under a GPU's PCIe switch"
}

func (h *Host) gpuNames(gpus []int) string {
	names := make([]string, len(gpus))
	for i, g := range gpus {
		names[i] = h.GPUs[g].Name
	}
	return strings.Join(names, ", ")
}

// assignTCP applies rule 7.
func (h *Host) assignTCP() {
	role, why := h.tcpRole()
	fastest := 0.0
	for _, n := range h.NICs {
		if !n.IsRDMA() && n.Usable {
			fastest = max(fastest, n.RateGbps)
		}
	}
	for i := range h.NICs {
		n := &h.NICs[i]
		switch {
		case n.IsRDMA():
		case role == Unused:
			n.Role, n.Reason = Unused, why
		case !n.Usable:
			n.Role, n.Reason = Unused, n.Problem
		case n.RateGbps < fastest:
			n.Role, n.Reason = Unused, fmt.Sprintf("others are faster: %g Gb/s", fastest)
		default:
			n.Role, n.Reason = role, why
		}
	}
}

// tcpRole returns the role that TCP takes (rule 7), and the reason.
func (h *Host) tcpRole() (Role, string) {
	usable := func(roles ...Role) bool {
		return slices.ContainsFunc(h.NICs, func(n NIC) bool { return n.IsRDMA() && n.Usable && slices.Contains(roles, n.Role) })
	}
	rdma := slices.ContainsFunc(h.NICs, func(n NIC) bool { return n.IsRDMA() })
	switch {
	case usable(SNIC, Shared):
		return Unused, "RDMA reaches storage"
	case usable(CNIC):
		return SNIC, "the RDMA NICs are the GPUs'; storage over TCP"
	case rdma && len(h.GPUs) > 0:
		return Shared, "no RDMA NIC is usable; TCP for everything"
	case rdma:
		return SNIC, "no RDMA NIC is usable; TCP"
	case len(h.GPUs) > 0:
		return Shared, "no RDMA device; TCP for everything"
	}
	return SNIC, "no RDMA device; TCP"
}

// shareCNICs applies rule 8.
func (h *Host) shareCNICs(config map[string]Role) {
	for _, n := range h.NICs {
		if n.Usable && (n.Role == SNIC || n.Role == Shared) {
			return
		}
	}
	for i := range h.NICs {
		n := &h.NICs[i]
		if _, fixed := config[n.Name]; n.Role == CNIC && !fixed {
			n.Role = Shared
			n.Reason += "; no other NIC reaches storage"
		}
	}
}
