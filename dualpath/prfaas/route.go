package prfaas

import "fmt"

// Side is the kind of cluster that prefills a prompt: the PD cluster or a PrfaaS cluster.
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

// Cluster is the state of one PrfaaS cluster for one request.
type Cluster struct {
	// Cached is the longest prefix of the prompt that the cluster can reuse, in tokens (l_prfaas).
	// In a hybrid model every layer group can be reused at this length (Reusable).
	Cached int
	// QueueSeconds is the time for which the request would wait for prefill in the cluster and then
	// for the cluster's link.
	QueueSeconds float64
	// Down is set if the cluster takes no requests and its prefixes cannot be fetched.
	Down bool
}

// Request is one prompt to be routed.
type Request struct {
	// Total is the length of the prompt in tokens: l_total.
	Total int
	// Cached is the longest prefix that the PD cluster can reuse, in tokens (l_pd).
	Cached int
	// Remote are the PrfaaS clusters, by index.
	Remote []Cluster
}

// Validate returns an error for impossible lengths.
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
	// Cluster is the index of the PrfaaS cluster that prefills; -1 if none does.
	Cluster int
	// Prefix is the number of cached tokens that are reused, and Prefill the number of tokens that
	// are computed.
	Prefix, Prefill int
	// FetchFrom is the source of a cached prefix that crosses the link: the index of a PrfaaS
	// cluster, FetchLocal for the PD cluster, or FetchNone without a transfer. The KV of the tokens
	// from FetchBegin to Prefix crosses the link.
	FetchFrom  int
	FetchBegin int
	// Why names the rule, for logs.
	Why string
}

// The sources of a cached prefix other than PrfaaS clusters.
const (
	FetchNone  = -1
	FetchLocal = -2
)

// Router routes requests by the number of tokens to compute (PrfaaS, section 3.4.3).
type Router struct {
	// Threshold is t, in tokens.
	Threshold float64
	// Abundant is set if the link has spare bandwidth, so that compute is the scarce resource: a
	// prefix that another cluster has cached is fetched and not computed again. Otherwise each
	// cluster uses only its own cache.
	Abundant bool
}

// Route returns the decision for a request. Of the PrfaaS clusters that are up, it considers the
// cluster with the longest usable prefix; among equals, the cluster with the shortest queue, then
// the first. If all PrfaaS clusters are down, the PD cluster prefills.
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

// best returns the PrfaaS cluster to use, -1 if none is up.
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

// begin returns the index of the first token of a fetched prefix that crosses the link: the number
// of tokens that the computing cluster has. Without a fetch it returns prefix.
func begin(from, have, prefix int) int {
	if from == FetchNone {
		return prefix
	}
	return have
}

// CrossBytes returns the size in bytes of the KV that must be sent to a cluster that has the first
// have tokens of a prompt of total tokens: the KV of the missing tokens in the layers with full
// attention, and the whole recurrent state, whose size does not depend on the length (PrfaaS,
// sections 3.2 and 3.3). kv is S_kv(l); its value at 0 tokens is the size of the state.
func CrossBytes(kv Curve, have, total int) float64 {
	if total <= have {
		return 0
	}
	state := max(kv.At(0), 0)
	return state + max(kv.At(float64(total))-kv.At(float64(have)), 0)
}

// DeliverBytes returns the bytes that cross the link for a route: if the PrfaaS cluster prefills,
// the KV for the decode instance without the part that the PD cluster has cached, and the prefix
// that is fetched. egress is the number of bytes that leave the PrfaaS clusters, ingress the number
// that enter them.
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
