package prfaas

import (
	"fmt"
	"time"
)

// ShortOptions are the short-term controller's (PrfaaS, section 3.4.3). The paper
// names what is watched and no constant; these are ours.
type ShortOptions struct {
	// High is the utilization of the egress link at which it counts as
	// congested, Low that below which it has bandwidth to spare; 0: 0.9 and 0.6.
	High, Low float64
	// QueueHigh is how many requests may wait for the PrfaaS clusters' prefill or
	// link before that counts as a surge; 0: 4 an instance.
	QueueHigh int
	// Backoff is the share of its requests that the PrfaaS side keeps when its queue
	// surges although the model says it should not; 0: 0.9.
	Backoff float64
	// Hold is the shortest time between two changes of the threshold, and how
	// long the link must be calm before more is offloaded again; 0: 5 s.
	Hold time.Duration
}

// EnsureDefaults fills what is 0.
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

// EgressSample is what the link and the PrfaaS clusters' queues were like.
type EgressSample struct {
	At time.Duration
	// Utilization of the link since the last sample: what crossed it over what it
	// could carry, 0 to 1.
	Utilization float64
	// CapacityBytes is what the link carries now, bytes a second; 0: not known.
	CapacityBytes float64
	// Queue is how many offloaded requests wait, for prefill or for the link;
	// LocalQueue is how many wait for prefill in the PD cluster.
	Queue, LocalQueue int
}

// Short is the short-term controller: it moves the threshold and says whether
// bandwidth is scarce. It serves one caller.
type Short struct {
	opts ShortOptions
	sys  System
	plan Plan
	// capacity is the link's as last heard, bytes a second.
	capacity float64
	abundant bool
	// changed is when the threshold last moved; calm since when the link has had
	// bandwidth to spare, -1: it has not.
	changed, calm time.Duration
	began         bool
	// looked is when the queues were last compared, queue and local how long they
	// were: one that shrinks already is left to.
	looked       time.Duration
	queue, local int
}

// NewShort starts from a plan for the system, with the best threshold for it.
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

// Router is what to route by now.
func (c *Short) Router() Router { return Router{Threshold: c.plan.Threshold, Abundant: c.abundant} }

// Adopt takes a plan, and the lengths it was made for, from the long-term
// controller.
func (c *Short) Adopt(plan Plan, lengths Lengths) {
	c.plan, c.sys.Lengths = plan, lengths
}

// Adjustment is what the controller did about one sample.
type Adjustment struct {
	Router  Router
	Changed bool
	// Why is said in words where something changed.
	Why string
}

// Observe takes a sample, in order of time.
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

// threshold is the one to have now, and why. The model says which one is best for
// what the link carries; where queues grow against it, they are believed, as long as
// they are longer than those that would get the work.
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
		// Back in the steps in which it went: a share of 1/Backoff more.
		more := min(share/c.opts.Backoff+shareStep, 1)
		return max(best, now.Lengths.Quantile(1-more)), fmt.Sprintf("the link has room (%.0f %% used), %d wait for PrfaaS and %d for the PD cluster: back towards the best threshold", 100*s.Utilization, s.Queue, s.LocalQueue)
	}
	return c.plan.Threshold, ""
}

const (
	// thresholdSlack: a threshold within 1 % of the best is not moved.
	thresholdSlack = 0.01
	// shareStep lets a share that went to 0 come back.
	shareStep = 0.01
)

// LongOptions are the long-term controller's. The constants are ours.
type LongOptions struct {
	// Period is the time between two looks; 0: 5 minutes.
	Period time.Duration
	// MinGain is the share of throughput that moving instances must promise; 0:
	// 0.03.
	MinGain float64
	// MaxMoves is how many instances change their role at once; 0: 1.
	MaxMoves int
	// Steps of the search for the threshold; 0: StepsDefault.
	Steps int
}

// EnsureDefaults fills what is 0.
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

// Load is how busy the stages of the PD cluster were over a period.
type Load struct {
	At time.Duration
	// Lengths that arrived in the period, after prefix matching.
	Lengths Lengths
	// Prefill and Decode are the utilizations of the stages, 0 to 1, and the
	// queues the requests that waited for each at its end.
	Prefill, Decode           float64
	PrefillQueue, DecodeQueue int
	// EgressBytes is what the link carries, bytes a second; 0: as before.
	EgressBytes float64
}

// Long is the long-term controller: every period it divides the PD cluster anew
// (equations 7 and 8). It serves one caller.
type Long struct {
	opts LongOptions
	sys  System
	plan Plan
	last time.Duration
	ran  bool
}

// NewLong starts from a plan.
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

// Reallocation is what the long-term controller decided.
type Reallocation struct {
	Plan Plan
	// ToPrefill is how many instances turn from decode to prefill; negative: the
	// other way.
	ToPrefill int
	// Gain is the share of throughput that the model promises for the best
	// division over the present one.
	Gain float64
	Why  string
}

// Due reports whether a period has passed.
func (c *Long) Due(at time.Duration) bool { return !c.ran || at-c.last >= c.opts.Period }

// Observe takes the load of a period and divides the cluster anew. An error is
// about the load: the plan stays.
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

// agrees reports whether the stage that would get instances is the busier one:
// by those waiting, and where nobody waits by utilization.
func agrees(toPrefill int, l Load) bool {
	if l.PrefillQueue != l.DecodeQueue {
		return (l.PrefillQueue > l.DecodeQueue) == (toPrefill > 0)
	}
	return l.Prefill == l.Decode || (l.Prefill > l.Decode) == (toPrefill > 0)
}
