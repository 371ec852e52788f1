package prfaas

import (
	"fmt"
	"time"
)

// ShortOptions are the options of the short-term controller (PrfaaS, section 3.4.3). The paper
// names the quantities to observe but no thresholds; the defaults are not from the paper.
type ShortOptions struct {
	// High is the utilization from which the egress link counts as congested, and Low the
	// utilization below which the link has spare bandwidth; 0 selects 0.9 and 0.6.
	High, Low float64
	// QueueHigh is the number of requests waiting for prefill in the PrfaaS clusters, or for the
	// link, from which the queue counts as a surge; 0 selects 4 per instance.
	QueueHigh int
	// Backoff is the factor, below 1, by which the share of offloaded requests is multiplied when
	// their queue surges although the model predicts that the PrfaaS clusters keep up; 0 selects
	// 0.9.
	Backoff float64
	// Hold is the minimum time between two changes of the threshold. It is also the time for which
	// the link must have spare bandwidth before more requests are offloaded again; 0 selects 5 s.
	Hold time.Duration
}

// EnsureDefaults fills the fields that are 0.
func (o *ShortOptions) EnsureDefaults(instances int) {
	if o.High == 0 {
		o.High = 0.9
	}
	if o.Low == 0 {
		o.Low = 0.6
	}
	if o.QueueHigh == 0 {
		o.QueueHigh = max(4*instances, 1)
	}
	if o.Backoff == 0 {
		o.Backoff = 0.9
	}
	if o.Hold == 0 {
		o.Hold = 5 * time.Second
	}
}

// Validate returns an error that names the first option out of its range.
func (o ShortOptions) Validate() error {
	switch {
	case !(o.High > 0 && o.High <= 1):
		return fmt.Errorf("prfaas: high utilization %v; above 0, at most 1", o.High)
	case !(o.Low > 0 && o.Low < o.High):
		return fmt.Errorf("prfaas: low utilization %v; above 0, below the high one (%v)", o.Low, o.High)
	case o.QueueHigh < 1:
		return fmt.Errorf("prfaas: a surge of %d requests; at least 1", o.QueueHigh)
	case !(o.Backoff > 0 && o.Backoff < 1):
		return fmt.Errorf("prfaas: backoff to %v; between 0 and 1", o.Backoff)
	case o.Hold < 0:
		return fmt.Errorf("prfaas: hold of %v; 0 or more", o.Hold)
	}
	return nil
}

// EgressSample is the state of the link and of the PrfaaS clusters' queues.
type EgressSample struct {
	At time.Duration
	// Utilization is the link's utilization since the last sample: the bytes that crossed it
	// divided by its capacity, 0 to 1.
	Utilization float64
	// CapacityBytes is the current capacity of the link in bytes per second; 0 means unknown.
	CapacityBytes float64
	// Queue is the number of offloaded requests that wait for prefill or for the link, LocalQueue
	// the number that wait for prefill in the PD cluster.
	Queue, LocalQueue int
}

// Short is the short-term controller: it adjusts the threshold and decides whether bandwidth is
// scarce. It must be used by one goroutine at a time.
type Short struct {
	opts ShortOptions
	sys  System
	plan Plan
	// capacity is the last known capacity of the link in bytes per second.
	capacity float64
	abundant bool
	// changed is the time of the last change of the threshold. calm is the time at which the link
	// began to have spare bandwidth; -1 if it has none.
	changed, calm time.Duration
	began         bool
	// looked is the time at which the lengths of the queues were last recorded: queue for
	// EgressSample.Queue, local for LocalQueue. The controller does not act on a queue that has
	// become shorter since.
	looked       time.Duration
	queue, local int
}

// NewShort returns a controller that starts with the given plan.
func NewShort(s System, plan Plan, opts ShortOptions) (*Short, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	opts.EnsureDefaults(s.RemoteInstances)
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	c := &Short{opts: opts, sys: s, plan: plan, capacity: s.EgressBytes, calm: -1}
	return c, nil
}

// Router returns the router with the current threshold.
func (c *Short) Router() Router { return Router{Threshold: c.plan.Threshold, Abundant: c.abundant} }

// Adopt replaces the plan by a plan of the long-term controller, with the lengths for which that
// plan was computed.
func (c *Short) Adopt(plan Plan, lengths Lengths) {
	c.plan, c.sys.Lengths = plan, lengths
}

// Adjustment is the controller's reaction to one sample.
type Adjustment struct {
	Router  Router
	Changed bool
	// Why has the reason in words if something changed.
	Why string
}

// Observe processes a sample. Samples must be in order of time.
func (c *Short) Observe(s EgressSample) Adjustment {
	if s.CapacityBytes > 0 {
		c.capacity = s.CapacityBytes
	}
	congested := s.Utilization >= c.opts.High || s.Queue >= c.opts.QueueHigh
	switch calm := s.Utilization < c.opts.Low && 2*s.Queue < c.opts.QueueHigh; {
	case !calm:
		c.calm = -1
	case c.calm < 0:
		c.calm = s.At
	}
	before := c.Router()
	why := ""
	if congested {
		c.abundant = false
		why = "the link is congested: bandwidth is scarce"
	} else if c.calm >= 0 && s.At-c.calm >= c.opts.Hold {
		c.abundant = true
		why = "the link has been calm: bandwidth is abundant"
	}
	if held := c.began && s.At-c.changed < c.opts.Hold; !held {
		if t, reason := c.threshold(s, congested); t != c.plan.Threshold {
			c.plan.Threshold, c.changed, c.began = t, s.At, true
			why = reason
		}
	}
	if s.At-c.looked >= c.opts.Hold {
		c.looked, c.queue, c.local = s.At, s.Queue, s.LocalQueue
	}
	after := c.Router()
	if after == before {
		return Adjustment{Router: after}
	}
	return Adjustment{Router: after, Changed: true, Why: why}
}

// threshold returns the new threshold and the reason. The model gives the best threshold for the
// link's capacity. If the queue of a cluster surges although the model does not predict it, the
// controller moves requests to the other cluster, as long as the other cluster's queue is shorter.
func (c *Short) threshold(s EgressSample, congested bool) (float64, string) {
	now := c.sys
	now.EgressBytes = c.capacity
	best := Balance(now, c.plan.Prefill)
	_, greatest := now.Lengths.Bounds()
	share := Share(now.Lengths, c.plan.Threshold, greatest)
	calm := c.calm >= 0 && s.At-c.calm >= c.opts.Hold
	switch {
	case congested && best > c.plan.Threshold*(1+thresholdSlack):
		return best, fmt.Sprintf("congested (link %.0f %% used, %d waiting): the best threshold for %.1f Gbps", 100*s.Utilization, s.Queue, Gbps(c.capacity))
	case s.Queue >= c.opts.QueueHigh && s.Queue > s.LocalQueue && s.Queue >= c.queue:
		keep := share * c.opts.Backoff
		return now.Lengths.Quantile(1 - keep), fmt.Sprintf("%d wait for PrfaaS, %d for the PD cluster: %.0f %% of the requests stay offloaded", s.Queue, s.LocalQueue, 100*keep)
	case best < c.plan.Threshold*(1-thresholdSlack) && (calm || s.LocalQueue >= c.opts.QueueHigh && s.LocalQueue > s.Queue && s.LocalQueue >= c.local):
		// The share grows in the same steps in which it was reduced: by a factor of 1/Backoff.
		more := min(share/c.opts.Backoff+shareStep, 1)
		return max(best, now.Lengths.Quantile(1-more)), fmt.Sprintf("the link has room (%.0f %% used), %d wait for PrfaaS and %d for the PD cluster: back towards the best threshold", 100*s.Utilization, s.Queue, s.LocalQueue)
	}
	return c.plan.Threshold, ""
}

const (
	// thresholdSlack is the relative distance from the best threshold within which the threshold is
	// not changed.
	thresholdSlack = 0.01
	// shareStep is the least increase of the offloaded share, so that a share that was reduced to 0
	// grows again.
	shareStep = 0.01
)

// LongOptions are the options of the long-term controller. The defaults are not from the paper.
type LongOptions struct {
	// Period is the time between two decisions; 0 selects 5 minutes.
	Period time.Duration
	// MinGain is the relative gain of throughput from which instances change their role; 0 selects
	// 0.03.
	MinGain float64
	// MaxMoves is the maximum number of instances that change their role at once; 0 selects 1.
	MaxMoves int
	// Steps is the number of steps in the search for the threshold; 0 selects StepsDefault.
	Steps int
}

// EnsureDefaults fills the fields that are 0.
func (o *LongOptions) EnsureDefaults() {
	if o.Period == 0 {
		o.Period = 5 * time.Minute
	}
	if o.MinGain == 0 {
		o.MinGain = 0.03
	}
	if o.MaxMoves == 0 {
		o.MaxMoves = 1
	}
	if o.Steps == 0 {
		o.Steps = StepsDefault
	}
}

// Load is the load of the PD cluster's stages over a period.
type Load struct {
	At time.Duration
	// Lengths is the distribution of the uncached lengths that arrived in the period.
	Lengths Lengths
	// Prefill and Decode are the utilizations of the stages, 0 to 1. PrefillQueue and DecodeQueue
	// are the numbers of requests that waited for each stage at the end of the period.
	Prefill, Decode           float64
	PrefillQueue, DecodeQueue int
	// EgressBytes is the capacity of the link in bytes per second; 0 means unchanged.
	EgressBytes float64
}

// Long is the long-term controller: in each period it divides the instances of the PD cluster
// between prefill and decode (equations 7 and 8). It must be used by one goroutine at a time.
type Long struct {
	opts LongOptions
	sys  System
	plan Plan
	last time.Duration
	ran  bool
}

// NewLong returns a controller that starts with a plan.
func NewLong(s System, plan Plan, opts LongOptions) (*Long, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	opts.EnsureDefaults()
	if opts.Period < 0 || !(opts.MinGain >= 0) || opts.MaxMoves < 1 || opts.Steps < 1 {
		return nil, fmt.Errorf("prfaas: period %v, least gain %v, %d moves, %d steps; none may be negative, and moves and steps are at least 1", opts.Period, opts.MinGain, opts.MaxMoves, opts.Steps)
	}
	if plan.Prefill < 0 || plan.Decode < 1 || plan.Prefill+plan.Decode != s.LocalInstances {
		return nil, fmt.Errorf("prfaas: %d prefill and %d decode instances of %d; they must add up, with at least one to decode", plan.Prefill, plan.Decode, s.LocalInstances)
	}
	return &Long{opts: opts, sys: s, plan: plan}, nil
}

// Reallocation is a decision of the long-term controller.
type Reallocation struct {
	Plan Plan
	// ToPrefill is the number of instances that change from decode to prefill. It is negative if
	// instances change from prefill to decode.
	ToPrefill int
	// Gain is the relative gain of throughput of the best division over the current division,
	// according to the model.
	Gain float64
	Why  string
}

// Due reports whether a period has passed since the last decision, or none has been made.
func (c *Long) Due(at time.Duration) bool { return !c.ran || at-c.last >= c.opts.Period }

// Observe processes the load of a period and divides the PD cluster again. An error means that the
// load is invalid; the plan then does not change.
func (c *Long) Observe(l Load) (Reallocation, error) {
	sys := c.sys
	if l.Lengths != nil {
		sys.Lengths = l.Lengths
	}
	if l.EgressBytes > 0 {
		sys.EgressBytes = l.EgressBytes
	}
	best, err := Optimize(sys, c.opts.Steps)
	if err != nil {
		return Reallocation{Plan: c.plan}, err
	}
	c.ran, c.last = true, l.At
	present := c.plan
	present.Threshold = Balance(sys, present.Prefill)
	r := Reallocation{Plan: present, Gain: best.Max/sys.Evaluate(present).Max - 1}
	want := best.Prefill - present.Prefill
	switch {
	case want == 0:
		r.Why = "the division is the best; the threshold follows the traffic"
	case r.Gain < c.opts.MinGain:
		r.Why = fmt.Sprintf("%d to prefill would gain %.1f %%, less than %.1f %%", want, 100*r.Gain, 100*c.opts.MinGain)
	case !agrees(want, l):
		r.Why = fmt.Sprintf("the model wants %d to prefill, but prefill is %.0f %% used with %d waiting and decode %.0f %% with %d", want, 100*l.Prefill, l.PrefillQueue, 100*l.Decode, l.DecodeQueue)
	default:
		r.ToPrefill = max(-c.opts.MaxMoves, min(c.opts.MaxMoves, want))
		r.Plan.Prefill, r.Plan.Decode = present.Prefill+r.ToPrefill, present.Decode-r.ToPrefill
		r.Plan.Threshold = Balance(sys, r.Plan.Prefill)
		r.Why = fmt.Sprintf("%d to prefill of the %d that would gain %.1f %%", r.ToPrefill, want, 100*r.Gain)
	}
	c.plan, c.sys.Lengths = r.Plan, sys.Lengths
	return r, nil
}

// agrees reports whether the measured load supports a move: the stage that would get instances has
// the longer queue or, if both queues are equal, the higher utilization.
func agrees(toPrefill int, l Load) bool {
	if l.PrefillQueue != l.DecodeQueue {
		return (l.PrefillQueue > l.DecodeQueue) == (toPrefill > 0)
	}
	return l.Prefill == l.Decode || (l.Prefill > l.Decode) == (toPrefill > 0)
}
