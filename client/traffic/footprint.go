package traffic

import "github.com/penstock-kv/penstock/internal/arena"

// Footprint describes how many bytes of a manager's buffer a job takes. The planner
// keeps the sum over an engine's jobs within Buffer, because a job that finds no room
// waits until other jobs return theirs.
type Footprint struct {
	// Buffer is the size of the whole buffer.
	Buffer int64
	// Block is the bytes that one block takes while it passes through the buffer: each
	// block that is read on the prefill side, each block of the prompt on the decode side. Sums is what each block of the
	// prompt takes beside it, Request what each job does.
	Block, Sums, Request int64
}

// Footprint returns it; it does not change.
func (m *Manager) Footprint() Footprint {
	return Footprint{
		Buffer: m.opts.BufferBytes, Block: int64(m.geo.fullBytes), Sums: int64(tableBytes(m.geo.layers, 1)),
		Request: jobPieces * arena.Granule,
	}
}

// Of returns the bytes that a job of the given number of blocks takes; pass of the blocks
// pass through the buffer.
func (f Footprint) Of(blocks, pass int) int64 {
	return f.Request + int64(pass)*f.Block + int64(blocks)*f.Sums
}

// jobPieces are the pieces of the buffer that a job has at a time, each rounded up to a
// granule: on the prefill side the table of sums, its first part, and two that it reads
// later.
const jobPieces = 4
