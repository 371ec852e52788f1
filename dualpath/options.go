package dualpath

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/internal/options"
)

// ReadPolicy chooses the side that reads a cached prefix.
type ReadPolicy uint8

const (
	// Split reads on both sides at once, so that both are predicted to end at the same time. It
	// goes beyond the paper (section 6.1 leaves it as future work).
	Split ReadPolicy = iota
	// Shorter reads on the side with the shorter reading queue. Ties go to the node with the
	// fewest tokens assigned so far. (DualPath section 6.1. The tie rule is not from the paper:
	// with "prefill wins ties" the load of the NICs is unbalanced, because both queues are empty
	// most of the time.)
	Shorter
	// RoundRobin alternates: the paper's baseline in Figure 13.
	RoundRobin
	// PrefillOnly is the baseline "Basic": only the prefill side reads storage.
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
	// Alpha is the threshold of a short reading queue, in tokens; default 3 s of ReadRate. Beta
	// is the largest number of unfinished tokens of a prefill engine; default 5 s of
	// PrefillRate. (DualPath, section A.4.)
	Alpha, Beta int
	// ZFactor is the ratio of the high-token threshold of decode engines to the mean. Default
	// 1.05 (DualPath section 6.1).
	ZFactor float64

	// Policy chooses the side that reads.
	Policy ReadPolicy
	// Network, if set, adds the network to the decisions: a request's decode engine is chosen by
	// transfer, wait and first step, and the division of its read counts both hops of each side.
	// A Network belongs to one planner.
	Network Network
	// BlockTokens is the length of a block. Parts end at multiples of it. Default 64.
	BlockTokens int
	// MinPart is the smallest part that is read on a second side, in tokens. Default 1024.
	MinPart int

	// SlowFactor: the unread tokens of a side move to the other side if reading them here would
	// take this many times as long. Default 2.
	SlowFactor float64
	// HedgeFactor: if a side has taken this many times as long as predicted, the other side
	// reads the same remaining tokens. Default 3. The remaining part may be MaxHedge tokens
	// long, default 8192.
	HedgeFactor float64
	MaxHedge    int
	// Patience is the time before which a side is neither cut nor hedged. Default 50 ms.
	Patience time.Duration

	// Weights are the weights of tenants (Request.Tenant). A tenant that is not listed has
	// weight 1. While several tenants have requests of one priority in the queue, each is
	// granted work in proportion to its weight.
	Weights map[string]float64 `json:",omitempty"`

	// GroupTimeout is the time without a fetch after which a group is considered gone. Default 5
	// s.
	GroupTimeout time.Duration
	// MaxAttempts is the number of starts after which a request is rejected because its engines
	// failed. Default 4.
	MaxAttempts int
	// Cooldown is the time for which an engine whose attempts fail is given work only if no
	// other engine can take it. Default 2 s.
	Cooldown time.Duration
	// MaxQueue bounds the requests that are waiting or being served. Default 1 << 20.
	MaxQueue int
	// MaxExplain is the number of requests whose record Explain keeps. Default 4096.
	MaxExplain int
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
