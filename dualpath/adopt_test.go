package dualpath

import "testing"

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
