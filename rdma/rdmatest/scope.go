package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
)

// After Cancel has returned nil, no operation of the scope touches the target's memory or counts
// an immediate, although the memory's key is still valid. Operations outside the scope continue.
func testScope(t *env) {
	server, client := t.engine(Config{Listen: true, NICs: t.p.NICs}), t.engine(Config{NICs: t.p.NICs})
	t.connect(client, server)
	n := lanes * t.laneBytes()
	src, _ := t.random(server, n)
	dst, got := t.region(client, n)
	d := t.sent(dst.Desc())
	var total int64
	for round := range t.scaled(6, 3) {
		scope := rdma.NewScope(server)
		var wg sync.WaitGroup
		var ended, refused atomic.Int64
		landing, _ := t.expect(client, uint32(round), uint32(1+round))
		for lane := range lanes {
			wg.Go(func() {
				off, size := uint64(lane*t.laneBytes()), uint64(t.laneBytes())
				for {
					f := rdma.NewFlag()
					var err error
					if lane%2 == 0 {
						err = scope.Write(t.ctx, rdma.Write{Src: src, SrcOffset: off, Dst: d, DstOffset: off, Len: size, Imm: rdma.ImmOf(uint32(round)), Done: f.Set})
					} else {
						err = scope.WritePaged(t.ctx, rdma.PagedWrite{
							PageLen: size / 4, Src: src, Dst: d, Imm: rdma.ImmOf(uint32(round)), Done: f.Set,
							SrcPages: rdma.Pages{Indices: []uint32{0, 1, 2, 3}, Stride: size / 4, Offset: off},
							DstPages: rdma.Pages{Indices: []uint32{3, 1, 0, 2}, Stride: size / 4, Offset: off},
						})
					}
					if errors.Is(err, rdma.ErrCanceled) {
						refused.Add(1)
						return
					}
					if err != nil {
						t.Errorf("submit: %v", err)
						return
					}
					if err := f.Wait(t.ctx); err != nil {
						t.Errorf("write: %v", err)
						return
					}
					ended.Add(1)
				}
			})
		}
		t.must(t.wait(landing)) // now bytes are being placed
		t.must(scope.Cancel(t.ctx))
		poison := bytes.Repeat([]byte{0xA5}, n)
		copy(got, poison)
		wg.Wait()
		t.roundTrip(server, client)
		if refused.Load() != lanes || scope.Pending() != 0 {
			t.Fatalf("round %d: %d of %d lanes were refused, %d operations pending", round, refused.Load(), lanes, scope.Pending())
		}
		if !bytes.Equal(got, poison) {
			t.Fatalf("round %d: bytes changed after a confirmed cancel", round)
		}
		// All successful writes are counted after some time, and no other write is.
		rest, _ := t.expect(client, uint32(round), uint32(ended.Load())-uint32(1+round))
		t.must(t.wait(rest))
		total += ended.Load()
		if c := client.Stats().ImmediatesIn; c != uint64(total) {
			t.Fatalf("round %d: %d immediates counted for %d writes", round, c, total)
		}
	}
}

// Cancel ends the wait of operations for the in-flight budget; these operations are not submitted.
func testScopeWaits(t *env) {
	n := uint64(t.scaled(1<<20, 16<<10))
	server, client := t.engine(Config{Listen: true, InFlightOps: 2, InFlightBytes: int64(n)}), t.engine(Config{})
	t.connect(client, server)
	src, _ := t.random(server, int(n))
	const count = 16
	dst, _ := t.region(client, count*int(n))
	scope := rdma.NewScope(server)
	var wg sync.WaitGroup
	var submitted, ended, canceled atomic.Int64
	for i := range uint64(count) {
		wg.Go(func() {
			err := scope.Write(t.ctx, rdma.Write{Src: src, Dst: dst.Desc(), DstOffset: i * n, Len: n, Done: func(err error) {
				if err != nil {
					t.Errorf("write: %v", err)
				}
				ended.Add(1)
			}})
			switch {
			case err == nil:
				submitted.Add(1)
			case errors.Is(err, rdma.ErrCanceled):
				canceled.Add(1)
			default:
				t.Errorf("submit: %v", err)
			}
		})
	}
	t.must(scope.Cancel(t.ctx))
	all := ended.Load()
	wg.Wait()
	if ended.Load() != all || submitted.Load() != all || submitted.Load()+canceled.Load() != count {
		t.Errorf("%d submitted, %d ended, %d cancelled of %d", submitted.Load(), ended.Load(), canceled.Load(), count)
	}
	ctx, cancel := context.WithCancel(t.ctx)
	cancel()
	t.must(rdma.NewScope(server).Cancel(t.ctx))
	t.wantErr(rdma.NewScope(server).Write(ctx, rdma.Write{Src: src, Dst: dst.Desc(), Len: n}), context.Canceled)
	t.roundTrip(server, client)
}

// A prefill engine sends each layer when the watched word shows that the layer is ready
// (fabric-lib, appendix A). Every layer arrives once, no matter how many steps of the word one
// callback of the watcher covers.
func testWatcher(t *env) {
	prefiller, decoder := t.pair()
	layers, page := t.scaled(61, 12), uint64(t.scaled(16<<10, 512))
	const pages = 4
	layerBytes := pages * page
	src, mem := t.random(prefiller, layers*int(layerBytes))
	dst, got := t.region(decoder, layers*int(layerBytes))
	d := t.sent(dst.Desc())
	all, _ := t.expect(decoder, 5, uint32(layers), prefiller.Addr().Engine)
	send := func(layer uint64) error {
		off := layer * layerBytes
		return prefiller.WritePaged(t.ctx, rdma.PagedWrite{
			PageLen: page, Src: src, Dst: d, Imm: rdma.ImmOf(5), NoWait: true,
			SrcPages: rdma.Pages{Indices: []uint32{0, 1, 2, 3}, Stride: page, Offset: off},
			DstPages: rdma.Pages{Indices: []uint32{2, 3, 0, 1}, Stride: page, Offset: off},
		})
	}
	w := rdma.NewWatcher(rdma.WatcherOptions{SpinRounds: 200})
	var ready uint64
	word, err := w.Watch(&ready, func(before, now uint64) {
		for layer := before; layer < now; layer++ {
			if err := send(layer); err != nil {
				t.Errorf("layer %d: %v", layer, err)
			}
		}
	})
	t.must(err)
	for done := 0; done < layers; {
		step := min(1+t.rng.IntN(3), layers-done)
		done += step
		atomic.AddUint64(&ready, uint64(step))
		runtime.Gosched()
	}
	word.Stop() // all steps made before have been reported
	t.must(w.Close())
	t.must(t.wait(all))
	for i := range layers {
		layer, want := got[i*int(layerBytes):(i+1)*int(layerBytes)], mem[i*int(layerBytes):(i+1)*int(layerBytes)]
		half := int(layerBytes) / 2
		if !bytes.Equal(layer[:half], want[half:]) || !bytes.Equal(layer[half:], want[:half]) {
			t.Fatalf("layer %d: wrong bytes", i)
		}
	}
	if n := decoder.Stats().ImmediatesIn; n != uint64(layers) {
		t.Errorf("%d immediates counted for %d layers", n, layers)
	}
}
