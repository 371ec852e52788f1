package hitsim

import (
	"errors"
	"fmt"
	"math"

	"github.com/penstock-kv/penstock/internal/trace"
)

// LoadOptions select the blocks of a trace that are simulated.
type LoadOptions struct {
	// Partial includes a last block that is shorter than the others, if the trace lists it. A
	// storage node holds whole blocks only, so such blocks are left out by default.
	Partial bool
}

// Trace is a trace in the form that simulations read: the tree of its prefixes.
// Its memory is proportional to its distinct blocks, not to its length.
type Trace struct {
	// Name is the name of the file.
	Name string
	// BlockTokens is the length of a block.
	BlockTokens int

	// parent has the parent of each node. Nodes are the distinct prefixes, numbered from 1 in the
	// order of their first appearance, so a parent is less than its child.
	parent   []uint32
	requests []request
	blocks   int64
	tokens   int64
	// infinite counts the hits of a cache without a limit.
	infinite Found
}

// request has the leaf and the length of a request's path in the tree (leaf 0: no block), and the
// request's number of tokens.
type request struct {
	leaf   uint32
	depth  uint32
	tokens int64
}

// Requests returns the number of requests.
func (t *Trace) Requests() int { return len(t.requests) }

// Unique returns the number of distinct blocks. The same tokens after another prefix are another
// block.
func (t *Trace) Unique() int { return len(t.parent) - 1 }

// Infinite returns the hits of a cache without a limit.
func (t *Trace) Infinite() Found { return t.infinite }

// Load reads the trace to its end.
func Load(r *trace.Reader, o LoadOptions) (*Trace, error) {
	t := &Trace{Name: r.Name(), BlockTokens: r.BlockTokens(), parent: make([]uint32, 1)}
	type edge struct {
		parent uint32
		block  uint64
	}
	children := make(map[edge]uint32)
	// Most nodes have one child, which is the node with the next number. Comparing the block of
	// that node avoids the look-up in the map.
	block := make([]uint64, 1)
	for req, err := range r.All() {
		if err != nil {
			return nil, err
		}
		ids := req.Blocks
		if !o.Partial {
			ids = ids[:req.WholeBlocks()]
		}
		var at uint32
		hits, known := 0, true
		for _, id := range ids {
			next := at + 1
			if int(next) >= len(t.parent) || t.parent[next] != at || block[next] != id {
				e := edge{at, id}
				if next = children[e]; next == 0 {
					known = false
					if len(t.parent) > math.MaxInt32 {
						return nil, fmt.Errorf("hitsim: %s has more than %d distinct blocks", t.Name, math.MaxInt32)
					}
					next = uint32(len(t.parent))
					t.parent = append(t.parent, at)
					block = append(block, id)
					children[e] = next
				}
			}
			if known {
				hits++
			}
			at = next
		}
		t.add(request{leaf: at, depth: uint32(len(ids)), tokens: int64(req.InputTokens)}, hits)
	}
	if len(t.requests) == 0 {
		return nil, errors.New("hitsim: " + t.Name + " holds no request")
	}
	return t, nil
}

func (t *Trace) add(r request, hits int) {
	t.requests = append(t.requests, r)
	t.blocks += int64(r.depth)
	t.tokens += r.tokens
	t.infinite.add(r, hits, t.BlockTokens)
}

// appendPath appends the nodes from the root to r's leaf to dst.
func (t *Trace) appendPath(dst []uint32, r request) []uint32 {
	start := len(dst)
	for range r.depth {
		dst = append(dst, 0)
	}
	for i, n := start+int(r.depth)-1, r.leaf; i >= start; i, n = i-1, t.parent[n] {
		dst[i] = n
	}
	return dst
}

// Found counts hits.
type Found struct {
	Blocks int64 `json:"hit_blocks"`
	Tokens int64 `json:"hit_tokens"`
}

func (f *Found) add(r request, hits, blockTokens int) {
	f.Blocks += int64(hits)
	f.Tokens += min(int64(hits)*int64(blockTokens), r.tokens)
}
