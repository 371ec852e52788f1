package main

import (
	"os"
	"runtime/debug"

	"github.com/penstock-kv/penstock/server/config"
)

// The node's memory budget is arena + index_cache + overheadBytes. The arena is
// outside the Go heap and resident from the start. Of the rest, the Go heap may
// have heapBytes before the collector works harder; what remains is for the
// binary's own pages, stacks, the index's memtables and the C heap.
const (
	overheadBytes = 256 << 20
	heapBytes     = 176 << 20
)

func memoryBudget(cfg config.Config) int64 {
	return int64(cfg.Arena) + int64(cfg.IndexCache) + overheadBytes
}

// limitMemory sets the Go runtime's soft limit from the budget, unless the
// operator has set GOMEMLIMIT.
func limitMemory(cfg config.Config) {
	if os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	limit := int64(heapBytes)
	if !indexCacheOffHeap {
		limit += int64(cfg.IndexCache)
	}
	debug.SetMemoryLimit(limit)
}
