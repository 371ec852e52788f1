package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// Presence is the result of Exists or Delete for one block.
type Presence uint8

const (
	// Absent: the block is not stored at the requested epoch.
	Absent Presence = iota
	// Present: the block is stored. Delete returns Present if the block was stored.
	Present
	// Unknown: the node responsible for the block does not answer.
	Unknown
)

// KeysRequest lists the blocks of an Exists or Delete call.
type KeysRequest struct {
	Namespace kv.Namespace
	// IDs are the blocks, in any order. Exception: in a namespace with chained ids, the
	// first id of an Exists call must be the first block of the prompt, because the
	// first block determines the node that stores the chain.
	IDs []kv.BlockID
	// Epoch of the caller's weights; 0 means Namespace.Epoch.
	Epoch kv.Epoch
	// AllCopies makes a block of an Exists call count as stored only if all nodes that store it have it: as
	// many as the namespace has replicas. A block is Unknown if such a node does not answer and all
	// others have it.
	AllCopies bool
}

// Exists returns for each block whether it is stored. With chained ids, a block counts as stored
// only if its whole prefix is stored too. With touch, the call counts as a use of the stored
// blocks, which delays their eviction. Blocks of a node that is down are Unknown. Errors:
// ErrRequest, ErrNotFound, ErrAuth, ErrVersion (the node's version is older than this call), and
// the error of ctx.
func (s *Store) Exists(ctx context.Context, req KeysRequest, touch bool) ([]Presence, error) {
	onHolders := func(ns kv.Namespace, ids []kv.BlockID) []share {
		return s.shares(ns, ids, s.holders(ctx, MatchRequest{Namespace: ns, Epoch: req.Epoch}, ids))
	}
	if req.AllCopies {
		onHolders = s.onReaders
	}
	return onlyFirst(s.keys(ctx, "exists", &req, 1, onHolders, existsCall(ctx, &req, touch, false)))
}

// ExistsGroups is Exists with KeysRequest.AllCopies for the piece of each layer group, in the order of
// Geometry.Groups. A piece on a node of an earlier version, which lists only the first group, is Absent.
func (s *Store) ExistsGroups(ctx context.Context, req KeysRequest) ([][]Presence, error) {
	req.AllCopies = true
	return s.keys(ctx, "exists", &req, len(req.Namespace.Geometry.Groups), s.onReaders, existsCall(ctx, &req, false, true))
}

// onlyFirst returns the results for the first layer group.
func onlyFirst(all [][]Presence, err error) ([]Presence, error) {
	if all == nil {
		return nil, err
	}
	return all[0], err
}

// existsCall returns the Exists call to one node. With groups, bit g of a byte of the result is that of
// layer group g.
func existsCall(ctx context.Context, req *KeysRequest, touch, groups bool) func(*node, *session, []byte) ([]byte, error) {
	return func(n *node, sess *session, ids []byte) ([]byte, error) {
		msg := &pb.ExistsRequest{Namespace: req.Namespace.Name, Epoch: uint64(req.Epoch), BlockIds: ids, Touch: touch, Groups: groups}
		overGRPC := func() (*pb.ExistsResponse, error) { return sess.cache.Exists(ctx, msg) }
		if !sess.existsCalls {
			r, err := overGRPC()
			return r.GetPresent(), err
		}
		r, err := n.existsLocal(ctx, sess, msg)
		if errors.Is(err, errNotLocal) {
			r, _, err = ask(ctx, sess, api.MethodExists, msg, 0, replyMax(0, 0)+len(ids)/kv.BlockIDSize, overGRPC)
		}
		return r.GetPresent(), err
	}
}

// Delete removes blocks and returns for each whether it was stored. With chained ids it
// also removes all descendants of the blocks. Delete may be repeated. A node that is
// down deletes nothing, and its blocks are Unknown. Errors: as Exists.
func (s *Store) Delete(ctx context.Context, req KeysRequest) ([]Presence, error) {
	return onlyFirst(s.keys(ctx, "delete", &req, 1, s.onAllNodes, func(_ *node, sess *session, ids []byte) ([]byte, error) {
		r, err := sess.cache.Delete(ctx, &pb.DeleteRequest{Namespace: req.Namespace.Name, Epoch: uint64(req.Epoch), BlockIds: ids})
		return r.GetDeleted(), err
	}))
}

// keys makes one call to each node that split returns, and merges the results of the first layer groups, of
// which there are groups.
func (s *Store) keys(ctx context.Context, what string, req *KeysRequest, groups int, split func(kv.Namespace, []kv.BlockID) []share, call func(*node, *session, []byte) ([]byte, error)) ([][]Presence, error) {
	if err := checkNamespace(req.Namespace); err != nil {
		return nil, err
	}
	if err := ownEpoch(req.Namespace, &req.Epoch); err != nil {
		return nil, fmt.Errorf("client: %s: %w", what, err)
	}
	out := newPresence(groups, len(req.IDs))
	if len(req.IDs) == 0 {
		return out, nil
	}
	shares := split(req.Namespace, req.IDs)
	errs := make([]error, len(shares))
	answers := make([][][]Presence, len(shares))
	if len(shares) == 1 {
		answers[0], errs[0] = shares[0].presence(ctx, what, groups, call)
	} else {
		var wg sync.WaitGroup
		for i := range shares {
			wg.Go(func() { answers[i], errs[i] = shares[i].presence(ctx, what, groups, call) })
		}
		wg.Wait()
	}
	if err := errors.Join(errs...); req.AllCopies && err == nil {
		s.table.Load().inAll(req.Namespace, shares, answers, out)
		return out, nil
	}
	for i := range shares {
		for g := range answers[i] {
			for k, p := range answers[i][g] {
				if at := &out[g][shares[i].global(k)]; *at != Present && p != Absent {
					*at = p
				}
			}
		}
	}
	return out, errors.Join(errs...)
}

// newPresence returns results, all Absent, for the first layer groups of n blocks.
func newPresence(groups, n int) [][]Presence {
	out := make([][]Presence, groups)
	for g := range out {
		out[g] = make([]Presence, n)
	}
	return out
}

// onAllNodes is used instead of shares for blocks in the middle of chains. The first block of the
// prompt, which decides the node, is unknown, so each node gets all blocks, except in a flat
// namespace.
func (s *Store) onAllNodes(ns kv.Namespace, ids []kv.BlockID) []share {
	if ns.Index == kv.IndexFlat {
		return s.everywhere(ns, ids)
	}
	return wholeOn(s.all(), ids)
}

// onReaders returns a share for each reader of the blocks: for a chain, in the order of Store.readers.
func (s *Store) onReaders(ns kv.Namespace, ids []kv.BlockID) []share {
	if ns.Index != kv.IndexFlat {
		return wholeOn(s.readers(ns, ids[0]), ids)
	}
	var out split
	for i, id := range ids {
		for _, n := range s.readers(ns, id) {
			out.add(n, i, id)
		}
	}
	return out.shares
}

// inAll sets out to the answers that hold for all copies. shares are those of onReaders.
func (t *table) inAll(ns kv.Namespace, shares []share, answers [][][]Presence, out [][]Presence) {
	if last := len(answers) - 1; ns.Index != kv.IndexFlat && last == ns.Copies() {
		// The last node, to which the sequence may have passed a home over, counts instead of a home that does not
		// have the first block, if a Write would pass this home over.
		instead := last
		if answers[last][0][0] == Present {
			for k, a := range answers[:last] {
				if a[0][0] != Present && t.isOverfull(shares[k].node) {
					instead = k
					break
				}
			}
		}
		shares, answers = slices.Delete(shares, instead, instead+1), slices.Delete(answers, instead, instead+1)
	}
	for g := range out {
		for i := range out[g] {
			out[g][i] = Present
		}
		for i := range shares {
			for k, p := range answers[i][g] {
				if at := &out[g][shares[i].global(k)]; p == Absent || p == Unknown && *at == Present {
					*at = p
				}
			}
		}
	}
}

// isOverfull reports whether new sequences pass over the node.
func (t *table) isOverfull(n *node) bool {
	i := slices.Index(t.nodes, n)
	return i >= 0 && t.overfull[i]
}

// wholeOn returns a share with all blocks for each node.
func wholeOn(nodes []*node, ids []kv.BlockID) []share {
	out := make([]share, len(nodes))
	for i, n := range nodes {
		out[i] = share{node: n, ids: ids}
	}
	return out
}

// presence makes the call to the node of the share, and to the others if the node does not have the
// first block or does not answer. It returns the result for each block.
func (sh *share) presence(ctx context.Context, what string, groups int, call func(*node, *session, []byte) ([]byte, error)) ([][]Presence, error) {
	first, err := sh.presenceHere(ctx, what, groups, call)
	for answer := first; err == nil && answer[0][0] != Present && len(sh.others) > 0; {
		sh.node, sh.others = sh.others[0], sh.others[1:]
		if answer, err = sh.presenceHere(ctx, what, groups, call); err == nil && answer[0][0] == Present {
			return answer, nil
		}
	}
	return first, err
}

// presenceHere makes the call to one node and returns the result for each of the first layer groups and each
// of its blocks.
func (sh *share) presenceHere(ctx context.Context, what string, groups int, call func(*node, *session, []byte) ([]byte, error)) ([][]Presence, error) {
	var set []byte
	err := sh.node.retry(ctx, sh.node.use, func(sess *session) (err error) {
		set, err = call(sh.node, sess, api.AppendIDs(nil, sh.ids))
		if status.Code(err) == codes.Unimplemented {
			return fmt.Errorf("client: %s: %s has version %s, which does not have this call: %w", what, sh.node.target, sess.version, ErrVersion)
		}
		if err == nil && len(set) != len(sh.ids) {
			return fmt.Errorf("client: %s: %s returned results for %d blocks; %d were requested", what, sh.node.target, len(set), len(sh.ids))
		}
		return callError(ctx, what, sh.node.target, err)
	})
	down := errors.Is(err, errDown) || errors.Is(err, errBusy)
	if err != nil && !down {
		return nil, err
	}
	out := newPresence(groups, len(sh.ids))
	for g := range out {
		for i := range out[g] {
			switch {
			case down:
				out[g][i] = Unknown
			case set[i]>>g&1 != 0:
				out[g][i] = Present
			}
		}
	}
	return out, nil
}
