package topo

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// pair assigns NICs to GPUs so that every NIC serves a GPU and every GPU has a NIC. First it
// assigns every NIC to the closest GPU; among equally close GPUs, to the GPU with the fewest NICs.
// Then a GPU without a NIC shares the closest NIC; among equally close NICs, the NIC that serves
// the fewest GPUs. TCP NICs serve GPUs only if no RDMA NIC does.
func (h *Host) pair() {
	nics := h.serving(true)
	if len(nics) == 0 {
		nics = h.serving(false)
	}
	for _, i := range nics {
		_, gpus := h.nearestGPU(h.NICs[i])
		if len(gpus) == 0 {
			return
		}
		h.join(slices.MinFunc(gpus, func(a, b int) int { return len(h.GPUs[a].Pairs) - len(h.GPUs[b].Pairs) }), i)
	}
	for g := range h.GPUs {
		if len(h.GPUs[g].Pairs) > 0 || len(nics) == 0 {
			continue
		}
		h.join(g, slices.MinFunc(nics, func(a, b int) int {
			ra, rb := relate(h.NICs[a].PCI, h.GPUs[g].PCI), relate(h.NICs[b].PCI, h.GPUs[g].PCI)
			switch {
			case ra.closer(rb):
				return -1
			case rb.closer(ra):
				return 1
			}
			return len(h.NICs[a].GPUs) - len(h.NICs[b].GPUs)
		}))
	}
}

// serving returns the indices of the NICs that may serve GPUs: RDMA NICs or, if rdma is false, the
// others.
func (h *Host) serving(rdma bool) (nics []int) {
	for i, n := range h.NICs {
		if n.Usable && (n.Role == CNIC || n.Role == Shared) && n.IsRDMA() == rdma {
			nics = append(nics, i)
		}
	}
	return nics
}

func (h *Host) join(gpu, nic int) {
	g, n := &h.GPUs[gpu], &h.NICs[nic]
	r := relate(n.PCI, g.PCI)
	g.Pairs = append(g.Pairs, Pair{NIC: n.Name, Distance: r.distance, Reason: r.words(n.PCI, g.PCI)})
	n.GPUs = append(n.GPUs, g.Name)
}

// Want is a caller's requirement for Choose.
type Want struct {
	// NICs are names of NICs, or an address of each NIC. All must be usable and of one of Kinds.
	// Empty: the other fields select the NICs.
	NICs []string
	// GPU selects the NICs that are assigned to the GPU with that name.
	GPU string
	// Role selects the NICs with that role or the role Shared. If Role is "", the roles CNIC, SNIC
	// and Shared are accepted.
	Role Role
	// RDMA excludes TCP NICs.
	RDMA bool
	// Kinds are the accepted kinds. Empty: any.
	Kinds []Kind
}

// Choose returns the NICs that meet w, in the order of Host.NICs. If there are none it returns a
// *NoNICError, whose text ends with the table of the host's NICs.
func (h *Host) Choose(w Want) ([]NIC, error) {
	if len(w.NICs) > 0 {
		return h.named(w)
	}
	var out []NIC
	for _, n := range h.NICs {
		if n.Usable && w.fits(n) {
			out = append(out, n)
		}
	}
	if len(out) == 0 {
		return nil, &NoNICError{What: w.String(), Host: *h}
	}
	return out, nil
}

func (h *Host) named(w Want) ([]NIC, error) {
	var out []NIC
	for _, name := range w.NICs {
		i := slices.IndexFunc(h.NICs, func(n NIC) bool { return n.answersTo(name) && w.speaks(n) })
		if i < 0 {
			return nil, &NoNICError{What: "NIC" + w.kinds() + " named " + name, Host: *h}
		}
		if !h.NICs[i].Usable {
			return nil, &NoNICError{What: fmt.Sprintf("use of %s: %s", name, h.NICs[i].Problem), Host: *h}
		}
		out = append(out, h.NICs[i])
	}
	return out, nil
}

// answersTo reports whether text is the NIC's name or one of its addresses.
func (n *NIC) answersTo(text string) bool {
	if n.Name == text {
		return true
	}
	ip, err := netip.ParseAddr(text)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(n.Addrs, func(p netip.Prefix) bool { return p.Addr() == ip }) ||
		slices.ContainsFunc(n.GIDs, func(g GID) bool { return g.Addr.Unmap() == ip })
}

// speaks reports whether the NIC is of an accepted kind, and has RDMA if w requires RDMA.
func (w Want) speaks(n NIC) bool {
	return (!w.RDMA || n.IsRDMA()) && (len(w.Kinds) == 0 || slices.Contains(w.Kinds, n.Kind))
}

func (w Want) fits(n NIC) bool {
	switch {
	case !w.speaks(n), n.Role == Unused:
		return false
	case w.GPU != "":
		return slices.Contains(n.GPUs, w.GPU)
	case w.Role != "":
		return n.Role == w.Role || n.Role == Shared
	}
	return true
}

// String returns the requirement as text: "usable RDMA NIC for gpu3".
func (w Want) String() string {
	s := "usable NIC"
	if w.RDMA {
		s = "usable RDMA NIC"
	}
	s += w.kinds()
	if w.Role != "" {
		s += " of role " + string(w.Role)
	}
	if w.GPU != "" {
		s += " for " + w.GPU
	}
	return s
}

// kinds returns Kinds as text: " of kind ib or roce".
func (w Want) kinds() string {
	if len(w.Kinds) == 0 {
		return ""
	}
	words := make([]string, len(w.Kinds))
	for i, k := range w.Kinds {
		words[i] = string(k)
	}
	return " of kind " + strings.Join(words, " or ")
}

// NoNICError reports that no NIC of Host meets the requirement What.
type NoNICError struct {
	// What describes the requirement.
	What string
	Host Host
}

// Error returns a text that ends with the table of Host.
func (e *NoNICError) Error() string {
	return fmt.Sprintf("topo: no %s; `penstock nic check` says what to do. This host has:\n%s", e.What, e.Host)
}
