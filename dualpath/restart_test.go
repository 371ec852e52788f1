package dualpath

import (
	"slices"
	"testing"
	"time"
)

// restarting is the state of the test cluster's restarts of the planner.
type restarting struct {
	options Options
	// away has the requests that gateways have not submitted to the planner again.
	away map[RequestID]bool
	// resumed counts the switches that a restarted planner has begun or is going to begin.
	resumed int
}

// restart replaces the planner by one that has the epoch of the weights and no other state. As the
// planner of a later term it has higher numbers. The groups register again one after the other.
func (w *testCluster) restart() {
	o := w.options
	o.FirstSeq = w.p.seq + 1000
	w.p = newPlanner(w.t, o)
	for _, s := range w.groups {
		if s.reached() {
			s.broken, s.back = true, w.now+time.Duration(w.rng.IntN(500))*time.Millisecond
		}
	}
	for id := range w.trouble.asked {
		if !w.over[id] {
			w.away[id] = true
		}
	}
	w.bumpAgain()
}

// bumpAgain applies the last bump to the requests of a new planner.
func (w *testCluster) bumpAgain() {
	if w.epoch > 0 {
		w.step(Epoch{At: w.now, Epoch: w.epoch, Drain: w.policy})
	}
}

// registered checks the switch of a group that has registered, and applies the last bump to requests
// that are new to the planner.
func (w *testCluster) registered(ev *GroupUp) {
	if ev.Again {
		return
	}
	if ev.Announced != 0 && ev.Switching == 0 {
		w.resumed++
		if g := w.p.groups[ev.Group]; g.leaving.to != ev.Announced {
			w.t.Fatalf("seed %d, %v: group %d has registered with a switch to %v, and the planner has %+v", w.seed, w.now, ev.Group, ev.Announced, g.leaving)
		}
	}
	w.bumpAgain()
}

// resubmit makes gateways submit requests again after a restart. A request that a group has listed
// gets its gateway without an event.
func (w *testCluster) resubmit() {
	for _, id := range sortedIDs(w.away) {
		if w.rng.IntN(20) > 0 {
			continue
		}
		delete(w.away, id)
		if w.over[id] || w.p.requests[id] != nil {
			continue
		}
		r := w.trouble.asked[id]
		if w.trouble.answered[id] {
			r.FirstToken = 0
		}
		w.step(Submit{w.now, r})
	}
}

// listed returns the request as the group's registration lists it. A restarted planner does not get that
// the first token has been produced, so such a request has no deadline for it here.
func (w *testCluster) listed(b *testEngine, h *holding, ended bool) Held {
	l := Held{Request: h.asked, Engine: b.spec.Engine, Attempt: h.attempt, Order: h.order, Peer: h.peer, Parts: slices.Clone(h.parts), Ended: ended}
	if h.read != nil {
		l.Reading, l.Read = h.read.part, h.read.order
	}
	if w.trouble.answered[h.asked.ID] {
		l.Request.FirstToken = 0
	}
	return l
}

// cut shortens the last read of a part to the tokens that have arrived.
func (h *holding) cut(part Part, upto int) {
	for i := len(h.parts) - 1; i >= 0; i-- {
		if h.parts[i] == part {
			h.parts[i].To = upto
			return
		}
	}
}

// drained has two groups of each role, of which the decode group 3 has a request and is going to
// change its role. announced is the role of the last announcement to that group.
type drained struct {
	*testing.T
	p         *Planner
	now       time.Duration
	announced Role
	ordered   bool
	why       Reason
}

var drainedRequest = Request{ID: 1, Prompt: 300, Output: 20}

func newDrained(t *testing.T) *drained {
	l := &drained{T: t}
	l.restart()
	l.up(1, Prefill)
	l.up(3, Decode)
	l.step(Submit{l.now, drainedRequest})
	for _, id := range []GroupID{3, 1} {
		l.step(Fetch{At: l.now, Group: id, Seen: l.p.seq, Engines: []EngineReport{{Engine: EngineID(id), HBMFree: 1000}}})
	}
	l.up(2, Prefill)
	l.up(4, Decode)
	l.step(SwitchRole{l.now, 3, Prefill, DrainFinish})
	if l.announced != Prefill || l.ordered {
		t.Fatalf("announced %v, ordered %v", l.announced, l.ordered)
	}
	return l
}

func (l *drained) step(ev Event) {
	for _, a := range l.p.Step(ev) {
		switch {
		case a.Kind == Switched:
			l.why = a.Why
		case a.Kind == Announce && a.Group == 3:
			l.announced = a.Side
		case a.Kind == Switch && a.Group == 3:
			l.ordered = true
		}
	}
	check(l.p)
}

// restart replaces the planner by one without state.
func (l *drained) restart() { l.p = newPlanner(l.T, Options{GroupTimeout: time.Second}) }

// up registers a group of one engine.
func (l *drained) up(id GroupID, role Role) {
	l.step(GroupUp{At: l.now, Group: id, Role: role, Engines: []EngineSpec{{Engine: EngineID(id), Node: NodeID(id), HBMTokens: 1000}}})
}

// back registers group 3 with its request, in a new session, or at a planner that does not have the group.
func (l *drained) back(again bool) {
	held := Held{Request: drainedRequest, Engine: 3, Peer: 1, Attempt: 7}
	if r := l.p.requests[1]; r != nil {
		held.Attempt = r.attempt
	}
	to := l.announced
	if to == Decode {
		to = 0
	}
	l.step(GroupUp{
		At: l.now, Group: 3, Role: Decode, Returns: true, Again: again, Seen: 100, Announced: to,
		Engines: []EngineSpec{{Engine: 3, Node: 3, HBMTokens: 1000}}, Holding: []Held{held},
	})
}

// TestResumedSwitch: a restarted planner continues a switch, whichever group registers first. The
// group gets the order when its request has ended.
func TestResumedSwitch(t *testing.T) {
	for _, first := range []bool{true, false} {
		l := newDrained(t)
		l.restart()
		if first {
			l.back(false)
			if g := l.p.groups[3]; g.switching() || g.leaving.to != Prefill {
				t.Errorf("the only decode group: %+v", g.leaving)
			}
		}
		l.up(1, Prefill)
		l.up(4, Decode)
		if !first {
			l.back(false)
		}
		if g := l.p.groups[3]; !g.switching() || l.ordered || l.p.requests[1].phase != serving {
			t.Errorf("a group whose switch continues: %+v, ordered %v", g.leaving, l.ordered)
		}
		l.step(Finished{At: l.now, Request: 1, Role: Decode})
		l.step(Tick{l.now})
		if !l.ordered {
			t.Error("the drained group has no order")
		}
		l.up(3, Prefill)
		if st := l.p.Stats(); st.Switched != 1 || st.SwitchesFailed != 0 {
			t.Errorf("%+v", st)
		}
	}
}

// TestUnresumedSwitch: the switch of the only group of its role ends after Options.GroupTimeout, or
// when the operator withdraws it. A later planner does not continue it.
func TestUnresumedSwitch(t *testing.T) {
	for _, want := range []Reason{LastOfRole, ByOperator} {
		l := newDrained(t)
		l.restart()
		l.back(false)
		l.now += time.Second - 1
		l.step(Fetch{At: l.now, Group: 3})
		l.step(Tick{l.now})
		if g := l.p.groups[3]; g.leaving.to != Prefill {
			t.Fatalf("the switch has ended: %v", l.why)
		}
		if want == ByOperator {
			l.step(SwitchRole{l.now, 3, Decode, DrainFinish})
		} else {
			l.now++
			l.step(Tick{l.now})
		}
		if g := l.p.groups[3]; g.leaving.to != 0 || l.why != want || l.announced != Decode {
			t.Errorf("%+v, %v, announced %v; want %v", g.leaving, l.why, l.announced, want)
		}
		l.restart()
		l.up(4, Decode)
		l.back(false)
		if g := l.p.groups[3]; g.leaving.to != 0 {
			t.Errorf("a switch that has ended continues: %+v", g.leaving)
		}
	}
}

// TestAnnouncedAgain: the announcement of a switch, or of its withdrawal, is lost with the session of
// the group. The planner repeats it.
func TestAnnouncedAgain(t *testing.T) {
	l := newDrained(t)
	l.announced = 0
	l.back(true)
	if g := l.p.groups[3]; !g.switching() || l.announced != Prefill {
		t.Errorf("%+v, announced %v", g.leaving, l.announced)
	}
	l.step(SwitchRole{l.now, 3, Decode, DrainFinish})
	l.announced = Prefill
	l.back(true)
	if g := l.p.groups[3]; g.leaving.to != 0 || l.announced != Decode {
		t.Errorf("%+v, announced %v", g.leaving, l.announced)
	}
}

// TestSwitchBesideRegistration: the only other group of the role registers again, because its session
// broke or its engines changed. The switch continues. It ends when that group is lost.
func TestSwitchBesideRegistration(t *testing.T) {
	l := newDrained(t)
	l.up(4, Decode)
	if g := l.p.groups[3]; !g.switching() || l.why != NoReason {
		t.Errorf("%+v, %v", g.leaving, l.why)
	}
	l.step(GroupDown{l.now, 4})
	if g := l.p.groups[3]; g.leaving.to != 0 || l.why != LastOfRole || l.announced != Decode {
		t.Errorf("after the loss of the other group: %+v, %v, announced %v", g.leaving, l.why, l.announced)
	}
}
