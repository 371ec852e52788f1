package binding

import (
	"cmp"
	"context"
	"fmt"

	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/kv"
)

// GatewayOptions are the options of a Gateway.
type GatewayOptions struct {
	Planner PlannerOptions
	// Epoch has the meaning of gateway.Options.Epoch.
	Epoch kv.Epoch
	// RequestsMax is the largest number of requests that have not ended or whose last event was not
	// drained. Default 1024.
	RequestsMax int
}

// Event is one step of a request. If the request has failed, Kind is 0 and Err is the reason.
type Event struct {
	Request Handle
	gateway.Event
	Err error
}

// last reports whether e is the last event of its request.
func (e *Event) last() bool { return e.Kind == 0 || e.Kind == gateway.Done }

// eventsMax is the largest number of events of one request that wait for Drain. When it is reached,
// no further event of the request is read from the planner.
const eventsMax = 16

// Gateway is a gateway.Gateway whose requests put their events into a queue. All methods
// may be called concurrently.
type Gateway struct {
	*session[Event]
	gateway *gateway.Gateway
	max     int
	// requests has the requests whose last event was not drained. mu guards it.
	requests map[Handle]*Request
}

// Request is a submitted request.
type Request struct {
	gateway *Gateway
	cancel  context.CancelFunc
	// room has an element for each event that waits for Drain.
	room chan struct{}
}

func (r *Request) of() *Store { return r.gateway.store }

// OpenGateway opens a gateway for the namespace's model. It does not wait for the planner.
func (n *Namespace) OpenGateway(o GatewayOptions) (Handle, error) {
	s := n.store
	if err := s.begin(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	ns := n.Definition()
	if ns.Index != kv.IndexTrie {
		return 0, fmt.Errorf("%w: namespace %q is flat; a gateway needs a chained one, because it looks for prefixes", ErrInvalid, ns.Name)
	}
	base, err := connect[Event](s, o.Planner)
	if err != nil {
		return 0, err
	}
	g := &Gateway{session: base, max: cmp.Or(o.RequestsMax, 1024), requests: make(map[Handle]*Request)}
	g.ended = g.endRequests
	if g.gateway, err = gateway.New(gateway.Options{Namespace: ns, Store: s.client, Planner: base.conn, Epoch: o.Epoch}); err != nil {
		return 0, base.discard(err)
	}
	g.handle = s.library.add(g)
	s.own(g.handle, g)
	return g.handle, nil
}

// endRequests closes the handles of the requests of a closed gateway, and its connection.
func (g *Gateway) endRequests() error {
	g.mu.Lock()
	requests := g.requests
	g.requests = nil
	g.mu.Unlock()
	for h := range requests {
		g.store.library.remove(h)
	}
	return g.conn.Close()
}

// Submit begins a request. Drain returns its events; the last one is Done or a failure.
func (g *Gateway) Submit(r gateway.Request) (Handle, error) {
	if err := g.begin(); err != nil {
		return 0, err
	}
	defer g.calls.Done()
	r, err := g.gateway.Prepare(r)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(g.ctx)
	q := &Request{gateway: g, cancel: cancel, room: make(chan struct{}, eventsMax)}
	h := g.store.library.add(q)
	g.mu.Lock()
	open := len(g.requests)
	if open < g.max {
		g.requests[h] = q
		// Close first waits for calls such as this one, and then for the goroutines in running, so
		// running.Go is never called too late.
		g.running.Go(func() { g.serve(ctx, h, q, r) })
	}
	g.mu.Unlock()
	if open >= g.max {
		cancel()
		g.store.library.remove(h)
		return 0, fmt.Errorf("%w: %d requests have not ended or are not drained; drain their events, or raise requests_max", ErrBusy, open)
	}
	return h, nil
}

// serve puts the events of a request into the queue.
func (g *Gateway) serve(ctx context.Context, h Handle, q *Request, r gateway.Request) {
	defer q.cancel()
	for ev, err := range g.gateway.Serve(ctx, r) {
		e := Event{Request: h, Event: ev, Err: err}
		if !e.last() {
			select {
			case q.room <- struct{}{}:
			case <-ctx.Done():
				continue // the next element is the error of ctx
			}
		}
		g.mu.Lock()
		g.pushLocked(e)
		g.mu.Unlock()
	}
}

// Drain moves up to len(dst) events to dst and returns their number. It closes the handles of
// the requests whose last event it returns.
func (g *Gateway) Drain(dst []Event) (int, error) {
	n, err := g.session.Drain(dst)
	for _, e := range dst[:n] {
		g.mu.Lock()
		q := g.requests[e.Request]
		if e.last() {
			delete(g.requests, e.Request)
		}
		g.mu.Unlock()
		switch {
		case e.last():
			g.store.library.remove(e.Request)
		case q != nil:
			<-q.room
		}
	}
	return n, err
}

// Cancel cancels a request, and does not wait for its last event.
func (r *Request) Cancel() error {
	if err := r.gateway.begin(); err != nil {
		return err
	}
	defer r.gateway.calls.Done()
	r.cancel()
	return nil
}
