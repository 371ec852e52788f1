package traffic

import (
	"errors"
	"fmt"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// residentName names the bytes that a resident block has on the decode device. They differ from the
// block's bytes in storage, so that the tests find every write to its pages.
func residentName(block int) kv.BlockID { return blockName(99, block) }

// fillResident writes the resident blocks of a request to the decode device.
func (r *request) fillResident() {
	for b := range min(r.resident, r.hit) {
		for l := range r.de.geo.layers {
			fill(r.de.page(l, r.pages[b]), residentName(b), l)
		}
	}
}

// sentByPrefill returns the number of Layer Blocks that the prefill side sends after it has read the
// first x cached blocks.
func (r *request) sentByPrefill(x int) int {
	n := 0
	for l := range r.pe.geo.layers {
		for b := range r.blocks {
			if (r.again || b < x || b >= r.hit) && b >= max(r.outside(l), min(r.resident, r.hit)) {
				n++
			}
		}
	}
	return n
}

// TestResident: the prefill side sends no cached block that the decode side has in device memory, and
// the decode side does not write to the pages of these blocks. The prefill side gets the whole prefix,
// and the new blocks are stored.
func TestResident(t *testing.T) {
	testkit.VerifyNone(t)
	for _, staged := range []bool{false, true} {
		for _, c := range []struct{ blocks, hit, x, resident int }{
			{30, 20, 12, 8}, {30, 20, 12, 12}, {30, 20, 12, 15}, {30, 20, 12, 19}, {30, 20, 20, 20}, {30, 20, 0, 20}, {30, 20, 12, 30}, {21, 20, 20, 20}, {30, 0, 0, 5},
		} {
			t.Run(fmt.Sprintf("staged %v, %+v", staged, c), func(t *testing.T) {
				s := newHybridShelf(hybridOrder)
				s.put(1, c.hit)
				var apart copier.Copier
				if staged {
					apart = newApart(t)
				}
				pe, fromPE := newHybridEngine(t, s, apart)
				de, fromDE := newHybridEngine(t, s, nil)
				r := newRequest(t, pe, de, 1, c.blocks, c.hit)
				r.resident = c.resident
				r.fillResident()
				if err := r.run(t.Context(), c.x); err != nil {
					t.Fatal(err)
				}
				if want := r.sentByPrefill(c.x); fromPE.sent != want {
					t.Errorf("the prefill side sent %d Layer Blocks; want %d", fromPE.sent, want)
				}
				if want := inWindows(c.x, c.hit, c.hit); fromDE.sent != want {
					t.Errorf("the decode side sent %d Layer Blocks; want %d", fromDE.sent, want)
				}
				checkStored(t, s, 1, c.blocks-1)
			})
		}
	}
}

// TestResidentChunked: resident blocks of a prompt that is computed in chunks.
func TestResidentChunked(t *testing.T) {
	testkit.VerifyNone(t)
	s := newHybridShelf(hybridOrder)
	s.put(1, 20)
	pe, fromPE := newHybridEngine(t, s, nil)
	de, _ := newHybridEngine(t, s, nil)
	r := newRequest(t, pe, de, 1, 40, 20)
	r.resident = 16
	r.fillResident()
	if err := r.serveChunked(t.Context(), 18, 20, Part{}, []int{24, 31, 40}, func(int) {}); err != nil {
		t.Fatal(err)
	}
	if want := r.sentByPrefill(18); fromPE.sent != want {
		t.Errorf("the prefill side sent %d Layer Blocks; want %d", fromPE.sent, want)
	}
	checkStored(t, s, 1, 39)
}

// TestResidentRecompute: if the model computes cached blocks again, they are sent, because the decode side
// stores them. The pages of resident blocks do not change.
func TestResidentRecompute(t *testing.T) {
	testkit.VerifyNone(t)
	for _, lost := range []int{19, 15} {
		for _, windows := range []bool{false, true} {
			s := newShelf()
			if windows {
				s = newHybridShelf(hybridOrder)
			}
			layers := 0
			for _, g := range s.geo.Groups {
				layers += g.Layers
			}
			s.put(1, 20)
			s.drop(1, lost)
			pe, de := newEngine(t, s, layers, 64, 4<<20), newEngine(t, s, layers, 64, 4<<20)
			r := newRequest(t, pe, de, 1, 30, 20)
			r.resident = 17
			r.fillResident()
			p, d, _, stops := r.both(t.Context(), 12)
			if stop := <-stops; stop.Upto != lost || !stop.Gone {
				t.Fatalf("%+v; want block %d gone", stop, lost)
			}
			p.Recompute(Part{lost, 20})
			if err := p.Loaded(t.Context()); err != nil {
				t.Fatal(err)
			}
			r.again = true
			if err := errors.Join(r.prefill(t.Context(), p), d.Finish(t.Context()), r.check()); err != nil {
				t.Fatal(err)
			}
			checkStored(t, s, 1, 29)
		}
	}
}

// TestResidentWholePrompt: if the whole prompt is cached, all of it is sent: the last writes of a layer
// have its immediates. A number of resident blocks out of range is refused.
func TestResidentWholePrompt(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	s.put(1, 4)
	pe, de := newEngine(t, s, geo.Groups[0].Layers, 16, 1<<20), newEngine(t, s, geo.Groups[0].Layers, 16, 1<<20)
	r := newRequest(t, pe, de, 1, 4, 4)
	r.ids = append(r.ids, blockName(1, 3))
	job := DecodeJob{Request: r.name, IDs: r.ids, Blocks: 4, Hit: 4, Parts: parts(2, 4), Pages: r.pages, Resident: 4, Peer: pe.peer}
	for _, resident := range []int{-1, 5} {
		bad := job
		bad.Resident = resident
		if _, err := de.Decode(t.Context(), bad); !errors.Is(err, ErrJob) {
			t.Errorf("%d resident blocks of 4: %v", resident, err)
		}
	}
	d, err := de.Decode(t.Context(), job)
	if err != nil {
		t.Fatal(err)
	}
	p, err := pe.Prefill(t.Context(), PrefillJob{Request: r.name, IDs: r.ids, Blocks: 4, Hit: 4, Parts: parts(0, 2), Pages: r.pages})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.prefill(t.Context(), p), d.Finish(t.Context()), r.check()); err != nil {
		t.Fatal(err)
	}
}
