package traffic

import (
	"context"
	"errors"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// space is memory of a manager which is allocated in pieces and which storage and the copier can
// access.
type space struct {
	*arena.Arena
	memory *client.Memory
	copies copier.Memory
	// saves is the memory on opts.SaveCopier; nil without one.
	saves copier.Memory
	// region is the memory on the compute NIC; nil if peers never access it.
	region rdma.Region
}

// open maps the memory and registers it with opts.Storage and the copiers of opts. close also
// cleans up after an open that failed.
func (s *space) open(sizeBytes int64, opts *Options) (err error) {
	if s.Arena, err = arena.New(arena.Options{SizeBytes: sizeBytes, QueueMax: queueMax}); err != nil {
		return err
	}
	if s.memory, err = opts.Storage.Register(s.Bytes()); err != nil {
		return err
	}
	if s.copies, err = opts.Copier.Register(s.Bytes(), rdma.RegisterOptions{}); err != nil || opts.SaveCopier == nil {
		return err
	}
	s.saves, err = opts.SaveCopier.Register(s.Bytes(), rdma.RegisterOptions{})
	return err
}

// close ends all registrations of the memory and then unmaps it. If a registration cannot be
// closed, the memory stays mapped, and close returns the error.
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
	for _, m := range []copier.Memory{s.copies, s.saves} {
		if m != nil {
			errs = append(errs, m.Close(ctx))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return s.Arena.Close()
}
