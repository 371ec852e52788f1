package dualpath

import (
	"cmp"
	"fmt"
	"slices"
)

// Drain is the policy for requests that have been started: for requests of older weights when the
// weights change (Epoch), and for requests of a group that changes its role (SwitchRole).
type Drain uint8

const (
	// DrainRecompute plans the started requests again. If the weights change, a request that is
	// already decoding continues instead.
	DrainRecompute Drain = iota
	// DrainFinish lets the started requests continue. If an engine of a request fails, the request
	// is planned again with the newest weights.
	DrainFinish
	// DrainAbort rejects the started requests. A change of role must lose no request, so it does
	// not accept this policy.
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

// MarshalText returns the policy's name.
func (d Drain) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText sets d to the policy with the given name.
func (d *Drain) UnmarshalText(name []byte) error {
	i := slices.Index(drainNames[:], string(name))
	if i < 0 {
		return fmt.Errorf("dualpath: unknown drain policy %q; policies are %v", name, drainNames)
	}
	*d = Drain(i)
	return nil
}

// Older counts the requests of a namespace that use model weights of an older epoch than a given
// one.
type Older struct {
	// Queued is the number of requests without engines. They will be planned with the newest
	// weights.
	Queued int
	// Prefilling is the number of started requests whose prefill has not ended, Decoding the number
	// whose prefill has ended.
	Prefilling, Decoding int
	// Exact is the number of requests with Request.Exact set. They keep their version of the
	// model's weights when an epoch with newer weights begins. The other counts exclude them.
	Exact int
}

// Older counts the requests of a namespace whose weights are older than an epoch.
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

// OlderWeights counts the requests of all namespaces that use weights older than their namespace's
// newest. Exact requests do not count.
func (p *Planner) OlderWeights() (n int) {
	for _, r := range p.requests {
		if !r.Exact && r.Epoch < p.epochs[r.Namespace] {
			n++
		}
	}
	return n
}

// epoch starts a new epoch of a namespace's weights. A waiting request is planned with the new
// epoch. The event's policy applies to requests that have been started. An Exact request keeps its
// epoch and its prefix. A second event with the same epoch applies its own policy to the requests
// of older weights that remain.
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
		// orphan: only a decode group has reported this request after a restart of the planner.
		// Either its prefill has ended, or the prefill group will register later.
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

// youngestFirst sorts requests by start, the latest first. If they are then put at the head of the
// queue one after the other, the oldest is first in the queue.
func youngestFirst(list []*request) {
	slices.SortFunc(list, func(a, b *request) int { return cmp.Or(cmp.Compare(b.started, a.started), cmp.Compare(b.ID, a.ID)) })
}

// renew makes a waiting request use the newest weights of its namespace, without its cached prefix and
// its Resident, if the request's epoch is older and the request is not Exact.
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
	r.Epoch, r.Resident = epoch, nil
}
