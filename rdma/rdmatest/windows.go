package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
)

// A write with an invalid key is refused and counted, with or without payload. The session
// continues, and nothing is written and no immediate is counted.
func testWrongKey(t *env) {
	server, client := t.pair()
	size := t.scaled(5<<20, 30000)
	src, _ := t.random(server, size)
	dst, got := t.region(client, size)
	local, err := client.Register(t.memory(100), rdma.RegisterOptions{Local: true})
	t.must(err)
	win, err := dst.Window(0, 100)
	t.must(err)
	revoked := win.Desc()
	t.must(win.Revoke(t.ctx))
	t.must(win.Revoke(t.ctx))
	forged := t.forged(dst.Desc())
	imm, x := t.expect(client, 1, 1)
	for _, d := range []rdma.Desc{forged, local.Desc(), revoked} {
		for _, n := range []uint64{0, 1, 100, d.Len} {
			t.wantRefused(t.write(server, rdma.Write{Src: src, Dst: d, Len: min(n, d.Len), Imm: rdma.ImmOf(1)}), rdma.ReasonKey)
		}
	}
	t.still(imm)
	x.Cancel()
	if !bytes.Equal(got, make([]byte, len(got))) {
		t.Error("bytes were written")
	}
	st := client.Stats()
	if st.RefusedIn[rdma.ReasonKey] < 12 || st.ImmediatesIn != 0 || server.Stats().WriteFailuresOut != 12 {
		t.Errorf("counters: %+v", st)
	}
	t.roundTrip(server, client)
}

// A Desc that states more memory than the window has gives no further access, because the target
// checks the bounds.
func testBounds(t *env) {
	server, client := t.pair()
	n := uint64(t.scaled(1<<20, 16<<10))
	src, _ := t.random(server, int(3*n))
	mem := t.memory(int(3 * n))
	r, err := client.Register(mem, rdma.RegisterOptions{Local: true})
	t.must(err)
	win, err := r.Window(n, n)
	t.must(err)
	d := t.sent(win.Desc())
	d.Len = 1 << 60
	imm, x := t.expect(client, 1, 1)
	for _, w := range []rdma.Write{
		{DstOffset: n - 9, Len: 10},
		{DstOffset: 1 << 59, Len: 100},
		{Len: n + 1},
		{DstOffset: n + 1, Len: 2 * n},
	} {
		w.Src, w.Dst, w.Imm = src, d, rdma.ImmOf(1)
		t.wantRefused(t.write(server, w), rdma.ReasonBounds)
	}
	overflow := d
	overflow.Base, overflow.Len = ^uint64(0)-10, 5
	t.wantRefused(t.write(server, rdma.Write{Src: src, Dst: overflow, Len: 5}), rdma.ReasonBounds)
	t.wantRefused(t.writePaged(server, rdma.PagedWrite{
		PageLen: 100, Src: src, Dst: d, Imm: rdma.ImmOf(1),
		SrcPages: rdma.Pages{Indices: []uint32{0, 1, 2}, Stride: 100}, DstPages: rdma.Pages{Indices: []uint32{0, 20000, 5}, Stride: 100},
	}), rdma.ReasonBounds)
	t.still(imm)
	x.Cancel()
	if zero := make([]byte, n); !bytes.Equal(mem[:n], zero) || !bytes.Equal(mem[2*n:], zero) {
		t.Error("bytes outside of the window were written")
	}
	t.roundTrip(server, client)
}

// Windows of one region are separate: the key of a window gives no access to another, and each is
// revoked separately.
func testWindow(t *env) {
	server, client := t.pair()
	count := t.scaled(20, 6)
	n := t.scaled(10000, 1000)
	mem := t.memory(n * count)
	r, err := client.Register(mem, rdma.RegisterOptions{Local: true})
	t.must(err)
	src, from := t.random(server, n*count)
	keys := make(map[uint64]bool)
	var wins []rdma.Window
	for i := range count {
		w, err := r.Window(uint64(i*n), uint64(n))
		t.must(err)
		d := w.Desc()
		if keys[d.NICs[0].Key] {
			t.Fatal("two windows with one key")
		}
		keys[d.NICs[0].Key] = true
		if d.Len != uint64(n) || len(w.Bytes()) != n {
			t.Fatalf("window of %d bytes, desc of %d", len(w.Bytes()), d.Len)
		}
		wins = append(wins, w)
	}
	want := make([]byte, len(mem))
	for i, w := range wins {
		if i%2 == 0 {
			t.must(w.Revoke(t.ctx))
			t.wantRefused(t.write(server, rdma.Write{Src: src, Dst: w.Desc(), Len: uint64(n)}), rdma.ReasonKey)
			continue
		}
		t.must(t.write(server, rdma.Write{Src: src, SrcOffset: uint64(i * n), Dst: t.sent(w.Desc()), Len: uint64(n)}))
		copy(want[i*n:(i+1)*n], from[i*n:])
	}
	if !bytes.Equal(mem, want) {
		t.Error("the memory does not match the writes")
	}
	for _, bad := range [][2]uint64{{0, uint64(n*count) + 1}, {uint64(n*count) + 1, 0}, {^uint64(0), 2}, {5, ^uint64(0)}} {
		if _, err := r.Window(bad[0], bad[1]); !errors.Is(err, rdma.ErrRange) {
			t.Errorf("window of %d bytes at %d: %v", bad[1], bad[0], err)
		}
	}
}

// A window that names peers accepts writes of each of them. An engine that has the window's Desc
// but is not named is refused, with and without payload, and its session continues.
func testWindowPeers(t *env) {
	server := t.engine(Config{Listen: true})
	const n = 5000
	dst, mem := t.region(server, n)
	var engines []rdma.Engine
	var ids []rdma.EngineID
	for range 3 {
		e := t.engine(Config{})
		t.connect(e, server)
		engines, ids = append(engines, e), append(ids, e.Addr().Engine)
	}
	win, err := dst.Window(0, n, ids[:2]...)
	t.must(err)
	spans, err := dst.WindowSpans([]rdma.Span{{Offset: 0, Len: 100}, {Offset: 200, Len: 100}}, ids[0])
	t.must(err)
	for _, w := range []struct {
		window rdma.Window
		named  int
		len    uint64
	}{{win, 2, n}, {spans, 1, 100}} {
		for i, e := range engines {
			src, from := t.random(e, n)
			before := bytes.Clone(mem)
			refused := server.Stats().RefusedIn[rdma.ReasonKey]
			counted, x := t.expect(server, 9, 2)
			for _, size := range []uint64{w.len, 0} {
				err := t.write(e, rdma.Write{Src: src, Dst: t.sent(w.window.Desc()), Len: size, Imm: rdma.ImmOf(9)})
				if i < w.named {
					t.must(err)
				} else {
					t.wantRefused(err, rdma.ReasonKey)
				}
			}
			if i < w.named {
				t.must(t.wait(counted)) // a write may end before its immediate is counted
				copy(before, from[:w.len])
			} else {
				t.still(counted)
				x.Cancel()
				refused += 2
			}
			if n := server.Stats().RefusedIn[rdma.ReasonKey]; n != refused || !bytes.Equal(mem, before) {
				t.Errorf("engine %d of a window of %d peers: %d writes refused, want %d; the memory is unchanged: %v", i, w.named, n, refused, bytes.Equal(mem, before))
			}
		}
	}
	for _, e := range engines {
		t.roundTrip(e, server)
	}
}

// A window over spans gives access to each span with one key. If the provider has Info.Spans,
// peers cannot write to the bytes between the spans. They can never write to bytes before the
// first or after the last span.
func testWindowSpans(t *env) {
	server, client := t.pair()
	const page = 512
	mem := t.memory(10 * page)
	r, err := client.Register(mem, rdma.RegisterOptions{Local: true})
	t.must(err)
	src, from := t.random(server, len(mem))
	// The spans are pages 2 and 3 (adjacent), 5 and 7, given out of order.
	w, err := r.WindowSpans([]rdma.Span{{Offset: 7 * page, Len: page}, {Offset: 2 * page, Len: page}, {Offset: 5 * page, Len: page}, {Offset: 3 * page, Len: page}})
	t.must(err)
	d := t.sent(w.Desc())
	if d.Len != 6*page || w.Bytes() != nil {
		t.Fatalf("desc of %d bytes, want pages 2 to 7; Bytes of %d", d.Len, len(w.Bytes()))
	}
	want := make([]byte, len(mem))
	place := func(at, n int) {
		copy(want[2*page+at:2*page+at+n], from)
		t.must(t.write(server, rdma.Write{Src: src, Dst: d, DstOffset: uint64(at), Len: uint64(n)}))
	}
	place(0, 2*page)
	place(3*page+7, 100)
	t.must(t.writePaged(server, rdma.PagedWrite{
		PageLen: page, Src: src, Dst: d, SrcPages: rdma.Pages{Indices: []uint32{4, 6, 1}, Stride: page}, DstPages: rdma.Pages{Indices: []uint32{5, 0, 3}, Stride: page},
	}))
	for src, dst := range map[int]int{4: 7, 6: 2, 1: 5} {
		copy(want[dst*page:(dst+1)*page], from[src*page:])
	}
	if !bytes.Equal(mem, want) {
		t.Error("the memory does not match the writes")
	}
	lie := d
	lie.Len = 1 << 40
	imm, x := t.expect(client, 1, 1)
	refused := func(at, n uint64) {
		t.wantRefused(t.write(server, rdma.Write{Src: src, Dst: lie, DstOffset: at, Len: n, Imm: rdma.ImmOf(1)}), rdma.ReasonBounds)
	}
	refused(6*page-1, 2)
	refused(6*page, page)
	if client.Info().Spans {
		refused(2*page, page)
		refused(2*page-1, 2)
		refused(2*page, 2*page)
		refused(0, 6*page)
		t.wantRefused(t.writePaged(server, rdma.PagedWrite{
			PageLen: page, Src: src, Dst: d, Imm: rdma.ImmOf(1), SrcPages: rdma.Pages{Indices: []uint32{8}, Stride: page}, DstPages: rdma.Pages{Indices: []uint32{4}, Stride: page},
		}), rdma.ReasonBounds)
		// A refused write may have placed its part before the gap.
		for _, closed := range []int{0, 1, 4, 6, 8, 9} {
			if !bytes.Equal(mem[closed*page:(closed+1)*page], make([]byte, page)) {
				t.Errorf("page %d, outside of the spans, was written", closed)
			}
		}
	}
	t.still(imm)
	x.Cancel()
	t.must(w.Revoke(t.ctx))
	t.wantRefused(t.write(server, rdma.Write{Src: src, Dst: d, Len: 10}), rdma.ReasonKey)
	for _, bad := range [][]rdma.Span{nil, {{Offset: 5, Len: 0}}, {{Offset: 0, Len: 1}, {Offset: 10 * page, Len: 1}}, {{Offset: ^uint64(0), Len: 2}}} {
		if _, err := r.WindowSpans(bad); !errors.Is(err, rdma.ErrRange) {
			t.Errorf("window over %v: %v", bad, err)
		}
	}
	t.roundTrip(server, client)
}

// Errors that the caller's engine detects are returned by the call. Nothing is sent, and Done is
// not called.
func testLocalErrors(t *env) {
	server, client := t.pair()
	src, _ := t.random(server, 100)
	foreign, _ := t.random(client, 100)
	dst, _ := t.region(client, 100)
	d := dst.Desc()
	stranger := t.sent(d)
	stranger.Engine[0]++
	nokey := d
	nokey.NICs = nil
	ended, cancel := context.WithCancel(t.ctx)
	cancel()
	for _, c := range []struct {
		name string
		ctx  context.Context
		w    rdma.Write
		want error
	}{
		{"source range", t.ctx, rdma.Write{Src: src, SrcOffset: 50, Dst: d, Len: 51}, rdma.ErrRange},
		{"source offset", t.ctx, rdma.Write{Src: src, SrcOffset: ^uint64(0), Dst: d, Len: 1}, rdma.ErrRange},
		{"destination range", t.ctx, rdma.Write{Src: src, Dst: d, DstOffset: 1, Len: 100}, rdma.ErrRange},
		{"huge length", t.ctx, rdma.Write{Src: src, Dst: d, Len: ^uint64(0)}, rdma.ErrRange},
		{"no source", t.ctx, rdma.Write{Dst: d, Len: 1}, rdma.ErrRange},
		{"foreign source", t.ctx, rdma.Write{Src: foreign, Dst: d, Len: 1}, rdma.ErrForeign},
		{"no peer", t.ctx, rdma.Write{Src: src, Dst: stranger, Len: 1}, rdma.ErrNoPeer},
		{"no key", t.ctx, rdma.Write{Src: src, Dst: nokey, Len: 1}, rdma.ErrMalformed},
		{"ended context", ended, rdma.Write{Src: src, Dst: d, Len: 1}, context.Canceled},
	} {
		c.w.Done = func(error) { t.Errorf("%s: done was called", c.name) }
		if err := server.Write(c.ctx, c.w); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	if _, err := server.Register(nil, rdma.RegisterOptions{}); !errors.Is(err, rdma.ErrRange) {
		t.Errorf("register nothing: %v", err)
	}
	if _, err := server.Register(t.memory(1), rdma.RegisterOptions{Device: "no such device"}); !errors.Is(err, rdma.ErrUnsupported) {
		t.Errorf("register device memory: %v", err)
	}
	t.roundTrip(server, client)
}

// lanes is the number of writes that hammer has in flight. No two of them write to the same bytes.
const lanes = 8

// hammer submits writes to a window without pause until stop is closed. wait waits until all
// writes have ended. It returns the number of writes and the number of refused writes.
func (t *env) hammer(stop chan struct{}, submit func(lane int, done func(error)) error) (wait func() (ended, refused int64)) {
	var wg sync.WaitGroup
	var ended, refused atomic.Int64
	for lane := range lanes {
		wg.Go(func() {
			refusals := 0
			for last := false; !last; {
				// With virtual time, the clock stands still while writes are refused again and
				// again, so the number of refusals is limited.
				if refusals >= t.scaled(1<<30, 3) {
					<-stop
				}
				select {
				case <-stop:
					last = true // one more write, which finds the window revoked
				default:
				}
				f := rdma.NewFlag()
				if err := submit(lane, f.Set); err != nil {
					t.Errorf("submit: %v", err)
					return
				}
				err := f.Wait(t.ctx)
				if errors.Is(err, rdma.ErrRefused) {
					refusals++
					refused.Add(1)
				} else if err != nil {
					t.Errorf("write: %v", err)
					return
				}
				ended.Add(1)
			}
		})
	}
	return func() (int64, int64) {
		wg.Wait()
		return ended.Load(), refused.Load()
	}
}

// revoke is the common part of the revocation cases. It revokes a window while hammer writes to
// the window, and then overwrites the window's bytes. After that, no write may change these bytes
// or count an immediate.
func (t *env) revoke(submit func(lane int, from rdma.Engine, src rdma.Region, d rdma.Desc, done func(error)) error) {
	server, client := t.pair()
	n := uint64(lanes * t.laneBytes())
	mem := t.memory(int(3 * n))
	r, err := client.Register(mem, rdma.RegisterOptions{Local: true})
	t.must(err)
	src, _ := t.random(server, int(n))
	for round := range t.scaled(6, 2) {
		win, err := r.Window(n, n)
		t.must(err)
		d := t.sent(win.Desc())
		stop := make(chan struct{})
		landing, _ := t.expect(client, 1, uint32(1+round))
		wait := t.hammer(stop, func(lane int, done func(error)) error { return submit(lane, server, src, d, done) })
		t.must(t.wait(landing)) // now bytes are being placed
		t.must(win.Revoke(t.ctx))
		counted := client.Stats().ImmediatesIn
		poison := bytes.Repeat([]byte{0xA5}, int(n))
		copy(win.Bytes(), poison)
		t.roundTrip(server, client)
		close(stop)
		ended, refused := wait()
		if refused < lanes || refused == ended {
			t.Fatalf("round %d: %d of %d writes refused", round, refused, ended)
		}
		if !bytes.Equal(win.Bytes(), poison) {
			t.Fatalf("round %d: bytes changed after Revoke had returned", round)
		}
		if now := client.Stats().ImmediatesIn; now != counted {
			t.Fatalf("round %d: %d immediates counted after Revoke had returned", round, now-counted)
		}
		// Discard the immediates that were counted before the revocation and that no expectation
		// has consumed.
		_, left := t.expect(client, 1, 1<<30)
		left.Cancel()
	}
	if zero := make([]byte, n); !bytes.Equal(mem[:n], zero) || !bytes.Equal(mem[2*n:], zero) {
		t.Fatal("bytes outside of the window changed")
	}
}

// laneBytes is the size in bytes of one write of hammer.
func (t *env) laneBytes() int { return t.scaled(512<<10, 8<<10) }

// After Revoke no write touches the window, no matter how many are in flight.
func testRevokeUnderFire(t *env) {
	t.revoke(func(lane int, from rdma.Engine, src rdma.Region, d rdma.Desc, done func(error)) error {
		off, n := uint64(lane*t.laneBytes()), uint64(t.laneBytes())
		return from.Write(t.ctx, rdma.Write{Src: src, SrcOffset: off, Dst: d, DstOffset: off, Len: n, Imm: rdma.ImmOf(1), Done: done})
	})
}

// As testRevokeUnderFire, for paged writes, whose frames have many destinations.
func testRevokePagedUnderFire(t *env) {
	page := uint64(t.scaled(1<<10, 256))
	pages := uint32(t.laneBytes()) / uint32(page)
	var a, b []uint32
	for i := range pages {
		a, b = append(a, i), append(b, (i*7+3)%pages)
	}
	t.revoke(func(lane int, from rdma.Engine, src rdma.Region, d rdma.Desc, done func(error)) error {
		off := uint64(lane * t.laneBytes())
		return from.WritePaged(t.ctx, rdma.PagedWrite{
			PageLen: page, Src: src, Dst: d, Imm: rdma.ImmOf(1), Done: done,
			SrcPages: rdma.Pages{Indices: a, Stride: page, Offset: off}, DstPages: rdma.Pages{Indices: b, Stride: page, Offset: off},
		})
	})
}

// Region.Close revokes the peers' keys, waits for the writes whose source is the region, and
// refuses new writes.
func testRegionClose(t *env) {
	server, client := t.pair()
	size := uint64(t.scaled(1<<20, 16<<10))
	src, _ := t.random(server, int(size))
	dst, _ := t.region(client, int(8*size))
	win, err := dst.Window(0, 100)
	t.must(err)
	var ended atomic.Int64
	for i := range uint64(8) {
		t.must(server.Write(t.ctx, rdma.Write{Src: src, Dst: dst.Desc(), DstOffset: i * size, Len: size, Done: func(error) { ended.Add(1) }}))
	}
	t.must(src.Close(t.ctx))
	t.must(src.Close(t.ctx))
	if n := ended.Load(); n != 8 {
		t.Errorf("%d of 8 writes had ended when their region was closed", n)
	}
	t.wantErr(server.Write(t.ctx, rdma.Write{Src: src, Dst: dst.Desc(), Len: 1}), rdma.ErrClosed)
	other, _ := t.random(server, 100)
	t.must(dst.Close(t.ctx))
	t.wantRefused(t.write(server, rdma.Write{Src: other, Dst: dst.Desc(), Len: 100}), rdma.ReasonKey)
	t.wantRefused(t.write(server, rdma.Write{Src: other, Dst: win.Desc(), Len: 100}), rdma.ReasonKey)
	if _, err := dst.Window(0, 1); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("window of a closed region: %v", err)
	}
	t.roundTrip(server, client)
}

// If the ctx of Close ends while payload is being placed, the region and every window are revoked
// nevertheless: after some time they refuse writes, and a second Close waits for that.
func testRegionCloseGivenUp(t *env) {
	server, client := t.pair()
	// Each window has space for the writes, which may be placed at the same time, and for one more
	// byte, which a later write tests.
	const windows, writes = 8, 2
	n := t.scaled(2<<20, 64<<10)
	room := (writes + 1) * n
	dst, err := client.Register(t.memory((1+windows)*room), rdma.RegisterOptions{})
	t.must(err)
	src, _ := t.random(server, n)
	descs := []rdma.Desc{dst.Desc()}
	for i := range windows {
		w, err := dst.Window(uint64((1+i)*room), uint64(room))
		t.must(err)
		descs = append(descs, w.Desc())
	}
	landing, _ := t.expect(client, 1, 1)
	var ended sync.WaitGroup
	for k := range writes {
		for _, d := range descs {
			ended.Add(1)
			t.must(server.Write(t.ctx, rdma.Write{Src: src, Dst: d, DstOffset: uint64(k * n), Len: uint64(n), Imm: rdma.ImmOf(1), Done: func(error) { ended.Done() }}))
		}
	}
	t.must(t.wait(landing))
	over, cancel := context.WithCancel(t.ctx)
	cancel()
	if err := dst.Close(over); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("close: %v", err)
	}
	for i, d := range descs {
		// A NIC may first have to wait for its peers. The test makes no further call of Close
		// meanwhile.
		t.eventually(fmt.Sprintf("place %d of a region that is closing refuses writes", i), func() bool {
			return errors.Is(t.write(server, rdma.Write{Src: src, Dst: d, DstOffset: uint64(writes * n), Len: 1}), rdma.ErrRefused)
		})
	}
	t.must(dst.Close(t.ctx))
	ended.Wait()
	t.roundTrip(server, client)
}
