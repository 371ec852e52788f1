package fair

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"testing"
)

// principal is a principal of a test, with calls of up to callMax bytes.
type principal struct {
	Caller
	weight  *atomic.Int64
	callMax int64
	granted int64
}

func newPrincipal(name string, weight, callMax int64) *principal {
	p := &principal{weight: new(atomic.Int64), callMax: callMax}
	p.weight.Store(weight)
	p.Share = Share{Principal: name, Weight: func() int { return int(p.weight.Load()) }}
	return p
}

// backlog is a Queue in which every principal always has a waiting call.
type backlog struct {
	*Queue
	all map[string]*principal
	rng *rand.Rand
}

func newBacklog(seed uint64, all ...*principal) *backlog {
	b := &backlog{Queue: New(), all: make(map[string]*principal), rng: rand.New(rand.NewPCG(seed, 1))}
	for _, p := range all {
		b.add(p)
	}
	return b
}

func (b *backlog) add(p *principal) {
	b.all[p.Share.Principal] = p
	b.call(p)
}

func (b *backlog) call(p *principal) {
	b.Push(p.Caller, 0, turnBytesMin+b.rng.Int64N(p.callMax-turnBytesMin+1))
}

// step grants one call.
func (b *backlog) step() *principal {
	t := b.Next(0)
	p := b.all[t.flow.share.Principal]
	b.Grant(t)
	p.granted += t.bytes
	b.call(p)
	return p
}

// TestSharesByWeight: principals whose calls have very different sizes are granted bytes by their weights. The
// difference between any two is never more than one call of each, which is the bound of the algorithm, so
// none starves. After 8 GiB each has its share to 5 %.
func TestSharesByWeight(t *testing.T) {
	for seed := range uint64(10) {
		all := []*principal{newPrincipal("small", 1, 8<<10), newPrincipal("large", 3, 4<<20), newPrincipal("mixed", 6, 1<<20), newPrincipal("heavy", 100, 1<<20)}
		b := newBacklog(seed, all...)
		total, weights := int64(0), int64(110)
		for total < 8<<30 {
			before := b.virtual
			p := b.step()
			if b.virtual < before {
				t.Fatalf("seed %d: the virtual time falls from %v to %v", seed, before, b.virtual)
			}
			total = 0
			for _, o := range all {
				total += o.granted
				apart := math.Abs(float64(p.granted)/float64(p.weight.Load()) - float64(o.granted)/float64(o.weight.Load()))
				if most := float64(p.callMax)/float64(p.weight.Load()) + float64(o.callMax)/float64(o.weight.Load()); apart > most*1.000001 {
					t.Fatalf("seed %d: %s and %s are %v bytes per weight apart; the bound is %v", seed, p.Share.Principal, o.Share.Principal, apart, most)
				}
			}
		}
		for _, p := range all {
			if got, want := float64(p.granted), float64(total)*float64(p.weight.Load())/float64(weights); math.Abs(got-want) > want/20 {
				t.Errorf("seed %d: %s has %v bytes; its share is %v", seed, p.Share.Principal, got, want)
			}
		}
	}
}

// TestWeightChanges: a new weight applies to the calls that wait already.
func TestWeightChanges(t *testing.T) {
	q := New()
	a, b := newPrincipal("a", 1, 0), newPrincipal("b", 3, 0)
	for range 4000 {
		q.Push(a.Caller, 0, 1<<20)
		q.Push(b.Caller, 0, 1<<20)
	}
	shares := func(calls int) (ofA int) {
		for range calls {
			t := q.Next(0)
			if t.flow.share.Principal == "a" {
				ofA++
			}
			q.Grant(t)
		}
		return ofA
	}
	if n := shares(400); n < 99 || n > 101 {
		t.Errorf("a has %d of 400 grants; want 100", n)
	}
	a.weight.Store(3)
	b.weight.Store(1)
	if n := shares(400); n < 299 || n > 301 {
		t.Errorf("a has %d of 400 grants after the weights were exchanged; want 300", n)
	}
	a.weight.Store(1000)
	if n := shares(2002); n < 1999 || n > 2001 {
		t.Errorf("a has %d of 2002 grants after its weight became 1000; want 2000", n)
	}
}

// TestIdleTime: a principal that was idle gets its share from then on, and no more. One that has used
// the node alone is not behind for it.
func TestIdleTime(t *testing.T) {
	a, b := newPrincipal("a", 1, 1<<20), newPrincipal("b", 1, 1<<20)
	q := newBacklog(1, a)
	for range 1000 {
		q.step()
	}
	alone := a.granted
	q.add(b)
	for range 1000 {
		q.step()
	}
	if apart := a.granted - alone - b.granted; apart > 2<<20 || apart < -2<<20 {
		t.Errorf("since b came, a was granted %d bytes and b %d", a.granted-alone, b.granted)
	}
}

// TestGreedyPrincipal: with 10,000 waiting calls of one principal, of any weight, the first call of another is
// granted next.
func TestGreedyPrincipal(t *testing.T) {
	for _, weight := range []int64{1, 1000} {
		q := New()
		greedy, other := newPrincipal("greedy", weight, 0), newPrincipal("other", 1, 0)
		for range 10_000 {
			q.Push(greedy.Caller, 0, 64<<20)
		}
		q.Grant(q.Next(0))
		first := q.Push(other.Caller, 0, 64<<20)
		if q.Next(0) != first {
			t.Errorf("weight %d: the first call of another principal is not next", weight)
		}
	}
}

// TestRefusesByWeight: of the waiting calls, that of the principal with the most per weight is refused, and within the
// newcomer's principal that of a tenant with more.
func TestRefusesByWeight(t *testing.T) {
	q := New()
	heavy, light := newPrincipal("heavy", 4, 0), newPrincipal("light", 1, 0)
	for range 8 {
		q.Push(heavy.Caller, 0, 1)
	}
	for range 3 {
		q.Push(light.Caller, 0, 1)
	}
	step := func(what string, by Caller, want bool, ofHeavy, ofLight int) {
		t.Helper()
		if got := q.Refuse(by); got != want {
			t.Errorf("%s: refused %v", what, got)
		} else if got {
			q.Push(by, 0, 1)
		}
		if h, l := q.flows["heavy"].waiting, q.flows["light"].waiting; h != ofHeavy || l != ofLight {
			t.Errorf("%s: %d of heavy and %d of light wait; want %d and %d", what, h, l, ofHeavy, ofLight)
		}
	}
	step("heavy has 2 per weight, light has 3", heavy.Caller, true, 9, 2)
	step("a further call of heavy would make 2.5", heavy.Caller, false, 9, 2)
	step("a further call of light would make 3", light.Caller, false, 9, 2)
	tenant := heavy.Caller
	tenant.Tenant = "t"
	step("the first call of another tenant of heavy", tenant, true, 9, 2)
	if n := len(q.flows["heavy"].queues["t"]); n != 1 {
		t.Errorf("%d calls of the tenant wait", n)
	}
}

// TestTextbookOrder: without changes of weights the order is that of start-time fair queueing with the tags of each call
// computed at its arrival.
func TestTextbookOrder(t *testing.T) {
	type call struct {
		of    int
		start float64
	}
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 2))
		q := New()
		var all []*principal
		for i := range 5 {
			all = append(all, newPrincipal(fmt.Sprint(i), 1<<rng.IntN(6), 0))
			q.flowOf(all[i].Share) // a lower index wins where tags are equal
		}
		waiting := make([][]call, len(all))
		finish := make([]float64, len(all))
		v := 0.0
		for range 500 {
			if i := rng.IntN(len(all)); rng.IntN(5) < 3 {
				bytes := int64(turnBytesMin << rng.IntN(8))
				q.Push(all[i].Caller, 0, bytes)
				start := max(v, finish[i])
				finish[i] = start + float64(bytes)/float64(all[i].weight.Load())
				waiting[i] = append(waiting[i], call{i, start})
				continue
			}
			next := -1
			for i, calls := range waiting {
				if len(calls) > 0 && (next < 0 || calls[0].start < waiting[next][0].start) {
					next = i
				}
			}
			if next < 0 {
				continue
			}
			v = waiting[next][0].start
			waiting[next] = waiting[next][1:]
			granted := q.Next(0)
			if got := granted.flow.share.Principal; got != fmt.Sprint(next) {
				t.Fatalf("seed %d: a call of %s is granted; want %d", seed, got, next)
			}
			q.Grant(granted)
		}
	}
}

// TestForgetsPrincipals: the number of principals that a queue keeps is bounded, and a principal that
// it forgets does not get more than its share.
func TestForgetsPrincipals(t *testing.T) {
	q := New()
	a := newPrincipal("a", 1, 0)
	for range 4 {
		q.Push(a.Caller, 0, 1<<20)
	}
	holder := q.Take(newPrincipal("holder", 1, 0).Caller, 5, 0)
	for i := range 10 * flowsMax {
		q.Take(Caller{Share: Share{Principal: fmt.Sprint("n", i)}}, 0, 1<<20)
		if len(q.list) > flowsMax || len(q.flows) != len(q.list) {
			t.Fatalf("%d principals are kept, and %d in the map", len(q.list), len(q.flows))
		}
	}
	if f := q.flows["a"]; f == nil || f.waiting != 4 || q.Next(0).flow != f {
		t.Error("a principal with waiting calls was forgotten")
	}
	if _, held := q.Of("holder"); held != 5 {
		t.Errorf("a principal that holds 5 units has %d", held)
	}
	holder.Release(5)
	if f := q.flowOf(Share{Principal: "n0"}); f.start < 1<<20 {
		t.Errorf("a forgotten principal begins again with the tag %v", f.start)
	}
}

// TestLongUse: small calls of a heavy principal count although 1 EiB was granted without a moment at which nothing was held, so
// that the tags did not begin again at 0.
func TestLongUse(t *testing.T) {
	q := New()
	heavy, light := newPrincipal("heavy", 1000, 0), newPrincipal("light", 1, 0)
	for range 1 << 20 {
		q.Take(Caller{}, 1, 1<<40)
	}
	for range 3003 {
		q.Push(heavy.Caller, 0, turnBytesMin)
		q.Push(light.Caller, 0, turnBytesMin)
	}
	ofLight := 0
	for range 3003 {
		turn := q.Next(0)
		if turn.flow == q.flows["light"] {
			ofLight++
		}
		q.Grant(turn)
	}
	if ofLight < 2 || ofLight > 4 {
		t.Errorf("the light principal has %d of 3003 grants; its share is 3", ofLight)
	}
}

// BenchmarkUncontended measures one call that is granted without waiting, and its release, in a queue that has 500
// other principals.
func BenchmarkUncontended(b *testing.B) {
	q := New()
	for i := range 500 {
		q.Take(Caller{Share: Share{Principal: fmt.Sprint(i)}}, 1, turnBytesMin)
	}
	by := newPrincipal("a", 1, 0).Caller
	b.ReportAllocs()
	for b.Loop() {
		f := q.Take(by, 1, turnBytesMin)
		f.Release(1)
		if q.Next(1) != nil {
			b.Fatal("a call waits")
		}
	}
}
