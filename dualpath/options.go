package dualpath

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/internal/options"
)

// ReadPolicy says which side reads a cached prefix.
type ReadPolicy uint8

const (
	// Split reads on both sides at once, in proportion to when each would be
	// done. Beyond the paper (section 6.1 leaves it as future work).
	Split ReadPolicy = iota
	// Shorter reads on the side with the shorter reading queue; ties go to the
	// node with the least tokens assigned so far (DualPath section 6.1; the tie
	// rule is ours: with "prefill wins ties" the NICs are unbalanced, because
	// both queues are empty most of the time).
	Shorter
	// RoundRobin alternates: the paper's baseline in Figure 13.
	RoundRobin
	// PrefillOnly is the baseline "Basic": storage is read by prefill alone.
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

// Options of a Planner. The zero value is usable; ReadRate and PrefillRate
// should be measured (penstock profile).
type Options struct {
	// ReadRate is what one storage NIC reads, PrefillRate what one prefill
	// engine computes, in tokens a second. Defaults: 640 000 (50 GB/s at
	// 78 KB a token) and 8 000.
	ReadRate, PrefillRate float64
	// Alpha is the short reading queue threshold, in tokens; default 3 s of
	// ReadRate. Beta is the most unfinished tokens of a prefill engine; default
	// 5 s of PrefillRate. (DualPath, section A.4.)
	Alpha, Beta int
	// ZFactor is the high-token threshold of decode engines over the mean.
	// Default 1.05 (DualPath section 6.1).
	ZFactor float64

	// Policy is which side reads.
	Policy ReadPolicy
	// Network, if there is one, makes the network count: a request's decode engine
	// is chosen by transfer, wait and first step, and its read is shared out by both
	// hops of each side. It is this planner's alone.
	Network Network
	// BlockTokens is the length of a block; parts are cut at its multiples.
	// Default 64.
	BlockTokens int
	// MinPart is the smallest part that is worth a second side, in tokens.
	// Default 1024.
	MinPart int

	// SlowFactor: a side is left when staying takes this many times as long as
	// moving what is unread to the other one. Default 2.
	SlowFactor float64
	// HedgeFactor: a side that has taken this many times as long as predicted is
	// helped by the other, which reads the same rest. Default 3; the rest may be
	// MaxHedge tokens long, default 8192.
	HedgeFactor float64
	MaxHedge    int
	// Patience is the time below which neither is done. Default 50 ms.
	Patience time.Duration

	// Weights are the tenants' (Request.Tenant); a tenant that is not named has 1. While
	// several tenants have requests of one priority in the queue, each is granted work in
	// proportion to its weight.
	Weights map[string]float64 `json:",omitempty"`

	// GroupTimeout: a group that does not fetch for so long is gone. Default
	// 5 s.
	GroupTimeout time.Duration
	// MaxAttempts is how often a request is started before its engines' failures
	// end it. Default 4.
	MaxAttempts int
	// Cooldown is how long an engine whose attempts fail is given work only where
	// nobody else can take it. Default 2 s.
	Cooldown time.Duration
	// MaxQueue bounds the requests that wait or are served. Default 1 << 20.
	MaxQueue int
	// MaxExplain is how many requests Explain remembers. Default 4096.
	MaxExplain int
}

// minWeight and maxWeight bound Options.Weights.
const (
	minWeight = 1e-3
	maxWeight = 1e6
)

// EnsureDefaults fills what is zero.
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
