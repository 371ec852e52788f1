package netcost

import (
	"fmt"
	"math"
	"time"
)

// Tier is how far apart two instances are (§III-A).
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

// Place is where an instance stands, in the operator's names. An empty name is
// not known, and equal to none.
type Place struct{ Pod, Rack, Node string }

// TierOf is the tier between two places. A rack's name counts within its pod, a
// node's within its rack. What is not known is taken as far.
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

// Fabric is what hardware and topology say of each tier, B and L of §III-A: bytes
// a second of one path, and the base latency.
type Fabric struct {
	Bandwidth [Tiers]float64
	Latency   [Tiers]time.Duration
}

// Gbit is a gigabit a second, in bytes a second.
const Gbit = 1e9 / 8

// FatTree is the fabric of the paper's evaluation (§VI-A): NVLink at 450 GB/s, 100
// Gbit/s in the rack, 2:1 and 4:1 oversubscribed above.
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

// Congestion is the share of each tier that traffic other than the scheduler's
// takes, c of §III-D, in [0, 1).
type Congestion [Tiers]float64

// Validate returns an error that names the first value out of its range. A tier
// that is full has no place for a transfer at any price, so 1 is refused.
func (c *Congestion) Validate() error {
	for t, v := range c {
		if !(v >= 0 && v < 1) {
			return fmt.Errorf("netcost: congestion of tier %d (%v) is %v; it must be at least 0 and below 1", t, Tier(t), v)
		}
	}
	return nil
}

// Snapshot is what the oracle said last (§III-E): the four maps of the paper, and
// when the one that moves was measured.
type Snapshot[K comparable] struct {
	Fabric
	Congestion Congestion
	// Places are the instances' places, from which the tier map follows.
	Places map[K]Place
	// Pairs are tiers that the places don't give, source first. They go before.
	Pairs map[[2]K]Tier
	// At is when Congestion was measured, since an origin of the caller's choice.
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

// Tier is how far apart two instances are; what is not known is taken as far, but
// for an instance and itself.
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

// Age is how old the congestion is.
func (s *Snapshot[K]) Age(now time.Duration) time.Duration { return now - s.At }

// inFlight counts the scheduler's own transfers by source and tier (§V-C).
// Invariant: no count is negative.
type inFlight[K comparable] map[K]*[Tiers]int

// Oracle is a snapshot and the scheduler's own transfers: what Algorithm 1 reads.
// It is not safe for concurrent use.
type Oracle[K comparable] struct {
	model    Model
	snapshot Snapshot[K]
	own      inFlight[K]
}

// NewOracle returns an oracle that nothing is in flight for.
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

// Update replaces the snapshot. One that is out of range is refused with an
// error, and the last stays.
func (o *Oracle[K]) Update(s Snapshot[K]) error {
	if err := s.Validate(); err != nil {
		return err
	}
	o.snapshot = s
	return nil
}

// Measured replaces the congestion alone, as of at.
func (o *Oracle[K]) Measured(c Congestion, at time.Duration) error {
	if err := c.Validate(); err != nil {
		return err
	}
	o.snapshot.Congestion, o.snapshot.At = c, at
	return nil
}

// Snapshot returns what the oracle said last. Its maps are the oracle's.
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

// End counts a transfer that is complete or was given up. One that was never begun
// is ignored.
func (o *Oracle[K]) End(from K, t Tier) {
	n := o.own[from]
	if n == nil || n[t] == 0 {
		return
	}
	if n[t]--; *n == [Tiers]int{} {
		delete(o.own, from)
	}
}

// InFlight is how many transfers of the scheduler's leave from on the tier.
func (o *Oracle[K]) InFlight(from K, t Tier) int {
	if n := o.own[from]; n != nil {
		return n[t]
	}
	return 0
}

// Bandwidth is what one more transfer gets, Beff of eq. 4, bytes a second. The
// count is capped where it is read, so that what is above the cap is not forgotten
// when it ends.
func (o *Oracle[K]) Bandwidth(from K, t Tier) float64 {
	return o.bandwidth(from, t, signals{congestion: true, own: true})
}

// way is how one more transfer gets from one instance to another: bytes a second,
// and seconds.
type way struct {
	tier               Tier
	bandwidth, latency float64
}

// way returns the way between two instances.
func (o *Oracle[K]) way(from, to K, see signals) way {
	t := o.snapshot.Tier(from, to)
	return way{t, o.bandwidth(from, t, see), o.snapshot.Latency[t].Seconds()}
}

// signals are the dynamic inputs of eq. 4 that a policy is allowed to see.
type signals struct{ congestion, own bool }

// bandwidth is eq. 4 with some of its inputs withheld.
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
