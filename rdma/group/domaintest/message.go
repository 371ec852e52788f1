package domaintest

import (
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Messages arrive whole, each in one of the posted buffers, from any endpoint.
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

// A message for which the receiver has no buffer ends with StatusNoBuffer. If this does not break
// the endpoint, the next message is delivered.
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
