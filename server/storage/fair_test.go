package storage

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/penstock-kv/penstock/kv"
)

// principal is a principal of a test, with calls of up to callMax bytes.
type principal struct {
	reader
	weight  *atomic.Int64
	callMax int64
	granted int64
}

func newPrincipal(name string, weight, callMax int64) *principal {
	p := &principal{weight: new(atomic.Int64), callMax: callMax}
	p.weight.Store(weight)
	p.share = Share{Principal: name, Weight: func() int { return int(p.weight.Load()) }}
	return p
}

// backlog is a fairQueue in which every principal always has a waiting call.
type backlog struct {
	fairQueue
	all map[string]*principal
	rng *rand.Rand
}

func newBacklog(seed uint64, all ...*principal) *backlog {
	b := &backlog{fairQueue: newFairQueue(), all: make(map[string]*principal), rng: rand.New(rand.NewPCG(seed, 1))}
	for _, p := range all {
		b.add(p)
	}
	return b
}

func (b *backlog) add(p *principal) {
	b.all[p.share.Principal] = p
	b.call(p)
}

func (b *backlog) call(p *principal) {
	b.push(p.reader, turnBytesMin+b.rng.Int64N(p.callMax-turnBytesMin+1))
}

// step grants one call.
func (b *backlog) step() *principal {
	t := b.next()
	p := b.all[t.flow.share.Principal]
	b.grant(t)
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
					t.Fatalf("seed %d: %s and %s are %v bytes per weight apart; the bound is %v", seed, p.share.Principal, o.share.Principal, apart, most)
				}
			}
		}
		for _, p := range all {
			if got, want := float64(p.granted), float64(total)*float64(p.weight.Load())/float64(weights); math.Abs(got-want) > want/20 {
				t.Errorf("seed %d: %s has %v bytes; its share is %v", seed, p.share.Principal, got, want)
			}
		}
	}
}

// TestWeightChanges: a new weight applies to the calls that wait already.
func TestWeightChanges(t *testing.T) {
	q := newFairQueue()
	a, b := newPrincipal("a", 1, 0), newPrincipal("b", 3, 0)
	for range 4000 {
		q.push(a.reader, 1<<20)
		q.push(b.reader, 1<<20)
	}
	shares := func(calls int) (ofA int) {
		for range calls {
			t := q.next()
			if t.flow.share.Principal == "a" {
				ofA++
			}
			q.grant(t)
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
		q := newFairQueue()
		greedy, other := newPrincipal("greedy", weight, 0), newPrincipal("other", 1, 0)
		for range 10_000 {
			q.push(greedy.reader, 64<<20)
		}
		q.grant(q.next())
		first := q.push(other.reader, 64<<20)
		if q.next() != first {
			t.Errorf("weight %d: the first call of another principal is not next", weight)
		}
	}
}

// TestGreedyAtGate: one principal alone has all places and the whole queue of a gate. Its 10,000 calls beyond are refused, and
// so is a waiting one when another principal comes, whose call enters as soon as a place is free.
func TestGreedyAtGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const places = 4
		g := newGate(places)
		greedy, other := newPrincipal("greedy", 1, 0), newPrincipal("other", 1, 0)
		var entered, busy, others atomic.Int64
		for range 10_000 {
			go func() {
				switch err := g.enter(t.Context(), greedy.reader, 64<<20); {
				case err == nil:
					entered.Add(1)
				case errors.Is(err, ErrBusy):
					busy.Add(1)
				}
			}()
		}
		synctest.Wait()
		if running, waiting, _ := g.stats(); running != places || waiting != places || busy.Load() != 10_000-2*places {
			t.Errorf("alone: %d run, %d wait, %d are refused", running, waiting, busy.Load())
		}
		go func() {
			if g.enter(t.Context(), other.reader, 64<<20) == nil {
				others.Add(1)
			}
		}()
		synctest.Wait()
		if n, waiting := busy.Load(), g.waitingOf("other"); n != 10_000-2*places+1 || waiting != 1 || others.Load() != 0 {
			t.Errorf("%d calls are refused, %d of the other principal wait", n, waiting)
		}
		g.leave()
		synctest.Wait()
		if entered.Load() != places || others.Load() != 1 {
			t.Errorf("after one has left, %d calls have entered, and %d of the other principal", entered.Load(), others.Load())
		}
		for range 2*places - 1 {
			g.leave()
			synctest.Wait()
		}
		if running, waiting, _ := g.stats(); running != 0 || waiting != 0 || entered.Load() != 2*places-1 || g.queue.virtual != 0 {
			t.Errorf("in the end %d run, %d wait, %d have entered, the virtual time is %v", running, waiting, entered.Load(), g.queue.virtual)
		}
	})
}

// TestRefusesByWeight: of the waiting calls, that of the principal with the most per weight is refused, and within the
// newcomer's principal that of a tenant with more.
func TestRefusesByWeight(t *testing.T) {
	q := newFairQueue()
	heavy, light := newPrincipal("heavy", 4, 0), newPrincipal("light", 1, 0)
	for range 8 {
		q.push(heavy.reader, 1)
	}
	for range 3 {
		q.push(light.reader, 1)
	}
	step := func(what string, by reader, want bool, ofHeavy, ofLight int) {
		t.Helper()
		if got := q.refuse(by); got != want {
			t.Errorf("%s: refused %v", what, got)
		} else if got {
			q.push(by, 1)
		}
		if h, l := q.flows["heavy"].waiting, q.flows["light"].waiting; h != ofHeavy || l != ofLight {
			t.Errorf("%s: %d of heavy and %d of light wait; want %d and %d", what, h, l, ofHeavy, ofLight)
		}
	}
	step("heavy has 2 per weight, light has 3", heavy.reader, true, 9, 2)
	step("a further call of heavy would make 2.5", heavy.reader, false, 9, 2)
	step("a further call of light would make 3", light.reader, false, 9, 2)
	tenant := heavy.reader
	tenant.tenant = "t"
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
		q := newFairQueue()
		var all []*principal
		for i := range 5 {
			all = append(all, newPrincipal(fmt.Sprint(i), 1<<rng.IntN(6), 0))
			q.flowOf(all[i].share) // a lower index wins where tags are equal
		}
		waiting := make([][]call, len(all))
		finish := make([]float64, len(all))
		v := 0.0
		for range 500 {
			if i := rng.IntN(len(all)); rng.IntN(5) < 3 {
				bytes := int64(turnBytesMin << rng.IntN(8))
				q.push(all[i].reader, bytes)
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
			granted := q.next()
			if got := granted.flow.share.Principal; got != fmt.Sprint(next) {
				t.Fatalf("seed %d: a call of %s is granted; want %d", seed, got, next)
			}
			q.grant(granted)
		}
	}
}

// TestForgetsPrincipals: the number of principals that a queue keeps is bounded, and a principal that
// it forgets does not get more than its share.
func TestForgetsPrincipals(t *testing.T) {
	q := newFairQueue()
	a := newPrincipal("a", 1, 0)
	for range 4 {
		q.push(a.reader, 1<<20)
	}
	for i := range 10 * flowsMax {
		q.charge(q.flowOf(Share{Principal: fmt.Sprint("n", i)}), 1<<20)
		if len(q.list) > flowsMax || len(q.flows) != len(q.list) {
			t.Fatalf("%d principals are kept, and %d in the map", len(q.list), len(q.flows))
		}
	}
	if f := q.flows["a"]; f == nil || f.waiting != 4 || q.next().flow != f {
		t.Error("a principal with waiting calls was forgotten")
	}
	if f := q.flowOf(Share{Principal: "n0"}); f.start < 1<<20 {
		t.Errorf("a forgotten principal begins again with the tag %v", f.start)
	}
}

// TestReadBytes: a read counts the layers that it requests, and one that names no pieces counts the whole chain.
func TestReadBytes(t *testing.T) {
	g := kv.Geometry{BlockTokens: 16, Groups: []kv.Group{{Kind: kv.Full, Layers: 4, TokenBytes: 256}}}
	layer, pieces := g.LayerBytes(0), []PieceRef{{}, {Block: 1}}
	for want, req := range map[int64]LoadRequest{
		8 * layer:  {Pieces: pieces},
		6 * layer:  {Pieces: pieces, FirstLayer: 1},
		4 * layer:  {Pieces: pieces, FirstLayer: 1, Layers: 2},
		12 * layer: {IDs: make([]kv.BlockID, 3)},
	} {
		if got := req.bytes(g); got != want || layer == 0 {
			t.Errorf("%+v: %d bytes; want %d", req, got, want)
		}
	}
}

// TestBudget: requests beyond the budget wait and are granted by weight; a large one is granted although smaller ones of another
// principal would fit in its place; one that is given up holds nothing.
func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const unit = 1 << 20
		b := newBudget(4 * unit)
		small, large := newPrincipal("small", 1, 0), newPrincipal("large", 1, 0)
		var mu sync.Mutex
		var order []string
		acquire := func(ctx context.Context, p *principal, units int64) {
			go func() {
				if b.acquire(ctx, p.reader, units*unit) == nil {
					mu.Lock()
					defer mu.Unlock()
					order = append(order, p.share.Principal)
				}
			}()
			synctest.Wait()
		}
		expect := func(what string, used int64, want ...string) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if fmt.Sprint(order) != fmt.Sprint(want) || b.used != used*unit {
				t.Errorf("%s: granted %v with %d bytes in use; want %v with %d", what, order, b.used, want, used*unit)
			}
			order = nil
		}
		for range 4 {
			acquire(t.Context(), small, 1)
		}
		expect("one principal alone", 4, "small", "small", "small", "small")
		acquire(t.Context(), large, 4)
		for range 8 {
			acquire(t.Context(), small, 1)
		}
		if b.try(small.reader, 0) {
			t.Error("try passes waiting requests")
		}
		for range 3 {
			b.release(unit)
		}
		expect("while the large request does not fit", 1)
		b.release(unit)
		expect("when it fits", 4, "large")
		b.release(4 * unit)
		expect("after it", 4, "small", "small", "small", "small")
		ctx, cancel := context.WithCancel(t.Context())
		acquire(ctx, large, 4)
		for range 3 {
			b.release(unit)
		}
		expect("while the second large request does not fit", 1)
		cancel()
		expect("after the second large request was given up", 4, "small", "small", "small")
		b.release(unit)
		expect("the last one", 4, "small")
		for range 4 {
			b.release(unit)
		}
		if b.used != 0 || b.queue.waiting != 0 || b.queue.virtual != 0 {
			t.Errorf("in the end %d bytes are in use, %d requests wait, the virtual time is %v", b.used, b.queue.waiting, b.queue.virtual)
		}
	})
}
