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

// Place is the location of an instance, in the operator's names. An empty name is unknown, and
// equal to no other name.
type Place struct{ Pod, Rack, Node string }

// TierOf returns the tier between two places. A rack's name is unique within its pod, a node's
// within its rack. Unknown places count as far apart.
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

// Fabric has the properties of each tier's hardware and topology, B and L of §III-A: bandwidth of
// one path in bytes per second, and base latency.
type Fabric struct {
	Bandwidth [Tiers]float64
	Latency   [Tiers]time.Duration
}

// Gbit is one gigabit per second, in bytes per second.
const Gbit = 1e9 / 8

// FatTree returns the fabric of the paper's evaluation (§VI-A): NVLink at 450 GB/s, 100 Gbit/s in
// the rack, oversubscribed 2:1 and 4:1 above.
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

// Congestion is the share of each tier that traffic other than the scheduler's uses, c of §III-D,
// in [0, 1).
type Congestion [Tiers]float64

// Validate returns an error that names the first value out of its range. A transfer on a full tier
// would take forever, so 1 is refused.
func (c *Congestion) Validate() error {
	for t, v := range c {
		if !(v >= 0 && v < 1) {
			return fmt.Errorf("netcost: congestion of tier %d (%v) is %v; it must be at least 0 and below 1", t, Tier(t), v)
		}
	}
	return nil
}

// Snapshot is the last state of the oracle (§III-E): the four maps of the paper, and the time at
// which the congestion was measured.
type Snapshot[K comparable] struct {
	Fabric
	Congestion Congestion
	// Places has the instances' places, from which the tiers follow.
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

// Tier returns the tier between two instances. An unknown instance counts as far from all others,
// but not from itself.
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

// Age returns the age of the congestion.
func (s *Snapshot[K]) Age(now time.Duration) time.Duration { return now - s.At }

// inFlight counts the scheduler's own transfers by source and tier (§V-C). Invariant: no count is
// negative.
type inFlight[K comparable] map[K]*[Tiers]int

// Oracle has a snapshot and the scheduler's own transfers: the inputs of Algorithm 1. It is not
// safe for concurrent use.
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

// Update replaces the snapshot. A snapshot that is out of range is refused with an error, and the
// last one stays.
func (o *Oracle[K]) Update(s Snapshot[K]) error {
	if err := s.Validate(); err != nil {
		return err
	}
	o.snapshot = s
	return nil
}

// Measured replaces only the congestion, measured at time at.
func (o *Oracle[K]) Measured(c Congestion, at time.Duration) error {
	if err := c.Validate(); err != nil {
		return err
	}
	o.snapshot.Congestion, o.snapshot.At = c, at
	return nil
}

// Snapshot returns the current snapshot. Its maps belong to the oracle.
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

// InFlight returns the number of the scheduler's transfers that leave from on the tier.
func (o *Oracle[K]) InFlight(from K, t Tier) int {
	if n := o.own[from]; n != nil {
		return n[t]
	}
	return 0
}

// Bandwidth returns the bandwidth of one more transfer, Beff of eq. 4, in bytes per second. The
// count is capped when it is read, so that transfers above the cap are still counted until they
// end.
func (o *Oracle[K]) Bandwidth(from K, t Tier) float64 {
	return o.bandwidth(from, t, signals{congestion: true, own: true})
}

// way has the bandwidth of one more transfer between two instances, in bytes per second, and the
// latency in seconds.
type way struct {
	tier               Tier
	bandwidth, latency float64
}

// way returns the bandwidth and the latency of one more transfer between two instances.
func (o *Oracle[K]) way(from, to K, see signals) way {
	t := o.snapshot.Tier(from, to)
	return way{t, o.bandwidth(from, t, see), o.snapshot.Latency[t].Seconds()}
}

// signals are the dynamic inputs of eq. 4 that a policy may use.
type signals struct{ congestion, own bool }

// bandwidth is eq. 4 with only the inputs in see.
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
