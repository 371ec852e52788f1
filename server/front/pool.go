package front

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/internal/prefixset"
)

// The reasons why no engine serves a request.
var (
	errNoEngine  = errors.New("no engine is healthy")
	errQueueFull = errors.New("all engines are busy and the queue is full")
	errQueueWait = errors.New("all engines were busy for too long")
)

// errHung ends the wait for an engine's response.
var errHung = errors.New("the engine has not answered, and its health checks fail")

const (
	// boundMin is the load of an engine, in requests, up to which the engine is chosen for its
	// blocks regardless of the load of other engines. An engine computes this number of requests in
	// one batch.
	boundMin = 8
	// pollsToFail is the number of consecutive failed polls after which an engine gets no more
	// requests. A busy engine may miss a poll.
	pollsToFail = 3
	backoffMax  = 10 * time.Second
)

// engine is one inference engine.
type engine struct {
	name    string // for metrics and logs
	planned string // the planner's name of the engine
	base    *url.URL
	// suspect has an element when a request has failed on the engine. It makes watch poll the
	// engine.
	suspect chan struct{}

	// Guarded by pool.mu.
	index        *prefixset.Set
	load         int // running requests
	healthy      bool
	badPolls     int // since the last successful poll
	badRequests  int // since the last successful request
	lastComplain string
}

// pool chooses engines for requests. Requests wait in it while no engine has room.
type pool struct {
	engines    []*engine
	maxLoad    int // of one engine
	maxWaiting int
	maxWait    time.Duration
	loadFactor float64
	interval   time.Duration // between polls
	log        *slog.Logger
	metrics    *metrics

	mu      sync.Mutex
	waiting []*ticket // in order of arrival; requests with a failed attempt come first
	turn    int       // rotates the choice among equal engines
	// silent are the requests at engines from which no byte of a response has arrived, with the functions
	// that end their waits.
	silent map[*ticket]silence
}

// silence is the wait of a request for an engine's response.
type silence struct {
	engine *engine
	end    func(why error)
}

// ticket is one request in the pool.
type ticket struct {
	prompt prompt
	tried  []*engine
	// granted receives the engine, or nil if no engine is left. Its capacity is 1.
	granted chan *engine
}

// acquire returns an engine for the request. The request counts as the engine's load until release.
// acquire waits while all healthy engines that were not tried are full. Errors: errNoEngine,
// errQueueFull, errQueueWait, and the error of ctx.
func (p *pool) acquire(ctx context.Context, t *ticket) (*engine, error) {
	again := len(t.tried) > 0
	p.mu.Lock()
	e := p.chooseLocked(t)
	switch {
	case !p.leftLocked(t):
		p.mu.Unlock()
		return nil, errNoEngine
	case e != nil && (again || len(p.waiting) == 0):
		p.takeLocked(t, e)
		p.mu.Unlock()
		return e, nil
	case len(p.waiting) >= p.maxWaiting:
		p.mu.Unlock()
		return nil, errQueueFull
	}
	t.granted = make(chan *engine, 1)
	if again {
		p.waiting = slices.Insert(p.waiting, 0, t)
	} else {
		p.waiting = append(p.waiting, t)
	}
	p.dispatchLocked()
	p.metrics.queued.Set(float64(len(p.waiting)))
	p.mu.Unlock()

	timer := time.NewTimer(p.maxWait)
	defer timer.Stop()
	var gaveUp error
	select {
	case e = <-t.granted:
	case <-timer.C:
		gaveUp = errQueueWait
	case <-ctx.Done():
		gaveUp = ctx.Err()
	}
	if gaveUp != nil {
		if p.leave(t) {
			return nil, gaveUp
		}
		e = <-t.granted // it was dispatched concurrently
	}
	switch {
	case e == nil:
		return nil, errNoEngine
	case ctx.Err() != nil:
		p.release(e)
		return nil, ctx.Err()
	}
	return e, nil
}

// leave removes a waiting request. It reports whether the request was waiting.
func (p *pool) leave(t *ticket) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.waiting, t)
	if i < 0 {
		return false
	}
	p.waiting = slices.Delete(p.waiting, i, i+1)
	p.metrics.queued.Set(float64(len(p.waiting)))
	return true
}

// release removes a request from an engine's load.
func (p *pool) release(e *engine) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e.load--
	p.dispatchLocked()
}

// dispatchLocked assigns waiting requests to engines with room. It stops when no engine has room.
func (p *pool) dispatchLocked() {
	for i := 0; i < len(p.waiting) && slices.ContainsFunc(p.engines, p.roomLocked); {
		t := p.waiting[i]
		e := p.chooseLocked(t)
		if e == nil {
			i++
			continue
		}
		p.takeLocked(t, e)
		t.granted <- e
		p.waiting = slices.Delete(p.waiting, i, i+1)
	}
	p.metrics.queued.Set(float64(len(p.waiting)))
}

// dismissLocked ends the wait of requests that have tried all healthy engines.
func (p *pool) dismissLocked() {
	p.waiting = slices.DeleteFunc(p.waiting, func(t *ticket) bool {
		if p.leftLocked(t) {
			return false
		}
		t.granted <- nil
		return true
	})
	p.metrics.queued.Set(float64(len(p.waiting)))
}

func (p *pool) takeLocked(t *ticket, e *engine) {
	e.load++
	p.metrics.queriedBlocks.Add(float64(t.prompt.blocks))
	p.metrics.hitBlocks.Add(float64(e.hits(t.prompt)))
	for _, chain := range t.prompt.chains {
		e.index.Touch(chain)
	}
	p.metrics.indexBlocks.WithLabelValues(e.name).Set(float64(e.index.Len()))
	p.turn++
}

// hits returns the number of blocks of the prompt that are in the engine's index.
func (e *engine) hits(prompt prompt) (n int) {
	for _, chain := range prompt.chains {
		n += e.index.Match(chain)
	}
	return n
}

// roomLocked reports whether the engine can take another request.
func (p *pool) roomLocked(e *engine) bool { return e.healthy && e.load < p.maxLoad }

// chooseLocked returns the engine for a request, or nil if no engine that the request has not tried
// has room.
func (p *pool) chooseLocked(t *ticket) *engine {
	total, healthy := 0, 0
	for _, e := range p.engines {
		if e.healthy {
			healthy++
			total += e.load
		}
	}
	bound := max(boundMin, math.Ceil(p.loadFactor*float64(total+1)/float64(healthy)))
	var idlest, best *engine
	bestHits := 0
	for i := range p.engines {
		e := p.engines[(i+p.turn)%len(p.engines)]
		if !p.roomLocked(e) || slices.Contains(t.tried, e) {
			continue
		}
		if idlest == nil || e.load < idlest.load || e.load == idlest.load && e.index.Len() < idlest.index.Len() {
			idlest = e
		}
		if float64(e.load) >= bound {
			continue
		}
		hits := e.hits(t.prompt)
		if 2*hits < t.prompt.blocks || hits < bestHits || hits == 0 {
			continue
		}
		if hits > bestHits || e.load < best.load {
			best, bestHits = e, hits
		}
	}
	if best == nil {
		return idlest
	}
	return best
}

// leftLocked reports whether there is a healthy engine that the request has not tried.
func (p *pool) leftLocked(t *ticket) bool {
	return slices.ContainsFunc(p.engines, func(e *engine) bool { return e.healthy && !slices.Contains(t.tried, e) })
}

// another is leftLocked, but takes the lock.
func (p *pool) another(t *ticket) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leftLocked(t)
}

// anyHealthy reports whether any engine is healthy.
func (p *pool) anyHealthy() bool { return p.another(&ticket{}) }

// served records that an engine has served a request.
func (p *pool) served(e *engine) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e.badRequests = 0
}

// failed records that a request failed on an engine. The engine gets no more requests until a poll
// succeeds. lost means that the connection failed, so the engine's process and the KV in its memory
// may be lost.
func (p *pool) failed(e *engine, err error, lost bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e.badRequests++
	if lost {
		e.index.Clear()
		p.metrics.indexBlocks.WithLabelValues(e.name).Set(0)
	}
	if e.healthy {
		p.log.Warn("a request failed on an engine; the engine gets no requests until a poll succeeds", "engine", e.name, "err", err)
		p.setHealthLocked(e, false)
	}
	select {
	case e.suspect <- struct{}{}:
	default:
	}
}

// ask calls end with errHung when polls have found the engine unhealthy and the request can go to another
// engine, until answered is called. answered reports whether end was not called.
func (p *pool) ask(t *ticket, e *engine, end func(why error)) (answered func() bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.silent == nil {
		p.silent = make(map[*ticket]silence)
	}
	p.silent[t] = silence{e, end}
	p.moveLocked()
	return func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		_, waits := p.silent[t]
		delete(p.silent, t)
		return waits
	}
}

// moveLocked ends the waits of requests at engines that polls have found unhealthy, if the requests can go
// to other engines.
func (p *pool) moveLocked() {
	for t, s := range p.silent {
		if s.engine.badPolls >= pollsToFail && p.leftLocked(&ticket{tried: append(slices.Clip(t.tried), s.engine)}) {
			delete(p.silent, t)
			s.end(errHung)
		}
	}
}

func (p *pool) setHealthLocked(e *engine, healthy bool) {
	e.healthy = healthy
	value := 0.0
	if healthy {
		value = 1
	}
	p.metrics.healthy.WithLabelValues(e.name).Set(value)
	if healthy {
		p.dispatchLocked()
		p.moveLocked()
	} else {
		p.dismissLocked()
	}
}

// polled records the result of a poll and returns the time until the next one.
func (p *pool) polled(e *engine, err error) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		e.badPolls, e.lastComplain = 0, ""
		if !e.healthy {
			p.log.Info("an engine is healthy", "engine", e.name)
			p.setHealthLocked(e, true)
		}
		return p.interval
	}
	e.badPolls++
	if text := err.Error(); text != e.lastComplain {
		p.log.Warn("an engine failed its health checks", "engine", e.name, "err", err)
		e.lastComplain = text
	}
	if e.healthy {
		if e.badPolls < pollsToFail {
			return p.interval
		}
		p.setHealthLocked(e, false)
	}
	p.moveLocked()
	return backoff(p.interval, e.badPolls)
}

// suspected returns the time until the next poll of an engine that has failed a request. It is 0
// after the first failure, and longer if polls succeed while requests continue to fail.
func (p *pool) suspected(e *engine) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e.badRequests <= 1 {
		return 0
	}
	return backoff(p.interval, e.badRequests-1)
}

// backoff returns interval after the first failure, and twice as much after each further failure,
// up to the larger of backoffMax and interval.
func backoff(interval time.Duration, failures int) time.Duration {
	limit := max(backoffMax, interval)
	for ; failures > 1 && interval < limit; failures-- {
		interval *= 2
	}
	return min(interval, limit)
}

// watch polls an engine until ctx ends.
func (p *pool) watch(ctx context.Context, e *engine, poll func(context.Context, *engine) error) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.suspect:
			timer.Reset(p.suspected(e))
			continue
		case <-timer.C:
		}
		err := poll(ctx, e)
		if ctx.Err() != nil {
			return
		}
		timer.Reset(p.polled(e, err))
	}
}
