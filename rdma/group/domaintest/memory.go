package domaintest

import (
	"bytes"
	"errors"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Keys are never 0, fit in KeyBits, and differ from each other. Register without memory is an
// error.
func testKeys(t *env) {
	keys := make(map[uint64]bool)
	for range 50 {
		_, m := t.b.memory(4096)
		k := m.Key()
		if k == 0 || keys[k] {
			t.Fatalf("key %#x", k)
		}
		if bits := t.b.d.Limits().KeyBits; bits > 0 && bits < 64 && k>>bits != 0 {
			t.Errorf("key %#x has more than %d bits", k, bits)
		}
		keys[k] = true
	}
	if _, err := t.b.d.Register(nil, rdma.RegisterOptions{}); err == nil {
		t.Error("no memory was registered")
	}
	if _, err := t.b.d.Register(t.alloc(4096), rdma.RegisterOptions{Device: "no such device"}); !errors.Is(err, rdma.ErrUnsupported) {
		t.Errorf("memory of no such device: %v", err)
	}
	local, err := t.b.d.Register(t.alloc(4096), rdma.RegisterOptions{Local: true})
	t.must(err)
	t.must(local.Close())
}

// refusals returns writes that a NIC must refuse, because only dm is accessible.
func (t *env) refusals(dm group.Memory, size uint64) map[string]group.Work {
	key := dm.Key() ^ 1<<3
	return map[string]group.Work{
		"invalid key":      {RemoteAddr: dm.Base(), RemoteKey: key, Len: 10},
		"one byte too far": {RemoteAddr: dm.Base() + size - 9, RemoteKey: dm.Key(), Len: 10},
		"behind the end":   {RemoteAddr: dm.Base() + size + 1<<20, RemoteKey: dm.Key(), Len: 1},
		"before the start": {RemoteAddr: dm.Base() - 1, RemoteKey: dm.Key(), Len: 10},
		"wraps around":     {RemoteAddr: ^uint64(0) - 4, RemoteKey: dm.Key(), Len: 10},
	}
}

// A refused write changes no byte outside the accessible memory, counts no immediate, and ends
// with StatusRefused. If it breaks the endpoint, each end of the connection gets one KindBroken.
func testRefused(t *env) {
	const size = 8192
	dst, dm := t.b.memory(size)
	_, sm := t.a.random(100)
	breaks := t.a.d.Limits().RefusalBreaks
	la, lb := t.connect(rdma.ClassKV)
	for name, w := range t.refusals(dm, size) {
		w.Op, w.Src, w.Imm = group.OpWriteImm, sm, 1
		c := la.do(w)
		if c.Status != group.StatusRefused {
			t.Fatalf("%s: status %d (%v)", name, c.Status, c.Err)
		}
		t.b.drained()
		if n := len(t.b.immediates(lb.cookie)); n != 0 {
			t.Errorf("%s: %d immediates", name, n)
		}
		if breaks {
			t.a.await("the break", func() bool { return t.a.broken[la.cookie] == 1 })
			if n, err := la.ep.Post([]group.Work{{Op: group.OpWriteImm, RemoteAddr: dm.Base(), RemoteKey: dm.Key()}}); err == nil {
				t.Errorf("%s: a broken endpoint took %d Works", name, n)
			}
			la.close()
			lb.close()
			la, lb = t.connect(rdma.ClassKV)
		}
		la.ok(write(sm, 0, dm, 0)) // the endpoint still works
	}
	if !bytes.Equal(dst[:size-9], make([]byte, size-9)) {
		t.Error("bytes were written")
	}
	t.roundTrip()
}

// If a refusal breaks the endpoint, the Works posted after the refused Work are not performed.
// Otherwise they are performed.
func testRefusedInARow(t *env) {
	const size, each = 4096, 16
	dst, dm := t.b.memory(size)
	src, sm := t.a.random(each)
	la, lb := t.connect(rdma.ClassKV)
	depth := t.a.d.Limits().QueueDepth
	count := min(10, depth)
	bad := count / 2
	works := make([]group.Work, count)
	for i := range works {
		works[i] = withImm(write(sm, each, dm, uint64(i)*each), uint32(i))
		works[i].Cookie = t.a.cookie()
		if i == bad {
			works[i].RemoteAddr = dm.Base() + size
		}
	}
	cookies := make([]uint64, count)
	for i, w := range works {
		cookies[i] = w.Cookie
	}
	n, _, err := la.postOnce(works)
	if err == nil && n != count {
		t.Fatalf("%d of %d Works were taken", n, count)
	}
	la.finish()
	t.b.drained()
	counted := make(map[uint32]bool)
	for _, c := range t.b.immediates(lb.cookie) {
		if counted[c.Imm] {
			t.Errorf("immediate %d arrived twice", c.Imm)
		}
		counted[c.Imm] = true
	}
	for i, c := range cookies[:n] {
		o := la.outcome(c)
		placed := bytes.Equal(dst[i*each:(i+1)*each], src)
		untouched := bytes.Equal(dst[i*each:(i+1)*each], make([]byte, each))
		switch {
		case i == bad:
			if o.Status != group.StatusRefused || counted[uint32(i)] {
				t.Errorf("the bad Work ended with status %d, counted: %v", o.Status, counted[uint32(i)])
			}
		case o.Status == group.StatusOK:
			if !placed || !counted[uint32(i)] {
				t.Errorf("Work %d has completed but its bytes are not in place", i)
			}
			if i > bad && t.a.d.Limits().RefusalBreaks {
				t.Errorf("Work %d was performed behind a refused one", i)
			}
		case !t.a.d.Limits().RefusalBreaks:
			t.Errorf("Work %d ended with status %d (%v)", i, o.Status, o.Err)
		case i > bad && (!untouched || counted[uint32(i)]):
			t.Errorf("Work %d, behind a refused one, was performed", i)
		}
	}
}

// Works that arrive after Memory.Close has returned are refused.
func testClosedMemory(t *env) {
	dst, dm := t.b.memory(4096)
	_, sm := t.a.random(100)
	la, lb := t.connect(rdma.ClassKV)
	la.ok(write(sm, 100, dm, 0))
	t.b.closeMemory(dm)
	clear(dst)
	c := la.do(withImm(write(sm, 100, dm, 0), 1))
	if c.Status != group.StatusRefused {
		t.Errorf("closed memory: status %d (%v)", c.Status, c.Err)
	}
	t.b.drained()
	if n := len(t.b.immediates(lb.cookie)); n != 0 {
		t.Errorf("%d immediates", n)
	}
	t.same("closed memory", dst, make([]byte, len(dst)))
}

// fireMax is the largest number of writes of fire. It is reached only if the test did not end fire
// earlier.
const fireMax = 5000

// fire posts writes with immediates on one endpoint, to dst, until a write fails or stop is set.
// wait returns the number of writes that succeeded.
func (l *link) fire(dst group.Memory, size, each uint64, src group.Memory, stop *atomic.Bool) (wait func() int) {
	ended := make(chan int, 1)
	go func() {
		count, at := 0, uint64(0)
		defer func() { ended <- count }()
		for round := 0; !stop.Load(); round++ {
			if round == fireMax {
				l.n.t.Errorf("%s: %d rounds of Works succeeded after their target was cut off", l.n.name, round)
				return
			}
			first := len(l.posted)
			batch := make([]group.Work, 3)
			for i := range batch {
				batch[i] = withImm(write(src, each, dst, at), 1)
				if at += each; at+each > size {
					at = 0
				}
			}
			taken := l.post(batch...)
			l.finish()
			bad := taken < len(batch)
			for _, c := range l.posted[first:] {
				if l.outcome(c).Status == group.StatusOK {
					count++
				} else {
					bad = true
				}
			}
			if bad {
				break
			}
		}
	}()
	return func() int { return <-ended }
}

// If CloseIsFinal is true and Close is called while writes are in flight, no byte changes and no
// immediate is counted after Close.
func testCloseUnderFire(t *env) {
	if !t.b.d.Limits().CloseIsFinal {
		t.Skip("CloseIsFinal is false for this NIC: the engine shuts endpoints instead (shut under fire)")
	}
	const size, each = 1 << 20, 48 << 10
	_, sm := t.a.random(each)
	n := min(uint64(each), t.a.d.Limits().MaxWrite)
	for range 5 {
		dst, dm := t.b.memory(size)
		var stop atomic.Bool
		var waits []func() int
		var targets, all []*link
		for range 3 {
			la, lb := t.connect(rdma.ClassKV)
			waits, targets, all = append(waits, la.fire(dm, size, n, sm, &stop)), append(targets, lb), append(all, la, lb)
		}
		targets[0].immediatesAfter(5)
		t.b.closeMemory(dm)
		t.b.drained()
		before := 0
		for _, l := range targets {
			before += len(t.b.immediates(l.cookie))
		}
		poison := bytes.Repeat([]byte{0xA5}, size)
		copy(dst, poison)
		well := 0
		for _, w := range waits {
			well += w()
		}
		t.roundTrip()
		t.same("closed memory", dst, poison)
		after := 0
		for _, l := range targets {
			after += len(t.b.immediates(l.cookie))
		}
		if after != before {
			t.Fatalf("%d immediates were counted after Close", after-before)
		}
		if well > after {
			t.Errorf("%d Works ended well, %d immediates were counted", well, after)
		}
		for _, l := range all {
			l.close()
		}
	}
}

// A window gives access to its own part only, and closing the window leaves other windows open.
func testWindows(t *env) {
	const size = 64 << 10
	dst, dm := t.b.memory(size)
	if !t.b.d.Limits().Windows {
		t.Skip("needs a NIC with Windows")
	}
	src, sm := t.a.random(1000)
	one, two := t.b.window(dm, 5000, 1000), t.b.window(dm, 6000, 1000)
	if one.Key() == two.Key() || one.Key() == dm.Key() || one.Key() == 0 {
		t.Fatalf("keys %#x and %#x of memory %#x", one.Key(), two.Key(), dm.Key())
	}
	want := bytes.Clone(dst)
	la, lb := t.connect(rdma.ClassKV)
	again := func() {
		if t.a.d.Limits().RefusalBreaks {
			la.close()
			lb.close()
			la, lb = t.connect(rdma.ClassKV)
		}
	}
	la.ok(write(sm, 1000, one, 0))
	copy(want[5000:], src)
	t.same("window", dst, want)
	for name, w := range t.refusals(one, 1000) {
		w.Op, w.Src = group.OpWrite, sm
		if name == "invalid key" {
			continue // the key may belong to another window
		}
		if c := la.do(w); c.Status != group.StatusRefused {
			t.Errorf("%s: status %d (%v)", name, c.Status, c.Err)
		}
		again()
	}
	copy(want[5991:6000], dst[5991:6000]) // a part of a refused write may be in place
	t.same("bytes beside the window", dst, want)
	t.b.closeMemory(one)
	if c := la.do(write(sm, 1000, one, 0)); c.Status != group.StatusRefused {
		t.Errorf("closed window: status %d (%v)", c.Status, c.Err)
	}
	again()
	la.ok(write(sm, 1000, two, 0))
	copy(want[6000:], src)
	t.same("the other window", dst, want)
	for _, bad := range [][2]uint64{{0, size + 1}, {size + 1, 0}, {^uint64(0), 2}, {5, ^uint64(0)}} {
		if _, err := dm.Window(bad[0], bad[1]); err == nil {
			t.Errorf("window of %d bytes at %d", bad[1], bad[0])
		}
	}
}
