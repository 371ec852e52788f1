package netcost

import (
	"fmt"

	"github.com/penstock-kv/penstock/dualpath"
)

// Planner is the cost model as the planner node asks it. Machines stand for
// instances: engines of one machine share its links. It serves one
// dualpath.Planner.
type Planner struct {
	oracle *Oracle[dualpath.NodeID]
	// bytes are the KV's of one token.
	bytes   float64
	overlap bool
	made    PlannerOptions
}

// PlannerOptions of a Planner.
type PlannerOptions struct {
	Model Model
	// Fabric is taken until a report comes.
	Fabric Fabric
	// BytesPerToken is the size of one token's KV.
	BytesPerToken int
	// Overlap: the two hops of a read move different layers at the same time, so
	// the slower one alone counts. Default: one after the other, the sum (§VII-D).
	Overlap bool
}

var _ dualpath.Network = (*Planner)(nil)

// NewPlanner returns a cost model that knows no machine's place: all are far from
// each other.
func NewPlanner(o PlannerOptions) (*Planner, error) {
	if o.BytesPerToken <= 0 {
		return nil, fmt.Errorf("netcost: %d bytes of KV a token; the model's must be given", o.BytesPerToken)
	}
	oracle, err := NewOracle(o.Model, Snapshot[dualpath.NodeID]{Fabric: o.Fabric})
	if err != nil {
		return nil, err
	}
	return &Planner{oracle, float64(o.BytesPerToken), o.Overlap, o}, nil
}

// Options returns what the cost model was made of: another one, given the same
// reports, costs the same.
func (p *Planner) Options() PlannerOptions { return p.made }

// SnapshotOf is a report as a snapshot.
func SnapshotOf(r *dualpath.NetworkReport) Snapshot[dualpath.NodeID] {
	s := Snapshot[dualpath.NodeID]{
		Fabric: Fabric{r.Bandwidth, r.Latency}, Congestion: r.Congestion, At: r.Measured,
		Places: make(map[dualpath.NodeID]Place, len(r.Places)),
	}
	for _, p := range r.Places {
		s.Places[p.Node] = Place{p.Pod, p.Rack, p.Host}
	}
	return s
}

// Update implements dualpath.Network. Validate a report's SnapshotOf before it is
// an event: here it can only be ignored.
func (p *Planner) Update(r *dualpath.NetworkReport) { _ = p.oracle.Update(SnapshotOf(r)) }

// Oracle returns what the planner was told last, and what it has in flight.
func (p *Planner) Oracle() *Oracle[dualpath.NodeID] { return p.oracle }

// tier is how far apart two machines are; one is near itself whatever is known.
func (p *Planner) tier(from, to dualpath.NodeID) Tier {
	if from == to {
		return SameNode
	}
	return p.oracle.snapshot.Tier(from, to)
}

// hop is one more transfer from one machine to another.
func (p *Planner) hop(from, to dualpath.NodeID) Hop {
	t := p.tier(from, to)
	return Hop{Bandwidth: p.oracle.Bandwidth(from, t), Latency: p.oracle.snapshot.Latency[t].Seconds()}
}

// Decode implements dualpath.Network: eq. 5. What the planner has given to an
// engine is in its batch as far as there is room, and waits beyond.
func (p *Planner) Decode(from, to dualpath.NodeID, tokens, requests int) float64 {
	m := &p.oracle.model
	batch := min(requests, m.MaxBatch)
	return Seconds(float64(tokens)*p.bytes, p.hop(from, to)) + m.Wait(requests-batch, batch) + m.Iteration(min(batch+1, m.MaxBatch))
}

// Read implements dualpath.Network: two hops, from storage over via's buffer.
func (p *Planner) Read(via, to dualpath.NodeID, queue int, rate float64) (fixed, perToken float64) {
	storage, onward := Hop{Bandwidth: rate * p.bytes, Queued: float64(queue) * p.bytes}, p.hop(via, to)
	fixed, slope := line([]Hop{storage, onward})
	if p.overlap {
		slope = max(1/storage.Bandwidth, 1/onward.Bandwidth)
	}
	return fixed, slope * p.bytes
}

// Begin implements dualpath.Network.
func (p *Planner) Begin(from, to dualpath.NodeID) uint8 {
	t := p.tier(from, to)
	p.oracle.Begin(from, t)
	return uint8(t)
}

// End implements dualpath.Network.
func (p *Planner) End(from dualpath.NodeID, tier uint8) { p.oracle.End(from, Tier(tier)) }
