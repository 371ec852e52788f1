package binding

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/sys"
)

// PlannerOptions are a planner's address and how to connect to it.
type PlannerOptions struct {
	// Address is the planner's gRPC, host:port.
	Address string
	Credentials
}

// session is what Leader and Gateway have in common: a connection to the planner, and a
// queue of events that the caller drains.
type session[E any] struct {
	store  *Store
	handle Handle
	conn   *grpc.ClientConn
	// ctx ends when close begins. running counts the goroutines that end with it.
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	// calls counts the calls of the caller.
	calls sync.WaitGroup
	// ended is called at the end of close.
	ended func()

	mu     sync.Mutex
	closed bool
	events []E
	fd     sys.Eventfd // readable while there are events
}

func (s *session[E]) of() *Store { return s.store }

// connect returns a session of a store. It does not wait for the planner.
func connect[E any](store *Store, o PlannerOptions) (*session[E], error) {
	token, err := o.token()
	if err != nil {
		return nil, err
	}
	t, err := o.tls()
	if err != nil {
		return nil, err
	}
	conn, err := client.Dial(o.Address, client.DialOptions{BearerToken: token, TLS: t, Insecure: o.Insecure, Timeout: store.opts.DialTimeout})
	if err != nil {
		return nil, fmt.Errorf("%w: planner: %w", ErrInvalid, err)
	}
	s := &session[E]{store: store, conn: conn}
	if s.fd, err = sys.NewEventfd(); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s, nil
}

// discard closes a session that was not opened because of err.
func (s *session[E]) discard(err error) error {
	s.cancel()
	return errors.Join(fmt.Errorf("%w: %w", ErrInvalid, err), s.conn.Close(), s.fd.Close())
}

// begin counts a call, for which close waits. It fails if the session is closed.
func (s *session[E]) begin() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("%w: it was closed", ErrHandle)
	}
	s.calls.Add(1)
	return nil
}

// pushLocked adds an event to the queue of an open session.
func (s *session[E]) pushLocked(e E) {
	if !s.closed {
		s.events = append(s.events, e)
		s.signalLocked()
	}
}

// removeLocked removes the events for which drop returns true. The session is open.
func (s *session[E]) removeLocked(drop func(E) bool) {
	s.events = slices.DeleteFunc(s.events, drop)
	s.signalLocked()
}

// signalLocked makes the eventfd readable if there are events, and not readable otherwise.
func (s *session[E]) signalLocked() {
	signal := s.fd.Signal
	if len(s.events) == 0 {
		signal = s.fd.Clear
	}
	if err := signal(); err != nil {
		s.store.logs.logger().Error("eventfd", "err", err)
	}
}

// Drain moves up to len(dst) events to dst and returns their number. It does not wait.
func (s *session[E]) Drain(dst []E) (int, error) {
	if err := s.begin(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	s.mu.Lock()
	defer s.mu.Unlock()
	n := copy(dst, s.events)
	s.events = slices.Delete(s.events, 0, n)
	s.signalLocked()
	return n, nil
}

// EventFD returns the descriptor that is readable while an event waits for Drain.
func (s *session[E]) EventFD() (int, error) {
	if err := s.begin(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	return s.fd.FD(), nil
}

// Close ends the session; see penstock_leader_close.
func (s *session[E]) Close() error {
	// The store's Close waits for this one.
	if err := s.store.begin(); err != nil {
		return err
	}
	defer s.store.calls.Done()
	return s.end()
}

// end closes the session, once.
func (s *session[E]) end() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return fmt.Errorf("%w: it was closed", ErrHandle)
	}
	s.closed = true
	s.mu.Unlock()
	s.store.library.remove(s.handle)
	s.store.forget(s.handle)
	s.cancel()
	s.calls.Wait() // a call may add to running
	s.running.Wait()
	s.ended()
	// A caller that polls a duplicate of the descriptor gets the end too.
	return errors.Join(s.conn.Close(), s.fd.Signal(), s.fd.Close())
}

// statuses maps the status of a planner's errors to codes. Version is for a
// planner of another version, which lacks the call.
var statuses = map[grpccodes.Code]Code{
	grpccodes.Unauthenticated: Auth, grpccodes.PermissionDenied: Auth, grpccodes.Unavailable: Unavailable, grpccodes.Unimplemented: Version,
	grpccodes.ResourceExhausted: Busy, grpccodes.InvalidArgument: Invalid, grpccodes.AlreadyExists: Invalid,
}

// plannerCode returns the code of an error that is a status of the planner.
func plannerCode(err error) (Code, bool) {
	c, ok := statuses[status.Code(err)]
	return c, ok
}
