package client

import (
	"context"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// ConnectLocal makes n connections to the unix socket of each node that reports one.
func (s *Store) ConnectLocal(ctx context.Context, n int) error {
	for _, node := range s.all() {
		sess, err := node.live(ctx)
		if err != nil {
			return err
		}
		// Without an idle connection, take makes one in the background.
		if c, err := node.local.take(sess); err == nil {
			node.local.put(c, true)
		}
		for range n {
			c, err := node.local.connect(ctx, node.local.path(sess), sess.localID)
			if err != nil {
				return err
			}
			node.local.put(c, true)
		}
	}
	return nil
}

// Overfull returns the number of members that new sequences pass over.
func (s *Store) Overfull() (n int) {
	for _, over := range s.table.Load().overfull {
		if over {
			n++
		}
	}
	return n
}

// Asked returns the addresses of the nodes that a read of a chain asks, one after the other.
func (s *Store) Asked(ctx context.Context, ns kv.Namespace, ids []kv.BlockID) (targets []string) {
	for _, n := range s.coldRoutes(ctx, MatchRequest{Namespace: ns, Epoch: ns.Epoch}, ids)(0) {
		targets = append(targets, n.target)
	}
	return targets
}

// Draining returns the number of members that drain.
func (s *Store) Draining() (n int) {
	for _, p := range s.table.Load().places {
		if p.Draining {
			n++
		}
	}
	return n
}

// LearnCopies makes the Store use copies of the first blocks of a chain, as a reply with a hint does.
func (s *Store) LearnCopies(ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, replicas int) {
	s.hints.learn(ns, epoch, ids, &pb.HotPrefix{Blocks: uint32(len(ids)), Replicas: uint32(replicas), TtlMs: 60_000}, time.Now())
}

// MatchAsked returns the number of nodes that a match of a chain asks, one after the other.
func (s *Store) MatchAsked(ctx context.Context, req MatchRequest, ids []kv.BlockID) int {
	return len(s.holders(ctx, req, ids)(0))
}
