package dualpath

import (
	"cmp"
	"fmt"
	"slices"
)

// Drain is the policy for started requests that must end: requests of older weights when the
// weights change (Epoch), and requests of a group that changes its role (SwitchRole).
type Drain uint8

const (
	// DrainRecompute plans them again. Decoding that has begun with older weights continues.
	DrainRecompute Drain = iota
	// DrainFinish lets each request continue. A request that an engine loses is planned again
	// with the newest weights.
	DrainFinish
	// DrainAbort rejects them. A role switch does not accept it, because a role switch loses no
	// request.
	DrainAbort
)

var drainNames = [...]string{"recompute", "finish", "abort"}

// String returns the policy's name, as in commands.
func (d Drain) String() string {
	if int(d) < len(drainNames) {
		return drainNames[d]
	}
	return fmt.Sprintf("drain %d", uint8(d))
}

// Older counts the requests of a namespace that use weights older than an epoch.
type Older struct {
	// Queued have no engines yet and are planned with the newest weights.
	Queued int
	// Prefilling have been started and not prefilled. Decoding have been prefilled.
	Prefilling, Decoding int
	// Exact name their weights and are not affected by a change of weights. The other counts
	// exclude them.
	Exact int
}

// Older counts the requests that a change of a namespace's weights to an epoch affects.
func (p *Planner) Older(ns NamespaceID, epoch uint64) (n Older) {
	for _, r := range p.requests {
		switch {
		case r.Namespace != ns || r.Epoch >= epoch:
		case r.Exact:
			n.Exact++
		case r.phase == queued:
			n.Queued++
		case r.prefilled || r.pe == nil:
			n.Decoding++
		default:
			n.Prefilling++
		}
	}
	return n
}

// Newest returns the newest epoch of the Epoch events for a namespace; 0 if there was none.
func (p *Planner) Newest(ns NamespaceID) uint64 { return p.epochs[ns] }

// OlderWeights counts the requests of all namespaces that use weights older than their
// namespace's newest. Requests that name their weights do not count.
func (p *Planner) OlderWeights() (n int) {
	for _, r := range p.requests {
		if !r.Exact && r.Epoch < p.epochs[r.Namespace] {
			n++
		}
	}
	return n
}

// epoch starts a new epoch of a namespace's weights. A waiting request is planned with it. The
// policy applies to requests that have been started. An Exact request keeps its epoch and its
// prefix. A second event with the same epoch applies its policy to the remaining requests.
func (p *Planner) epoch(e Epoch) {
	if e.Epoch == 0 || e.Epoch < p.epochs[e.Namespace] {
		return
	}
	p.epochs[e.Namespace] = e.Epoch
	var old []*request
	for _, r := range p.requests {
		if r.Namespace == e.Namespace && r.Epoch < e.Epoch && !r.Exact {
			old = append(old, r)
		}
	}
	youngestFirst(old)
	for _, r := range old {
		// A request that only a decode group reported after a restart has no prefill engine to
		// compute it. Its prefill has ended, or the prefill group will still report it.
		orphan := r.phase == serving && r.pe == nil
		switch {
		case r.phase == queued:
			p.renew(r)
		case e.Drain == DrainAbort:
			p.stats.Aborted++
			p.end(r, OldWeights)
		case e.Drain == DrainFinish || r.prefilled || orphan:
			r.why.note(p.now, "weights of epoch %d: the request continues with weights of epoch %d", int(e.Epoch), int(r.Epoch))
		default:
			// The planner cannot determine how much of the prefix the model has used, so the whole
			// prompt is computed and its blocks are stored under the new epoch.
			p.requeue(r, EpochOver)
		}
	}
}

// youngestFirst sorts requests that go to the head of the queue one after the other, so that
// the oldest stays the first.
func youngestFirst(list []*request) {
	slices.SortFunc(list, func(a, b *request) int { return cmp.Or(cmp.Compare(b.started, a.started), cmp.Compare(b.ID, a.ID)) })
}

// renew makes a waiting request use its namespace's newest weights, if its prefix is of older
// weights and the request does not name its weights.
func (p *Planner) renew(r *request) {
	epoch := p.epochs[r.Namespace]
	if r.Exact || r.Epoch >= epoch {
		return
	}
	r.why.note(p.now, "weights of epoch %d: the prefix of %d tokens is of epoch %d and is recomputed", int(epoch), r.Hit, int(r.Epoch))
	if r.Hit > 0 {
		r.Hit, r.unfit = 0, EpochOver
		p.reprice(r)
	}
	r.Epoch = epoch
}
