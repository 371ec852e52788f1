//go:build fabric && cgo && linux

package fabric

import (
	"errors"
	"sync"
)

// neighbours are the domains of this process whose provider shares the state of
// endpoints within a process. libfabric's shm does: it hands out the very
// pointer to a local peer's queues, so that closing one of two joined endpoints
// pulls the memory from under the other's poller; opening one more endpoint looks
// at all of them. Domains that were joined are therefore released together, with
// their endpoints, when the last of them is closed: two engines of one process
// have 256 endpoints in all, however many they close in between.
//
// It is a variable of the package because libfabric's list is one of the process.
var neighbours = hood{byHub: make(map[string]*domain), of: make(map[*domain]*cluster)}

// hood is who was joined with whom.
type hood struct {
	mu    sync.Mutex
	byHub map[string]*domain
	of    map[*domain]*cluster
}

// cluster is a set of domains that were joined.
type cluster struct {
	domains map[*domain]bool // true: not closed
	// endpoints and hubs are what waits to be released, in this order.
	endpoints, hubs []func() error
}

func (h *hood) open(d *domain) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.byHub[string(d.hub)] = d
	h.of[d] = &cluster{domains: map[*domain]bool{d: true}}
}

// join notes that d leads to the hub of that name.
func (h *hood) join(d *domain, hub string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	o := h.byHub[hub]
	if o == nil || h.of[o] == h.of[d] {
		return
	}
	into, from := h.of[d], h.of[o]
	for m, open := range from.domains {
		into.domains[m] = open
		h.of[m] = into
	}
	into.endpoints = append(into.endpoints, from.endpoints...)
	into.hubs = append(into.hubs, from.hubs...)
}

// bury releases an endpoint, now if d has no neighbours.
func (h *hood) bury(d *domain, release func() error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := h.of[d]
	if len(c.domains) == 1 {
		return release()
	}
	c.endpoints = append(c.endpoints, release)
	return nil
}

// close releases d, now if it has no neighbours that are open.
func (h *hood) close(d *domain) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := h.of[d]
	c.domains[d] = false
	c.hubs = append(c.hubs, d.native.close)
	delete(h.byHub, string(d.hub))
	for _, open := range c.domains {
		if open {
			return nil
		}
	}
	var err error
	for _, release := range append(c.endpoints, c.hubs...) {
		err = errors.Join(err, release())
	}
	for m := range c.domains {
		delete(h.of, m)
	}
	return err
}
