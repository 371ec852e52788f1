package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// Match finds the longest cached prefix of a chain, and leases it if requested. A prompt shorter
// than one block is a Miss.
func (s *Store) Match(ctx context.Context, req MatchRequest) (MatchResult, error) {
	s.stats.matches.Add(1)
	if err := checkNamespace(req.Namespace); err != nil {
		return MatchResult{}, err
	}
	if req.Lease < 0 {
		return MatchResult{}, fmt.Errorf("client: %w: a lease of %v", ErrRequest, req.Lease)
	}
	if err := matchEpochs(&req); err != nil {
		return MatchResult{}, fmt.Errorf("client: match: %w", err)
	}
	ids, err := chainOf(req.Namespace, req.IDs, req.Tokens)
	if err != nil {
		return MatchResult{}, err
	}
	if len(ids) == 0 {
		return MatchResult{Cut: CutComplete, Epoch: req.Epoch}, nil
	}
	again := 0
	if req.Namespace.Index == kv.IndexFlat {
		again = req.Namespace.Copies() - 1
	}
	for ; ; again-- {
		r, err := s.matchOnce(ctx, req, ids)
		// A node may end between the calls of holders and the match. The next turn has another replica.
		if err != nil || again == 0 || r.Cut != CutNodeDown {
			return r, err
		}
		if r.Lease != nil {
			r.Lease.releaseQuietly(ctx)
		}
	}
}

// matchOnce makes one match call to each node that holders chooses.
func (s *Store) matchOnce(ctx context.Context, req MatchRequest, ids []kv.BlockID) (MatchResult, error) {
	shares := s.shares(req.Namespace, ids, s.holders(ctx, req, ids))
	matches := make([]shareMatch, len(shares))
	if len(shares) == 1 {
		matches[0] = shares[0].match(ctx, req)
		return s.joinMatches(ctx, req, ids, shares, matches)
	}
	var wg sync.WaitGroup
	for i := range shares {
		wg.Go(func() { matches[i] = shares[i].match(ctx, req) })
	}
	wg.Wait()
	return s.joinMatches(ctx, req, ids, shares, matches)
}

// matchEpochs sets req.Epoch to the namespace's epoch if it is 0 and Newest is not set. It returns an
// error if the range of epochs is contradictory: Epoch together with Newest, or an Oldest after
// Epoch.
func matchEpochs(req *MatchRequest) error {
	if req.Newest {
		if req.Epoch != 0 {
			return fmt.Errorf("%w: both epoch %d and the newest are requested", ErrRequest, req.Epoch)
		}
		return nil
	}
	if err := ownEpoch(req.Namespace, &req.Epoch); err != nil {
		return err
	}
	if req.Oldest > req.Epoch {
		return fmt.Errorf("%w: the oldest epoch %d is later than the newest, %d", ErrRequest, req.Oldest, req.Epoch)
	}
	return nil
}

// wants reports whether the request accepts blocks of epoch e.
func (req *MatchRequest) wants(e kv.Epoch) bool {
	oldest := req.Oldest
	if oldest == 0 && !req.Newest {
		oldest = req.Epoch
	}
	return oldest <= e && (req.Newest || e <= req.Epoch)
}

// shareMatch is the result of one node for its share of the blocks.
type shareMatch struct {
	blocks int
	cut    Cut
	epoch  kv.Epoch
	epochs []kv.EpochRun // of a mixed match
	lease  uint64
	busy   bool
	err    error
}

// match finds the blocks of the share on its node, and on the others if the node has none of them or
// does not answer. node is then the one with the match. If none has a match, the result is that of the
// first node.
func (sh *share) match(ctx context.Context, req MatchRequest) shareMatch {
	first := sh.matchHere(ctx, req)
	for m := first; ; m = sh.matchHere(ctx, req) {
		if m.err != nil || m.blocks > 0 {
			return m
		}
		if len(sh.others) == 0 {
			return first
		}
		sh.node, sh.others = sh.others[0], sh.others[1:]
	}
}

// matchHere finds the blocks of the share on its node.
func (sh *share) matchHere(ctx context.Context, req MatchRequest) shareMatch {
	if err := ctx.Err(); err != nil {
		return shareMatch{err: callError(ctx, "match", sh.node.target, err)} // the node is not asked, so it is not silent
	}
	sh.node.calling.Add(1)
	defer sh.node.calling.Add(-1)
	call := func(ctx context.Context, sess *session, m *shareMatch) error {
		msg := &pb.MatchRequest{
			Namespace:  req.Namespace.Name,
			Epoch:      uint64(req.Epoch),
			BlockIds:   api.AppendIDs(nil, sh.ids),
			LeaseTtlMs: millis(req.Lease),
			Pin:        req.Pin,

			OldestEpoch: uint64(req.Oldest),
			Mix:         req.Mix,
			NoTouch:     sh.peek,
		}
		r, err := sh.node.matchLocal(ctx, sess, msg)
		if errors.Is(err, errNotLocal) {
			r, _, err = ask(ctx, sess, api.MethodMatch, msg, 0, replyMax(0, 0), func() (*pb.MatchResponse, error) { return sess.cache.Match(ctx, msg) })
		}
		if err != nil {
			return callError(ctx, "match", sh.node.target, err)
		}
		m.blocks, m.cut, m.epoch, m.lease = int(r.GetMatchedBlocks()), Cut(r.GetCut()), kv.Epoch(r.GetEpoch()), r.GetLease()
		m.epochs = nil
		if req.Mix {
			if m.epochs, err = mixedEpochs(req, r); err != nil {
				return fmt.Errorf("client: match: %s: %w", sh.node.target, err)
			}
		}
		m.busy = r.GetOutcome() == pb.Outcome_OUTCOME_BUSY
		if m.blocks > len(sh.ids) {
			return fmt.Errorf("client: match: %s matched %d blocks of %d", sh.node.target, m.blocks, len(sh.ids))
		}
		if hot := r.GetHot(); hot != nil {
			sh.node.store.hints.learn(req.Namespace, m.epoch, sh.ids[:m.blocks], hot, time.Now())
		}
		return nil
	}
	began := time.Now()
	m := shareMatch{}
	if req.Pin {
		m = sh.node.pin(ctx, call)
	} else {
		m.err = sh.node.retry(ctx, sh.node.use, func(sess *session) error { return call(ctx, sess, &m) })
	}
	sh.node.heard(ctx, began, time.Now(), m.err)
	switch {
	case errors.Is(m.err, errDown):
		m = shareMatch{cut: CutNodeDown}
	case errors.Is(m.err, errBusy):
		m = shareMatch{cut: CutBusy, busy: true}
	}
	return m
}

// pin makes a Match call with a pin. It does not retry: if the reply to the first call was lost, that call's
// pin would never be released. For the same reason, the call goes on if ctx ends before the reply has arrived: for releaseWithin, so that
// the node may stand still meanwhile, or for abortWithin from the begin of Close on or if there are many such calls (releasingMax). A
// pin that is granted after the end of ctx is released in the background.
func (n *node) pin(ctx context.Context, call func(context.Context, *session, *shareMatch) error) shareMatch {
	sess, err := n.use(ctx)
	if err != nil {
		return shareMatch{err: err}
	}
	within, cancel := context.WithCancel(context.WithoutCancel(ctx))
	granted := make(chan shareMatch)
	if !n.store.spawn(func() {
		defer cancel()
		many := n.store.releasing.Add(1) > releasingMax
		defer n.store.releasing.Add(-1)
		end := func(after time.Duration) func() {
			return func() {
				t := time.NewTimer(after)
				defer t.Stop()
				select {
				case <-t.C:
					cancel()
				case <-within.Done():
				}
			}
		}
		defer context.AfterFunc(n.store.ctx, end(abortWithin))()
		patience := releaseWithin
		if many {
			patience = abortWithin
		}
		defer context.AfterFunc(ctx, end(patience))()
		var m shareMatch
		m.err = n.failed(sess, call(within, sess, &m))
		if m.err != nil && n.store.ctx.Err() != nil {
			m.err = fmt.Errorf("client: match: %s: %w", n.target, ErrClosed)
		}
		select {
		case granted <- m:
		case <-ctx.Done():
			if m.lease != 0 {
				(&Lease{store: n.store, parts: []leasePart{{node: n, id: m.lease}}}).releaseQuietly(ctx)
			}
		}
	}) {
		cancel()
		return shareMatch{err: fmt.Errorf("client: %s: %w", n.target, ErrClosed)}
	}
	select {
	case m := <-granted:
		return m
	case <-ctx.Done():
		return shareMatch{err: callError(ctx, "match", n.target, ctx.Err())}
	}
}

// mixedEpochs returns the epochs of the blocks in a node's reply to a mixed match. A node that does
// not support mixed matches returns blocks of one epoch.
func mixedEpochs(req MatchRequest, r *pb.MatchResponse) (runs []kv.EpochRun, err error) {
	blocks := uint64(0)
	for _, run := range r.GetEpochs() {
		runs = append(runs, kv.EpochRun{Epoch: kv.Epoch(run.GetEpoch()), Blocks: int(run.GetBlocks())})
		blocks += uint64(run.GetBlocks())
	}
	if len(runs) == 0 && r.GetMatchedBlocks() > 0 {
		runs, blocks = []kv.EpochRun{{Epoch: kv.Epoch(r.GetEpoch()), Blocks: int(r.GetMatchedBlocks())}}, uint64(r.GetMatchedBlocks())
	}
	if blocks != uint64(r.GetMatchedBlocks()) {
		return nil, fmt.Errorf("epochs of %d blocks, for %d blocks that matched", blocks, r.GetMatchedBlocks())
	}
	for _, run := range runs {
		if !req.wants(run.Epoch) {
			return nil, fmt.Errorf("blocks of epoch %d, for a match of epochs %d to %d", run.Epoch, req.Oldest, req.Epoch)
		}
	}
	return runs, nil
}

// millis returns d in milliseconds, at least 1 if d is positive.
func millis(d time.Duration) uint64 {
	if d <= 0 {
		return 0
	}
	return uint64(max(1, d.Milliseconds()))
}

// joinMatches combines the results of the nodes into one prefix of the chain.
func (s *Store) joinMatches(ctx context.Context, req MatchRequest, ids []kv.BlockID, shares []share, matches []shareMatch) (MatchResult, error) {
	g := req.Namespace.Geometry
	lease := &Lease{store: s}
	var errs []error
	for i, m := range matches {
		if m.lease != 0 {
			lease.parts = append(lease.parts, leasePart{node: shares[i].node, id: m.lease})
		}
		errs = append(errs, m.err)
	}
	if err := errors.Join(errs...); err != nil {
		lease.releaseQuietly(ctx)
		return MatchResult{}, err
	}
	r := MatchResult{Blocks: len(ids), Cut: CutComplete, Epoch: joinedEpoch(&req, shares, matches)}
	busy := false
	for i, m := range matches {
		if m.blocks > 0 && m.epoch != r.Epoch && !req.Mix {
			m.blocks, m.cut = 0, CutEpoch
		}
		if m.blocks == len(shares[i].ids) {
			continue
		}
		if at := shares[i].global(m.blocks); at < r.Blocks {
			r.Blocks, r.Cut, busy = at, m.cut, m.busy
		}
	}
	r.Tokens, r.IDs = r.Blocks*g.BlockTokens, ids[:r.Blocks:r.Blocks]
	r.Bytes = g.NeededBytes(r.Blocks)
	if req.Mix {
		r.Epochs = joinedEpochs(shares, matches, r.Blocks)
		for i, run := range r.Epochs {
			if i == 0 || run.Epoch > r.Epoch {
				r.Epoch = run.Epoch
			}
		}
	}
	switch {
	case r.Blocks > 0:
		r.Outcome = Hit
	case busy:
		r.Outcome = Busy
		s.stats.busy.Add(1)
	}
	if r.Blocks == 0 {
		lease.releaseQuietly(ctx)
	} else if len(lease.parts) > 0 {
		r.Lease = lease
	}
	return r, nil
}

// joinedEpochs returns the epochs of the first blocks of a chain. Each node has reported the
// epochs of its share of the blocks.
func joinedEpochs(shares []share, matches []shareMatch, blocks int) (runs []kv.EpochRun) {
	epochs := make([]kv.Epoch, blocks)
	for i, m := range matches {
		local := 0
		for _, run := range m.epochs {
			for range run.Blocks {
				if at := shares[i].global(local); at < blocks {
					epochs[at] = run.Epoch
				}
				local++
			}
		}
	}
	for _, e := range epochs {
		if k := len(runs) - 1; k >= 0 && runs[k].Epoch == e {
			runs[k].Blocks++
		} else {
			runs = append(runs, kv.EpochRun{Epoch: e, Blocks: 1})
		}
	}
	return runs
}

// joinedEpoch returns the epoch of a match to which several nodes contributed: the epoch of the
// first block, if the request accepts that epoch. Matched blocks of another epoch do not count.
func joinedEpoch(req *MatchRequest, shares []share, matches []shareMatch) kv.Epoch {
	newest := req.Epoch
	for i, m := range matches {
		if m.blocks > 0 && shares[i].global(0) == 0 && req.wants(m.epoch) {
			return m.epoch
		}
		if req.Newest {
			newest = max(newest, m.epoch)
		}
	}
	return newest
}

// Delivered drops blocks of class Transfer and epoch ns.Epoch that have reached their reader, and
// returns the number of dropped blocks. A node that is down keeps the blocks until their eviction.
func (s *Store) Delivered(ctx context.Context, ns kv.Namespace, ids []kv.BlockID) (int, error) {
	if err := checkNamespace(ns); err != nil {
		return 0, err
	}
	if len(ids) == 0 {
		return 0, nil
	}
	dropped := 0
	var errs []error
	shares := s.everywhere(ns, ids)
	if ns.Index != kv.IndexFlat {
		shares = wholeOn(s.candidates(ns, ids[0]), ids)
	}
	for _, sh := range shares {
		sess, err := sh.node.use(ctx)
		if err == nil {
			var r *pb.DeliveredResponse
			r, err = sess.cache.Delivered(ctx, &pb.DeliveredRequest{Namespace: ns.Name, Epoch: uint64(ns.Epoch), BlockIds: api.AppendIDs(nil, sh.ids)})
			err = sh.node.failed(sess, callError(ctx, "delivered", sh.node.target, err))
			dropped += int(r.GetDropped())
		}
		if !errors.Is(err, errDown) {
			errs = append(errs, err)
		}
	}
	return dropped, hideInternal(errors.Join(errs...))
}
