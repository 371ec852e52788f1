package traffic

import (
	"fmt"
	"testing"

	"github.com/penstock-kv/penstock/kv"
)

// BenchmarkRequest: prefill and decode of a prompt of 64 blocks, all but the last of them cached,
// half read by each side: 640 KiB of KV. The model takes no time, and nothing is stored.
func BenchmarkRequest(b *testing.B) {
	const blocks, hit = 64, 63
	s := newShelf()
	s.put(1, hit)
	pe, de := newEngine(b, s, 2, blocks, 4<<20), newEngine(b, s, 5, blocks, 4<<20)
	r := newRequest(b, pe, de, 1, blocks, hit)
	for i := range r.pages {
		r.pages[i] = uint32(i)
	}
	b.SetBytes(blocks * geo.PieceBytes(0))
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		r.name = fmt.Sprint(i)
		if err := r.bare(hit / 2); err != nil {
			b.Fatal(err)
		}
	}
}

// bare serves the request without a model, and compares only the sums.
func (r *request) bare(x int) error {
	ctx := r.t.Context()
	d, err := r.de.Decode(ctx, DecodeJob{
		Request: r.name, IDs: r.ids, Epoch: kv.Epoch(0), Blocks: r.blocks, Hit: r.hit, Parts: parts(x, r.hit), Pages: r.pages,
		Peer: r.pe.peer, NoPersist: true,
	})
	if err != nil {
		return err
	}
	p, err := r.pe.Prefill(ctx, PrefillJob{Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Parts: parts(0, x), Pages: r.pages})
	if err != nil {
		d.Cancel()
		return err
	}
	for l := range r.pe.opts.Namespace.Geometry.Groups[0].Layers {
		if err := p.Layer(ctx, l); err != nil {
			d.Cancel()
			return err
		}
		p.Computed(l)
	}
	if err := p.Finish(ctx); err != nil {
		d.Cancel()
		return err
	}
	return d.Finish(ctx)
}
