package storage

import (
	"context"
	"sync"
)

// A gate lets a bounded number of calls in; as many more may wait in line, and
// the next one is refused at once.
type gate struct {
	running chan struct{} // a token for each call inside
	waiting chan struct{} // a token for each call inside or in line
	wg      sync.WaitGroup
}

func newGate(n int) *gate {
	return &gate{running: make(chan struct{}, n), waiting: make(chan struct{}, 2*n)}
}

// enter returns nil once the call is inside; it is followed by leave. ErrBusy
// means that the line is full.
func (g *gate) enter(ctx context.Context) error {
	select {
	case g.waiting <- struct{}{}:
	default:
		return ErrBusy
	}
	select {
	case g.running <- struct{}{}:
		g.wg.Add(1)
		return nil
	case <-ctx.Done():
		<-g.waiting
		return ctx.Err()
	}
}

func (g *gate) leave() {
	<-g.running
	<-g.waiting
	g.wg.Done()
}

// drain waits until everyone has left. No one may enter meanwhile.
func (g *gate) drain(ctx context.Context) error {
	empty := make(chan struct{})
	go func() {
		g.wg.Wait()
		close(empty)
	}()
	select {
	case <-empty:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
