package evict

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

func newPolicy(t testing.TB, kind Kind) Policy {
	t.Helper()
	p, err := New(kind, Tuning{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func newCache(t testing.TB, kind Kind, capacity int) *Cache {
	t.Helper()
	c, err := NewCache(kind, Tuning{}, capacity)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func forEachKind(t *testing.T, f func(t *testing.T, kind Kind)) {
	for _, kind := range Kinds() {
		t.Run(kind.String(), func(t *testing.T) { f(t, kind) })
	}
}

func TestKinds(t *testing.T) {
	for _, kind := range Kinds() {
		if got, err := ParseKind(kind.String()); err != nil || got != kind {
			t.Errorf("%v parses as %v: %v", kind, got, err)
		}
		if p := newPolicy(t, kind); p.Kind() != kind {
			t.Errorf("New(%v) is %v", kind, p.Kind())
		}
	}
	if _, err := ParseKind("arc"); err == nil {
		t.Error("arc is not a policy, but it parses")
	}
	if _, err := New(0, Tuning{}); err == nil {
		t.Error("New(0) succeeds")
	}
	for _, bad := range []Tuning{{SmallPercent: 91}, {PromoteTouches: 4}, {GhostPercent: -1}} {
		if _, err := New(S3FIFO, bad); err == nil {
			t.Errorf("tuning %+v is accepted", bad)
		}
	}
	if _, err := NewCache(LRU, Tuning{}, 0); err == nil {
		t.Error("a cache of 0 blocks is accepted")
	}
}

// mix spreads small numbers as a hash would.
func mix(x uint64) uint64 { return rand.New(rand.NewPCG(x, 1)).Uint64() }

// TestTextbook compares FIFO and LRU with a model that searches a list, on blocks that are not in a
// tree.
func TestTextbook(t *testing.T) {
	for _, kind := range []Kind{FIFO, LRU} {
		t.Run(kind.String(), func(t *testing.T) {
			const capacity = 20
			rng := rand.New(rand.NewPCG(1, 1))
			c := newCache(t, kind, capacity)
			var list []uint64 // the next victim is first
			for range 20_000 {
				key := mix(uint64(rng.IntN(60)))
				i := slices.Index(list, key)
				if hits := c.Access([]uint64{key}); hits == 1 != (i >= 0) {
					t.Fatalf("%d hits; the list has it at %d", hits, i)
				}
				if i >= 0 && kind == LRU {
					list = append(slices.Delete(list, i, i+1), key)
				}
				if i < 0 {
					list = append(list, key)
					list = list[max(0, len(list)-capacity):]
				}
			}
		})
	}
}

// TestScan: under S3-FIFO only, blocks in use survive a scan of blocks that are used once, if the
// main queue has room for them.
func TestScan(t *testing.T) {
	forEachKind(t, func(t *testing.T, kind Kind) {
		c := newCache(t, kind, 100)
		hot := func() (hits int) {
			for i := range uint64(25) {
				hits += c.Access([]uint64{mix(i)})
			}
			return hits
		}
		for range 3 {
			hot()
		}
		for i := range uint64(500) {
			c.Access([]uint64{mix(1000 + i)})
		}
		if got := hot(); (got == 25) != (kind == S3FIFO) {
			t.Errorf("%d of 25 blocks in use survived the scan", got)
		}
	})
}

// TestReturning: S3-FIFO keeps content that returns soon after its eviction.
func TestReturning(t *testing.T) {
	p := newPolicy(t, S3FIFO).(*s3fifo)
	for n := range Node(100) {
		p.Insert(n+1, mix(uint64(n)))
	}
	steps := 10
	n, ok := p.Victim(&steps, func(Node) bool { return true })
	if !ok || n != 1 {
		t.Fatalf("the first victim is %d, %v; want 1", n, ok)
	}
	p.Evicted(n, mix(0))
	p.Insert(n, mix(0))
	if q := p.queueOf(n); q != mainQueue {
		t.Errorf("it came back into queue %d; want the main one", q)
	}
}

func TestColdIsEvictedFirst(t *testing.T) {
	forEachKind(t, func(t *testing.T, kind Kind) {
		p := newPolicy(t, kind)
		p.Insert(1, 1)
		p.InsertCold(2)
		p.Insert(3, 3)
		p.InsertCold(4)
		var order []Node
		for steps := 100; ; {
			n, ok := p.Victim(&steps, func(Node) bool { return true })
			if !ok {
				break
			}
			p.Evicted(n, uint64(n))
			order = append(order, n)
		}
		if want := []Node{2, 4, 1, 3}; !slices.Equal(order, want) {
			t.Errorf("evicted %v; want %v", order, want)
		}
	})
}

// TestDemoted: demoted nodes are evicted before all others, touched and cold ones too, in the order in which they were demoted. A
// touch after that makes a node one of the others again, except under FIFO. A node that is parked, or that the policy
// does not have, may be demoted.
func TestDemoted(t *testing.T) {
	forEachKind(t, func(t *testing.T, kind Kind) {
		p := newPolicy(t, kind)
		for n := Node(1); n <= 6; n++ {
			p.Insert(n, uint64(n))
		}
		p.InsertCold(7)
		p.Touch(5)
		p.Touch(2)
		steps := 100
		if n, ok := p.Victim(&steps, func(n Node) bool { return n != 7 && n != 1 }); !ok || n == 1 || n == 7 {
			t.Fatalf("victim %d, %t", n, ok)
		}
		for _, n := range []Node{5, 1, 6, 9, 2} { // 1 is parked
			p.Demote(n)
		}
		p.Touch(6)
		p.Unpark(7)
		var order []Node
		for {
			n, ok := p.Victim(&steps, func(n Node) bool { return n != 1 || p.Len() < 4 })
			if !ok {
				break
			}
			p.Evicted(n, uint64(n))
			order = append(order, n)
			if p.Len() == 3 {
				p.Unpark(1)
			}
		}
		want := map[Kind][]Node{S3FIFO: {5, 2, 7, 6, 1, 3, 4}, LRU: {5, 2, 7, 3, 1, 4, 6}, FIFO: {5, 6, 2, 7, 1, 3, 4}}
		if !slices.Equal(order, want[kind]) {
			t.Errorf("evicted %v; want %v", order, want[kind])
		}
	})
}

// TestChainIsEvictedLeafFirst: of a chain inserted from the root, the leaf is evicted first, and the
// other nodes follow at constant cost.
func TestChainIsEvictedLeafFirst(t *testing.T) {
	forEachKind(t, func(t *testing.T, kind Kind) {
		const length = 1000
		p := newPolicy(t, kind)
		for n := range Node(length) {
			p.Insert(n+1, uint64(n))
		}
		leaf := Node(length)
		steps := 3 * length
		for leaf > 0 {
			n, ok := p.Victim(&steps, func(n Node) bool { return n == leaf })
			if !ok || n != leaf {
				t.Fatalf("victim %d, %v with %d steps left; want %d", n, ok, steps, leaf)
			}
			p.Evicted(n, uint64(n))
			leaf--
			p.Unpark(leaf)
		}
		if p.Len() != 0 {
			t.Errorf("%d nodes are left", p.Len())
		}
	})
}

// TestBytes checks the memory cost that doc.go states.
func TestBytes(t *testing.T) {
	forEachKind(t, func(t *testing.T, kind Kind) {
		const nodes = 1 << 19
		p := newPolicy(t, kind)
		fixed := p.Bytes()
		for n := range Node(nodes) {
			p.Insert(n+1, mix(uint64(n)))
		}
		perNode := float64(p.Bytes()-fixed) / nodes
		if perNode > 9.5 {
			t.Errorf("%.2f B a node; want at most 9.5", perNode)
		}
		steps := 10
		n, _ := p.Victim(&steps, func(Node) bool { return true })
		p.Evicted(n, 1)
		if perNode := float64(p.Bytes()-fixed) / nodes; perNode > 13.5 {
			t.Errorf("%.2f B a node with ghosts; want at most 13.5", perNode)
		}
	})
}

func TestTouchDoesNotAllocate(t *testing.T) {
	forEachKind(t, func(t *testing.T, kind Kind) {
		p := newPolicy(t, kind)
		p.Insert(1, 1)
		if n := testing.AllocsPerRun(1000, func() { p.Touch(1) }); n != 0 {
			t.Errorf("%v allocations; want 0", n)
		}
	})
}

func TestGhost(t *testing.T) {
	var g ghost
	const capacity = 1000
	if g.take(mix(1)) {
		t.Error("an empty ghost has entries")
	}
	for i := range uint64(5000) {
		g.add(mix(i), capacity)
	}
	kept := 0
	for i := range uint64(5000) {
		if g.take(mix(i)) {
			kept++
			if i < 2500 {
				t.Errorf("%d is in the ghost with %d later entries", i, 5000-i)
			}
		}
	}
	if kept > capacity || kept < capacity/2 {
		t.Errorf("%d of the last entries are in the ghost; the capacity is %d", kept, capacity)
	}
	// Growing keeps every fingerprint that still fits.
	for i := range uint64(16) {
		g.add(mix(i), capacity)
	}
	g.resize(4 * capacity)
	for i := range uint64(16) {
		if !g.take(mix(i)) {
			t.Errorf("%d was lost when the ghost grew", i)
		}
	}
	if want := int64(4 * capacity * 4); g.bytes() > want+want/2 {
		t.Errorf("%d B for %d fingerprints", g.bytes(), 4*capacity)
	}
}

// FuzzPolicy compares a policy with a map of the nodes that it holds and of the nodes that are
// evictable. A victim must be evictable, and a node is returned whenever one is evictable.
func FuzzPolicy(f *testing.F) {
	rng := rand.New(rand.NewPCG(2, 2))
	for i := range 9 {
		seed := make([]byte, 600)
		for j := range seed {
			seed[j] = byte(rng.Uint32())
		}
		seed[0] = byte(i)
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) == 0 {
			return
		}
		p := newPolicy(t, Kinds()[int(in[0])%3])
		free := make(map[Node]bool) // the nodes in the policy, and whether they are evictable
		evictable := func(n Node) bool { return free[n] }
		for in = in[1:]; len(in) >= 2; in = in[2:] {
			n := Node(in[1]%40) + 1
			_, held := free[n]
			switch op := in[0] % 8; {
			case op < 3 && !held && in[0]&0x80 != 0:
				p.InsertCold(n)
				free[n] = true
			case op < 3 && !held:
				p.Insert(n, mix(uint64(n)))
				free[n] = in[0]&0x40 != 0
			case op == 3 && held:
				p.Touch(n)
			case op == 4 && held:
				free[n] = !free[n]
				if free[n] {
					p.Unpark(n)
				}
			case op == 5:
				p.Remove(n)
				delete(free, n)
			case op == 6 && held:
				p.Cool(n)
			case op == 7:
				victim(t, p, free, evictable)
			}
			if p.Len() != len(free) {
				t.Fatalf("it holds %d nodes; want %d", p.Len(), len(free))
			}
		}
		for range len(free) {
			victim(t, p, free, evictable)
		}
	})
}

func victim(t *testing.T, p Policy, free map[Node]bool, evictable func(Node) bool) {
	steps := 1000
	n, ok := p.Victim(&steps, evictable)
	if ok {
		if !free[n] {
			t.Fatalf("victim %d may not be evicted", n)
		}
		p.Evicted(n, mix(uint64(n)))
		delete(free, n)
		return
	}
	for n, may := range free {
		if may {
			t.Fatalf("no victim with %d steps left, although %d may be evicted", steps, n)
		}
	}
}

// FuzzCache checks the tree around the policy: hits are the longest cached prefix, the capacity is
// not exceeded, and every block's ancestors are cached.
func FuzzCache(f *testing.F) {
	f.Add([]byte{0, 10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3})
	f.Add([]byte{1, 3, 200, 13, 77, 99, 200, 13, 1, 0, 255})
	f.Add([]byte{2, 40, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 9, 8, 7})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < 2 {
			return
		}
		capacity := int(in[1]%30) + 1
		c := newCache(t, Kinds()[in[0]%3], capacity)
		for _, b := range in[2:] {
			// The keys are paths in a tree with two branches.
			var chain []uint64
			key := uint64(1)
			for i := range int(b%7) + 1 {
				key = key<<1 | uint64(b>>i&1)
				chain = append(chain, mix(key))
			}
			want := 0
			for want < len(chain) && c.blocks[chain[want]] != 0 {
				want++
			}
			if hits := c.Access(chain); hits != want {
				t.Fatalf("%d hits; %d of the chain were there", hits, want)
			}
			if got := min(len(chain), capacity); c.Len() > capacity || c.blocks[chain[got-1]] == 0 {
				t.Fatalf("%d blocks of %d held, and the chain's block %d: %v", c.Len(), capacity, got-1, c.blocks[chain[got-1]] != 0)
			}
			checkTree(t, c)
		}
	})
}

func checkTree(t *testing.T, c *Cache) {
	kids := make(map[Node]int32)
	for key, n := range c.blocks {
		node := c.nodes[n]
		if node.key != key || node.busy {
			t.Fatalf("block %x is node %d: %+v", key, n, node)
		}
		if node.parent != 0 {
			kids[node.parent]++
			if parent := c.nodes[node.parent]; c.blocks[parent.key] != node.parent {
				t.Fatalf("prefix-closed: block %x is held without its parent", key)
			}
		}
	}
	for _, n := range c.blocks {
		if c.nodes[n].kids != kids[n] {
			t.Fatalf("node %d counts %d children; it has %d", n, c.nodes[n].kids, kids[n])
		}
	}
	if c.policy.Len() != len(c.blocks) {
		t.Fatalf("the policy holds %d nodes; want %d", c.policy.Len(), len(c.blocks))
	}
}

func BenchmarkTouch(b *testing.B) {
	for _, kind := range Kinds() {
		b.Run(kind.String(), func(b *testing.B) {
			p := newPolicy(b, kind)
			for n := range Node(1 << 16) {
				p.Insert(n+1, mix(uint64(n)))
			}
			n := Node(0)
			for b.Loop() {
				n = n*5 + 1
				p.Touch(n&0xffff + 1)
			}
		})
	}
}

func BenchmarkCache(b *testing.B) {
	for _, kind := range Kinds() {
		b.Run(fmt.Sprint(kind), func(b *testing.B) {
			c := newCache(b, kind, 1<<14)
			rng := rand.New(rand.NewPCG(3, 3))
			chain := make([]uint64, 64)
			for b.Loop() {
				session := rng.Uint64N(512)
				for i := range chain {
					chain[i] = (session<<8 | uint64(i) + 1) * 0x9e3779b97f4a7c15
				}
				c.Access(chain)
			}
		})
	}
}
