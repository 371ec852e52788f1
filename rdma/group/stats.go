package group

import "github.com/penstock-kv/penstock/rdma"

// Stats implements rdma.Engine. This side does not see a peer's writes without an
// immediate: WritesIn counts writes whose immediate arrived, WriteBytesIn the
// payload that came with it.
func (e *Engine) Stats() rdma.Stats { return e.stats.Stats(e.imms, e.Peers()) }

// logKind is a kind of event that is limited by itself.
type logKind int

// Kinds of log events.
const (
	logRefused logKind = iota
	logMalformed
	logAuth
	logSession
	logAccept
	logLane
	logNIC
	logKinds
)
