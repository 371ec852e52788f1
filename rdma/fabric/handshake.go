//go:build fabric && cgo && linux

package fabric

import "time"

// The provider net has a connection under each pair of endpoints. If an endpoint is closed while
// net has accepted a connection for it and read nothing from that connection, net does not close
// the connection. Its next progress call then uses freed memory. So an endpoint must not be closed
// while such a connection may exist. A handshake, one write of a byte, ensures this:
//	endpoint with the greater address     the other endpoint
//	Connect: stop listening
//	         handshake write ══════════►  write arrives: stop listening
//	         write completes              posted works are given to the provider
//	Close at any time                     Close after the handshake, or delayMax after Shut
// An endpoint that waits for the handshake need not be cut off from its peer. The peer has posted
// nothing, because its Connect has not returned, and the works posted here are still in the ring.
// The write carries the tag of its target endpoint, because it may arrive before that endpoint has
// its peer's address.

// delayMax is the longest time between Shut and the close of an endpoint without a handshake.
const delayMax = 2 * lateTimeout

// handshakeMark marks a handshake write, in the half of the remote CQ data that holds the length.
// No other write has this length.
const handshakeMark = 1<<32 - 1

// delayedClose is an endpoint that was shut before its handshake.
type delayedClose struct {
	e     *endpoint
	until time.Time
}

// peerConnected handles the arrival of the peer's handshake write.
func (e *endpoint) peerConnected() {
	if e.handshakeDone {
		return
	}
	e.handshakeDone = true
	if e.closeDelayed {
		e.d.endDelayed(e)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cutOff {
		return
	}
	// If this fails the endpoint still accepts connections, which does no harm after the
	// handshake.
	_ = e.native.stopListening()
	e.held = false
	if e.open {
		e.flushLocked(0)
	}
}

// delayClose delays the close of an endpoint until its handshake, at most delayMax.
func (d *domain) delayClose(e *endpoint) {
	e.closeDelayed = true
	d.delayed = append(d.delayed, delayedClose{e, time.Now().Add(delayMax)})
	d.busy.Store(true)
}

// endDelayed closes an endpoint that was kept until its handshake, and releases it if its user has
// called Close.
func (d *domain) endDelayed(e *endpoint) {
	for i := range d.delayed {
		if d.delayed[i].e == e {
			d.delayed = append(d.delayed[:i], d.delayed[i+1:]...)
			break
		}
	}
	e.closeDelayed = false
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

// endDelayedCloses closes the endpoints that have been kept for delayMax.
func (d *domain) endDelayedCloses(now time.Time) {
	for len(d.delayed) > 0 && now.After(d.delayed[0].until) {
		d.endDelayed(d.delayed[0].e)
	}
}
