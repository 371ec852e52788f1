package rdma

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
)

// slowEngine is an Engine whose operations end when the test ends them. Up to a limit it accepts
// operations at once; beyond the limit it returns ErrBusy or waits.
type slowEngine struct {
	Engine // no other method is called
	mu     sync.Mutex
	room   int
	more   chan struct{} // closed and replaced when an operation has ended
	done   []func(error)
}

func newSlowEngine(room int) *slowEngine {
	return &slowEngine{room: room, more: make(chan struct{}), done: make([]func(error), 0, 16)}
}

func (e *slowEngine) take(ctx context.Context, done func(error), noWait bool) error {
	for {
		e.mu.Lock()
		if len(e.done) < e.room {
			e.done = append(e.done, done)
			e.mu.Unlock()
			return nil
		}
		more := e.more
		e.mu.Unlock()
		if noWait {
			return ErrBusy
		}
		select {
		case <-more:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (e *slowEngine) Write(ctx context.Context, w Write) error { return e.take(ctx, w.Done, w.NoWait) }

func (e *slowEngine) WritePaged(ctx context.Context, w PagedWrite) error {
	return e.take(ctx, w.Done, w.NoWait)
}

func (e *slowEngine) Scatter(ctx context.Context, s Scatter) error { return e.take(ctx, s.Done, false) }

func (e *slowEngine) Barrier(ctx context.Context, b Barrier) error { return e.take(ctx, b.Done, false) }

// end ends the oldest operation.
func (e *slowEngine) end(err error) {
	e.mu.Lock()
	done := e.done[0]
	e.done = append(e.done[:0], e.done[1:]...)
	close(e.more)
	e.more = make(chan struct{})
	e.mu.Unlock()
	done(err)
}

// Cancel stops later and waiting operations, and waits for operations in flight.
func TestScopeCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newSlowEngine(3)
		s := NewScope(e)
		var ends []error
		done := func(err error) { ends = append(ends, err) }
		submit := []func() error{
			func() error { return s.Write(t.Context(), Write{Done: done}) },
			func() error { return s.WritePaged(t.Context(), PagedWrite{Done: done}) },
			func() error { return s.Scatter(t.Context(), Scatter{Done: done}) },
			func() error { return s.Barrier(t.Context(), Barrier{Done: done}) },
		}
		for _, f := range submit[:3] {
			if err := f(); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Write(t.Context(), Write{NoWait: true}); !errors.Is(err, ErrBusy) {
			t.Fatalf("no room: %v", err)
		}
		waiting := make(chan error, len(submit))
		for _, f := range submit {
			go func() { waiting <- f() }()
		}
		synctest.Wait()
		if n := s.Pending(); n != 7 {
			t.Fatalf("%d operations pending", n)
		}
		canceled := make(chan error, 1)
		go func() { canceled <- s.Cancel(t.Context()) }()
		for range submit {
			if err := <-waiting; !errors.Is(err, ErrCanceled) {
				t.Errorf("the waiting operation ended with %v", err)
			}
		}
		for _, f := range submit {
			if err := f(); !errors.Is(err, ErrCanceled) {
				t.Errorf("after Cancel: %v", err)
			}
		}
		impatient, stop := context.WithCancel(t.Context())
		stop()
		if err := s.Cancel(impatient); !errors.Is(err, context.Canceled) {
			t.Errorf("Cancel with an ended context: %v", err)
		}
		e.end(nil)
		e.end(&RefusedError{Reason: ReasonKey})
		synctest.Wait()
		if len(canceled) != 0 {
			t.Fatal("Cancel returned while an operation was in flight")
		}
		e.end(nil)
		if err := <-canceled; err != nil {
			t.Errorf("Cancel: %v", err)
		}
		if err := s.Cancel(t.Context()); err != nil || len(ends) != 3 {
			t.Errorf("Cancel again: %v; %d operations ended", err, len(ends))
		}
	})
}

// Cancel of a scope whose operations ended with their session returns an error.
func TestScopeUnknown(t *testing.T) {
	for _, end := range []error{ErrPeerDied, ErrClosed} {
		e := newSlowEngine(10)
		s := NewScope(e)
		for range 2 {
			if err := s.Write(t.Context(), Write{}); err != nil {
				t.Fatal(err)
			}
		}
		e.end(nil)
		e.end(end)
		if err := s.Cancel(t.Context()); !errors.Is(err, end) {
			t.Errorf("Cancel after %v: %v", end, err)
		}
	}
	if err := NewScope(newSlowEngine(0)).Cancel(t.Context()); err != nil {
		t.Errorf("an empty scope: %v", err)
	}
}

// The caller's context ends a wait for room with its own error.
func TestScopeCallersContext(t *testing.T) {
	s := NewScope(newSlowEngine(0))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Write(ctx, Write{}); !errors.Is(err, context.Canceled) || errors.Is(err, ErrCanceled) {
		t.Errorf("error %v", err)
	}
	if s.Pending() != 0 {
		t.Error("something is pending")
	}
}

// A write through a scope allocates nothing; a closure per write would allocate.
func TestScopeAllocs(t *testing.T) {
	e := newSlowEngine(8)
	s := NewScope(e)
	ended := 0
	done := func(error) { ended++ }
	once := func() {
		for range 4 {
			if err := s.Write(t.Context(), Write{Done: done}); err != nil {
				t.Fatal(err)
			}
		}
		for range 4 {
			done := e.done[0]
			e.done = append(e.done[:0], e.done[1:]...)
			done(nil)
		}
	}
	once()
	if n := testing.AllocsPerRun(100, once); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
