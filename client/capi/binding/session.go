package binding

import (
	"errors"
	"fmt"

	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/planners"
)

// PlannerOptions are the address and the credentials of a planner.
type PlannerOptions struct {
	// Address is the address of the planner's gRPC listener, host:port. If several planners elect a
	// leader, it has all their addresses, with commas between.
	Address string
	Credentials
}

// session is the common part of Leader and Gateway: a queue, and a connection to the planner.
type session[E any] struct {
	*queue[E]
	conn *planners.Conn
}

// connect returns a session of a store. It does not wait for the planner.
func connect[E any](store *Store, o PlannerOptions) (*session[E], error) {
	token, err := o.token(store.logs.logger())
	if err != nil {
		return nil, err
	}
	t, err := o.tls(store.logs.logger())
	if err != nil {
		return nil, err
	}
	conn, err := planners.Dial(o.Address, client.DialOptions{TokenSource: token, TLS: t, Insecure: o.Insecure, Timeout: store.opts.DialTimeout})
	if err != nil {
		return nil, fmt.Errorf("%w: planner: %w", ErrInvalid, err)
	}
	q, err := newQueue[E](store)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &session[E]{q, conn}, nil
}

// discard closes a session whose object could not be opened because of err. It returns err as an
// ErrInvalid, joined with the errors of closing.
func (s *session[E]) discard(err error) error {
	return errors.Join(fmt.Errorf("%w: %w", ErrInvalid, err), s.conn.Close(), s.queue.discard())
}

// statuses maps the status of a planner's errors to codes. A planner of another version that lacks
// the call returns Unimplemented.
var statuses = map[grpccodes.Code]Code{
	grpccodes.Unauthenticated: Auth, grpccodes.PermissionDenied: Auth, grpccodes.Unavailable: Unavailable, grpccodes.Unimplemented: Version,
	grpccodes.ResourceExhausted: Busy, grpccodes.InvalidArgument: Invalid, grpccodes.AlreadyExists: Invalid,
}

// plannerCode returns the code of an error that is a status of the planner.
func plannerCode(err error) (Code, bool) {
	c, ok := statuses[status.Code(err)]
	return c, ok
}
