package storage

import "context"

// A gate lets a bounded number of calls in; as many more may wait in line, and
// the next one is refused at once.
type gate struct {
	running chan struct{} // a token for each call inside
	waiting chan struct{} // a token for each call inside or in line
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

// close takes every token, so that nobody is inside and nobody enters again. It
// fails only if someone is still inside when ctx ends; a ctx that has ended
// already does not keep it from closing an empty gate.
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
