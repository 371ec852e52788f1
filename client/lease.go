package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// Lease keeps a matched prefix from being evicted, or an epoch live, until its time limit or its
// release. The methods of a Lease may be called concurrently.
type Lease struct {
	store *Store
	parts []leasePart
}

// leasePart is the lease on one node. A match has several parts only in a flat namespace.
type leasePart struct {
	node *node
	id   uint64
}

// PinEpoch keeps an epoch of the namespace live on every node that answers, for ttl. No BumpEpoch
// ends the epoch meanwhile, so a group of rollouts can continue with the weights that it began
// with. epoch 0 means ns.Epoch. Blocks of the epoch may still be evicted. A node's restart ends the
// pin on that node, and so does an operator who retires the epoch by force. A match of the epoch is
// then a miss. Errors: ErrMismatch if the epoch is not live on a node, ErrNotFound, ErrRequest,
// ErrUnavailable if no node answers, ErrAuth, the error of ctx.
func (s *Store) PinEpoch(ctx context.Context, ns kv.Namespace, epoch kv.Epoch, ttl time.Duration) (*Lease, error) {
	if err := checkNamespace(ns); err != nil {
		return nil, err
	}
	if ttl <= 0 {
		return nil, fmt.Errorf("client: %w: a pin for %v", ErrRequest, ttl)
	}
	if err := ownEpoch(ns, &epoch); err != nil {
		return nil, fmt.Errorf("client: pin epoch: %w", err)
	}
	lease := &Lease{store: s}
	var away []error
	for _, n := range s.all() {
		var r *pb.PinEpochResponse
		err := n.retry(ctx, n.use, func(sess *session) (err error) {
			r, err = sess.cache.PinEpoch(ctx, &pb.PinEpochRequest{Namespace: ns.Name, Epoch: uint64(epoch), TtlMs: millis(ttl)})
			return callError(ctx, "pin epoch", n.target, err)
		})
		switch {
		case err == nil:
			lease.parts = append(lease.parts, leasePart{node: n, id: r.GetLease()})
		case errors.Is(err, errDown), errors.Is(err, errBusy):
			away = append(away, err)
		default:
			lease.releaseQuietly(ctx)
			return nil, err
		}
	}
	if len(lease.parts) == 0 {
		return nil, fmt.Errorf("client: pin epoch %d of namespace %q: %w: %w", epoch, ns.Name, ErrUnavailable, hideInternal(errors.Join(away...)))
	}
	return lease, nil
}

// IDs returns the number that each node gave to its part of the lease. `penstock unpin` takes these
// numbers.
func (l *Lease) IDs() []uint64 {
	ids := make([]uint64, len(l.parts))
	for i, p := range l.parts {
		ids[i] = p.id
	}
	return ids
}

// Renew makes the lease end ttl from now. Errors: ErrNotFound if it has ended (the blocks may have
// been evicted, or the epoch retired), ErrUnavailable, the error of ctx.
func (l *Lease) Renew(ctx context.Context, ttl time.Duration) error {
	if ttl <= 0 {
		return fmt.Errorf("client: %w: a lease of %v", ErrRequest, ttl)
	}
	return l.each(ctx, "renew lease", func(sess *session, id uint64) error {
		_, err := sess.cache.RenewLease(ctx, &pb.RenewLeaseRequest{Lease: id, TtlMs: millis(ttl)})
		return err
	})
}

// Release ends the lease. Releasing a lease that has ended is no error. Errors: ErrUnavailable, the
// error of ctx.
func (l *Lease) Release(ctx context.Context) error {
	return l.each(ctx, "release lease", func(sess *session, id uint64) error {
		_, err := sess.cache.ReleaseLease(ctx, &pb.ReleaseLeaseRequest{Lease: id})
		if errors.Is(callError(ctx, "", "", err), ErrNotFound) {
			return nil
		}
		return err
	})
}

// each calls f for every part. f must be safe to repeat, as renewing and releasing are.
func (l *Lease) each(ctx context.Context, what string, f func(*session, uint64) error) error {
	var errs []error
	for _, p := range l.parts {
		err := p.node.retry(ctx, p.node.use, func(sess *session) error {
			return callError(ctx, what, p.node.target, f(sess, p.id))
		})
		if errors.Is(err, errDown) || errors.Is(err, errBusy) {
			err = fmt.Errorf("client: %w: %w", ErrUnavailable, hideInternal(err))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

const (
	// releaseWithin is the longest time for which the release of a lease without a holder is tried in the background.
	releaseWithin = time.Minute
	// releaseEvery is the time between two tries.
	releaseEvery = time.Second
	// releasingMax is the number of pins that are awaited or released at a time above which there are no tries in
	// the background.
	releasingMax = 256
)

// releaseQuietly ends a lease that is not returned to the caller. A lease that is not released
// expires, but a pin may stay for long, so the release is tried even if ctx has ended. A release that fails, because a node stands still, is tried again
// in the background.
func (l *Lease) releaseQuietly(ctx context.Context) {
	if len(l.parts) == 0 {
		return
	}
	try := func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortWithin)
		defer cancel()
		return l.Release(ctx)
	}
	err := try()
	if err == nil {
		return
	}
	if l.store.releasing.Add(1) > releasingMax || !l.store.spawn(func() {
		defer l.store.releasing.Add(-1)
		l.releaseLater(try, err)
	}) {
		l.store.releasing.Add(-1)
		l.abandoned(err)
	}
}

// releaseLater tries a release again until it succeeds, for releaseWithin, or until Close begins. err is the error of
// the try before.
func (l *Lease) releaseLater(try func() error, err error) {
	ctx, cancel := context.WithTimeout(l.store.ctx, releaseWithin)
	defer cancel()
	every := time.NewTicker(releaseEvery)
	defer every.Stop()
	for err != nil && ctx.Err() == nil {
		select {
		case <-every.C:
			err = try()
		case <-ctx.Done():
		}
	}
	if err != nil {
		l.abandoned(err)
	}
}

// abandoned logs a lease that is not released. It ends by its lifetime.
func (l *Lease) abandoned(err error) {
	l.store.opts.Logger.Warn("a lease without a holder could not be released", "leases", l.IDs(), "err", err)
}
