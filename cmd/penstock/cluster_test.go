package main

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/cluster"
	"github.com/penstock-kv/penstock/internal/netlab"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/sim/workload"
)

// TestClusterFaults: processes die, cables are pulled, bits flip, in the middle of a
// replay on a cluster in network namespaces. Every turn ends well and within its
// deadline, and no wrong byte reaches a device.
func TestClusterFaults(t *testing.T) {
	testkit.VerifyNone(t)
	if testing.Short() {
		t.Skip("starts 50 processes; not with -short")
	}
	netlab.ForTest(t) // says whether there can be namespaces
	set, err := workload.Table2Set("64K")
	if err != nil {
		t.Fatal(err)
	}
	agents := workload.Scale{Rounds: 8, Tokens: 1. / 16}.Apply(set.Generate(6, 1))
	turns := 0
	for _, a := range agents {
		turns += len(a.Rounds)
	}
	again := func(ctx context.Context, c *cluster.Cluster, name string) error {
		if err := c.Kill(name); err != nil {
			return err
		}
		return c.Restart(ctx, name)
	}
	for _, f := range []struct {
		name string
		do   func(ctx context.Context, c *cluster.Cluster) error
	}{
		{"kill decode", func(_ context.Context, c *cluster.Cluster) error { return c.Kill("D1") }},
		{"kill prefill", func(_ context.Context, c *cluster.Cluster) error { return c.Kill("P1") }},
		{"planner again", func(ctx context.Context, c *cluster.Cluster) error { return again(ctx, c, "planner") }},
		{"storage again", func(ctx context.Context, c *cluster.Cluster) error { return again(ctx, c, "storage") }},
		{"slow NIC", func(_ context.Context, c *cluster.Cluster) error {
			return c.SetRate(cluster.NIC{Node: "D0", Storage: true}, 2e6)
		}},
		{"cable pulled", func(ctx context.Context, c *cluster.Cluster) error {
			if err := c.Plug(cluster.NIC{Node: "D0"}, false); err != nil {
				return err
			}
			if err := c.AfterTurns(ctx, 2*turns/3); err != nil {
				return err
			}
			return c.Plug(cluster.NIC{Node: "D0"}, true)
		}},
		{"bits", func(_ context.Context, c *cluster.Cluster) error {
			// One in seventy is caught. So many that a request fails MaxAttempts times would be refused, and a slow machine
			// would meet ever more of them.
			const flips = 100
			for _, node := range []string{"P0", "D0"} {
				if err := c.FlipBuffer(node, time.Millisecond, flips); err != nil {
					return err
				}
			}
			return nil
		}},
	} {
		t.Run(f.name, func(t *testing.T) {
			const deadline = 2 * time.Minute
			spec := cluster.Spec{
				Prefill: 2, Decode: 2, Dir: t.TempDir(), Env: append(os.Environ(), childEnv), BufferBytes: 16 << 20,
				GroupTimeout: time.Second, Deadline: deadline,
			}
			r, err := cluster.Run(t.Context(), spec, cluster.Workload{Agents: cluster.Sessions(f.name, agents), Parallel: 6, During: func(ctx context.Context, c *cluster.Cluster) error {
				if err := c.AfterTurns(ctx, turns/3); err != nil {
					return err
				}
				return f.do(ctx, c)
			}})
			if err != nil {
				t.Fatal(err)
			}
			if r.Turns != turns || r.Failed != 0 || r.WrongBlocks != 0 || r.CheckedBytes == 0 || r.Longest > deadline {
				t.Errorf("%d of %d turns, %d failed %q, %d wrong blocks, longest turn %v", r.Turns, turns, r.Failed, r.Failures, r.WrongBlocks, r.Longest)
			}
			t.Logf("%v, longest turn %v, planned anew %d, recomputed %d, caught %d of %d flipped", r.Completion, r.Longest, r.Replans, r.Planner.Recomputes, r.CaughtBlocks, r.Flipped)
		})
	}
}
