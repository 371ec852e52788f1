package traffic

import "github.com/penstock-kv/penstock/internal/arena"

// Footprint describes how many bytes of a manager's buffer a job takes. The planner keeps the sum
// of these bytes over an engine's jobs within Buffer. Otherwise a job would wait for memory until
// other jobs end.
type Footprint struct {
	// Buffer is the size of the whole buffer.
	Buffer int64
	// Block is the number of bytes that one block takes while it passes through the buffer. On the
	// prefill side only the blocks that are read pass through the buffer; on the decode side all
	// blocks of the prompt do.
	//
	// Sums is the number of bytes that every block of the prompt takes for its checksums, whether or
	// not the block passes through the buffer. If the prefill side copies KV through staging memory,
	// Sums includes the block's share of that memory.
	//
	// Request is the number of bytes that each job takes in addition.
	Block, Sums, Request int64
}

// Footprint returns the manager's Footprint, which does not change.
func (m *Manager) Footprint() Footprint {
	return Footprint{
		Buffer: m.opts.BufferBytes, Block: int64(m.geo.fullBytes), Sums: int64(tableBytes(m.geo.layers, 1) + m.stageBytes(1)),
		Request: jobPieces * arena.Granule,
	}
}

// Of returns the number of bytes that a job takes. blocks is the number of blocks of the job's
// prompt. pass blocks of the prompt go through the buffer.
func (f Footprint) Of(blocks, pass int) int64 {
	return f.Request + int64(pass)*f.Block + int64(blocks)*f.Sums
}

// jobPieces is the largest number of allocations that a job may have in the buffer. Each is rounded
// up to a granule. The prefill side has up to four allocations: the table of checksums, the first
// part that it reads, and two later parts.
const jobPieces = 4
