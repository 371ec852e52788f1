package storage

import "context"

// A gate limits the number of calls in progress. The same number of further calls may wait, and any
// other call is refused at once.
type gate struct {
	running chan struct{} // a token for each running call
	waiting chan struct{} // a token for each running or waiting call
}

func newGate(n int) *gate {
	return &gate{running: make(chan struct{}, n), waiting: make(chan struct{}, 2*n)}
}

// enter returns nil when the call may run; the call must then end with leave. ErrBusy means that
// too many calls wait.
func (g *gate) enter(ctx context.Context) error {
	select {
	case g.waiting <- struct{}{}:
	default:
		return ErrBusy
	}
	select {
	case g.running <- struct{}{}:
		return nil
	default: // ctx.Done has a cost
	}
	select {
	case g.running <- struct{}{}:
		return nil
	case <-ctx.Done():
		<-g.waiting
		return ctx.Err()
	}
}

func (g *gate) leave() {
	<-g.running
	<-g.waiting
}

// close waits for the calls in progress and admits no further call, because it acquires every token
// of running. It fails only if a call is still in progress when ctx ends. If no call is in progress
// it succeeds, even if ctx has ended already.
func (g *gate) close(ctx context.Context) error {
	for range cap(g.running) {
		select {
		case g.running <- struct{}{}:
			continue
		default:
		}
		select {
		case g.running <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
