package trie

import (
	"fmt"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

// Cut is the reason why a match ended.
type Cut uint8

const (
	// CutComplete: every requested block matched.
	CutComplete Cut = iota
	// CutAbsent: the next block is not stored.
	CutAbsent
	// CutEpoch: no requested epoch is live.
	CutEpoch
	// CutLeaseDenied: a lease was requested and there are too many leases. The result has no
	// blocks, because nothing would protect their pieces from eviction.
	CutLeaseDenied
	// CutStateMissing: the blocks are stored, but there is no state snapshot at that length.
	CutStateMissing
	// CutWindowMissing: the blocks are stored, but a piece of a window group is missing.
	CutWindowMissing
	// CutLimit: the match has MatchOptions.MaxBlocks blocks.
	CutLimit
	// CutTooLong: the match has Options.MaxChainBlocks blocks.
	CutTooLong
)

// String returns the stable name that the API and the CLI use: complete, absent, epoch,
// lease_denied, state_missing, window_missing, limit, too_long.
func (c Cut) String() string {
	switch c {
	case CutComplete:
		return "complete"
	case CutAbsent:
		return "absent"
	case CutEpoch:
		return "epoch"
	case CutLeaseDenied:
		return "lease_denied"
	case CutStateMissing:
		return "state_missing"
	case CutWindowMissing:
		return "window_missing"
	case CutLimit:
		return "limit"
	case CutTooLong:
		return "too_long"
	}
	return fmt.Sprintf("Cut(%d)", uint8(c))
}

// Piece is the slot of one layer group of one matched block.
type Piece struct {
	Ref kv.Ref
	// Block is the index of the block in the requested chain.
	Block uint32
	// Group is the index of the layer group.
	Group uint8
}

// MatchOptions are the options of a match. The zero value matches the newest epoch
// without a lease.
type MatchOptions struct {
	// Epoch is the newest epoch that may match; 0 means the namespace's newest.
	Epoch kv.Epoch
	// Oldest is the oldest epoch that may match; 0 means only Epoch. Each live epoch from Oldest to
	// Epoch is matched separately, and the longest match is returned; if several have that length,
	// the match of the newest epoch among them. All blocks of the match have one epoch.
	Oldest kv.Epoch
	// Mix allows blocks of different epochs of the range in one match. Each block is then taken
	// from the newest live epoch of the range that has the pieces of the block that the match
	// needs.
	Mix bool
	// Suffix allows ids to begin in the middle of a chain. The ancestors of the first block must be
	// stored too, but they are neither counted in the match nor touched in the order of eviction.
	// Suffix needs a namespace with index trie and a geometry of one Full group, and excludes Mix.
	Suffix bool
	// MaxBlocks is the maximum length of the match in blocks; 0 means no limit.
	MaxBlocks int
	// Lease requests a lease on the matched pieces. A match of 0 blocks gets no lease.
	Lease bool
	// TTL is the duration of the lease; 0 means that the lease lasts until Release.
	TTL time.Duration
	// Owner is the name of the lease's requester, which Pins returns. Empty: unknown.
	Owner string
	// Now is the current time; required with Lease.
	Now time.Time
	// Pieces is a buffer: Match appends the pieces to it and returns the result in Match.Pieces. A
	// caller that reuses the buffer avoids the allocation.
	Pieces []Piece
	// Epochs is a buffer: with Mix, Match appends the epochs to it and returns the result in
	// Match.Epochs.
	Epochs []kv.EpochRun
	// NoTouch is set if the match must not change the order of eviction, as for inspection.
	NoTouch bool
	// Count includes the match in the counters of EpochStats.
	Count bool
}

// Match is the result of a match.
type Match struct {
	// Blocks is the length of the reusable prefix in blocks, Tokens the same in tokens.
	Blocks, Tokens int
	// Cut is the reason why the match is not longer. The block that ended the match has the index
	// Blocks.
	Cut Cut
	// Stored is the number of blocks whose piece of layer group 0 is stored, counted from the first
	// block up to the first missing one. In a namespace with a Full group it is at least Blocks. A
	// writer need not send the stored pieces again.
	Stored int
	// Epoch is the epoch of the blocks; with Mix, the newest of their epochs. If no block matched,
	// it is the newest epoch that may match or, if Cut is CutEpoch, the newest epoch of the
	// namespace.
	Epoch kv.Epoch
	// Epochs are the epochs of the blocks, from the first block on. It is set only with Mix.
	Epochs []kv.EpochRun
	// Lease protects the pieces from eviction until it is released or expires; 0 if none was
	// granted.
	Lease LeaseID
	// Pieces are the pieces that a reuse of this prefix needs, group by group and within a group in
	// the order of the blocks. A Full group needs the pieces of all blocks, a Window group those of
	// the last blocks, and a State group that of the last block.
	Pieces []Piece
}

// matchScratch is the reused memory of one match. nodes holds the nodes to pin and to touch that
// are not ancestors of walk.tip.
type matchScratch struct {
	nodes []uint32
	mix   []mixable
}

// Match finds the longest prefix of the chain ids for which the pieces that each layer group needs
// are stored. In a flat namespace it finds the longest run of stored keys from the first key on. A
// match of a range of epochs walks the chain once for each live epoch of the range, and at most
// once more. With Mix it walks the chain once for each live epoch, and makes up to one look-up for
// each block and live epoch. Match fails only with ErrNamespaceUnknown or ErrClosed. It does not
// allocate if opts.Pieces and opts.Epochs have room, except that a lease may grow the table of
// leases.
func (t *Trie) Match(id kv.NamespaceID, ids []kv.BlockID, opts MatchOptions) (Match, error) {
	s := t.matchPool.Get().(*matchScratch)
	defer t.matchPool.Put(s)
	s.nodes = s.nodes[:0]
	if opts.Lease {
		t.leases.expireIfFull(t, opts.Now)
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return Match{}, err
	}
	w := walk{t: t, ns: ns, ids: ids, base: len(opts.Pieces), s: s, suffix: opts.Suffix}
	w.limit(opts.MaxBlocks)
	var m Match
	var found bool
	if opts.Mix {
		m, found = w.mixed(&opts)
	} else {
		m, found = w.longest(&opts)
	}
	if !found {
		return m, nil
	}
	if opts.Lease && m.Blocks > 0 && !w.lease(&m, opts) {
		return Match{Epoch: m.Epoch, Cut: CutLeaseDenied, Stored: m.Stored, Pieces: opts.Pieces}, nil
	}
	m.Tokens = m.Blocks * ns.def.Geometry.BlockTokens
	if !opts.NoTouch {
		w.touch(&m)
	}
	return m, nil
}

// longest returns the longest match of one epoch, and false if no epoch of the range is live.
func (w *walk) longest(opts *MatchOptions) (Match, bool) {
	m := Match{Epoch: w.ns.def.Epoch, Cut: CutEpoch, Pieces: opts.Pieces}
	var best *space
	for _, sp := range w.ns.live {
		if !opts.wants(w.ns, sp.epoch) {
			continue
		}
		next := w.descend(sp, m.Pieces)
		if best == nil || next.Blocks > m.Blocks {
			best, m = sp, next
		}
		// Each call of descend overwrites the pieces of the previous call. If the best match is not
		// the last one, descend is called again for its space after the loop.
		m.Pieces = next.Pieces
		if m.Blocks == len(w.ids) {
			break
		}
	}
	if best == nil {
		return m, false
	}
	if w.sp != best.number {
		m = w.descend(best, m.Pieces)
	}
	if opts.Count {
		best.matches.Add(1)
		best.hits.Add(int64(m.Blocks))
	}
	return m, true
}

// wants reports whether the range of o includes the epoch e.
func (o *MatchOptions) wants(ns *namespace, e kv.Epoch) bool {
	newest := o.Epoch
	if newest == 0 {
		newest = ns.def.Epoch
	}
	oldest := o.Oldest
	if oldest == 0 {
		oldest = newest
	}
	return oldest <= e && e <= newest
}

// MatchTokens hashes the tokens into block ids, leaving out an incomplete last block, and matches
// the ids. It appends the ids to dst and returns the result. It fails with ErrEntry in a flat
// namespace, whose ids are the engine's keys.
func (t *Trie) MatchTokens(dst []kv.BlockID, id kv.NamespaceID, tokens []kv.Token, opts MatchOptions) (Match, []kv.BlockID, error) {
	def, err := t.NamespaceByID(id)
	if err != nil {
		return Match{}, dst, err
	}
	if def.Index == kv.IndexFlat {
		return Match{}, dst, fmt.Errorf("trie: namespace %q is flat; match it by ids: %w", def.Name, ErrEntry)
	}
	chain, err := def.Chain()
	if err != nil {
		return Match{}, dst, fmt.Errorf("trie: %w", err)
	}
	base := len(dst)
	dst, _ = chain.Append(dst, tokens)
	m, err := t.Match(id, dst[base:], opts)
	return m, dst, err
}

// walk is one match in progress, under the read lock.
type walk struct {
	t    *Trie
	ns   *namespace
	sp   uint16
	ids  []kv.BlockID
	base int // number of pieces in the caller's buffer before the match
	s    *matchScratch
	// suffix is MatchOptions.Suffix. above is the parent of the first matched node, or 0.
	suffix bool
	above  uint32
	// cut is the result Match.Cut if every block of ids matches.
	cut Cut
	// tip is the deepest matched node of layer group 0 in a tree. The other matched nodes of group
	// 0 are its ancestors, and s.nodes holds the matched nodes of the other groups. A mixed match
	// has no tip: s.nodes then begins with the last node of group 0 of each run of blocks of one
	// epoch.
	tip uint32
}

// descend matches the chain in one space. It keeps the first w.base elements of pieces, and
// overwrites the rest of the buffer with the pieces of the match.
func (w *walk) descend(sp *space, pieces []Piece) Match {
	w.sp, w.tip, w.above, w.s.nodes = sp.number, 0, 0, w.s.nodes[:0]
	if w.suffix && len(w.ids) > 0 {
		if n := w.piece(0, &w.ids[0]); n != 0 && w.t.rootedLocked(n) {
			w.above = w.t.nodes.at(n).parent
		}
	}
	m := Match{Epoch: sp.epoch, Pieces: pieces[:w.base]}
	w.full(&m)
	if len(w.ns.def.Geometry.Groups) > 1 || !w.ns.tree && !w.flat() {
		w.hybrid(&m)
	}
	return m
}

// limit shortens the chain to the length that the options allow.
func (w *walk) limit(maxBlocks int) {
	if n := w.t.opts.MaxChainBlocks; len(w.ids) > n {
		w.ids, w.cut = w.ids[:n], CutTooLong
	}
	if maxBlocks > 0 && len(w.ids) > maxBlocks {
		w.ids, w.cut = w.ids[:maxBlocks], CutLimit
	}
}

func (w *walk) flat() bool { return w.ns.def.Index == kv.IndexFlat }

// full matches the pieces of layer group 0. In a tree each block's node must be a child of the
// previous block's node; otherwise all nodes are roots. If the geometry has no Full group, no group
// needs the pieces of all blocks, and full only computes m.Stored.
func (w *walk) full(m *Match) {
	m.Cut = w.cut
	prev := w.above
	for i := range w.ids {
		n := w.next(prev, &w.ids[i])
		if n == 0 {
			m.Cut = CutAbsent
			break
		}
		prev = n
		m.Stored++
		if w.ns.tree || w.flat() {
			m.Pieces = append(m.Pieces, Piece{Ref: w.t.nodes.at(n).ref(), Block: uint32(i)})
		}
		if w.flat() {
			w.s.nodes = append(w.s.nodes, n)
		}
	}
	if w.ns.tree && m.Stored > 0 {
		w.tip = prev
	}
	m.Blocks = m.Stored
}

// next returns the node of id as a child of prev, or 0. It tries node prev+1 first, because the
// blocks of a sequence that was put in one call have consecutive node numbers.
func (w *walk) next(prev uint32, id *kv.BlockID) uint32 {
	parent := prev
	if !w.ns.tree {
		parent = 0
	}
	const wanted = (1<<(pinShift-groupShift)-1)<<groupShift | flagPending | flagDoomed
	if guess := prev + 1; guess <= w.t.nodes.top {
		nd := w.t.nodes.at(guess)
		if nd.parent == parent && nd.space == w.sp && nd.id == *id && nd.state.Load()&wanted == 0 {
			return guess
		}
	}
	n := w.piece(0, id)
	if n == 0 || w.t.nodes.at(n).parent != parent {
		return 0
	}
	return n
}

// piece returns the node of a matchable piece, or 0.
func (w *walk) piece(group uint8, id *kv.BlockID) uint32 {
	n := w.t.table.find(w.sp, group, id)
	if n == 0 || w.t.nodes.at(n).has(flagPending) {
		return 0
	}
	// If a block was deleted, its pieces of other groups than 0 stay in the table until ReclaimStep
	// finds them. The block may have been put again meanwhile; then it has another node, and the
	// piece found here does not belong to that node.
	if group != 0 && w.ns.tree && w.t.spaces[w.sp].doomed > 0 && w.t.nodes.at(n).parent != w.t.table.find(w.sp, 0, id) {
		return 0
	}
	return n
}

// hybrid shortens the match until every group has the pieces that it needs at that length. It then
// appends the pieces of the Window and State groups.
func (w *walk) hybrid(m *Match) {
	if !w.ns.tree {
		m.Blocks, m.Cut = len(w.ids), w.cut
	}
	groups := w.ns.def.Geometry.Groups
	for g := 0; g < len(groups); g++ {
		if groups[g].Kind == kv.Full {
			continue
		}
		missing := w.missing(uint8(g), m.Blocks)
		if missing < 0 {
			continue
		}
		m.Cut = CutStateMissing
		if groups[g].Kind == kv.Window {
			m.Cut = CutWindowMissing
		}
		// The prefix is cut before the block with the index missing, which it then does not need.
		// Every group is checked again at the new length.
		m.Blocks, g = missing, -1
	}
	if w.ns.tree {
		w.shorten(m)
	}
	for g := range groups {
		if groups[g].Kind != kv.Full {
			w.append(m, uint8(g))
		}
	}
}

// first returns the index of the first block that group g needs for a prefix of n blocks.
func (w *walk) first(g uint8, n int) int {
	return max(0, n-w.ns.def.Geometry.WindowBlocks(int(g)))
}

// missing looks for a piece that group g needs for a prefix of n blocks and that is not stored. It
// returns the index of the last block with such a piece, or -1.
func (w *walk) missing(g uint8, n int) int {
	for i := n - 1; i >= w.first(g, n); i-- {
		if w.piece(g, &w.ids[i]) == 0 {
			return i
		}
	}
	return -1
}

// shorten cuts a match in a tree to m.Blocks blocks: it removes the later blocks' pieces of layer
// group 0.
func (w *walk) shorten(m *Match) {
	for range m.Stored - m.Blocks {
		w.tip = w.t.nodes.at(w.tip).parent
	}
	m.Pieces = m.Pieces[:w.base+m.Blocks]
}

// append adds the pieces of a Window or State group to the match.
func (w *walk) append(m *Match, g uint8) {
	for i := w.first(g, m.Blocks); i < m.Blocks; i++ {
		n := w.piece(g, &w.ids[i])
		w.s.nodes = append(w.s.nodes, n)
		m.Pieces = append(m.Pieces, Piece{Ref: w.t.nodes.at(n).ref(), Block: uint32(i), Group: g})
	}
}

// touch records a hit of each matched node in the eviction policy, the deepest node first and the
// root last.
func (w *walk) touch(m *Match) {
	for _, n := range slices.Backward(w.s.nodes) {
		w.t.policy.Touch(n)
	}
	for n := w.tip; n != 0 && n != w.above; n = w.t.nodes.at(n).parent {
		w.t.policy.Touch(n)
	}
	if w.ns.tree {
		w.touchRuns(m.Epochs)
	}
}

// lease grants a lease that pins the matched nodes. It returns false if there are too many leases.
func (w *walk) lease(m *Match, opts MatchOptions) bool {
	if w.tip != 0 {
		w.s.nodes = append(w.s.nodes, w.tip)
	}
	id, ok := w.t.leases.grant(w.t, w.s.nodes, grantOptions{expires: expiry(opts.TTL, opts.Now), since: opts.Now.UnixNano(), owner: opts.Owner})
	if w.tip != 0 {
		w.s.nodes = w.s.nodes[:len(w.s.nodes)-1]
	}
	m.Lease = id
	return ok
}
