package tcp

import (
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// counters are an engine's counters, without the gauges.
type counters struct {
	sessions.Counters
	// railsLost went down in sessions that went on; framesResent were given to
	// another rail then; framesRepeated came twice to this engine, and were
	// dropped.
	railsLost, framesResent, framesRepeated atomic.Uint64
}

// Stats implements rdma.Engine.
func (e *Engine) Stats() rdma.Stats { return e.stats.Stats(e.imms, e.Peers()) }

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
