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

// A write puts exactly its bytes in place, at any size and alignment and in both directions. It
// changes no other byte.
func testWrite(t *env) {
	server, client := t.pair()
	for _, dir := range []struct{ from, to rdma.Engine }{{server, client}, {client, server}} {
		for i, n := range t.sizes() {
			src, from := t.random(dir.from, n+77)
			dst, got := t.region(dir.to, n+1000)
			want := bytes.Clone(got)
			copy(want[333:], from[77:])
			imm, _ := t.expect(dir.to, uint32(i), 1, dir.from.Addr().Engine)
			t.must(t.write(dir.from, rdma.Write{Src: src, SrcOffset: 77, Dst: t.sent(dst.Desc()), DstOffset: 333, Len: uint64(n), Imm: rdma.ImmOf(uint32(i))}))
			t.must(t.wait(imm))
			if !bytes.Equal(got, want) {
				t.Fatalf("%d bytes: the memory does not match the write", n)
			}
		}
	}
	if out, in := server.Stats(), client.Stats(); out.WritesOut != in.WritesIn || out.WriteBytesOut < in.WriteBytesIn || in.ImmediatesIn != uint64(len(t.sizes())) {
		t.Errorf("counters disagree: out %+v, in %+v", out, in)
	}
}

// When an immediate has been counted, the payload has been placed.
func testPayloadBeforeImmediate(t *env) {
	server, client := t.pair()
	n, rounds := t.scaled(3<<20+5, 70001), t.scaled(30, 4)
	src, mem := t.random(server, n)
	dst, got := t.region(client, n)
	d := t.sent(dst.Desc())
	for i := range rounds {
		clear(got)
		same := make(chan bool, 1)
		_, err := client.ExpectImm(rdma.Expect{Imm: 9, Count: 1, Done: func(error) { same <- bytes.Equal(got, mem) }})
		t.must(err)
		done := rdma.NewFlag()
		t.must(server.Write(t.ctx, rdma.Write{Src: src, Dst: d, Len: uint64(n), Imm: rdma.ImmOf(9), Done: done.Set}))
		select {
		case ok := <-same:
			if !ok {
				t.Fatalf("round %d: immediate counted before its payload was there", i)
			}
		case <-t.ctx.Done():
			t.Fatal("no immediate")
		}
		t.must(t.wait(done))
	}
	if c := client.Stats().ImmediatesIn; c != uint64(rounds) {
		t.Errorf("%d immediates counted for %d writes", c, rounds)
	}
}

// Immediates that arrive before their expectation count towards it. An expectation consumes
// exactly its count.
func testEarlyImmediate(t *env) {
	server, client := t.pair()
	dst, _ := t.region(client, 10)
	for range 5 {
		t.must(t.write(server, rdma.Write{Dst: dst.Desc(), Imm: rdma.ImmOf(3)}))
	}
	two, _ := t.expect(client, 3, 2)
	t.must(t.wait(two))
	four, _ := t.expect(client, 3, 4)
	t.still(four)
	if _, err := client.ExpectImm(rdma.Expect{Imm: 3, Count: 1}); !errors.Is(err, rdma.ErrExists) {
		t.Fatalf("second expectation of one immediate: %v", err)
	}
	t.must(t.write(server, rdma.Write{Dst: dst.Desc(), Imm: rdma.ImmOf(3)}))
	t.must(t.wait(four))
	none, _ := t.expect(client, 4, 0)
	t.must(t.wait(none))
	one, x := t.expect(client, 3, 1)
	t.still(one)
	x.Cancel()
}

// Only a limited number of a peer's unexpected immediates is kept, and other peers are not
// affected.
func testEarlyBound(t *env) {
	server := t.engine(Config{Listen: true, EarlyImmediates: 8})
	bad, good := t.engine(Config{}), t.engine(Config{})
	t.connect(bad, server)
	t.connect(good, server)
	dst, _ := t.region(server, 10)
	t.must(t.write(good, rdma.Write{Dst: dst.Desc(), Imm: rdma.ImmOf(1000)}))
	for i := range uint32(20) {
		t.must(t.write(bad, rdma.Write{Dst: dst.Desc(), Imm: rdma.ImmOf(i)}))
	}
	// At the client a write may end before the server counts its immediate.
	t.eventually("12 immediates dropped", func() bool { return server.Stats().ImmediatesDropped >= 12 })
	f, _ := t.expect(server, 1000, 1)
	t.must(t.wait(f))
}

// A cancelled expectation ends with ErrCanceled, once, and the immediates counted for it are
// discarded.
func testCancel(t *env) {
	server, client := t.pair()
	dst, _ := t.region(client, 10)
	f, x := t.expect(client, 7, 2)
	t.must(t.write(server, rdma.Write{Dst: dst.Desc(), Imm: rdma.ImmOf(7)}))
	// At the server a write may end before the client counts its immediate.
	t.eventually("the immediate counted", func() bool { return client.Stats().ImmediatesIn >= 1 })
	if !x.Cancel() || x.Cancel() {
		t.Fatal("Cancel must return true exactly once")
	}
	t.wantErr(t.wait(f), rdma.ErrCanceled)
	g, y := t.expect(client, 7, 1)
	t.still(g)
	t.must(t.write(server, rdma.Write{Dst: dst.Desc(), Imm: rdma.ImmOf(7)}))
	t.must(t.wait(g))
	if y.Cancel() {
		t.Fatal("Cancel returned true for an expectation that had ended")
	}
}

// An expectation that names a peer ends with ErrPeerDied when that peer dies, whether the
// expectation or the death comes first. An expectation that names no peer continues.
func testExpectPeerDied(t *env) {
	server, client := t.pair()
	other := t.engine(Config{Listen: true})
	t.connect(client, other)
	id := server.Addr().Engine
	before, _ := t.expect(client, 1, 1, other.Addr().Engine, id)
	unbound, _ := t.expect(client, 2, 1)
	survivor, _ := t.expect(client, 3, 1, other.Addr().Engine)
	t.must(server.Close())
	t.wantErr(t.wait(before), rdma.ErrPeerDied)
	after, _ := t.expect(client, 1, 1, id)
	t.wantErr(t.wait(after), rdma.ErrPeerDied)
	t.still(unbound)
	t.still(survivor)
	dst, _ := t.region(client, 10)
	t.must(t.write(other, rdma.Write{Dst: dst.Desc(), Imm: rdma.ImmOf(2)}))
	t.must(t.wait(unbound))
	t.must(t.write(other, rdma.Write{Dst: dst.Desc(), Imm: rdma.ImmOf(3)}))
	t.must(t.wait(survivor))
}

// A paged write has the same effect as a loop of copies, in any order of its pages.
func testPaged(t *env) {
	server, client := t.pair()
	size := uint64(t.scaled(2<<20, 128<<10))
	src, from := t.random(server, int(size))
	dst, got := t.region(client, int(size))
	want := make([]byte, size)
	for i := range t.scaled(60, 12) {
		pageLen := []uint64{1, 100, 1 << 10, 4 << 10, 60<<10 + 1, 300 << 10}[i%6]
		if pageLen > size/6 {
			pageLen = size / 7
		}
		srcStride, dstStride := pageLen, pageLen+t.rng.Uint64N(100)
		if i%3 == 0 {
			srcStride = pageLen/2 + 1 // source pages may overlap
		}
		srcOff, dstOff := t.rng.Uint64N(50), t.rng.Uint64N(50)
		most := int(min((size-50)/srcStride-2, (size-50)/dstStride-1, uint64(t.scaled(1000, 60))))
		if pageLen > size/8 {
			most = 3
		}
		n := t.rng.IntN(most)
		a, b := t.rng.Perm(most)[:n], t.rng.Perm(most)[:n]
		if i%5 == 0 { // ascending, so that adjacent pages are merged
			for j := range n {
				a[j], b[j] = j, j
			}
		}
		w := rdma.PagedWrite{
			PageLen: pageLen, Src: src, Dst: t.sent(dst.Desc()), Imm: rdma.ImmOf(uint32(i)),
			SrcPages: rdma.Pages{Stride: srcStride, Offset: srcOff}, DstPages: rdma.Pages{Stride: dstStride, Offset: dstOff},
		}
		for j := range n {
			w.SrcPages.Indices = append(w.SrcPages.Indices, uint32(a[j]))
			w.DstPages.Indices = append(w.DstPages.Indices, uint32(b[j]))
			s, d := srcOff+uint64(a[j])*srcStride, dstOff+uint64(b[j])*dstStride
			copy(want[d:d+pageLen], from[s:s+pageLen])
		}
		imm, _ := t.expect(client, uint32(i), 1)
		t.must(t.writePaged(server, w))
		t.must(t.wait(imm))
		if !bytes.Equal(got, want) {
			t.Fatalf("layout %d (%d pages of %d): the memory does not match the write", i, n, pageLen)
		}
	}
}

// Where destination pages overlap, the bytes are those of one of the pages, and the immediate is
// counted only once.
func testPagedOverlap(t *env) {
	if raceEnabled {
		t.Skip("needs a build without the race detector, which reports what this case is about")
	}
	server, client := t.pair()
	const n, pages = 4 << 10, 64
	src, mem := t.region(server, n*pages)
	for i := range mem {
		mem[i] = byte(i/n) + 1
	}
	dst, got := t.region(client, n)
	w := rdma.PagedWrite{PageLen: n, Src: src, Dst: dst.Desc(), Imm: rdma.ImmOf(1), SrcPages: rdma.Pages{Stride: n}, DstPages: rdma.Pages{Stride: n}}
	for i := range uint32(pages) {
		w.SrcPages.Indices = append(w.SrcPages.Indices, i)
		w.DstPages.Indices = append(w.DstPages.Indices, 0)
	}
	imm, _ := t.expect(client, 1, 1)
	t.must(t.writePaged(server, w))
	t.must(t.wait(imm))
	for i, b := range got {
		if b < 1 || b > pages {
			t.Fatalf("byte %d is %d, which no page holds", i, b)
		}
	}
	if c := client.Stats().ImmediatesIn; c != 1 {
		t.Errorf("%d immediates counted", c)
	}
}

// If a page of a paged write is out of range, the write fails before anything is sent.
func testPagedErrors(t *env) {
	server, client := t.pair()
	src, _ := t.random(server, 1000)
	dst, _ := t.region(client, 1000)
	good := func() rdma.PagedWrite {
		return rdma.PagedWrite{
			PageLen: 100, Src: src, Dst: dst.Desc(),
			SrcPages: rdma.Pages{Indices: []uint32{0, 9}, Stride: 100}, DstPages: rdma.Pages{Indices: []uint32{9, 0}, Stride: 100},
			Done: func(error) { t.Error("Done was called for an operation that was not submitted") },
		}
	}
	for name, change := range map[string]func(*rdma.PagedWrite){
		"source page out":      func(w *rdma.PagedWrite) { w.SrcPages.Indices = []uint32{0, 10} },
		"destination page out": func(w *rdma.PagedWrite) { w.DstPages.Indices = []uint32{0, 10} },
		"counts differ":        func(w *rdma.PagedWrite) { w.DstPages.Indices = []uint32{0} },
		"offset overflows":     func(w *rdma.PagedWrite) { w.SrcPages.Offset = ^uint64(0) },
		"stride overflows":     func(w *rdma.PagedWrite) { w.DstPages.Stride = ^uint64(0) },
		"length overflows":     func(w *rdma.PagedWrite) { w.PageLen = ^uint64(0) },
		"too many pages": func(w *rdma.PagedWrite) {
			w.SrcPages.Indices = make([]uint32, rdma.MaxPages+1)
			w.DstPages = w.SrcPages
		},
		"pages without a source": func(w *rdma.PagedWrite) { w.Src = nil },
	} {
		w := good()
		change(&w)
		if err := server.WritePaged(t.ctx, w); !errors.Is(err, rdma.ErrRange) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := server.Stats().InFlightOps; n != 0 {
		t.Errorf("%d operations in flight", n)
	}
	t.roundTrip(server, client)
}

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

// A peer without the token cannot open a session, and the failure is counted.
func testWrongToken(t *env) {
	server, client := t.engine(Config{Listen: true}), t.engine(Config{})
	for range 3 {
		_, err := client.Connect(t.ctx, server.Addr(), rdma.Token("another token of good length"))
		t.wantErr(err, rdma.ErrAuth)
	}
	if _, err := client.Connect(t.ctx, server.Addr(), nil); err == nil {
		t.Error("connected without a token")
	}
	if len(server.Peers()) != 0 || len(client.Peers()) != 0 {
		t.Error("there is a session")
	}
	// The refused peer may receive the answer before the failure is counted.
	t.eventually("3 failures counted", func() bool { return server.Stats().AuthFailures >= 3 })
	t.connect(client, server)
	t.roundTrip(client, server)
}

// Connect fails for an ID that no engine has, and for an address without NICs.
func testWrongEngine(t *env) {
	server, client := t.engine(Config{Listen: true}), t.engine(Config{})
	a := server.Addr()
	a.Engine[3]++
	_, err := client.Connect(t.ctx, a, token)
	t.wantErr(err, rdma.ErrNoPeer)
	_, err = server.Connect(t.ctx, client.Addr(), token)
	t.wantErr(err, rdma.ErrNoPeer)
	_, err = server.Connect(t.ctx, server.Addr(), token)
	t.wantErr(err, rdma.ErrNoPeer)
	a.Engine = rdma.EngineID{} // any engine at this address
	id, err := client.Connect(t.ctx, a, token)
	t.must(err)
	if id != server.Addr().Engine {
		t.Errorf("connected to %v", id)
	}
}

// keepsSession checks that a second Connect, to an address without an engine ID, does not end the
// session.
func (t *env) keepsSession(client rdma.Engine, to rdma.Addr) {
	t.Helper()
	ends := make(chan error, 1)
	x, err := client.ExpectImm(rdma.Expect{Imm: 1, Count: 1, From: []rdma.EngineID{to.Engine}, Done: func(err error) { ends <- err }})
	t.must(err)
	_, err = client.Connect(t.ctx, rdma.Addr{NICs: to.NICs}, token)
	t.must(err)
	x.Cancel()
	t.wantErr(<-ends, rdma.ErrCanceled)
}

// Repeated and concurrent calls of Connect open one session, even if the address has no engine ID.
// Both engines list the session.
func testConnect(t *env) {
	server, client := t.engine(Config{Listen: true}), t.engine(Config{})
	var wg sync.WaitGroup
	for i := range 8 {
		to := server.Addr()
		if i%2 == 0 {
			to.Engine = rdma.EngineID{}
		}
		wg.Go(func() {
			if _, err := client.Connect(t.ctx, to, token); err != nil {
				t.Errorf("connect: %v", err)
			}
		})
	}
	wg.Wait()
	s, c := server.Peers(), client.Peers()
	if len(s) != 1 || len(c) != 1 || s[0].ID != client.Addr().Engine || c[0].ID != server.Addr().Engine || s[0].Dialed || !c[0].Dialed {
		t.Fatalf("peers of the server %+v, of the client %+v", s, c)
	}
	t.keepsSession(client, server.Addr())
	ctx, cancel := context.WithCancel(t.ctx)
	cancel()
	third := t.engine(Config{})
	if _, err := third.Connect(ctx, server.Addr(), token); !errors.Is(err, context.Canceled) {
		t.Errorf("connect with an ended context: %v", err)
	}
	// Both engines listen, and they connect to each other at the same time.
	a, b := t.engine(Config{Listen: true}), t.engine(Config{Listen: true})
	wg.Go(func() { t.connect(a, b) })
	wg.Go(func() { t.connect(b, a) })
	wg.Wait()
	t.roundTrip(a, b)
	t.roundTrip(b, a)
}

// Messages arrive complete, each in a separate buffer, and buffers are reused.
func testMessages(t *env) {
	server, client := t.pair()
	count := t.scaled(500, 60)
	got := make(chan string, count)
	t.must(server.Recv(4, 1000, func(from rdma.EngineID, msg []byte) {
		if from != client.Addr().Engine {
			t.Errorf("message from %v", from)
		}
		got <- string(msg)
	}))
	t.wantErr(server.Recv(1, 1, func(rdma.EngineID, []byte) {}), rdma.ErrExists)
	want := make(map[string]bool)
	for i := range count {
		msg := bytes.Repeat(fmt.Append(nil, i, " "), 1+i%200)
		msg = msg[:min(len(msg), 1000)]
		if i == 0 {
			msg = nil
		}
		want[string(msg)] = true
		for {
			f := rdma.NewFlag()
			t.must(client.Send(t.ctx, server.Addr().Engine, msg, f.Set))
			clear(msg) // Send has copied it
			err := t.wait(f)
			if err == nil {
				break
			}
			t.wantRefused(err, rdma.ReasonNoBuffer)
			msg = []byte(mustOne(want, got))
		}
		select {
		case m := <-got:
			if !want[m] {
				t.Fatalf("message %d arrived as %.40q", i, m)
			}
			delete(want, m)
		case <-t.ctx.Done():
			t.Fatal("no message")
		}
	}
}

// mustOne returns the message in want; the case has ensured that only one is left.
func mustOne(want map[string]bool, _ chan string) string {
	for m := range want {
		return m
	}
	return ""
}

// A message that fits no free buffer is refused, and the session continues.
func testMessagesRefused(t *env) {
	server, client := t.pair()
	id := server.Addr().Engine
	send := func(n int) error {
		f := rdma.NewFlag()
		t.must(client.Send(t.ctx, id, make([]byte, n), f.Set))
		return t.wait(f)
	}
	t.wantRefused(send(10), rdma.ReasonNoBuffer)
	release, entered := make(chan struct{}), make(chan struct{}, 10)
	t.must(server.Recv(2, 1000, func(rdma.EngineID, []byte) {
		entered <- struct{}{}
		<-release
	}))
	t.wantRefused(send(1001), rdma.ReasonTooLarge)
	t.must(send(1000))
	<-entered
	t.must(send(1))
	t.wantRefused(send(1), rdma.ReasonNoBuffer)
	close(release)
	<-entered
	t.wantErr(client.Send(t.ctx, rdma.EngineID{1}, []byte("x"), nil), rdma.ErrNoPeer)
	t.wantErr(client.Send(t.ctx, id, make([]byte, 10<<20), nil), rdma.ErrRange)
	t.roundTrip(client, server)
	if st := server.Stats(); st.RefusedIn[rdma.ReasonNoBuffer] != 2 || st.RefusedIn[rdma.ReasonTooLarge] != 1 {
		t.Errorf("counters: %+v", st)
	}
}

// A message does not wait for all writes that were submitted before it: it arrives when at most
// half of these writes have been placed. A round is inconclusive if the writes ended before the
// message was sent, or if the handler ran late. So the case repeats rounds until one succeeds.
func testMessagePassesBulk(t *env) {
	const writes, size, rounds = 64, 512 << 10, 200
	if t.p.Quick {
		return // too few bytes are submitted for a message to wait
	}
	server, client := t.pair()
	dst, _ := t.region(server, writes*size)
	src, _ := t.random(client, size)
	inPlace := make(chan uint64, 1)
	t.must(server.Recv(4, 100, func(rdma.EngineID, []byte) { inPlace <- server.Stats().ImmediatesIn }))
	least := uint64(writes)
	for range rounds {
		before := server.Stats().ImmediatesIn
		all, _ := t.expect(server, 1, writes)
		for i := range uint64(writes) {
			t.must(client.Write(t.ctx, rdma.Write{Src: src, Dst: dst.Desc(), DstOffset: i * size, Len: size, Imm: rdma.ImmOf(1)}))
		}
		t.must(client.Send(t.ctx, server.Addr().Engine, []byte("passes"), nil))
		select {
		case n := <-inPlace:
			least = min(least, n-before)
		case <-t.ctx.Done():
			t.Fatal("no message")
		}
		t.must(t.wait(all))
		if least <= writes/2 {
			return
		}
	}
	t.Errorf("in %d rounds the message never arrived before %d of %d writes were in place", rounds, least, writes)
}

// Scatter sends each slice to its destination and counts one immediate at each destination.
// Barrier counts an immediate without payload. If one destination refuses its write, the whole
// operation fails, but the other writes end normally.
func testScatter(t *env) {
	server := t.engine(Config{Listen: true})
	src, mem := t.random(server, 3000)
	var dsts []rdma.ScatterDst
	var descs []rdma.Desc
	var bufs [][]byte
	var flags []*rdma.Flag
	for i := range uint64(3) {
		c := t.engine(Config{})
		t.connect(c, server)
		r, buf := t.region(c, 1000)
		d := t.sent(r.Desc())
		bufs, descs = append(bufs, buf), append(descs, d)
		dsts = append(dsts, rdma.ScatterDst{SrcOffset: i * 1000, Dst: d, Len: 1000})
		f, _ := t.expect(c, 5, 1)
		g, _ := t.expect(c, 6, 1)
		flags = append(flags, f, g)
	}
	done := rdma.NewFlag()
	t.must(server.Scatter(t.ctx, rdma.Scatter{Src: src, Dsts: dsts, Imm: rdma.ImmOf(5), Done: done.Set}))
	t.must(t.wait(done))
	done = rdma.NewFlag()
	t.must(server.Barrier(t.ctx, rdma.Barrier{Imm: 6, Dsts: descs, Done: done.Set}))
	t.must(t.wait(done))
	for _, f := range flags {
		t.must(t.wait(f))
	}
	for i, b := range bufs {
		if !bytes.Equal(b, mem[i*1000:(i+1)*1000]) {
			t.Errorf("destination %d has wrong bytes", i)
		}
	}
	dsts[1].Dst = t.forged(dsts[1].Dst)
	done = rdma.NewFlag()
	t.must(server.Scatter(t.ctx, rdma.Scatter{Src: src, Dsts: dsts, Done: done.Set}))
	t.wantErr(t.wait(done), rdma.ErrRefused)
	t.wantErr(server.Scatter(t.ctx, rdma.Scatter{Src: src}), rdma.ErrRange)
	dsts[2].Len = 5000
	t.wantErr(server.Scatter(t.ctx, rdma.Scatter{Src: src, Dsts: dsts}), rdma.ErrRange)
}

// Each of many concurrent peers gets its own bytes.
func testManyPeers(t *env) {
	server := t.engine(Config{Listen: true})
	peers, rounds, n := uint64(t.scaled(24, 4)), uint32(t.scaled(10, 3)), uint64(t.scaled(200<<10, 5000))
	src, mem := t.random(server, int(n+peers))
	var wg sync.WaitGroup
	for i := range peers {
		c := t.engine(Config{})
		r, got := t.region(c, int(n))
		wg.Go(func() {
			if _, err := c.Connect(t.ctx, server.Addr(), token); err != nil {
				t.Errorf("connect: %v", err)
				return
			}
			for k := range rounds {
				clear(got)
				f := rdma.NewFlag()
				if _, err := c.ExpectImm(rdma.Expect{Imm: k, Count: 1, From: []rdma.EngineID{server.Addr().Engine}, Done: f.Set}); err != nil {
					t.Error(err)
					return
				}
				if err := server.Write(t.ctx, rdma.Write{Src: src, SrcOffset: i, Dst: r.Desc(), Len: n, Imm: rdma.ImmOf(k)}); err != nil {
					t.Error(err)
					return
				}
				if err := f.Wait(t.ctx); err != nil {
					t.Error(err)
					return
				}
				if !bytes.Equal(got, mem[i:i+n]) {
					t.Errorf("peer %d, round %d: wrong bytes", i, k)
				}
			}
		})
	}
	wg.Wait()
	if n := len(server.Peers()); n != int(peers) {
		t.Errorf("%d peers", n)
	}
}

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
