package domaintest

import (
	"bytes"
	"context"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Shut is called while writes of the peer are in flight. After it, no write changes memory or is
// counted, and each Work of the peer completes.
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

// An endpoint may be shut before it is connected, and it may be shut twice.
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

// Immediates and messages that arrived before Shut can be polled after it.
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
	// A NIC implemented in software may receive only while its poller runs. Then nothing has
	// arrived, which is correct too.
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

// A Work whose target endpoint is gone ends with StatusBroken, and the local endpoint breaks.
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

// After the Close of an endpoint, no completion carries its cookie. Other endpoints still work.
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
