package trie

import "github.com/penstock-kv/penstock/kv"

// mixable is a live epoch from which a mixed match may take blocks.
type mixable struct {
	sp *space
	// full is the number of blocks of the chain, from the first on, that the epoch has; 0 unless
	// the namespace is a tree.
	full int
}

// mixed returns the longest match whose blocks may be of different epochs, and false if no epoch of
// the range is live. In a tree, an epoch that has a block has all ancestors of the block too. So
// the match is at least as long as the longest match of one epoch, and its blocks are at least as
// new.
//
//	epoch 8   a b
//	epoch 7   a b c d
//	epoch 6   a b c
//	mixed     a b c d     epochs 8, 8, 7, 7
func (w *walk) mixed(opts *MatchOptions) (Match, bool) {
	m := Match{Epoch: w.ns.def.Epoch, Cut: CutEpoch, Pieces: opts.Pieces}
	w.s.mix = w.s.mix[:0]
	for _, sp := range w.ns.live {
		if opts.wants(w.ns, sp.epoch) {
			w.s.mix = append(w.s.mix, mixable{sp: sp, full: w.depth(sp)})
			m.Stored = max(m.Stored, w.s.mix[len(w.s.mix)-1].full)
		}
	}
	if len(w.s.mix) == 0 {
		return m, false
	}
	m.Epoch, m.Cut = w.s.mix[0].sp.epoch, w.cut
	for !w.ns.tree && m.Stored < len(w.ids) && w.stored(m.Stored) {
		m.Stored++
	}
	m.Blocks = len(w.ids)
	if w.ns.tree || w.flat() {
		if m.Blocks = m.Stored; m.Blocks < len(w.ids) {
			m.Cut = CutAbsent
		}
	}
	// For block i no epoch has all pieces that a match of this length needs. The next length to try
	// is i, the longest one that does not need block i.
	for i := w.unheld(m.Blocks); i >= 0; i = w.unheld(m.Blocks) {
		m.Cut, m.Blocks = w.lacking(i, m.Blocks), i
	}
	m.Epochs = opts.Epochs
	w.take(&m)
	if opts.Count {
		w.count(&m)
	}
	return m, true
}

// depth returns the number of blocks of the chain, from the first on, that are stored in sp. It
// returns 0 if the namespace is not a tree.
func (w *walk) depth(sp *space) int {
	if !w.ns.tree {
		return 0
	}
	w.sp = sp.number
	prev := uint32(0)
	for i := range w.ids {
		if prev = w.next(prev, &w.ids[i]); prev == 0 {
			return i
		}
	}
	return len(w.ids)
}

// stored reports whether any epoch of s.mix has block i, that is, the block's piece of layer group
// 0.
func (w *walk) stored(i int) bool {
	for _, e := range w.s.mix {
		if w.sp = e.sp.number; w.piece(0, &w.ids[i]) != 0 {
			return true
		}
	}
	return false
}

// has reports whether the epoch e has the piece of block i in the group that a match needs for
// every block: the Full group, or group 0 of a flat namespace. It is true if there is no such
// group.
func (w *walk) has(e mixable, i int) bool {
	w.sp = e.sp.number
	switch {
	case w.ns.tree:
		return i < e.full
	case w.flat():
		return w.piece(0, &w.ids[i]) != 0
	}
	return true
}

// lacks returns the first Window or State group for which a match of n blocks needs the piece of
// block i and w.sp, the space of the last call of has, does not have that piece. It returns -1 if
// there is no such group.
func (w *walk) lacks(i, n int) int {
	for g := range w.ns.def.Geometry.Groups {
		if w.other(g) && i >= w.first(uint8(g), n) && w.piece(uint8(g), &w.ids[i]) == 0 {
			return g
		}
	}
	return -1
}

// other reports whether g is a Window or State group, for which a match needs only the pieces of
// the last blocks.
func (w *walk) other(g int) bool {
	return w.ns.def.Geometry.Groups[g].Kind != kv.Full && !w.flat()
}

// holder finds the newest epoch that has all pieces of block i that a match of n blocks needs. It
// sets w.sp to the space of that epoch and returns the epoch's index in s.mix, or -1.
func (w *walk) holder(i, n int) int {
	for k, e := range w.s.mix {
		if w.has(e, i) && w.lacks(i, n) < 0 {
			return k
		}
	}
	return -1
}

// unheld returns the index of the last block before block n for which holder finds no epoch, or -1.
// For each of these blocks, some epoch has the piece of layer group 0, so only the blocks that
// Window and State groups need are searched.
func (w *walk) unheld(n int) int {
	from := n
	for g := range w.ns.def.Geometry.Groups {
		if w.other(g) {
			from = min(from, w.first(uint8(g), n))
		}
	}
	for i := n - 1; i >= from; i-- {
		if w.holder(i, n) < 0 {
			return i
		}
	}
	return -1
}

// lacking returns the cut of a match of n blocks that cannot have block i, because the newest epoch
// that has block i lacks a piece of a Window or State group.
func (w *walk) lacking(i, n int) Cut {
	for _, e := range w.s.mix {
		if !w.has(e, i) {
			continue
		}
		if g := w.lacks(i, n); g >= 0 && w.ns.def.Geometry.Groups[g].Kind == kv.State {
			return CutStateMissing
		}
		return CutWindowMissing
	}
	return CutAbsent
}

// take adds to m the matched pieces, the runs of consecutive blocks of one epoch, and the nodes that
// a lease of the match pins. In a tree it adds the node of layer group 0 of the last block of each
// run. That node keeps its ancestors from eviction too.
func (w *walk) take(m *Match) {
	base := len(m.Epochs)
	for i := range m.Blocks {
		e := w.s.mix[w.holder(i, m.Blocks)].sp.epoch
		last := len(m.Epochs) - 1
		same := last >= base && m.Epochs[last].Epoch == e
		if same {
			m.Epochs[last].Blocks++
		} else {
			m.Epochs = append(m.Epochs, kv.EpochRun{Epoch: e, Blocks: 1})
		}
		if !w.ns.tree && !w.flat() {
			continue
		}
		n := w.piece(0, &w.ids[i])
		m.Pieces = append(m.Pieces, Piece{Ref: w.t.nodes.at(n).ref(), Block: uint32(i)})
		if w.ns.tree && same {
			w.s.nodes[last-base] = n
		} else {
			w.s.nodes = append(w.s.nodes, n)
		}
	}
	for g := range w.ns.def.Geometry.Groups {
		if !w.other(g) {
			continue
		}
		for i := w.first(uint8(g), m.Blocks); i < m.Blocks; i++ {
			w.holder(i, m.Blocks)
			n := w.piece(uint8(g), &w.ids[i])
			w.s.nodes = append(w.s.nodes, n)
			m.Pieces = append(m.Pieces, Piece{Ref: w.t.nodes.at(n).ref(), Block: uint32(i), Group: uint8(g)})
		}
	}
	for i, r := range m.Epochs[base:] {
		if i == 0 || r.Epoch > m.Epoch {
			m.Epoch = r.Epoch
		}
	}
}

// count adds the match to the counters of each epoch that has blocks of the match or, if the match
// has no blocks, to the counters of the newest epoch of the range.
func (w *walk) count(m *Match) {
	for k, e := range w.s.mix {
		blocks := 0
		for _, r := range m.Epochs {
			if r.Epoch == e.sp.epoch {
				blocks += r.Blocks
			}
		}
		if blocks > 0 || m.Blocks == 0 && k == 0 {
			e.sp.matches.Add(1)
			e.sp.hits.Add(int64(blocks))
		}
	}
}

// touchRuns records a hit of the blocks of a tree in the eviction policy, except of the last block
// of each run.
func (w *walk) touchRuns(runs []kv.EpochRun) {
	for i := len(runs) - 1; i >= 0; i-- {
		n := w.s.nodes[i]
		for range runs[i].Blocks - 1 {
			n = w.t.nodes.at(n).parent
			w.t.policy.Touch(n)
		}
	}
}

// Locate finds given pieces of one live epoch of a chain, such as the pieces of a mixed match;
// Match, in contrast, finds the pieces of a prefix. Epoch 0 means the newest. Locate sets Ref of
// each piece that is stored and, in a tree, whose ancestors are stored. It sets the zero Ref in the
// other pieces. The found pieces are touched in the order of eviction. Match.Blocks of the result
// is the block of the first missing piece, or the length of the chain. Match.Pieces is the argument
// pieces. Errors: ErrNamespaceUnknown and ErrClosed.
func (t *Trie) Locate(id kv.NamespaceID, epoch kv.Epoch, ids []kv.BlockID, pieces []Piece) (Match, error) {
	s := t.matchPool.Get().(*matchScratch)
	defer t.matchPool.Put(s)
	s.nodes = s.nodes[:0]
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return Match{}, err
	}
	if epoch == 0 {
		epoch = ns.def.Epoch
	}
	sp := ns.version(epoch)
	if sp == nil {
		return Match{Epoch: ns.def.Epoch, Cut: CutEpoch, Pieces: pieces}, nil
	}
	w := walk{t: t, ns: ns, ids: ids, s: s}
	w.limit(0)
	e := mixable{sp: sp, full: w.depth(sp)}
	m := Match{Epoch: epoch, Cut: w.cut, Blocks: len(w.ids), Pieces: pieces}
	for i := range pieces {
		p, n := &pieces[i], uint32(0)
		if int(p.Block) < len(w.ids) && w.has(e, int(p.Block)) {
			n = w.piece(p.Group, &w.ids[p.Block])
		}
		if n == 0 {
			p.Ref = kv.Ref{}
			m.Blocks, m.Cut = min(m.Blocks, int(p.Block)), CutAbsent
			continue
		}
		p.Ref = t.nodes.at(n).ref()
		s.nodes = append(s.nodes, n)
	}
	m.Tokens = m.Blocks * ns.def.Geometry.BlockTokens
	w.touch(&m)
	return m, nil
}
