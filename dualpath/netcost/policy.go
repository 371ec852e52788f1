package netcost

import (
	"errors"
	"fmt"
	"math"
)

// Policy is a rule for the choice of a decode instance: the NetKV paper's rule, that rule with
// fewer inputs, or another rule with which the paper compares its own (§VI-A).
type Policy uint8

const (
	// Full is Algorithm 1 of the NetKV paper.
	Full Policy = iota
	// Static is Full without congestion: it uses the tiers and the scheduler's own transfers.
	Static
	// TopoOnly uses only the tier map.
	TopoOnly
	// RoundRobin chooses the next feasible candidate.
	RoundRobin
	// LoadAware minimises the sum of waiting time and first decode step.
	LoadAware
	// CacheAware chooses the instance that holds the most tokens of the prompt and, among equals,
	// the least loaded one.
	CacheAware
	// CacheLoad maximises a weighted sum of the hit ratio and the free share of the batch, as
	// current routers do. With tuned Weights it is the paper's CLA*.
	CacheLoad

	policies
)

var policyNames = [policies]string{"netkv", "static", "topo-only", "round-robin", "load-aware", "cache-aware", "cache-load"}

// String returns the policy's name, as in configuration.
func (p Policy) String() string {
	if p < policies {
		return policyNames[p]
	}
	return fmt.Sprintf("policy %d", uint8(p))
}

// ParsePolicy is the inverse of String.
func ParsePolicy(s string) (Policy, error) {
	for i, n := range policyNames {
		if s == n {
			return Policy(i), nil
		}
	}
	return 0, fmt.Errorf("netcost: policy %q: it must be one of %v", s, policyNames)
}

// sees returns the signals that Full, Static or TopoOnly uses.
func (p Policy) sees() signals { return signals{congestion: p == Full, own: p <= Static} }

// Weights are the weights of CacheLoad. The NetKV paper's grid search found (1, 1) for chat and
// retrieval, and (1.5, 0.7) for long contexts (§VI-A).
type Weights struct{ Cache, Load float64 }

// Validate returns an error that names the first weight out of its range.
func (w *Weights) Validate() error {
	if !(w.Cache >= 0 && w.Load >= 0 && w.Cache+w.Load > 0) || math.IsInf(w.Cache+w.Load, 1) {
		return fmt.Errorf("netcost: weights cache %v and load %v: both must be finite, none negative, and not both 0", w.Cache, w.Load)
	}
	return nil
}

// ErrNoRoom: no candidate has enough memory for the request. The caller rejects the request, or
// tries again after memory has been freed.
var ErrNoRoom = errors.New("netcost: no decode instance has the memory for the request's KV")

// Intent describes a transfer that will begin. A scheduler may send it to the operator (§III-E of
// the NetKV paper).
type Intent[K comparable] struct {
	Request  uint64
	From, To K
	Tier     Tier
	Bytes    float64
	Priority int
}

// Decision is the result of Choose. Index is the index of the chosen candidate, Cost the
// candidate's cost, and Intent the transfer that follows. The caller calls Begin when the transfer
// begins, and End when the transfer is complete.
type Decision[K comparable] struct {
	Index  int
	Cost   Cost
	Intent Intent[K]
}

// Chooser chooses decode instances by one policy. It is not safe for concurrent
// use.
type Chooser[K comparable] struct {
	policy  Policy
	weights Weights
	oracle  *Oracle[K]
	// last is the index of the last choice.
	last int
}

// NewChooser returns a chooser. w are the weights for CacheLoad; zero means (1, 1).
func NewChooser[K comparable](p Policy, w Weights, o *Oracle[K]) (*Chooser[K], error) {
	if p >= policies {
		return nil, fmt.Errorf("netcost: %v; it must be one of %v", p, policyNames)
	}
	if w == (Weights{}) {
		w = Weights{1, 1}
	}
	if err := w.Validate(); err != nil {
		return nil, err
	}
	return &Chooser[K]{policy: p, weights: w, oracle: o, last: -1}, nil
}

// Choose returns the policy's choice for r, or ErrNoRoom if no candidate has enough memory. It
// takes O(len(candidates)) time and allocates nothing.
func (c *Chooser[K]) Choose(r *Request[K], candidates []Candidate[K]) (Decision[K], error) {
	if err := r.Validate(); err != nil {
		return Decision[K]{}, err
	}
	best := Decision[K]{Index: -1}
	var least rank
	var w way
	for i, known := 0, -1; i < len(candidates); i++ {
		// The search starts after the last choice and wraps around. Among equal candidates, the
		// first is chosen.
		at := (c.last + 1 + i) % len(candidates)
		d := &candidates[at]
		if known < 0 || candidates[known].ID != d.ID { // engines of one machine share its links
			w, known = c.oracle.way(r.From, d.ID, c.policy.sees()), at
		}
		cost := c.oracle.costOver(w, r, d)
		if !cost.Feasible {
			continue
		}
		if k := c.rank(r, d, &cost); best.Index < 0 || k.before(least) {
			best.Index, best.Cost, least = at, cost, k
		}
		if c.policy == RoundRobin {
			break
		}
	}
	if best.Index < 0 {
		return Decision[K]{}, ErrNoRoom
	}
	c.last = best.Index
	best.Intent = Intent[K]{
		Request: r.ID, From: r.From, To: candidates[best.Index].ID,
		Tier: best.Cost.Tier, Bytes: best.Cost.Bytes, Priority: r.Priority,
	}
	return best, nil
}

// Begin adds the transfer of a decision to the transfers in progress.
func (c *Chooser[K]) Begin(i *Intent[K]) { c.oracle.Begin(i.From, i.Tier) }

// End removes the transfer from the transfers in progress.
func (c *Chooser[K]) End(i *Intent[K]) { c.oracle.End(i.From, i.Tier) }

// rank orders candidates: the smaller value first; of equal values, the candidate with fewer
// requests.
type rank struct {
	value    float64
	requests int
}

// before reports whether a is ordered before b.
func (a rank) before(b rank) bool {
	return a.value < b.value || (a.value == b.value && a.requests < b.requests)
}

// rank returns the value that the policy minimises.
func (c *Chooser[K]) rank(r *Request[K], d *Candidate[K], cost *Cost) rank {
	k := rank{requests: d.Queued + d.Batch}
	switch c.policy {
	case RoundRobin:
		k.requests = 0
	case LoadAware:
		k.value = cost.Queue + cost.Decode
	case CacheAware:
		k.value = -float64(d.Hit)
	case CacheLoad:
		k.value = -c.weights.Cache*float64(d.Hit)/float64(r.Tokens) + c.weights.Load*float64(k.requests)/float64(c.oracle.model.MaxBatch)
	default:
		k.value = cost.Total()
	}
	return k
}
