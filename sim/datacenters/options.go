package datacenters

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/penstock-kv/penstock/dualpath/prfaas"
)

// ErrOptions is wrapped by every error about invalid options.
var ErrOptions = errors.New("not a possible system")

// Options are the options of a simulation.
type Options struct {
	// System is the hardware and the traffic; the field System.Service is not used.
	System prfaas.System
	// Plan is the plan at the beginning.
	Plan prfaas.Plan
	// Rate is the rate of a Poisson arrival process, in requests per second. Concurrency, as an
	// alternative, is the constant number of requests in a closed loop. Exactly one of the two is
	// above 0.
	Rate        float64
	Concurrency int
	// Duration is the time in which requests arrive. Its first part, of length Warmup, is not
	// measured.
	Duration, Warmup time.Duration
	// Layers is the number of parts in which KV is transferred; 0 means 1.
	Layers int
	// TransfersMax is the number of requests whose KV may be in transfer before the PrfaaS
	// instances stall; 0 means four per instance.
	TransfersMax int
	// QueueMax bounds each prefill queue. An arrival at a full queue is rejected and counted. 0
	// means 10,000.
	QueueMax int
	// Turns is the mean number of requests per session; 0 means 1. Think is the mean time between
	// an answer and the next request.
	Turns float64
	Think time.Duration
	// BlockTokens is the length of a cached block; 0 means 64.
	BlockTokens int
	// Abundant allows fetches of cached prefixes over the link. With a short-term controller, that
	// controller decides.
	Abundant bool
	// Short and Long are the options of the controllers. A nil controller is off; without both, the
	// initial plan is kept.
	Short *prfaas.ShortOptions
	Long  *prfaas.LongOptions
	// Observe is the time between two samples of the short-term controller; 0 means 1 s.
	Observe time.Duration
	// SwitchTime is the time that an idle instance takes to change its role.
	SwitchTime time.Duration
	// Changes are the changes of the system during the run, in order of time.
	Changes []Change
	// SLO is the objective for the time to first token; 0 means 10 s.
	SLO time.Duration
	// Window is the interval of the series in the result; 0 means 10 s.
	Window time.Duration
}

// Change is one change, during the run, of the link's bandwidth, the prompt lengths or the arrival
// rate.
type Change struct {
	At time.Duration
	// EgressFactor is the link's new bandwidth in both directions divided by its initial bandwidth;
	// 0 means no change.
	EgressFactor float64
	// Lengths is the new distribution of the prompt lengths; nil means no change.
	Lengths prfaas.Lengths
	// Rate is the new arrival rate; 0 means no change.
	Rate float64
}

// EnsureDefaults fills the fields that are 0.
func (o *Options) EnsureDefaults() {
	if o.Layers == 0 {
		o.Layers = 1
	}
	if o.TransfersMax == 0 {
		o.TransfersMax = max(4*o.System.RemoteInstances, 1)
	}
	if o.QueueMax == 0 {
		o.QueueMax = 10000
	}
	if o.Turns == 0 {
		o.Turns = 1
	}
	if o.BlockTokens == 0 {
		o.BlockTokens = 64
	}
	if o.Observe == 0 {
		o.Observe = time.Second
	}
	if o.SLO == 0 {
		o.SLO = 10 * time.Second
	}
	if o.Window == 0 {
		o.Window = 10 * time.Second
	}
}

// concurrencyMax bounds a closed loop.
const concurrencyMax = 1 << 20

// Validate returns an error that names the first option out of its range.
func (o Options) Validate() error {
	if err := o.System.Validate(); err != nil {
		return err
	}
	bad := func(format string, args ...any) error {
		return fmt.Errorf("datacenters: %s: %w", fmt.Sprintf(format, args...), ErrOptions)
	}
	p := o.Plan
	switch {
	case !(o.Rate >= 0) || math.IsInf(o.Rate, 0) || o.Concurrency < 0 || o.Concurrency > concurrencyMax || (o.Rate > 0) == (o.Concurrency > 0):
		return bad("a rate of %v requests/s and a concurrency of %d; one of them must be above 0, and at most %d in the system", o.Rate, o.Concurrency, concurrencyMax)
	case o.Duration <= 0 || o.Warmup < 0 || o.Warmup >= o.Duration:
		return bad("%v of which the first %v are not measured; the duration must be above 0 and longer than the warm-up", o.Duration, o.Warmup)
	case p.Prefill < 0 || p.Decode < 1 || p.Prefill+p.Decode != o.System.LocalInstances:
		return bad("%d prefill and %d decode instances of %d; they must add up, with at least one to decode", p.Prefill, p.Decode, o.System.LocalInstances)
	case math.IsNaN(p.Threshold) || p.Threshold < 0:
		return bad("a threshold of %v tokens; 0 or above", p.Threshold)
	case o.Layers < 1 || o.TransfersMax < 1 || o.QueueMax < 1 || o.BlockTokens < 1:
		return bad("%d layers, %d transfers, queues of %d, blocks of %d tokens; each is at least 1", o.Layers, o.TransfersMax, o.QueueMax, o.BlockTokens)
	case o.TransfersMax < o.System.RemoteInstances:
		return bad("%d transfers under way at most, for %d instances that each make one; allow at least as many", o.TransfersMax, o.System.RemoteInstances)
	case o.Concurrency > o.QueueMax:
		return bad("%d requests in a closed loop with queues of %d; a queue must be able to hold them all", o.Concurrency, o.QueueMax)
	case o.System.DecodeBatch < 1:
		return bad("a decode instance of %v requests at a time; at least 1", o.System.DecodeBatch)
	case !(o.Turns >= 1) || math.IsInf(o.Turns, 0) || o.Think < 0:
		return bad("sessions of %v turns, %v apart; at least 1 turn, and no negative time", o.Turns, o.Think)
	case o.Observe < 0 || o.SwitchTime < 0 || o.SLO < 0 || o.Window < 0:
		return bad("observation every %v, role change in %v, objective of %v, window of %v; none may be negative", o.Observe, o.SwitchTime, o.SLO, o.Window)
	}
	if err := o.validateReach(); err != nil {
		return err
	}
	for i, c := range o.Changes {
		switch {
		case c.At < 0 || i > 0 && c.At < o.Changes[i-1].At:
			return bad("change %d is at %v; changes are in order of time, from 0", i, c.At)
		case !(c.EgressFactor >= 0) || math.IsInf(c.EgressFactor, 0) || !(c.Rate >= 0) || math.IsInf(c.Rate, 0):
			return bad("change %d: bandwidth by %v, rate %v; both must be 0 or above", i, c.EgressFactor, c.Rate)
		case c.Rate > 0 && o.Concurrency > 0:
			return bad("change %d sets a rate in a closed loop; it has none", i)
		case c.EgressFactor > 0 && o.System.RemoteInstances == 0:
			return bad("change %d is to the link, and there is no PrfaaS cluster", i)
		}
	}
	return nil
}

// validateReach returns an error if the plan leaves some prompts without a cluster that prefills
// them.
func (o Options) validateReach() error {
	least, greatest := o.System.Lengths.Bounds()
	if o.Plan.Prefill == 0 && (o.Plan.Threshold > max(least, 0) || o.System.RemoteInstances == 0) {
		return fmt.Errorf("datacenters: no instance prefills prompts up to %v tokens; lower the threshold to %v or give the PD cluster a prefill instance: %w", o.Plan.Threshold, max(least, 0), ErrOptions)
	}
	if o.Plan.Prefill > 0 && o.System.LocalPrefill.IsZero() {
		return fmt.Errorf("datacenters: %d prefill instances of the PD cluster without a prefill time: %w", o.Plan.Prefill, ErrOptions)
	}
	if o.System.RemoteInstances == 0 && o.Plan.Threshold < greatest {
		return fmt.Errorf("datacenters: no PrfaaS cluster takes prompts above %v tokens; raise the threshold to %v: %w", o.Plan.Threshold, greatest, ErrOptions)
	}
	return nil
}
