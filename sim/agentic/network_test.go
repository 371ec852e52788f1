package agentic

import (
	"context"
	"math"
	"testing"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/sim/workload"
)

// TestNetwork: with the network's cost the planner completes a whole job and ends every transfer.
// On a network that is no bottleneck the job takes no longer than without the cost.
func TestNetwork(t *testing.T) {
	spec, err := workload.Table2Set("32K")
	if err != nil {
		t.Fatal(err)
	}
	agents := workload.Agents(spec.Generate(100, 1), 100, 32768, 1)
	run := func(n *netcost.Planner) *Result {
		o := Options{System: DualPathSplit, Model: DeepSeek27B(), PrefillNodes: 1, DecodeNodes: 2, Agents: agents, Seed: 1}
		if n != nil {
			o.Planner.Network = n
		}
		c, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		r, err := c.Run(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	m := DeepSeek27B()
	fabric := netcost.Fabric{Bandwidth: [netcost.Tiers]float64{450e9, 50e9, 50e9, 50e9}}
	n, err := netcost.NewPlanner(netcost.PlannerOptions{
		Fabric: fabric, BytesPerToken: int(m.KVBytes), Overlap: true, Model: netcost.Model{Step: m.StepBase, StepPerRequest: m.StepPer},
	})
	if err != nil {
		t.Fatal(err)
	}
	without, with := run(nil), run(n)
	if with.Rounds != without.Rounds || math.Abs(with.JCT.Seconds()/without.JCT.Seconds()-1) > 0.05 {
		t.Errorf("%d rounds in %v with the network, %d in %v without", with.Rounds, with.JCT, without.Rounds, without.JCT)
	}
	for node := range dualpath.NodeID(3) {
		for tier := range netcost.Tier(netcost.Tiers) {
			if left := n.Oracle().InFlight(node, tier); left != 0 {
				t.Errorf("%d transfers of node %d on tier %d are counted after the job", left, node, tier)
			}
		}
	}
}
