package datacenters

import (
	"math"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/dualpath/prfaas"
)

// Result has the measurements of one run after the warm-up.
type Result struct {
	// Throughput is the number of completed answers per second. Arrived, Completed and Rejected are
	// numbers of requests in the measured time.
	Throughput                   float64
	Arrived, Completed, Rejected int
	// The mean and quantiles of the time to first token.
	TTFTMean, TTFTP50, TTFTP90, TTFTP99 time.Duration
	// SLOShare is the share of first tokens within the objective.
	SLOShare float64
	// Offloaded is the share of first tokens whose prompts the PrfaaS cluster prefilled.
	Offloaded float64
	// Hit is the share of the prompts' tokens that were cached.
	Hit float64
	// EgressBytes is the traffic towards the PD cluster, in bytes per second.
	EgressBytes float64
	// RemoteUsed, PrefillUsed and DecodeUsed are the utilizations of the PrfaaS, prefill and decode
	// instances, relative to the numbers of instances in the initial plan.
	RemoteUsed, PrefillUsed, DecodeUsed float64
	// Fetches is the number of cached prefixes that were fetched over the link in the whole run,
	// FetchedBytes their size in bytes.
	Fetches      int
	FetchedBytes float64
	// Adjustments and Reallocations are the decisions of the controllers over the whole run.
	Adjustments   []Adjusted
	Reallocations []Reallocated
	Series        []Window
	// Digest is a hash over all events.
	Digest uint64
}

// Adjusted is one adjustment of the short-term controller.
type Adjusted struct {
	At        time.Duration
	Threshold float64
	Abundant  bool
	Why       string
}

// Reallocated is one decision of the long-term controller.
type Reallocated struct {
	At        time.Duration
	Prefill   int
	ToPrefill int
	Threshold float64
	Why       string
}

// Window is one interval of the series.
type Window struct {
	// At is the end of the window.
	At time.Duration
	// Throughput (answers per second) and EgressBytes (bytes per second) are means over the window.
	// The other fields have the values at the end of the window.
	Throughput, EgressBytes             float64
	Threshold                           float64
	Prefill                             int
	RemoteQueue, LocalQueue, DecodeWait int
}

// gauge integrates a number over time.
type gauge struct {
	value, area float64
	last        time.Duration
}

func (g *gauge) add(now time.Duration, delta float64) {
	g.area += g.value * (now - g.last).Seconds()
	g.last = now
	g.value += delta
}

// upTo returns the integral so far, in seconds.
func (g *gauge) upTo(now time.Duration) float64 { return g.area + g.value*(now-g.last).Seconds() }

// meter measures one run.
type meter struct {
	opts     Options
	on       bool // set after the warm-up
	rejected int
	arrivals int
	ends     int
	ttft     []time.Duration
	met      int
	offloads int
	tokens   float64
	hits     float64

	remote, prefill, decode             gauge
	remoteFrom, prefillFrom, decodeFrom float64
	carriedFrom                         float64

	fetches      int
	fetchedBytes float64
	carriedSeen  float64
	adjustments  []Adjusted
	reallocs     []Reallocated
	series       []Window

	// windowEnds is the number of answers since the end of the last window, windowCarried the
	// number of bytes that the link had carried then. lengths has the number of new tokens of each
	// request that arrived since the end of the last period of the long-term controller. That end
	// was at periodAt. periodPrefill and periodDone are the integrals of prefill and decode at that
	// time.
	windowEnds                int
	windowCarried             float64
	lengths                   []float64
	periodPrefill, periodDone float64
	periodAt                  time.Duration
}

func (m *meter) init(o Options) { m.opts = o }

// start ends the warm-up.
func (m *meter) start(now time.Duration, carried float64) {
	m.on, m.carriedFrom = true, carried
	m.rejected = 0
	m.remoteFrom, m.prefillFrom, m.decodeFrom = m.remote.upTo(now), m.prefill.upTo(now), m.decode.upTo(now)
}

func (m *meter) arrived(tokens int) {
	if m.on {
		m.arrivals++
	}
	if m.opts.Long != nil {
		m.lengths = append(m.lengths, float64(tokens))
	}
}

func (m *meter) first(r *request, slo time.Duration) {
	if !m.on {
		return
	}
	t := r.delivered - r.arrived
	m.ttft = append(m.ttft, t)
	if t <= slo {
		m.met++
	}
	if r.route.Side == prfaas.Remote {
		m.offloads++
	}
	m.tokens += float64(r.total)
	m.hits += float64(r.route.Prefix)
}

func (m *meter) done(*request) {
	m.windowEnds++
	if m.on {
		m.ends++
	}
}

func (m *meter) adjusted(at time.Duration, a prfaas.Adjustment) {
	m.adjustments = append(m.adjustments, Adjusted{at, a.Router.Threshold, a.Router.Abundant, a.Why})
}

func (m *meter) reallocated(at time.Duration, r prfaas.Reallocation) {
	m.reallocs = append(m.reallocs, Reallocated{at, r.Plan.Prefill, r.ToPrefill, r.Plan.Threshold, r.Why})
}

// load returns the traffic of the last period, for the long-term controller. Lengths is nil if no
// request arrived.
func (m *meter) load(c *cluster) prfaas.Load {
	now := c.k.Now()
	span := (now - m.periodAt).Seconds()
	prefill, decode := 0, 0
	for _, x := range c.instances {
		if x.prefill {
			prefill++
		} else {
			decode++
		}
	}
	p, d := m.prefill.upTo(now), m.decode.upTo(now)
	l := prfaas.Load{
		At: now, PrefillQueue: c.localQueue.len() + c.remoteQueue.len(), DecodeQueue: c.decodeQueue.len(),
		Prefill: (p - m.periodPrefill) / (span * float64(max(prefill, 1))),
		Decode:  (d - m.periodDone) / (span * float64(max(decode, 1)) * c.opts.System.DecodeBatch),
	}
	if c.opts.System.RemoteInstances > 0 {
		l.EgressBytes = c.net.Capacity(c.out)
	}
	if s, err := prfaas.NewSample(m.lengths); err == nil {
		l.Lengths = s
	}
	m.periodAt, m.periodPrefill, m.periodDone, m.lengths = now, p, d, nil
	return l
}

// sample completes one window of the series.
func (m *meter) sample(c *cluster) {
	prefill := 0
	for _, x := range c.instances {
		if x.prefill {
			prefill++
		}
	}
	w := Window{
		At: c.k.Now(), Throughput: float64(m.windowEnds) / m.opts.Window.Seconds(), Threshold: c.router.Threshold, Prefill: prefill,
		RemoteQueue: c.remoteQueue.len() + c.transfers, LocalQueue: c.localQueue.len(), DecodeWait: c.decodeQueue.len(),
	}
	if carried := c.carried(); carried > 0 {
		w.EgressBytes = (carried - m.windowCarried) / m.opts.Window.Seconds()
		m.windowCarried = carried
	}
	m.windowEnds = 0
	m.series = append(m.series, w)
}

// carried returns the number of bytes that the link has transferred to the PD cluster.
func (c *cluster) carried() float64 {
	if c.opts.System.RemoteInstances == 0 {
		return 0
	}
	return c.net.Carried(c.out)
}

func (c *cluster) result() *Result {
	m, o, now := &c.m, c.opts, c.k.Now()
	span := (now - o.Warmup).Seconds()
	used := func(g *gauge, from, capacity float64) float64 {
		if capacity == 0 {
			return 0
		}
		return (g.upTo(now) - from) / (span * capacity)
	}
	slices.Sort(m.ttft)
	firsts := float64(max(len(m.ttft), 1))
	return &Result{
		Throughput: float64(m.ends) / span, Arrived: m.arrivals, Completed: m.ends, Rejected: m.rejected,
		TTFTMean: mean(m.ttft), TTFTP50: quantile(m.ttft, 0.5), TTFTP90: quantile(m.ttft, 0.9), TTFTP99: quantile(m.ttft, 0.99),
		SLOShare: float64(m.met) / firsts, Offloaded: float64(m.offloads) / firsts, Hit: m.hits / max(m.tokens, 1),
		EgressBytes: (c.carried() - m.carriedFrom) / span,
		RemoteUsed:  used(&m.remote, m.remoteFrom, float64(o.System.RemoteInstances)),
		PrefillUsed: used(&m.prefill, m.prefillFrom, float64(o.Plan.Prefill)),
		DecodeUsed:  used(&m.decode, m.decodeFrom, float64(o.Plan.Decode)*o.System.DecodeBatch),
		Fetches:     m.fetches, FetchedBytes: m.fetchedBytes,
		Adjustments: m.adjustments, Reallocations: m.reallocs, Series: m.series,
		Digest: c.k.Digest(),
	}
}

func mean(v []time.Duration) time.Duration {
	var sum float64
	for _, t := range v {
		sum += t.Seconds()
	}
	return seconds(sum / float64(max(len(v), 1)))
}

// quantile returns the element of rank ceil(q n) of n sorted times; 0 if there are none.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(math.Ceil(q * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}
