package traffic

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// hybrid has five layers: two of full attention, two with a window of 3 blocks and one with a window of 6 blocks. The
// model computes them in hybridOrder.
var (
	hybrid = kv.Geometry{BlockTokens: 4, Groups: []kv.Group{
		{Kind: kv.Full, Layers: 2, TokenBytes: 512},
		{Kind: kv.Window, Layers: 2, TokenBytes: 512, WindowTokens: 11},
		{Kind: kv.Window, Layers: 1, TokenBytes: 512, WindowTokens: 24},
	}}
	hybridOrder = []int{2, 0, 4, 3, 1}
)

func newHybridShelf(order []int) *shelf {
	s := newShelf()
	s.geo, s.order = hybrid, order
	return s
}

// layersSent counts the Layer Blocks that an engine sends.
type layersSent struct {
	rdma.Engine
	mu   sync.Mutex
	sent int
}

func (e *layersSent) WritePaged(ctx context.Context, w rdma.PagedWrite) error {
	if w.PageLen == uint64(hybrid.LayerBytes(0)) {
		e.mu.Lock()
		e.sent += len(w.SrcPages.Indices)
		e.mu.Unlock()
	}
	return e.Engine.WritePaged(ctx, w)
}

// newHybridEngine starts an engine with 64 pages of each layer. sent counts its Layer Blocks.
func newHybridEngine(t *testing.T, s *shelf, c copier.Copier) (e *engine, sent *layersSent) {
	t.Helper()
	r, err := tcp.New(t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: token})
	if err != nil {
		t.Fatal(err)
	}
	sent = &layersSent{Engine: r}
	return newEngineIn(t, s, newAt(s), layerMajor(5, 64, uint64(s.geo.LayerBytes(0))), 4<<20, c, r, sent), sent
}

// inWindows returns how many Layer Blocks of the blocks [from, to) a prefix of hit blocks needs.
func inWindows(from, to, hit int) int {
	return int(hybrid.PartBytes(from, to, hit) / hybrid.LayerBytes(0))
}

// TestWindows: of layers with a sliding window, the managers read and send only the blocks of the cached prefix that
// are within the window at its end. The other pages do not change. All layers of the new blocks are sent and stored.
func TestWindows(t *testing.T) {
	testkit.VerifyNone(t)
	for _, order := range [][]int{nil, hybridOrder} {
		for _, staged := range []bool{false, true} {
			for _, c := range []struct{ blocks, hit, x int }{
				{30, 20, 12}, {30, 20, 0}, {30, 20, 20}, {30, 20, 18}, {21, 20, 15}, {30, 2, 1}, {9, 4, 2}, {30, 0, 0}, {1, 0, 0},
				{20, 20, 12}, {20, 20, 0}, {20, 20, 20}, {20, 20, 18},
			} {
				t.Run(fmt.Sprintf("order %v, staged %v, %d blocks, %d cached, %d read by prefill", order, staged, c.blocks, c.hit, c.x), func(t *testing.T) {
					s := newHybridShelf(order)
					s.put(1, c.hit)
					var apart copier.Copier
					if staged {
						apart = newApart(t)
					}
					pe, fromPE := newHybridEngine(t, s, apart)
					de, fromDE := newHybridEngine(t, s, nil)
					r := newRequest(t, pe, de, 1, c.blocks, c.hit)
					if c.hit == c.blocks {
						r.ids = append(r.ids, blockName(1, c.hit-1))
					}
					if err := r.run(t.Context(), c.x); err != nil {
						t.Fatal(err)
					}
					var read []client.Piece
					for g := range hybrid.Groups {
						for b := hybrid.FirstNeeded(g, c.hit); b < c.hit; b++ {
							read = append(read, client.Piece{Block: b, Group: g})
						}
					}
					for i := range s.read {
						s.read[i].Offset = 0
					}
					byGroup := func(a, b client.Piece) int { return (a.Group-b.Group)*1000 + a.Block - b.Block }
					slices.SortFunc(s.read, byGroup)
					if !slices.Equal(s.read, read) {
						t.Errorf("pieces %v were read; want %v", s.read, read)
					}
					if want := inWindows(0, c.x, c.hit) + 5*(c.blocks-c.hit); fromPE.sent != want {
						t.Errorf("the prefill side sent %d Layer Blocks; want %d", fromPE.sent, want)
					}
					if want := inWindows(c.x, c.hit, c.hit); fromDE.sent != want {
						t.Errorf("the decode side sent %d Layer Blocks; want %d", fromDE.sent, want)
					}
					checkStored(t, s, 1, max(c.hit, c.blocks-1))
				})
			}
		}
	}
}

// checkStored compares the first n blocks of a sequence in storage, in all layers.
func checkStored(t *testing.T, s *shelf, sequence, n int) {
	t.Helper()
	for b := range n {
		full := s.blocks[blockName(sequence, b)]
		if full == nil {
			t.Errorf("block %d is not stored", b)
			continue
		}
		for l, layer := range layersOf(s.geo, full) {
			want := make([]byte, len(layer))
			if fill(want, blockName(sequence, b), l); !slices.Equal(layer, want) {
				t.Errorf("block %d, layer %d of the Full Block: other bytes in storage", b, l)
			}
		}
	}
}

// TestWindowsChunked: a prompt with windows is computed in chunks.
func TestWindowsChunked(t *testing.T) {
	testkit.VerifyNone(t)
	s := newHybridShelf(hybridOrder)
	s.put(1, 20)
	pe, fromPE := newHybridEngine(t, s, nil)
	de, _ := newHybridEngine(t, s, nil)
	r := newRequest(t, pe, de, 1, 40, 20)
	if err := r.serveChunked(t.Context(), 12, 20, Part{}, []int{24, 31, 40}, func(int) {}); err != nil {
		t.Fatal(err)
	}
	if want := inWindows(0, 12, 20) + 5*20; fromPE.sent != want {
		t.Errorf("the prefill side sent %d Layer Blocks; want %d", fromPE.sent, want)
	}
	checkStored(t, s, 1, 39)
}

// recomputeAll serves a request of 30 blocks, 20 of them cached, of which storage has lost one. The prefill side reads the
// first 12 of them. The model computes all blocks.
func recomputeAll(t *testing.T, r *request, lost int) {
	t.Helper()
	p, d, pStop, dStop := r.both(t.Context(), 12)
	stops := pStop
	if lost >= 12 {
		stops = dStop
	}
	stop := <-stops
	if stop.Upto != lost || !stop.Gone {
		t.Fatalf("%+v; want block %d gone", stop, lost)
	}
	if lost < 12 { // the decode side must not read a block that the model computes
		if err := p.await(t.Context(), func() bool { return !slices.Contains(p.from[12:], unknown) }); err != nil {
			t.Fatal(err)
		}
	}
	p.Recompute(Part{lost, 20})
	if err := p.Loaded(t.Context()); err != nil {
		t.Fatal(err)
	}
	if miss := p.Miss(); len(miss) != 30 || miss[0] != 0 {
		t.Fatalf("the model computes %v; want all 30 blocks", miss)
	}
	r.again = true
	if err := errors.Join(r.prefill(t.Context(), p), d.Finish(t.Context()), r.check()); err != nil {
		t.Fatal(err)
	}
}

// TestWindowsRecompute: if the model computes one cached block again, it computes all of them, because the blocks that
// the windows in front of that block need were not read.
func TestWindowsRecompute(t *testing.T) {
	testkit.VerifyNone(t)
	for _, lost := range []int{19, 5} {
		s := newHybridShelf(hybridOrder)
		s.put(1, 20)
		pe, fromPE := newHybridEngine(t, s, nil)
		de, _ := newHybridEngine(t, s, nil)
		s.drop(1, lost)
		recomputeAll(t, newRequest(t, pe, de, 1, 30, 20), lost)
		if want := 5 * 30; fromPE.sent != want {
			t.Errorf("the prefill side sent %d Layer Blocks; want %d", fromPE.sent, want)
		}
		checkStored(t, s, 1, 29)
	}
}

// TestWindowsAppend: a decoded block is stored with all its layer groups.
func TestWindowsAppend(t *testing.T) {
	testkit.VerifyNone(t)
	s := newHybridShelf(hybridOrder)
	s.put(1, 3)
	e, _ := newHybridEngine(t, s, nil)
	for b := 3; b < 6; b++ {
		for l := range e.geo.layers {
			fill(e.page(l, uint32(b)), blockName(1, b), e.geo.places[l])
		}
		ids := newRequest(t, e, e, 1, b+2, 0).ids
		if err := e.Append(t.Context(), "r", ids, 0, uint32(b)); err != nil {
			t.Fatal(err)
		}
		if err := e.Settle(t.Context(), ids[b]); err != nil {
			t.Fatal(err)
		}
	}
	checkStored(t, s, 1, 6)
}

// TestBadWindows: layer groups and orders that a manager does not support are refused by name, and so are engines whose
// orders differ.
func TestBadWindows(t *testing.T) {
	testkit.VerifyNone(t)
	s := newHybridShelf(hybridOrder)
	e, _ := newHybridEngine(t, s, nil)
	for text, change := range map[string]func(*Options){
		"layer group 0 is window": func(o *Options) { o.Namespace.Geometry.Groups = o.Namespace.Geometry.Groups[1:] },
		"pages every 2048 bytes":  func(o *Options) { o.Namespace.Geometry.Groups[2].TokenBytes = 1024 },
		"lists 4 layers":          func(o *Options) { o.Order = []int{0, 1, 2, 3} },
		"[0 1 2 3 3]":             func(o *Options) { o.Order = []int{0, 1, 2, 3, 3} },
	} {
		o := e.opts
		o.Namespace.Geometry.Groups = slices.Clone(hybrid.Groups)
		change(&o)
		if err := o.Validate(); !errors.Is(err, ErrJob) || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", text, err)
		}
	}
	s.order = nil
	other, _ := newHybridEngine(t, s, nil)
	r := newRequest(t, e, other, 2, 5, 0)
	if err := r.run(t.Context(), 0); !errors.Is(err, ErrJob) || !strings.Contains(err.Error(), "geometry differs") {
		t.Errorf("engines with other orders: %v", err)
	}
}
