package netkv

// prefixes is a decode instance's cache of groups' prefixes: the longest of each
// that has landed, in tokens, the least recently used one first to leave.
type prefixes struct {
	// tokens and used are by group; used is when, 0: not held.
	tokens []int
	used   []uint64
	clock  uint64
	total  int
}

// newPrefixes returns an empty cache for so many groups.
func newPrefixes(groups int) prefixes {
	return prefixes{tokens: make([]int, groups), used: make([]uint64, groups)}
}

// match is how many leading tokens of a group's prefix of that length are held.
func (p *prefixes) match(group, tokens int) int {
	if group < 0 {
		return 0
	}
	return min(tokens, p.tokens[group])
}

// touch notes that a group was used.
func (p *prefixes) touch(group int) {
	if group >= 0 && p.used[group] > 0 {
		p.clock++
		p.used[group] = p.clock
	}
}

// add holds a group's prefix, if it is longer than what is held.
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

// shrink drops the least recently used groups until no more than limit tokens are
// held.
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
