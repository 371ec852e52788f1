package dualpath

import (
	"container/heap"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// checkSLO fails if deadlines, sizes or work in progress differ from those of the requests.
func checkSLO(p *Planner, fail func(string, ...any)) {
	checkHeap("deadlines", &p.deadlines, fail)
	var want sizes
	under := map[*engine]int{}
	for _, r := range p.requests {
		if (r.dueAt != 0) != (r.at != nil && p.due(r) != 0) {
			fail("request %d: waits: %v, due at %v, place %d among the deadlines", r.ID, r.at != nil, p.due(r), r.dueAt)
		}
		if r.at != nil {
			want.count(r.work, 1)
		}
		if r.prefillingOn != nil {
			under[r.prefillingOn]++
			if r.prefillingOn != r.pe || r.prefilled {
				fail("request %d: prefilled: %v, its work counts as another engine's", r.ID, r.prefilled)
			}
		}
	}
	if want != p.sizes {
		fail("sizes %v, counted %v", p.sizes, want)
	}
	for _, en := range p.engines {
		if en.prefilling != under[en] {
			fail("engine %d: %d requests to prefill, %d are counted", en.id, under[en], en.prefilling)
		}
	}
}

// newMeasured has engines that compute 1000 tokens a second, and a planner that has measured
// this. Each prefill engine takes one request at each fetch.
func newMeasured(t *testing.T, engines int) *fairCluster {
	up := GroupUp{Group: 1, Role: Prefill}
	for i := range engines {
		up.Engines = append(up.Engines, EngineSpec{Engine: EngineID(10 + i), Node: NodeID(10 + i)})
	}
	l := newFairCluster(t, Options{PrefillRate: 1000, GroupTimeout: time.Hour}, GroupUp{Group: 2, Role: Decode, Engines: []EngineSpec{{Engine: 2, Node: 2}}}, up)
	for range measuredMin {
		id := l.submit(Request{Prompt: 500})
		l.now += time.Millisecond
		l.fetch(l.ups[0])
		l.fetch(l.ups[1])
		l.now += 500 * time.Millisecond
		l.finish(id)
	}
	l.starts = nil
	near(t, "rate", l.p.prefills.rate(), 1000)
	return l
}

// rejected returns the Reject of a request among actions, or nil.
func rejected(actions []Action, id RequestID) *Action {
	for i := range actions {
		if actions[i].Kind == Reject && actions[i].Request == id {
			return &actions[i]
		}
	}
	return nil
}

// try submits a request with a first-token deadline in d and returns its Reject, or nil. Then
// it cancels the request.
func (l *fairCluster) try(r Request, d time.Duration) *Action {
	l.next++
	r.ID, r.FirstToken = l.next, l.now+d
	a := rejected(l.step(Submit{l.now, r}), r.ID)
	l.step(Cancelled{l.now, r.ID})
	return a
}

// TestNoEstimate: without a measurement no request is refused, however long the queue is. A
// request is refused when its deadline has passed.
func TestNoEstimate(t *testing.T) {
	l := newFairCluster(t, Options{})
	for range 100 {
		l.submit(Request{Prompt: 1 << 20})
	}
	id := l.submit(Request{Prompt: 1 << 20, FirstToken: time.Second})
	if a := l.step(Tick{time.Second - 1}); len(a) != 0 {
		t.Fatalf("%v before the deadline", a)
	}
	if a := rejected(l.step(Tick{time.Second}), id); a == nil || a.Why != FirstTokenLate || a.Need != 0 {
		t.Errorf("rejected as %+v; want %v without an estimate", a, FirstTokenLate)
	}
	if x, _ := l.p.Explain(id); !strings.Contains(x.String(), "too few prefills have ended") {
		t.Errorf("the explanation has no reason:\n%v", x.String())
	}
}

// TestEstimate: the estimate is the work in progress less its completed part, the queued work
// before the request, and the request's own work. It is early by the largest request, rounded
// up to a power of two.
func TestEstimate(t *testing.T) {
	l := newMeasured(t, 1)
	l.submit(Request{Prompt: 4000})
	l.fetch(l.ups[1])
	for range 10 {
		l.submit(Request{Prompt: 1000})
	}
	l.now += 3 * time.Second
	// 1 s of the first, 10 s of the queue, 0.5 s of its own, less 1.024 s.
	const want = 10_476 * time.Millisecond
	r := Request{Prompt: 500}
	if a := l.try(r, want+time.Millisecond); a != nil {
		t.Errorf("refused: %+v", a)
	}
	a := l.try(r, want-time.Second)
	if a == nil || a.Why != FirstTokenLate || a.Need != int(want.Microseconds()) || a.Most != int((want-time.Second).Microseconds()) {
		t.Errorf("got %+v; want %v of %v", a, want, want-time.Second)
	}
	for _, ahead := range []Request{{Prompt: 500, Priority: 1}, {Prompt: 500, Tenant: "b"}} {
		if a := l.try(ahead, 2*time.Second); a != nil {
			t.Errorf("%+v goes before the queue and is refused: %+v", ahead, a)
		}
		if a := l.try(ahead, 1400*time.Millisecond); a == nil {
			t.Errorf("%+v waits for the request under way for 1 s, and takes 0.5 s; it is not refused", ahead)
		}
	}
	if a := l.try(Request{Prompt: 500, Priority: -1}, want-time.Second); a == nil {
		t.Error("a request of a lower priority is not refused")
	}
	l.now += 600 * time.Millisecond
	if a := l.try(r, time.Second); a == nil || a.Need != int((want-600*time.Millisecond).Microseconds()) {
		t.Errorf("after 0.6 s got %+v; want %v", a, want-600*time.Millisecond)
	}
	l.submit(Request{Prompt: 8000, Tenant: "b"})
	if a := l.try(Request{Prompt: 500, Tenant: "b"}, 14*time.Second-8192*time.Millisecond); a == nil {
		t.Error("the requests of the tenant before it, and as much of the other tenant's, do not count")
	}
}

// TestLateInQueue: a request is refused when its prefill would have to begin, not after the
// deadline, and not because of its first token if that has been produced.
func TestLateInQueue(t *testing.T) {
	l := newMeasured(t, 1)
	had := l.submit(Request{Prompt: 500, FirstToken: l.now + time.Second})
	l.fetch(l.ups[1])
	l.now += 500 * time.Millisecond
	l.step(Finished{At: l.now, Request: had, Role: Prefill})
	l.step(Failed{At: l.now, Request: had, Role: Decode})
	begin := l.now
	id := l.submit(Request{Prompt: 2000, FirstToken: begin + 5*time.Second})
	if a := l.step(Tick{begin + 3*time.Second - 1}); len(a) != 0 {
		t.Fatalf("%v: request %d can meet its deadline on an idle engine", a, id)
	}
	actions := l.step(Tick{begin + 3*time.Second})
	if a := rejected(actions, id); a == nil || a.Why != FirstTokenLate || a.Most != 2_000_000 || a.Need < a.Most {
		t.Errorf("got %v; want a refusal of request %d with 2 s left", actions, id)
	}
	if a := l.step(Tick{begin + time.Minute}); rejected(a, had) != nil {
		t.Errorf("request %d had its first token in time: %v", had, a)
	}
}

// TestLateWithNewWeights: a request whose prefix is of older weights must begin sooner, because
// the whole prompt is computed.
func TestLateWithNewWeights(t *testing.T) {
	l := newMeasured(t, 1)
	begin := l.now
	id := l.submit(Request{Prompt: 2000, Hit: 1984, FirstToken: begin + 5*time.Second})
	l.step(Epoch{At: begin, Epoch: 1})
	if a := l.step(Tick{begin + 3*time.Second - 1}); len(a) != 0 {
		t.Fatalf("%v: request %d can meet its deadline on an idle engine", a, id)
	}
	if a := rejected(l.step(Tick{begin + 3*time.Second}), id); a == nil || a.Why != FirstTokenLate {
		t.Errorf("request %d takes 2 s and has 2 s left: %+v", id, a)
	}
}

// TestEstimateWithoutSwitching: the estimate does not count the engines of a group that changes
// its role.
func TestEstimateWithoutSwitching(t *testing.T) {
	l := newMeasured(t, 1)
	other := GroupUp{Group: 3, Role: Prefill, Engines: []EngineSpec{{Engine: 30, Node: 30}}}
	l.step(other)
	l.submit(Request{Prompt: 4000})
	l.fetch(l.ups[1])
	if a := l.try(Request{Prompt: 500}, time.Second); a != nil {
		t.Errorf("refused although engine 30 is idle: %+v", a)
	}
	l.step(SwitchRole{At: l.now, Group: 3, Role: Decode, Drain: DrainFinish})
	if a := l.try(Request{Prompt: 500}, time.Second); a == nil || a.Why != FirstTokenLate {
		t.Errorf("got %+v; engine 30 prefills no more, and engine 10 is free in 4 s", a)
	}
}

// TestFewMeasured: a few prefills are not enough for a rate.
func TestFewMeasured(t *testing.T) {
	var m measured
	for i := range measuredMin {
		if rate := m.rate(); rate != 0 {
			t.Errorf("a rate of %v after %d prefills", rate, i)
		}
		m.add(100, time.Second)
	}
	near(t, "rate", m.rate(), 100)
	for range 200 {
		m.add(100, time.Second/2)
	}
	if rate := m.rate(); rate < 199 || rate > 200 {
		t.Errorf("a rate of %v when the last 200 prefills were twice as fast; want 200", rate)
	}
}

// TestFasterEngines: a request whose prefill had to begin is kept if engines have become fast
// enough meanwhile.
func TestFasterEngines(t *testing.T) {
	l := newMeasured(t, 1)
	begin := l.now
	id := l.submit(Request{Prompt: 2000, FirstToken: begin + 5*time.Second})
	l.p.prefills = measured{work: 20_000, seconds: 10, ends: measuredMin}
	if a := l.step(Tick{begin + 3*time.Second}); len(a) != 0 {
		t.Errorf("%v; the engines prefill request %d in 1 s", a, id)
	}
	if a := rejected(l.step(Tick{begin + 4*time.Second}), id); a == nil {
		t.Errorf("request %d is not refused", id)
	}
}

// TestMeasuredOverSessions: the time of a prefill counts in full if the session of its group
// broke meanwhile, and not at all if the request was restored from the group.
func TestMeasuredOverSessions(t *testing.T) {
	l := newMeasured(t, 1)
	id := l.submit(Request{Prompt: 4000})
	l.fetch(l.ups[1])
	attempt := l.p.requests[id].attempt
	l.now += time.Second
	again := l.ups[1]
	again.At, again.Again, again.Holding = l.now, true, []Held{{Request: Request{ID: id, Prompt: 4000}, Engine: 10, Attempt: attempt, Order: attempt}}
	l.step(again)
	found := again
	found.Again = false
	l.now += 3 * time.Second
	l.finish(id)
	near(t, "rate", l.p.prefills.rate(), 1000)

	found.Holding = []Held{{Request: Request{ID: 1000, Prompt: 1000}, Engine: 10, Attempt: 1 << 20, Order: 1 << 20}}
	l.step(found)
	l.step(Finished{At: l.now, Request: 1000, Role: Prefill})
	near(t, "rate", l.p.prefills.rate(), 1000)
}

// TestDeadlinesInOrder: each queued request ends at its own deadline.
func TestDeadlinesInOrder(t *testing.T) {
	l := newFairCluster(t, Options{})
	rng := rand.New(rand.NewPCG(4, 4))
	deadlines := map[RequestID]time.Duration{}
	for range 300 {
		d := time.Duration(1+rng.IntN(50)) * time.Millisecond
		deadlines[l.submit(Request{Prompt: 10, Deadline: d})] = d
	}
	for now := time.Millisecond; now <= 50*time.Millisecond; now += time.Millisecond {
		ended := 0
		for _, a := range l.step(Tick{now}) {
			if d := deadlines[a.Request]; a.Kind != Reject || a.Why != PastDeadline || d != now {
				t.Fatalf("at %v: %+v; its deadline is %v", now, a, d)
			}
			ended++
			delete(deadlines, a.Request)
		}
	}
	if len(deadlines) != 0 {
		t.Errorf("%d requests are past their deadlines", len(deadlines))
	}
}

// TestEarlyEstimate: engines that take whole requests in order, each the engine that is free
// first, are never free sooner than estimated.
func TestEarlyEstimate(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	close := 0
	for range 5000 {
		engines := make(times, 1+rng.IntN(6))
		for i := range engines {
			engines[i] = float64(rng.IntN(2) * rng.IntN(100))
		}
		slices.Sort(engines)
		free := slices.Clone(engines)
		var s sizes
		sum := 0.0
		for range rng.IntN(40) {
			work := float64(1 + rng.IntN(1+rng.IntN(100)))
			s.count(work, 1)
			sum += work
			engines[0] += work
			heap.Fix(&engines, 0)
		}
		got, actual := max(fill(free, sum)-s.largest(), free[0]), engines[0]
		if got > actual+1e-9 {
			t.Fatalf("engines free at %v, %.0f of work: estimated %v, and it is %v", free, sum, got, actual)
		}
		if actual > 200 && got > actual/2 {
			close++
		}
	}
	if close < 500 {
		t.Errorf("%d estimates of long waits are more than half of the wait", close)
	}
}

// times is a heap.
type times []float64

func (h times) Len() int           { return len(h) }
func (h times) Less(i, j int) bool { return h[i] < h[j] }
func (h times) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *times) Push(any)          {}
func (h *times) Pop() any          { return nil }
