package dualpath

import (
	"cmp"
	"fmt"
	"slices"
)

// Drain is the policy for requests under way that have to end: requests of older weights when
// the weights change (Epoch), and requests of a group that changes its role (SwitchRole).
type Drain uint8

const (
	// DrainRecompute plans them again. Decode that has begun with older weights goes on.
	DrainRecompute Drain = iota
	// DrainFinish lets each go on as it was started. A request that an engine loses is
	// planned again, with the newest weights.
	DrainFinish
	// DrainAbort rejects them. A role switch does not take it, because it loses no request.
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
	// Queued have no engines. They are planned with the newest weights.
	Queued int
	// Prefilling have been started, Decoding have been prefilled.
	Prefilling, Decoding int
	// Exact name their weights, and no change of weights touches them. The other counts are
	// without them.
	Exact int
}

// Older returns the requests that a change of a namespace's weights to an epoch meets.
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

// Newest returns the epoch that Epoch events have named for a namespace; 0: none.
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

// epoch begins a new epoch of a namespace's weights. A request that waits is planned with it.
// The policy decides about requests that have been started. An Exact request keeps its
// epoch and its prefix. The same epoch again applies another policy to the requests left.
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
		// A request that only a decode group reported after a restart has no prefill engine
		// to compute it. Its prefill has ended, or the prefill group will report it later.
		orphan := r.phase == serving && r.pe == nil
		switch {
		case r.phase == queued:
			p.renew(r)
		case e.Drain == DrainAbort:
			p.stats.Aborted++
			p.end(r, OldWeights)
		case e.Drain == DrainFinish || r.prefilled || orphan:
			r.why.note(p.now, "weights of epoch %d: the request goes on with weights of epoch %d", int(e.Epoch), int(r.Epoch))
		default:
			// The planner does not know how much of the prefix the model has used. The whole
			// prompt is computed, and its blocks are stored under the new epoch.
			p.requeue(r, EpochOver)
		}
	}
}

// youngestFirst sorts requests that go to the head of the queue one after the other, so that
// the oldest stays the first.
func youngestFirst(list []*request) {
	slices.SortFunc(list, func(a, b *request) int { return cmp.Or(cmp.Compare(b.started, a.started), cmp.Compare(b.ID, a.ID)) })
}

// renew has a request that waits computed with its namespace's newest weights, if its prefix is
// of older ones and it does not name them.
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
