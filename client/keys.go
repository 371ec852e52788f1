package client

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// Presence is what a node says of one block.
type Presence uint8

const (
	// Absent: not stored, or not at the epoch that was asked for.
	Absent Presence = iota
	// Present: stored. Of a Delete: it was.
	Present
	// Unknown: the node that has it does not answer.
	Unknown
)

// KeysRequest names blocks that a call is about, each by itself.
type KeysRequest struct {
	Namespace kv.Namespace
	// IDs are the blocks. For Exists where ids are chained the first is that of a
	// prompt: it says which node has them.
	IDs []kv.BlockID
	// Epoch of the caller's weights; 0 means Namespace.Epoch.
	Epoch kv.Epoch
}

// Exists says of each block by itself whether it is stored; where ids are chained,
// whether it can be matched. With touch those that are stored count as used now, for
// the order of eviction. A node that is down is Unknown, for its blocks. Errors:
// ErrRequest, ErrNotFound, ErrAuth, ErrUnsupported (the node is older than this call), ctx's.
func (s *Store) Exists(ctx context.Context, req KeysRequest, touch bool) ([]Presence, error) {
	return s.keys(ctx, "exists", &req, s.shares, func(sess *session, ids []byte) ([]byte, error) {
		r, err := sess.cache.Exists(ctx, &pb.ExistsRequest{Namespace: req.Namespace.Name, Epoch: uint64(req.Epoch), BlockIds: ids, Touch: touch})
		return r.GetPresent(), err
	})
}

// Delete removes blocks, where ids are chained with everything below them, and
// returns of each whether it was there. It may be repeated. On a node that is
// down, for whose blocks it returns Unknown, nothing is deleted. Errors: as Exists.
func (s *Store) Delete(ctx context.Context, req KeysRequest) ([]Presence, error) {
	return s.keys(ctx, "delete", &req, s.everywhere, func(sess *session, ids []byte) ([]byte, error) {
		r, err := sess.cache.Delete(ctx, &pb.DeleteRequest{Namespace: req.Namespace.Name, Epoch: uint64(req.Epoch), BlockIds: ids})
		return r.GetDeleted(), err
	})
}

// keys makes a call to each node that has some of the blocks.
func (s *Store) keys(ctx context.Context, what string, req *KeysRequest, split func(kv.Namespace, []kv.BlockID) []share, call func(*session, []byte) ([]byte, error)) ([]Presence, error) {
	if err := checkNamespace(req.Namespace); err != nil {
		return nil, err
	}
	if err := ownEpoch(req.Namespace, &req.Epoch); err != nil {
		return nil, fmt.Errorf("client: %s: %w", what, err)
	}
	out := make([]Presence, len(req.IDs))
	if len(req.IDs) == 0 {
		return out, nil
	}
	shares := split(req.Namespace, req.IDs)
	errs := make([]error, len(shares))
	answers := make([][]Presence, len(shares))
	var wg sync.WaitGroup
	for i := range shares {
		wg.Go(func() { answers[i], errs[i] = shares[i].presence(ctx, what, call) })
	}
	wg.Wait()
	for i := range shares {
		for k, p := range answers[i] {
			if at := &out[shares[i].global(k)]; *at != Present && p != Absent {
				*at = p
			}
		}
	}
	return out, errors.Join(errs...)
}

// everywhere is shares for a call about blocks in the middle of chains: any node may
// have one whose prompt is not known.
func (s *Store) everywhere(ns kv.Namespace, ids []kv.BlockID) []share {
	if ns.Index == kv.IndexFlat {
		return s.shares(ns, ids)
	}
	out := make([]share, len(s.nodes))
	for i, n := range s.nodes {
		out[i] = share{node: n, ids: ids}
	}
	return out
}

// presence asks one node about its blocks.
func (sh *share) presence(ctx context.Context, what string, call func(*session, []byte) ([]byte, error)) ([]Presence, error) {
	var set []byte
	err := sh.node.retry(ctx, sh.node.use, func(sess *session) (err error) {
		set, err = call(sess, api.AppendIDs(nil, sh.ids))
		if status.Code(err) == codes.Unimplemented {
			return fmt.Errorf("client: %s: %s is of version %s, which does not know this call: %w", what, sh.node.target, sess.version, ErrUnsupported)
		}
		if err == nil && len(set) != len(sh.ids) {
			return fmt.Errorf("client: %s: %s answered for %d blocks of %d", what, sh.node.target, len(set), len(sh.ids))
		}
		return callError(ctx, what, sh.node.target, err)
	})
	down := errors.Is(err, errDown) || errors.Is(err, errBusy)
	if err != nil && !down {
		return nil, err
	}
	out := make([]Presence, len(sh.ids))
	for i := range out {
		switch {
		case down:
			out[i] = Unknown
		case set[i] != 0:
			out[i] = Present
		}
	}
	return out, nil
}
