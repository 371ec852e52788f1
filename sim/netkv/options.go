package netkv

import (
	"fmt"
	"math"
	"time"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/sim/flow"
)

// Options are a cluster and how it is scheduled.
type Options struct {
	Policy  netcost.Policy
	Weights netcost.Weights
	Model   netcost.Model

	// Pods of two racks of two servers of two instances: 16 instances, 64 GPUs, for
	// every two pods. The first rack of every second pod holds the prefill
	// instances.
	Pods int
	// Oversubscription is that of the core, k:1; the racks' is half of it, at least
	// 1:1. The paper's 4 gives 50 and 25 Gbit/s of the 100 in a rack.
	Oversubscription float64
	// NICs of a server, each of the rack's bandwidth; an instance has half of them.
	// A rack has as many uplinks as it has NICs below, a pod too, each as wide as its
	// tier: that is what oversubscribes them.
	NICs int
	// Port is an instance's bandwidth in each direction, in bytes/s. 0: half of the
	// server's NICs.
	Port float64
	// Background is the share of every uplink that others take. With Swing it is
	// drawn anew for each tier, uniformly from 0 to twice that, at exponential
	// intervals of mean Swing; 0: it is steady.
	Background float64
	Swing      time.Duration
	// Refresh is how often the oracle measures the background.
	Refresh time.Duration

	// PrefillToken and PrefillFixed are the prefill's line.
	PrefillToken, PrefillFixed time.Duration
	// KVToken is the KV of a token, Memory that of an instance, bytes.
	KVToken, Memory int64

	// Share is how likely a request is of one of Groups groups, SharedPart how much
	// of it its group's prefix is. BlockTokens is the caches' grain.
	Share       float64
	Groups      int
	SharedPart  float64
	BlockTokens int

	// SLO is the objective for the first token.
	SLO time.Duration
	// Warmup is how many requests are not measured.
	Warmup int
}

// Paper is the cluster of the paper's section VI-A, with what its tables pin down of
// the rest, under the retrieval profile.
func Paper() Options {
	return Options{
		Pods: 2, Oversubscription: 4, NICs: 8,
		Refresh:      time.Second,
		PrefillToken: 77 * time.Microsecond, PrefillFixed: 106 * time.Millisecond,
		KVToken: netcost.KVBytes(80, 8, 128, 2, 1), Memory: 180e9,
		Share: 0.7, Groups: 20, SharedPart: 0.35, BlockTokens: 16,
		SLO: 5 * time.Second,
	}
}

// Validate returns an error that names the first value out of its range.
func (o *Options) Validate() error {
	for _, v := range []struct {
		name             string
		value, low, high float64
	}{
		{"Pods", float64(o.Pods), 2, 1 << 16}, {"Oversubscription", o.Oversubscription, 1, 1e3}, {"NICs", float64(o.NICs), 2, 1024}, {"Port", o.Port, 0, 1e15}, {"Background", o.Background, 0, 0.499},
		{"Refresh", float64(o.Refresh), 1, math.MaxInt64}, {"Swing", float64(o.Swing), 0, math.MaxInt64},
		{"PrefillToken", float64(o.PrefillToken), 0, 1e12}, {"PrefillFixed", float64(o.PrefillFixed), 0, 1e15},
		{"KVToken", float64(o.KVToken), 1, 1e12}, {"Memory", float64(o.Memory), 1, 1e18},
		{"Share", o.Share, 0, 1}, {"Groups", float64(o.Groups), 1, 1 << 20}, {"SharedPart", o.SharedPart, 0, 1}, {"BlockTokens", float64(o.BlockTokens), 1, 1 << 20},
		{"SLO", float64(o.SLO), 1, math.MaxInt64}, {"Warmup", float64(o.Warmup), 0, 1 << 40},
	} {
		if !(v.value >= v.low && v.value <= v.high) {
			return fmt.Errorf("netkv: %s is %v; it must be from %v to %v", v.name, v.value, v.low, v.high)
		}
	}
	if o.Pods%2 != 0 {
		return fmt.Errorf("netkv: Pods is %d; it must be even, for every second pod has prefill instances", o.Pods)
	}
	return nil
}

// fabric is the tiers' bandwidth and latency.
func (o *Options) fabric() netcost.Fabric {
	f := netcost.FatTree()
	rack := f.Bandwidth[netcost.SameRack]
	f.Bandwidth[netcost.SamePod] = rack / math.Max(1, o.Oversubscription/2)
	f.Bandwidth[netcost.CrossPod] = rack / o.Oversubscription
	return f
}

// Racks of a pod, servers of a rack and instances of a server, §VI-A.
const racks, servers, instances = 2, 2, 2

// Tree is the network.
func (o *Options) Tree() flow.FatTree {
	f := o.fabric()
	own := o.Port
	if own == 0 {
		own = f.Bandwidth[netcost.SameRack] * float64(o.NICs) / instances
	}
	return flow.FatTree{
		Pods: o.Pods, Racks: racks, Servers: servers, Endpoints: instances,
		Inside: f.Bandwidth[netcost.SameNode], Out: own, In: own,
		SpineLinks: servers * o.NICs, SpineRate: f.Bandwidth[netcost.SamePod],
		CoreLinks: racks * servers * o.NICs, CoreRate: f.Bandwidth[netcost.CrossPod],
	}
}
