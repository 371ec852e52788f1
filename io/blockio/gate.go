package blockio

import (
	"fmt"
	"sync"
)

// Gate counts the users of an object that can be closed, so that Close can refuse new users and
// wait for the current ones. The zero Gate is open. All backends use Gates for their device and
// their files.
type Gate struct {
	mu     sync.Mutex
	inside int
	closed bool
	// empty is closed when closed is set and inside is 0. The first call of Close creates it.
	empty chan struct{}
}

// Enter admits a user, or returns false if the gate is closed. Each Enter that returned true is
// paired with one Leave.
func (g *Gate) Enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.inside++
	return true
}

// Leave ends one Enter.
func (g *Gate) Leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside--
	if g.closed && g.inside == 0 {
		close(g.empty)
	}
}

// Close refuses new users, waits until the last user has left, and reports whether this call was
// the first. Later calls wait as well.
func (g *Gate) Close() (first bool) {
	g.mu.Lock()
	first = !g.closed
	if first {
		g.closed = true
		g.empty = make(chan struct{})
		if g.inside == 0 {
			close(g.empty)
		}
	}
	g.mu.Unlock()
	<-g.empty
	return first
}

// Closed reports whether Close has been called.
func (g *Gate) Closed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closed
}

// EnterFiles enters the gate of the file of every request, so that no file is closed during the
// batch. If one gate refuses, EnterFiles leaves the gates that it has entered. gateOf returns the
// gate of a file of the caller's device, or nil for any other file.
func EnterFiles(batch []Request, gateOf func(File) *Gate) error {
	for i := range batch {
		err := enterFile(batch[i].File, gateOf)
		if err != nil {
			LeaveFiles(batch[:i], gateOf)
			return fmt.Errorf("request %d of %d: %w", i, len(batch), err)
		}
	}
	return nil
}

func enterFile(f File, gateOf func(File) *Gate) error {
	g := gateOf(f)
	if g == nil {
		return fmt.Errorf("blockio: file %s (%T) belongs to another device: %w", f.Name(), f, ErrRequest)
	}
	if !g.Enter() {
		return fmt.Errorf("blockio: file %s: %w", f.Name(), ErrClosed)
	}
	return nil
}

// LeaveFiles ends a successful EnterFiles.
func LeaveFiles(batch []Request, gateOf func(File) *Gate) {
	for i := range batch {
		gateOf(batch[i].File).Leave()
	}
}
