package traffic

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/copier"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// withState has two layers of full attention and three with recurrent state, whose Layer Blocks are smaller or
// larger. The model computes them in stateOrder.
func withState(bytes int) kv.Geometry {
	return kv.Geometry{BlockTokens: 4, Groups: []kv.Group{
		{Kind: kv.Full, Layers: 2, TokenBytes: 512},
		{Kind: kv.State, Layers: 3, TokenBytes: bytes},
	}}
}

var stateOrder = []int{2, 0, 3, 1, 4}

// newStateEngine starts an engine of three page tables, of 64 pages each, as vLLM allocates such a model: the layers of
// the tables share their memory.
func newStateEngine(t *testing.T, s *shelf, c copier.Copier) *engine {
	t.Helper()
	r, err := tcp.New(t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: token})
	if err != nil {
		t.Fatal(err)
	}
	stride := uint64(max(s.geo.LayerBytes(0), s.geo.LayerBytes(1)))
	d := Device{Stride: stride, Pages: 3 * 64}
	for _, place := range s.order {
		memory, table := []uint64{0, 1, 0, 1, 0}[place], []int{0, 0, 1, 1, 2}[place]
		d.Bases, d.Tables = append(d.Bases, memory*uint64(d.Pages)*stride), append(d.Tables, table)
	}
	return newEngineIn(t, s, newAt(s), d, 4<<20, c, r, r)
}

// newStateRequest makes a request whose last block is full.
func newStateRequest(t *testing.T, pe, de *engine, blocks, hit int) *request {
	r := newRequest(t, pe, de, 1, blocks, hit)
	r.ids = append(r.ids, blockName(1, blocks-1))
	return r
}

func newStateShelf(bytes int) *shelf {
	s := newShelf()
	s.geo, s.order = withState(bytes), stateOrder
	return s
}

// piecesOf returns the pieces of blocks [from, to) of full attention, and the states of the given blocks.
func piecesOf(from, to int, states ...int) []client.Piece {
	var pieces []client.Piece
	for b := from; b < to; b++ {
		pieces = append(pieces, client.Piece{Block: b})
	}
	for _, b := range states {
		pieces = append(pieces, client.Piece{Block: b, Group: 1})
	}
	return pieces
}

// same reports whether two lists have the same pieces.
func same(a, b []client.Piece) bool {
	order := func(a, b client.Piece) int { return (a.Group-b.Group)*1000 + a.Block - b.Block }
	a, b = slices.Clone(a), slices.Clone(b)
	slices.SortFunc(a, order)
	slices.SortFunc(b, order)
	return slices.Equal(a, b)
}

// TestState: of layers with recurrent state the managers read only the state at the end of the cached prefix, for the
// prefill engine, and send and store only the state at the end of the prompt.
func TestState(t *testing.T) {
	testkit.VerifyNone(t)
	for _, bytes := range []int{700, 2048, 5000} {
		for _, staged := range []bool{false, true} {
			for _, c := range []struct{ blocks, hit, x int }{
				{30, 20, 12}, {30, 20, 0}, {30, 20, 20}, {21, 20, 19}, {30, 1, 0}, {30, 0, 0}, {1, 0, 0},
				{20, 20, 12}, {20, 20, 0}, {20, 20, 20}, {1, 1, 0}, {1, 1, 1},
			} {
				t.Run(fmt.Sprintf("%d bytes, staged %v, %d blocks, %d cached, %d read by prefill", bytes, staged, c.blocks, c.hit, c.x), func(t *testing.T) {
					s := newStateShelf(bytes)
					s.put(1, c.hit)
					var apart copier.Copier
					if staged {
						apart = newApart(t)
					}
					pe, de := newStateEngine(t, s, apart), newStateEngine(t, s, nil)
					r := newStateRequest(t, pe, de, c.blocks, c.hit)
					if err := r.run(t.Context(), c.x); err != nil {
						t.Fatal(err)
					}
					for i := range s.read {
						s.read[i].Offset = 0
					}
					read, wrote := piecesOf(0, c.hit), piecesOf(c.hit, c.blocks)
					if c.hit > 0 {
						read = piecesOf(0, c.hit, c.hit-1)
					}
					if c.hit < c.blocks {
						wrote = piecesOf(c.hit, c.blocks, c.blocks-1)
					}
					if !same(s.read, read) {
						t.Errorf("pieces %v were read; want %v", s.read, read)
					}
					if !same(s.wrote, wrote) {
						t.Errorf("pieces %v were written; want %v", s.wrote, wrote)
					}
				})
			}
		}
	}
}

// TestStateChunked: a prompt with recurrent state is computed in chunks.
func TestStateChunked(t *testing.T) {
	testkit.VerifyNone(t)
	s := newStateShelf(700)
	s.put(1, 20)
	r := newStateRequest(t, newStateEngine(t, s, nil), newStateEngine(t, s, nil), 40, 20)
	if err := r.serveChunked(t.Context(), 12, 20, Part{}, []int{24, 31, 40}, func(int) {}); err != nil {
		t.Fatal(err)
	}
	if want := piecesOf(20, 40, 39); !same(s.wrote, want) {
		t.Errorf("pieces %v were written; want %v", s.wrote, want)
	}
}

// TestStateRecompute: if a cached block is missing, the model computes the whole prompt, because the state in front of
// the block was not read.
func TestStateRecompute(t *testing.T) {
	testkit.VerifyNone(t)
	for _, lost := range []int{19, 5} {
		s := newStateShelf(700)
		s.put(1, 20)
		s.drop(1, lost)
		recomputeAll(t, newStateRequest(t, newStateEngine(t, s, nil), newStateEngine(t, s, nil), 30, 20), lost)
		if want := piecesOf(0, 30, 29); !same(s.wrote, want) {
			t.Errorf("pieces %v were written; want %v", s.wrote, want)
		}
	}
}

// TestStateAppend: a decoded block is stored with its state, and without state if it has no page for it.
func TestStateAppend(t *testing.T) {
	testkit.VerifyNone(t)
	s := newStateShelf(5000)
	s.put(1, 3)
	e := newStateEngine(t, s, nil)
	for b := 3; b < 6; b++ {
		pages := []uint32{uint32(b), uint32(64 + b), uint32(128 + b)}
		if b == 4 {
			pages = []uint32{4, NoPage, NoPage}
		}
		for l := range e.geo.layers {
			if page := e.Manager.page(pages, l, 0); page != NoPage {
				fill(e.page(l, page), blockName(1, b), e.geo.places[l])
			}
		}
		ids := newStateRequest(t, e, e, b+1, 0).ids
		if err := e.Append(t.Context(), "r", ids, 0, pages...); err != nil {
			t.Fatal(err)
		}
		if err := e.Settle(t.Context(), ids[b]); err != nil {
			t.Fatal(err)
		}
	}
	if want := piecesOf(3, 6, 3, 5); !same(s.wrote, want) {
		t.Errorf("pieces %v were written; want %v", s.wrote, want)
	}
	s.drop(1, 4)
	checkStored(t, s, 1, 4)
}

// TestBadState: pages that do not fit the page tables, and blocks without a page that a layer needs, are refused.
func TestBadState(t *testing.T) {
	testkit.VerifyNone(t)
	s := newStateShelf(700)
	e := newStateEngine(t, s, nil)
	refused := func(what, text string, err error) {
		t.Helper()
		if !errors.Is(err, ErrJob) || !strings.Contains(fmt.Sprint(err), text) {
			t.Errorf("%s: %v; want %q", what, err, text)
		}
	}
	o := e.opts
	o.Device.Tables = []int{0, 1}
	refused("two tables for five layers", "page tables [0 1]", o.Validate())
	o.Device.Tables = []int{0, 0, 0, 0, 0}
	refused("one table for layers that share memory", "overlap", o.Validate())
	r := newStateRequest(t, e, e, 3, 1)
	_, err := e.Prefill(t.Context(), PrefillJob{Request: "r", IDs: r.ids, Blocks: 3, Hit: 1, Pages: []uint32{1, 65}})
	refused("two pages in three tables", "2 device pages", err)
	_, err = e.Prefill(t.Context(), PrefillJob{Request: "r", IDs: r.ids, Blocks: 3, Hit: 1, Pages: []uint32{64 * 3, NoPage, NoPage}})
	refused("a page that does not exist", "page 192", err)
	job := DecodeJob{Request: "r", IDs: r.ids, Blocks: 3, Hit: 1, Pages: slices.Clone(r.pages), Peer: e.peer}
	job.Pages[8] = NoPage
	_, err = e.Decode(t.Context(), job)
	refused("a prompt without a page for its last state", "block 2 of 3 has no device page in layer", err)
	job.Pages = slices.Clone(r.pages)
	job.Pages[3] = NoPage
	_, err = e.Decode(t.Context(), job)
	refused("a block without a page in a layer of full attention", "block 1 of 3 has no device page in layer", err)
	refused("a block with a page for some states", "without a device page", e.Append(t.Context(), "r", r.ids, 0, 1, 65, NoPage))
	refused("a block without a page in a layer of full attention", "without a device page", e.Append(t.Context(), "r", r.ids, 0, NoPage, 65, 129))
	refused("a block with one page", "1 device pages", e.Append(t.Context(), "r", r.ids, 0, 1))

	p, err := e.Prefill(t.Context(), PrefillJob{Request: "r", IDs: r.ids, Blocks: 3, Pages: []uint32{1, 65, 129, 2, NoPage, NoPage, 3, NoPage, 130}})
	if err != nil {
		t.Fatal(err)
	}
	p.Computed(slices.Index(stateOrder, 2))
	refused("a computed prompt without a page for its last state", "has no device page for its state", p.Finish(t.Context()))
}
