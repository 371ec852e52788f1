package client

import (
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/internal/spread"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

// heap is a region to which only the test writes.
type heap struct {
	rdma.Region
	mem []byte
}

func (h heap) Bytes() []byte { return h.mem }

// arriving returns a read of pieces of four layers of layerBytes at the given offsets.
func arriving(mem []byte, layerBytes int, offsets []int64) (*reading, *readTask) {
	r := &reading{req: ReadRequest{Namespace: kv.Namespace{Geometry: kv.SingleGroup(4, 1, layerBytes)}}, targets: []*Memory{{region: heap{mem: mem}}}}
	t := &readTask{}
	for i, at := range offsets {
		r.pieces = append(r.pieces, Piece{Block: i, Offset: at})
		t.pieces = append(t.pieces, i)
	}
	return r, t
}

// placing writes random bytes to a range of the window and calls landed.
func placing(rng *rand.Rand, a *arrival, off, n int) {
	b := a.places[0].mem[off : off+n]
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	a.landed(0, uint64(off), uint64(n))
}

// checkArrived compares the sums that a reports with the bytes in memory. It returns the number of
// layers with a sum.
func checkArrived(t *testing.T, r *reading, task *readTask, a *arrival, lo int64) (known int) {
	t.Helper()
	layerBytes := r.req.Namespace.Geometry.LayerBytes(0)
	for k, i := range task.pieces {
		layers := a.sumsOf(k, 4)
		for j := range layers {
			sum, ok := layers[j].sumIf(layerBytes)
			if !ok {
				continue
			}
			known++
			at := r.pieces[i].Offset - lo + int64(j)*layerBytes
			if want := xxh3.Hash(a.places[0].mem[at:][:layerBytes]); sum != want {
				t.Errorf("piece %d, layer %d: sum %x; its bytes have %x", i, j, sum, want)
			}
		}
	}
	return known
}

// TestArrival: a reported sum is the sum of the final bytes, for writes of any ranges, in any order
// and repeated. If each byte was written once, every layer has a sum.
func TestArrival(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 3))
		layerBytes, pieces := 1+rng.IntN(300), 1+rng.IntN(6)
		// With gaps before, between and after them, in any order.
		offsets, end := make([]int64, pieces), 10+rng.IntN(50)
		for i := range offsets {
			offsets[i], end = int64(end), end+4*layerBytes+rng.IntN(2)*rng.IntN(100)
		}
		rng.Shuffle(pieces, func(i, j int) { offsets[i], offsets[j] = offsets[j], offsets[i] })
		r, task := arriving(make([]byte, end+50), layerBytes, offsets)
		zones := r.zones(task)
		lo, hi := zones[0].lo, zones[0].hi
		a := r.newArrival(task, zones)
		size := int(hi - lo)
		var cuts []int // the window in runs, which are written in any order
		for at := 0; at < size; {
			cuts = append(cuts, at)
			at += 1 + rng.IntN(2*layerBytes)
		}
		order := rng.Perm(len(cuts))
		for _, i := range order {
			to := size
			if i+1 < len(cuts) {
				to = cuts[i+1]
			}
			placing(rng, a, cuts[i], to-cuts[i])
		}
		if known := checkArrived(t, r, task, a, lo); known != 4*pieces {
			t.Fatalf("seed %d: %d layers of %d were hashed when they arrived", seed, known, 4*pieces)
		}
		for range rng.IntN(6) { // some ranges a second time
			at := rng.IntN(size)
			placing(rng, a, at, 1+rng.IntN(size-at))
			checkArrived(t, r, task, a, lo)
		}
		// Overlapping runs, so that layers have enough bytes and holes.
		a = r.newArrival(task, zones)
		for range 40 {
			at := rng.IntN(size)
			placing(rng, a, at, 1+rng.IntN(min(size-at, layerBytes)))
			checkArrived(t, r, task, a, lo)
		}
	}
}

// TestArrivalAtOnce: several goroutines write parts of one layer.
func TestArrivalAtOnce(t *testing.T) {
	const layerBytes, shares = 64 << 10, 8
	r, task := arriving(make([]byte, 8*layerBytes), layerBytes, []int64{4 * layerBytes, 0})
	zones := r.zones(task)
	lo, hi := zones[0].lo, zones[0].hi
	a := r.newArrival(task, zones)
	var wg sync.WaitGroup
	for g := range shares {
		wg.Go(func() {
			for at := g * 1024; at < int(hi-lo); at += shares * 1024 {
				for i := 0; i < 1024; i += 8 {
					binary.LittleEndian.PutUint64(a.places[0].mem[at+i:], uint64(at+i))
				}
				a.landed(0, uint64(at), 1024)
			}
		})
	}
	wg.Wait()
	if known := checkArrived(t, r, task, a, lo); known != 8 {
		t.Errorf("%d layers of 8 were hashed when they arrived", known)
	}
}

// TestArrivalNot: long layers are hashed afterwards.
func TestArrivalNot(t *testing.T) {
	r, task := arriving(make([]byte, 8<<20), arrivedLayerMax+1, []int64{0})
	if a := r.newArrival(task, r.zones(task)); a != nil || a.sumsOf(0, 4) != nil {
		t.Errorf("layers of %d bytes are to be hashed when they arrive", arrivedLayerMax+1)
	}
}

// TestFirstBadOf: some layers were hashed as they landed, and others were not.
func TestFirstBadOf(t *testing.T) {
	const layers, layerBytes = 12, 512
	rng := rand.New(rand.NewPCG(2, 2))
	mem := make([]byte, layers*layerBytes)
	for i := range mem {
		mem[i] = byte(rng.Uint32())
	}
	sums := make([]uint64, layers)
	for k := range sums {
		sums[k] = xxh3.Hash(mem[k*layerBytes:][:layerBytes])
	}
	s := &Store{workers: spread.NewOf(1)}
	for mask := range 1 << layers {
		landed := make([]arrivedLayer, layers)
		for k := range landed {
			if mask>>k&1 == 1 {
				landed[k].placed.Store(layerBytes)
				landed[k].sum = sums[k]
			} else {
				landed[k].placed.Store(uint64(rng.IntN(3) * (layerBytes - 1)))
				landed[k].sum = rng.Uint64()
			}
		}
		if k, _ := s.firstBadOf(mem, layerBytes, sums, landed); k != -1 {
			t.Fatalf("%b: layer %d of intact ones", mask, k)
		}
		bad := rng.IntN(layers)
		sums[bad]++
		if k, sum := s.firstBadOf(mem, layerBytes, sums, landed); k != bad || sum != sums[bad]-1 {
			t.Fatalf("%b: layer %d, %x; want %d, %x", mask, k, sum, bad, sums[bad]-1)
		}
		sums[bad]--
	}
}
