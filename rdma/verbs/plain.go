//go:build !(verbs && cgo && linux)

package verbs

import (
	"context"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Built is whether this program can drive RDMA cards.
const Built = false

// errNotBuilt wraps rdma.ErrUnsupported.
var errNotBuilt = fmt.Errorf("verbs: %w: this program was built without libibverbs; build it with CGO_ENABLED=1 and -tags verbs, on Linux, with libibverbs-dev installed", rdma.ErrUnsupported)

// New fails: see the package comment for how to build it.
func New(_ context.Context, o Options) (*group.Engine, error) {
	if l := o.Group.Control.Listener; l != nil {
		return nil, errors.Join(errNotBuilt, l.Close())
	}
	return nil, errNotBuilt
}

// Open fails as New does.
func Open(NICOptions) (group.Domain, error) { return nil, errNotBuilt }

// List fails as New does.
func List() ([]Device, error) { return nil, errNotBuilt }
