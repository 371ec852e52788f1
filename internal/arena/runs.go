package arena

// none is the page number that no page has.
const none = ^uint32(0)

// runs is the set of free runs of pages, and finds in O(log runs) the shortest
// one that is long enough, the first in the region among equals.
//
// It is a treap ordered by (length, start) whose nodes are the free pages
// themselves: the arrays are indexed by the first page of a run, so nothing is
// allocated after the start (16 bytes for each page of 4 KiB). The heap order is
// that of a hash of the first page, which keeps the tree flat without a
// generator of random numbers.
type runs struct {
	root uint32
	// length is indexed by the first page of a run, back by its last, so that a
	// released neighbour finds it. Invariant: 0 for every other page.
	length, back []uint32
	left, right  []uint32
}

func newRuns(pages uint32) runs {
	return runs{
		root:   none,
		length: make([]uint32, pages), back: make([]uint32, pages),
		left: make([]uint32, pages), right: make([]uint32, pages),
	}
}

// put adds n pages from p on, joined with the free runs that touch them.
func (r *runs) put(p, n uint32) {
	if p > 0 && r.back[p-1] > 0 {
		before := r.back[p-1]
		r.drop(p - before)
		p, n = p-before, n+before
	}
	if after := p + n; after < uint32(len(r.length)) && r.length[after] > 0 {
		n += r.length[after]
		r.drop(after)
	}
	r.length[p], r.back[p+n-1] = n, n
	r.left[p], r.right[p] = none, none
	r.root = r.insert(r.root, p)
}

// take removes n pages from the beginning of the best run and returns the first.
func (r *runs) take(n uint32) (uint32, bool) {
	p := r.best(n)
	if p == none {
		return 0, false
	}
	whole := r.length[p]
	r.drop(p)
	if whole > n {
		r.put(p+n, whole-n)
	}
	return p, true
}

// best returns the first page of the shortest run of at least n pages, or none.
func (r *runs) best(n uint32) uint32 {
	found := none
	for t := r.root; t != none; {
		if r.length[t] >= n {
			found, t = t, r.left[t]
		} else {
			t = r.right[t]
		}
	}
	return found
}

// longest returns the length of the longest run.
func (r *runs) longest() uint32 {
	if r.root == none {
		return 0
	}
	t := r.root
	for r.right[t] != none {
		t = r.right[t]
	}
	return r.length[t]
}

// drop removes the run that begins at p.
func (r *runs) drop(p uint32) {
	r.root = r.remove(r.root, p)
	r.back[p+r.length[p]-1] = 0
	r.length[p] = 0
}

// less orders runs by length, then by place.
func (r *runs) less(p, q uint32) bool {
	if r.length[p] != r.length[q] {
		return r.length[p] < r.length[q]
	}
	return p < q
}

// priority is a mixing of the page number (murmur3's last step) that stands in
// for a random number.
func priority(p uint32) uint32 {
	p ^= p >> 16
	p *= 0x85ebca6b
	p ^= p >> 13
	p *= 0xc2b2ae35
	return p ^ p>>16
}

// insert puts the node p into the tree t and returns the new root of it.
func (r *runs) insert(t, p uint32) uint32 {
	switch {
	case t == none:
		return p
	case priority(p) > priority(t):
		r.left[p], r.right[p] = r.split(t, p)
		return p
	case r.less(p, t):
		r.left[t] = r.insert(r.left[t], p)
	default:
		r.right[t] = r.insert(r.right[t], p)
	}
	return t
}

// split cuts the tree t into the nodes less than p and the others.
func (r *runs) split(t, p uint32) (lo, hi uint32) {
	if t == none {
		return none, none
	}
	if r.less(t, p) {
		r.right[t], hi = r.split(r.right[t], p)
		return t, hi
	}
	lo, r.left[t] = r.split(r.left[t], p)
	return lo, t
}

// remove takes the node p out of the tree t and returns the new root of it.
func (r *runs) remove(t, p uint32) uint32 {
	switch {
	case t == p:
		return r.merge(r.left[p], r.right[p])
	case r.less(p, t):
		r.left[t] = r.remove(r.left[t], p)
	default:
		r.right[t] = r.remove(r.right[t], p)
	}
	return t
}

// merge joins two trees, all of lo being less than all of hi.
func (r *runs) merge(lo, hi uint32) uint32 {
	switch {
	case lo == none:
		return hi
	case hi == none:
		return lo
	case priority(lo) > priority(hi):
		r.right[lo] = r.merge(r.right[lo], hi)
		return lo
	}
	r.left[hi] = r.merge(lo, r.left[hi])
	return hi
}
