package prfaas

import "slices"

// Prefix is what one cluster has cached of one prompt, layer group by layer
// group (PrfaaS, section 3.2).
type Prefix struct {
	// FullBlocks are the blocks of the layers with full attention that are there
	// from the first on; any shorter prefix of them can be reused too.
	FullBlocks int
	// States are the lengths, in blocks, at which a snapshot of the recurrent
	// layers is there; each can be reused at exactly that length.
	States []int
	// Recurrent: the model has such layers. Without, States are not needed.
	Recurrent bool
}

// Reusable is the longest length in blocks at which every layer group can be
// reused: the longest state not beyond the full-attention blocks.
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

// BlockUse says what becomes of KV that a prefill has made.
type BlockUse uint8

const (
	// KeepPrefix: kept for other requests (a prefix-cache block).
	KeepPrefix BlockUse = iota
	// PassOn: transferred to the decode instance, and dropped when it has arrived
	// (a transfer-cache block).
	PassOn
)

// Pool is what one cluster has of one chain of blocks, as the global KVCache
// manager keeps it. It is the model by which the router's lengths are made in
// simulation; on a storage node trie holds the same in its layer groups.
type Pool struct {
	recurrent bool
	full      []BlockUse       // blocks from the first on
	states    map[int]BlockUse // by length in blocks
}

// NewPool is an empty pool of a model with or without recurrent layers.
func NewPool(recurrent bool) *Pool {
	return &Pool{recurrent: recurrent, states: make(map[int]BlockUse)}
}

// Put adds what a prefill up to end blocks has made: the full-attention blocks
// that are not there yet, and the state at end. What was PassOn and is put as
// KeepPrefix stays; never the other way round.
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

// Delivered drops what was only passed on: states, and blocks from the end.
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

// Prefix describes what is there.
func (p *Pool) Prefix() Prefix {
	x := Prefix{FullBlocks: len(p.full), Recurrent: p.recurrent}
	for s := range p.states {
		x.States = append(x.States, s)
	}
	slices.Sort(x.States)
	return x
}
