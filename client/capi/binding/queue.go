package binding

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/penstock-kv/penstock/internal/sys"
)

// queue is the common part of Leader, Gateway and Traffic: a handle, the calls that Close waits
// for, and a queue of events that the caller drains.
type queue[E any] struct {
	store  *Store
	handle Handle
	// ctx ends when close begins. running counts the goroutines that end with it.
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	// calls counts the running calls of the library's caller.
	calls sync.WaitGroup
	// ended is called at the end of close, when no call and no goroutine runs.
	ended func() error

	mu     sync.Mutex
	closed bool
	events []E
	fd     sys.Eventfd // readable while there are events
}

func (q *queue[E]) of() *Store { return q.store }

// newQueue returns an empty queue of a store. The object that embeds the queue sets handle and
// ended, or calls discard.
func newQueue[E any](store *Store) (*queue[E], error) {
	fd, err := sys.NewEventfd()
	if err != nil {
		return nil, err
	}
	q := &queue[E]{store: store, fd: fd}
	q.ctx, q.cancel = context.WithCancel(context.Background())
	return q, nil
}

// discard closes a queue whose object was not opened.
func (q *queue[E]) discard() error {
	q.cancel()
	return q.fd.Close()
}

// begin counts a call, for which close waits. It fails if the queue is closed.
func (q *queue[E]) begin() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return fmt.Errorf("%w: the object was closed", ErrHandle)
	}
	q.calls.Add(1)
	return nil
}

// pushLocked adds an event, unless the queue is closed.
func (q *queue[E]) pushLocked(e E) {
	if !q.closed {
		q.events = append(q.events, e)
		q.signalLocked()
	}
}

// removeLocked removes the events for which drop returns true. The queue is open.
func (q *queue[E]) removeLocked(drop func(E) bool) {
	q.events = slices.DeleteFunc(q.events, drop)
	q.signalLocked()
}

// signalLocked makes the eventfd readable if there are events, and not readable otherwise.
func (q *queue[E]) signalLocked() {
	signal := q.fd.Signal
	if len(q.events) == 0 {
		signal = q.fd.Clear
	}
	if err := signal(); err != nil {
		q.store.logs.logger().Error("eventfd", "err", err)
	}
}

// Drain moves up to len(dst) events to dst and returns their number. It does not wait.
func (q *queue[E]) Drain(dst []E) (int, error) {
	if err := q.begin(); err != nil {
		return 0, err
	}
	defer q.calls.Done()
	q.mu.Lock()
	defer q.mu.Unlock()
	n := copy(dst, q.events)
	q.events = slices.Delete(q.events, 0, n)
	q.signalLocked()
	return n, nil
}

// EventFD returns the descriptor that is readable while an event waits for Drain.
func (q *queue[E]) EventFD() (int, error) {
	if err := q.begin(); err != nil {
		return 0, err
	}
	defer q.calls.Done()
	return q.fd.FD(), nil
}

// Close ends the object of the queue; see penstock_leader_close.
func (q *queue[E]) Close() error {
	// begin makes Store.Close wait for this call.
	if err := q.store.begin(); err != nil {
		return err
	}
	defer q.store.calls.Done()
	return q.end()
}

// end closes the queue and its object, once.
func (q *queue[E]) end() error {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return fmt.Errorf("%w: the object was closed", ErrHandle)
	}
	q.closed = true
	q.mu.Unlock()
	q.store.library.remove(q.handle)
	q.store.forget(q.handle)
	q.cancel()
	q.calls.Wait() // a call may add to running
	q.running.Wait()
	err := q.ended()
	// Signal also wakes a caller that polls a duplicate of the descriptor.
	return errors.Join(err, q.fd.Signal(), q.fd.Close())
}
