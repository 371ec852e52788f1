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

// Pair holds two NICs that can reach each other. Each case opens a new pair and closes it.
type Pair struct {
	A, B group.Domain
	// Alloc, if set, returns memory that both NICs can register and that stays valid until t has
	// ended. Default: the Go heap.
	Alloc func(t testing.TB, bytes int) []byte
	// KillB, if set, makes B fail like a NIC that is removed from its bus.
	KillB func()
}

// Factory opens two NICs.
type Factory func(t testing.TB) Pair

// Case tests one guarantee of group.Domain.
type Case struct {
	Name string
	run  func(*env)
}

// caseTimeout is the longest duration of a case. A case that takes longer is assumed to hang.
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
	defer e.b.close() // runs even if the end of A fails
	defer e.a.close()
	c.run(e)
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

// roundTrip writes over a new connection in both directions. When it returns, the packets that were
// sent before the call have arrived.
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

// Limits are constant and large enough for the other cases.
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

// An endpoint's address is constant and short. Connect with an invalid address returns an error.
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

// Wake ends the current Wait or, if there is none, the next.
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

// A NIC that dies returns the completions that had arrived, then an error. The Works that other
// NICs have posted to it end, and no memory changes afterwards.
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
