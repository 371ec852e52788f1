package main

import (
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/handoff"
)

// The node's memory budget is the sum of the parts listed below. The arena is outside the Go heap
// and resident from the start. The caches of the index grow up to their configured size. The tables
// of index and store grow with the number of stored blocks.
//
//	arena, index cache, memtables    as configured
//	index, slots                     their current size
//	staging                          the memory of engines on this host for their writes
//	working heap                     requests in progress, and garbage not yet collected
//	process                          the binary's pages, stacks, the C heap, and a tenth of the
//	                                 tables for pages that the runtime returns late
//
// The limit of the Go runtime is the part of the budget that is in the Go heap. It grows with the
// index, so that the collector always has workingHeap. With a constant limit the collector would run
// without pause once the tables reach the limit.
const (
	workingHeap  = 176 << 20
	processBytes = 32 << 20
	// memtablesMax is the maximum number of memtables of the index at a time.
	memtablesMax = 3
)

// memoryBudget is the budget of one node. Its methods may be called concurrently.
type memoryBudget struct {
	arena, cache int64
	// memtables is the size of the index's write buffers, index the size of the index's tables in
	// DRAM, slots the size of the store's tables in DRAM, all in bytes.
	memtables, index, slots atomic.Int64
	// measure returns the DRAM of the store. It is nil before the store is open.
	measure atomic.Pointer[func() int64]
	// local is the node's listener on the unix socket, nil if there is none.
	local atomic.Pointer[handoff.Listener]
	// moved has capacity 1. It has an element if the index has grown since the limit was set.
	moved chan struct{}
	stop  chan struct{}
	done  chan struct{}

	// host is the budget of the node that has adopted this one, nil for the node of the process.
	host *memoryBudget
	// mu guards guests, the budgets of the nodes that this one has adopted. It is held while the
	// runtime's limit is set.
	mu     sync.Mutex
	guests map[*memoryBudget]struct{}
}

// newMemoryBudget sets the runtime's limit for an empty index, and adjusts it until close. The limit is
// that of host with its adopted nodes, if host is not nil.
func newMemoryBudget(cfg config.Config, host *memoryBudget) *memoryBudget {
	m := &memoryBudget{
		arena: int64(cfg.Arena), cache: int64(cfg.IndexCache),
		moved: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
		host: host, guests: make(map[*memoryBudget]struct{}),
	}
	if host != nil {
		host.mu.Lock()
		host.guests[m] = struct{}{}
		host.mu.Unlock()
	}
	m.limit()
	go m.follow()
	return m
}

// follow adjusts the limit each time the index has grown.
func (m *memoryBudget) follow() {
	defer close(m.done)
	for {
		select {
		case <-m.stop:
			return
		case <-m.moved:
			m.limit()
		}
	}
}

// close ends follow. It is called once.
func (m *memoryBudget) close() {
	close(m.stop)
	<-m.done
	if m.host != nil {
		m.host.mu.Lock()
		delete(m.host.guests, m)
		m.host.mu.Unlock()
		m.host.limit()
	}
}

// setIndex records the DRAM of the index, in bytes. It is trie.Options.Grew, so it must not block.
func (m *memoryBudget) setIndex(bytes int64) {
	m.index.Store(bytes)
	select {
	case m.moved <- struct{}{}:
	default:
	}
}

// watch adds to the budget the tables of the store, and the index's memtables of memTableBytes
// bytes each. The tables of the store grow before the index does, so reading their size at each
// growth of the index is enough.
func (m *memoryBudget) watch(store *blockstore.Store, memTableBytes int64) {
	m.memtables.Store(memtablesMax * memTableBytes)
	read := func() int64 { return store.Stats().TableBytes }
	m.measure.Store(&read)
}

// staging returns the size, in bytes, of the memory in addition to the arena in which engines on
// this host put the bytes of their writes.
func (m *memoryBudget) staging() int64 {
	if local := m.local.Load(); local != nil {
		return local.Stats().StagingBytes
	}
	return 0
}

// goMemLimit is the environment variable with the operator's own limit of the Go heap.
const goMemLimit = "GOMEMLIMIT"

// limit sets the runtime's limit, unless the operator has set GOMEMLIMIT.
func (m *memoryBudget) limit() {
	if read := m.measure.Load(); read != nil {
		m.slots.Store((*read)())
	}
	if m.host != nil {
		m.host.limit()
		return
	}
	if os.Getenv(goMemLimit) != "" {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	limit := m.heap()
	for g := range m.guests {
		limit += g.heap()
	}
	debug.SetMemoryLimit(limit)
}

// heap returns the part of this node's budget that is in the Go heap.
func (m *memoryBudget) heap() int64 {
	heap := workingHeap + m.index.Load() + m.slots.Load()
	if !indexCacheOffHeap {
		heap += m.cache + m.memtables.Load()
	}
	return heap
}

// parts returns the current parts of the budget. All adopted nodes together are one part.
func (m *memoryBudget) parts() []server.MemoryPart {
	m.limit()
	parts := []server.MemoryPart{
		{Name: "arena", Bytes: m.arena},
		{Name: "index", Bytes: m.index.Load()},
		{Name: "slots", Bytes: m.slots.Load()},
		{Name: "index cache", Bytes: m.cache},
		{Name: "memtables", Bytes: m.memtables.Load()},
		{Name: "staging", Bytes: m.staging()},
		{Name: "working heap", Bytes: workingHeap},
		{Name: "process", Bytes: processBytes + (m.index.Load()+m.slots.Load())/10},
	}
	m.mu.Lock()
	guests := slices.Collect(maps.Keys(m.guests))
	m.mu.Unlock()
	adopted := int64(0)
	for _, g := range guests {
		for _, p := range g.parts() {
			adopted += p.Bytes
		}
	}
	if adopted > 0 {
		parts = append(parts, server.MemoryPart{Name: "adopted nodes", Bytes: adopted})
	}
	return parts
}
