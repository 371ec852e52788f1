package agentic

import (
	"fmt"
	"math"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/batch"
	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/sim/workload"
)

// System is a system to compare. The first four are the rows of the ablation in section 7.5 of the
// DualPath paper; each row adds one feature to the row before it.
type System uint8

const (
	// Basic reads at the prefill node, holds a request's HBM during the read, and packs all ready
	// requests into a step.
	Basic System = iota
	// Layerwise differs from Basic in two ways: a request holds no HBM during the read, and the
	// compute quota bounds a step. In the paper all systems except Basic have the quota (section
	// A.4).
	Layerwise
	// RoundRobin is Layerwise, but the prefill node and the decode node read alternately, each for
	// one request.
	RoundRobin
	// DualPath is the paper's system: the node with the shorter reading queue reads.
	DualPath
	// DualPathSplit is the production planner with its defaults: both nodes read parts of one
	// request.
	DualPathSplit
	// Oracle is DualPath without reads and transfers.
	Oracle
)

var systemNames = [...]string{"basic", "layerwise", "round-robin", "dualpath", "dualpath-split", "oracle"}

// String returns the system's name, as in scenarios.
func (s System) String() string {
	if int(s) < len(systemNames) {
		return systemNames[s]
	}
	return fmt.Sprintf("system %d", uint8(s))
}

// ParseSystem is the inverse of String.
func ParseSystem(name string) (System, error) {
	for i, n := range systemNames {
		if n == name {
			return System(i), nil
		}
	}
	return 0, fmt.Errorf("agentic: system %q; it must be one of %q", name, systemNames)
}

// Options are the options of a run.
type Options struct {
	System System
	Model  Model
	// PrefillNodes and DecodeNodes are numbers of nodes. Each node has GPUs engines (default 8), a
	// storage NIC of SNIC bytes/s (default 50e9), and a compute NIC of CNIC bytes/s for each engine
	// (default 50e9).
	PrefillNodes, DecodeNodes, GPUs int
	SNIC, CNIC                      float64
	// BufferBytes is the DRAM of a node for KV in transit. Each engine of the node has an equal share
	// as its buffer, and registers the buffer with the planner. 0: buffers are unlimited. Basic and
	// Oracle have no buffers.
	BufferBytes int64
	// PrefillGroup and DecodeGroup are the numbers of nodes per group; the default is all nodes.
	PrefillGroup, DecodeGroup int

	// Agents are the agents to run. With Arrivals, agent i begins at Arrivals[i], else all begin at
	// time 0. Each round of an agent begins when the round before it ends.
	Agents   []workload.Trajectory
	Arrivals []time.Duration
	// Until is the virtual time at which the run ends; 0 means that it ends when all agents are
	// done.
	Until time.Duration

	// BlockTokens is the number of tokens per block; default 64.
	BlockTokens int
	// RecomputeTail makes prefill also compute the last tokens of the context, which fill no block.
	RecomputeTail bool
	// Quota is the longest attention time of an engine in a step, over all layers; default 300 ms
	// (section A.4 of the DualPath paper). With NoQuota a step contains all ready requests, as in
	// Basic.
	Quota   time.Duration
	NoQuota bool
	// StepOverhead is the part of a prefill step's duration that does not depend on the step's
	// tokens; default 30 ms.
	StepOverhead time.Duration
	// FetchEvery is the time between two fetches of a group; default 20 ms.
	FetchEvery time.Duration
	// SLO is the objective with which the latencies of rounds are compared; default PaperSLO. It
	// affects no decision of the planner.
	SLO SLO
	// Planner has further options of the planner. System determines the planner's policy. Rates
	// that are 0 are derived from the model, and so are the planner's alpha and beta.
	Planner dualpath.Options
	// Record, if not nil, is called with every event passed to the planner and the actions that
	// Step returned. The actions are valid only during the call.
	Record func(dualpath.Event, []dualpath.Action)
	// Progress, if not nil, is called at intervals with the number of completed rounds and the
	// virtual time.
	Progress func(rounds int, now time.Duration)
	Seed     uint64
}

// ensureDefaults fills the fields that are zero.
func (o *Options) ensureDefaults() {
	options.SetDefault(&o.GPUs, 8)
	options.SetDefault(&o.SNIC, 50e9)
	options.SetDefault(&o.CNIC, 50e9)
	options.SetDefault(&o.PrefillGroup, o.PrefillNodes)
	options.SetDefault(&o.DecodeGroup, o.DecodeNodes)
	options.SetDefault(&o.BlockTokens, 64)
	options.SetDefault(&o.Quota, batch.DefaultQuota)
	options.SetDefault(&o.StepOverhead, 30*time.Millisecond)
	options.SetDefault(&o.FetchEvery, 20*time.Millisecond)
	options.SetDefault(&o.SLO, PaperSLO())
}

// Validate returns an error that names the first impossible option.
func (o *Options) Validate() error {
	if err := o.Model.Validate(); err != nil {
		return err
	}
	switch {
	case int(o.System) >= len(systemNames):
		return fmt.Errorf("agentic: %v; it must be one of %q", o.System, systemNames)
	case o.PrefillNodes < 1 || o.DecodeNodes < 1 || o.GPUs < 1:
		return fmt.Errorf("agentic: %d prefill and %d decode nodes of %d GPUs; at least 1 of each is needed", o.PrefillNodes, o.DecodeNodes, o.GPUs)
	case !(o.SNIC > 0) || !(o.CNIC > 0) || math.IsInf(o.SNIC, 0) || math.IsInf(o.CNIC, 0):
		return fmt.Errorf("agentic: storage NIC of %v and compute NIC of %v bytes/s; both must be positive", o.SNIC, o.CNIC)
	case o.BufferBytes < 0:
		return fmt.Errorf("agentic: buffers of %d bytes a node; 0 or more is needed", o.BufferBytes)
	case o.PrefillGroup < 1 || o.PrefillNodes%o.PrefillGroup != 0:
		return fmt.Errorf("agentic: %d prefill nodes in groups of %d; the groups must come out even", o.PrefillNodes, o.PrefillGroup)
	case o.DecodeGroup < 1 || o.DecodeNodes%o.DecodeGroup != 0:
		return fmt.Errorf("agentic: %d decode nodes in groups of %d; the groups must come out even", o.DecodeNodes, o.DecodeGroup)
	case len(o.Agents) == 0:
		return fmt.Errorf("agentic: no agents")
	case o.Arrivals != nil && len(o.Arrivals) != len(o.Agents):
		return fmt.Errorf("agentic: %d arrivals of %d agents; each needs one", len(o.Arrivals), len(o.Agents))
	case o.BlockTokens < 1 || o.Quota <= 0 || o.StepOverhead < 0 || o.FetchEvery <= 0:
		return fmt.Errorf("agentic: blocks of %d tokens, a quota of %v, %v a step, a fetch every %v; all must be positive", o.BlockTokens, o.Quota, o.StepOverhead, o.FetchEvery)
	}
	for i := range o.Agents {
		a := &o.Agents[i]
		if len(a.Rounds) == 0 {
			return fmt.Errorf("agentic: agent %d has no rounds", a.ID)
		}
		if len(a.Rounds) >= 1<<roundBits {
			return fmt.Errorf("agentic: agent %d has %d rounds; at most %d", a.ID, len(a.Rounds), 1<<roundBits-1)
		}
		if n := a.Total(); n > o.Model.DecodeHBM || (o.System == Basic && n > o.Model.PrefillHBM) {
			return fmt.Errorf("agentic: agent %d grows to %d tokens; an engine of %s holds %d (prefill %d)", a.ID, n, o.Model.Name, o.Model.DecodeHBM, o.Model.PrefillHBM)
		}
		if b := o.buffer(); bytesOf(b, a.Total(), o.BlockTokens) > b.Bytes {
			return fmt.Errorf("agentic: agent %d grows to %d tokens, %d bytes; the buffer of an engine has %d", a.ID, a.Total(), bytesOf(b, a.Total(), o.BlockTokens), b.Bytes)
		}
		for j, r := range a.Rounds {
			if r.Append < 1 || r.Gen < 1 {
				return fmt.Errorf("agentic: agent %d, round %d appends %d and generates %d tokens; both must be at least 1", a.ID, j, r.Append, r.Gen)
			}
		}
	}
	return nil
}

// plannerOptions returns the options of the planner for this cluster. Rates have the values that a
// profile of the cluster would measure.
func (o *Options) plannerOptions() dualpath.Options {
	p := o.Planner
	options.SetDefault(&p.ReadRate, o.SNIC/float64(o.Model.KVBytes))
	options.SetDefault(&p.PrefillRate, o.ProfilePrefill())
	options.SetDefault(&p.BlockTokens, o.BlockTokens)
	switch o.System {
	case Basic, Layerwise:
		p.Policy = dualpath.PrefillOnly
	case RoundRobin:
		p.Policy = dualpath.RoundRobin
	case DualPathSplit:
		p.Policy = dualpath.Split
	default:
		p.Policy = dualpath.Shorter
	}
	// Groups fetch only after a change, so a group without fetches must not count as lost.
	options.SetDefault(&p.GroupTimeout, math.MaxInt64)
	options.SetDefault(&p.MaxExplain, 1)
	return p
}

// buffer returns the buffer that each engine registers with the planner. All its fields are 0 if
// buffers are unlimited. Checksums take no space here; in production they take some thousandths of a block.
func (o *Options) buffer() dualpath.Buffer {
	if o.BufferBytes == 0 || o.System == Basic || o.System == Oracle {
		return dualpath.Buffer{}
	}
	return dualpath.Buffer{Bytes: int(o.BufferBytes) / o.GPUs, Block: o.BlockTokens * int(o.Model.KVBytes)}
}

// bytesOf returns the bytes of a buffer that tokens take, in whole blocks.
func bytesOf(b dualpath.Buffer, tokens, blockTokens int) int {
	return (tokens + blockTokens - 1) / blockTokens * b.Block
}

// ProfilePrefill returns the rate at which an engine completes prompts, in tokens per second,
// cached tokens included. The planner counts unfinished work in whole prompts.
func (o *Options) ProfilePrefill() float64 {
	var prompts, seconds float64
	for i := range o.Agents[:min(len(o.Agents), 500)] {
		o.Agents[i].Turns(func(_ int, t workload.Turn) bool {
			prompts += float64(t.Prompt())
			seconds += o.Model.Work(t.Context, t.Append) / o.Model.FLOPS
			return true
		})
	}
	return max(1, prompts/seconds)
}
