package netkv

import (
	"fmt"
	"math"
	"time"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/sim/flow"
)

// Options are the options of a cluster and its scheduling.
type Options struct {
	Policy  netcost.Policy
	Weights netcost.Weights
	Model   netcost.Model

	// Pods is the number of pods, which must be even. A pod has 8 instances of 4 GPUs: two racks of
	// two servers of two instances. In pods 0, 2, 4 … the instances of the first rack do prefill;
	// all other instances decode.
	Pods int
	// Oversubscription is the ratio k of a NIC's bandwidth to the bandwidth of a pod's uplink. For
	// a rack's uplink the ratio is k/2, at least 1. With the paper's k = 4 an uplink of a rack has
	// 50 Gbit/s and an uplink of a pod 25 Gbit/s, against 100 Gbit/s in a rack.
	Oversubscription float64
	// NICs is the number of NICs per server, each with the bandwidth of the tier SameRack; an
	// instance has half of the NICs. The number of uplinks of a rack, and of a pod, is the number
	// of NICs below it. An uplink has the bandwidth of its tier, at most that of a NIC; a lower
	// bandwidth makes the tier oversubscribed.
	NICs int
	// Port is an instance's bandwidth in each direction, in bytes/s. 0: half of the
	// server's NICs.
	Port float64
	// Background is the share of every uplink's bandwidth that other traffic uses. If Swing is 0,
	// the share is constant. Otherwise it is drawn again for each tier, uniformly from 0 to twice
	// Background, at exponential intervals with mean Swing.
	Background float64
	Swing      time.Duration
	// Refresh is the interval at which the oracle measures the background.
	Refresh time.Duration

	// PrefillToken is the time of a prefill per token of the prompt, PrefillFixed its fixed part.
	PrefillToken, PrefillFixed time.Duration
	// KVToken is the size of a token's KV, Memory the memory of an instance for KV, both in bytes.
	KVToken, Memory int64

	// Share is the probability that a request belongs to one of Groups groups. SharedPart is the
	// part of such a request's prompt, 0 to 1, that is a prefix of the group's text. BlockTokens is
	// the block length of the caches.
	Share       float64
	Groups      int
	SharedPart  float64
	BlockTokens int

	// SLO is the objective for the time to first token.
	SLO time.Duration
	// Warmup is the number of requests at the beginning that are not measured.
	Warmup int
}

// Paper returns the cluster of section VI-A of the NetKV paper with the retrieval profile.
// Parameters that the paper does not print have the values that its tables determine.
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

// fabric returns the tiers' bandwidth and latency.
func (o *Options) fabric() netcost.Fabric {
	f := netcost.FatTree()
	rack := f.Bandwidth[netcost.SameRack]
	f.Bandwidth[netcost.SamePod] = rack / math.Max(1, o.Oversubscription/2)
	f.Bandwidth[netcost.CrossPod] = rack / o.Oversubscription
	return f
}

// Racks of a pod, servers of a rack and instances of a server (NetKV paper, section VI-A).
const racks, servers, instances = 2, 2, 2

// Tree returns the network.
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
