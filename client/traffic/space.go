package traffic

import (
	"context"
	"errors"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// space is memory of a manager, lent in pieces, which storage and the copier can
// reach.
type space struct {
	*arena.Arena
	memory *client.Memory
	copies copier.Memory
	// region is the memory on the compute NIC; nil where peers never reach it.
	region rdma.Region
}

// open maps the memory and registers it with opts.Storage and opts.Copier. close
// undoes also what an open that failed has done.
func (s *space) open(sizeBytes int64, opts *Options) (err error) {
	if s.Arena, err = arena.New(arena.Options{SizeBytes: sizeBytes, QueueMax: queueMax}); err != nil {
		return err
	}
	if s.memory, err = opts.Storage.Register(s.Bytes()); err != nil {
		return err
	}
	s.copies, err = opts.Copier.Register(s.Bytes(), rdma.RegisterOptions{})
	return err
}

// close unmaps the memory once nothing can reach it any more. Where it can, the
// memory stays mapped, and the error says why.
func (s *space) close(ctx context.Context) error {
	if s.Arena == nil {
		return nil
	}
	var errs []error
	if s.region != nil {
		errs = append(errs, s.region.Close(ctx))
	}
	if s.memory != nil {
		errs = append(errs, s.memory.Close(ctx))
	}
	if s.copies != nil {
		errs = append(errs, s.copies.Close(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return s.Arena.Close()
}
