package emulate

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
)

// bump begins a new epoch on storage, which keeps the newest keep epochs live, and on the planner.
func (c *cluster) bump(keep int, policy pb.Drain) (kv.Epoch, *pb.BumpWeightsResponse) {
	c.t.Helper()
	next, err := c.gateway.Store.BumpEpoch(c.t.Context(), "m", 0, keep)
	c.must(err)
	r, err := pb.NewPlannerClient(c.conn).BumpWeights(c.t.Context(), &pb.BumpWeightsRequest{Namespace: "m", Epoch: uint64(next), Policy: policy})
	c.must(err)
	return next, r
}

// right fails the test unless all turns succeeded and no byte on a device was wrong.
func (c *cluster) right(results []TurnResult) {
	c.t.Helper()
	for _, r := range results {
		if r.Err != nil {
			c.t.Errorf("%s, turn %d: %v", r.Session, r.Turn, r.Err)
		}
	}
	for _, e := range c.engines {
		if n := e.Counts(); n.WrongBlocks != 0 {
			c.t.Errorf("%s: %d wrong blocks", e.opts.Name, n.WrongBlocks)
		}
	}
}

// TestFinishWeights changes the weights with policy finish while a turn reads its prefix. If the
// namespace keeps the old epoch, the turn reads all of the prefix, ends with the old weights,
// and is not planned again. The next turn is computed with the new weights. If the namespace
// does not keep the epoch, the blocks that storage no longer has are computed.
func TestFinishWeights(t *testing.T) {
	for _, keep := range []int{2, 1} {
		c := (&cluster{t: t, linear: 5e-3}).start(1, 1)
		before := c.gateway.Namespace.Epoch
		var next kv.Epoch
		c.gateway.Started = func(_ string, turn int) {
			if turn != 2 || next != 0 {
				return
			}
			var r *pb.BumpWeightsResponse
			if next, r = c.bump(keep, pb.Drain_DRAIN_FINISH); r.GoingOn != 1 {
				t.Errorf("the bump met %v", r)
			}
		}
		results := c.gateway.Run(t.Context(), sessions(1, 5), 1)
		c.right(results)
		for _, r := range results {
			if r.Replans != 0 {
				t.Errorf("turn %d was planned again", r.Turn)
			}
		}
		if r := results[2]; keep == 2 && (r.Hit == 0 || r.PrefillSide+r.DecodeSide != r.Hit) {
			t.Errorf("the turn that finished: %+v", r)
		}
		x, err := pb.NewPlannerClient(c.conn).Explain(t.Context(), &pb.ExplainRequest{Request: "agent-0.2"})
		if c.must(err); keep == 2 && strings.Contains(x.String(), "recomputed") {
			t.Errorf("the turn that finished: %v", x)
		}
		if r := results[4]; r.Hit < results[3].Prompt/geo.BlockTokens*geo.BlockTokens {
			t.Errorf("the second turn with the new weights did not find the first one's blocks: %+v", r)
		}
		if n := c.engines[1].Counts().ByEpoch; n[before] != 3 || n[next] != 2 {
			t.Errorf("keep %d: turns decoded by epoch: %v; want 3 of epoch %d and 2 of epoch %d", keep, n, before, next)
		}
	}
}

// TestAbortWeights changes the weights with policy abort while a turn is in progress. Its gateway
// gets an error with a class of its own, and the engines serve the next session with the new
// weights.
func TestAbortWeights(t *testing.T) {
	c := (&cluster{t: t, linear: 5e-3}).start(1, 1)
	var once sync.Once
	c.gateway.Started = func(string, int) { once.Do(func() { c.bump(1, pb.Drain_DRAIN_ABORT) }) }
	results := c.gateway.Run(t.Context(), sessions(1, 1), 1)
	var refused *gateway.RefusedError
	if len(results) != 1 || !errors.As(results[0].Err, &refused) || refused.Refusal != gateway.OldWeights {
		t.Fatalf("the turn that was aborted: %+v", results)
	}
	c.check(c.gateway.Run(t.Context(), sessions(1, 2), 1), 2)
}

// switchRole makes the planner change a group's role.
func (c *cluster) switchRole(group string, role pb.Side, policy pb.Drain) {
	c.t.Helper()
	_, err := pb.NewPlannerClient(c.conn).SwitchRole(c.t.Context(), &pb.SwitchRoleRequest{Group: group, Role: role, Policy: policy})
	c.must(err)
}

// group waits until a group is not switching its role, and returns it.
func (c *cluster) group(name string) *pb.RolesResponse_Group {
	c.t.Helper()
	ticks := time.NewTicker(time.Millisecond)
	defer ticks.Stop()
	for {
		r, err := pb.NewPlannerClient(c.conn).Roles(c.t.Context(), &pb.RolesRequest{})
		for _, g := range r.GetGroups() {
			if err == nil && g.Group == name && g.Switching == 0 {
				return g
			}
		}
		select {
		case <-ticks.C:
		case <-c.t.Context().Done():
			c.t.Fatalf("group %s: %v, %v", name, r, err)
		}
	}
}

// TestSwitchUnderLoad makes a decode group a prefill group and a prefill group a decode group
// while turns are served. No turn is lost. With policy finish, no turn is planned again. The
// groups then serve in their new roles.
func TestSwitchUnderLoad(t *testing.T) {
	testkit.VerifyNone(t)
	for _, policy := range []pb.Drain{pb.Drain_DRAIN_FINISH, pb.Drain_DRAIN_RECOMPUTE} {
		c := (&cluster{t: t, quota: time.Second}).start(2, 2) // devices hold all layers
		turns := 0
		var operator sync.WaitGroup
		c.gateway.Done = func(TurnResult) {
			if turns++; turns == 6 {
				operator.Go(func() {
					c.switchRole("D3", pb.Side_SIDE_PREFILL, policy)
					if g := c.group("D3"); g.Role != pb.Side_SIDE_PREFILL {
						t.Errorf("group D3: %v", g)
					}
					c.switchRole("P0", pb.Side_SIDE_DECODE, policy)
				})
			}
		}
		results := c.gateway.Run(t.Context(), sessions(6, 6), 6)
		operator.Wait()
		c.check(results, 36)
		for _, r := range results {
			if policy == pb.Drain_DRAIN_FINISH && r.Replans != 0 {
				t.Errorf("%s, turn %d was planned again", r.Session, r.Turn)
			}
		}
		if g := c.group("P0"); g.Role != pb.Side_SIDE_DECODE {
			t.Errorf("group P0: %v", g)
		}
		for i := range sessions(6, 1) {
			c.right(c.gateway.Run(t.Context(), sessions(6, 1), 6))
			if c.engines[3].Counts().Batches > 0 && c.engines[0].Counts().Requests > 0 {
				break
			} else if i == 5 {
				t.Errorf("D3 has computed no batch in its new role")
			}
		}
	}
}

// TestSwitchRefused: an engine that holds two layers in device memory cannot decode. Its group
// continues in its role, and the operator gets the reason.
func TestSwitchRefused(t *testing.T) {
	testkit.VerifyNone(t)
	c := newCluster(t, 2, 1)
	turns := 0
	c.gateway.Done = func(TurnResult) {
		if turns++; turns == 3 {
			c.switchRole("P0", pb.Side_SIDE_DECODE, pb.Drain_DRAIN_FINISH)
		}
	}
	c.check(c.gateway.Run(t.Context(), sessions(4, 4), 4), 16)
	if g := c.group("P0"); g.Role != pb.Side_SIDE_PREFILL || !strings.Contains(g.Kept, "holds 2 of 4 layers") {
		t.Errorf("group P0: %v", g)
	}
}

// TestSwitchAndRestart restarts the planner while groups drain or switch roles. No turn is
// lost, and each group has the role that was ordered.
func TestSwitchAndRestart(t *testing.T) {
	testkit.VerifyNone(t)
	c := (&cluster{t: t, quota: time.Second}).start(2, 2)
	turns := 0
	c.gateway.Done = func(TurnResult) {
		switch turns++; turns {
		case 4:
			c.switchRole("D3", pb.Side_SIDE_PREFILL, pb.Drain_DRAIN_FINISH)
			c.restart()
		case 12:
			c.group("P0")
			c.group("P1") // registered with the new planner, so that P0 is not the last group of its role
			c.switchRole("P0", pb.Side_SIDE_DECODE, pb.Drain_DRAIN_RECOMPUTE)
			c.restart()
		}
	}
	c.check(c.gateway.Run(t.Context(), sessions(6, 6), 6), 36)
	for name, role := range map[string]pb.Side{"P0": pb.Side_SIDE_DECODE, "P1": pb.Side_SIDE_PREFILL, "D2": pb.Side_SIDE_DECODE, "D3": pb.Side_SIDE_PREFILL} {
		if g := c.group(name); g.Role != role {
			t.Errorf("group %s: %v; want the role %v", name, g, role)
		}
	}
	c.gateway.Done = nil
	c.right(c.gateway.Run(t.Context(), sessions(6, 1), 6))
}
