package client

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sort"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// hintsMax is the number of hot prefixes whose copies a Store uses, and hintBlocksMax the length of each.
const (
	hintsMax      = 64
	hintBlocksMax = 1024
)

// hotHints are the hot prefixes whose copies nodes have named in their replies to matches and reads. mu is a leaf.
type hotHints struct {
	mu    sync.Mutex
	byKey map[hintKey]hotHint
}

type hintKey struct {
	namespace kv.NamespaceID
	epoch     kv.Epoch
	first     kv.BlockID
}

// hotHint has the blocks that are on all nodes of so many replicas, and the time until which they are used.
type hotHint struct {
	ids      []kv.BlockID
	replicas int
	until    time.Time
}

// learn takes the copies from a reply to a call that has found the chain ids. It takes none if more blocks or replicas are
// named than there can be.
func (h *hotHints) learn(ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, hot *pb.HotPrefix, now time.Time) {
	blocks, replicas := int(hot.GetBlocks()), int(hot.GetReplicas())
	if blocks < 1 || blocks > min(len(ids), hintBlocksMax) || replicas <= ns.Copies() || replicas > kv.MaxReplicas {
		return
	}
	const ttlMax = time.Minute
	hint := hotHint{ids: ids[:blocks], replicas: replicas, until: now.Add(min(time.Duration(min(hot.GetTtlMs(), 1<<30))*time.Millisecond, ttlMax))}
	key := hintKey{ns.ID, epoch, ids[0]}
	h.mu.Lock()
	defer h.mu.Unlock()
	old, ok := h.byKey[key]
	shorter := len(old.ids) > blocks && len(ids) > blocks && old.ids[blocks] == ids[blocks] // the next block has not all copies
	switch {
	case ok && now.Before(old.until) && old.replicas == replicas && len(old.ids) >= blocks && old.ids[blocks-1] == ids[blocks-1] && !shorter:
		hint.ids = old.ids // this chain has left the hot prefix earlier, or the prefix is the same
	case !ok && len(h.byKey) >= hintsMax:
		h.removeLocked(now)
		fallthrough
	default:
		hint.ids = slices.Clone(hint.ids)
	}
	if h.byKey == nil {
		h.byKey = make(map[hintKey]hotHint)
	}
	h.byKey[key] = hint
}

// removeLocked removes the hints that have ended or, if none has, the one that ends first.
func (h *hotHints) removeLocked(now time.Time) {
	var first hintKey
	var until time.Time
	for key, hint := range h.byKey {
		if !now.Before(hint.until) {
			delete(h.byKey, key)
		} else if until.IsZero() || hint.until.Before(until) {
			first, until = key, hint.until
		}
	}
	if len(h.byKey) >= hintsMax {
		delete(h.byKey, first)
	}
}

// find returns how many of the first blocks of a chain have copies, and on the nodes of how many replicas.
func (h *hotHints) find(ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, now time.Time) (blocks, replicas int) {
	h.mu.Lock()
	hint, ok := h.byKey[hintKey{ns.ID, epoch, ids[0]}]
	h.mu.Unlock()
	if !ok || !now.Before(hint.until) {
		return 0, 0
	}
	n := min(len(hint.ids), len(ids))
	return sort.Search(n, func(i int) bool { return hint.ids[i] != ids[i] }), hint.replicas
}

// hotNodes returns how many of the first blocks of a chain have copies, and the nodes that have them, the one with the fewest calls of the
// Store first. Among equal nodes the choice is random. Without copies it returns 0.
func (s *Store) hotNodes(ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID) (int, []*node) {
	if ns.Index == kv.IndexFlat || len(ids) == 0 || s.table.Load().places == nil {
		return 0, nil
	}
	blocks, replicas := s.hints.find(ns, epoch, ids, time.Now())
	if blocks == 0 {
		return 0, nil
	}
	ns.Replicas = replicas
	nodes := s.readers(ns, ids[0])
	homes := min(replicas, len(nodes)) // the other node, if any, is one to which the sequence may have passed a home over
	turned := rand.IntN(homes)
	least := slices.Concat(nodes[turned:homes], nodes[:turned])
	rank := func(n *node) int64 {
		if n.silent() {
			return 1 << 32
		}
		return n.calling.Load()
	}
	ranks := make(map[*node]int64, homes) // the calls change during the sort
	for _, n := range least {
		ranks[n] = rank(n)
	}
	slices.SortStableFunc(least, func(a, b *node) int { return int(ranks[a] - ranks[b]) })
	return blocks, append(least, nodes[homes:]...)
}

// DemoteCopies makes copies of a hot prefix the first blocks that their nodes evict, until a match finds them. The copies are those of
// blocks that are stored with more replicas than the namespace has; the homes keep the order of their blocks. A node that is
// down, or of an earlier version, keeps its copies until it evicts them as other blocks.
func (s *Store) DemoteCopies(ctx context.Context, ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, replicas int) error {
	wide := ns
	wide.Replicas = replicas
	homes := s.candidates(ns, ids[0])
	var errs []error
	for _, n := range s.readers(wide, ids[0]) {
		if slices.Contains(homes, n) {
			continue
		}
		sess, err := n.use(ctx)
		if err == nil {
			if _, err = sess.cache.Demote(ctx, &pb.DemoteRequest{Namespace: ns.Name, Epoch: uint64(epoch), BlockIds: api.AppendIDs(nil, ids)}); status.Code(err) == codes.Unimplemented {
				continue
			}
			err = n.failed(sess, callError(ctx, "demote", n.target, err))
		}
		if err != nil && !errors.Is(err, errDown) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
