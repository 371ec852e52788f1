//go:build !(fabric && cgo && linux)

package fabric

import (
	"context"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Built reports whether this program supports libfabric.
const Built = false

// errNotBuilt wraps rdma.ErrUnsupported.
var errNotBuilt = fmt.Errorf("fabric: %w: this program was built without libfabric; build it with CGO_ENABLED=1 and -tags fabric, on Linux, with libfabric-dev and pkg-config installed", rdma.ErrUnsupported)

// New returns an error; the package comment describes how to build with libfabric.
func New(_ context.Context, o Options) (*group.Engine, error) {
	if l := o.Group.Control.Listener; l != nil {
		return nil, errors.Join(errNotBuilt, l.Close())
	}
	return nil, errNotBuilt
}

// Open returns the same error as New.
func Open(DomainOptions) (group.Domain, error) { return nil, errNotBuilt }

// List returns the same error as New.
func List(string) ([]NIC, error) { return nil, errNotBuilt }
