package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
)

// Two engines that write to each other at full rate do not stall.
func testBothWays(t *env) {
	a, b := t.pair()
	n, rounds := t.scaled(256<<10, 4<<10), t.scaled(200, 20)
	var wg sync.WaitGroup
	for _, dir := range []struct{ from, to rdma.Engine }{{a, b}, {b, a}} {
		src, mem := t.random(dir.from, n)
		dst, got := t.region(dir.to, 16*n)
		places := slotsOf(16, uint64(n))
		for range 2 {
			wg.Go(func() {
				for range rounds {
					off := <-places
					if err := dir.from.Write(t.ctx, rdma.Write{Src: src, Dst: dst.Desc(), DstOffset: off, Len: uint64(n), Done: func(err error) {
						if err != nil {
							t.Errorf("write: %v", err)
						}
						places <- off
					}}); err != nil {
						t.Errorf("submit: %v", err)
						return
					}
				}
			})
		}
		defer func() {
			t.must(src.Close(t.ctx))
			for i := range 16 {
				if !bytes.Equal(mem, got[i*n:(i+1)*n]) {
					t.Error("other bytes")
				}
			}
		}()
	}
	wg.Wait()
}

// The operations in flight to a peer are limited. With NoWait, a call returns ErrBusy at the
// limit. The end of a context ends the wait. When operations end, later ones can start.
func testBudget(t *env) {
	n := uint64(t.scaled(1<<20, 16<<10))
	server := t.engine(Config{Listen: true, InFlightOps: 4, InFlightBytes: int64(2 * n)})
	client := t.engine(Config{})
	t.connect(client, server)
	src, _ := t.random(server, int(4*n))
	dst, _ := t.region(client, int(32*4*n))
	places := slotsOf(32, 4*n)
	var submitted, ended atomic.Int64
	write := func(ctx context.Context, n uint64, noWait bool) error {
		off := <-places
		submitted.Add(1)
		err := server.Write(ctx, rdma.Write{Src: src, Dst: dst.Desc(), DstOffset: off, Len: n, NoWait: noWait, Done: func(err error) {
			if err != nil {
				t.Errorf("write: %v", err)
			}
			ended.Add(1)
			places <- off
		}})
		if err != nil {
			submitted.Add(-1)
			places <- off
		}
		return err
	}
	busy := false
	for range 10000 {
		err := write(t.ctx, n, true)
		if errors.Is(err, rdma.ErrBusy) {
			busy = true
			break
		}
		t.must(err)
		if p := server.Peers()[0]; p.InFlightOps > 4 || p.InFlightBytes > int64(2*n) {
			t.Fatalf("in flight: %+v", p)
		}
	}
	if !busy {
		t.Error("the budget was never used up")
	}
	// A write larger than the whole budget is accepted when nothing else is in flight. Callers
	// that wait are served.
	var wg sync.WaitGroup
	for i := range uint64(8) {
		wg.Go(func() {
			for range 5 {
				if err := write(t.ctx, n*(i%4+1), false); err != nil {
					t.Errorf("submit: %v", err)
				}
			}
		})
		// Callers whose context ends leave the queue, which has no other effect.
		wg.Go(func() {
			ctx, cancel := context.WithCancel(t.ctx)
			go cancel()
			if err := write(ctx, n, false); err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("submit: %v", err)
			}
		})
	}
	wg.Wait()
	t.must(src.Close(t.ctx)) // waits for all of them
	t.roundTrip(server, client)
	if ended.Load() != submitted.Load() {
		t.Errorf("%d submitted, %d ended", submitted.Load(), ended.Load())
	}
	if st := server.Stats(); st.InFlightOps != 0 || st.InFlightBytes != 0 {
		t.Errorf("in flight at the end: %+v", st)
	}
}

// floodOps is the number of operations that flood has in flight.
const floodOps = 16

func (t *env) floodBytes() int { return t.scaled(1<<20, 16<<10) }

// flood submits writes until a write is rejected. start is closed when the first write has
// succeeded. wait waits until all writes have ended, and checks their errors.
func (t *env) flood(e, target rdma.Engine, allowed error) (start chan struct{}, wait func()) {
	size := t.floodBytes()
	src, _ := t.random(e, size)
	dst, _ := t.region(target, (floodOps+4)*size)
	places := slotsOf(floodOps+4, uint64(size))
	start = make(chan struct{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	var once sync.Once
	calls := make(map[int]int) // of done, by operation
	one := func() error {
		off := <-places
		mu.Lock()
		id := len(calls)
		calls[id] = 0
		mu.Unlock()
		err := e.Write(t.ctx, rdma.Write{Src: src, Dst: dst.Desc(), DstOffset: off, Len: uint64(size), Done: func(err error) {
			mu.Lock()
			defer mu.Unlock()
			calls[id]++
			if err == nil {
				once.Do(func() { close(start) })
			} else if !errors.Is(err, allowed) {
				t.Errorf("ended with %v", err)
			}
			places <- off
		}})
		if err != nil {
			mu.Lock()
			defer mu.Unlock()
			calls[id]++ // counts the calls of done
		}
		return err
	}
	for range 4 {
		wg.Go(func() {
			for {
				if err := one(); err != nil {
					if !errors.Is(err, allowed) && !errors.Is(err, rdma.ErrNoPeer) {
						t.Errorf("submit: %v", err)
					}
					return
				}
			}
		})
	}
	return start, func() {
		wg.Wait()
		t.must(src.Close(t.ctx)) // every operation with this source has ended
		t.must(e.Close())
		mu.Lock()
		defer mu.Unlock()
		for id, c := range calls {
			if c != 1 {
				t.Errorf("operation %d ended %d times", id, c)
			}
		}
	}
}

// Close ends each operation in flight exactly once.
func testCloseInFlight(t *env) {
	server, client := t.engine(Config{Listen: true, InFlightOps: floodOps}), t.engine(Config{})
	t.connect(client, server)
	expected, _ := t.expect(server, 1, 1, client.Addr().Engine)
	start, wait := t.flood(server, client, rdma.ErrClosed)
	<-start
	t.must(server.Close())
	wait()
	t.wantErr(t.wait(expected), rdma.ErrClosed)
}

// When the peer closes its engine, each operation in flight ends exactly once, and OnPeerDown is
// called.
func testPeerCloses(t *env) {
	down := make(chan error, 1)
	server := t.engine(Config{Listen: true, InFlightOps: floodOps, OnPeerDown: func(_ rdma.EngineID, err error) { down <- err }})
	client := t.engine(Config{})
	t.connect(client, server)
	start, wait := t.flood(server, client, rdma.ErrPeerDied)
	<-start
	t.must(client.Close())
	select {
	case err := <-down:
		t.wantErr(err, rdma.ErrPeerDied)
	case <-t.ctx.Done():
		t.Fatal("OnPeerDown was not called in time")
	}
	if len(server.Peers()) != 0 {
		t.Error("the peer is still there")
	}
	wait()
}

// A source is returned to its owner as soon as its write has ended, with or without an error. The
// case overwrites every source at that moment. If the target counts a write's immediate, the
// target's memory must hold the bytes that were written. This is tested both in sessions that end
// normally and in sessions that are cut off.
func testPoisonedSources(t *env) {
	down := make(chan error, 1)
	server, client := t.engine(Config{Listen: true, OnPeerDown: func(_ rdma.EngineID, why error) { down <- why }}), t.engine(Config{})
	const writes = 16
	size := uint64(t.floodBytes())
	dst, mem := t.region(server, writes*int(size))
	src, source := t.random(client, writes*int(size))
	want := bytes.Clone(source)
	poison := bytes.Repeat([]byte{0xCC}, int(size))
	var landed, failed, counted atomic.Int64
	rounds := t.scaled(24, 4)
	for round := range rounds {
		copy(source, want)
		id := t.connect(client, server)
		// In every fourth round all writes end normally. In the other rounds the session is cut
		// off when some writes have landed.
		cut := int64(round % 4)
		cutNow := make(chan struct{}, writes)
		before := landed.Load()
		var expected []*rdma.Expectation
		var over sync.WaitGroup
		for i := range uint64(writes) {
			lo, hi := i*size, (i+1)*size
			imm := uint32(round*writes) + uint32(i)
			x, err := server.ExpectImm(rdma.Expect{Imm: imm, Count: 1, Done: func(err error) {
				if err != nil {
					return
				}
				counted.Add(1)
				if !bytes.Equal(mem[lo:hi], want[lo:hi]) {
					t.Errorf("round %d: write %d was counted, but its bytes are not the written ones", round, i)
				}
			}})
			t.must(err)
			expected = append(expected, x)
			over.Add(1)
			t.must(client.Write(t.ctx, rdma.Write{Src: src, SrcOffset: lo, Dst: dst.Desc(), DstOffset: lo, Len: size, Imm: rdma.ImmOf(imm), Done: func(err error) {
				copy(source[lo:hi], poison)
				switch {
				case err != nil && !errors.Is(err, rdma.ErrPeerDied):
					t.Errorf("ended with %v", err)
				case err != nil:
					failed.Add(1)
				case landed.Add(1)-before == cut:
					cutNow <- struct{}{}
				}
				over.Done()
			}}))
		}
		if cut > 0 {
			select {
			case <-cutNow:
			case <-t.ctx.Done():
				t.Fatal("nothing landed in time")
			}
			client.Disconnect(id)
		}
		over.Wait()
		client.Disconnect(id)
		select {
		case <-down: // the immediates of all writes that arrived have been counted
		case <-t.ctx.Done():
			t.Fatal("the session did not end in time")
		}
		for _, x := range expected {
			x.Cancel()
		}
	}
	// Writes of a session that is cut off may have landed before: this race is the purpose of the
	// case.
	if n := landed.Load(); n+failed.Load() != int64(rounds*writes) || counted.Load() < n {
		t.Errorf("%d writes of %d landed, %d failed, %d were counted", n, rounds*writes, failed.Load(), counted.Load())
	}
}

// After a session has ended, another can be opened, and old Descs still work.
func testReconnect(t *env) {
	server, client := t.pair()
	src, _ := t.random(server, 1000)
	dst, _ := t.region(client, 1000)
	for range t.scaled(10, 3) {
		t.must(t.write(server, rdma.Write{Src: src, Dst: dst.Desc(), Len: 1000}))
		client.Disconnect(server.Addr().Engine)
		t.wantErr(client.Send(t.ctx, server.Addr().Engine, nil, nil), rdma.ErrNoPeer)
		t.connect(client, server)
		t.roundTrip(client, server)
	}
	client.Disconnect(rdma.EngineID{1})
}

// Methods of a closed engine return ErrClosed, and Close may be called again.
func testAfterClose(t *env) {
	server, client := t.pair()
	src, _ := t.random(client, 100)
	dst, _ := t.region(server, 100)
	win, err := src.Window(0, 10)
	t.must(err)
	t.must(client.Close())
	t.must(client.Close())
	t.wantErr(client.Write(t.ctx, rdma.Write{Src: src, Dst: dst.Desc(), Len: 1}), rdma.ErrClosed)
	t.wantErr(client.Send(t.ctx, server.Addr().Engine, nil, nil), rdma.ErrClosed)
	t.wantErr(client.Recv(1, 1, func(rdma.EngineID, []byte) {}), rdma.ErrClosed)
	_, err = client.Connect(t.ctx, server.Addr(), token)
	t.wantErr(err, rdma.ErrClosed)
	_, err = client.Register(t.memory(1), rdma.RegisterOptions{})
	t.wantErr(err, rdma.ErrClosed)
	_, err = client.ExpectImm(rdma.Expect{Imm: 1, Count: 1})
	t.wantErr(err, rdma.ErrClosed)
	t.must(win.Revoke(t.ctx))
	t.must(src.Close(t.ctx))
}
