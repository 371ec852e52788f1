package storage_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/server/storage"
)

// faulty returns a rig whose device follows changeable rules. The hot set is off, so every load
// reads from the device.
func faulty(t *testing.T, opts rigOptions) (*rig, *faultio.Device) {
	dev := faultio.Wrap(memio.New(memio.Options{}), nil)
	opts.edit = func(o *storage.Options) { o.HotBytes = -1 }
	return newRig(t, opts, dev), dev
}

// TestReadFaultsAreMisses: for every fault of a device read, the piece is lost with a counted
// reason, and every delivered piece has the right bytes (tryLoad checks them).
func TestReadFaultsAreMisses(t *testing.T) {
	for _, tc := range []struct {
		rules string
		state storage.PieceState
		// mayMiss: the fault may hit an area without bytes of a block.
		mayMiss bool
	}{
		{`(Err EIO (And Reads (Prob 0.3 1)))`, storage.Failed, false},
		{`(Short (And Reads (Prob 0.6 2)))`, storage.Failed, false},
		{`(Flip (And Reads (Prob 0.5 3)))`, storage.Corrupt, true},
		{`(Torn (And Reads (Prob 0.5 4)))`, storage.Corrupt, true},
	} {
		t.Run(tc.rules, func(t *testing.T) {
			r, dev := faulty(t, rigOptions{})
			ns := r.namespace("m", small)
			const prompts = 40
			for i := range prompts {
				r.mustPut(ns, chain(ns, 3, i))
			}
			dev.SetRules(faultio.MustParse(tc.rules))
			lost := 0
			for i := range prompts {
				result, n := r.load(ns, chain(ns, 3, i))
				for _, p := range result.Pieces {
					if p.State == storage.Delivered {
						continue
					}
					lost++
					if p.State != tc.state || p.Err == nil {
						t.Errorf("prompt %d, block %d: %v: %v; want %v and why", i, p.Block, p.State, p.Err, tc.state)
					}
					dev.Counter().Surfaced(p.Err)
				}
				if n+countLost(result) != len(result.Pieces) {
					t.Errorf("prompt %d: %d delivered of %d", i, n, len(result.Pieces))
				}
			}
			injected := len(dev.Counter().Injected())
			if injected == 0 || lost == 0 {
				t.Fatalf("%d faults, %d pieces lost", injected, lost)
			}
			repaired(dev)
			if left := dev.Counter().Pending(); len(left) > 0 && !tc.mayMiss {
				t.Errorf("unnoticed: %v", left)
			}
			if got := testutil.ToFloat64(r.stats.CorruptBlocks.WithLabelValues("read")); (tc.state == storage.Corrupt) != (got > 0) {
				t.Errorf("%v corrupt blocks were counted", got)
			}
			// The next writer stores the dropped blocks again.
			dev.SetRules(nil)
			for i := range prompts {
				r.mustPut(ns, chain(ns, 3, i))
				if _, n := r.load(ns, chain(ns, 3, i)); n != 3 {
					t.Errorf("prompt %d: %d of 3 blocks after the faults ended", i, n)
				}
			}
		})
	}
}

// TestLostReaderIsNoDeviceFault: a piece that was read and did not reach the reader has the reason
// transfer.
func TestLostReaderIsNoDeviceFault(t *testing.T) {
	r := newRig(t, rigOptions{})
	ns := r.namespace("m", small)
	ids := chain(ns, 3, 0)
	r.mustPut(ns, ids)
	gone := errors.New("connection reset")
	result, err := r.node.Load(t.Context(), storage.LoadRequest{Namespace: "m", IDs: ids}, func(_ context.Context, parts []storage.Part) {
		for i := range parts {
			parts[i].Done(gone)
		}
	})
	if err != nil || countLost(result) != 3 || !errors.Is(result.Pieces[0].Err, gone) {
		t.Fatalf("%+v, %v", result, err)
	}
	for reason, want := range map[string]float64{"transfer": 3, "device": 0} {
		if got := testutil.ToFloat64(r.stats.ReadLost.WithLabelValues(reason)); got != want {
			t.Errorf("%v pieces lost to the %s, want %v", got, reason, want)
		}
	}
}

// repaired accounts for faults on requests with several slots. The block store repeats such a
// request slot by slot, and the test has checked the results.
func repaired(dev *faultio.Device) {
	const slotBytes = 12 << 10
	for _, i := range dev.Counter().Pending() {
		if i.Bytes > slotBytes {
			dev.Counter().Repaired(i.File, i.Offset, i.Bytes)
		}
	}
}

func countLost(r storage.LoadResult) (n int) {
	for _, p := range r.Pieces {
		if p.State != storage.Delivered {
			n++
		}
	}
	return n
}

// TestWriteFaultsAreNotIndexed: a failed write is refused. A write that the device silently
// corrupted is detected when it is read.
func TestWriteFaultsAreNotIndexed(t *testing.T) {
	for _, tc := range []struct {
		rules  string
		silent bool
	}{
		{`(Err EIO (And Writes (File "segment-*") (Prob 0.3 1)))`, false},
		{`(Short (And Writes (File "segment-*") (Prob 0.3 2)))`, false},
		{`(Flip (And Writes (File "segment-*") (Prob 0.5 3)))`, true},
		{`(Torn (And Writes (File "segment-*") (Prob 0.5 4)))`, true},
	} {
		t.Run(tc.rules, func(t *testing.T) {
			r, dev := faulty(t, rigOptions{})
			ns := r.namespace("m", small)
			r.mustPut(ns, chain(ns, 1, 999)) // this write creates the segment
			dev.SetRules(faultio.MustParse(tc.rules))
			refused, corrupt := 0, 0
			for i := range 40 {
				ids := chain(ns, 3, i)
				stored, err := r.put(ns, ids, 0)
				if err != nil {
					dev.Counter().Surfaced(err)
					refused++
					continue
				}
				kept := 0
				for _, s := range stored {
					if s.Stored {
						kept++
						continue
					}
					refused++
					dev.Counter().Surfaced(s.Err)
				}
				result, n := r.load(ns, ids)
				for _, p := range result.Pieces {
					if p.State == storage.Corrupt {
						corrupt++
					}
				}
				if !tc.silent && n != kept {
					t.Errorf("prompt %d: %d stored, %d can be read", i, kept, n)
				}
			}
			if tc.silent && corrupt == 0 || !tc.silent && refused == 0 {
				t.Fatalf("%d faults: %d refused, %d found corrupt", len(dev.Counter().Injected()), refused, corrupt)
			}
			repaired(dev)
			if left := dev.Counter().Pending(); !tc.silent && len(left) > 0 {
				t.Errorf("unnoticed: %v", left)
			}
			dev.SetRules(nil)
		})
	}
}

// TestSyncFaultIsNotAcknowledged: with durability sync, a failed sync fails the commit. Writes are
// then refused, and reads continue.
func TestSyncFaultIsNotAcknowledged(t *testing.T) {
	r, dev := faulty(t, rigOptions{durability: blockstore.DurabilitySync})
	ns := r.namespace("m", small)
	before := chain(ns, 4, 1)
	r.mustPut(ns, before)
	dev.SetRules(faultio.MustParse(`(Err EIO Syncs)`))
	stored, err := r.put(ns, chain(ns, 4, 2), 0)
	for _, s := range stored {
		if s.Stored {
			t.Errorf("block %d was acknowledged", s.Block)
		}
	}
	if err == nil && len(stored) == 0 {
		t.Error("the failed sync gave neither an error nor a result")
	}
	for range 2 {
		if _, err = r.put(ns, chain(ns, 4, 3), 0); errors.Is(err, storage.ErrReadOnly) {
			break
		}
	}
	if state, why := r.node.WriteState(); state != "read_only" || why == "" {
		t.Errorf("the node is %s (%s)", state, why)
	}
	if _, n := r.load(ns, before); n != 4 {
		t.Errorf("%d of 4 blocks can be read", n)
	}
	dev.SetRules(nil)
}

// TestFullVolumeKeepsServing: when the file system is full, writes are refused or evict blocks, and
// reads continue.
func TestFullVolumeKeepsServing(t *testing.T) {
	dev := memio.New(memio.Options{CapacityBytes: 3 << 20})
	r := newRig(t, rigOptions{capacityBytes: 64 << 20, segmentBytes: 512 << 10}, dev)
	ns := r.namespace("m", small)
	first := chain(ns, 8, 1)
	r.mustPut(ns, first)
	stored := 0
	for i := range 60 {
		pieces, err := r.put(ns, chain(ns, 8, 100+i), 0)
		if err != nil && !errors.Is(err, storage.ErrReadOnly) && !errors.Is(err, storage.ErrBusy) {
			t.Fatalf("prompt %d: %v", i, err)
		}
		for _, p := range pieces {
			if p.Stored {
				stored++
			}
		}
	}
	if stored == 0 {
		t.Error("nothing could be written")
	}
	for i := range 60 {
		if _, _, err := r.tryLoad(context.Background(), ns, chain(ns, 8, 100+i)); err != nil {
			t.Errorf("load: %v", err)
		}
	}
}

// onceDevice calls during at the first read.
type onceDevice struct {
	blockio.Device
	during atomic.Pointer[func()]
}

func (d *onceDevice) Do(ctx context.Context, batch []blockio.Request) error {
	if len(batch) > 0 && batch[0].Op == blockio.Read {
		if f := d.during.Swap(nil); f != nil {
			(*f)()
		}
	}
	return d.Device.Do(ctx, batch)
}

// The epoch is bumped while blocks are verified. The new blocks with the same ids do not make the
// old ones count as broken.
func TestVerifyDuringEpochBump(t *testing.T) {
	d := &onceDevice{Device: memio.New(memio.Options{})}
	r := newRig(t, rigOptions{}, d)
	ns := r.namespace("m", small)
	ids := chain(ns, 4, 1)
	r.mustPut(ns, ids)
	after := ns
	after.Epoch++
	bump := func() {
		if _, err := r.node.BumpEpoch(t.Context(), ns.Name, after.Epoch, 1); err != nil {
			t.Error(err)
		}
		r.mustPut(after, ids)
	}
	d.during.Store(&bump)
	verified, err := r.node.Verify(t.Context(), ns.Name, 0, ids)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range verified {
		if v.State == storage.Corrupt || v.State == storage.Failed {
			t.Errorf("block %v: %v: %v", v.ID, v.State, v.Err)
		}
	}
	if _, n := r.load(after, ids); n != len(ids) {
		t.Errorf("%d of %d blocks of the new epoch are left", n, len(ids))
	}
}
