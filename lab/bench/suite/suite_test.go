package suite

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/bench"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// testWorld is a world of short turns, in memory where devices are concerned.
func testWorld(t *testing.T) World {
	return World{
		Dir: t.TempDir(), Rounds: 1, Turn: time.Millisecond, Seed: 1, Progress: func(string) {},
		OpenDevice: func(string, string, []byte) (blockio.Device, error) { return memio.New(memio.Options{}), nil },
	}
}

// TestDrive: a turn that is over before its callers run has one call of each, so that no
// rate is 0 because the machine was busy.
func TestDrive(t *testing.T) {
	var calls [3]atomic.Int64
	sample, err := drive(t.Context(), 0, len(calls), 1, nil, func(i int) (int64, error) {
		calls[i].Add(1)
		return 1 << 20, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range calls {
		if n := calls[i].Load(); n != 1 {
			t.Errorf("caller %d was called %d times, want once", i, n)
		}
	}
	if sample[bench.Rate] <= 0 {
		t.Errorf("sample %v", sample)
	}
}

// TestFill: the slots of a volume are as long as the peers' requests and lie
// where offset says, and reads of them verify.
func TestFill(t *testing.T) {
	memory, err := newArena(8 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	w := testWorld(t)
	for _, sh := range storeShapes() {
		v, err := fill(t.Context(), w, t.TempDir(), "memory", sh, 8*sh.slotBytes, memory)
		if err != nil {
			t.Fatalf("%v: %v", sh, err)
		}
		for i, ref := range v.refs {
			if int(ref.Extent.Slot()) != i || ref.Extent.Segment() != 0 {
				t.Errorf("%v: block %d is in %v, and the peers look in slot %d of segment 0", sh, i, ref, i)
			}
		}
		if sh.depth*int(sh.slotBytes) <= 8<<20 {
			s := &storeSuite{suiteRun: newRun(w, "store"), memory: memory}
			if _, err := s.storeReads(v)(t.Context()); err != nil {
				t.Errorf("%v: reading: %v", sh, err)
			}
			if _, err := s.storeWrites(newRecycler(v), sh.callers(), max(1, sh.depth/sh.callers()/4), 4)(t.Context()); err != nil {
				t.Errorf("%v: writing: %v", sh, err)
			}
		}
		if err := v.close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestIndex runs the index suite on a small index.
func TestIndex(t *testing.T) {
	testkit.Long(t, "fills an index")
	r, err := Index(t.Context(), testWorld(t), IndexOptions{Blocks: 1 << 15})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, res := range r.Results {
		names = append(names, res.Name)
		if len(res.NotRun) > 0 || len(res.Measures) == 0 {
			t.Errorf("%s: %+v", res.Name, res)
		}
	}
	if len(r.NotRun) > 0 || len(names) != 4 {
		t.Errorf("ran %v; not run: %v", names, r.NotRun)
	}
}

func TestPolicy(t *testing.T) {
	testkit.Long(t, "replays a trace with each policy")
	r, err := Policy(t.Context(), testWorld(t), PolicyOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Text) != 1 || !strings.Contains(r.Text[0], "s3fifo") || len(r.NotRun) != 1 {
		t.Errorf("report: %+v", r)
	}
}

// TestOnly: what was not chosen does not run.
func TestOnly(t *testing.T) {
	w := testWorld(t)
	w.Only, w.Contenders = regexp.MustCompile("^b"), regexp.MustCompile("x")
	s := newRun(w, "s")
	var ran []string
	contender := func(work, name string) bench.Contender {
		return bench.Contender{Name: name, Turn: func(context.Context) (bench.Sample, error) {
			ran = append(ran, work+name)
			return bench.Sample{bench.Rate: 1}, nil
		}}
	}
	for _, work := range []string{"a", "b"} {
		if err := s.compare(t.Context(), bench.Comparison{Name: work, Contenders: []bench.Contender{contender(work, "x"), contender(work, "y")}}); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(slices.Compact(ran), []string{"bx"}) {
		t.Errorf("ran %v", ran)
	}
}

// TestPlace: callers that run at a time never share a part of the memory, and
// all of it is used.
func TestPlace(t *testing.T) {
	for _, callers := range []int{1, 4, 16} {
		const block = 4 * mib
		used := make(map[int64]bool)
		for turn := range 64 {
			at := make(map[int64]bool)
			for c := range callers {
				p := place(c, turn, callers, block)
				if at[p] || p < 0 || p+block > landBytes {
					t.Fatalf("%d callers, turn %d: place %d is shared or outside", callers, turn, p)
				}
				at[p], used[p] = true, true
			}
		}
		if len(used) != landBytes/block {
			t.Errorf("%d callers use %d of %d places", callers, len(used), landBytes/block)
		}
	}
}

func TestBlockID(t *testing.T) {
	if blockID(0) == (kv.BlockID{}) || blockID(0) == blockID(1) {
		t.Error("block ids are zero or alike")
	}
}

func TestMachine(t *testing.T) {
	if m := Machine(t.TempDir()); !strings.Contains(m, "Linux") || strings.Contains(m, "\n") {
		t.Errorf("machine %q", m)
	}
}
