package dualpath

import "time"

// conditions is a test cluster's state of tenants, priorities, deadlines and slow NICs.
type conditions struct {
	// backlog: three tenants always have requests of one priority in the queue. granted is the
	// granted work of each.
	backlog bool
	granted map[string]float64
	// slow is the time until which the reads of a group are slow.
	slow map[GroupID]time.Duration
	// asked has the latest submission of each request. answered has the requests whose first token has
	// arrived since then.
	asked    map[RequestID]Request
	answered map[RequestID]bool
	ended    map[Reason]int
	// looked counts the checks of idle engines while requests waited.
	looked int
}

func newTrouble(backlog bool) conditions {
	return conditions{
		backlog: backlog, granted: map[string]float64{}, slow: map[GroupID]time.Duration{}, asked: map[RequestID]Request{}, answered: map[RequestID]bool{}, ended: map[Reason]int{},
	}
}

// troubleWeights are the tenants' weights in every test cluster.
var troubleWeights = map[string]float64{"a": 1, "b": 2, "c": 4}

// backlogOf is the least number of waiting requests of each tenant in a backlog.
const backlogOf = 15

// fill submits requests until each tenant of a backlog has enough waiting.
func (w *testCluster) fill(next func() Request) {
	for _, tenant := range []string{"a", "b", "c"} {
		n := 0
		for id := range w.waiting {
			if w.trouble.asked[id].Tenant == tenant {
				n++
			}
		}
		for ; n < backlogOf; n++ {
			r := next()
			r.Tenant = tenant
			w.waiting[r.ID] = true
			w.step(Submit{w.now, r})
		}
	}
}

// randomize gives a request a random tenant, priority and deadlines.
func (w *testCluster) randomize(r Request) Request {
	r.Tenant = []string{"", "a", "b", "c"}[w.rng.IntN(4)]
	if w.rng.IntN(8) == 0 {
		r.Priority = w.rng.IntN(3) - 1
	}
	if w.rng.IntN(4) == 0 {
		r.FirstToken = w.now + 1 + time.Duration(w.rng.IntN(3000))*time.Millisecond
	}
	if w.rng.IntN(8) == 0 {
		r.Deadline = w.now + 1 + time.Duration(w.rng.IntN(4000))*time.Millisecond
	}
	return r
}

// slowNIC makes the reads of a group's node slow for some time.
func (w *testCluster) slowNIC() {
	if w.rng.IntN(50) == 0 {
		w.trouble.slow[GroupID(w.rng.IntN(len(w.groups)))] = w.now + time.Duration(w.rng.IntN(1500))*time.Millisecond
	}
}

// rateOf is the rate of a group's storage NIC that its node reports, in tokens a second.
func (w *testCluster) rateOf(g GroupID) float64 {
	if w.now < w.trouble.slow[g] {
		return 500
	}
	return 10_000
}

// delayOf returns the additional time of a read of a group.
func (w *testCluster) delayOf(g GroupID) time.Duration {
	if w.now < w.trouble.slow[g] {
		return time.Second
	}
	return 0
}

// note records an event before it is fed.
func (w *testCluster) note(ev Event) {
	if s, ok := ev.(Submit); ok {
		w.trouble.asked[s.Request.ID] = s.Request
		delete(w.trouble.answered, s.Request.ID)
	}
}

// checkDeadlines checks an action against the deadlines of its request.
func (w *testCluster) checkDeadlines(a *Action) {
	x, q := &w.trouble, w.trouble.asked[a.Request]
	first := q.FirstToken != 0 && !x.answered[a.Request]
	switch a.Kind {
	case Prefilled:
		x.answered[a.Request] = true
	case Start:
		x.granted[q.Tenant] += w.p.cost(w.p.requests[a.Request])
		if (first && w.now >= q.FirstToken) || (q.Deadline != 0 && w.now >= q.Deadline) {
			w.t.Fatalf("seed %d, %v: request %d is started after its deadline: %+v", w.seed, w.now, a.Request, q)
		}
	case Reject:
		x.ended[a.Why]++
		switch {
		case a.Why == FirstTokenLate && (!first || a.Need < a.Most):
			w.t.Fatalf("seed %d, %v: request %d is refused as late, in %d of %d us: %+v", w.seed, w.now, a.Request, a.Need, a.Most, q)
		case a.Why == PastDeadline && (q.Deadline == 0 || q.Deadline > w.now):
			w.t.Fatalf("seed %d, %v: request %d is refused before its deadline: %+v", w.seed, w.now, a.Request, q)
		}
	}
}

// conserving fails if a prefill group that has fetched leaves an engine idle although a waiting
// request could use it and an idle decode engine of the request's decode group. An engine with
// a long reading queue comes after those with a short one, and a request that failed avoids its
// failed engines. If a group keeps its room for a request that cannot use the idle engine, the
// engine stays idle. An engine that was avoided is used again when its group has reported.
func (w *testCluster) conserving(s *testGroup) {
	g := w.p.groups[s.id]
	if g == nil || g.role != Prefill || g.switching() || w.p.queued == 0 {
		return
	}
	idle := func(en *engine) bool { return en.tok == 0 && en.left == en.size && en.group.heard >= en.avoidUntil }
	useful := func(en *engine, r *request) bool { return w.p.takes(en, r) && !w.p.mayAvoid(r) }
	for _, pe := range g.engines {
		if !idle(pe) || w.p.classOf(pe) != shortQueue || (g.keptFor != nil && !useful(pe, g.keptFor)) {
			continue
		}
		for _, d := range w.p.order {
			if d.role != Decode || d.switching() {
				continue
			}
			for _, de := range d.engines {
				if !idle(de) || (d.reservedFor != nil && !useful(de, d.reservedFor)) {
					continue
				}
				w.trouble.looked++
				for _, r := range w.p.requests {
					mine := r.home == d || (r.lane != nil && d.private.Len() == 0 && (r.lane.at != 0 || r.home.reservedFor == r))
					if r.at != nil && mine && useful(pe, r) && useful(de, r) {
						w.t.Fatalf("seed %d, %v: engines %d and %d are idle, and request %d waits\n%v", w.seed, w.now, pe.id, de.id, r.ID, w.p)
					}
				}
			}
		}
	}
}
