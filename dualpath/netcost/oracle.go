package netcost

import (
	"fmt"
	"math"
	"time"
)

// Tier is the distance between two instances (§III-A).
type Tier uint8

// Tiers of a fat tree.
const (
	SameNode Tier = iota // NVLink or PCIe
	SameRack             // one top-of-rack switch
	SamePod              // aggregation or spine
	CrossPod             // core
	Tiers    = 4
)

var tierNames = [Tiers]string{"same node", "same rack", "same pod", "cross pod"}

// String returns the tier's name.
func (t Tier) String() string {
	if t < Tiers {
		return tierNames[t]
	}
	return fmt.Sprintf("tier %d", uint8(t))
}

// Place is the location of an instance, in the operator's names. An empty name means unknown, and
// two unknown names are not equal.
type Place struct{ Pod, Rack, Node string }

// TierOf returns the tier between two places. The name of a rack is unique only within its pod, the
// name of a node only within its rack. Places with unknown names count as far apart.
func TierOf(a, b Place) Tier {
	switch {
	case a.Pod == "" || a.Pod != b.Pod:
		return CrossPod
	case a.Rack == "" || a.Rack != b.Rack:
		return SamePod
	case a.Node == "" || a.Node != b.Node:
		return SameRack
	}
	return SameNode
}

// Fabric has the bandwidth of one path of each tier in bytes per second, and the latency of an idle
// path (B and L in §III-A).
type Fabric struct {
	Bandwidth [Tiers]float64
	Latency   [Tiers]time.Duration
}

// Gbit is one gigabit per second, in bytes per second.
const Gbit = 1e9 / 8

// FatTree returns the fabric of the paper's evaluation (§VI-A): NVLink at 450 GB/s within a node,
// 100 Gbit/s within a rack, oversubscribed 2:1 between racks and 4:1 between pods.
func FatTree() Fabric {
	return Fabric{
		Bandwidth: [Tiers]float64{450e9, 100 * Gbit, 50 * Gbit, 25 * Gbit},
		Latency:   [Tiers]time.Duration{time.Microsecond, 3 * time.Microsecond, 8 * time.Microsecond, 15 * time.Microsecond},
	}
}

// Validate returns an error that names the first value out of its range.
func (f *Fabric) Validate() error {
	for t := range Tier(Tiers) {
		if b := f.Bandwidth[t]; !(b > 0) || math.IsInf(b, 1) {
			return fmt.Errorf("netcost: bandwidth of tier %d (%v) is %v B/s; it must be a number above 0", t, t, b)
		}
		if l := f.Latency[t]; l < 0 {
			return fmt.Errorf("netcost: latency of tier %d (%v) is %v; it must not be negative", t, t, l)
		}
	}
	return nil
}

// Congestion has, for each tier, the share of the bandwidth that is taken by traffic other than the
// scheduler's own transfers, in [0, 1) (c in §III-D).
type Congestion [Tiers]float64

// Validate returns an error that names the first value out of its range. It refuses 1, because a
// transfer on a full tier would never end.
func (c *Congestion) Validate() error {
	for t, v := range c {
		if !(v >= 0 && v < 1) {
			return fmt.Errorf("netcost: congestion of tier %d (%v) is %v; it must be at least 0 and below 1", t, Tier(t), v)
		}
	}
	return nil
}

// Snapshot is the state of the network that the operator's oracle reports (§III-E of the NetKV
// paper): the paper's four maps, and the time at which the congestion was measured.
type Snapshot[K comparable] struct {
	Fabric
	Congestion Congestion
	// Places has the position of each instance. The tier between two instances follows from their
	// positions.
	Places map[K]Place
	// Pairs overrides Places. Its keys are (source, target).
	Pairs map[[2]K]Tier
	// At is the time at which Congestion was measured, since an origin that the caller chooses.
	At time.Duration
}

// Validate returns an error that names the first value out of its range.
func (s *Snapshot[K]) Validate() error {
	if err := s.Fabric.Validate(); err != nil {
		return err
	}
	for pair, t := range s.Pairs {
		if t >= Tiers {
			return fmt.Errorf("netcost: tier of %v to %v is %d; there are tiers 0 to %d", pair[0], pair[1], t, Tiers-1)
		}
	}
	return s.Congestion.Validate()
}

// Tier returns the tier between two instances. An instance without a position counts as far from
// all others.
func (s *Snapshot[K]) Tier(from, to K) Tier {
	if from == to {
		return SameNode
	}
	if len(s.Pairs) > 0 {
		if t, ok := s.Pairs[[2]K{from, to}]; ok {
			return t
		}
	}
	return TierOf(s.Places[from], s.Places[to])
}

// Age returns the time since the congestion was measured.
func (s *Snapshot[K]) Age(now time.Duration) time.Duration { return now - s.At }

// inFlight counts the transfers in progress that the scheduler itself ordered, by source and tier
// (§V-C of the NetKV paper). Invariant: no count is negative.
type inFlight[K comparable] map[K]*[Tiers]int

// Oracle has a snapshot of the network and the scheduler's own transfers in progress: the inputs of
// the NetKV paper's Algorithm 1. An Oracle is not safe for concurrent use.
type Oracle[K comparable] struct {
	model    Model
	snapshot Snapshot[K]
	own      inFlight[K]
}

// NewOracle returns an oracle without transfers in flight.
func NewOracle[K comparable](m Model, s Snapshot[K]) (*Oracle[K], error) {
	m.EnsureDefaults()
	o := &Oracle[K]{model: m, own: inFlight[K]{}}
	if err := m.Validate(); err != nil {
		return nil, err
	}
	if err := o.Update(s); err != nil {
		return nil, err
	}
	return o, nil
}

// Update replaces the snapshot. If the new snapshot has a value out of its range, Update returns an
// error and keeps the previous snapshot.
func (o *Oracle[K]) Update(s Snapshot[K]) error {
	if err := s.Validate(); err != nil {
		return err
	}
	o.snapshot = s
	return nil
}

// Measured replaces only the congestion. at is the time at which it was measured.
func (o *Oracle[K]) Measured(c Congestion, at time.Duration) error {
	if err := c.Validate(); err != nil {
		return err
	}
	o.snapshot.Congestion, o.snapshot.At = c, at
	return nil
}

// Snapshot returns the current snapshot, which belongs to the oracle.
func (o *Oracle[K]) Snapshot() *Snapshot[K] { return &o.snapshot }

// Model returns the model.
func (o *Oracle[K]) Model() *Model { return &o.model }

// Begin counts a transfer that was dispatched.
func (o *Oracle[K]) Begin(from K, t Tier) {
	n := o.own[from]
	if n == nil {
		n = new([Tiers]int)
		o.own[from] = n
	}
	n[t]++
}

// End counts a transfer that completed or was cancelled. A transfer that was never begun is
// ignored.
func (o *Oracle[K]) End(from K, t Tier) {
	n := o.own[from]
	if n == nil || n[t] == 0 {
		return
	}
	if n[t]--; *n == [Tiers]int{} {
		delete(o.own, from)
	}
}

// InFlight returns the number of the scheduler's own transfers in progress from a source over a
// tier.
func (o *Oracle[K]) InFlight(from K, t Tier) int {
	if n := o.own[from]; n != nil {
		return n[t]
	}
	return 0
}

// Bandwidth returns the bandwidth that one more transfer would get, in bytes per second (Beff in
// eq. 4 of the NetKV paper). Bandwidth caps the number of transfers in progress; Begin does not cap
// it, so that each End matches a Begin.
func (o *Oracle[K]) Bandwidth(from K, t Tier) float64 {
	return o.bandwidth(from, t, signals{congestion: true, own: true})
}

// way has the bandwidth that one more transfer between two instances would get, in bytes per
// second, and the latency in seconds.
type way struct {
	tier               Tier
	bandwidth, latency float64
}

// way returns the bandwidth and the latency of one more transfer between two instances.
func (o *Oracle[K]) way(from, to K, see signals) way {
	t := o.snapshot.Tier(from, to)
	return way{t, o.bandwidth(from, t, see), o.snapshot.Latency[t].Seconds()}
}

// signals selects the changing inputs of eq. 4 that a policy uses: the congestion, and the
// scheduler's own transfers.
type signals struct{ congestion, own bool }

// bandwidth computes eq. 4 with only the inputs that see selects.
func (o *Oracle[K]) bandwidth(from K, t Tier, see signals) float64 {
	b := o.snapshot.Bandwidth[t]
	if see.congestion {
		b *= 1 - o.snapshot.Congestion[t]
	}
	if see.own && !o.model.CongestionHasOwn {
		b /= float64(1 + min(o.InFlight(from, t), o.model.InFlightMax))
	}
	return b
}
