package trie

import (
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/kv"
)

// Check verifies every invariant of the index in DRAM, and that Pebble holds
// the same pieces. It is slow and must not run concurrently with writes. Each
// error names the invariant that is broken.
func (t *Trie) Check() error {
	t.mu.Lock()
	t.leases.applyUnparks(t)
	c := checker{t: t, kids: make(map[uint32]uint32), owner: make(map[kv.Extent]uint32), tally: make(map[*space]tally), leaf: make(map[*namespace]int)}
	for n := uint32(1); n <= t.nodes.top; n++ {
		if t.nodes.at(n).space != 0 {
			c.node(n)
		}
	}
	c.totals()
	c.pins()
	t.mu.Unlock()
	if err := c.disk(); err != nil {
		return err
	}
	return errors.Join(c.errs...)
}

type tally struct{ nodes, doomed int }

type checker struct {
	t      *Trie
	errs   []error
	kids   map[uint32]uint32
	owner  map[kv.Extent]uint32
	tally  map[*space]tally
	leaf   map[*namespace]int
	pinned int
}

// maxFindings keeps the report readable.
const maxFindings = 20

func (c *checker) fail(invariant, format string, args ...any) {
	if len(c.errs) < maxFindings {
		c.errs = append(c.errs, fmt.Errorf("trie: %s: %s", invariant, fmt.Sprintf(format, args...)))
	}
}

func (c *checker) node(n uint32) {
	t := c.t
	nd := t.nodes.at(n)
	sp := t.spaces[nd.space]
	if sp == nil {
		c.fail("space", "node %d is in space %d, which is free", n, nd.space)
		return
	}
	ta := c.tally[sp]
	ta.nodes++
	if nd.has(flagDoomed) {
		ta.doomed++
	} else if got := t.table.find(nd.space, nd.group(), &nd.id); got != n {
		c.fail("table", "node %d (%v) is found as %d", n, nd.id, got)
	}
	c.tally[sp] = ta
	if other, taken := c.owner[nd.extent]; taken {
		c.fail("one-owner", "slot %v belongs to nodes %d and %d", nd.ref(), other, n)
	}
	c.owner[nd.extent] = n
	c.pinned += int(nd.pins())
	if t.policy.Parked(n) && t.evictable(n) {
		c.fail("policy", "node %d is parked though it may go", n)
	}
	if t.evictable(n) && !nd.has(flagLeaf) {
		c.fail("leaves", "node %d may go and is not in its namespace's leaves", n)
	}
	if nd.has(flagLeaf) {
		c.leaf[sp.ns]++
	}
	c.parent(n, nd, sp)
}

func (c *checker) parent(n uint32, nd *node, sp *space) {
	if nd.parent == 0 {
		if c.t.nodes.depth(n) != 0 || sp.ns.tree && nd.group() != 0 {
			c.fail("prefix-closed", "node %d at depth %d, group %d, has no parent", n, c.t.nodes.depth(n), nd.group())
		}
		return
	}
	c.kids[nd.parent]++
	p := c.t.nodes.at(nd.parent)
	depth, want := c.t.nodes.depth(n), c.t.nodes.depth(nd.parent)
	if nd.group() == 0 {
		want++
	}
	switch {
	case p.space != nd.space || p.group() != 0:
		c.fail("prefix-closed", "node %d hangs on %d, of space %d and group %d", n, nd.parent, p.space, p.group())
	case depth != want:
		c.fail("prefix-closed", "node %d at depth %d hangs on %d; it should be at %d", n, depth, nd.parent, want)
	case nd.group() != 0 && p.id != nd.id:
		c.fail("prefix-closed", "piece %d of block %v hangs on block %v", n, nd.id, p.id)
	}
}

func (c *checker) totals() {
	t := c.t
	live, linked, garbage := 0, 0, 0
	bytes := make(map[*namespace]int64)
	for n := uint32(1); n <= t.nodes.top; n++ {
		nd := t.nodes.at(n)
		if nd.space == 0 {
			continue
		}
		live++
		if nd.kids() != c.kids[n] {
			c.fail("kids", "node %d counts %d children; it has %d", n, nd.kids(), c.kids[n])
		}
		if sp := t.spaces[nd.space]; sp != nil {
			bytes[sp.ns] += sp.ns.slotBytes[nd.group()]
		}
	}
	for sp, ta := range c.tally {
		linked += ta.nodes - ta.doomed
		garbage += ta.doomed
		if sp.dead {
			garbage += ta.nodes - ta.doomed
		}
		if sp.nodes != ta.nodes || sp.doomed != ta.doomed {
			c.fail("space", "space %d counts %d nodes, %d doomed; it has %d, %d", sp.number, sp.nodes, sp.doomed, ta.nodes, ta.doomed)
		}
	}
	for ns, n := range c.leaf {
		c.leaves(ns, n)
	}
	for ns, b := range bytes {
		if ns.bytes != b {
			c.fail("quota", "namespace %q counts %d bytes; it has %d", ns.def.Name, ns.bytes, b)
		}
	}
	if live != t.nodes.live || linked != t.table.count || garbage != t.garbage || live != t.policy.Len() {
		c.fail("count", "%d nodes (counted %d), %d linked (%d), %d unmatchable (%d), %d in the policy",
			live, t.nodes.live, linked, t.table.count, garbage, t.garbage, t.policy.Len())
	}
}

// leaves walks the list of ns, which should have n nodes.
func (c *checker) leaves(ns *namespace, n int) {
	t := c.t
	at, newer, found := ns.leaves.newest, uint32(0), 0
	for ; at != 0 && found <= n; found++ {
		nd := t.nodes.at(at)
		if !nd.has(flagLeaf) || nd.kidsOrNewer != newer || t.namespaceOf(at) != ns {
			c.fail("leaves", "node %d follows %d in the leaves of namespace %q, and says %d; it is a leaf: %v", at, newer, ns.def.Name, nd.kidsOrNewer, nd.has(flagLeaf))
			return
		}
		at, newer = nd.depthOrOlder, at
	}
	if found != n || ns.leaves.len != n || ns.leaves.oldest != newer {
		c.fail("leaves", "namespace %q lists %d leaves, counts %d, ends at %d; it has %d, the last %d", ns.def.Name, found, ns.leaves.len, ns.leaves.oldest, n, newer)
	}
}

func (c *checker) pins() {
	l := &c.t.leases
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.pinned != l.pins {
		c.fail("pinned-stays", "the nodes have %d pins; the leases hold %d", c.pinned, l.pins)
	}
	for at, i := range l.heap {
		if int(l.slots[i].heapAt) != at || at > 0 && l.expiresAt((at-1)/2) > l.expiresAt(at) {
			c.fail("leases", "slot %d is out of place at %d in the heap", i, at)
		}
	}
}

// disk compares Pebble with DRAM: every record is a node's, and every node that is
// not doomed has its record. Where records were hidden by Options.Absent, a record
// may be nobody's.
func (c *checker) disk() error {
	t := c.t
	recorded := make(map[uint32]bool)
	err := t.scan(blockKey, func(key, value []byte) error {
		ext, err := extentOfKey(key)
		if err != nil {
			return err
		}
		rec, err := decodeRecord(value)
		if err != nil {
			return err
		}
		n, ok := c.owner[ext]
		if !ok && t.load.Hidden > 0 {
			return nil
		}
		if !ok {
			c.fail("data-before-index", "Pebble has a record of slot %v, which no node refers to", ext)
			return nil
		}
		recorded[n] = true
		c.record(n, &rec)
		return nil
	})
	if err != nil {
		return fmt.Errorf("trie: check: %w", err)
	}
	for _, n := range c.owner {
		if !recorded[n] && !t.nodes.at(n).has(flagDoomed) {
			c.fail("durable-truth", "Pebble has no record of node %d in slot %v", n, t.nodes.at(n).ref())
		}
	}
	return nil
}

func (c *checker) record(n uint32, rec *record) {
	nd := c.t.nodes.at(n)
	sp := c.t.spaces[nd.space]
	transfer := rec.flags&recTransfer != 0
	if rec.id != nd.id || rec.gen != nd.gen() || rec.group != nd.group() || rec.depth != c.t.nodes.depth(n) ||
		rec.serial != sp.serial || transfer != nd.has(flagTransfer) {
		c.fail("durable-truth", "Pebble says %+v of slot %v; DRAM says node %d: %s", *rec, nd.extent, n, c.t.lineLocked(n))
	}
}
