package dualpath

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// fairCluster is a cluster whose engines end each request immediately, so only the order of
// grants matters.
type fairCluster struct {
	t    testing.TB
	p    *Planner
	now  time.Duration
	next RequestID
	ups  []GroupUp
	// starts are the requests that were granted and not yet returned by round. tenant and work
	// hold their tenants and work.
	starts []RequestID
	tenant map[RequestID]string
	work   map[RequestID]float64
}

// newFairCluster has a prefill engine that takes one request at each fetch, and a decode engine.
func newFairCluster(t testing.TB, o Options, up ...GroupUp) *fairCluster {
	o.Beta = max(o.Beta, 1)
	l := &fairCluster{t: t, p: newPlanner(t, o), tenant: map[RequestID]string{}, work: map[RequestID]float64{}, ups: up}
	if up == nil {
		l.ups = []GroupUp{{Group: 2, Role: Decode, Engines: []EngineSpec{{Engine: 2, Node: 2}}}, {Group: 1, Role: Prefill, Engines: []EngineSpec{{Engine: 1, Node: 1}}}}
	}
	for _, g := range l.ups {
		l.step(g)
	}
	return l
}

// step feeds an event and records the grants.
func (l *fairCluster) step(ev Event) (actions []Action) {
	actions = slices.Clone(l.p.Step(ev))
	for _, a := range actions {
		if a.Kind == Start {
			l.starts = append(l.starts, a.Request)
		}
	}
	if l.p.queued < 100 || l.p.steps%512 == 0 { // check looks at all waiting requests
		check(l.p)
	}
	return actions
}

// submit submits a request and returns its ID.
func (l *fairCluster) submit(r Request) RequestID {
	l.next++
	r.ID = l.next
	l.tenant[r.ID], l.work[r.ID] = r.Tenant, l.p.cost(&request{Request: r})
	l.step(Submit{l.now, r})
	return r.ID
}

// fetch makes a group report that its engines are idle.
func (l *fairCluster) fetch(g GroupUp) {
	f := Fetch{At: l.now, Group: g.Group, Seen: l.p.seq}
	for _, e := range g.Engines {
		f.Engines = append(f.Engines, EngineReport{Engine: e.Engine, HBMFree: e.HBMTokens})
	}
	l.step(f)
}

// finish ends both parts of a request.
func (l *fairCluster) finish(id RequestID) {
	l.step(Finished{At: l.now, Request: id, Role: Prefill})
	l.step(Finished{At: l.now, Request: id, Role: Decode})
}

// round makes all groups fetch, and returns the granted requests, which have ended.
func (l *fairCluster) round() (granted []RequestID) {
	l.now += time.Millisecond
	for _, g := range l.ups {
		l.fetch(g)
	}
	granted, l.starts = l.starts, nil
	for _, id := range granted {
		l.finish(id)
	}
	return granted
}

// shares runs rounds and returns the work that each tenant was granted.
func (l *fairCluster) shares(rounds int, each func()) map[string]float64 {
	sum := map[string]float64{}
	for range rounds {
		each()
		for _, id := range l.round() {
			sum[l.tenant[id]] += l.work[id]
		}
	}
	return sum
}

// wantShares fails unless the work of tenants is in proportion to weights, within 10 %.
func wantShares(t *testing.T, sum, weights map[string]float64) {
	t.Helper()
	total, all := 0.0, 0.0
	for tenant, w := range weights {
		total += sum[tenant]
		all += w
	}
	for tenant, w := range weights {
		if share := sum[tenant] / total; share < 0.9*w/all || share > 1.1*w/all {
			t.Errorf("tenant %q was granted %.1f %% of the work; its weight is %.1f %%", tenant, 100*share, 100*w/all)
		}
	}
}

// TestWeights: tenants with requests of different sizes and hits are granted work in
// proportion to their weights, and each one's requests in their order.
func TestWeights(t *testing.T) {
	weights := map[string]float64{"a": 1, "b": 2, "c": 5, "": 1}
	l := newFairCluster(t, Options{Weights: map[string]float64{"b": 2, "c": 5}})
	rng := rand.New(rand.NewPCG(1, 1))
	sizes := map[string]int{"a": 100, "b": 9000, "c": 1000, "": 3000}
	for _, tenant := range []string{"a", "b", "c", ""} {
		for range 400_000 / sizes[tenant] * int(weights[tenant]) {
			hit := 64 * rng.IntN(sizes[tenant]/100+1)
			l.submit(Request{Tenant: tenant, Prompt: hit + 1 + rng.IntN(2*sizes[tenant]), Hit: hit})
		}
	}
	last := map[string]RequestID{}
	sum := map[string]float64{}
	for range 1200 {
		for _, id := range l.round() {
			tenant := l.tenant[id]
			if id < last[tenant] {
				t.Fatalf("tenant %q: request %d is granted after request %d", tenant, id, last[tenant])
			}
			last[tenant] = id
			sum[tenant] += l.work[id]
		}
	}
	wantShares(t, sum, weights)
	for tenant := range weights {
		if f := l.p.priorities[0].flows[tenant]; f == nil || f.waiting == 0 {
			t.Errorf("tenant %q has no backlog at the end: nothing was tested", tenant)
		}
	}
}

// TestWorkOfHit: a cached token is charged the time of its read, in prefill tokens.
func TestWorkOfHit(t *testing.T) {
	p := newPlanner(t, Options{PrefillRate: 1000, ReadRate: 50_000})
	near(t, "work", p.cost(&request{Request: Request{Prompt: 1100, Hit: 1000}}), 100+1000/50)
}

// TestBacklogDelaysNoOther: a single request of another tenant is among the next two grants,
// whatever the number of waiting requests of the first tenant.
func TestBacklogDelaysNoOther(t *testing.T) {
	l := newFairCluster(t, Options{})
	for range 1000 {
		l.submit(Request{Tenant: "a", Prompt: 100})
	}
	for range 50 {
		l.round()
	}
	id := l.submit(Request{Tenant: "b", Prompt: 100_000})
	granted := append(l.round(), l.round()...)
	if !slices.Contains(granted, id) {
		t.Errorf("granted %v; want request %d among them", granted, id)
	}
}

// TestNoCreditRegained: a tenant that always has one request, submitted when its previous one
// was granted, is granted no more than its share.
func TestNoCreditRegained(t *testing.T) {
	l := newFairCluster(t, Options{})
	for range 10_000 {
		l.submit(Request{Tenant: "a", Prompt: 100})
	}
	one := RequestID(0)
	sum := l.shares(3000, func() {
		if l.p.requests[one] == nil {
			one = l.submit(Request{Tenant: "b", Prompt: 1000})
		}
	})
	if share := sum["b"] / (sum["a"] + sum["b"]); share > 0.55 {
		t.Errorf("one request after the other gets %.0f %% of the work; its weight is half", 100*share)
	}
}

// TestIdleTenant: a tenant gains no credit by a long idle time.
func TestIdleTenant(t *testing.T) {
	l := newFairCluster(t, Options{})
	l.submit(Request{Tenant: "b", Prompt: 100})
	for range 10_000 {
		l.submit(Request{Tenant: "a", Prompt: 100})
	}
	for range 1000 {
		l.round()
	}
	for range 5000 {
		l.submit(Request{Tenant: "b", Prompt: 100})
	}
	wantShares(t, l.shares(1000, func() {}), map[string]float64{"a": 1, "b": 1})
}

// TestCancelledCostsNothing: a tenant is not charged for requests that are cancelled before
// they are granted.
func TestCancelledCostsNothing(t *testing.T) {
	l := newFairCluster(t, Options{})
	for range 5000 {
		l.submit(Request{Tenant: "a", Prompt: 100})
		l.submit(Request{Tenant: "b", Prompt: 100})
	}
	sum := l.shares(1000, func() {
		l.step(Cancelled{l.now, l.submit(Request{Tenant: "b", Prompt: 10_000})})
	})
	wantShares(t, sum, map[string]float64{"a": 1, "b": 1})
}

// TestReplannedIsCharged: the work of an attempt that fails counts, so a tenant whose
// attempts fail gets no more work than the others.
func TestReplannedIsCharged(t *testing.T) {
	l := newFairCluster(t, Options{MaxAttempts: 4})
	for range 5000 {
		l.submit(Request{Tenant: "a", Prompt: 100})
		l.submit(Request{Tenant: "b", Prompt: 100})
	}
	sum := map[string]float64{}
	for range 2000 {
		l.now += time.Minute
		for _, g := range l.ups {
			l.fetch(g)
		}
		for _, id := range l.starts {
			sum[l.tenant[id]] += l.work[id]
			if l.tenant[id] == "b" {
				l.step(Failed{At: l.now, Request: id, Role: Prefill})
			}
			if l.p.requests[id] != nil && l.tenant[id] != "b" {
				l.finish(id)
			}
		}
		l.starts = nil
	}
	wantShares(t, sum, map[string]float64{"a": 1, "b": 1})
}

// TestStateOfTenantsIsBounded: the state of tenants without requests is bounded, and a tenant that
// is deleted early regains nothing.
func TestStateOfTenantsIsBounded(t *testing.T) {
	l := newFairCluster(t, Options{})
	for range 10_000 {
		l.submit(Request{Tenant: "backlog", Prompt: 10})
	}
	const tenants = 3 * maxDebts
	for i := range tenants {
		l.submit(Request{Tenant: fmt.Sprint(i), Prompt: 100_000})
	}
	sum := l.shares(tenants+2, func() {})
	if len(sum) < tenants {
		t.Fatalf("%d tenants of %d were granted a request", len(sum), tenants)
	}
	level := l.p.priorities[0]
	if n := len(level.flows); n > maxDebts+1 {
		t.Errorf("%d tenants have state when one has requests", n)
	}
	if level.flows["0"] != nil {
		t.Fatal("tenant 0 has state: nothing was tested")
	}
	again := l.submit(Request{Tenant: "0", Prompt: 100})
	if granted := append(l.round(), l.round()...); slices.Contains(granted, again) {
		t.Error("a tenant with a debt of 100 000 tokens is served before one that has 10 000 tokens of them to catch up")
	}
	for l.p.priorities[0].waiting > 0 {
		l.round()
	}
	if n := len(level.flows); n > 1 {
		t.Errorf("%d tenants have state when no request waits", n)
	}
}

// TestPriorities: requests of a higher priority are granted first, those of one priority in
// their order. A request that is planned again precedes only the requests of its priority.
func TestPriorities(t *testing.T) {
	l := newFairCluster(t, Options{})
	low := l.submit(Request{Priority: -1, Prompt: 10})
	first := l.submit(Request{Prompt: 10})
	l.now += time.Millisecond
	l.fetch(l.ups[0])
	l.fetch(l.ups[1])
	if !slices.Equal(l.starts, []RequestID{first}) {
		t.Fatalf("granted %v; want request %d", l.starts, first)
	}
	l.starts = nil
	second := l.submit(Request{Prompt: 10})
	high := l.submit(Request{Priority: 7, Prompt: 10})
	l.step(Failed{At: l.now, Request: first, Role: Decode})
	l.now += time.Minute
	var granted []RequestID
	for range 4 {
		granted = append(granted, l.round()...)
	}
	if want := []RequestID{high, first, second, low}; !slices.Equal(granted, want) {
		t.Errorf("granted %v; want %v", granted, want)
	}
}

// newSmallDecode returns a cluster of one prefill engine and one decode engine with room for 1000 tokens. fetch lets
// the decode engine report its free room, and returns the requests that are started then.
func newSmallDecode(t *testing.T, o Options) (l *fairCluster, fetch func(free int) []RequestID) {
	t.Helper()
	l = newFairCluster(t, o,
		GroupUp{Group: 2, Role: Decode, Engines: []EngineSpec{{Engine: 2, Node: 2, HBMTokens: 1000}}},
		GroupUp{Group: 1, Role: Prefill, Engines: []EngineSpec{{Engine: 1, Node: 1}}})
	return l, func(free int) []RequestID {
		l.now += time.Millisecond
		l.step(Fetch{At: l.now, Group: 2, Seen: l.p.seq, Engines: []EngineReport{{Engine: 2, HBMFree: free}}})
		l.fetch(l.ups[1])
		starts := l.starts
		l.starts = nil
		return starts
	}
}

// TestReservation: a large request for which its decode group has no room reserves the group, so that
// small requests of another tenant do not take the memory that becomes free. A request of a
// higher priority ends the reservation.
func TestReservation(t *testing.T) {
	l, fetch := newSmallDecode(t, Options{Beta: 1 << 20, BlockTokens: 1})
	l.submit(Request{Tenant: "a", Prompt: 600})
	for range 20 {
		l.submit(Request{Tenant: "b", Prompt: 100})
	}
	large := l.submit(Request{Tenant: "a", Prompt: 900})
	if got := fetch(1000); len(got) != 5 {
		t.Fatalf("granted %v; want one request of tenant a and four of tenant b, which fill the engine", got)
	}
	if got := fetch(500); len(got) != 3 {
		t.Fatalf("granted %v; want three requests of tenant b, after which tenant a is next", got)
	}
	l.p.priorities[0].flows["a"].served += 500 // another group grants its requests
	for _, free := range []int{300, 500, 700, 899} {
		if got := fetch(free); len(got) != 0 {
			t.Fatalf("with %d tokens free %v are granted before the large request", free, got)
		}
	}
	high := l.submit(Request{Tenant: "c", Priority: 1, Prompt: 50})
	if got := fetch(899); len(got) == 0 || got[0] != high {
		t.Fatalf("granted %v; want the request of the higher priority, %d, first", got, high)
	}
	l.finish(high)
	if got := fetch(900); len(got) == 0 || got[0] != large {
		t.Fatalf("granted %v; want the large request, %d, first", got, large)
	}
}

// TestReservationBesideARetry: a request that waits for its next attempt takes no room, and does not
// end the reservation of its decode group.
func TestReservationBesideARetry(t *testing.T) {
	l, fetch := newSmallDecode(t, Options{Beta: 1 << 20, BlockTokens: 1, Cooldown: time.Minute})
	retried := l.submit(Request{Tenant: "c", Prompt: 10})
	for range 2 {
		if got := fetch(1000); !slices.Equal(got, []RequestID{retried}) {
			t.Fatalf("granted %v; want request %d", got, retried)
		}
		l.step(Failed{At: l.now, Request: retried, Role: Prefill})
	}
	large := l.submit(Request{Tenant: "a", Prompt: 900})
	for range 20 {
		l.submit(Request{Tenant: "b", Prompt: 100})
	}
	if got := fetch(800); len(got) != 0 {
		t.Fatalf("granted %v; want nothing: the large request is first and has no room", got)
	}
	l.p.priorities[0].flows["a"].served += 500 // another group grants its requests
	for _, free := range []int{500, 899} {
		if got := fetch(free); len(got) != 0 {
			t.Fatalf("with %d tokens free %v are granted before the large request", free, got)
		}
	}
	if got := fetch(900); len(got) == 0 || got[0] != large {
		t.Fatalf("granted %v; want the large request, %d, first", got, large)
	}
	l.finish(large)
	l.now += time.Minute
	if got := fetch(1000); len(got) == 0 || got[0] != retried {
		t.Errorf("granted %v; want the request that was tried again, %d, first", got, retried)
	}
}

// TestKeptRoom: a prefill group keeps its room for the request for which it had no room, even if
// another tenant is next by then because another group has granted a request of the first
// tenant.
func TestKeptRoom(t *testing.T) {
	l := newFairCluster(t, Options{Beta: 1 << 20, BlockTokens: 1},
		GroupUp{Group: 3, Role: Decode, Engines: []EngineSpec{{Engine: 3, Node: 3}}},
		GroupUp{Group: 1, Role: Prefill, Engines: []EngineSpec{{Engine: 1, Node: 1, HBMTokens: 1000}}},
		GroupUp{Group: 2, Role: Prefill, Engines: []EngineSpec{{Engine: 2, Node: 2, HBMTokens: 100}}})
	fetch := func(g GroupID, free int) []RequestID {
		l.now += time.Second
		l.step(Fetch{At: l.now, Group: g, Seen: l.p.seq, Engines: []EngineReport{{Engine: EngineID(g), HBMFree: free}}})
		starts := l.starts
		l.starts = nil
		return starts
	}
	fetch(3, 0)
	large := l.submit(Request{Tenant: "a", Prompt: 900})
	small := l.submit(Request{Tenant: "a", Prompt: 90})
	other := l.submit(Request{Tenant: "b", Prompt: 80})
	if got := fetch(1, 500); len(got) != 0 {
		t.Fatalf("granted %v; want nothing: the first request has no room", got)
	}
	if got := fetch(2, 100); !slices.Equal(got, []RequestID{small}) {
		t.Fatalf("granted %v; want request %d, which fits", got, small)
	}
	if got := fetch(1, 800); len(got) != 0 {
		t.Fatalf("granted %v; want nothing: the group keeps its room", got)
	}
	if got := fetch(1, 980); !slices.Equal(got, []RequestID{large, other}) {
		t.Fatalf("granted %v; want %v", got, []RequestID{large, other})
	}
}

// checkHeap fails if a heap is out of order, or an item does not store its index.
func checkHeap[T any](what string, q *ordered[T], fail func(string, ...any)) {
	for i, x := range q.items {
		if *q.index(x) != i+1 || (i > 0 && q.less(x, q.items[(i-1)/2])) {
			fail("the heap of %s is out of order at %d", what, i)
		}
	}
}

// checkReservation fails if a decode group is reserved for a request that is not in its queue.
func checkReservation(g *group, fail func(string, ...any)) {
	if g.reservedFor == nil {
		if g.full || len(g.closed) > 0 {
			fail("group %d: full %v, %d lanes closed, for no request", g.id, g.full, len(g.closed))
		}
		return
	}
	if g.reservedFor.home != g || g.reservedFor.lane == nil {
		fail("group %d keeps its room for request %d, which is not in its queue", g.id, g.reservedFor.ID)
	}
}

// checkFair fails unless levels, flows and lanes have each waiting request once.
func checkFair(p *Planner, fail func(string, ...any)) {
	checkHeap("levels", &p.levels, fail)
	checkHeap("cooling requests", &p.cooling, fail)
	waiting := 0
	for priority, l := range p.priorities {
		checkHeap("ready flows", &l.ready, fail)
		checkHeap("debts", &l.debts, fail)
		if l.priority != priority || (l.waiting == 0 && (len(l.flows) > 1 || len(p.priorities) > maxIdleLevels+p.queued)) || (l.at != 0) != (len(l.ready.items) != 0) || len(l.debts.items) > maxDebts {
			fail("level %d: priority %d, %d wait, place %d, %d flows ready, %d debts", priority, l.priority, l.waiting, l.at, len(l.ready.items), len(l.debts.items))
		}
		sum := 0
		for _, f := range append([]*flow{l.replanned}, flowsOf(l)...) {
			checkFlow(f, fail)
			sum += f.waiting
			if f != l.replanned && (f.waiting == 0) != (f.debtAt != 0) {
				fail("tenant %q: %d wait, place %d among the debts", f.tenant, f.waiting, f.debtAt)
			}
		}
		if sum != l.waiting {
			fail("level %d: %d wait, %d are counted", priority, sum, l.waiting)
		}
		waiting += sum
	}
	if waiting != p.queued {
		fail("%d wait in levels, %d are counted", waiting, p.queued)
	}
	for _, r := range p.requests {
		if (r.flow != nil) != (r.at != nil) || (r.lane != nil) != (r.laneAt != 0) || (r.coolingAt != 0 && (r.at == nil || r.lane != nil)) {
			fail("request %d: waits: %v, in a flow: %v, in a lane: %v, place %d, place %d of the requests that cool down", r.ID, r.at != nil, r.flow != nil, r.lane != nil, r.laneAt, r.coolingAt)
		}
	}
}

// flowsOf returns a level's flows.
func flowsOf(l *level) (flows []*flow) {
	for _, f := range l.flows {
		flows = append(flows, f)
	}
	return flows
}

// checkFlow is checkFair for one flow.
func checkFlow(f *flow, fail func(string, ...any)) {
	checkHeap("lanes", &f.lanes, fail)
	if (f.readyAt != 0) != (len(f.lanes.items) != 0) {
		fail("tenant %q: place %d, %d lanes", f.tenant, f.readyAt, len(f.lanes.items))
	}
	for home, n := range f.byHome {
		checkHeap("requests", &n.queue, fail)
		if n.home != home || (n.at != 0) != (n.queue.first() != nil && !n.closed) {
			fail("tenant %q: a lane of %d requests at place %d, closed: %v", f.tenant, len(n.queue.items), n.at, n.closed)
		}
	}
}

// TestBadWeights: the error names the tenant and the bounds.
func TestBadWeights(t *testing.T) {
	for _, w := range []float64{0, -1, 1e-9, 1e9, math.NaN(), math.Inf(1)} {
		_, err := New(Options{Weights: map[string]float64{"good": 1, "team-7": w}})
		if err == nil || !strings.Contains(err.Error(), `tenant "team-7"`) || !strings.Contains(err.Error(), "between 0.001 and 1e+06") {
			t.Errorf("weight %v: error %v", w, err)
		}
	}
}

// TestRehome: a request for which its decode group has no room moves to a group that has room
// and an empty queue, and not to one with waiting requests.
func TestRehome(t *testing.T) {
	l := newFairCluster(t, Options{Beta: 1 << 20, BlockTokens: 1},
		GroupUp{Group: 2, Role: Decode, Engines: []EngineSpec{{Engine: 2, Node: 2, HBMTokens: 1000}}},
		GroupUp{Group: 3, Role: Decode, Engines: []EngineSpec{{Engine: 3, Node: 3, HBMTokens: 1000}}},
		GroupUp{Group: 1, Role: Prefill, Engines: []EngineSpec{{Engine: 1, Node: 1}}})
	report := func(g GroupID, free int) {
		l.now += time.Millisecond
		l.step(Fetch{At: l.now, Group: g, Seen: l.p.seq, Engines: []EngineReport{{Engine: EngineID(g), Tokens: 1000 - free, HBMFree: free}}})
	}
	grants := func() (on []EngineID) {
		for _, a := range l.step(Fetch{At: l.now, Group: 1, Seen: l.p.seq, Engines: []EngineReport{{Engine: 1}}}) {
			if a.Kind == Start {
				on = append(on, a.DE)
			}
		}
		return on
	}
	report(2, 0)
	report(3, 0)
	for range 4 {
		l.submit(Request{Prompt: 600})
	}
	if got := grants(); len(got) != 0 {
		t.Fatalf("granted on %v; both groups are full", got)
	}
	if v := l.p.View(); v[1].Queued != 2 || v[2].Queued != 2 {
		t.Fatalf("%d and %d requests are routed to the groups; want 2 each", v[1].Queued, v[2].Queued)
	}
	report(3, 1000)
	if got := grants(); !slices.Equal(got, []EngineID{3}) {
		t.Fatalf("granted on %v; want engine 3 once: it has room for one of its two", got)
	}
	report(3, 1000)
	if got := grants(); !slices.Equal(got, []EngineID{3}) {
		t.Fatalf("granted on %v; want engine 3", got)
	}
	report(3, 1000)
	if got := grants(); !slices.Equal(got, []EngineID{3}) {
		t.Fatalf("granted on %v; want engine 3, which is idle and whose queue is empty", got)
	}
	if v := l.p.View(); v[1].Queued != 1 || v[2].Queued != 0 {
		t.Errorf("%d and %d requests wait; want 1 and none", v[1].Queued, v[2].Queued)
	}
}
