package blockstore

import "sync/atomic"

// counters are the atomic counters behind a volume's CounterStats.
type counters struct {
	reads, readBytes, readStale, readCorrupt, readFailures atomic.Uint64
	writes, writtenBytes, writeFailures                    atomic.Uint64
	scrubbed, scrubbedBytes, scrubCorrupt, scrubFailures   atomic.Uint64
}
