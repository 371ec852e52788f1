package tcp

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

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

// logInterval is how often an event of one kind is logged: a peer must not fill
// our disk.
const logInterval = time.Second

// limitedLog logs at most one event of each kind in logInterval, and says how
// many it left out.
type limitedLog struct {
	logger *slog.Logger

	mu      sync.Mutex
	last    [logKinds]time.Time
	leftOut [logKinds]int
}

// warn logs or counts one event.
func (l *limitedLog) warn(kind logKind, msg string, args ...any) {
	now := time.Now()
	l.mu.Lock()
	if now.Sub(l.last[kind]) < logInterval {
		l.leftOut[kind]++
		l.mu.Unlock()
		return
	}
	l.last[kind] = now
	n := l.leftOut[kind]
	l.leftOut[kind] = 0
	l.mu.Unlock()
	if n > 0 {
		args = append(args, "left_out", n)
	}
	l.logger.Warn(msg, args...)
}
