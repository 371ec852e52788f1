package rdmatest

import (
	"bytes"
	"errors"

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
