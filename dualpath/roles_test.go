package dualpath

import (
	"testing"
	"time"
)

// changing is the state of the test cluster's changes of weights and roles.
type changing struct {
	// epoch is the newest epoch of the weights, policy that of the last bump. bumps counts the bumps by policy, ended the
	// switches by result.
	epoch  uint64
	policy Drain
	bumps  [3]int
	ended  map[Reason]int
}

// order is a leader's order to switch. until is the time at which its engines have answered.
type order struct {
	to    Role
	until time.Duration
}

// change makes the operator change weights or roles at random times.
func (w *testCluster) change() {
	if w.rng.IntN(60) == 0 {
		w.bump(Drain(w.rng.IntN(3)))
	}
	if w.rng.IntN(25) == 0 {
		s := w.groups[w.rng.IntN(len(w.groups))]
		to := s.role.Other()
		if w.rng.IntN(4) == 0 {
			to = s.role
		}
		w.step(SwitchRole{w.now, s.id, to, Drain(w.rng.IntN(2))})
	}
}

// bump begins a new epoch, or applies another policy to the requests that the last one left.
func (w *testCluster) bump(policy Drain) {
	if w.rng.IntN(4) > 0 {
		w.epoch++
	}
	w.bumps[policy]++
	w.policy = policy
	before := w.p.Older(0, w.epoch)
	ev := Epoch{At: w.now, Epoch: w.epoch, Drain: policy}
	for _, a := range w.p.Step(ev) {
		if policy == DrainFinish || (a.Kind == Reject && (policy != DrainAbort || a.Why != OldWeights)) {
			w.t.Fatalf("seed %d, %v: a bump with policy %v came to %+v", w.seed, w.now, policy, a)
		}
		w.checkDeadlines(&a)
		w.perform(&a)
	}
	check(w.p)
	want := Older{Decoding: before.Decoding, Exact: before.Exact}
	switch policy {
	case DrainFinish:
		want.Prefilling = before.Prefilling
	case DrainAbort:
		want.Decoding = 0
	}
	if left := w.p.Older(0, w.epoch); left != want {
		w.t.Fatalf("seed %d, %v: a bump with policy %v met %+v and left %+v; want %+v", w.seed, w.now, policy, before, left, want)
	}
}

// checkEpoch fails the test if a request is started with weights that are not the newest.
func (w *testCluster) checkEpoch(a *Action) {
	if r := w.p.requests[a.Request]; a.Epoch != w.epoch && !r.Exact {
		w.t.Fatalf("seed %d, %v: request %d is started with the weights of epoch %d; the newest are of epoch %d", w.seed, w.now, a.Request, a.Epoch, w.epoch)
	}
}

// switched handles an order to switch, its announcement, or the end of a switch.
func (w *testCluster) switched(a *Action) {
	if a.Kind == Switched {
		w.ended[a.Why]++
		return
	}
	s := w.groups[a.Group]
	if !s.reached() {
		w.lost[a.Kind]++
		return
	}
	s.seen = max(s.seen, a.Seq)
	if a.Kind == Announce {
		if s.announced = a.Side; a.Side == s.role {
			s.announced = 0
		}
		return
	}
	for _, b := range s.engines {
		if len(b.holds) > 0 {
			w.t.Fatalf("seed %d, %v: group %d has the order to change its role and requests %v", w.seed, w.now, s.id, sortedIDs(b.holds))
		}
	}
	if s.order.to == 0 {
		s.order = order{a.Side, w.now + time.Duration(w.rng.IntN(300))*time.Millisecond}
	}
}

// answer makes the engines of a group change their role, or refuse, when their time has come.
// The answer may be lost.
func (w *testCluster) answer(s *testGroup) {
	if s.order.to == 0 || w.now < s.order.until {
		return
	}
	to := s.order.to
	s.order, s.announced = order{}, 0
	if w.rng.IntN(3) > 0 {
		s.role = to
		s.broken = true // a new session, with the new role
		s.back = w.now
		return
	}
	if s.reached() {
		w.step(SwitchRefused{w.now, s.id})
	} else {
		w.lost[Switched]++
	}
}

// settled fails the test if a group's role differs from that of its engines.
func (w *testCluster) settled() {
	w.advance() // each lost group returns
	for end := w.now + calmWithin; ; w.advance() {
		busy := false
		for _, g := range w.p.order {
			busy = busy || g.leaving.to != 0
		}
		if !busy {
			break
		}
		if w.now > end {
			w.t.Fatalf("seed %d: a group is still being drained:\n%v", w.seed, w.p)
		}
	}
	roles := map[Role]int{}
	for _, s := range w.groups {
		g := w.p.groups[s.id]
		if g == nil || g.role != s.role || (s.role == Decode) != (g.totalAt != 0) {
			w.t.Errorf("seed %d: the planner has %+v for group %d, whose role is %v", w.seed, g, s.id, s.role)
		}
		roles[s.role]++
	}
	if roles[Prefill] == 0 || roles[Decode] == 0 {
		w.t.Errorf("seed %d: %v groups are left of each role", w.seed, roles)
	}
}

// checkChanged fails the test unless each kind of result occurred.
func checkChanged(t *testing.T, all changing) {
	t.Helper()
	for policy, n := range all.bumps {
		if n == 0 {
			t.Errorf("no bump with policy %v", Drain(policy))
		}
	}
	for _, why := range []Reason{NoReason, LastOfRole, SameRole, Ordered, RoleRefused, ByOperator, GroupLost} {
		if all.ended[why] == 0 {
			t.Errorf("switches ended %v; none for the reason %q", all.ended, why)
		}
	}
}

// TestRecent: Recent describes the last finished requests.
func TestRecent(t *testing.T) {
	p := newPlanner(t, Options{Beta: 1 << 30})
	p.Step(GroupUp{Group: 1, Role: Prefill, Engines: []EngineSpec{{Engine: 1, Node: 1}}})
	p.Step(GroupUp{Group: 2, Role: Decode, Engines: []EngineSpec{{Engine: 2, Node: 2, HBMTokens: 1000}}})
	if r := p.Recent(); r.Uncached != nil || r.Step != 0 {
		t.Errorf("before any request: %+v", r)
	}
	now := time.Duration(0)
	for id := RequestID(1); id <= recentMax+10; id++ {
		q := Request{ID: id, Prompt: 300, Hit: 64, Output: 20}
		if id > recentMax {
			q.Hit = 128
		}
		p.Step(Submit{now, q})
		p.Step(Fetch{At: now, Group: 2, Engines: []EngineReport{{Engine: 2, HBMFree: 1000}}, Seen: p.seq})
		p.Step(Fetch{At: now, Group: 1, Engines: []EngineReport{{Engine: 1}}, Seen: p.seq})
		if id == 1 {
			if use := p.Use(2); use != 0.32 { // 320 of 1000 tokens
				t.Errorf("decode is used %v", use)
			}
		}
		now += time.Second
		p.Step(Finished{At: now, Request: id, Role: Prefill})
		now += 2 * time.Second
		p.Step(Finished{At: now, Request: id, Role: Decode})
	}
	r := p.Recent()
	short := 0
	for _, n := range r.Uncached {
		if n == 300-128 {
			short++
		}
	}
	if len(r.Uncached) != recentMax || short != 10 || r.Tokens != 320 || r.Output != 20 || r.Step != 0.1 {
		t.Errorf("%d requests, %d of the last kind, %v tokens, output %v, step %v s", len(r.Uncached), short, r.Tokens, r.Output, r.Step)
	}
}
