//go:build !(verbs && cgo && linux)

package verbs

import (
	"context"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Built reports whether this program supports RDMA cards.
const Built = false

// errNotBuilt wraps rdma.ErrUnsupported.
var errNotBuilt = fmt.Errorf("verbs: %w: this program was built without libibverbs; build it with CGO_ENABLED=1 and -tags verbs, on Linux, with libibverbs-dev installed", rdma.ErrUnsupported)

// New returns an error; the package comment describes how to build with verbs.
func New(_ context.Context, o Options) (*group.Engine, error) {
	if l := o.Group.Control.Listener; l != nil {
		return nil, errors.Join(errNotBuilt, l.Close())
	}
	return nil, errNotBuilt
}

// Open returns the same error as New.
func Open(NICOptions) (group.Domain, error) { return nil, errNotBuilt }

// List returns the same error as New.
func List() ([]Device, error) { return nil, errNotBuilt }
