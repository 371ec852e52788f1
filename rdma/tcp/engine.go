package tcp

import (
	"context"
	"errors"

	"github.com/penstock-kv/penstock/rdma"
)

// New starts an engine. It listens before it returns.
func New(ctx context.Context, opts Options) (rdma.Engine, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	return nil, errors.ErrUnsupported
}
