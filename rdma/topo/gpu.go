package topo

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// GPU is one NVIDIA GPU.
type GPU struct {
	// Name is "gpu" and the GPU's index, which is the same as NVML's index.
	Name string `json:"name"`
	PCI  PCI    `json:"pci"`
	// Model, UUID and MemoryBytes come from the driver's library; "" and 0 if the library is
	// missing.
	Model       string `json:"model,omitempty"`
	UUID        string `json:"uuid,omitempty"`
	MemoryBytes uint64 `json:"memory_bytes,omitempty"`
	// Pairs are the NICs that serve this GPU, the preferred NIC first.
	Pairs []Pair `json:"pairs,omitempty"`
}

// Pair is a NIC that serves a GPU.
type Pair struct {
	NIC      string   `json:"nic"`
	Distance Distance `json:"distance"`
	Reason   string   `json:"reason"`
}

// gpus lists the NVIDIA GPUs on PCI: vendor 10de, class display (0300) or 3D controller (0302).
// known holds the driver's data of GPUs.
func (t tree) gpus(known []GPU) []GPU {
	out := []GPU{}
	for _, name := range t.names("bus/pci/devices") {
		dir := "bus/pci/devices/" + name
		class := t.text(dir + "/class")
		if t.text(dir+"/vendor") != "0x10de" || !strings.HasPrefix(class, "0x0302") && !strings.HasPrefix(class, "0x0300") {
			continue
		}
		g := GPU{PCI: t.readPCI(t.real(dir))}
		for _, k := range known {
			if k.PCI.Address == g.PCI.Address {
				g.Model, g.UUID, g.MemoryBytes = k.Model, k.UUID, k.MemoryBytes
			}
		}
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b GPU) int { return cmp.Compare(a.PCI.Address, b.PCI.Address) })
	for i := range out {
		out[i].Name = fmt.Sprintf("gpu%d", i)
	}
	return out
}
