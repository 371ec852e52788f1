package trie

import (
	"encoding/binary"
	"math/bits"
	"reflect"

	"github.com/penstock-kv/penstock/kv"
)

// table finds a node number by (space, group, id). It is an extendible hash table: a directory of
// small open-addressed segments. When a segment is full, only that segment is split, so an insert
// waits at most for the split of one segment.
//
//	hash   ┌ directory bits ┬──────────┬ tag ────┬─────┬ home slot ┐
//	       └───────┬────────┴──────────┴────┬────┴─────┴─────┬─────┘
//	 directory ────┘                        │                │
//	   ├─► segment: tags  [2048]uint8  ◄────┘ 0 = empty      │
//	   │            nodes [2048]uint32 ◄─────────────────────┘ linear probing
//	   └─► …
//
// A look-up compares 8-bit tags before it reads a node's memory, so the node is nearly always the
// right one. A removal shifts the following entries of the probe run back, so there are no
// tombstones.
type table struct {
	dir []*segment
	// bits is the number of directory bits: len(dir) == 1<<bits.
	bits uint
	// nodes is the slab in which a node number of the table is looked up.
	nodes *slab
	seed  [2]uint64
	count int
	// distinct counts the distinct segments of dir.
	distinct int
}

const (
	segmentBits = 11
	segmentLen  = 1 << segmentBits
	segmentMask = segmentLen - 1
	// segmentMax is the number of entries at which a segment is split. It keeps probe runs short,
	// so that the tags of a run fit one or two cache lines.
	segmentMax = segmentLen * 13 / 16
	tagShift   = segmentBits
)

type segment struct {
	tags  [segmentLen]uint8
	nodes [segmentLen]uint32
	used  int
	// bits is the number of leading directory bits that all nodes of the segment have in common.
	bits uint
}

func newTable(nodes *slab, seed [2]uint64) *table {
	return &table{dir: []*segment{{}}, distinct: 1, nodes: nodes, seed: seed}
}

// hash mixes all of its arguments with a seed. Ids may be opaque keys of any pattern, so their bits
// are not used as random bits directly.
func (t *table) hash(space uint16, group uint8, id *kv.BlockID) uint64 {
	lo := binary.LittleEndian.Uint64(id[:8]) ^ t.seed[0]
	hi := binary.LittleEndian.Uint64(id[8:]) ^ t.seed[1]
	a, b := bits.Mul64(lo^0x9e3779b97f4a7c15, hi^0xd6e8feb86659fd93)
	a, b = bits.Mul64(a^b^uint64(space)<<8^uint64(group), 0xa0761d6478bd642f)
	return a ^ b
}

func (t *table) hashOf(n uint32) uint64 {
	nd := t.nodes.at(n)
	return t.hash(nd.space, nd.group(), &nd.id)
}

func tagOf(h uint64) uint8 {
	if tag := uint8(h >> tagShift); tag != 0 {
		return tag
	}
	return 1
}

func homeOf(h uint64) uint32 { return uint32(h) & segmentMask }

func (t *table) segment(h uint64) *segment {
	// With t.bits 0 there is one segment: a shift by 64 yields index 0.
	return t.dir[h>>(64-t.bits)]
}

// find returns the node number, or 0.
func (t *table) find(space uint16, group uint8, id *kv.BlockID) uint32 {
	h := t.hash(space, group, id)
	s, tag := t.segment(h), tagOf(h)
	for i := homeOf(h); s.tags[i] != 0; i = (i + 1) & segmentMask {
		if s.tags[i] != tag {
			continue
		}
		n := s.nodes[i]
		if nd := t.nodes.at(n); nd.id == *id && nd.space == space && nd.group() == group {
			return n
		}
	}
	return 0
}

// findHash returns the number of a node of the space and group whose hash is h, or 0.
func (t *table) findHash(h uint64, space uint16, group uint8) uint32 {
	s, tag := t.segment(h), tagOf(h)
	for i := homeOf(h); s.tags[i] != 0; i = (i + 1) & segmentMask {
		if s.tags[i] != tag {
			continue
		}
		n := s.nodes[i]
		if nd := t.nodes.at(n); nd.space == space && nd.group() == group && t.hashOf(n) == h {
			return n
		}
	}
	return 0
}

// insert adds a node that is not in the table.
func (t *table) insert(n uint32) {
	h := t.hashOf(n)
	s := t.segment(h)
	for s.used >= segmentMax {
		t.split(s, h)
		s = t.segment(h)
	}
	s.add(h, n)
	t.count++
}

func (s *segment) add(h uint64, n uint32) {
	i := homeOf(h)
	for s.tags[i] != 0 {
		i = (i + 1) & segmentMask
	}
	s.tags[i], s.nodes[i] = tagOf(h), n
	s.used++
}

// split divides the segment of h into two, which differ in one more directory bit.
func (t *table) split(s *segment, h uint64) {
	if s.bits == t.bits {
		t.double()
	}
	low, high := &segment{bits: s.bits + 1}, &segment{bits: s.bits + 1}
	t.distinct++
	for i, tag := range s.tags {
		if tag == 0 {
			continue
		}
		nh := t.hashOf(s.nodes[i])
		if nh>>(63-s.bits)&1 == 0 {
			low.add(nh, s.nodes[i])
		} else {
			high.add(nh, s.nodes[i])
		}
	}
	// All directory entries whose index begins with the segment's bits refer to the segment.
	width := 1 << (t.bits - s.bits)
	first := int(h>>(64-t.bits)) &^ (width - 1)
	for i := range width {
		t.dir[first+i] = low
		if i >= width/2 {
			t.dir[first+i] = high
		}
	}
}

func (t *table) double() {
	dir := make([]*segment, 2*len(t.dir))
	for i, s := range t.dir {
		dir[2*i], dir[2*i+1] = s, s
	}
	t.dir, t.bits = dir, t.bits+1
}

// remove removes a node and reports whether the table had it. The node's fields must be the same as
// at insertion.
func (t *table) remove(n uint32) bool {
	h := t.hashOf(n)
	s := t.segment(h)
	i := homeOf(h)
	for s.nodes[i] != n || s.tags[i] == 0 {
		if s.tags[i] == 0 {
			return false
		}
		i = (i + 1) & segmentMask
	}
	for j := (i + 1) & segmentMask; s.tags[j] != 0; j = (j + 1) & segmentMask {
		// The entry at j may move to the free position i unless its home position lies after i.
		home := homeOf(t.hashOf(s.nodes[j]))
		if (j-home)&segmentMask >= (j-i)&segmentMask {
			s.tags[i], s.nodes[i] = s.tags[j], s.nodes[j]
			i = j
		}
	}
	s.tags[i], s.nodes[i] = 0, 0
	s.used--
	t.count--
	return true
}

// segments calls f once for each segment.
func (t *table) segments(f func(*segment)) {
	for i := 0; i < len(t.dir); i += 1 << (t.bits - t.dir[i].bits) {
		f(t.dir[i])
	}
}

// bytes returns the size of the table in bytes. It takes constant time, because noteGrowthLocked
// calls it under the write lock.
func (t *table) bytes() int64 {
	return int64(len(t.dir))*8 + int64(t.distinct)*int64(reflect.TypeFor[segment]().Size())
}
