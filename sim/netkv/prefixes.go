package netkv

// prefixes is a decode instance's cache of groups' prefixes. It holds the length of the longest
// prefix that has arrived for each group, and drops the least recently used group first.
type prefixes struct {
	// tokens and used are indexed by group. used is the value of clock at the last use, or 0 if the
	// group is not cached.
	tokens []int
	used   []uint64
	clock  uint64
	total  int
}

// newPrefixes returns an empty cache for the given number of groups.
func newPrefixes(groups int) prefixes {
	return prefixes{tokens: make([]int, groups), used: make([]uint64, groups)}
}

// match returns the number of leading cached tokens of a group's prefix of the given length.
func (p *prefixes) match(group, tokens int) int {
	if group < 0 {
		return 0
	}
	return min(tokens, p.tokens[group])
}

// touch records a use of a group.
func (p *prefixes) touch(group int) {
	if group >= 0 && p.used[group] > 0 {
		p.clock++
		p.used[group] = p.clock
	}
}

// add caches a group's prefix, if this prefix is longer than the group's cached prefix.
func (p *prefixes) add(group, tokens int) {
	if group < 0 || tokens <= 0 {
		return
	}
	p.clock++
	p.used[group] = p.clock
	if more := tokens - p.tokens[group]; more > 0 {
		p.tokens[group] = tokens
		p.total += more
	}
}

// shrink drops the least recently used groups until at most limit tokens are cached.
func (p *prefixes) shrink(limit int) {
	for p.total > max(limit, 0) {
		oldest := -1
		for g, t := range p.used {
			if t > 0 && (oldest < 0 || t < p.used[oldest]) {
				oldest = g
			}
		}
		p.total -= p.tokens[oldest]
		p.tokens[oldest], p.used[oldest] = 0, 0
	}
}
