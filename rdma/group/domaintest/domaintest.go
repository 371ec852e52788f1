package domaintest

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Pair is two NICs that reach each other. Each case opens a new pair and closes it.
type Pair struct {
	A, B group.Domain
	// Alloc, if set, returns memory that both NICs can register and that stays valid until t has
	// ended. Default: the Go heap.
	Alloc func(t testing.TB, bytes int) []byte
	// KillB, if set, makes B fail as a NIC does that is removed from its bus.
	KillB func()
}

// Factory opens two NICs.
type Factory func(t testing.TB) Pair

// Case is one promise.
type Case struct {
	Name string
	run  func(*env)
}

// caseTimeout bounds each case. A case that takes longer is assumed to hang.
const caseTimeout = 60 * time.Second

// Cases returns all cases, for callers that do not use Run.
func Cases() []Case {
	return []Case{
		{"limits", testLimits},
		{"memory and keys", testKeys},
		{"write", testWrite},
		{"write with immediate", testImmediate},
		{"immediate alone", testEmpty},
		{"messages", testMessages},
		{"message without a buffer", testNoBuffer},
		{"queue depth", testQueueDepth},
		{"order of immediates", testOrder},
		{"many endpoints, both ways", testMany},
		{"refused", testRefused},
		{"refused in a row", testRefusedInARow},
		{"closed memory", testClosedMemory},
		{"close under fire", testCloseUnderFire},
		{"windows", testWindows},
		{"shut under fire", testShutUnderFire},
		{"shut by the sender", testShutBySender},
		{"shut early and twice", testShutEarly},
		{"completions that arrived before are polled", testShutDrains},
		{"peer's endpoint is gone", testPeerGone},
		{"endpoint closed", testEndpointClosed},
		{"addresses from outside", testForeignAddresses},
		{"wake", testWake},
		{"death", testDeath},
	}
}

// Run runs every case against the NICs of a provider.
func Run(t *testing.T, open Factory) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) {
			testkit.VerifyNone(t)
			c.Run(t, open)
		})
	}
}

// Run runs one case.
func (c Case) Run(t *testing.T, open Factory) {
	ctx, cancel := context.WithTimeout(t.Context(), caseTimeout)
	defer cancel()
	e := &env{T: t, ctx: ctx, rng: rand.New(rand.NewPCG(1, 2))}
	e.pair = open(t)
	e.a, e.b = newNIC(e, "a", e.pair.A), newNIC(e, "b", e.pair.B)
	defer e.b.close() // also where the end of A fails
	defer e.a.close()
	c.run(e)
}

// write is a Work that writes all of src to off in dst.
func write(src group.Memory, n uint64, dst group.Memory, off uint64) group.Work {
	return group.Work{Op: group.OpWrite, Src: src, Len: n, RemoteAddr: dst.Base() + off, RemoteKey: dst.Key()}
}

// withImm adds an immediate to w.
func withImm(w group.Work, imm uint32) group.Work {
	w.Op, w.Imm = group.OpWriteImm, imm
	return w
}

// same fails the case unless the bytes are equal.
func (t *env) same(what string, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		i := 0
		for got[i] == want[i] {
			i++
		}
		t.Fatalf("%s: byte %d is %#x, want %#x", what, i, got[i], want[i])
	}
}

// roundTrip writes over a new connection in both directions. It takes long enough that packets
// sent before it have arrived.
func (t *env) roundTrip() {
	t.Helper()
	la, lb := t.connect(rdma.ClassKV)
	for _, l := range [][2]*link{{la, lb}, {lb, la}} {
		src, sm := l[0].n.random(3000)
		dst, dm := l[1].n.memory(3000)
		for i := range uint32(20) {
			l[0].ok(withImm(write(sm, 3000, dm, 0), i))
		}
		if imms := l[1].immediatesAfter(20); len(imms) != 20 {
			t.Fatalf("%d immediates of 20 writes", len(imms))
		}
		t.same("round trip", dst, src)
	}
	la.close()
	lb.close()
}

// Limits are constant and leave room to work.
func testLimits(t *env) {
	for _, n := range []*nic{t.a, t.b} {
		l := n.d.Limits()
		if l != n.d.Limits() {
			t.Error("limits change")
		}
		if n.d.Name() == "" {
			t.Error("a NIC without a name")
		}
		if l.MaxWrite < 4096 || l.MaxMessage < 256 || l.QueueDepth < 1 || l.KeyBits < 0 || l.KeyBits > 64 {
			t.Errorf("limits: %+v", l)
		}
	}
	t.roundTrip()
}

// Keys are never 0, fit in KeyBits, and differ. Registering no memory is an error.
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

// The payload is in place when Poll returns its immediate. The immediate comes once, with its
// endpoint's cookie.
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

// Messages arrive whole, each in one of the buffers lent, from any endpoint.
func testMessages(t *env) {
	maxMessage := t.a.d.Limits().MaxMessage
	maxMessage = min(maxMessage, 16<<10)
	const slots, count = 4, 60
	space, rm := t.b.memory(slots * maxMessage)
	buf := func(slot uint32) []byte { return space[int(slot)*maxMessage : (int(slot)+1)*maxMessage] }
	for s := range uint32(slots) {
		t.b.lend(s, rm, buf(s))
	}
	var las, lbs []*link
	for range 3 {
		la, lb := t.connect(rdma.ClassKV)
		las, lbs = append(las, la), append(lbs, lb)
	}
	src, sm := t.a.random(maxMessage)
	for i := range count {
		n, l := t.rng.IntN(maxMessage+1), i%len(las)
		if i == 0 {
			n = maxMessage
		}
		w := group.Work{Op: group.OpSend, SrcOff: uint64(maxMessage - n), Len: uint64(n)}
		if n > 0 {
			w.Src = sm
		}
		las[l].ok(w)
		t.b.await("the message", func() bool { return len(t.b.messages) > i })
		t.b.mu.Lock()
		c := t.b.messages[i]
		t.b.mu.Unlock()
		if c.Cookie != lbs[l].cookie || c.Len != uint64(n) || c.Slot >= slots {
			t.Fatalf("message %d of %d bytes arrived as %+v", i, n, c)
		}
		t.same("message", buf(c.Slot)[:n], src[maxMessage-n:])
		t.b.lend(c.Slot, rm, buf(c.Slot))
	}
}

// A message for which the receiver has no buffer ends with StatusNoBuffer. If that does
// not break the endpoint, the next message is delivered.
func testNoBuffer(t *env) {
	la, lb := t.connect(rdma.ClassKV)
	_, sm := t.a.random(1000)
	c := la.do(group.Work{Op: group.OpSend, Src: sm, Len: 100})
	if c.Status != group.StatusNoBuffer {
		t.Fatalf("without a buffer: status %d (%v)", c.Status, c.Err)
	}
	space, rm := t.b.memory(1000)
	t.b.lend(7, rm, space[:500])
	if t.a.d.Limits().RefusalBreaks {
		t.a.await("the break", func() bool { return t.a.broken[la.cookie] == 1 })
		la.close()
		lb.close()
		la, _ = t.connect(rdma.ClassKV)
	}
	la.ok(group.Work{Op: group.OpSend, Src: sm, Len: 100})
	t.b.await("the message", func() bool { return len(t.b.messages) == 1 })
	if c := t.b.messages[0]; c.Slot != 7 || c.Len != 100 {
		t.Errorf("message %+v", c)
	}
	t.b.lend(8, rm, space[500:600])
	if c := la.do(group.Work{Op: group.OpSend, Src: sm, Len: 101}); c.Status != group.StatusNoBuffer {
		t.Errorf("too small a buffer: status %d (%v)", c.Status, c.Err)
	}
}

// An endpoint accepts QueueDepth Works before the first completion is polled. Works that it
// does not accept can be posted again. The caller may reuse the slice of Works when Post
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

// On an Ordered endpoint immediates come in the order posted, after all earlier writes are in
// place. On other endpoints each immediate comes once.
func testOrder(t *env) {
	la, lb := t.connect(rdma.ClassKV)
	const rounds, n = 300, 2000
	_, sm := t.a.random(n)
	_, dm := t.b.memory(n)
	ordered := t.a.d.Limits().Ordered
	// marks holds one byte for each plain write, different from the initial value. It must be in
	// place when the following immediate arrives.
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

// Completions of one endpoint never appear at another, for any class and direction.
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

// refusals returns writes that a NIC must refuse; only dm is accessible.
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

// A write that a NIC refuses changes no byte outside the accessible memory, counts no immediate
// and ends with StatusRefused. If it breaks the endpoint, each side gets one KindBroken.
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
// Otherwise they are.
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

// Once Memory.Close has returned, Works that arrive later are refused.
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

// fireMax ends a fire that the other side should have ended.
const fireMax = 5000

// fire posts writes with immediates of one endpoint to dst until one fails or stop is
// set. wait returns how many succeeded.
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

// If CloseIsFinal, no byte changes and no immediate is counted after Close, while writes are in
// flight.
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

// A window gives access to its part only, and closing it leaves other windows open.
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

// After Shut no write of the peer changes memory or is counted, while writes are in flight, and
// each Work of the peer completes.
func testShutUnderFire(t *env) {
	const size, each = 1 << 20, 48 << 10
	_, sm := t.a.random(each)
	n := min(uint64(each), t.a.d.Limits().MaxWrite)
	dst, dm := t.b.memory(size)
	for range 8 {
		la, lb := t.connect(rdma.ClassKV)
		var stop atomic.Bool
		wait := la.fire(dm, size, n, sm, &stop)
		lb.immediatesAfter(5)
		lb.ep.Shut()
		poison := bytes.Repeat([]byte{0xA5}, size)
		copy(dst, poison)
		t.b.drained()
		before := len(t.b.immediates(lb.cookie))
		well := wait()
		t.roundTrip()
		t.same("memory behind a shut endpoint", dst, poison)
		after := len(t.b.immediates(lb.cookie))
		if after != before {
			t.Fatalf("%d immediates were counted after Shut", after-before)
		}
		if well > after {
			t.Errorf("%d Works ended well, %d immediates were counted", well, after)
		}
		la.close()
		lb.close()
	}
}

// After the sender's Shut each of its Works has one completion, and the completion's status is
// correct.
func testShutBySender(t *env) {
	const each, count = 64, 50
	src, sm := t.a.random(each)
	dst, dm := t.b.memory(each * count)
	for range 10 {
		clear(dst)
		la, lb := t.connect(rdma.ClassKV)
		works := make([]group.Work, count)
		for i := range works {
			works[i] = withImm(write(sm, each, dm, uint64(i)*each), uint32(i))
			works[i].Cookie = t.a.cookie()
		}
		cookies := make([]uint64, count)
		for i, w := range works {
			cookies[i] = w.Cookie
		}
		n, _, err := la.postOnce(works)
		t.must(err)
		la.ep.Shut()
		la.finish()
		lb.ep.Shut()
		t.b.drained()
		counted := make(map[uint32]int)
		for _, c := range t.b.immediates(lb.cookie) {
			counted[c.Imm]++
		}
		for i, c := range cookies[:n] {
			o := la.outcome(c)
			there := counted[uint32(i)]
			if o.Status != group.StatusOK && o.Status != group.StatusBroken {
				t.Errorf("Work %d ended with status %d (%v)", i, o.Status, o.Err)
			}
			if there > 1 || (o.Status == group.StatusOK && there != 1) {
				t.Errorf("Work %d ended with status %d, its immediate arrived %d times", i, o.Status, there)
			}
			if there == 1 && !bytes.Equal(dst[i*each:(i+1)*each], src) {
				t.Errorf("Work %d was counted but its bytes are not in place", i)
			}
		}
		if t.a.d.Limits().Ordered {
			for i := range uint32(len(counted)) {
				if counted[i] != 1 {
					t.Errorf("immediate %d is missing below the %d that arrived", i, len(counted))
				}
			}
		}
		la.close()
		lb.close()
	}
}

// An endpoint may be shut before it is connected, and twice.
func testShutEarly(t *env) {
	l := t.a.endpoint(rdma.ClassKV)
	l.ep.Shut()
	l.ep.Shut()
	l.close()
	la, lb := t.connect(rdma.ClassKV)
	la.ep.Shut()
	la.ep.Shut()
	lb.ep.Shut()
	la.close()
	lb.close()
	t.roundTrip()
}

// Immediates and messages that arrived before Shut are polled after it.
func testShutDrains(t *env) {
	const count = 10
	space, rm := t.b.memory(count * 64)
	for i := range uint32(count) {
		t.b.lend(i, rm, space[i*64:(i+1)*64])
	}
	_, sm := t.a.random(64)
	_, dm := t.b.memory(64)
	la, lb := t.connect(rdma.ClassKV)
	release, entered := make(chan struct{}), make(chan struct{})
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		t.b.onPoller(func() {
			close(entered)
			select {
			case <-release: // stops the poller
			case <-t.ctx.Done():
			}
		})
	}()
	<-entered
	// A NIC implemented in software may need its poller to receive. Then nothing has arrived,
	// which is correct too.
	la.post(withImm(write(sm, 64, dm, 0), 5))
	la.post(group.Work{Op: group.OpSend, Src: sm, Len: 64})
	arrived := make(chan int, 1)
	go func() {
		settled, cancel := context.WithTimeout(t.ctx, 50*time.Millisecond)
		defer cancel()
		<-settled.Done()
		well := 0
		for _, c := range la.posted {
			t.a.mu.Lock()
			if o, ok := t.a.done[c]; ok && o.Status == group.StatusOK {
				well++
			}
			t.a.mu.Unlock()
		}
		arrived <- well
	}()
	well := <-arrived
	lb.ep.Shut()
	close(release)
	<-returned
	t.b.drained()
	t.b.mu.Lock()
	got := len(t.b.imms[lb.cookie]) + len(t.b.messages)
	t.b.mu.Unlock()
	if got < well {
		t.Errorf("%d Works ended well before Shut, %d were polled after it", well, got)
	}
}

// Works to an endpoint that is gone end with StatusBroken, and the local endpoint breaks.
func testPeerGone(t *env) {
	_, sm := t.a.random(64)
	_, dm := t.b.memory(64)
	la, lb := t.connect(rdma.ClassKV)
	la.ok(write(sm, 64, dm, 0))
	lb.close()
	if la.post(write(sm, 64, dm, 0)) == 1 {
		la.finish()
		if o := la.outcome(la.posted[1]); o.Status != group.StatusBroken {
			t.Errorf("a Work to nowhere ended with status %d (%v)", o.Status, o.Err)
		}
		t.a.await("the break", func() bool { return t.a.broken[la.cookie] == 1 })
	}
	if n, err := la.ep.Post([]group.Work{{Cookie: 1, Op: group.OpWrite, RemoteAddr: dm.Base(), RemoteKey: dm.Key()}}); err == nil {
		t.Errorf("a broken endpoint took %d Works", n)
	}
	t.roundTrip()
}

// No completion names an endpoint after its Close. Other endpoints still work.
func testEndpointClosed(t *env) {
	_, sm := t.a.random(64)
	_, dm := t.b.memory(64)
	for range 20 {
		la, lb := t.connect(rdma.ClassKV)
		for range 5 {
			la.post(withImm(write(sm, 64, dm, 0), 1))
			lb.post(group.Work{Op: group.OpSend})
		}
		la.close()
		lb.close()
	}
	t.roundTrip()
	t.a.drained()
	t.b.drained()
}

// An address is constant and short. An invalid address is an error.
func testForeignAddresses(t *env) {
	l := t.a.endpoint(rdma.ClassKV)
	local := l.ep.Local()
	if len(local) > group.MaxEndpointAddr || !bytes.Equal(local, l.ep.Local()) {
		t.Errorf("address of %d bytes", len(local))
	}
	for i, bad := range [][]byte{nil, {}, {1}, local[:len(local)-1], append(bytes.Clone(local), 0), make([]byte, group.MaxEndpointAddr), bytes.Repeat([]byte{0xFF}, len(local))} {
		x := t.a.endpoint(rdma.ClassKV)
		if err := x.ep.Connect(bad); err == nil && i < 6 {
			t.Errorf("connected to address %d, of %d bytes", i, len(bad))
		}
		x.close()
	}
	t.roundTrip()
}

// Wake ends the current Wait, or the next.
func testWake(t *env) {
	for range 200 {
		t.a.onPoller(func() {}) // wakes the poller
	}
	t.a.onPoller(func() {
		t.a.d.Wake()
		t.a.d.Wait() // returns because it was woken before
	})
	if t.ctx.Err() != nil {
		t.Fatal("Wait did not return")
	}
	t.roundTrip()
}

// A NIC that dies returns the completions that had arrived, then an error. Works of other NICs
// to it end, and no memory changes afterwards.
func testDeath(t *env) {
	if t.pair.KillB == nil {
		t.Skip("needs a provider that can kill a NIC (Pair.KillB)")
	}
	const size, each = 1 << 20, 16 << 10
	_, sm := t.a.random(each)
	n := min(uint64(each), t.a.d.Limits().MaxWrite)
	dst, dm := t.b.memory(size)
	la, lb := t.connect(rdma.ClassKV)
	_, back := t.b.random(each)
	_, am := t.a.memory(size)
	var stop atomic.Bool
	wait, waitBack := la.fire(dm, size, n, sm, &stop), lb.fire(am, size, n, back, &stop)
	lb.immediatesAfter(3)
	t.pair.KillB()
	t.b.await("the end of the domain", func() bool { return t.b.dead != nil })
	poison := bytes.Repeat([]byte{0xA5}, size)
	copy(dst, poison)
	well, counted := wait(), len(t.b.immediates(lb.cookie))
	stop.Store(true)
	waitBack()
	if well > counted {
		t.Errorf("%d Works ended well, %d immediates were polled", well, counted)
	}
	for _, c := range la.posted {
		if o := la.outcome(c); o.Status != group.StatusOK && o.Status != group.StatusBroken {
			t.Errorf("a Work ended with status %d (%v)", o.Status, o.Err)
		}
	}
	if _, err := t.b.d.Poll(make([]group.Completion, 1)); !errors.Is(err, group.ErrDead) {
		t.Errorf("Poll of a dead NIC: %v", err)
	}
	la.close()
	lb.close()
	t.same("memory of a dead NIC", dst, poison)
}
