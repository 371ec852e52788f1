package dualpath

import (
	"fmt"
	"math"
)

// Cluster is the input of the bottleneck-free analysis of DualPath section 4.2.
type Cluster struct {
	// PrefillNodes and DecodeNodes are the numbers of nodes (P and D in the paper).
	PrefillNodes, DecodeNodes int
	// GPUs is the number of GPUs of a node, each with one compute NIC (g).
	GPUs int
	// CNIC is the bandwidth of one compute NIC in GB/s (B).
	CNIC float64
	// SNICs is the storage bandwidth of a node in multiples of CNIC (s).
	SNICs float64
	// DRAM is the memory bandwidth of a node in GB/s (M).
	DRAM float64
}

// Validate returns an error that names the first field out of its range.
func (c Cluster) Validate() error {
	for _, f := range []struct {
		name  string
		value float64
	}{
		{"prefill nodes", float64(c.PrefillNodes)}, {"decode nodes", float64(c.DecodeNodes)}, {"GPUs of a node", float64(c.GPUs)},
		{"bandwidth of a compute NIC", c.CNIC}, {"storage NICs of a node", c.SNICs}, {"DRAM bandwidth", c.DRAM},
	} {
		if !(f.value > 0) || math.IsInf(f.value, 0) {
			return fmt.Errorf("dualpath: %s: %v; it must be positive", f.name, f.value)
		}
	}
	return nil
}

// Range is a range of the ratio P/D of prefill to decode nodes. It is empty if Low > High.
type Range struct{ Low, High float64 }

// Holds reports whether ratio lies in the range, ends included.
func (r Range) Holds(ratio float64) bool {
	const eps = 1e-9
	return ratio >= r.Low*(1-eps) && ratio <= r.High*(1+eps)
}

// Resource is a resource that may saturate before the storage NICs do.
type Resource struct {
	Name string
	// Load is the traffic over the resource when every storage NIC is saturated, and Limit is the
	// resource's capacity. Both are in GB/s, for one compute NIC in one direction or for the DRAM
	// of one node.
	Load, Limit float64
}

// Utilization is Load/Limit. Above 1 the resource is the bottleneck.
func (r Resource) Utilization() float64 { return r.Load / r.Limit }

// Analysis is the result of Analyze.
type Analysis struct {
	Cluster Cluster
	// Safe is the range of P/D in which no resource saturates before the storage NICs (equation
	// 9).
	Safe Range
	// Resources are in the order of the paper's equations 1 to 8.
	Resources []Resource
	// First is the resource with the highest utilization.
	First Resource
	// Saturation is the share of the aggregate storage bandwidth that can be
	// reached: 1, or the reciprocal of First's utilization.
	Saturation float64
	// Bound is the largest possible speed-up of reading through all nodes over reading through the
	// prefill nodes alone: (P+D)/P x Saturation.
	Bound float64
}

// Analyze performs the bottleneck-free analysis of DualPath section 4.2: all storage NICs are
// saturated, the traffic is balanced, and the KV of uncached tokens is ignored. For each pair of a
// prefill and a decode engine, the traffic is T_p = B s/(D g^2) on the prefill path and T_c = B
// s/(P g^2) on the decode path. The load of a link is the sum over the pairs whose traffic crosses
// it.
func Analyze(c Cluster) (Analysis, error) {
	if err := c.Validate(); err != nil {
		return Analysis{}, err
	}
	p, d, g := float64(c.PrefillNodes), float64(c.DecodeNodes), float64(c.GPUs)
	b, s, m := c.CNIC, c.SNICs, c.DRAM
	tp, tc := b*s/(d*g*g), b*s/(p*g*g)
	a := Analysis{
		Cluster: c,
		Safe: Range{
			Low:  lowRatio(s, g),
			High: min((g-2*s)/s, (g-s)/(2*s), (m/(b*s)-3)/2),
		},
		Resources: []Resource{
			{"prefill CNIC, read", 2 * tp * d * g, b},      // paths 3 and 5 of Figure 4(a); equation 1
			{"prefill CNIC, write", (tp + tc) * d * g, b},  // 4(a) path 4, 4(b) path 5; equation 2
			{"decode CNIC, read", (tp + 2*tc) * p * g, b},  // 4(a) path 8, 4(b) paths 3 and 6; equation 4
			{"decode CNIC, write", (2*tp + tc) * p * g, b}, // 4(a) paths 7 and 9, 4(b) path 7; equation 6
			{"prefill DRAM", 2 * s * b, m},                 // in: storage reads; out: copies to the GPUs
			{"decode DRAM", (3 + 2*p/d) * s * b, m},        // equation 8
		},
	}
	for _, r := range a.Resources {
		if a.First.Name == "" || r.Utilization() > a.First.Utilization() {
			a.First = r
		}
	}
	a.Saturation = min(1, 1/a.First.Utilization())
	a.Bound = (p + d) / p * a.Saturation
	return a, nil
}

// lowRatio returns the lowest safe P/D, s/(g-s) (equation 3 of the paper), or infinity if s >= g.
func lowRatio(s, g float64) float64 {
	if s >= g {
		return math.Inf(1)
	}
	return s / (g - s)
}
