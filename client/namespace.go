package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// EnsureNamespace creates a namespace on every node that does not have it, and returns
// the result of Namespace. If a node has the namespace already, tenant, index kind and
// geometry must equal those of def, and so must the salt if def has one; the quota may
// differ. If def has no salt, the result has the salt of the existing namespace. For a tenant
// (docs/access.md) a new namespace gets a random salt, which is the same on all nodes.
// Nodes that do not answer are skipped: they stay misses until a later call creates the
// namespace on them. Only the creation of a random salt needs an answer of every node, unless
// the nodes are a cluster. Errors: ErrMismatch (the error has both definitions), ErrRequest
// (def is invalid), ErrUnavailable (no node answers, or not every node where a random
// salt needs it), ErrAuth, ErrProvider, ErrVersion (no node is of this client's version), and
// the error of ctx.
func (s *Store) EnsureNamespace(ctx context.Context, def kv.Namespace) (kv.Namespace, error) {
	if err := def.Validate(); err != nil {
		return kv.Namespace{}, fmt.Errorf("client: %w: %w", ErrRequest, err)
	}
	anySalt := len(def.Salt) == 0
	if err := s.createOnAll(ctx, def); err != nil {
		return kv.Namespace{}, err
	}
	ns, err := s.Namespace(ctx, def.Name)
	if err != nil {
		return kv.Namespace{}, err
	}
	if anySalt {
		def.Salt = ns.Salt
	}
	if !sameNamespace(ns, def) {
		salts := "the salts are equal"
		if anySalt {
			salts = "any salt is accepted"
		} else if !bytes.Equal(ns.Salt, def.Salt) {
			salts = "the salts differ"
		}
		return kv.Namespace{}, fmt.Errorf("client: %w: namespace %q exists as %s; the caller wants %s; %s", ErrMismatch, def.Name, describe(ns), describe(def), salts)
	}
	return ns, nil
}

// createOnAll creates a namespace on every node that answers and does not have it. It does not
// compare the definitions of nodes that have it.
//
// Nodes without etcd do not agree on a random salt. So only one node makes it, the first by address,
// and only for a client that has found that every node answers and none has the namespace. All
// other nodes get the salt of a node that has the namespace. The salts are then equal although
// several clients create the namespace at once, a client ends before it has reached all nodes, or
// the clients reach different nodes.
//
// Nodes without etcd do not agree on the first epoch either: a node begins above the last epoch of the name that it
// has deleted. So a node that lacks the namespace gets it with the newest epoch of the others. If no node had
// it, the nodes that began at a lower epoch than another are bumped to that epoch.
func (s *Store) createOnAll(ctx context.Context, def kv.Namespace) error {
	nodes := slices.SortedFunc(slices.Values(s.all()), func(a, b *node) int { return strings.Compare(a.target, b.target) })
	salting := pb.Salting_SALTING_NONE
	var down []error
	anySalt, fresh := len(def.Salt) == 0, false
	if anySalt || len(nodes) > 1 && !s.opts.Discover {
		found, errs, err := findNamespace(ctx, nodes, def.Name)
		switch {
		case err != nil:
			return err
		case found != nil:
			def.Epoch = max(def.Epoch, found.Epoch)
			if anySalt {
				def.Salt = found.Salt
			}
		default:
			fresh = true
			if anySalt && len(errs) > 0 {
				salting, down = pb.Salting_SALTING_EXISTING, errs
			} else if anySalt {
				salting = pb.Salting_SALTING_RANDOM
			}
		}
	}
	began := make(map[*node]kv.Epoch)
	for _, n := range nodes {
		ns, err := n.createNamespace(ctx, def, salting)
		if err == nil {
			began[n] = kv.Epoch(ns.GetEpoch())
			def.Epoch = max(def.Epoch, began[n])
		}
		switch {
		case err == nil && salting != pb.Salting_SALTING_NONE:
			def.Salt, salting = ns.GetSalt(), pb.Salting_SALTING_NONE
		case err == nil, errors.Is(err, ErrMismatch): // the caller compares the definitions of all nodes
		case errors.Is(err, errDown), errors.Is(err, errBusy):
			down = append(down, err)
			if salting == pb.Salting_SALTING_RANDOM {
				salting = pb.Salting_SALTING_EXISTING
			}
		case status.Code(err) == codes.Aborted:
			return fmt.Errorf("client: namespace %q: %w: a new namespace without a salt gets a random one only while every node answers, so that all nodes have the same one: %w",
				def.Name, ErrUnavailable, hideInternal(errors.Join(down...)))
		default:
			return err
		}
	}
	for n, epoch := range began {
		if !fresh || epoch == def.Epoch {
			continue
		}
		if err := n.bumpEpoch(ctx, def.Name, def.Epoch, 1); err != nil && !errors.Is(err, errDown) && !errors.Is(err, errBusy) {
			return err
		}
	}
	return nil
}

// findNamespace returns the definition of the first node that has a namespace, with the newest epoch of all nodes that
// have it, nil if no node that answers has it, and the errors of the nodes that do not answer.
func findNamespace(ctx context.Context, nodes []*node, name string) (found *kv.Namespace, down []error, _ error) {
	defs := make([]kv.Namespace, len(nodes))
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() { defs[i], errs[i] = n.namespace(ctx, name) })
	}
	wg.Wait()
	for i, err := range errs {
		switch {
		case err == nil && found == nil:
			found = &defs[i]
		case err == nil:
			found.Epoch = max(found.Epoch, defs[i].Epoch)
		case errors.Is(err, ErrNotFound):
		case errors.Is(err, errDown), errors.Is(err, errBusy):
			down = append(down, err)
		default:
			return nil, nil, err
		}
	}
	return found, down, nil
}

// describe returns the fields on which ids and bytes of a namespace depend, except the
// salt, which is a secret and must not reach a log.
func describe(ns kv.Namespace) string {
	return fmt.Sprintf("{%v, index %v, tenant %q, dtype %q, layout %q}", ns.Geometry, ns.Index, ns.Tenant, ns.Geometry.DType, ns.Geometry.Layout)
}

func (n *node) createNamespace(ctx context.Context, def kv.Namespace, salting pb.Salting) (*pb.Namespace, error) {
	sess, err := n.use(ctx)
	if err != nil {
		return nil, err
	}
	ns, err := sess.admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(def), Salting: salting})
	return ns, n.failed(sess, callError(ctx, "create namespace", n.target, err))
}

// BumpEpoch begins a new epoch on every node and returns it. The new epoch is to or, if to is 0,
// one after the newest epoch of any node. keep is the number of newest epochs that stay live,
// including the new epoch; 0 means 1. Pinned epochs also stay live. A node that is at the new epoch
// already does not change. So several engines may bump to the same epoch, and a call may be
// repeated with the returned epoch. Nodes that do not answer keep their old epoch, so calls for the
// new epoch miss on them. Errors: ErrUnavailable (the error names the nodes that do not answer),
// ErrMismatch (a node is at a later epoch), ErrNotFound, ErrAuth, and the error of ctx.
func (s *Store) BumpEpoch(ctx context.Context, name string, to kv.Epoch, keep int) (kv.Epoch, error) {
	if keep < 0 || keep > kv.MaxLive {
		return 0, fmt.Errorf("client: bump epoch: %w: keep %d epochs; want 0 to %d", ErrRequest, keep, kv.MaxLive)
	}
	if to == 0 {
		ns, err := s.Namespace(ctx, name)
		if err != nil {
			return 0, err
		}
		to = ns.Epoch + 1
	}
	return to, s.changeEach("bump epoch", func(n *node) error { return n.bumpEpoch(ctx, name, to, keep) })
}

func (n *node) bumpEpoch(ctx context.Context, name string, to kv.Epoch, keep int) error {
	sess, err := n.use(ctx)
	if err != nil {
		return err
	}
	_, err = sess.admin.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: name, To: uint64(to), Keep: uint32(keep)})
	if err = n.failed(sess, callError(ctx, "bump epoch", n.target, err)); !errors.Is(err, ErrRequest) {
		return err
	}
	ns, nsErr := n.namespace(ctx, name)
	switch {
	case nsErr != nil:
		return nsErr
	case ns.Epoch == to:
		return nil
	case ns.Epoch < to:
		return err
	}
	return fmt.Errorf("client: bump epoch: %w: namespace %q is at epoch %d on %s, later than %d", ErrMismatch, name, ns.Epoch, n.target, to)
}

// RetireEpoch makes every block of an older live epoch a miss on every node. On a node
// where the epoch is not live nothing changes. With force the pins of the epoch end.
// Errors: ErrMismatch (the epoch is pinned, and force is not set), ErrRequest (it is the
// newest epoch), ErrUnavailable (the error names the nodes that do not answer),
// ErrNotFound, ErrAuth, and the error of ctx.
func (s *Store) RetireEpoch(ctx context.Context, name string, epoch kv.Epoch, force bool) error {
	return s.changeEach("retire epoch", func(n *node) error { return n.retireEpoch(ctx, name, epoch, force) })
}

// changeEach calls change for each node, one after the other, and joins the errors. The error of a
// node that does not answer is ErrUnavailable. With Options.Discover the first node that answers makes
// the change for all.
func (s *Store) changeEach(what string, change func(*node) error) error {
	var errs []error
	for _, n := range s.all() {
		err := change(n)
		if s.opts.Discover && !errors.Is(err, errDown) && !errors.Is(err, errBusy) {
			return err
		}
		if errors.Is(err, errDown) || errors.Is(err, errBusy) {
			err = fmt.Errorf("client: %s: %w: %w", what, ErrUnavailable, hideInternal(err))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (n *node) retireEpoch(ctx context.Context, name string, epoch kv.Epoch, force bool) error {
	sess, err := n.use(ctx)
	if err != nil {
		return err
	}
	_, err = sess.admin.RetireEpoch(ctx, &pb.RetireEpochRequest{Name: name, Epoch: uint64(epoch), Force: force})
	if err = n.failed(sess, callError(ctx, "retire epoch", n.target, err)); !errors.Is(err, ErrRequest) {
		return err
	}
	ns, nsErr := n.namespace(ctx, name)
	if nsErr == nil && ns.Epoch != epoch {
		return nil // it is not live
	}
	return errors.Join(err, nsErr)
}
