package dualpath

import (
	"testing"
	"time"
)

// TestBumpOfFoundRequest: the policy of a bump applies to a request of older weights that a group lists, also
// if its gateway has submitted it to the restarted planner before. The read in progress counts.
func TestBumpOfFoundRequest(t *testing.T) {
	q := Request{ID: 1, Prompt: 300, Hit: 64, Output: 20, Epoch: 2}
	part := Part{Prefill, 0, 64}
	for _, drain := range []Drain{DrainAbort, DrainFinish} {
		p := newPlanner(t, Options{})
		p.Step(Epoch{Epoch: 3, Drain: drain})
		p.Step(Submit{Request: q})
		for _, up := range []GroupUp{
			{Group: 1, Role: Prefill, Holding: []Held{{Request: q, Engine: 1, Peer: 2, Attempt: 7, Order: 7, Parts: []Part{part}, Reading: part, Read: 7}}},
			{Group: 2, Role: Decode, Holding: []Held{{Request: q, Engine: 2, Peer: 1, Attempt: 7, Order: 7}}},
		} {
			up.Returns, up.Seen, up.Engines = true, 7, []EngineSpec{{Engine: EngineID(up.Group), Node: NodeID(up.Group), HBMTokens: 1000}}
			p.Step(up)
			check(p)
		}
		if st := p.Stats(); st.Serving != 1 || st.Queued != 0 || st.Loading != 1 {
			t.Errorf("%v: the request of the groups: %+v", drain, st)
		}
		p.Step(Epoch{Epoch: 3, Drain: drain})
		if st := p.Stats(); (st.Aborted == 1) != (drain == DrainAbort) || (st.Serving == 1) != (drain == DrainFinish) {
			t.Errorf("%v: %+v", drain, st)
		}
	}
}

// TestPrefillGroupLostBeforeDecode: a restarted planner has a request from its prefill group. Prefill ends and the
// group is lost, and the decode group registers without the request or not at all. The request is planned again.
func TestPrefillGroupLostBeforeDecode(t *testing.T) {
	q := Request{ID: 1, Prompt: 300, Output: 20}
	for _, registers := range []bool{true, false} {
		p := newPlanner(t, Options{GroupTimeout: time.Second})
		up := func(g GroupID, role Role, holding ...Held) {
			p.Step(GroupUp{Group: g, Role: role, Returns: true, Seen: 7, Engines: []EngineSpec{{Engine: EngineID(g), Node: NodeID(g), HBMTokens: 1000}}, Holding: holding})
			check(p)
		}
		up(1, Prefill, Held{Request: q, Engine: 1, Peer: 2, Attempt: 7, Order: 7})
		p.Step(Finished{Request: 1, Role: Prefill, Attempt: 7})
		p.Step(GroupDown{Group: 1})
		if registers {
			up(2, Decode)
		}
		p.Step(Tick{At: 2 * time.Second})
		check(p)
		if st := p.Stats(); st.Queued != 1 {
			t.Errorf("registers %v: %+v", registers, st)
		}
	}
}
