package client

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// run is the destination of consecutive layers of a piece in one of the caller's memories.
type run struct {
	target int   // index in reading.targets
	offset int64 // in the memory, in bytes
	layers int
}

// zone is the range [lo,hi) of one memory, in bytes, that contains all runs of a task in this
// memory. If the task has no run in the memory, lo > hi.
type zone struct{ lo, hi int64 }

// place sets targets and fragments from the request, and validates the fragments.
func (r *reading) place() error {
	if r.req.Fragments == nil {
		r.targets = []*Memory{r.req.Into}
		if err := r.store.checkMemory(r.req.Into); err != nil {
			return fmt.Errorf("client: read: %w", err)
		}
		return nil
	}
	if got, want := len(r.req.Fragments), len(r.pieces); got != want {
		return fmt.Errorf("client: read: %w: fragments for %d pieces; want %d", ErrRequest, got, want)
	}
	numbers := make(map[*Memory]int)
	r.fragments = make([][]run, len(r.pieces))
	for i, p := range r.pieces {
		if err := checkFragments(r.req.Fragments[i], r.layers(p.Group), r.req.Namespace.Geometry.LayerBytes(p.Group)); err != nil {
			return fmt.Errorf("client: read: %w: piece %d: %w", ErrRequest, i, err)
		}
		r.fragments[i] = make([]run, len(r.req.Fragments[i]))
		for k, f := range r.req.Fragments[i] {
			n, ok := numbers[f.Memory]
			if !ok {
				n = len(r.targets)
				numbers[f.Memory] = n
				r.targets = append(r.targets, f.Memory)
			}
			r.fragments[i][k] = run{target: n, offset: f.Offset, layers: f.Layers}
		}
	}
	for _, m := range r.targets {
		if err := r.store.checkMemory(m); err != nil {
			return fmt.Errorf("client: read: %w", err)
		}
	}
	return r.checkFragmentsApart()
}

// checkFragments returns an error unless the fragments lie in their memories and together have as
// many layers as the piece.
func checkFragments(fragments []Fragment, layers int, layerBytes int64) error {
	left := layers
	for k, f := range fragments {
		if f.Memory == nil || f.Layers < 1 || f.Layers > left {
			return fmt.Errorf("fragment %d has %d layers; %d of %d are left", k, f.Layers, left, layers)
		}
		left -= f.Layers
		if n, have := int64(f.Layers)*layerBytes, int64(len(f.Memory.Bytes())); f.Offset < 0 || f.Offset > have-n {
			return fmt.Errorf("fragment %d, %d bytes at offset %d, does not lie in its memory of %d bytes", k, n, f.Offset, have)
		}
	}
	if left > 0 {
		return fmt.Errorf("the fragments lack %d of %d layers", left, layers)
	}
	return nil
}

// checkFragmentsApart returns an error if fragments share bytes. It is checkApart for fragments. It
// compares addresses, because two of the memories may share bytes too.
func (r *reading) checkFragmentsApart() error {
	type span struct {
		piece  int
		offset int64 // in its memory
		lo, hi uintptr
	}
	bases := make([]uintptr, len(r.targets))
	for k, m := range r.targets {
		bases[k] = addressOf(m.Bytes())
	}
	var all []span
	for i, p := range r.pieces {
		layerBytes := r.req.Namespace.Geometry.LayerBytes(p.Group)
		for _, f := range r.fragments[i] {
			lo := bases[f.target] + uintptr(f.offset)
			all = append(all, span{i, f.offset, lo, lo + uintptr(int64(f.layers)*layerBytes)})
		}
	}
	slices.SortFunc(all, func(a, b span) int { return cmp.Compare(a.lo, b.lo) })
	for k := 1; k < len(all); k++ {
		if a, b := all[k-1], all[k]; b.lo < a.hi {
			return fmt.Errorf("client: read: %w: fragments of pieces %d and %d share bytes, at offset %d", ErrRequest, a.piece, b.piece, b.offset)
		}
	}
	return nil
}

// runs returns the destinations (runs) of the layers of piece i. It stores a single run in one, to
// avoid an allocation.
func (r *reading) runs(i int, one *[1]run) []run {
	if r.fragments != nil {
		return r.fragments[i]
	}
	p := r.pieces[i]
	one[0] = run{offset: p.Offset, layers: r.layers(p.Group)}
	return one[:]
}

// zones returns, for each target memory, the range of the memory that contains all bytes of the
// task.
func (r *reading) zones(t *readTask) []zone {
	zones := make([]zone, len(r.targets))
	for k := range zones {
		zones[k] = zone{lo: math.MaxInt64, hi: -1}
	}
	var one [1]run
	for _, i := range t.pieces {
		layerBytes := r.req.Namespace.Geometry.LayerBytes(r.pieces[i].Group)
		for _, f := range r.runs(i, &one) {
			z := &zones[f.target]
			z.lo, z.hi = min(z.lo, f.offset), max(z.hi, f.offset+int64(f.layers)*layerBytes)
		}
	}
	return zones
}

// pieceRef returns the reference to the task's k-th piece for a Read call. destinations[n] is the
// index, in the call's list of destinations, of the zone of target n.
func (r *reading) pieceRef(t *readTask, k int, zones []zone, destinations []uint32) *pb.PieceRef {
	i := t.pieces[k]
	ref := &pb.PieceRef{Block: uint32(t.local[k]), Group: uint32(r.pieces[i].Group)}
	var one [1]run
	runs := r.runs(i, &one)
	if first := runs[0]; len(runs) == 1 && destinations[first.target] == 0 {
		ref.Offset = uint64(first.offset - zones[first.target].lo)
		return ref
	}
	ref.Fragments = make([]*pb.Fragment, len(runs))
	for j, f := range runs {
		ref.Fragments[j] = &pb.Fragment{Destination: destinations[f.target], Offset: uint64(f.offset - zones[f.target].lo), Layers: uint32(f.layers)}
	}
	return ref
}
