package client

import (
	"context"

	"golang.org/x/sync/errgroup"
)

// ReadBatch reads several sequences, BatchParallel at a time. The results are in the order of reqs.
// The first error ends the batch.
func (s *Store) ReadBatch(ctx context.Context, reqs []ReadRequest) ([]ReadResult, error) {
	return batch(ctx, s.opts.BatchParallel, reqs, s.Read)
}

// WriteBatch writes several sequences, BatchParallel at a time. The results are in the order of
// reqs. The first error ends the batch.
func (s *Store) WriteBatch(ctx context.Context, reqs []WriteRequest) ([]WriteResult, error) {
	return batch(ctx, s.opts.BatchParallel, reqs, s.Write)
}

func batch[Req, Res any](ctx context.Context, parallel int, reqs []Req, call func(context.Context, Req) (Res, error)) ([]Res, error) {
	results := make([]Res, len(reqs))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for i := range reqs {
		group.Go(func() (err error) {
			results[i], err = call(ctx, reqs[i])
			return err
		})
	}
	return results, group.Wait()
}
