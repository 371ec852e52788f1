package prfaas

import "fmt"

// Side is where a prompt is prefilled.
type Side uint8

// The sides.
const (
	Local  Side = iota // a prefill instance of the PD cluster
	Remote             // a PrfaaS cluster
)

// String returns local or remote.
func (s Side) String() string {
	if s == Remote {
		return "remote"
	}
	return "local"
}

// Cluster is what the router knows of one PrfaaS cluster for one request.
type Cluster struct {
	// Cached is the longest prefix of this prompt that the cluster can reuse, in
	// tokens: l_prfaas. For a hybrid model it is a length at which every layer
	// group is there (Reusable).
	Cached int
	// QueueSeconds is how long its prefill and its link would keep the request
	// waiting.
	QueueSeconds float64
	// Down: it takes no request, and nothing can be fetched from it.
	Down bool
}

// Request is one prompt on its way.
type Request struct {
	// Total is the length of the prompt in tokens: l_total.
	Total int
	// Cached is the longest prefix that the PD cluster can reuse: l_pd.
	Cached int
	// Remote are the PrfaaS clusters, by index.
	Remote []Cluster
}

// Validate returns an error about lengths that cannot be.
func (r Request) Validate() error {
	if r.Total < 1 {
		return fmt.Errorf("prfaas: a prompt of %d tokens; at least 1", r.Total)
	}
	if r.Cached < 0 || r.Cached > r.Total {
		return fmt.Errorf("prfaas: %d tokens of a prompt of %d are cached", r.Cached, r.Total)
	}
	for i, c := range r.Remote {
		if c.Cached < 0 || c.Cached > r.Total {
			return fmt.Errorf("prfaas: %d tokens of a prompt of %d are cached in PrfaaS cluster %d", c.Cached, r.Total, i)
		}
	}
	return nil
}

// Route is the decision about one request.
type Route struct {
	Side Side
	// Cluster is the index of the PrfaaS cluster that prefills; -1: none does.
	Cluster int
	// Prefix is how many tokens are taken from a cache, Prefill how many are
	// computed.
	Prefix, Prefill int
	// FetchFrom is where a cached prefix crosses the link from: the index of a
	// PrfaaS cluster, or FetchLocal for the PD cluster; FetchNone: no transfer.
	// Tokens (FetchBegin, Prefix] cross.
	FetchFrom  int
	FetchBegin int
	// Why names the rule, for people.
	Why string
}

// Where a cached prefix comes from, beside the index of a PrfaaS cluster.
const (
	FetchNone  = -1
	FetchLocal = -2
)

// Router routes requests by the length of what must be computed (PrfaaS, section
// 3.4.3).
type Router struct {
	// Threshold is t, in tokens.
	Threshold float64
	// Abundant: the link has bandwidth to spare, so compute is what is scarce; a
	// prefix that another cluster has cached is fetched rather than computed
	// again. Otherwise each cluster uses its own cache alone.
	Abundant bool
}

// Route decides. Among PrfaaS clusters the one with the longest prefix that it
// could use is taken, then the one with the shortest queue, then the first. With
// all of them down everything is local.
//
//	scarce    l_total - l_pd <= t: local with its own cache; else remote with its own cache
//	abundant  l_total - max(l_pd, l_prfaas) <= t: local, else remote; the prefix comes from where it is longest
func (r Router) Route(q Request) (Route, error) {
	if err := q.Validate(); err != nil {
		return Route{}, err
	}
	remote := q.best()
	if remote < 0 {
		return q.local(q.Cached, FetchNone, "no PrfaaS cluster is up"), nil
	}
	there := q.Remote[remote].Cached
	if !r.Abundant {
		if float64(q.Total-q.Cached) <= r.Threshold {
			return q.local(q.Cached, FetchNone, "scarce: what the PD cluster has not cached is within the threshold"), nil
		}
		return q.remote(remote, there, FetchNone, "scarce: what the PD cluster has not cached is above the threshold"), nil
	}
	prefix := max(q.Cached, there)
	if float64(q.Total-prefix) <= r.Threshold {
		from := FetchNone
		if there > q.Cached {
			from = remote
		}
		return q.local(prefix, from, "abundant: what no cluster has cached is within the threshold"), nil
	}
	from := FetchNone
	if q.Cached > there {
		from = FetchLocal
	}
	return q.remote(remote, prefix, from, "abundant: what no cluster has cached is above the threshold"), nil
}

// best is the PrfaaS cluster to use, -1 if none is up.
func (q Request) best() int {
	best := -1
	for i, c := range q.Remote {
		if c.Down {
			continue
		}
		if best < 0 || c.Cached > q.Remote[best].Cached || c.Cached == q.Remote[best].Cached && c.QueueSeconds < q.Remote[best].QueueSeconds {
			best = i
		}
	}
	return best
}

func (q Request) local(prefix, from int, why string) Route {
	return Route{Side: Local, Cluster: -1, Prefix: prefix, Prefill: q.Total - prefix, FetchFrom: from, FetchBegin: begin(from, q.Cached, prefix), Why: why}
}

func (q Request) remote(cluster, prefix, from int, why string) Route {
	return Route{Side: Remote, Cluster: cluster, Prefix: prefix, Prefill: q.Total - prefix, FetchFrom: from, FetchBegin: begin(from, q.Remote[cluster].Cached, prefix), Why: why}
}

// begin is where a fetched prefix begins: behind what the computing cluster has.
func begin(from, have, prefix int) int {
	if from == FetchNone {
		return prefix
	}
	return have
}

// CrossBytes is the KV of tokens (have, total] of one prompt, in bytes: the whole
// recurrent state, whose size does not depend on the length, and of the layers
// with full attention only what the other side has not (PrfaaS, sections 3.2 and
// 3.3). kv is S_kv(l), its value at 0 tokens the state's size.
func CrossBytes(kv Curve, have, total int) float64 {
	if total <= have {
		return 0
	}
	state := max(kv.At(0), 0)
	return state + max(kv.At(float64(total))-kv.At(float64(have)), 0)
}

// DeliverBytes is what crosses the link for a route: the KV towards the decode
// instance where the PrfaaS cluster prefills, of which the PD cluster lacks what
// it has not cached, and the prefix that is fetched. egress leaves the PrfaaS
// clusters, ingress enters them, in bytes.
func (q Request) DeliverBytes(kv Curve, r Route) (egress, ingress float64) {
	if r.Side == Remote {
		egress = CrossBytes(kv, q.Cached, q.Total)
	}
	switch {
	case r.FetchFrom == FetchLocal:
		ingress = CrossBytes(kv, r.FetchBegin, r.Prefix)
	case r.FetchFrom >= 0:
		egress += CrossBytes(kv, r.FetchBegin, r.Prefix)
	}
	return egress, ingress
}
