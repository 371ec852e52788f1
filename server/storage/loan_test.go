package storage_test

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// borrowed is a piece that a test keeps.
type borrowed struct {
	storage.PieceRef
	bytes   []byte
	release func()
}

// borrow loads the chain and keeps every part.
func (r *rig) borrow(ns kv.Namespace, ids []kv.BlockID, edit ...func(*storage.LoadRequest)) (out []borrowed, result storage.LoadResult, err error) {
	req := storage.LoadRequest{Namespace: ns.Name, IDs: ids, Keep: true}
	for _, f := range edit {
		f(&req)
	}
	var mu sync.Mutex
	result, err = r.node.Load(context.Background(), req, func(_ context.Context, parts []storage.Part) {
		mu.Lock()
		defer mu.Unlock()
		for i := range parts {
			p := &parts[i]
			release, err := p.Keep()
			if err == nil {
				out = append(out, borrowed{p.PieceRef, p.Bytes, release})
			}
			p.Done(err)
		}
	})
	return out, result, err
}

// checkBorrowed fails the test if any byte differs from the written byte.
func (r *rig) checkBorrowed(ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, all []borrowed) {
	r.t.Helper()
	for _, b := range all {
		want := make([]byte, len(b.bytes))
		content(ids[b.Block], epoch, b.Group, want)
		if !bytes.Equal(b.bytes, want) {
			r.t.Errorf("WRONG BYTES on loan: block %d", b.Block)
		}
	}
}

// TestLoanOutlivesItsBlock: a lent piece stays unchanged while its block is evicted, its epoch
// ends, its slot is written again, and all free memory of the arena is overwritten.
func TestLoanOutlivesItsBlock(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 4 << 20})
	ns := r.namespace("m", kv.SingleGroup(4, 16, 1024))
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	mine, _, err := r.borrow(ns, ids)
	if err != nil || len(mine) != 8 {
		t.Fatalf("%d pieces, %v", len(mine), err)
	}
	stats := r.node.Stats()
	if stats.Loans != 8 || stats.LoanBytes < 8*ns.Geometry.BlockBytes() {
		t.Errorf("8 pieces lent: %d pieces of %d bytes in the book", stats.Loans, stats.LoanBytes)
	}
	if _, err := r.node.Evict(ns.Name, 1<<40, false); err != nil {
		t.Fatal(err)
	}
	old := ns.Epoch
	if _, err := r.node.BumpEpoch(t.Context(), ns.Name, 0, 1); err != nil {
		t.Fatal(err)
	}
	if ns, err = r.node.Namespace(ns.Name); err != nil {
		t.Fatal(err)
	}
	for seed := range 12 {
		other := chain(ns, 8, 100+seed)
		if _, err := r.put(ns, other, 0); err != nil {
			t.Fatal(err)
		}
		r.load(ns, other)
		r.checkBorrowed(ns, old, ids, mine)
	}
	for _, b := range mine {
		b.release()
	}
	if stats := r.node.Stats(); stats.Loans != 0 || stats.LoanBytes != 0 {
		t.Errorf("everything is back: %d pieces of %d bytes in the book", stats.Loans, stats.LoanBytes)
	}
}

func TestLoansAreBounded(t *testing.T) {
	const max = 3 << 19
	r := newRig(t, rigOptions{edit: func(o *storage.Options) { o.LoanBytesMax = max }})
	ns := r.namespace("m", kv.SingleGroup(4, 16, 1024)) // 64 KiB
	ids := chain(ns, 10, 1)
	r.mustPut(ns, ids)
	var mine []borrowed
	// The same blocks twice. The second loan comes from the hot set, so both share a buffer, which
	// counts once.
	for range 2 {
		more, _, err := r.borrow(ns, ids)
		if err != nil {
			t.Fatal(err)
		}
		mine = append(mine, more...)
		if stats := r.node.Stats(); stats.LoanBytes > 12*ns.Geometry.BlockBytes() {
			t.Errorf("%d bytes in the book for 10 blocks of %d", stats.LoanBytes, ns.Geometry.BlockBytes())
		}
	}
	other := chain(ns, 10, 2)
	r.mustPut(ns, other)
	for len(mine) < 1000 {
		more, result, err := r.borrow(ns, other)
		mine = append(mine, more...)
		if errors.Is(err, storage.ErrBusy) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range result.Pieces {
			if p.State != storage.Delivered && !errors.Is(p.Err, storage.ErrBusy) {
				t.Errorf("block %d: %v, %v", p.Block, p.State, p.Err)
			}
		}
		if stats := r.node.Stats(); stats.LoanBytes > max {
			t.Fatalf("%d bytes lent of %d", stats.LoanBytes, max)
		}
		other = chain(ns, 10, 3+len(mine))
		r.mustPut(ns, other)
	}
	if _, _, err := r.borrow(ns, chain(ns, 10, 1)); !errors.Is(err, storage.ErrBusy) {
		t.Errorf("beyond the bound: %v; want ErrBusy", err)
	}
	if _, n := r.load(ns, ids); n != len(ids) {
		t.Errorf("while all loans are out %d of %d blocks are delivered by copy", n, len(ids))
	}
	for _, b := range mine {
		b.release()
	}
	if mine, _, err := r.borrow(ns, ids); err != nil || len(mine) != len(ids) {
		t.Errorf("after everything is back: %d pieces, %v", len(mine), err)
	} else {
		for _, b := range mine {
			b.release()
		}
	}
}

// TestLoansFillTheirBound: a call that needs more than the rest of the bound gets the pieces that
// fit. The other pieces are Busy.
func TestLoansFillTheirBound(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 64 << 20, segmentBytes: 32 << 20, arenaBytes: 64 << 20, edit: func(o *storage.Options) {
		o.LoadBytesMax, o.WriteBytesMax, o.LoanBytesMax = 16<<20, 16<<20, 10<<20
	}})
	ns := r.namespace("m", kv.SingleGroup(4, 16, 16<<10)) // 1 MiB
	ids := chain(ns, 12, 1)
	r.mustPut(ns, ids)
	pieces := make([]storage.PieceRef, len(ids))
	for i := range pieces {
		pieces[i].Block = i
	}
	mine, result, err := r.borrow(ns, ids, func(q *storage.LoadRequest) { q.Pieces = pieces })
	if err != nil {
		t.Fatal(err)
	}
	delivered := 0
	for _, p := range result.Pieces {
		switch {
		case p.State == storage.Delivered:
			delivered++
		case !errors.Is(p.Err, storage.ErrBusy):
			t.Errorf("block %d: %v, %v", p.Block, p.State, p.Err)
		}
	}
	if delivered != len(mine) || delivered < 6 {
		t.Errorf("%d pieces lent, %d delivered; 9 MiB fit under the bound", len(mine), delivered)
	}
	if _, _, err := r.borrow(ns, ids, func(q *storage.LoadRequest) { q.Pieces = pieces }); !errors.Is(err, storage.ErrBusy) {
		t.Errorf("with no room for a unit: %v; want ErrBusy", err)
	}
	for _, b := range mine {
		b.release()
	}
}

// TestLoanIsWhole: a piece above the cut-through threshold, or a range of its layers, is lent as
// one part.
func TestLoanIsWhole(t *testing.T) {
	r := newRig(t, rigOptions{capacityBytes: 64 << 20, segmentBytes: 32 << 20, arenaBytes: 64 << 20, edit: func(o *storage.Options) {
		o.LoadBytesMax, o.WriteBytesMax = 16<<20, 16<<20
		o.ReadWait = time.Minute // a busy machine may take long for a block of this size
	}})
	ns := r.namespace("m", kv.SingleGroup(12, 16, 64<<10)) // 12 MiB
	ids := chain(ns, 1, 1)
	r.mustPut(ns, ids)
	for _, c := range []struct{ first, layers int }{{0, 0}, {0, 12}, {2, 9}} {
		mine, result, err := r.borrow(ns, ids, func(q *storage.LoadRequest) { q.FirstLayer, q.Layers = c.first, c.layers })
		if err != nil || len(mine) != 1 {
			t.Fatalf("layers %+v: %d parts, %v", c, len(mine), err)
		}
		want := make([]byte, ns.Geometry.BlockBytes())
		content(ids[0], result.Match.Epoch, 0, want)
		layer := ns.Geometry.LayerBytes(0)
		count := c.layers
		if count == 0 {
			count = 12
		}
		if !bytes.Equal(mine[0].bytes, want[int64(c.first)*layer:][:int64(count)*layer]) {
			t.Errorf("layers %+v: wrong bytes", c)
		}
		mine[0].release()
	}
}
