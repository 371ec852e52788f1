package prfaas

import (
	"fmt"
	"math"
)

// Stage is a stage that can bound the throughput of a system.
type Stage uint8

// The stages.
const (
	StageRemoteCompute Stage = iota // the PrfaaS clusters' prefill
	StageEgress                     // their link
	StageLocalPrefill               // the prefill instances of the PD cluster
	StageDecode                     // its decode instances
)

// String returns prfaas-compute, prfaas-egress, pd-prefill or pd-decode.
func (s Stage) String() string {
	switch s {
	case StageRemoteCompute:
		return "prfaas-compute"
	case StageEgress:
		return "prfaas-egress"
	case StageLocalPrefill:
		return "pd-prefill"
	case StageDecode:
		return "pd-decode"
	}
	return fmt.Sprintf("Stage(%d)", uint8(s))
}

// Service selects which service time the model uses for all requests of a stage.
type Service uint8

const (
	// Representative is the time at the mean length, T(E[L]), as in the paper's equations 3 and 4.
	Representative Service = iota
	// Expected is the mean time, E[T(L)], which a queue experiences. It is longer if T is convex.
	Expected
)

// System describes the hardware and the traffic (PrfaaS, Table 4).
type System struct {
	// Lengths is the distribution of the uncached prompt lengths: L.
	Lengths Lengths
	// OutputTokens is the mean output length: L_out.
	OutputTokens float64
	// KVBytes is S_kv(l).
	KVBytes Curve
	// RemoteInstances is N_prfaas, the number of instances in the PrfaaS clusters; 0 means that
	// there is no such cluster. RemotePrefill is T_prefill(l) of one instance, in seconds.
	RemoteInstances int
	RemotePrefill   Curve
	// EgressBytes is the bandwidth of the link out of the PrfaaS clusters, in bytes per second
	// (B_out).
	EgressBytes float64
	// LocalInstances is the number of instances in the PD cluster (N_p + N_d). LocalPrefill is
	// T_prefill(l) of one of these instances, in seconds. LocalPrefill may be the zero Curve if no
	// plan prefills locally.
	LocalInstances int
	LocalPrefill   Curve
	// DecodeBatch is BS_max, the number of requests that an instance decodes concurrently;
	// StepSeconds is T_decode, the time of one step.
	DecodeBatch float64
	StepSeconds float64
	// Service is the service time to use; the default is the paper's.
	Service Service
}

// InstancesMax is the largest number of instances of a cluster: half a million GPUs in instances of
// 8.
const InstancesMax = 1 << 16

// Validate returns an error that names the first field out of its range.
func (s System) Validate() error {
	if s.Lengths == nil {
		return fmt.Errorf("prfaas: no distribution of lengths")
	}
	for _, f := range []struct {
		name  string
		value float64
	}{
		{"output tokens", s.OutputTokens}, {"decode batch", s.DecodeBatch}, {"seconds of a decode step", s.StepSeconds},
		{"instances of the PD cluster", float64(s.LocalInstances)},
	} {
		if !(f.value > 0) || math.IsInf(f.value, 0) {
			return fmt.Errorf("prfaas: %s: %v; it must be above 0", f.name, f.value)
		}
	}
	least, greatest := s.Lengths.Bounds()
	if s.RemoteInstances < 0 || s.RemoteInstances > InstancesMax {
		return fmt.Errorf("prfaas: %d PrfaaS instances; 0 for none, at most %d", s.RemoteInstances, InstancesMax)
	}
	if s.LocalInstances > InstancesMax {
		return fmt.Errorf("prfaas: %d instances of the PD cluster; at most %d", s.LocalInstances, InstancesMax)
	}
	if s.RemoteInstances > 0 {
		if !(s.EgressBytes > 0) || math.IsInf(s.EgressBytes, 0) {
			return fmt.Errorf("prfaas: egress of %v bytes/s; it must be above 0", s.EgressBytes)
		}
		if s.KVBytes.IsZero() || !s.KVBytes.Rising(max(least, 0), greatest) {
			return fmt.Errorf("prfaas: the KV size must be given, above 0 and not fall from %.0f to %.0f tokens", least, greatest)
		}
		if s.RemotePrefill.IsZero() || !s.RemotePrefill.Rising(max(least, 0), greatest) {
			return fmt.Errorf("prfaas: the prefill time of the PrfaaS cluster must be given, above 0 and not fall from %.0f to %.0f tokens", least, greatest)
		}
	}
	if s.LocalPrefill.IsZero() && s.RemoteInstances == 0 {
		return fmt.Errorf("prfaas: neither the PrfaaS nor the PD cluster can prefill")
	}
	if !s.LocalPrefill.IsZero() && !s.LocalPrefill.Rising(max(least, 0), greatest) {
		return fmt.Errorf("prfaas: the prefill time of the PD cluster must be above 0 and not fall from %.0f to %.0f tokens", least, greatest)
	}
	return nil
}

// Plan has the variables to be decided.
type Plan struct {
	// Threshold is t, in tokens: requests with more uncached tokens are prefilled in a PrfaaS
	// cluster (offloaded).
	Threshold float64
	// Prefill and Decode are the numbers of prefill and decode instances in the PD cluster (N_p and
	// N_d).
	Prefill, Decode int
}

// Throughput is the throughput of a plan in the steady state.
type Throughput struct {
	Plan
	// Offloaded is p, the share of requests above the threshold; Long and Short are the mean
	// lengths above and below it, in tokens.
	Offloaded   float64
	Long, Short float64
	// All rates are in requests per second. RemoteCompute and RemoteEgress are the two terms of
	// equation 3, the prefill rate and the link rate of the PrfaaS clusters, and Remote is the
	// smaller of the two. LocalPrefill is the prefill rate of the PD cluster (equation 4),
	// DecodeRate its decode rate (equation 5). The rate of a stage that no request needs is
	// infinite.
	RemoteCompute, RemoteEgress, Remote float64
	LocalPrefill, DecodeRate            float64
	// Max is the highest request rate of the system (Lambda_max, equation 6), and Binds the stage
	// that limits it.
	Max   float64
	Binds Stage
	// EgressBytes is the traffic over the link at Max, in bytes per second.
	EgressBytes float64
}

// Producers returns the maximum prefill rate of the PrfaaS and PD clusters together, at the share
// Offloaded of offloaded requests, in requests per second: the first two terms of equation 6.
func (t Throughput) Producers() float64 {
	return min(over(t.Remote, t.Offloaded), over(t.LocalPrefill, 1-t.Offloaded))
}

// over returns rate/share: the arrival rate of all requests at which a stage with the given rate is
// saturated by its share of the requests.
func over(rate, share float64) float64 {
	if share <= 0 {
		return math.Inf(1)
	}
	return rate / share
}

// Evaluate computes equations 3 to 6 for one plan.
func (s System) Evaluate(p Plan) Throughput {
	return s.combine(s.split(p.Threshold), p)
}

// split has the values that depend only on the threshold.
type split struct {
	offloaded, long, short float64
	// remoteCompute and egress are the rates of the PrfaaS clusters: instances per prefill time,
	// and bandwidth per KV size. local is the prefill rate of one PD instance. All are in requests
	// per second.
	remoteCompute, egress, local float64
	kvBytes                      float64
}

func (s System) split(threshold float64) split {
	least, greatest := s.Lengths.Bounds()
	t := min(max(threshold, least), greatest)
	x := split{
		offloaded: Share(s.Lengths, t, greatest),
		long:      Mean(s.Lengths, t, greatest), short: Mean(s.Lengths, least, t),
		remoteCompute: math.Inf(1), egress: math.Inf(1), local: math.Inf(1),
	}
	if x.offloaded > 0 {
		x.remoteCompute, x.egress = 0, 0
		if s.RemoteInstances > 0 {
			x.kvBytes = s.mean(s.KVBytes, x.long, t, greatest)
			x.remoteCompute = float64(s.RemoteInstances) / s.mean(s.RemotePrefill, x.long, t, greatest)
			x.egress = s.EgressBytes / x.kvBytes
		}
	}
	if 1-x.offloaded > shareEpsilon {
		x.local = 0
		if !s.LocalPrefill.IsZero() {
			x.local = 1 / s.mean(s.LocalPrefill, x.short, least, t)
		}
	} else {
		x.offloaded = 1
	}
	return x
}

// shareEpsilon is the share of requests below which a share counts as a rounding error.
const shareEpsilon = 1e-12

// mean returns the service time or size that represents the requests from lo to hi.
func (s System) mean(c Curve, length, lo, hi float64) float64 {
	if s.Service == Expected {
		return c.Mean(s.Lengths, lo, hi)
	}
	return c.At(length)
}

// combine computes the throughput of a plan from the values of its threshold.
func (s System) combine(x split, p Plan) Throughput {
	t := Throughput{
		Plan: p, Offloaded: x.offloaded, Long: x.long, Short: x.short,
		RemoteCompute: x.remoteCompute, RemoteEgress: x.egress, Remote: min(x.remoteCompute, x.egress),
		LocalPrefill: times(p.Prefill, x.local),
		DecodeRate:   float64(p.Decode) * s.DecodeBatch / (s.StepSeconds * s.OutputTokens),
	}
	t.Max, t.Binds = math.Inf(1), StageDecode
	for _, b := range []struct {
		stage Stage
		rate  float64
	}{
		{StageRemoteCompute, over(t.RemoteCompute, t.Offloaded)}, {StageEgress, over(t.RemoteEgress, t.Offloaded)},
		{StageLocalPrefill, over(t.LocalPrefill, 1-t.Offloaded)}, {StageDecode, t.DecodeRate},
	} {
		if b.rate < t.Max {
			t.Max, t.Binds = b.rate, b.stage
		}
	}
	t.EgressBytes = t.Max * t.Offloaded * x.kvBytes
	return t
}

// times returns the rate of n instances. If the rate of one instance is infinite, the result is
// infinite even for 0 instances, because no request needs the stage.
func times(n int, rate float64) float64 {
	if math.IsInf(rate, 1) {
		return rate
	}
	return float64(n) * rate
}

// TTFT computes the time to first token under a plan, without queueing: the time of prefill and,
// for offloaded requests, the transfer of the KV on an idle link (PrfaaS, Table 6).
type TTFT struct {
	sys  System
	plan Plan
}

// TTFT returns the times to first token under a plan.
func (s System) TTFT(p Plan) TTFT { return TTFT{s, p} }

// Mean returns the mean over all requests, in seconds.
func (t TTFT) Mean() float64 {
	least, greatest := t.sys.Lengths.Bounds()
	at := min(max(t.plan.Threshold, least), greatest)
	var sum float64
	if at < greatest {
		sum += t.sys.RemotePrefill.Sum(t.sys.Lengths, at, greatest) + t.sys.KVBytes.Sum(t.sys.Lengths, at, greatest)/t.sys.EgressBytes
	}
	if at > least {
		sum += t.sys.LocalPrefill.Sum(t.sys.Lengths, least, at)
	}
	return sum
}

// Of returns the time of one request, in seconds.
func (t TTFT) Of(tokens float64) float64 {
	if tokens > t.plan.Threshold {
		return t.sys.RemotePrefill.At(tokens) + t.sys.KVBytes.At(tokens)/t.sys.EgressBytes
	}
	return t.sys.LocalPrefill.At(tokens)
}

// Quantile returns the time that a share q of the requests does not exceed, in seconds. In each
// cluster the time rises with the length. So in each cluster the requests with a time of at most x
// seconds are those up to a certain length.
func (t TTFT) Quantile(q float64) float64 {
	least, greatest := t.sys.Lengths.Bounds()
	at := min(max(t.plan.Threshold, least), greatest)
	high := 0.0
	for _, l := range []float64{at, greatest} {
		if l > at {
			high = max(high, t.Of(l))
		} else if l > least {
			high = max(high, t.Of(min(l, t.plan.Threshold)))
		}
	}
	// The inner bisection is exact to 1e-6 tokens, the outer one to 1e-6 s.
	return bisect(0, high, func(x float64) bool {
		within := 0.0
		if at > least {
			l := bisect(least, at, func(l float64) bool { return t.sys.LocalPrefill.At(l) <= x })
			within += Share(t.sys.Lengths, least, l)
		}
		if at < greatest {
			l := bisect(at, greatest, func(l float64) bool {
				return t.sys.RemotePrefill.At(l)+t.sys.KVBytes.At(l)/t.sys.EgressBytes <= x
			})
			within += Share(t.sys.Lengths, at, l)
		}
		return within < q
	})
}
