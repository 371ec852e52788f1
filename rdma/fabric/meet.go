//go:build fabric && cgo && linux

package fabric

import "time"

// net has a connection under each pair of endpoints, and forgets to take along,
// when an endpoint is closed, what was accepted for it and has not said yet who it
// is: the next progress touches memory that was freed. So there is never such a
// one when we close:
//
//	the one with the greater address      the other
//	Connect: stop listening
//	         knock ════════════════════►  knock seen: met; stop listening
//	         knock ended: met             works that were posted go to the provider
//	Close at any time                     Close when met, or meetTimeout after Shut
//
// Until it has met, an endpoint has nothing to cut off: its peer's Connect has
// not returned, so that the peer posted nothing, and what was posted here has
// waited in the ring. A knock carries the tag of the endpoint that it is for,
// because it may arrive before that one knows its peer's address.

// meetTimeout is how long after its Shut an endpoint that has not met is kept.
const meetTimeout = 2 * lateTimeout

// knockMark is the length that a knock has in its remote CQ data; no write is as
// long.
const knockMark = 1<<32 - 1

// halfMade is an endpoint that was shut before it met.
type halfMade struct {
	e     *endpoint
	until time.Time
}

// meet notes that the peer's knock has arrived.
func (e *endpoint) meet() {
	if e.met {
		return
	}
	e.met = true
	if e.half {
		e.d.endHalf(e)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cutOff {
		return
	}
	// If it listens on, a stranger may still knock: no more than that.
	_ = e.native.hush()
	e.held = false
	if e.open {
		e.flushLocked(0)
	}
}

// keepHalf puts off the closing of an endpoint that has not met.
func (d *domain) keepHalf(e *endpoint) {
	e.half = true
	d.halves = append(d.halves, halfMade{e, time.Now().Add(meetTimeout)})
	d.busy.Store(true)
}

// endHalf closes an endpoint that was kept, and releases it if its user has.
func (d *domain) endHalf(e *endpoint) {
	for i := range d.halves {
		if d.halves[i].e == e {
			d.halves = append(d.halves[:i], d.halves[i+1:]...)
			break
		}
	}
	e.half = false
	e.mu.Lock()
	err := e.native.cut()
	e.mu.Unlock()
	if e.closed {
		err = e.release()
	}
	if err != nil {
		d.fatal = err
	}
}

// endHalves closes those that were kept for long enough.
func (d *domain) endHalves(now time.Time) {
	for len(d.halves) > 0 && now.After(d.halves[0].until) {
		d.endHalf(d.halves[0].e)
	}
}
