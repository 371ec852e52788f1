package storage

import (
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// MatchResult is the result of a match, with the slots of its pieces.
type MatchResult = trie.Match

// MatchRequest is the request of a match.
type MatchRequest struct {
	Namespace string
	// Epoch and Oldest are as in trie.MatchOptions. With Oldest 0 only Epoch matches; Epoch 0 means
	// the newest.
	Epoch, Oldest kv.Epoch
	// Mix is trie.MatchOptions.Mix.
	Mix bool
	IDs []kv.BlockID
	// TTL, if above 0, leases the match for TTL, at most LeaseTTLMax. Pin leases the match until
	// Release. Owner is the name of the lease's owner that Pins returns.
	TTL   time.Duration
	Pin   bool
	Owner string
	// NoTouch is trie.MatchOptions.NoTouch.
	NoTouch bool
}

// Match finds the longest reusable prefix of the chain.
func (n *Node) Match(req MatchRequest) (kv.Namespace, MatchResult, error) {
	ns, err := n.Namespace(req.Namespace)
	if err != nil {
		return ns, MatchResult{}, err
	}
	if err := n.checkChain(req.IDs); err != nil {
		return ns, MatchResult{}, err
	}
	if req.TTL < 0 {
		return ns, MatchResult{}, fmt.Errorf("%w: a lease of %v; give a positive time", ErrRequest, req.TTL)
	}
	if req.Epoch != 0 && req.Oldest > req.Epoch {
		return ns, MatchResult{}, fmt.Errorf("%w: the oldest epoch %d is later than the newest, %d", ErrRequest, req.Oldest, req.Epoch)
	}
	opts := trie.MatchOptions{
		Epoch: req.Epoch, Oldest: req.Oldest, Mix: req.Mix, Lease: req.TTL > 0 || req.Pin, TTL: n.LeaseTTL(req.TTL),
		Now: n.opts.Now(), Owner: req.Owner, NoTouch: req.NoTouch, Count: true,
	}
	if req.Pin {
		opts.TTL = 0
	}
	match, err := n.match(ns, req.IDs, opts)
	if err != nil {
		return ns, MatchResult{}, err
	}
	n.countMatch(ns, len(req.IDs), match)
	if match.Tokens > 0 {
		n.prefixes.add(ns.ID, req.IDs[0], match, opts.Now)
		n.countHot(ns, &req, match, opts.Now)
	}
	if match.Lease != 0 {
		n.opts.Metrics.LeasesGranted.Inc()
	}
	if match.Cut == trie.CutLeaseDenied {
		n.opts.Metrics.LeasesDenied.Inc()
	}
	return ns, match, nil
}

// match calls the index's Match and measures its time.
func (n *Node) match(ns kv.Namespace, ids []kv.BlockID, opts trie.MatchOptions) (trie.Match, error) {
	start := time.Now()
	match, err := n.index.Match(ns.ID, ids, opts)
	n.opts.Metrics.MatchSeconds.Observe(time.Since(start).Seconds())
	return match, err
}

// countMatch adds the requested and the matched tokens and blocks of a Match to the metrics. A Load
// is not counted, because a client divides one prompt into several Loads, which all have the same
// prefix.
func (n *Node) countMatch(ns kv.Namespace, asked int, match trie.Match) {
	m := n.opts.Metrics
	m.MatchRequests.Of(ns.Name).Inc()
	m.MatchCuts.WithLabelValues(match.Cut.String()).Inc()
	m.QueriedBlocks.Of(ns.Name).Add(float64(asked))
	m.QueriedTokens.Of(ns.Name).Add(float64(asked * ns.Geometry.BlockTokens))
	m.HitBlocks.Of(ns.Name).Add(float64(match.Blocks))
	m.HitTokens.Of(ns.Name).Add(float64(match.Tokens))
}

// LeaseTTL returns the TTL that a lease requested with ttl gets.
func (n *Node) LeaseTTL(ttl time.Duration) time.Duration {
	return min(ttl, n.limits.Load().LeaseTTLMax)
}

// Renew sets the end of a lease to now + ttl, where ttl is at most LeaseTTLMax.
func (n *Node) Renew(id trie.LeaseID, ttl time.Duration) error {
	if ttl <= 0 {
		return fmt.Errorf("%w: a lease of %v; give a positive time", ErrRequest, ttl)
	}
	return n.index.Renew(id, n.LeaseTTL(ttl), n.opts.Now())
}

// Pins appends to dst the pins of epochs and the open leases of matches. If namespace is not empty,
// it lists only that namespace. It leaves out leases of matches that expire, unless leases is set.
// See trie.Trie.Pins.
func (n *Node) Pins(dst []trie.Pin, namespace string, leases bool, cursor uint32, limit int) (pins []trie.Pin, next uint32, err error) {
	n.index.ExpireLeases(n.opts.Now())
	f := trie.PinFilter{Endless: !leases}
	if namespace != "" {
		ns, err := n.Namespace(namespace)
		if err != nil {
			return dst, 0, err
		}
		f.Namespace = ns.ID
	}
	pins, next = n.index.Pins(dst, f, cursor, limit)
	return pins, next, nil
}

// Leased describes an open lease. See trie.Trie.Leased.
func (n *Node) Leased(id trie.LeaseID) (trie.Pin, error) { return n.index.Leased(id) }

// IsPin reports whether a lease is open and either has no TTL or pins an epoch.
func (n *Node) IsPin(id trie.LeaseID) bool { return n.index.IsPin(id) }

// Release ends a lease.
func (n *Node) Release(id trie.LeaseID) error { return n.index.Release(id) }
