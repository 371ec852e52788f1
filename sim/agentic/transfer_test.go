package agentic

import (
	"fmt"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/sim/workload"
)

// TestTransfersByHand compares one agent's times with a calculation by hand. The compute
// NICs are slower than the computation. TestOneRound has faster NICs, and the oracle.
func TestTransfersByHand(t *testing.T) {
	m := Model{
		Name: "round numbers", KVBytes: 1000, Linear: 1e9, AttentionFixed: 1e9, AttentionPerContext: 1e6, FLOPS: 1e12,
		StepBase: 10 * time.Millisecond, StepPer: 2 * time.Millisecond, PrefillHBM: 1 << 20, DecodeHBM: 1 << 20,
	}
	const (
		computed0            = 0.160                 // 100 tokens
		computed1, computed2 = 0.08765, 0.09035      // 50 tokens after 128, and after 182
		hbm                  = 0.100 + 0.178 + 0.232 // whole prompts from memory to HBM
		decoded              = (27 + 3 + 3) * 0.012  // steps of one request
		read, loaded         = 0.128, 0.128          // two blocks by the storage NIC, and into the prefill engine's HBM
		sent                 = 0.178                 // two blocks and 50 tokens to the decode engine
	)
	for _, c := range []struct {
		system    System
		prefill   int64 // tokens read by the prefill node
		ttft, jct float64
	}{
		// Basic transfers nothing during a step: after the step the whole prompt is sent from HBM
		// to HBM.
		{Basic, 256, computed0 + 2*read + computed1 + computed2, computed0 + 2*read + computed1 + computed2 + hbm + decoded},
		// The steps wait for their loads. The same NIC also sends the prompt, which takes longer.
		{Layerwise, 256, computed0 + 2*read + 2*loaded, computed0 + 2*read + 2*(loaded+sent) + hbm + decoded},
		// The two nodes read in turn. KV that the decode node read is loaded from there, and only
		// the 50 new tokens are sent back.
		{RoundRobin, 128, computed0 + 2*read + 2*loaded, computed0 + 2*read + loaded + sent + loaded + hbm + decoded},
	} {
		r := run(t, Options{
			System: c.system, Model: m, PrefillNodes: 1, DecodeNodes: 1, GPUs: 2, SNIC: 1e6, CNIC: 1e6, StepOverhead: 5 * time.Millisecond, FetchEvery: time.Nanosecond,
			Agents: []workload.Trajectory{{ID: 0, Rounds: []workload.Round{{Append: 100, Gen: 28}, {Append: 50, Gen: 4}, {Append: 50, Gen: 4}}}},
		})
		if r.Read[0] != c.prefill || r.Read[0]+r.Read[1] != 256 {
			t.Errorf("%v: read %v; want %d and the rest of 256", c.system, r.Read, c.prefill)
		}
		between(t, fmt.Sprintf("%v: TTFT", c.system), r.Latency.TTFT, c.ttft*(1-1e-6), c.ttft*(1+1e-6))
		between(t, fmt.Sprintf("%v: JCT", c.system), r.JCT.Seconds(), c.jct*(1-1e-6), c.jct*(1+1e-6))
	}
}

// TestTransfersConserved: each decode engine's NIC receives every token of a prompt once
// into the HBM, and once into its node's memory unless the token was read there. This holds
// wherever tokens are read and however prompts are cut.
func TestTransfersConserved(t *testing.T) {
	agents := agents64K(40)
	var appended, cached int64
	for i := range agents {
		agents[i].Turns(func(_ int, turn workload.Turn) bool {
			appended += int64(turn.Append)
			cached += int64(turn.Context)
			return true
		})
	}
	for _, s := range []System{Layerwise, RoundRobin, DualPath, DualPathSplit} {
		c, err := New(Options{System: s, Model: DeepSeek660B(), PrefillNodes: 1, DecodeNodes: 2, Agents: agents})
		if err != nil {
			t.Fatal(err)
		}
		r, err := c.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var in, out int64
		for _, d := range c.decode {
			in += d.cnic.in.carried
			out += d.cnic.out.carried
		}
		if want := r.Read[0] + appended + cached + appended; in != want {
			t.Errorf("%v: decode engines took %d tokens; want %d", s, in, want)
		}
		// A decode engine's NIC sends the tokens that were read on its node, again for each
		// further step of a cut prompt, and the copies into the HBM.
		if least := r.Read[1] + r.Read[2] + cached + appended; out < least || (s == Layerwise && out != least) {
			t.Errorf("%v: decode engines sent %d tokens; want at least %d", s, out, least)
		}
	}
}

// TestBuffers: the planner starts no request for which an engine's buffer has no room (the simulator
// ends a run with an error if it does). With buffers that hold one prompt of the longest kind, all agents end, later than with
// unlimited buffers, and the buffers are empty at the end. Buffers that are never full change no decision.
func TestBuffers(t *testing.T) {
	testkit.Long(t, "simulates whole jobs")
	t.Parallel()
	agents := agents64K(60)
	longest := 0
	for i := range agents {
		longest = max(longest, agents[i].Total())
	}
	for _, s := range []System{Layerwise, RoundRobin, DualPath, DualPathSplit} {
		o := Options{System: s, Model: DeepSeek660B(), PrefillNodes: 1, DecodeNodes: 2, Agents: agents}
		unlimited := run(t, o)
		o.BufferBytes = 8 * int64(longest+64) * o.Model.KVBytes
		c, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		small, err := c.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if small.Agents != len(agents) || small.JCT <= unlimited.JCT || small.Latency.Queued <= unlimited.Latency.Queued {
			t.Errorf("%v: small buffers: %d agents end at %v, %v s for engines; with unlimited buffers %d at %v, %v s",
				s, small.Agents, small.JCT, small.Latency.Queued, unlimited.Agents, unlimited.JCT, unlimited.Latency.Queued)
		}
		for _, e := range c.prefill {
			if e.buffered != 0 {
				t.Errorf("%v: prefill engine %d has %d bytes in its buffer at the end", s, e.id, e.buffered)
			}
		}
		for _, e := range c.decode {
			if e.buffered != 0 {
				t.Errorf("%v: decode engine %d has %d bytes in its buffer at the end", s, e.id, e.buffered)
			}
		}
		o.BufferBytes *= int64(len(agents))
		if large := run(t, o); large.JCT != unlimited.JCT {
			t.Errorf("%v: the job takes %v with buffers for all prompts, %v with unlimited buffers", s, large.JCT, unlimited.JCT)
		}
	}
}
