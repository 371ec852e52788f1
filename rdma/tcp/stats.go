package tcp

import (
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
)

// counters are an engine's counters, without the gauges.
type counters struct {
	writesOut, writeBytesOut, writeFailuresOut    atomic.Uint64
	writesIn, writeBytesIn                        atomic.Uint64
	sendsOut, sendFailuresOut, sendsIn            atomic.Uint64
	refusedIn                                     [rdma.ReasonNoBuffer + 1]atomic.Uint64
	drainedBytesIn, authFailures, malformedFrames atomic.Uint64
	sessionsOpened, sessionsClosed, peersTimedOut atomic.Uint64
	// railsLost went down in sessions that went on; framesResent were given to
	// another rail then; framesRepeated came twice to this engine, and were
	// dropped.
	railsLost, framesResent, framesRepeated atomic.Uint64
}

// Stats implements rdma.Engine.
func (e *Engine) Stats() rdma.Stats {
	c := &e.stats
	st := rdma.Stats{
		WritesOut: c.writesOut.Load(), WriteBytesOut: c.writeBytesOut.Load(), WriteFailuresOut: c.writeFailuresOut.Load(),
		WritesIn: c.writesIn.Load(), WriteBytesIn: c.writeBytesIn.Load(),
		SendsOut: c.sendsOut.Load(), SendFailuresOut: c.sendFailuresOut.Load(), SendsIn: c.sendsIn.Load(),
		DrainedBytesIn: c.drainedBytesIn.Load(), AuthFailures: c.authFailures.Load(), MalformedFrames: c.malformedFrames.Load(),
		SessionsOpened: c.sessionsOpened.Load(), SessionsClosed: c.sessionsClosed.Load(), PeersTimedOut: c.peersTimedOut.Load(),
	}
	for i := range c.refusedIn {
		st.RefusedIn[i] = c.refusedIn[i].Load()
	}
	st.ImmediatesIn, st.ImmediatesDropped = e.imms.Stats()
	for _, p := range e.Peers() {
		st.InFlightOps += int64(p.InFlightOps)
		st.InFlightBytes += p.InFlightBytes
	}
	return st
}

// logKind is a kind of event that is limited by itself.
type logKind int

// Kinds of log events.
const (
	logRefused logKind = iota
	logMalformed
	logAuth
	logSession
	logRailDown
	logAccept
	logKinds
)
