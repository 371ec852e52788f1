package trie

import (
	"reflect"
	"sync/atomic"

	"github.com/penstock-kv/penstock/kv"
)

// node is one indexed piece. It has no pointers, so the garbage collector does not scan the nodes;
// with 2 M pieces, scanning would cause a pause. A node has 48 B; each further byte would cost one
// byte of DRAM per piece.
//
// Invariant: childCount() is the number of nodes whose parent is this node.
// Invariant: a node with children or pins, or that is pending, is not removed.
type node struct {
	id     kv.BlockID
	extent kv.Extent
	// The generation is genHigh<<32 | genLow; kv.GenerationBits is 48.
	genLow  uint32
	genHigh uint16
	// space is the index in Trie.spaces; 0 marks a free node.
	space uint16
	// parent is the parent's number; 0 for a root. In a free node it is the number of the next free
	// node.
	parent uint32
	// kidsOrNewer is the number of children and depthOrOlder is the distance from the root. While
	// the node has flagLeaf, the two fields are instead its neighbours in its space's list of
	// leaves. The methods childCount and slab.depth return the number and the distance in both
	// cases.
	kidsOrNewer  uint32
	depthOrOlder uint32
	// state is pins<<16 | group<<8 | flags. Pins and flagUnpark change under the read lock, so state
	// is atomic.
	state atomic.Uint32
}

const (
	// flagPending: the Pebble batch with the piece's record is not applied yet. The node cannot be
	// matched, evicted or reclaimed.
	flagPending = 1 << iota
	// flagDoomed: the node was removed from the table, cannot be matched, and waits for
	// ReclaimStep.
	flagDoomed
	// flagTransfer: the piece's class is Transfer.
	flagTransfer
	// flagUnpark: the node is in leases.unpark (it has lost its last pin and may have to become
	// evictable again). It is set under the read lock.
	flagUnpark
	// flagDropped and flagLost encode the reason for which a node was doomed (made unmatchable);
	// doomedWhy decodes it.
	flagDropped
	// flagLeaf: the node is in its space's leaves. flagLeaf changes under the write lock only.
	flagLeaf
	flagLost
	// flagAwaits: set only while the index is loaded; kidsOrNewer<<32 | parent is then the hash of
	// the parent's id (loading.join).
	flagAwaits

	groupShift = 8
	pinShift   = 16
	pinOne     = 1 << pinShift
	maxPins    = 1<<16 - 1
)

func (n *node) gen() kv.Generation {
	return kv.Generation(uint64(n.genHigh)<<32 | uint64(n.genLow))
}

func (n *node) ref() kv.Ref { return kv.Ref{Extent: n.extent, Generation: n.gen()} }

func (n *node) setRef(r kv.Ref) {
	n.extent, n.genLow, n.genHigh = r.Extent, uint32(r.Generation), uint16(r.Generation>>32)
}

func (n *node) group() uint8 { return uint8(n.state.Load() >> groupShift) }

func (n *node) pins() uint32 { return n.state.Load() >> pinShift }

func (n *node) has(flag uint32) bool { return n.state.Load()&flag != 0 }

// doomedWhy returns the reason for which a node was doomed (made unmatchable).
func (n *node) doomedWhy() Why {
	switch n.state.Load() & (flagDropped | flagLost) {
	case flagDropped:
		return Dropped
	case flagLost:
		return Lost
	case flagDropped | flagLost:
		return Chosen
	}
	return Deleted
}

// setDoomed sets flagDoomed and the flags from which doomedWhy decodes why.
func (n *node) setDoomed(why Why) {
	flags := uint32(flagDoomed)
	switch why {
	case Dropped:
		flags |= flagDropped
	case Lost:
		flags |= flagLost
	case Chosen:
		flags |= flagDropped | flagLost
	}
	n.state.Or(flags)
}

func (n *node) class() Class {
	if n.has(flagTransfer) {
		return Transfer
	}
	return Prefix
}

// pin adds a pin. It returns false if the node has the maximum number of pins.
func (n *node) pin() bool {
	for {
		v := n.state.Load()
		if v>>pinShift == maxPins {
			return false
		}
		if n.state.CompareAndSwap(v, v+pinOne) {
			return true
		}
	}
}

// unpin removes a pin and reports whether it was the last.
func (n *node) unpin() bool {
	v := n.state.Load()
	for !n.state.CompareAndSwap(v, v-pinOne) {
		v = n.state.Load()
	}
	return v>>pinShift == 1
}

const (
	chunkBits = 13
	chunkLen  = 1 << chunkBits
	chunkMask = chunkLen - 1
	// maxNodes is less than the maximum of a uint32, so that n+1, which a match computes, does not
	// overflow.
	maxNodes = 1<<32 - 2
)

// slab holds the nodes in chunks that never move, so growing does not delay readers. Node numbers
// start at 1 and are reused, the last freed first. A chain is evicted from its leaf up, so the next
// chain gets the numbers in ascending order.
type slab struct {
	chunks []*[chunkLen]node
	// top is the highest number ever assigned.
	top  uint32
	free uint32
	live int
}

func (s *slab) at(n uint32) *node { return &s.chunks[n>>chunkBits][n&chunkMask] }

// alloc returns a zero node, or 0 when no number is left.
func (s *slab) alloc() uint32 {
	n := s.free
	switch {
	case n != 0:
		s.free = s.at(n).parent
		s.at(n).parent = 0
	case s.top == maxNodes:
		return 0
	default:
		s.top++
		n = s.top
		if int(n>>chunkBits) == len(s.chunks) {
			s.chunks = append(s.chunks, new([chunkLen]node))
		}
	}
	s.live++
	return n
}

// release frees a node.
func (s *slab) release(n uint32) {
	nd := s.at(n)
	nd.id, nd.extent, nd.genLow, nd.genHigh = kv.BlockID{}, 0, 0, 0
	nd.space, nd.kidsOrNewer, nd.depthOrOlder = 0, 0, 0
	nd.state.Store(0)
	nd.parent = s.free
	s.free = n
	s.live--
}

func (s *slab) bytes() int64 {
	return int64(len(s.chunks)) * (chunkLen*int64(reflect.TypeFor[node]().Size()) + 8)
}
