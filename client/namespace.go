package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// EnsureNamespace creates a namespace on every node that does not have it, and
// returns what Namespace does. Tenant, salt, index kind and geometry of one that is
// there must be def's; its quota may differ. Errors: ErrMismatch, which has both
// definitions; ErrRequest if def cannot be; ErrUnavailable if no node answers; ErrAuth,
// ErrProvider, ctx's. A node that does not answer is left out, and is a miss until it has
// been ensured too.
func (s *Store) EnsureNamespace(ctx context.Context, def kv.Namespace) (kv.Namespace, error) {
	if err := def.Validate(); err != nil {
		return kv.Namespace{}, fmt.Errorf("client: %w: %w", ErrRequest, err)
	}
	for _, n := range s.nodes {
		err := n.createNamespace(ctx, def)
		// One that exists is compared below, for all nodes at once.
		if err != nil && !errors.Is(err, errDown) && !errors.Is(err, errBusy) && !errors.Is(err, ErrMismatch) {
			return kv.Namespace{}, err
		}
	}
	ns, err := s.Namespace(ctx, def.Name)
	if err != nil {
		return kv.Namespace{}, err
	}
	if !sameNamespace(ns, def) {
		salts := "salts are equal"
		if !bytes.Equal(ns.Salt, def.Salt) {
			salts = "salts differ"
		}
		return kv.Namespace{}, fmt.Errorf("client: %w: namespace %q is there as %s; wanted is %s; %s", ErrMismatch, def.Name, describe(ns), describe(def), salts)
	}
	return ns, nil
}

// describe returns what decides the ids and bytes of a namespace, without its salt, which
// is a secret and must not reach a log.
func describe(ns kv.Namespace) string {
	return fmt.Sprintf("{%v, index %v, tenant %q, dtype %q, layout %q}", ns.Geometry, ns.Index, ns.Tenant, ns.Geometry.DType, ns.Geometry.Layout)
}

func (n *node) createNamespace(ctx context.Context, def kv.Namespace) error {
	sess, err := n.use(ctx)
	if err != nil {
		return err
	}
	_, err = sess.admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(def)})
	return n.failed(sess, callError(ctx, "create namespace", n.target, err))
}

// BumpEpoch begins an epoch on every node: to, or, where that is 0, the one after the
// newest that any of them has. It returns the new epoch. A node that is at it already stays
// there, so that each of several engines may call it for the same weights, and a call may be
// repeated with the epoch it returned. A node that does not answer keeps its old epoch, and
// is a miss for the new one: the error, ErrUnavailable, names it. Errors: also ErrMismatch (a
// node is at a later epoch), ErrNotFound, ErrAuth, ctx's.
func (s *Store) BumpEpoch(ctx context.Context, name string, to kv.Epoch) (kv.Epoch, error) {
	if to == 0 {
		ns, err := s.Namespace(ctx, name)
		if err != nil {
			return 0, err
		}
		to = ns.Epoch + 1
	}
	var errs []error
	for _, n := range s.nodes {
		err := n.bumpEpoch(ctx, name, to)
		if errors.Is(err, errDown) || errors.Is(err, errBusy) {
			err = fmt.Errorf("client: bump epoch: %w: %w", ErrUnavailable, hideInternal(err))
		}
		errs = append(errs, err)
	}
	return to, errors.Join(errs...)
}

func (n *node) bumpEpoch(ctx context.Context, name string, to kv.Epoch) error {
	sess, err := n.use(ctx)
	if err != nil {
		return err
	}
	_, err = sess.admin.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: name, To: uint64(to)})
	if err = n.failed(sess, callError(ctx, "bump epoch", n.target, err)); !errors.Is(err, ErrRequest) {
		return err
	}
	ns, nsErr := n.namespace(ctx, name)
	switch {
	case nsErr != nil:
		return nsErr
	case ns.Epoch == to:
		return nil
	}
	return fmt.Errorf("client: bump epoch: %w: namespace %q is at epoch %d on %s, later than %d", ErrMismatch, name, ns.Epoch, n.target, to)
}
