package prfaas

import "slices"

// Prefix is the cached prefix of one prompt in one cluster, by layer group (PrfaaS, section 3.2).
type Prefix struct {
	// FullBlocks is the number of leading blocks for which the KV of the layers with full attention
	// is cached. Any shorter prefix of these blocks can be reused too.
	FullBlocks int
	// States are the prefix lengths, in blocks, for which a snapshot of the recurrent layers' state
	// is cached. A snapshot can be reused only at exactly its length.
	States []int
	// Recurrent is set if the model has recurrent layers. Otherwise States are not needed.
	Recurrent bool
}

// Reusable returns the longest prefix, in blocks, for which every layer group can be reused: the
// largest of States that does not exceed FullBlocks or, without recurrent layers, FullBlocks.
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

// BlockUse is the purpose for which KV is kept after its prefill.
type BlockUse uint8

const (
	// KeepPrefix: the KV is kept for other requests (a prefix-cache block).
	KeepPrefix BlockUse = iota
	// PassOn: the KV is transferred to the decode instance, and dropped after its arrival (a
	// transfer-cache block).
	PassOn
)

// Pool records which KV of one chain of blocks is cached in one cluster, as the paper's global
// KVCache manager does. The simulation uses it to compute the cached lengths for the router. On a
// storage node, package trie has this state in its layer groups.
type Pool struct {
	recurrent bool
	full      []BlockUse       // blocks from the first on
	states    map[int]BlockUse // by length in blocks
}

// NewPool returns an empty pool of a model with or without recurrent layers.
func NewPool(recurrent bool) *Pool {
	return &Pool{recurrent: recurrent, states: make(map[int]BlockUse)}
}

// Put adds the KV of a prefill of the chain's first blocks. end is their number. Put adds the
// full-attention blocks that the pool does not have, and the recurrent state at the length end. An
// entry that is PassOn becomes KeepPrefix if it is put again as KeepPrefix; a KeepPrefix entry
// stays KeepPrefix.
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

// Delivered drops the PassOn entries: states, and blocks at the end of the chain.
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
