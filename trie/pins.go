package trie

import (
	"fmt"
	"math"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

// Pin describes a lease of a match or of PinEpoch. The CLI and the documentation call a lease a pin
// if it has no expiry or is of PinEpoch.
type Pin struct {
	Lease     LeaseID
	Namespace string
	// Epoch is the epoch of the blocks. If the blocks have several, it is the epoch of the first
	// block.
	Epoch kv.Epoch
	// OfEpoch is set if the lease keeps the epoch live and pins no blocks.
	OfEpoch bool
	// Owner is MatchOptions.Owner, or the owner given to PinEpoch.
	Owner string
	Since time.Time
	// Expires is zero if only Release ends the lease.
	Expires time.Time
	// Blocks is the length of the prefix that the lease pins, in blocks, and Bytes the size of its
	// slots.
	Blocks int
	Bytes  int64
}

// PinFilter selects the pins to list; the zero value selects all.
type PinFilter struct {
	// Namespace, if not 0, selects one namespace.
	Namespace kv.NamespaceID
	// Endless, if set, leaves out leases on blocks if the lease has an expiry.
	Endless bool
}

// Pins appends to dst up to limit open leases of matches and of PinEpoch, in no particular order.
// It leaves out leases of PinEpoch whose epoch was retired. cursor is 0 in the first call, and in
// each further call the result next of the previous call; next 0 means that there are no more
// leases. A lease that is granted or ended between two calls may be missed.
func (t *Trie) Pins(dst []Pin, f PinFilter, cursor uint32, limit int) (pins []Pin, next uint32) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	l := &t.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := cursor; int(i) < len(l.slots); i++ {
		if limit <= 0 {
			return dst, i
		}
		s := &l.slots[i]
		if s.heapAt < 0 || s.since == 0 || f.Endless && s.epoch == nil && s.expires != math.MaxInt64 || s.epoch != nil && s.epoch.dead {
			continue
		}
		if ns := t.spaceOf(s).ns; f.Namespace == 0 || ns.def.ID == f.Namespace {
			dst = append(dst, t.pinLocked(i, s))
			limit--
		}
	}
	return dst, 0
}

// Leased describes an open lease that a match or PinEpoch granted. Error: ErrLeaseUnknown.
func (t *Trie) Leased(id LeaseID) (Pin, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	l := &t.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	i, err := l.openLocked(id)
	if err != nil {
		return Pin{}, err
	}
	if l.slots[i].since == 0 {
		return Pin{}, fmt.Errorf("trie: lease %d was granted to no caller: %w", id, ErrLeaseUnknown)
	}
	return t.pinLocked(i, &l.slots[i]), nil
}

// spaceOf returns the space (one epoch of a namespace) that a lease keeps live, or that of the
// first piece that it pins. Trie.mu is held.
func (t *Trie) spaceOf(s *leaseSlot) *space {
	if s.epoch != nil {
		return s.epoch
	}
	return t.spaces[t.nodes.at(s.node).space]
}

// pinLocked describes the lease in slot i. Trie.mu and leases.mu are held.
func (t *Trie) pinLocked(i uint32, s *leaseSlot) Pin {
	sp := t.spaceOf(s)
	p := Pin{
		Lease: t.leases.idLocked(i), Namespace: sp.ns.def.Name, Epoch: sp.epoch, OfEpoch: s.epoch != nil,
		Owner: s.owner, Since: time.Unix(0, s.since),
	}
	if s.expires != math.MaxInt64 {
		p.Expires = time.Unix(0, s.expires)
	}
	if p.OfEpoch {
		return p
	}
	p.hold(t, sp.ns, s.node)
	for _, n := range s.more {
		p.hold(t, sp.ns, n)
	}
	return p
}

// hold adds the pieces that a pin of node n protects to the counts of p. If n is in the full group,
// these are the pieces of the chain from n up to the root; in another group, and in a flat
// namespace, only the piece of n. A lease on a mixed match has one pin in the full group for each
// run of blocks of one epoch.
func (p *Pin) hold(t *Trie, ns *namespace, n uint32) {
	group := t.nodes.at(n).group()
	switch {
	case group == 0 && ns.tree:
		blocks := int(t.nodes.depth(n)) + 1
		p.Blocks = max(p.Blocks, blocks)
		p.Bytes += int64(blocks) * ns.slotBytes[0]
		return
	case group == 0:
		p.Blocks++
	}
	p.Bytes += ns.slotBytes[group]
}

// endPins ends the leases in ns that have no expiry, except leases of Hold, which writers still
// need. Trie.mu is held for writing.
func (l *leases) endPins(t *Trie, ns *namespace) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.slots {
		s := &l.slots[i]
		if s.heapAt >= 0 && s.since != 0 && s.expires == math.MaxInt64 && t.spaceOf(s).ns == ns {
			l.endLocked(t, uint32(i))
		}
	}
}
