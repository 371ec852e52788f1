package trie

import (
	"bytes"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/penstock-kv/penstock/kv"
)

// Place is the namespace and the layer group of the piece that occupies a slot.
type Place struct {
	Namespace kv.NamespaceID
	Group     int
}

// refsPerLock is the number of nodes that an iteration reads each time it takes the read lock. It
// bounds the time that writers wait. The caller's code runs without the lock.
const refsPerLock = 1024

// Refs yields the slot, namespace and group of every indexed piece, including pieces that wait for
// ReclaimStep. If the index changes during the loop, also from inside it, the iteration may or may
// not see the change.
func (t *Trie) Refs() iter.Seq2[kv.Ref, Place] {
	return func(yield func(kv.Ref, Place) bool) {
		type found struct {
			ref   kv.Ref
			place Place
		}
		batch := make([]found, 0, refsPerLock)
		for from := uint32(1); from != 0; {
			batch = batch[:0]
			from = t.visit(from, refsPerLock, func(n uint32) bool {
				nd := t.nodes.at(n)
				batch = append(batch, found{nd.ref(), Place{t.spaces[nd.space].ns.def.ID, int(nd.group())}})
				return true
			})
			for _, f := range batch {
				if !yield(f.ref, f.place) {
					return
				}
			}
		}
	}
}

// visit examines up to limit nodes, beginning at number from, and calls f for each that holds a
// committed piece, until f returns false. It returns the number of the node to continue from, or 0
// at the end.
func (t *Trie) visit(from uint32, limit int, f func(n uint32) bool) (next uint32) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for n := from; n <= t.nodes.top; n++ {
		if limit == 0 {
			return n
		}
		limit--
		if nd := t.nodes.at(n); nd.space != 0 && !nd.has(flagPending) && !f(n) {
			return n + 1
		}
	}
	return 0
}

// Info describes one stored piece.
type Info struct {
	ID        kv.BlockID
	Parent    kv.BlockID // zero for a root
	Group     int
	Depth     int // 0 for the first block of a prompt
	Ref       kv.Ref
	Class     Class
	Epoch     kv.Epoch
	Children  int // child blocks and pieces
	Leases    int // leases that pin this piece itself
	SlotBytes int64
}

func (t *Trie) infoLocked(n uint32) Info {
	nd := t.nodes.at(n)
	i := Info{
		ID: nd.id, Group: int(nd.group()), Depth: int(t.nodes.depth(n)), Ref: nd.ref(), Class: nd.class(), Epoch: t.spaces[nd.space].epoch,
		Children: int(nd.childCount()), Leases: int(nd.pins()), SlotBytes: t.spaces[nd.space].ns.slotBytes[nd.group()],
	}
	if nd.parent != 0 && i.Group == 0 {
		i.Parent = t.nodes.at(nd.parent).id
	}
	return i
}

// Stat returns the pieces of one block, sorted by epoch, the newest first, and then by group. It
// returns ErrAbsent if the index has no piece of the block.
func (t *Trie) Stat(id kv.NamespaceID, block kv.BlockID) ([]Info, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return nil, err
	}
	var infos []Info
	for _, sp := range ns.live {
		for g := range ns.def.Geometry.Groups {
			n := t.table.find(sp.number, uint8(g), &block)
			if n != 0 && !t.nodes.at(n).has(flagPending) && t.rootedLocked(n) {
				infos = append(infos, t.infoLocked(n))
			}
		}
	}
	if infos == nil {
		return nil, fmt.Errorf("trie: namespace %q: block %v: %w", ns.def.Name, block, ErrAbsent)
	}
	return infos, nil
}

// Below counts the pieces of a block and of all its descendants, in every live epoch, and the bytes
// of their slots. These are the pieces that Delete would make unmatchable. Below examines every
// piece of the index, in short steps, and needs two bits of memory for each. Pieces put or removed
// meanwhile may or may not be counted. It fails with ErrAbsent.
func (t *Trie) Below(id kv.NamespaceID, block kv.BlockID) (pieces, bytes int64, err error) {
	if _, err := t.Stat(id, block); err != nil {
		return 0, 0, err
	}
	t.mu.RLock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		t.mu.RUnlock()
		return 0, 0, err
	}
	top := t.nodes.top
	known, below := make(bitmap, top/64+1), make(bitmap, top/64+1)
	for _, sp := range ns.live {
		for g := range ns.def.Geometry.Groups {
			if n := t.table.find(sp.number, uint8(g), &block); n != 0 && !t.nodes.at(n).has(flagPending) && t.rootedLocked(n) {
				known.set(n)
				below.set(n)
				pieces++
				bytes += ns.slotBytes[g]
			}
		}
	}
	t.mu.RUnlock()
	var path []uint32
	for from := uint32(1); from != 0; {
		from = t.visit(from, refsPerLock, func(n uint32) bool {
			if n > top {
				return false
			}
			if sp := t.spaces[t.nodes.at(n).space]; sp.ns != ns || sp.dead {
				return true
			}
			path = path[:0]
			for n != 0 && n <= top && !known.has(n) {
				path = append(path, n)
				if t.nodes.at(n).has(flagDoomed) {
					n = 0 // below a deleted block: already unmatchable
					break
				}
				n = t.nodes.at(n).parent
			}
			for _, p := range path {
				known.set(p)
				if n != 0 && n <= top && below.has(n) {
					below.set(p)
					pieces++
					nd := t.nodes.at(p)
					bytes += t.spaces[nd.space].ns.slotBytes[nd.group()]
				}
			}
			return true
		})
	}
	return pieces, bytes, nil
}

// bitmap is a set of node numbers.
type bitmap []uint64

func (b bitmap) set(n uint32)      { b[n/64] |= 1 << (n % 64) }
func (b bitmap) has(n uint32) bool { return b[n/64]&(1<<(n%64)) != 0 }

// List returns up to limit matchable pieces of the namespace, in no particular order, and the
// cursor for the next call. The first cursor is 0, and a returned cursor of 0 means the end. A call
// may return fewer than limit pieces before the end. Pieces put or removed between two calls may be
// missed.
func (t *Trie) List(id kv.NamespaceID, cursor uint32, limit int) (infos []Info, next uint32, err error) {
	if _, err := t.NamespaceByID(id); err != nil {
		return nil, 0, err
	}
	const looks = 1 << 16
	next = t.visit(max(cursor, 1), looks, func(n uint32) bool {
		sp := t.spaces[t.nodes.at(n).space]
		if sp.ns.def.ID == id && !sp.dead && t.rootedLocked(n) {
			infos = append(infos, t.infoLocked(n))
		}
		return len(infos) < limit
	})
	return infos, next, nil
}

// String draws the index, for tests and small indexes. It draws a tree for each epoch of each
// namespace, also for a retired epoch ("dead"). Each piece has one line, below its parent's. The
// line has the first bytes of the id, the group if it is not 0, the slot, and then marks: "leases
// N", "transfer", "pending", "doomed".
func (t *Trie) String() string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	kids := make(map[uint32][]uint32)
	roots := make(map[*space][]uint32)
	for n := uint32(1); n <= t.nodes.top; n++ {
		switch nd := t.nodes.at(n); {
		case nd.space == 0:
		case nd.parent == 0:
			roots[t.spaces[nd.space]] = append(roots[t.spaces[nd.space]], n)
		default:
			kids[nd.parent] = append(kids[nd.parent], n)
		}
	}
	var b strings.Builder
	for _, sp := range t.spaces {
		if sp == nil {
			continue
		}
		fmt.Fprintf(&b, "%s epoch %d", sp.ns.def.Name, sp.epoch)
		if sp.dead {
			b.WriteString(" (dead)")
		}
		b.WriteByte('\n')
		t.drawLocked(&b, roots[sp], kids, "")
	}
	return b.String()
}

func (t *Trie) drawLocked(b *strings.Builder, nodes []uint32, kids map[uint32][]uint32, indent string) {
	slices.SortFunc(nodes, func(x, y uint32) int {
		nx, ny := t.nodes.at(x), t.nodes.at(y)
		// Pieces of other layer groups come before the blocks themselves (pieces of group 0);
		// within a group the order is by id.
		if d := int(ny.group()) - int(nx.group()); d != 0 {
			return d
		}
		return bytes.Compare(nx.id[:], ny.id[:])
	})
	for i, n := range nodes {
		branch, below := "├─ ", "│  "
		if i == len(nodes)-1 {
			branch, below = "└─ ", "   "
		}
		fmt.Fprintf(b, "%s%s%s\n", indent, branch, t.lineLocked(n))
		t.drawLocked(b, kids[n], kids, indent+below)
	}
}

func (t *Trie) lineLocked(n uint32) string {
	nd := t.nodes.at(n)
	s := nd.id.String()[:8]
	if g := nd.group(); g != 0 {
		s += fmt.Sprintf(" group %d", g)
	}
	s += " " + nd.ref().String()
	if p := nd.pins(); p > 0 {
		s += fmt.Sprintf(" leases %d", p)
	}
	for _, f := range []struct {
		flag uint32
		mark string
	}{{flagTransfer, " transfer"}, {flagPending, " pending"}, {flagDoomed, " doomed"}} {
		if nd.has(f.flag) {
			s += f.mark
		}
	}
	return s
}
