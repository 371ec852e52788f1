package domaintest

import (
	"bytes"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// write returns a Work that writes the n bytes of src to the offset off in dst.
func write(src group.Memory, n uint64, dst group.Memory, off uint64) group.Work {
	return group.Work{Op: group.OpWrite, Src: src, Len: n, RemoteAddr: dst.Base() + off, RemoteKey: dst.Key()}
}

// withImm returns w with an immediate.
func withImm(w group.Work, imm uint32) group.Work {
	w.Op, w.Imm = group.OpWriteImm, imm
	return w
}

// A write puts exactly its bytes in place, at any size and alignment. Only the sender
// gets a completion.
func testWrite(t *env) {
	la, lb := t.connect(rdma.ClassKV)
	most := min(t.a.d.Limits().MaxWrite, 3<<20)
	src, sm := t.a.random(int(most) + 100)
	dst, dm := t.b.memory(int(most) + 100)
	want := bytes.Clone(dst)
	for _, n := range []uint64{1, 2, 63, 64, 4095, 4096, most - 1, most} {
		off, at := t.rng.Uint64N(100), t.rng.Uint64N(100)
		w := write(sm, n, dm, at)
		w.SrcOff = off
		la.ok(w)
		copy(want[at:at+n], src[off:])
		t.same("destination", dst, want)
	}
	la.ok(group.Work{Op: group.OpWrite, RemoteAddr: dm.Base(), RemoteKey: dm.Key()}) // an empty write
	t.b.drained()
	if imms := t.b.immediates(lb.cookie); len(imms) != 0 {
		t.Errorf("the target has completions of writes: %+v", imms)
	}
}

// The payload is in place when Poll returns the immediate. The immediate is returned once, with
// its endpoint's cookie.
func testImmediate(t *env) {
	la, lb := t.connect(rdma.ClassKV)
	most := min(t.a.d.Limits().MaxWrite, 1<<20)
	src, sm := t.a.random(int(most))
	dst, dm := t.b.memory(int(most))
	for i := range 40 {
		n := 1 + t.rng.Uint64N(most)
		clear(dst)
		imm := uint32(i) | t.rng.Uint32()<<8
		la.post(withImm(write(sm, n, dm, most-n), imm))
		got := lb.immediatesAfter(i + 1)
		t.same("payload of the immediate", dst[most-n:], src[:n])
		if c := got[i]; len(got) != i+1 || c.Imm != imm || c.Len != n || c.Status != group.StatusOK {
			t.Fatalf("%d immediates, the last %+v; want %d of imm %#x and %d bytes", len(got), c, i+1, imm, n)
		}
		la.finish()
	}
	t.b.drained()
	if n := len(t.b.immediates(lb.cookie)); n != 40 {
		t.Errorf("%d immediates of 40", n)
	}
}

// An immediate needs no payload. Limits.EmptyUnchecked states whether its key is checked.
func testEmpty(t *env) {
	la, lb := t.connect(rdma.ClassKV)
	_, dm := t.b.memory(4096)
	empty := group.Work{Op: group.OpWriteImm, Imm: 1 << 31, RemoteAddr: dm.Base() + 4096, RemoteKey: dm.Key()}
	la.ok(empty)
	if c := lb.immediatesAfter(1)[0]; c.Imm != 1<<31 || c.Len != 0 {
		t.Errorf("immediate %+v", c)
	}
	_, gone := t.b.memory(4096)
	empty.RemoteAddr, empty.RemoteKey = gone.Base(), gone.Key()
	t.b.closeMemory(gone)
	c := la.do(empty)
	t.b.drained()
	count := len(t.b.immediates(lb.cookie))
	if t.b.d.Limits().EmptyUnchecked {
		if c.Status != group.StatusOK || count != 2 {
			t.Errorf("the key of an empty write was checked: status %d, %d immediates", c.Status, count)
		}
	} else if c.Status != group.StatusRefused || count != 1 {
		t.Errorf("the key of an empty write was not checked: status %d, %d immediates", c.Status, count)
	}
}

// An endpoint accepts QueueDepth Works before the first completion is polled. Works that the
// endpoint does not accept can be posted again. The caller may reuse the slice of Works when Post
// returns.
func testQueueDepth(t *env) {
	la, lb := t.connect(rdma.ClassKV)
	depth := t.a.d.Limits().QueueDepth
	_, sm := t.a.random(64)
	_, dm := t.b.memory(64)
	works := make([]group.Work, depth+10)
	fill := func() {
		for i := range works {
			works[i] = withImm(write(sm, 8, dm, uint64(i%8)*8), uint32(i))
			works[i].SrcOff = uint64(i%8) * 8
			works[i].Cookie = t.a.cookie()
		}
	}
	fill()
	release := make(chan struct{})
	entered := make(chan struct{})
	go t.a.onPoller(func() { close(entered); <-release }) // stops the poller
	<-entered
	n, _, err := la.postOnce(works)
	clear(works)
	close(release)
	t.must(err)
	if n < depth {
		t.Errorf("%d Works were taken at once, QueueDepth is %d", n, depth)
	}
	taken := n
	la.finish()
	for range 5 {
		fill()
		taken += la.post(works...)
		clear(works)
	}
	la.finish()
	if want := n + 5*len(works); taken != want {
		t.Errorf("%d Works taken, want %d", taken, want)
	}
	imms := lb.immediatesAfter(taken)
	t.b.drained()
	if all := t.b.immediates(lb.cookie); len(all) != taken {
		t.Errorf("%d immediates of %d writes", len(imms), taken)
	}
	for _, c := range la.posted {
		if o := la.outcome(c); o.Status != group.StatusOK {
			t.Fatalf("a Work ended with status %d (%v)", o.Status, o.Err)
		}
	}
}

// On an Ordered endpoint, immediates are returned in the order posted, after all earlier writes
// are in place. On other endpoints each immediate is returned once.
func testOrder(t *env) {
	la, lb := t.connect(rdma.ClassKV)
	const rounds, n = 300, 2000
	_, sm := t.a.random(n)
	_, dm := t.b.memory(n)
	ordered := t.a.d.Limits().Ordered
	// marks has one byte for each plain write. The write changes the byte, which must be in place
	// when the following immediate arrives.
	marks, mm := t.b.memory(rounds)
	ones, om := t.a.memory(1)
	ones[0] = 1
	for i := range uint32(rounds) {
		la.post(
			write(sm, n/(1+uint64(i)%7), dm, 0),
			write(om, 1, mm, uint64(i)),
			withImm(group.Work{RemoteAddr: dm.Base(), RemoteKey: dm.Key()}, i),
		)
		if i%50 == 49 && ordered {
			got := lb.immediatesAfter(int(i) + 1)
			for k := range i + 1 {
				if got[k].Imm != k {
					t.Fatalf("immediate %d arrived as number %d", got[k].Imm, k)
				}
				if marks[k] != 1 {
					t.Fatalf("immediate %d came before an earlier write was in place", k)
				}
			}
		}
	}
	la.finish()
	seen := make(map[uint32]int)
	for _, c := range lb.immediatesAfter(rounds) {
		seen[c.Imm]++
	}
	t.b.drained()
	if len(seen) != rounds || len(t.b.immediates(lb.cookie)) != rounds {
		t.Errorf("%d different immediates of %d", len(seen), rounds)
	}
}

// A completion of one endpoint is never returned for another endpoint, for any class and
// direction.
func testMany(t *env) {
	const links, rounds = 8, 40
	n := int(min(t.a.d.Limits().MaxWrite, 5000))
	type lane struct {
		from, to *link
		src, dst []byte
		sm, dm   group.Memory
	}
	var lanes []lane
	for i := range links {
		la, lb := t.connect(rdma.Class(i % rdma.Classes))
		for _, l := range [][2]*link{{la, lb}, {lb, la}} {
			x := lane{from: l[0], to: l[1]}
			x.src, x.sm = l[0].n.random(n)
			x.dst, x.dm = l[1].n.memory(n)
			lanes = append(lanes, x)
		}
	}
	ended := make(chan struct{}, len(lanes))
	for i, x := range lanes {
		go func() {
			defer func() { ended <- struct{}{} }()
			for k := range uint32(rounds) {
				if x.from.post(withImm(write(x.sm, uint64(n), x.dm, 0), uint32(i)<<16|k)) != 1 {
					t.Errorf("lane %d broke", i)
				}
			}
		}()
	}
	for range lanes {
		<-ended
	}
	for i, x := range lanes {
		x.from.finish()
		x.to.immediatesAfter(rounds)
		x.to.n.drained()
		got := x.to.n.immediates(x.to.cookie)
		if len(got) != rounds {
			t.Fatalf("lane %d: %d immediates of %d", i, len(got), rounds)
		}
		for _, c := range got {
			if c.Imm>>16 != uint32(i) {
				t.Fatalf("lane %d got immediate %#x", i, c.Imm)
			}
		}
		t.same("lane", x.dst, x.src)
	}
}
