package rdma

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Scope is a sender's cancellation token (fabric-lib, section 4). All operations for one request
// are submitted through one Scope. Cancel ends the request, and returns when the sender may
// confirm the cancellation to the receiver.
//
//	decoder                             prefiller
//	  │ ── cancel request 7 ──►  err := scope.Cancel(ctx)
//	  │                             later writes: ErrCanceled
//	  │                             writes in flight: waited for
//	  │ ◄──── confirmed ───────  if err == nil
//	  may reuse the pages
//
// A Scope need not be closed and holds no goroutine. All methods may be called concurrently. A
// write that does not have to wait allocates memory only if more operations are in flight than
// ever before.
type Scope struct {
	engine Engine

	mu       sync.Mutex
	canceled bool
	// pending is the number of operations that have begun and whose Done has not returned.
	pending int
	// unknown is the number of operations that have ended although their bytes may still land. why
	// is the error of the first of these operations.
	unknown int
	why     error
	idle    *scoped // free list of operations for reuse
	// live ends with Cancel, which calls kill. After that, still is closed once no operation is
	// pending.
	live  context.Context
	kill  context.CancelFunc
	still chan struct{}
}

// scoped is one operation of a scope. The engine calls its end, which calls the caller's Done.
type scoped struct {
	scope *Scope
	next  *scoped
	done  func(error) // the caller's
	ended func(error) // the method value of end, bound once to avoid an allocation per use
}

// NewScope returns a scope over e.
func NewScope(e Engine) *Scope {
	s := &Scope{engine: e, still: make(chan struct{})}
	s.live, s.kill = context.WithCancel(context.Background())
	return s
}

// Write is Engine.Write. It returns ErrCanceled after Cancel.
func (s *Scope) Write(ctx context.Context, w Write) error {
	op, err := s.begin(w.Done)
	if err != nil {
		return err
	}
	noWait := w.NoWait
	w.Done, w.NoWait = op.ended, true
	err = s.engine.Write(ctx, w)
	if !noWait && errors.Is(err, ErrBusy) {
		w.NoWait = false
		err = s.waiting(ctx, func(ctx context.Context) error { return s.engine.Write(ctx, w) })
	}
	return s.begun(op, err)
}

// WritePaged is Engine.WritePaged. It returns ErrCanceled after Cancel.
func (s *Scope) WritePaged(ctx context.Context, w PagedWrite) error {
	op, err := s.begin(w.Done)
	if err != nil {
		return err
	}
	noWait := w.NoWait
	w.Done, w.NoWait = op.ended, true
	err = s.engine.WritePaged(ctx, w)
	if !noWait && errors.Is(err, ErrBusy) {
		w.NoWait = false
		err = s.waiting(ctx, func(ctx context.Context) error { return s.engine.WritePaged(ctx, w) })
	}
	return s.begun(op, err)
}

// Scatter is Engine.Scatter. It returns ErrCanceled after Cancel.
func (s *Scope) Scatter(ctx context.Context, x Scatter) error {
	op, err := s.begin(x.Done)
	if err != nil {
		return err
	}
	x.Done = op.ended
	return s.begun(op, s.waiting(ctx, func(ctx context.Context) error { return s.engine.Scatter(ctx, x) }))
}

// Barrier is Engine.Barrier. It returns ErrCanceled after Cancel.
func (s *Scope) Barrier(ctx context.Context, b Barrier) error {
	op, err := s.begin(b.Done)
	if err != nil {
		return err
	}
	b.Done = op.ended
	return s.begun(op, s.waiting(ctx, func(ctx context.Context) error { return s.engine.Barrier(ctx, b) }))
}

// Pending returns the number of operations that have not ended.
func (s *Scope) Pending() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pending
}

// Cancel ends the scope: later operations, and those that wait for the in-flight budget, return
// ErrCanceled. Cancel returns once every operation of the scope has ended and its Done has
// returned, so it must not be called from a Done. If it returns nil, no operation of the scope can
// touch remote memory any more, so the caller may confirm the cancellation.
//
// If ctx ends first, Cancel returns the error of ctx. The cancellation remains in effect, and
// Cancel may be called again to continue waiting. If an operation ended because its session ended,
// its bytes may still be on the wire. Cancel then returns that operation's error, and the caller
// must not confirm the cancellation. The receiver may reuse the memory once the session has ended
// at the receiver's engine too, or once the receiver has revoked its windows.
func (s *Scope) Cancel(ctx context.Context) error {
	s.mu.Lock()
	if !s.canceled {
		s.canceled = true
		s.kill()
		if s.pending == 0 {
			close(s.still)
		}
	}
	s.mu.Unlock()
	select {
	case <-s.still:
	case <-ctx.Done():
		return fmt.Errorf("rdma: cancel: %d operations have not ended: %w", s.Pending(), ctx.Err())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unknown > 0 {
		return fmt.Errorf("rdma: cancel: the bytes of %d operations may still arrive: %w", s.unknown, s.why)
	}
	return nil
}

// begin adds a pending operation to the scope.
func (s *Scope) begin(done func(error)) (*scoped, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.canceled {
		return nil, fmt.Errorf("rdma: submit: %w", ErrCanceled)
	}
	s.pending++
	op := s.idle
	if op == nil {
		op = &scoped{scope: s}
		op.ended = op.end
	} else {
		s.idle = op.next
	}
	op.done = done
	return op, nil
}

// waiting calls submit with a context that ends when ctx ends or the scope is cancelled.
func (s *Scope) waiting(ctx context.Context, submit func(context.Context) error) error {
	either, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.live, func() { cancel(ErrCanceled) })()
	err := submit(either)
	if err != nil && ctx.Err() == nil && errors.Is(err, context.Canceled) && s.live.Err() != nil {
		return fmt.Errorf("rdma: submit: %w", ErrCanceled)
	}
	return err
}

// begun follows the submission of an operation. If err is not nil, the operation was not
// submitted, and begun removes it from the scope.
func (s *Scope) begun(op *scoped, err error) error {
	if err != nil {
		s.release(op, nil)
	}
	return err
}

// end is the Done that the engine calls for the operation.
func (op *scoped) end(err error) {
	if op.done != nil {
		op.done(err)
	}
	op.scope.release(op, err)
}

// release counts the end of an operation. err is the operation's error; nil if the operation
// succeeded or was not submitted.
func (s *Scope) release(op *scoped, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if errors.Is(err, ErrPeerDied) || errors.Is(err, ErrClosed) {
		if s.unknown++; s.why == nil {
			s.why = err
		}
	}
	op.done, op.next = nil, s.idle
	s.idle = op
	if s.pending--; s.pending == 0 && s.canceled {
		close(s.still)
	}
}
