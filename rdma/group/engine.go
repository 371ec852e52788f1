package group

import (
	"context"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
)

// New starts an engine over opts.Domains. If it is to accept sessions, it does
// so before New returns. ctx bounds the start only.
func New(ctx context.Context, opts Options) (rdma.Engine, error) {
	opts.EnsureDefaults()
	err := opts.Validate()
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = fmt.Errorf("group: the engine is not there yet: %w", rdma.ErrUnsupported)
	}
	if opts.Control.Listener != nil {
		err = errors.Join(err, opts.Control.Listener.Close())
	}
	for _, d := range opts.Domains {
		err = errors.Join(err, d.Close())
	}
	return nil, err
}
