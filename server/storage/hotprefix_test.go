package storage

import (
	"testing"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

// hotRig has hotPrefixes with a clock that the test sets.
type hotRig struct {
	*testing.T
	*hotPrefixes
	ns  kv.Namespace
	now time.Time
}

func newHotRig(t *testing.T) *hotRig {
	return &hotRig{t, newHotPrefixes(HotOptions{MatchesPerSecond: 10, KeptFor: time.Minute}), kv.Namespace{ID: 7, Geometry: kv.SingleGroup(2, 16, 128)}, time.Unix(1000, 0)}
}

// chain returns n blocks with the prefix shared and then blocks of one sequence.
func hotChain(shared, n int, sequence byte) []kv.BlockID {
	ids := make([]kv.BlockID, n)
	for i := range ids {
		ids[i] = kv.BlockID{1, byte(i + 1)}
		if i >= shared {
			ids[i][2] = sequence
		}
	}
	return ids
}

// second makes the matches of one second and ends it.
func (r *hotRig) second(matches int, ids func(i int) []kv.BlockID) {
	for i := range matches {
		r.add(r.ns, 3, ids(i), r.now.Add(time.Duration(i)*time.Second/time.Duration(matches+1)))
	}
	r.now = r.now.Add(time.Second)
	r.advanceTo()
}

func (r *hotRig) advanceTo() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.advance(r.now)
}

// hot returns the lengths of the hot prefixes.
func (r *hotRig) hot() (lengths []int) {
	for _, p := range r.list(r.now) {
		lengths = append(lengths, len(p.IDs))
	}
	return lengths
}

func (r *hotRig) want(lengths ...int) {
	r.Helper()
	got := r.hot()
	if len(got) != len(lengths) || len(got) == 1 && got[0] != lengths[0] {
		r.Fatalf("hot prefixes of %v blocks; want %v", got, lengths)
	}
}

// TestHotPrefix: the prefix that 10 matches a second share is hot, and a longer one is not. It stays hot for a minute after that,
// and grows when the matches share more.
func TestHotPrefix(t *testing.T) {
	r := newHotRig(t)
	shared := func(n int) func(i int) []kv.BlockID {
		return func(i int) []kv.BlockID { return hotChain(n, 8, byte(i+1)) }
	}
	r.second(9, shared(8))
	r.want()
	r.second(11, shared(5))
	r.want(5)
	r.second(11, shared(3)) // the prefix of five blocks is not found by enough matches
	r.want(5)
	r.second(12, shared(7))
	r.want(7)
	r.now = r.now.Add(59 * time.Second)
	r.want(7)
	r.now = r.now.Add(time.Second)
	r.want()
	r.second(12, shared(3))
	r.want(3)
}

// TestHotPrefixesOnly: matches of flat namespaces and of several layer groups make no prefix hot, nor do other epochs or first
// blocks count together.
func TestHotPrefixesOnly(t *testing.T) {
	r := newHotRig(t)
	r.ns.Index = kv.IndexFlat
	r.second(50, func(int) []kv.BlockID { return hotChain(4, 4, 0) })
	r.ns.Index = 0
	r.ns.Geometry.Groups = append(r.ns.Geometry.Groups, r.ns.Geometry.Groups[0])
	r.second(50, func(int) []kv.BlockID { return hotChain(4, 4, 0) })
	r.ns.Geometry.Groups = r.ns.Geometry.Groups[:1]
	for i := range 18 {
		r.add(r.ns, kv.Epoch(1+i%2), hotChain(4, 4, 0), r.now)
	}
	r.second(50, func(i int) []kv.BlockID { return []kv.BlockID{{2, byte(i)}} })
	r.want()
}

// TestHotPrefixesBounded: a hot prefix is found among many others, the tables keep their sizes, and a prefix with copies is not
// dropped for one without.
func TestHotPrefixesBounded(t *testing.T) {
	r := newHotRig(t)
	random := func(i int) []kv.BlockID { return []kv.BlockID{{3, byte(i), byte(i >> 8)}, {4, byte(i), byte(i >> 8)}} }
	r.second(2000, func(i int) []kv.BlockID {
		if i%10 == 0 {
			return hotChain(2*hotBlocksMax, 2*hotBlocksMax, 0)
		}
		return random(i)
	})
	r.want(hotBlocksMax)
	r.place(r.list(r.now)[0], hotBlocksMax, 2)
	for range 3 {
		r.second(20*hotWatchedMax, func(i int) []kv.BlockID { return random(i % hotWatchedMax) })
		if n := len(r.hot()); n != hotPrefixesMax || len(r.watched) > hotWatchedMax {
			t.Fatalf("%d hot prefixes, %d watched; want %d and at most %d", n, len(r.watched), hotPrefixesMax, hotWatchedMax)
		}
		if _, ok := r.hint(r.ns.ID, 3, hotChain(hotBlocksMax, 4, 0), r.now); !ok {
			t.Fatal("the prefix with copies was dropped")
		}
	}
}

// TestHotHint: a hint has the blocks of a chain that have copies, and ends with the prefix.
func TestHotHint(t *testing.T) {
	r := newHotRig(t)
	hint := func(ids []kv.BlockID) HotHint { h, _ := r.hint(r.ns.ID, 3, ids, r.now); return h }
	r.second(11, func(int) []kv.BlockID { return hotChain(6, 6, 0) })
	if h := hint(hotChain(6, 6, 0)); h != (HotHint{}) {
		t.Errorf("a prefix without copies has the hint %+v", h)
	}
	r.place(r.list(r.now)[0], 4, 3)
	for ids, want := range map[int]int{2: 2, 4: 4, 6: 4, 3: 3} {
		if h := hint(hotChain(ids, 8, 9)); h != (HotHint{want, 3, hotHintFor}) {
			t.Errorf("a chain that shares %d blocks has the hint %+v", ids, h)
		}
	}
	if h, ok := r.hint(r.ns.ID, 4, hotChain(6, 6, 0), r.now); ok {
		t.Errorf("another epoch has the hint %+v", h)
	}
	r.now = r.now.Add(58 * time.Second)
	if h := hint(hotChain(6, 6, 0)); h.TTL != 2*time.Second {
		t.Errorf("2 s before the end the hint is %+v", h)
	}
	r.place(r.list(r.now)[0], 0, 0)
	if h := hint(hotChain(6, 6, 0)); h != (HotHint{}) {
		t.Errorf("without copies the hint is %+v", h)
	}
}
