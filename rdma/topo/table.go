package topo

import (
	"fmt"
	"strings"
	"text/tabwriter"
)

// String returns the table that `penstock nic list` prints.
func (h Host) String() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	if len(h.NICs) == 0 {
		fmt.Fprintln(w, "no NIC")
	} else {
		row(w, "NIC", "KIND", "ROLE", "STATE", "RATE", "NUMA", "PCI", "NETDEV", "ADDRESS", "GPU", "REASON")
	}
	for _, n := range h.NICs {
		row(w, n.Name, string(n.Kind), string(n.Role), n.stateWord(), n.rateWord(), numaWord(n.PCI.NUMA),
			dash(shortPCI(n.PCI.Address)), dash(n.Netdev), n.gidWord(), dash(strings.Join(n.GPUs, " ")), n.Reason)
	}
	_ = w.Flush() // writes to memory cannot fail
	if len(h.GPUs) > 0 {
		fmt.Fprintln(w)
		row(w, "GPU", "MODEL", "NUMA", "PCI", "NICS", "DISTANCE", "REASON")
		for _, g := range h.GPUs {
			row(w, append([]string{g.Name, dash(g.Model), numaWord(g.PCI.NUMA), shortPCI(g.PCI.Address)}, g.pairWords()...)...)
		}
		_ = w.Flush()
	}
	if len(h.Skipped) > 0 {
		fmt.Fprintf(&b, "\nnot listed, virtual: %s\n", strings.Join(h.Skipped, ", "))
	}
	return trimLines(b.String())
}

func row(w *tabwriter.Writer, cells ...string) { fmt.Fprintln(w, strings.Join(cells, "\t")) }

// trimLines removes the padding of the last column.
func trimLines(s string) string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n")
}

// pairWords returns the columns about the NICs of a GPU. All NICs of one GPU are at the same
// distance from it.
func (g *GPU) pairWords() []string {
	if len(g.Pairs) == 0 {
		return []string{"-", "-", "no usable NIC"}
	}
	names := make([]string, len(g.Pairs))
	for i, p := range g.Pairs {
		names[i] = p.NIC
	}
	return []string{strings.Join(names, " "), g.Pairs[0].Distance.String(), g.Pairs[0].Reason}
}

// stateWord returns the state, or the reason why the NIC cannot be used.
func (n *NIC) stateWord() string {
	if n.Usable {
		return n.State
	}
	return n.Problem
}

func (n *NIC) rateWord() string {
	if n.RateGbps == 0 || n.State != "active" && n.State != "up" {
		return "-"
	}
	return fmt.Sprintf("%g Gb/s", n.RateGbps)
}

// gidWord returns the GID to use, or the first address if the NIC has no GIDs.
func (n *NIC) gidWord() string {
	switch {
	case n.GID != nil:
		return n.GID.String()
	case !n.IsRDMA() && len(n.Addrs) > 0:
		return n.Addrs[0].Addr().String()
	}
	return "-"
}

func numaWord(n int) string {
	if n < 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
