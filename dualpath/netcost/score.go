package netcost

import "math"

// Scorer prices all candidates, for a router that combines scores of several kinds
// and chooses itself. It is not safe for concurrent use.
type Scorer[K comparable] struct{ oracle *Oracle[K] }

// NewScorer returns a scorer that asks o.
func NewScorer[K comparable](o *Oracle[K]) *Scorer[K] { return &Scorer[K]{o} }

// Score returns a score for each candidate, 1 for the cheapest and less in inverse
// proportion to the cost: twice the cost, half the score. One that has no memory
// for the request gets 0. A request or a list that is not usable gets no scores, so
// that a router's other scores decide.
//
// Whom the router takes in the end is told by Begin, and End.
func (s *Scorer[K]) Score(r Request[K], candidates []Candidate[K]) map[K]float64 {
	scores := make(map[K]float64, len(candidates))
	if r.Validate() != nil {
		return scores
	}
	least := math.Inf(1)
	for i := range candidates {
		c := s.oracle.Cost(&r, &candidates[i])
		total := c.Total()
		scores[candidates[i].ID] = total
		least = min(least, total)
	}
	for id, total := range scores {
		switch {
		case math.IsInf(total, 1):
			scores[id] = 0
		case total == 0:
			scores[id] = 1
		default:
			scores[id] = least / total
		}
	}
	return scores
}

// Begin counts the transfer of a request to the candidate that was chosen, and
// returns it: End takes the same, whatever the operator said in between.
func (s *Scorer[K]) Begin(r *Request[K], d *Candidate[K]) Intent[K] {
	i := Intent[K]{Request: r.ID, From: r.From, To: d.ID, Tier: s.oracle.snapshot.Tier(r.From, d.ID), Bytes: r.missing(d.Hit), Priority: r.Priority}
	s.oracle.Begin(i.From, i.Tier)
	return i
}

// End counts the end of a transfer.
func (s *Scorer[K]) End(i *Intent[K]) { s.oracle.End(i.From, i.Tier) }
