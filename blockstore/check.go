package blockstore

import (
	"fmt"
	"iter"

	"github.com/penstock-kv/penstock/kv"
)

// OneOwner is the name of the invariant that Check verifies.
const OneOwner = "one-owner"

// Finding is one violation of an invariant.
type Finding struct {
	// Invariant is the invariant's name in ARCHITECTURE.md.
	Invariant string
	Ref       kv.Ref
	Detail    string
}

// String prints the finding on one line.
func (f Finding) String() string { return fmt.Sprintf("%s: %v: %s", f.Invariant, f.Ref, f.Detail) }

// Check compares the slot table with all references of the index (one-owner). Each reference must
// name a live slot of that generation, no slot may be referenced twice, and each live slot must be
// referenced. No other call should be in progress.
func (s *Store) Check(refs iter.Seq[kv.Ref]) []Finding {
	var found []Finding
	report := func(ref kv.Ref, format string, args ...any) {
		found = append(found, Finding{Invariant: OneOwner, Ref: ref, Detail: fmt.Sprintf(format, args...)})
	}
	seen := make(map[*segment][]bool)
	for ref := range refs {
		g, err := s.segmentOf(ref)
		if err != nil {
			report(ref, "referenced, but there is no such segment")
			continue
		}
		w, slots := g.word(ref.Extent.Slot())
		if ref.Extent.Slot() >= slots {
			report(ref, "referenced, but the segment has %d slots", slots)
			continue
		}
		if w.state() != slotLive || w.generation() != ref.Generation {
			report(ref, "referenced, but the slot is %v at generation %d", w.state(), w.generation())
			continue
		}
		if seen[g] == nil {
			seen[g] = make([]bool, slots)
		}
		if seen[g][ref.Extent.Slot()] {
			report(ref, "referenced twice")
		}
		seen[g][ref.Extent.Slot()] = true
	}
	for _, v := range s.volumes {
		for _, g := range v.space.sorted() {
			for _, ref := range g.unreferenced(seen[g]) {
				report(ref, "live, but not referenced")
			}
		}
	}
	return found
}

// word returns the slot's word (generation, state and readers) and the segment's number of slots.
func (g *segment) word(slot uint32) (slotWord, uint32) {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := uint32(len(g.words))
	if slot >= n {
		return 0, n
	}
	return g.words[slot], n
}

// unreferenced returns the live slots that are not in seen.
func (g *segment) unreferenced(seen []bool) []kv.Ref {
	g.mu.Lock()
	defer g.mu.Unlock()
	var refs []kv.Ref
	for i, w := range g.words {
		if w.state() == slotLive && (i >= len(seen) || !seen[i]) {
			refs = append(refs, kv.Ref{Extent: g.extent(uint32(i)), Generation: w.generation()})
		}
	}
	return refs
}
