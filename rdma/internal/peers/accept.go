package peers

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"
)

// HandshakesMax is the largest number of accepted connections whose peers have not proved the token
// yet. Further connections wait in the listener's backlog.
const HandshakesMax = 256

// Pauses before a failed Accept is tried again.
const (
	pauseFirst = 5 * time.Millisecond
	pauseMax   = time.Second
)

// Accept calls admit for each connection of l, in a goroutine counted in running, until ctx ends
// or l is closed. At most HandshakesMax calls of admit run at the same time. A call no longer
// counts towards this limit once it has called proved, which it may do once. failed is called with
// each error of l.
func Accept(ctx context.Context, l net.Listener, running *sync.WaitGroup, failed func(error), admit func(nc net.Conn, proved func())) {
	slots := make(chan struct{}, HandshakesMax)
	var pause time.Duration
	for {
		nc, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			// The most likely reason is a lack of file descriptors, so the loop waits until some
			// are closed.
			pause = min(max(2*pause, pauseFirst), pauseMax)
			failed(err)
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
			continue
		}
		pause = 0
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			_ = nc.Close()
			return
		}
		running.Go(func() {
			proved := sync.OnceFunc(func() { <-slots })
			defer proved()
			admit(nc, proved)
		})
	}
}
