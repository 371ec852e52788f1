package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/lab/emulate"
	"github.com/penstock-kv/penstock/lab/netlab"
	"github.com/penstock-kv/penstock/sim/workload"
)

// TestClusterFaults kills processes, disconnects links and flips bits during a replay on a cluster
// in network namespaces. Every turn succeeds within its deadline, and no wrong byte reaches a
// device.
func TestClusterFaults(t *testing.T) {
	testkit.VerifyNone(t)
	testkit.Long(t, "starts 50 processes")
	netlab.ForTest(t) // skips without network namespaces
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
			// About one in seventy is detected. With many more, a request would fail MaxAttempts
			// times and be refused, in particular on a slow machine.
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

// TestClusterNewWeights: the weights of a cluster in network namespaces change while the
// KV of the first turn of each agent is being read. Every turn succeeds with the new
// weights and stores its KV under the new epoch. The KV on the devices has the epoch of
// the request, and no request after the change is served with the old epoch.
func TestClusterNewWeights(t *testing.T) {
	testkit.VerifyNone(t)
	testkit.Long(t, "starts 7 processes")
	netlab.ForTest(t)
	const agents, rounds, prefix = 4, 3, 8192 // tokens
	spec := cluster.Spec{Prefill: 2, Decode: 2, Dir: t.TempDir(), Env: append(os.Environ(), childEnv), BufferBytes: 64 << 20}
	c, err := cluster.Start(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	open := true
	defer func() {
		if open {
			_ = c.Close() // after t.Fatal
		}
	}()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// The name of a session determines its tokens, so the second replay finds the KV
	// that the first replay stored.
	var before, after []emulate.Session
	for i := range agents {
		name := fmt.Sprintf("agent-%d", i)
		before = append(before, emulate.Session{Name: name, Turns: []emulate.Turn{{Append: prefix}}})
		turns := []emulate.Turn{{Append: prefix + 100, Output: 20}}
		for range rounds - 1 {
			turns = append(turns, emulate.Turn{Append: 100, Output: 20})
		}
		after = append(after, emulate.Session{Name: name, Turns: turns})
	}
	warm, _, err := c.Replay(t.Context(), before, agents)
	must(err)
	for _, turn := range warm {
		if turn.Failed {
			t.Fatalf("%s, before the new weights: %s", turn.Session, turn.Err)
		}
	}
	// Reading four prefixes of 16 MiB over four NICs of 2 Mbit/s takes a minute, so none
	// is complete when the weights change.
	rates := func(bits uint64) {
		for _, n := range c.NICs() {
			if n.Storage {
				must(c.SetRate(n, bits))
			}
		}
	}
	rates(2e6)
	type outcome struct {
		turns []cluster.Turn
		err   error
	}
	replayed := make(chan outcome, 1)
	go func() {
		turns, _, err := c.Replay(t.Context(), after, agents)
		replayed <- outcome{turns, err}
	}()
	must(c.AfterStarts(t.Context(), agents))
	must(c.AfterBytes(t.Context(), 512<<10))
	epoch, err := c.BumpWeights(t.Context())
	must(err)
	rates(200e6)
	r := <-replayed
	must(r.err)
	open = false
	must(c.Close())

	left, replans := map[string]int{}, 0
	for _, turn := range r.turns {
		if turn.Failed {
			t.Errorf("%s, turn %d: %s", turn.Session, turn.Turn, turn.Err)
		}
		if want := left[turn.Session] / 32 * 32; turn.Turn > 0 && turn.Hit < want {
			t.Errorf("%s, turn %d: %d tokens hit; the turn before stored %d with the new weights", turn.Session, turn.Turn, turn.Hit, want)
		}
		if turn.Turn == 0 && turn.Hit < prefix/2 {
			t.Errorf("%s: %d tokens of the old weights hit; want %d or more, so that the change interrupts a read", turn.Session, turn.Hit, prefix/2)
		}
		left[turn.Session] = turn.Prompt + 20
		replans += turn.Replans
	}
	if len(r.turns) != agents*rounds || replans < agents {
		t.Errorf("%d turns, planned again %d times; want %d, and each of %d first turns at least once", len(r.turns), replans, agents*rounds, agents)
	}
	served, checked, wrong := map[kv.Epoch]uint64{}, uint64(0), uint64(0)
	for _, n := range c.Counts() {
		checked, wrong = checked+n.CheckedBytes, wrong+n.WrongBlocks
		for e, requests := range n.ByEpoch {
			served[e] += requests
		}
	}
	// Both the prefill engine and the decode engine of a request count it.
	if want := (map[kv.Epoch]uint64{epoch - 1: 2 * agents, epoch: 2 * agents * rounds}); !maps.Equal(served, want) {
		t.Errorf("requests served by epoch: %v, want %v", served, want)
	}
	if checked == 0 || wrong != 0 {
		t.Errorf("%d wrong blocks among %d bytes on devices", wrong, checked)
	}
}
