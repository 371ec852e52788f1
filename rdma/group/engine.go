package group

import (
	"context"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
)

// Engine is the transfer engine over a group of NICs.
type Engine struct {
	rdma.Engine
}

// New starts an engine over opts.Domains. If it is to accept sessions, it does
// so before New returns. ctx bounds the start only.
func New(ctx context.Context, opts Options) (*Engine, error) {
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
