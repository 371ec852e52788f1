package evict

import "fmt"

// Cache simulates a prefix cache with room for a fixed number of blocks. It is used to compare
// policies on traces. It holds no data: it applies the policy and evicts leaf first. It is not safe
// for concurrent use.
type Cache struct {
	policy   Policy
	capacity int
	// nodes is indexed by node number, from 1 on. blocks maps a block's key to its node number.
	nodes  []cacheNode
	free   []Node
	blocks map[uint64]Node
	// path has the nodes of the chain that Access looks up, which may not be evicted meanwhile.
	path []Node
}

type cacheNode struct {
	key    uint64
	parent Node
	kids   int32
	busy   bool
}

// NewCache returns an empty cache of capacity blocks.
func NewCache(kind Kind, tuning Tuning, capacity int) (*Cache, error) {
	if capacity < 1 {
		return nil, fmt.Errorf("evict: cache of %d blocks; want at least 1", capacity)
	}
	p, err := New(kind, tuning)
	if err != nil {
		return nil, err
	}
	return &Cache{policy: p, capacity: capacity, nodes: make([]cacheNode, 1), blocks: make(map[uint64]Node)}, nil
}

// Len is the number of blocks held, never more than the capacity.
func (c *Cache) Len() int { return len(c.blocks) }

// Access looks up a prompt and stores its missing blocks. chain holds one well mixed key per block.
// Equal keys must mean equal prefixes, so that a key determines the keys before it. hits is the
// length of the cached prefix in blocks. If the chain is longer than the cache, the end of the
// chain is not stored.
func (c *Cache) Access(chain []uint64) (hits int) {
	c.path = c.path[:0]
	for _, key := range chain {
		n, ok := c.blocks[key]
		if !ok {
			break
		}
		c.path = append(c.path, n)
	}
	hits = len(c.path)
	for _, n := range c.path {
		c.nodes[n].busy = true
	}
	for i := hits - 1; i >= 0; i-- {
		c.policy.Touch(c.path[i])
	}
	for _, key := range chain[hits:] {
		if len(c.blocks) >= c.capacity && !c.evict() {
			break
		}
		c.insert(key)
	}
	for _, n := range c.path {
		c.nodes[n].busy = false
		c.unpark(n)
	}
	return hits
}

func (c *Cache) insert(key uint64) {
	var parent Node
	if len(c.path) > 0 {
		parent = c.path[len(c.path)-1]
		c.nodes[parent].kids++
	}
	n := c.number()
	c.nodes[n] = cacheNode{key: key, parent: parent, busy: true}
	c.blocks[key] = n
	c.policy.Insert(n, key)
	c.path = append(c.path, n)
}

func (c *Cache) number() Node {
	if k := len(c.free); k > 0 {
		n := c.free[k-1]
		c.free = c.free[:k-1]
		return n
	}
	c.nodes = append(c.nodes, cacheNode{})
	return Node(len(c.nodes) - 1)
}

func (c *Cache) evictable(n Node) bool { return c.nodes[n].kids == 0 && !c.nodes[n].busy }

func (c *Cache) evict() bool {
	// This bound is sufficient: Victim examines each node at most once for each of its touches, and
	// once more.
	steps := (maxTouches + 2) * (c.policy.Len() + 1)
	n, ok := c.policy.Victim(&steps, c.evictable)
	if !ok {
		return false
	}
	node := c.nodes[n]
	c.policy.Evicted(n, node.key)
	delete(c.blocks, node.key)
	c.nodes[n] = cacheNode{}
	c.free = append(c.free, n)
	if node.parent != 0 {
		c.nodes[node.parent].kids--
		c.unpark(node.parent)
	}
	return true
}

func (c *Cache) unpark(n Node) {
	if c.evictable(n) {
		c.policy.Unpark(n)
	}
}
