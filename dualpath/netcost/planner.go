package netcost

import (
	"fmt"
	"math"

	"github.com/penstock-kv/penstock/dualpath"
)

// Planner is the cost model for a dualpath.Planner. The instances of the model are machines,
// because the engines of one machine share its links. Each dualpath.Planner needs a Planner of its
// own.
type Planner struct {
	oracle  *Oracle[dualpath.NodeID]
	chooser *Chooser[dualpath.NodeID]
	// candidates is reused by Choose.
	candidates []Candidate[dualpath.NodeID]
	// bytes is the size of one token's KV.
	bytes   float64
	overlap bool
	made    PlannerOptions
}

// PlannerOptions are the options of a Planner.
type PlannerOptions struct {
	Model Model
	// Policy and Weights are the arguments of NewChooser. The default policy is Full.
	Policy  Policy
	Weights Weights
	// Fabric is the network until the operator's first report.
	Fabric Fabric
	// BytesPerToken is the size of one token's KV.
	BytesPerToken int
	// Overlap is set if the two hops of a read move different layers at the same time, so that only
	// the slower hop counts. By default the hops run one after the other, and the sum of their
	// times counts (§VII-D of the NetKV paper).
	Overlap bool
}

var _ dualpath.Network = (*Planner)(nil)

// NewPlanner returns a cost model that has no positions of machines yet: until the first report,
// all machines count as far from each other.
func NewPlanner(o PlannerOptions) (*Planner, error) {
	if o.BytesPerToken <= 0 {
		return nil, fmt.Errorf("netcost: %d bytes of KV a token; the model's must be given", o.BytesPerToken)
	}
	oracle, err := NewOracle(o.Model, Snapshot[dualpath.NodeID]{Fabric: o.Fabric})
	if err != nil {
		return nil, err
	}
	chooser, err := NewChooser(o.Policy, o.Weights, oracle)
	if err != nil {
		return nil, err
	}
	return &Planner{oracle: oracle, chooser: chooser, bytes: float64(o.BytesPerToken), overlap: o.Overlap, made: o}, nil
}

// Options returns the options of the cost model. A new Planner with these options computes the same
// costs from the same reports.
func (p *Planner) Options() PlannerOptions { return p.made }

// SnapshotOf converts a report to a snapshot.
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

// Update implements dualpath.Network. It ignores an invalid report. So the report should be
// validated (SnapshotOf, then Validate) before it is given to the dualpath.Planner as an event.
func (p *Planner) Update(r *dualpath.NetworkReport) { _ = p.oracle.Update(SnapshotOf(r)) }

// Oracle returns the oracle, with the last report and the transfers in flight.
func (p *Planner) Oracle() *Oracle[dualpath.NodeID] { return p.oracle }

// hop returns the hop of a new transfer from one machine to another.
func (p *Planner) hop(from, to dualpath.NodeID) Hop {
	w := p.oracle.way(from, to, signals{congestion: true, own: true})
	return Hop{Bandwidth: w.bandwidth, Latency: w.latency}
}

// Reserve implements dualpath.Network.
func (p *Planner) Reserve() int { return int(math.Ceil(float64(p.oracle.model.Reserve) / p.bytes)) }

// Choose implements dualpath.Network with the Chooser. Of an engine's requests, up to MaxBatch
// count as its batch and the rest as queued.
func (p *Planner) Choose(r *dualpath.Transfer, candidates []dualpath.Candidate) (index int, seconds float64) {
	m := &p.oracle.model
	p.candidates = p.candidates[:0]
	for i := range candidates {
		c := &candidates[i]
		batch := min(c.Requests, m.MaxBatch)
		p.candidates = append(p.candidates, Candidate[dualpath.NodeID]{
			ID: c.Node, Hit: c.Hit, Free: int64(float64(c.Free) * p.bytes), Queued: c.Requests - batch, Batch: batch,
		})
	}
	q := Request[dualpath.NodeID]{ID: uint64(r.Request), From: r.From, Tokens: r.Tokens, Bytes: int64(float64(r.Tokens) * p.bytes)}
	d, err := p.chooser.Choose(&q, p.candidates)
	if err != nil {
		return -1, 0 // no candidate has the memory
	}
	return d.Index, d.Cost.Total()
}

// Read implements dualpath.Network for two hops: from storage to the buffer of machine via, and
// from that buffer to the target machine.
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
	t := p.oracle.snapshot.Tier(from, to)
	p.oracle.Begin(from, t)
	return uint8(t)
}

// End implements dualpath.Network.
func (p *Planner) End(from dualpath.NodeID, tier uint8) { p.oracle.End(from, Tier(tier)) }
