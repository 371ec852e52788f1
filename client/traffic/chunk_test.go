package traffic

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
)

// chunked computes the missed blocks of a prompt in chunks that end at the given blocks, each
// chunk layer by layer. after is called when a chunk is computed.
func (r *request) chunked(ctx context.Context, p *Prefill, ends []int, after func(end int)) error {
	missed := map[int]bool{}
	done := 0
	for _, end := range ends {
		if from := max(done, r.hit); end > from {
			p.AddPages(r.pages[from*r.pe.tables : end*r.pe.tables]...)
		}
		for l := range r.pe.geo.layers {
			if err := p.Layer(ctx, l); err != nil {
				_ = p.Finish(ctx) // it returns the same error
				return err
			}
			if len(missed) == 0 {
				for _, b := range p.Miss() {
					missed[b] = true
				}
			}
			for b := done; b < end; b++ {
				if page := r.pe.Manager.page(r.pages, l, b); missed[b] && page != NoPage {
					fill(r.pe.page(l, page), blockName(r.sequence, b), r.pe.geo.places[l])
				}
			}
			p.ComputedTo(l, end)
		}
		done = end
		after(end)
	}
	return p.Finish(ctx)
}

// serveChunked serves a request whose prompt is computed in chunks. The PE reads the first x
// blocks of the hit, and recompute of them are computed. The PE has pages for the first known blocks of the hit
// at the start, and for the others when the hit is loaded.
func (r *request) serveChunked(ctx context.Context, x, known int, recompute Part, ends []int, after func(end int)) error {
	d, err := r.de.Decode(ctx, DecodeJob{Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Parts: parts(x, r.hit), Pages: r.pages, Resident: r.resident, Peer: r.pe.peer})
	if err != nil {
		return err
	}
	p, err := r.pe.Prefill(ctx, PrefillJob{Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Parts: parts(recompute.To, x), Pages: r.pages[:known*r.pe.tables]})
	if err != nil {
		d.Cancel()
		return err
	}
	if recompute.Len() > 0 {
		p.Recompute(recompute)
	}
	if known < r.hit {
		if err := p.Loaded(ctx); err != nil {
			return errors.Join(p.Finish(ctx), d.Finish(ctx))
		}
		p.AddPages(r.pages[known*r.pe.tables : r.hit*r.pe.tables]...)
	}
	err = r.chunked(ctx, p, ends, after)
	return errors.Join(err, d.Finish(ctx), r.check())
}

// immediates is a compute NIC that fails the test when a write of a layer with an immediate begins
// while other writes of that layer are in progress, because the peer would count the immediate
// before they arrive.
type immediates struct {
	rdma.Engine
	t       *testing.T
	pageLen uint64
	mu      sync.Mutex
	flying  map[uint64]int // writes without an immediate, by the offset of their layer
}

func (e *immediates) WritePaged(ctx context.Context, w rdma.PagedWrite) error {
	if w.PageLen != e.pageLen {
		return e.Engine.WritePaged(ctx, w)
	}
	layer, done := w.DstPages.Offset, w.Done
	e.mu.Lock()
	if w.Imm == (rdma.Imm{}) {
		e.flying[layer]++
		w.Done = func(err error) {
			e.mu.Lock()
			e.flying[layer]--
			e.mu.Unlock()
			done(err)
		}
	} else if n := e.flying[layer]; n > 0 {
		e.t.Errorf("the last write of the layer at %d begins while %d others are under way", layer, n)
	}
	e.mu.Unlock()
	return e.Engine.WritePaged(ctx, w)
}

// TestChunks: a prompt that is computed in random chunks arrives whole, with any split of the
// hit, also when all of it is cached, when hit blocks are computed again, and when the pages of
// some hit blocks are known only after the hit has been read. The device memory of half of the
// prefill engines is staged.
func TestChunks(t *testing.T) {
	testkit.VerifyNone(t)
	for seed := range uint64(testkit.Rounds(60, 20)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 11))
				s := newShelf()
				blocks := 1 + rng.IntN(30)
				hit := rng.IntN(blocks + 1)
				x := rng.IntN(hit + 1)
				s.put(1, hit)
				f := newSimFabric(seed)
				layers := geo.Groups[0].Layers
				// Transfers over such NICs arrive in any order.
				r0, r1 := newSimNIC(t, f, 0, simrdma.NICOptions{}.LikeSRD()), newSimNIC(t, f, 1, simrdma.NICOptions{}.LikeSRD())
				order := &immediates{Engine: r0, t: t, pageLen: uint64(geo.LayerBytes(0)), flying: map[uint64]int{}}
				var c copier.Copier
				if rng.IntN(2) == 0 {
					c = newApart(t)
				}
				pe := newEngineOn(t, s, newAt(s), layers, 40, 4<<20, c, r0, order)
				de := newEngineOn(t, s, newAt(s), layers, 40, 4<<20, nil, r1, r1)
				var ends []int
				for end := 0; end < blocks; {
					end = min(blocks, end+rng.IntN(8))
					ends = append(ends, end)
				}
				r := newRequest(t, pe, de, 1, blocks, hit)
				if hit == blocks {
					r.ids = append(r.ids, blockName(1, blocks-1))
				}
				if err := r.serveChunked(t.Context(), x, rng.IntN(hit+1), Part{0, rng.IntN(x + 1)}, ends, func(int) {
					if rng.IntN(3) > 0 {
						synctest.Wait() // the writes of this chunk are in progress when the next one begins
					}
				}); err != nil {
					t.Errorf("%d blocks, %d cached, %d read by the prefill side, chunks up to %v: %v", blocks, hit, x, ends, err)
				}
			})
		})
	}
}

// pagesSent is a compute NIC that counts the pages of layers that have been written.
type pagesSent struct {
	rdma.Engine
	pageLen uint64
	sent    chan int
}

func (e *pagesSent) WritePaged(ctx context.Context, w rdma.PagedWrite) error {
	n, done := len(w.SrcPages.Indices), w.Done
	w.Done = func(err error) {
		done(err)
		if err == nil && w.PageLen == e.pageLen {
			e.sent <- n
		}
	}
	return e.Engine.WritePaged(ctx, w)
}

// TestChunkLeaves: the blocks of a chunk have been written to the decode side before the next
// chunk begins.
func TestChunkLeaves(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	layers := geo.Groups[0].Layers
	sent := &pagesSent{pageLen: uint64(geo.LayerBytes(0)), sent: make(chan int, 100)}
	pe := newEngineOver(t, s, layers, 40, 4<<20, nil, func(r rdma.Engine) rdma.Engine {
		sent.Engine = r
		return sent
	})
	de := newEngine(t, s, layers, 40, 4<<20)
	r := newRequest(t, pe, de, 1, 10, 0)
	total := 0
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	err := r.serveChunked(ctx, 0, 0, Part{}, []int{4, 7, 10}, func(end int) {
		for total < end*layers {
			select {
			case n := <-sent.sent:
				total += n
			case <-ctx.Done():
				t.Fatalf("%d pages were written when %d blocks of %d layers are computed", total, end, layers)
			}
		}
	})
	if err != nil || total != 10*layers {
		t.Errorf("%d pages: %v", total, err)
	}
}

// reached is a mark of no stream.
type reached struct{}

func (reached) Close() error { return nil }

// TestBadChunks: a chunk without pages, or beyond the prompt, and chunks on an engine whose device
// memory does not hold all layers, fail the job.
func TestBadChunks(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	layers := geo.Groups[0].Layers
	for text, c := range map[string]struct {
		layers int
		do     func(p *Prefill)
	}{
		"the job has device pages of 2": {layers, func(p *Prefill) { p.ComputedTo(0, 3) }},
		"up to block 6 of 5":            {layers, func(p *Prefill) { p.ComputedTo(0, 6) }},
		"layer -1":                      {layers, func(p *Prefill) { p.ComputedTo(-1, 1) }},
		"6 device pages for 5 blocks":   {layers, func(p *Prefill) { p.AddPages(2, 3, 4, 5) }},
		"page 40":                       {layers, func(p *Prefill) { p.AddPages(40) }},
		"holds 1 of":                    {1, func(p *Prefill) { p.ComputedTo(0, 1) }},
		"marks need staged":             {layers, func(p *Prefill) { p.ComputedAfter(0, 1, reached{}) }},
	} {
		e := newEngine(t, s, c.layers, 40, 4<<20)
		p, err := e.Prefill(t.Context(), PrefillJob{Request: "r", Blocks: 5, Pages: []uint32{0, 1}})
		if err != nil {
			t.Fatal(err)
		}
		c.do(p)
		if err := p.Finish(t.Context()); !errors.Is(err, ErrJob) || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// TestLateRecompute: a job that is loaded and lacks pages of its hit takes Recompute, and its chunks bring the pages
// of the blocks that are computed again. Once the blocks before them have their pages, Recompute fails the job.
func TestLateRecompute(t *testing.T) {
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	loaded := func(t *testing.T, first int) (*request, *Prefill, *Decode) {
		s := newShelf()
		s.put(1, 8)
		layers := geo.Groups[0].Layers
		pe, de := newEngine(t, s, layers, 64, 1<<20), newEngine(t, s, layers, 64, 1<<20)
		r := newRequest(t, pe, de, 1, 10, 8)
		d, err := r.de.Decode(ctx, DecodeJob{Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Parts: parts(4, 8), Pages: r.pages, Peer: pe.peer})
		if err != nil {
			t.Fatal(err)
		}
		p, err := r.pe.Prefill(ctx, PrefillJob{Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Parts: parts(0, 4)})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Loaded(ctx); err != nil {
			t.Fatal(err)
		}
		p.Recompute(Part{first, r.hit})
		return r, p, d
	}
	for first := range 8 {
		t.Run(fmt.Sprint(first), func(t *testing.T) {
			r, p, d := loaded(t, first)
			have := 0
			for end := first + 1; end <= r.blocks; end++ { // one computed block a chunk
				p.AddPages(r.pages[have:end]...)
				have = end
				for l := range r.pe.geo.layers {
					if err := p.Layer(ctx, l); err != nil {
						t.Fatal(err)
					}
					fill(r.pe.page(l, r.pages[end-1]), blockName(r.sequence, end-1), l)
					p.ComputedTo(l, end)
				}
			}
			if err := errors.Join(p.Finish(ctx), d.Finish(ctx), r.check()); err != nil {
				t.Fatal(err)
			}
		})
	}
	t.Run("used", func(t *testing.T) {
		r, p, d := loaded(t, 5)
		p.AddPages(r.pages[:5]...)
		p.Recompute(Part{4, 5})
		if err := p.Finish(ctx); !errors.Is(err, ErrRecompute) {
			t.Errorf("a block whose page is known: %v", err)
		}
		d.Cancel()
	})
}
