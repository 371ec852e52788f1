package trie

import (
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/kv"
)

// Check verifies every invariant of the index in DRAM, and that Pebble holds the same pieces. It is
// slow and must not run concurrently with writes. Each error names the violated invariant.
func (t *Trie) Check() error {
	t.mu.Lock()
	t.leases.applyUnparks(t)
	c := checker{t: t, kids: make(map[uint32]uint32), owner: make(map[kv.Extent]uint32), tally: make(map[*space]tally), leaf: make(map[*space]int)}
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

type tally struct {
	nodes, doomed int
	bytes         int64
}

type checker struct {
	t      *Trie
	errs   []error
	kids   map[uint32]uint32
	owner  map[kv.Extent]uint32
	tally  map[*space]tally
	leaf   map[*space]int
	pinned int
}

// maxFindings is the maximum number of errors in one report.
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
	ta.bytes += sp.ns.slotBytes[nd.group()]
	c.tally[sp] = ta
	if other, taken := c.owner[nd.extent]; taken {
		c.fail("one-owner", "slot %v belongs to nodes %d and %d", nd.ref(), other, n)
	}
	c.owner[nd.extent] = n
	c.pinned += int(nd.pins())
	if t.policy.Parked(n) && t.evictable(n) {
		c.fail("policy", "node %d is parked but evictable", n)
	}
	if t.evictable(n) && !nd.has(flagLeaf) {
		c.fail("leaves", "node %d may go and is not in its space's leaves", n)
	}
	if nd.has(flagLeaf) {
		c.leaf[sp]++
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
		if nd.childCount() != c.kids[n] {
			c.fail("kids", "node %d counts %d children; it has %d", n, nd.childCount(), c.kids[n])
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
		pieces := int64(0)
		for _, p := range sp.pieces {
			pieces += p
		}
		if sp.nodes != ta.nodes || sp.doomed != ta.doomed || sp.bytes != ta.bytes || pieces != int64(ta.nodes-ta.doomed) {
			c.fail("space", "space %d counts %d nodes, %d doomed, %d pieces, %d bytes; it has %d, %d, %d bytes", sp.number, sp.nodes, sp.doomed, pieces, sp.bytes, ta.nodes, ta.doomed, ta.bytes)
		}
	}
	for sp, n := range c.leaf {
		c.leaves(sp, n)
	}
	for _, ns := range t.namespaces {
		c.epochs(ns)
	}
	for ns, b := range bytes {
		if ns.bytes != b {
			c.fail("quota", "namespace %q counts %d bytes; it has %d", ns.def.Name, ns.bytes, b)
		}
	}
	tenants, idle := make(map[*tenant]int64), make(map[*tenant]int)
	for ns := range t.namespacesLocked() {
		if ns.tenant != t.tenantOfLocked(ns.def.Name) {
			c.fail("tenant", "namespace %q is not of the tenant that its name begins with", ns.def.Name)
		}
		tenants[ns.tenant] += ns.bytes
		idle[ns.tenant] += ns.garbage
	}
	for _, tn := range t.tenants {
		if tn.bytes != tenants[tn] || tn.garbage != idle[tn] {
			c.fail("tenant", "tenant %q counts %d bytes, %d unmatchable nodes; its namespaces have %d and %d", tn.prefix, tn.bytes, tn.garbage, tenants[tn], idle[tn])
		}
	}
	if live != t.nodes.live || linked != t.table.count || garbage != t.garbage || live != t.policy.Len() {
		c.fail("count", "%d nodes (counted %d), %d linked (%d), %d unmatchable (%d), %d in the policy",
			live, t.nodes.live, linked, t.table.count, garbage, t.garbage, t.policy.Len())
	}
}

// epochs compares the live spaces of ns with its definition.
func (c *checker) epochs(ns *namespace) {
	live := ns.def.Live()
	if len(ns.live) != len(live) {
		c.fail("epochs", "namespace %q has %d live epochs and %d spaces", ns.def.Name, len(live), len(ns.live))
		return
	}
	if ns.announced != (c.t.recorded[ns.def.ID] == nil) {
		c.fail("epochs", "namespace %q: announced %v, in the map of recorded namespaces %v", ns.def.Name, ns.announced, c.t.recorded[ns.def.ID] != nil)
	}
	for i, sp := range ns.live {
		if ns.announced {
			if sp.ns != ns || sp.dead || sp.epoch != live[i] || sp.number != 0 || sp.nodes != 0 {
				c.fail("epochs", "live space %d of the announced namespace %q is space %d of epoch %d with %d nodes, dead %v; it should be of epoch %d", i, ns.def.Name, sp.number, sp.epoch, sp.nodes, sp.dead, live[i])
			}
			continue
		}
		if sp.ns != ns || sp.dead || sp.epoch != live[i] || c.t.spaces[sp.number] != sp || c.t.bySerial[sp.serial] != sp.number || i > 0 && sp.serial >= ns.live[i-1].serial {
			c.fail("epochs", "live space %d of namespace %q is space %d (serial %d) of epoch %d, dead %v; it should be of epoch %d", i, ns.def.Name, sp.number, sp.serial, sp.epoch, sp.dead, live[i])
		}
	}
}

// leaves checks the list of leaves of sp, which should have n nodes.
func (c *checker) leaves(sp *space, n int) {
	t := c.t
	at, newer, found := sp.leaves.newest, uint32(0), 0
	for ; at != 0 && found <= n; found++ {
		nd := t.nodes.at(at)
		if !nd.has(flagLeaf) || nd.kidsOrNewer != newer || nd.space != sp.number {
			c.fail("leaves", "node %d follows %d in the leaves of space %d, and has %d; it is a leaf: %v", at, newer, sp.number, nd.kidsOrNewer, nd.has(flagLeaf))
			return
		}
		at, newer = nd.depthOrOlder, at
	}
	if found != n || sp.leaves.len != n || sp.leaves.oldest != newer {
		c.fail("leaves", "space %d lists %d leaves, counts %d, ends at %d; it has %d, the last %d", sp.number, found, sp.leaves.len, sp.leaves.oldest, n, newer)
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

// disk compares Pebble with DRAM: every record must belong to a node, and every node must have its
// record, except doomed (deleted) nodes. If Options.Absent hid records, a record may belong to no
// node.
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
