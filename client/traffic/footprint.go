package traffic

import "github.com/penstock-kv/penstock/internal/arena"

// Footprint is what jobs take of a manager's buffer, in bytes. Whoever gives an engine
// its jobs keeps their sum within Buffer, for a job waits for memory that others hold.
type Footprint struct {
	// Buffer is the size of the whole buffer.
	Buffer int64
	// Block is what one block takes while it passes: on the prefill side each that is
	// read there, on the decode side each of the prompt. Sums is what each block of the
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

// Of is what a job takes that has so many blocks, of which so many pass.
func (f Footprint) Of(blocks, pass int) int64 {
	return f.Request + int64(pass)*f.Block + int64(blocks)*f.Sums
}

// jobPieces are the pieces of the buffer that a job has at a time, each rounded up to a
// granule: on the prefill side the table of sums, its first part, and two that it reads
// later.
const jobPieces = 4
