package prfaas

import "slices"

// Prefix is the cached prefix of one prompt in one cluster, by layer group (PrfaaS, section 3.2).
type Prefix struct {
	// FullBlocks is the number of blocks, from the first on, whose layers with full attention are
	// cached; any shorter prefix of them can be reused too.
	FullBlocks int
	// States are the lengths, in blocks, at which a snapshot of the recurrent layers is cached;
	// each can be reused at exactly that length.
	States []int
	// Recurrent is set if the model has recurrent layers. Otherwise States are not needed.
	Recurrent bool
}

// Reusable returns the longest length in blocks at which every layer group can be reused: the
// longest state not beyond the full-attention blocks.
func (p Prefix) Reusable() int {
	if !p.Recurrent {
		return p.FullBlocks
	}
	best := 0
	for _, s := range p.States {
		if s <= p.FullBlocks {
			best = max(best, s)
		}
	}
	return best
}

// BlockUse is the use of KV after its prefill.
type BlockUse uint8

const (
	// KeepPrefix: the KV is kept for other requests (a prefix-cache block).
	KeepPrefix BlockUse = iota
	// PassOn: the KV is transferred to the decode instance, and dropped after its arrival (a
	// transfer-cache block).
	PassOn
)

// Pool is the state of one chain of blocks in one cluster, as the global KVCache manager keeps it.
// The simulation derives the router's lengths from this model; on a storage node, package trie has
// the same state in its layer groups.
type Pool struct {
	recurrent bool
	full      []BlockUse       // blocks from the first on
	states    map[int]BlockUse // by length in blocks
}

// NewPool returns an empty pool of a model with or without recurrent layers.
func NewPool(recurrent bool) *Pool {
	return &Pool{recurrent: recurrent, states: make(map[int]BlockUse)}
}

// Put adds the result of a prefill up to end blocks: the full-attention blocks that are not there
// yet, and the state at end. PassOn entries that are put as KeepPrefix become KeepPrefix; the
// opposite does not happen.
func (p *Pool) Put(end int, use BlockUse) {
	for i := range min(end, len(p.full)) {
		p.full[i] = min(p.full[i], use)
	}
	for len(p.full) < end {
		p.full = append(p.full, use)
	}
	if p.recurrent && end > 0 {
		if had, ok := p.states[end]; ok {
			use = min(had, use)
		}
		p.states[end] = use
	}
}

// Delivered drops the PassOn entries: states, and blocks from the end.
func (p *Pool) Delivered() {
	for end, use := range p.states {
		if use == PassOn {
			delete(p.states, end)
		}
	}
	for len(p.full) > 0 && p.full[len(p.full)-1] == PassOn {
		p.full = p.full[:len(p.full)-1]
	}
}

// Prefix returns the content of the pool.
func (p *Pool) Prefix() Prefix {
	x := Prefix{FullBlocks: len(p.full), Recurrent: p.recurrent}
	for s := range p.states {
		x.States = append(x.States, s)
	}
	slices.Sort(x.States)
	return x
}
