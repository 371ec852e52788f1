package dualpath

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/internal/options"
)

// ReadPolicy chooses the side of a request, its prefill engine or its decode engine, that reads the
// cached prefix from storage.
type ReadPolicy uint8

const (
	// Split reads one part of the prefix on each side at once, sized so that both reads are
	// predicted to end at the same time. The DualPath paper leaves this as future work (section
	// 6.1).
	Split ReadPolicy = iota
	// Shorter reads on the side with the shorter reading queue. If both queues are equal, the side
	// whose machine has been assigned fewer tokens so far reads. (DualPath section 6.1. The rule
	// for ties is not from the paper: if the prefill side won all ties, it would do most reads,
	// because both queues are empty most of the time.)
	Shorter
	// RoundRobin alternates between the sides: a baseline in Figure 13 of the DualPath paper.
	RoundRobin
	// PrefillOnly is the paper's baseline "Basic": only the prefill side reads storage.
	PrefillOnly
)

var policyNames = [...]string{"split", "shorter", "round-robin", "prefill-only"}

// String returns the policy's name, as in configuration.
func (p ReadPolicy) String() string {
	if int(p) < len(policyNames) {
		return policyNames[p]
	}
	return fmt.Sprintf("policy %d", uint8(p))
}

// ParseReadPolicy is the inverse of String.
func ParseReadPolicy(s string) (ReadPolicy, error) {
	for i, n := range policyNames {
		if s == n {
			return ReadPolicy(i), nil
		}
	}
	return 0, fmt.Errorf("dualpath: read policy %q: it must be one of %v", s, policyNames)
}

// Options of a Planner. The zero value is usable. ReadRate and PrefillRate should be measured
// (penstock profile).
type Options struct {
	// ReadRate is the rate of one storage NIC, PrefillRate that of one prefill engine, in tokens
	// per second. Defaults: 640 000 (50 GB/s at 78 KB per token) and 8 000.
	ReadRate, PrefillRate float64
	// Alpha is the length, in tokens, up to which the reading queue of a storage NIC counts as
	// short; default: the tokens of 3 s at ReadRate. Beta is the number of unfinished tokens up to
	// which a prefill engine is given work; default: the tokens of 5 s at PrefillRate. (DualPath,
	// section A.4.)
	Alpha, Beta int
	// ZFactor sets the threshold above which a decode engine counts as having many tokens: ZFactor
	// times the mean number of tokens of the engines of its group. Default 1.05 (DualPath section
	// 6.1).
	ZFactor float64

	// Policy chooses the side that reads a cached prefix, or both sides. Default Split.
	Policy ReadPolicy
	// Network, if set, adds the network to the decisions: the decode engine of a request is the one
	// with the least time for KV transfer, wait and first decode step, and both hops of each side
	// count when a read is split. Each planner needs a Network of its own.
	Network Network
	// BlockTokens is the length of a KV block in tokens. A read is split only between blocks.
	// Default 64.
	BlockTokens int
	// MinPart is the smallest part of a prefix, in tokens, for which a second side reads too.
	// Default 1024.
	MinPart int

	// SlowFactor is a ratio of two predicted times: of continuing a read on its side, to reading
	// the same unread tokens on the other side. Above SlowFactor the tokens move to the other side.
	// Default 2.
	SlowFactor float64
	// HedgeFactor is a ratio of a read's elapsed time to its predicted time. Above HedgeFactor the
	// other side reads the remaining tokens too (a hedge). Default 3. MaxHedge is the largest
	// number of remaining tokens that are hedged. Default 8192.
	HedgeFactor float64
	MaxHedge    int
	// Patience is the time since the start of a read during which the read is left alone: its
	// tokens neither move to the other side nor are hedged. It is also the age up to which the last
	// Fetch of another group counts when requests are granted. Default 50 ms.
	Patience time.Duration

	// Weights are the shares of tenants (Request.Tenant) relative to each other. A tenant that is
	// not listed has weight 1. While several tenants have requests of one priority in the queue,
	// each is granted work in proportion to its weight.
	Weights map[string]float64 `json:",omitempty"`

	// GroupTimeout is the time without a fetch after which a group is considered gone. Default 5
	// s.
	GroupTimeout time.Duration
	// MaxAttempts is the number of failed attempts at which a request is rejected. Default 4.
	MaxAttempts int
	// Cooldown is the time after repeated failures during which an engine is given a request only
	// if no other engine can take the request. A request that has failed twice or more waits for
	// this time before its next attempt. Default 2 s.
	Cooldown time.Duration
	// MaxQueue is the largest number of requests that are waiting or being served. Default 1 << 20.
	MaxQueue int
	// MaxExplain is the number of requests, the latest ones, for which Explain has a record.
	// Default 4096.
	MaxExplain int
	// FirstSeq is a number below all numbers of actions (Action.Seq). Planners that may run at the
	// same time need ranges of numbers that do not overlap, because an attempt is identified by the
	// number of its Start.
	FirstSeq uint64 `json:",omitempty"`
}

// minWeight and maxWeight bound Options.Weights.
const (
	minWeight = 1e-3
	maxWeight = 1e6
)

// EnsureDefaults sets each zero field to its default.
func (o *Options) EnsureDefaults() {
	options.SetDefault(&o.ReadRate, 640_000)
	options.SetDefault(&o.PrefillRate, 8_000)
	options.SetDefault(&o.Alpha, int(3*o.ReadRate))
	options.SetDefault(&o.Beta, int(5*o.PrefillRate))
	options.SetDefault(&o.ZFactor, 1.05)
	options.SetDefault(&o.BlockTokens, 64)
	options.SetDefault(&o.MinPart, 1024)
	options.SetDefault(&o.SlowFactor, 2)
	options.SetDefault(&o.HedgeFactor, 3)
	options.SetDefault(&o.MaxHedge, 8192)
	options.SetDefault(&o.Patience, 50*time.Millisecond)
	options.SetDefault(&o.GroupTimeout, 5*time.Second)
	options.SetDefault(&o.MaxAttempts, 4)
	options.SetDefault(&o.Cooldown, 2*time.Second)
	options.SetDefault(&o.MaxQueue, 1<<20)
	options.SetDefault(&o.MaxExplain, 4096)
}

// Validate returns an error that names the first option out of its range.
func (o *Options) Validate() error {
	for _, r := range []struct {
		name       string
		value, min float64
	}{
		{"ReadRate", o.ReadRate, 1}, {"PrefillRate", o.PrefillRate, 1}, {"Alpha", float64(o.Alpha), 0}, {"Beta", float64(o.Beta), 1},
		{"ZFactor", o.ZFactor, 1}, {"BlockTokens", float64(o.BlockTokens), 1}, {"MinPart", float64(o.MinPart), 1},
		{"SlowFactor", o.SlowFactor, 1}, {"HedgeFactor", o.HedgeFactor, 1}, {"MaxHedge", float64(o.MaxHedge), 0},
		{"Patience", float64(o.Patience), 0}, {"GroupTimeout", float64(o.GroupTimeout), 1}, {"MaxAttempts", float64(o.MaxAttempts), 1}, {"Cooldown", float64(o.Cooldown), 0}, {"MaxQueue", float64(o.MaxQueue), 1},
		{"MaxExplain", float64(o.MaxExplain), 0},
	} {
		if !(r.value >= r.min) {
			return fmt.Errorf("dualpath: option %s is %v; it must be at least %v", r.name, r.value, r.min)
		}
	}
	for _, tenant := range slices.Sorted(maps.Keys(o.Weights)) {
		if w := o.Weights[tenant]; !(w >= minWeight && w <= maxWeight) {
			return fmt.Errorf("dualpath: option Weights: tenant %q has %v; it must be between %v and %v", tenant, w, minWeight, maxWeight)
		}
	}
	if o.Policy > PrefillOnly {
		return fmt.Errorf("dualpath: option Policy is %v; it must be one of %v", o.Policy, policyNames)
	}
	return nil
}
