package redistribute

import (
	"fmt"
	"math"
)

// Fabric has the performance constants of one network path between two instances. `penstock fabric
// probe` writes them and `penstock plan redistribute --fabric` reads them.
type Fabric struct {
	Name string `json:"name" yaml:"name"`
	// Probe is the round trip of a signal without payload, in seconds: T_probe.
	Probe float64 `json:"probe_seconds" yaml:"probe_seconds"`
	// Turnaround is the time of a round trip with payload, in seconds, minus Probe and minus the
	// transfer time of its bytes. The paper does not fit this constant. It reports the residual of
	// small batches (section 4.3: about 9 us).
	Turnaround float64 `json:"turnaround_seconds" yaml:"turnaround_seconds"`
	// Bandwidth is the bandwidth of a round trip of a query and its result, in bytes per second:
	// BW. On a GPU it is the rate of one thread block, which is lower than the rate of the link
	// (section 8).
	Bandwidth float64 `json:"bandwidth_bytes_per_second" yaml:"bandwidth_bytes_per_second"`
	// Bulk is the bandwidth of a fetch of contiguous KV, in bytes per second; 0 means Bandwidth.
	Bulk float64 `json:"bulk_bytes_per_second,omitempty" yaml:"bulk_bytes_per_second"`
	// MAPE is the mean absolute relative error of the fit over transfers that take longer than the
	// probe (0.07 is 7 %); 0 means unknown. It does not affect costs.
	MAPE float64 `json:"mape,omitempty" yaml:"mape"`
	// Contention is the effect of other flows on the link.
	Contention Contention `json:"contention,omitzero" yaml:"contention"`
}

// Contention is the model of section 8, "Congestion": with up to Free other flows a round trip
// takes as long as without them. With one more flow the link is fully subscribed: the probe takes
// Probe times as long, and a byte Transfer times as long. With more flows, both times grow in
// proportion to the number of flows, because the flows share a full link. The paper has no
// measurements for more flows. The zero value has no effect.
type Contention struct {
	Free     int     `json:"free_flows,omitempty" yaml:"free_flows"`
	Probe    float64 `json:"probe_factor,omitempty" yaml:"probe_factor"`
	Transfer float64 `json:"transfer_factor,omitempty" yaml:"transfer_factor"`
}

// Under returns the fabric with the given number of other flows on the same link.
func (f Fabric) Under(flows int) Fabric {
	c := f.Contention
	if c == (Contention{}) || flows <= c.Free {
		return f
	}
	more := float64(flows) / float64(c.Free+1)
	f.Probe *= c.Probe * more
	f.Bandwidth /= c.Transfer * more
	if f.Bulk > 0 {
		f.Bulk /= c.Transfer * more
	}
	return f
}

// RoundTrip returns the transport time in seconds, for the sum of the bytes in both directions.
func (f Fabric) RoundTrip(bytes float64) float64 {
	return f.Probe + f.Turnaround + bytes/f.Bandwidth
}

// bulk returns the bandwidth of a fetch.
func (f Fabric) bulk() float64 {
	if f.Bulk > 0 {
		return f.Bulk
	}
	return f.Bandwidth
}

// Validate returns an error that names the first constant out of its range.
func (f Fabric) Validate() error {
	if !(f.Bandwidth > 0) || math.IsInf(f.Bandwidth, 0) {
		return fmt.Errorf("redistribute: fabric %q: bandwidth of %v bytes/s; it must be positive", f.Name, f.Bandwidth)
	}
	for _, x := range []struct {
		name  string
		value float64
	}{{"probe", f.Probe}, {"turnaround", f.Turnaround}, {"bulk bandwidth", f.Bulk}, {"MAPE", f.MAPE}} {
		if !(x.value >= 0) || math.IsInf(x.value, 0) {
			return fmt.Errorf("redistribute: fabric %q: %s of %v; it must be zero or positive", f.Name, x.name, x.value)
		}
	}
	if c := f.Contention; c != (Contention{}) && !(c.Free >= 0 && c.Probe >= 1 && c.Transfer >= 1 && !math.IsInf(c.Probe+c.Transfer, 0)) {
		return fmt.Errorf("redistribute: fabric %q: contention %+v: free flows must not be negative, and both factors at least 1", f.Name, c)
	}
	return nil
}

// Fabrics returns the five fabrics that the paper measured, in the order of its Table 2, with the
// probe and the bandwidth of a single thread block. Bulk is the peak bandwidth of the link (section
// 8); for PCIe Gen4 it is the fitted bandwidth, because there the link is the limit. The paper
// states a turnaround only for the first fabric. Only the first has a Contention. Its probe factor
// is the ratio of the measured probes with and without three other flows, 39.5/14.5. Its transfer
// factor is 2.2, which agrees with the measured 95 us at 256 rows and 250 us at 1024 rows.
func Fabrics() []Fabric {
	const us, gb = 1e-6, 1e9
	return []Fabric{
		{Name: "h100-ibgda", Probe: 16 * us, Turnaround: 9 * us, Bandwidth: 24.7 * gb, Bulk: 25 * gb, MAPE: 0.07, Contention: Contention{Free: 2, Probe: 39.5 / 14.5, Transfer: 2.2}},
		{Name: "h100-nvlink4", Probe: 1.2 * us, Bandwidth: 21 * gb, Bulk: 125 * gb, MAPE: 0.03},
		{Name: "a100-nvlink3", Probe: 1.6 * us, Bandwidth: 18 * gb, Bulk: 235 * gb, MAPE: 0.04},
		{Name: "rtx-pro-6000-pcie5", Probe: 4.8 * us, Bandwidth: 22 * gb, Bulk: 41 * gb, MAPE: 0.02},
		{Name: "a40-pcie4", Probe: 8.7 * us, Bandwidth: 19 * gb, Bulk: 19 * gb, MAPE: 0.13},
	}
}

// FabricNamed returns one of Fabrics.
func FabricNamed(name string) (Fabric, error) {
	var known []string
	for _, f := range Fabrics() {
		if f.Name == name {
			return f, nil
		}
		known = append(known, f.Name)
	}
	return Fabric{}, fmt.Errorf("redistribute: fabric %q: it must be one of %v", name, known)
}
