package client

import (
	"cmp"
	"slices"
	"sort"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/rdma"
)

// arrivedLayerMax is the size of the longest layer, in bytes, that is hashed on arrival. A longer
// layer comes over several connections, and its first bytes have left the CPU cache when its last
// bytes arrive.
const arrivedLayerMax = 1 << 20

// arrival hashes the layers of one attempt as they land. The goroutine that placed the last byte of
// a layer hashes it: at that time the bytes are in the cache of the goroutine's core, and the other
// layers of the read are still arriving.
//
// The checksum of a layer is valid only while the number of bytes placed in the layer equals the
// layer's length. Bytes are counted after they are placed, so when the number reaches the length,
// no write to the layer is in progress. Bytes that are placed later (sent twice, late or by malice)
// are counted too. The number then exceeds the length, and the layer is hashed after the window is
// revoked, like a layer without a checksum.
type arrival struct {
	places []arrivalPlace // one for each target
	layers []arrivedLayer
	// firsts[k] is the index in layers of the first layer of the task's k-th piece.
	firsts []int
}

// arrivalPlace is the memory of one window and the runs of layers in this memory.
type arrivalPlace struct {
	mem  []byte
	runs []arrivalRun // sorted by at, disjoint
}

// arrivalRun is a run of consecutive layers of layerBytes each. It is the range [at, end) of the
// window, in bytes.
type arrivalRun struct {
	at, end, layerBytes int64
	first               int // index in arrival.layers of the run's first layer
}

// arrivedLayer counts the bytes that have landed in one layer. sum is the checksum at the moment
// when the count reached the layer's length.
type arrivedLayer struct {
	placed atomic.Uint64
	sum    uint64
}

// newArrival returns the arrival for the task's pieces, which land in windows over the zones. It
// returns nil if all layers are too long to be hashed on arrival.
func (r *reading) newArrival(t *readTask, zones []zone) *arrival {
	l := &arrival{places: make([]arrivalPlace, len(zones)), firsts: make([]int, len(t.pieces))}
	for k, z := range zones {
		if z.lo < z.hi {
			l.places[k].mem = r.targets[k].Bytes()[z.lo:z.hi]
		}
	}
	if len(zones) == 1 {
		l.places[0].runs = make([]arrivalRun, 0, len(t.pieces))
	}
	layers, hashed := 0, false
	var one [1]run
	for k, i := range t.pieces {
		l.firsts[k] = layers
		n := r.req.Namespace.Geometry.LayerBytes(r.pieces[i].Group)
		for _, f := range r.runs(i, &one) {
			if at := f.offset - zones[f.target].lo; n <= arrivedLayerMax {
				p := &l.places[f.target]
				p.runs = append(p.runs, arrivalRun{at: at, end: at + int64(f.layers)*n, layerBytes: n, first: layers})
				hashed = true
			}
			layers += f.layers
		}
	}
	if !hashed {
		return nil
	}
	for _, p := range l.places {
		slices.SortFunc(p.runs, func(a, b arrivalRun) int { return cmp.Compare(a.at, b.at) })
	}
	l.layers = make([]arrivedLayer, layers)
	return l
}

// window opens a window on the range [off, off+n) of region, the memory of a target, for the node.
// If the provider reports each range of bytes that has landed (rdma.LandingRegion), l.landed gets
// the range and counted.add its length. Both l and counted may be nil.
func (l *arrival) window(target int, region rdma.Region, off, n uint64, node rdma.EngineID, counted *attemptBytes) (rdma.Window, error) {
	early, ok := region.(rdma.LandingRegion)
	switch {
	case !ok || l == nil && counted == nil:
		return region.Window(off, n, node)
	case counted == nil:
		return early.WindowLanding(off, n, func(off, n uint64) { l.landed(target, off, n) }, node)
	}
	return early.WindowLanding(off, n, func(off, n uint64) {
		if l != nil {
			l.landed(target, off, n)
		}
		counted.add(int64(n))
	}, node)
}

// landed records that n bytes from off in a target's window were placed, and hashes the
// layers that are complete now.
func (l *arrival) landed(target int, off, n uint64) {
	place := &l.places[target]
	at, end := int64(off), int64(off+n)
	i := sort.Search(len(place.runs), func(i int) bool { return place.runs[i].end > at })
	for ; i < len(place.runs) && place.runs[i].at < end; i++ {
		run := place.runs[i]
		from, to := max(at, run.at)-run.at, min(end, run.end)-run.at
		for k := from / run.layerBytes; k*run.layerBytes < to; k++ {
			start := k * run.layerBytes
			part := min(to, start+run.layerBytes) - max(from, start)
			layer := &l.layers[run.first+int(k)]
			if layer.placed.Add(uint64(part)) == uint64(run.layerBytes) {
				layer.sum = xxh3.Hash(place.mem[run.at+start:][:run.layerBytes])
			}
		}
	}
}

// sumsOf returns the arrivedLayer of each of the n layers of the task's k-th piece, or nil if no
// layer was hashed on arrival. The caller must have revoked the window.
func (l *arrival) sumsOf(k, n int) []arrivedLayer {
	if l == nil {
		return nil
	}
	return l.layers[l.firsts[k]:][:n]
}

// sumIf returns the layer's sum. ok reports whether sum is the checksum of the bytes that are now
// in memory.
func (x *arrivedLayer) sumIf(layerBytes int64) (sum uint64, ok bool) {
	return x.sum, x.placed.Load() == uint64(layerBytes)
}
