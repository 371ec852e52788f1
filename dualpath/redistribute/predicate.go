package redistribute

import (
	"fmt"
	"math"
)

// Primitive is the way in which a request attends to a chunk.
type Primitive uint8

// The primitives. Among equal costs Decide chooses the first one in this order, which puts fewer
// bytes first.
const (
	Route Primitive = iota
	Fetch
	Local
	primitives
)

var primitiveNames = [...]string{"route", "fetch", "local"}

// String returns route, fetch or local.
func (p Primitive) String() string {
	if int(p) < len(primitiveNames) {
		return primitiveNames[p]
	}
	return fmt.Sprintf("primitive %d", uint8(p))
}

// MarshalText encodes the primitive as String does, for JSON.
func (p Primitive) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// Reuse is the relation between the chunk and the request.
type Reuse uint8

const (
	// Moved: the chunk is contiguous, at another position than the one at which it was cached.
	// Fetch pays the splice once, and later steps reuse the fetched chunk.
	Moved Reuse = iota
	// Prefix: the chunk is contiguous, at the position at which it was cached. So fetch needs no
	// splice, which would rotate the keys to a new position (section 6.3).
	Prefix
	// Selected: in every step an indexer selects tokens (section 5.4). The tokens keep their
	// positions, so fetch needs no splice, but each fetch serves only one step.
	Selected
)

var reuseNames = [...]string{"moved", "prefix", "selected"}

// String returns moved, prefix or selected.
func (r Reuse) String() string {
	if int(r) < len(reuseNames) {
		return reuseNames[r]
	}
	return fmt.Sprintf("reuse %d", uint8(r))
}

// ParseReuse is the inverse of String.
func ParseReuse(s string) (Reuse, error) {
	for i, n := range reuseNames {
		if s == n {
			return Reuse(i), nil
		}
	}
	return 0, fmt.Errorf("redistribute: reuse %q: it must be one of %v", s, reuseNames)
}

// Request is one chunk that one request attends to.
type Request struct {
	// Rows is the number of rows of the query batch (M_q in the paper). Tokens is the number of
	// tokens of the chunk, or of the selection over all holders (c_t).
	Rows, Tokens int
	Reuse        Reuse
	// Holders is the number of holders among which the tokens are spread (M). Default 1. It may
	// exceed 1 only for Selected tokens.
	Holders int
	// Steps is the number of steps in which the requester attends to the chunk; default 1. Fetch
	// and local pay once for all steps, unless the tokens are Selected.
	Steps int
	// Trips is the number of round trips of route per step. The default is 1, as in the paper. If
	// each layer's query depends on the layer before, Trips must be the number of layers with
	// attention.
	Trips int
	// Requesters is the number of requesters that the busiest holder serves concurrently, this one
	// included; default 1.
	Requesters int
	// Flows is the number of other flows on the same link.
	Flows int
	// NoRoute, NoFetch and NoLocal exclude a primitive. NoRoute: the holder cannot compute.
	// NoFetch: the requester's KV pool has no room. NoLocal: the requester does not have the
	// chunk's token ids.
	NoRoute, NoFetch, NoLocal bool
}

// EnsureDefaults fills the fields that are zero.
func (r *Request) EnsureDefaults() {
	for _, p := range []*int{&r.Holders, &r.Steps, &r.Trips, &r.Requesters} {
		if *p == 0 {
			*p = 1
		}
	}
}

// maxCount bounds every count of a request, so that no cost overflows.
const maxCount = 1 << 40

// Validate returns an error that names the first count out of its range.
func (r Request) Validate() error {
	for _, f := range []struct {
		name       string
		value, min int
	}{{"query rows", r.Rows, 1}, {"tokens", r.Tokens, 1}, {"holders", r.Holders, 1}, {"steps", r.Steps, 1}, {"round trips a step", r.Trips, 1}, {"requesters", r.Requesters, 1}, {"other flows", r.Flows, 0}} {
		if f.value < f.min || f.value > maxCount {
			return fmt.Errorf("redistribute: %s: %d; it must be between %d and 2^40", f.name, f.value, f.min)
		}
	}
	switch {
	case r.Reuse > Selected:
		return fmt.Errorf("redistribute: reuse %d: it must be one of %v", uint8(r.Reuse), reuseNames)
	case r.Holders > 1 && r.Reuse != Selected:
		return fmt.Errorf("redistribute: a %s chunk on %d holders: only selected tokens are scattered; ask for each holder's chunk by itself", r.Reuse, r.Holders)
	case r.Holders > r.Tokens:
		return fmt.Errorf("redistribute: %d tokens on %d holders: a holder without a token is none", r.Tokens, r.Holders)
	case r.NoRoute && r.NoFetch && r.NoLocal:
		return fmt.Errorf("redistribute: route, fetch and local are all ruled out: nothing is left to choose")
	}
	return nil
}

// Terms are the parts of a cost, summed over all steps, in seconds.
type Terms struct {
	Probe      float64 `json:"probe,omitempty"`
	Turnaround float64 `json:"turnaround,omitempty"`
	Transfer   float64 `json:"transfer,omitempty"` // query rows there
	Compute    float64 `json:"compute,omitempty"`  // partial attention of the holder
	Return     float64 `json:"return,omitempty"`   // partials back
	Merge      float64 `json:"merge,omitempty"`
	Host       float64 `json:"host,omitempty"`
	Pull       float64 `json:"pull,omitempty"`   // the chunk's bytes
	Gather     float64 `json:"gather,omitempty"` // handshakes with the holders
	Splice     float64 `json:"splice,omitempty"`
	Prefill    float64 `json:"prefill,omitempty"`
}

// Sum returns the cost.
func (t Terms) Sum() float64 {
	return t.Probe + t.Turnaround + t.Transfer + t.Compute + t.Return + t.Merge + t.Host + t.Pull + t.Gather + t.Splice + t.Prefill
}

// Cost is the cost of one primitive.
type Cost struct {
	Primitive Primitive `json:"primitive"`
	// Seconds is the time over all steps; Terms are its parts.
	Seconds float64 `json:"seconds"`
	Terms   Terms   `json:"terms"`
	// Bytes is the number of bytes that cross the fabric.
	Bytes float64 `json:"bytes"`
	// Barred is set if the request excludes the primitive.
	Barred bool `json:"barred,omitempty"`
}

// Decision is the result of Decide.
type Decision struct {
	Winner Primitive
	// Costs has the cost of each primitive, including excluded ones. The index is the Primitive.
	Costs [primitives]Cost
	// Replicas is the number of copies of the chunk that the number of requesters justifies: one
	// for each FanIn requesters (section 6.3). If it is above 1, further copies pay off whichever
	// primitive is the winner.
	Replicas int
}

// Decide returns the cheapest primitive that is not excluded. Among equal costs, route is chosen
// before fetch and fetch before local. Decide allocates nothing unless it returns an error.
func (m Model) Decide(r Request) (Decision, error) {
	r.EnsureDefaults()
	if err := m.Validate(); err != nil {
		return Decision{}, err
	}
	if err := r.Validate(); err != nil {
		return Decision{}, err
	}
	m.Fabric = m.Fabric.Under(r.Flows)
	d := Decision{Costs: [primitives]Cost{m.route(r), m.fetch(r), m.local(r)}, Replicas: Replicas(r.Requesters)}
	best := math.Inf(1)
	for p := range d.Costs {
		c := &d.Costs[p]
		c.Seconds = c.Terms.Sum()
		if !c.Barred && c.Seconds < best {
			best, d.Winner = c.Seconds, c.Primitive
		}
	}
	return d, nil
}

// Replicas returns the number of copies of a chunk that the given number of requesters justifies.
func Replicas(requesters int) int { return max(1, (requesters+FanIn-1)/FanIn) }

// route returns the cost of route. Each step has r.Trips round trips. In each, the requester sends
// a copy of the rows to each holder over one link, the holders compute concurrently, and one merge
// combines their partial results.
func (m Model) route(r Request) Cost {
	trips := float64(r.Steps) * float64(r.Trips)
	rows := float64(r.Holders) * float64(r.Rows)
	f := m.Fabric
	return Cost{
		Primitive: Route, Barred: r.NoRoute,
		Bytes: trips * m.Payload.RouteBytes(r.Rows, r.Holders),
		Terms: Terms{
			Probe: trips * f.Probe, Turnaround: trips * f.Turnaround,
			Transfer: trips * rows * float64(m.Payload.Query) / f.Bandwidth,
			Return:   trips * rows * float64(m.Payload.Partial) / f.Bandwidth,
			Compute:  trips * m.Holder.Seconds(r.Requesters),
			Merge:    trips * m.Merge,
			Host:     float64(r.Steps) * (m.Host.Fixed + m.Host.Row*float64(r.Rows)),
		},
	}
}

// fetch returns the cost of fetch. The chunk is fetched once for all steps; a selection is fetched
// in each step.
func (m Model) fetch(r Request) Cost {
	bytes := m.Payload.ChunkBytes(r.Tokens)
	c := Cost{Primitive: Fetch, Barred: r.NoFetch, Bytes: bytes}
	switch r.Reuse {
	case Selected:
		steps, rate := float64(r.Steps), m.Fabric.bulk()
		if m.Gather.Bandwidth > 0 {
			rate = min(rate, m.Gather.Bandwidth)
		}
		c.Bytes *= steps
		c.Terms.Pull = steps * bytes / rate
		c.Terms.Gather = steps * m.Gather.Holder * float64(r.Holders) * float64(m.Payload.Layers)
	case Moved:
		c.Terms.Splice = m.Splice
		fallthrough
	default:
		c.Terms.Pull = bytes / m.Fabric.bulk()
	}
	return c
}

// local returns the cost of a prefill of the tokens. For Selected tokens the cost is a lower bound,
// because the tokens before them would have to be computed as well.
func (m Model) local(r Request) Cost {
	once := float64(r.Tokens) * float64(m.Payload.Layers) * m.Prefill
	if r.Reuse == Selected {
		once *= float64(r.Steps)
	}
	return Cost{Primitive: Local, Barred: r.NoLocal, Terms: Terms{Prefill: once}}
}
