package storage_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// hangingDevice does not complete reads while it hangs. It holds their buffers like a kernel, even
// if the caller's context ends.
type hangingDevice struct {
	blockio.Device

	mu   sync.Mutex
	hung chan struct{} // nil: the device does not hang
	// held counts the bytes of the buffers that hang. heldMax is its maximum so far.
	held, heldMax int64
	// reads counts the batches that hung.
	reads atomic.Int64
}

func (d *hangingDevice) hang() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hung = make(chan struct{})
}

func (d *hangingDevice) mend() {
	d.mu.Lock()
	defer d.mu.Unlock()
	close(d.hung)
	d.hung = nil
}

func (d *hangingDevice) Do(ctx context.Context, batch []blockio.Request) error {
	var bytes int64
	reads := false
	for _, r := range batch {
		reads = reads || r.Op == blockio.Read
		for _, b := range r.Bufs {
			bytes += int64(len(b))
		}
	}
	d.mu.Lock()
	hung := d.hung
	if reads && hung != nil {
		d.held += bytes
		d.heldMax = max(d.heldMax, d.held)
	}
	d.mu.Unlock()
	if reads && hung != nil {
		d.reads.Add(1)
		<-hung
		d.mu.Lock()
		d.held -= bytes
		d.mu.Unlock()
	}
	return d.Device.Do(ctx, batch)
}

// laneRig is a node on two volumes, the second of which can hang. Each prompt is entirely on one of
// the volumes.
type laneRig struct {
	*rig
	ns   kv.Namespace
	hung *hangingDevice
	// on holds the prompts of each volume.
	on [2][][]kv.BlockID
}

func newLaneRig(t *testing.T, edit func(*storage.Options)) *laneRig {
	w := &laneRig{hung: &hangingDevice{Device: memio.New(memio.Options{})}}
	w.rig = newRig(t, rigOptions{
		capacityBytes: 64 << 20,
		edit: func(o *storage.Options) {
			o.HotBytes = -1
			edit(o)
		},
	}, memio.New(memio.Options{}), w.hung)
	w.ns = w.namespace("m", small)
	for seed := 1; len(w.on[0]) < 24 || len(w.on[1]) < 24; seed++ {
		ids := chain(w.ns, 6, seed)
		w.mustPut(w.ns, ids)
		_, m, err := w.node.Match(storage.MatchRequest{Namespace: w.ns.Name, IDs: ids})
		if err != nil || m.Blocks != len(ids) {
			t.Fatalf("%d blocks match: %v", m.Blocks, err)
		}
		v := m.Pieces[0].Ref.Extent.Volume()
		if slices.ContainsFunc(m.Pieces, func(p trie.Piece) bool { return p.Ref.Extent.Volume() != v }) {
			continue
		}
		w.on[v] = append(w.on[v], ids)
		if seed > 1000 {
			t.Fatal("the prompts do not spread over the volumes")
		}
	}
	return w
}

// TestHungVolumeHoldsUpItselfOnly fills a hanging volume with more Loads than a node admits
// concurrently. All Loads from the other volume succeed, and the hanging reads hold at most the
// memory of the volume's budget.
func TestHungVolumeHoldsUpItselfOnly(t *testing.T) {
	const readsMax = 4
	w := newLaneRig(t, func(o *storage.Options) { o.ReadsMax, o.ReadWait, o.QueueWait = readsMax, time.Hour, time.Hour })
	w.hung.hang()
	ctx, cancel := context.WithCancel(t.Context())
	var stuck sync.WaitGroup
	for i := range readsMax {
		stuck.Go(func() {
			if _, _, err := w.tryLoad(ctx, w.ns, w.on[1][i]); !errors.Is(err, context.Canceled) {
				t.Errorf("a Load from a volume that hangs ended: %v", err)
			}
		})
	}
	for w.hung.reads.Load() < readsMax {
		runtime.Gosched()
	}
	// The volume's places are taken, so further Loads from it are Busy.
	for i := range 5 * readsMax {
		result, n, err := w.tryLoad(ctx, w.ns, w.on[1][i%len(w.on[1])])
		if err != nil || n != 0 {
			t.Errorf("%d pieces came from a volume that hangs: %v", n, err)
		}
		for _, p := range result.Pieces {
			if p.State != storage.Failed || !errors.Is(p.Err, storage.ErrBusy) {
				t.Errorf("block %d: %v: %v; want Busy", p.Block, p.State, p.Err)
			}
		}
	}
	var healthy sync.WaitGroup
	for i := range readsMax {
		healthy.Go(func() {
			for j := range 12 {
				ids := w.on[0][(i*12+j)%len(w.on[0])]
				if _, n, err := w.tryLoad(t.Context(), w.ns, ids); err != nil || n != len(ids) {
					t.Errorf("%d of %d pieces from the volume that answers: %v", n, len(ids), err)
				}
			}
		})
	}
	healthy.Wait()
	cancel()
	stuck.Wait()
	w.hung.mend()
	if limit := int64(8<<20) * 3 / 4 / 2; w.hung.heldMax > limit || w.hung.heldMax == 0 {
		t.Errorf("the volume that hung held %d bytes; its budget is %d", w.hung.heldMax, limit)
	}
}

// TestHungReadIsAMiss: a Load waits for a device for ReadWait at most. Then it returns its place.
// The volume is read again when the device completes.
func TestHungReadIsAMiss(t *testing.T) {
	w := newLaneRig(t, func(o *storage.Options) {
		o.ReadsMax, o.ReadWait, o.QueueWait = 2, 20*time.Millisecond, 20*time.Millisecond
	})
	w.hung.hang()
	for i := range 20 {
		result, n, err := w.tryLoad(t.Context(), w.ns, w.on[1][i%len(w.on[1])])
		if err != nil || n != 0 {
			t.Fatalf("%d pieces came from a volume that hangs: %v", n, err)
		}
		for _, p := range result.Pieces {
			if p.State != storage.Failed || !errors.Is(p.Err, context.DeadlineExceeded) && !errors.Is(p.Err, storage.ErrBusy) {
				t.Errorf("block %d: %v: %v; want that the device did not answer", p.Block, p.State, p.Err)
			}
		}
	}
	w.hung.mend()
	for _, ids := range append(w.on[0], w.on[1]...) {
		// On a busy machine, a device that does not hang may take longer than ReadWait.
		for n := 0; n != len(ids); {
			_, n = w.load(w.ns, ids)
		}
	}
}
