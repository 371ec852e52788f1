package blockio

import "sync/atomic"

// Counters are the atomic counters behind Stats, shared by all backends. The zero value is ready
// for use.
type Counters struct {
	readRequests, readBytes, readFailures    atomic.Uint64
	writeRequests, writeBytes, writeFailures atomic.Uint64
	syncs, syncFailures, resumed             atomic.Uint64
}

// Done counts one completed request. Its bytes are counted only if all of them were transferred.
func (c *Counters) Done(r *Request) {
	requests, bytes, failures := &c.readRequests, &c.readBytes, &c.readFailures
	if r.Op == Write {
		requests, bytes, failures = &c.writeRequests, &c.writeBytes, &c.writeFailures
	}
	requests.Add(1)
	if r.Err != nil {
		failures.Add(1)
		return
	}
	bytes.Add(uint64(r.Len()))
}

// Synced counts one Sync and its outcome.
func (c *Counters) Synced(err error) {
	c.syncs.Add(1)
	if err != nil {
		c.syncFailures.Add(1)
	}
}

// Resumed counts one short transfer that was continued.
func (c *Counters) Resumed() { c.resumed.Add(1) }

// Stats returns the current counters. The caller sets InFlightBytes and InFlightLimitBytes.
func (c *Counters) Stats() Stats {
	return Stats{
		ReadRequests: c.readRequests.Load(), ReadBytes: c.readBytes.Load(), ReadFailures: c.readFailures.Load(),
		WriteRequests: c.writeRequests.Load(), WriteBytes: c.writeBytes.Load(), WriteFailures: c.writeFailures.Load(),
		Syncs: c.syncs.Load(), SyncFailures: c.syncFailures.Load(), Resumed: c.resumed.Load(),
	}
}
