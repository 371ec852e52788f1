package planner

import "github.com/prometheus/client_golang/prometheus"

// collector reads the planner's counters when the metrics are scraped.
type collector struct{ s *Service }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("penstock_planner_"+name, help, labels, nil)
}

// otherTenants is the label of all tenants that are not in dualpath.Options.Weights.
const otherTenants = "(others)"

var (
	descRequests   = desc("requests_total", "Requests submitted.")
	descFailures   = desc("request_failures_total", "Requests rejected, cancelled or past their deadline.")
	descStarted    = desc("starts_total", "Times that a request was assigned both engines and its reads.")
	descReplanned  = desc("replans_total", "Times that a request returned to the queues because a group was lost.")
	descFinished   = desc("finished_requests_total", "Requests whose decode has ended.")
	descReads      = desc("reads_total", "Parts of cached prefixes ordered to be read, by side.", "side")
	descTokens     = desc("read_tokens_total", "Tokens of cached prefixes ordered to be read, by side.", "side")
	descSplits     = desc("splits_total", "Requests read by both sides.")
	descCuts       = desc("cuts_total", "Reads stopped because their side was slow.")
	descHedges     = desc("hedges_total", "Tails read by both sides because one side was late.")
	descRecomputes = desc("recomputes_total", "Ranges recomputed because no side could read them, or because they were of old weights.")
	descAborted    = desc("aborted_requests_total", "Requests of older weights that a change of weights rejected.")
	descSwitches   = desc("role_switches_total", "Switches of a group's role that ended, by result.", "result")
	descOlder      = desc("older_weights_requests", "Requests that use weights older than their namespace's newest. Requests that name their weights do not count.")
	descSwitching  = desc("switching_groups", "Engine groups that are drained to change their role, or changing it.")
	descQueued     = desc("queued_requests", "Requests that wait for an engine.")
	descLoading    = desc("loading_requests", "Requests with a read in progress.")
	descServing    = desc("serving_requests", "Requests that have not ended.")
	descLate       = desc("late_requests_total", "Requests rejected because their first token would miss its deadline.")
	descRate       = desc("prefill_tokens_per_second", "Measured throughput of a busy prefill engine; 0 until enough prefills have ended.")
	descGranted    = desc("tenant_granted_tokens_total", "Work of the requests that were given engines, in tokens of computing, in which cached tokens count by the time of their read. One series for each tenant of schedule.weights, and one for all others.", "tenant")
	descTenant     = desc("tenant_queued_requests", "Requests that wait for an engine, by the same tenants.", "tenant")
	descGroups     = desc("groups", "Registered engine groups, by role.", "role")
	descQueue      = desc("read_queue_tokens", "Reading queue of a machine's storage NIC, as reported and assigned since.", "node")
	descNICs       = desc("compute_nic_bytes_total", "Payload bytes of a compute NIC of an engine, as its leader reported them last, by direction (out: sent). They count since the engine's start.", "engine", "nic", "direction")
)

// newSteps returns the histogram of the duration of the planner's steps.
func newSteps() prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "penstock_planner_step_seconds", Help: "Time of one event in the planner, its actions queued.",
		Buckets: prometheus.ExponentialBuckets(1e-6, 4, 10),
	})
}

// DescribeMetrics sends the definition of each metric of a planner to ch.
func DescribeMetrics(ch chan<- *prometheus.Desc) {
	newSteps().Describe(ch)
	(&collector{}).Describe(ch)
	(&electionCollector{}).Describe(ch)
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descRequests, descFailures, descStarted, descReplanned, descFinished, descReads, descTokens, descSplits, descCuts, descHedges,
		descRecomputes, descAborted, descSwitches, descOlder, descSwitching, descQueued, descLoading, descServing, descGroups, descQueue,
		descLate, descRate, descGranted, descTenant, descNICs,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	c.s.mu.Lock()
	st, view, older := c.s.planner.Stats(), c.s.planner.View(), c.s.planner.OlderWeights()
	shares, others := c.s.planner.Shares()
	c.s.mu.Unlock()
	counter := func(d *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	gauge := func(d *prometheus.Desc, n int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels...)
	}
	counter(descRequests, st.Submitted)
	counter(descFailures, st.Rejected)
	counter(descStarted, st.Started)
	counter(descReplanned, st.Replanned)
	counter(descFinished, st.Finished)
	counter(descReads, st.PartsPrefill, "prefill")
	counter(descReads, st.PartsDecode, "decode")
	counter(descTokens, st.TokensPrefill, "prefill")
	counter(descTokens, st.TokensDecode, "decode")
	counter(descSplits, st.Splits)
	counter(descCuts, st.Cuts)
	counter(descHedges, st.Hedges)
	counter(descRecomputes, st.Recomputes)
	counter(descAborted, st.Aborted)
	counter(descSwitches, st.Switched, "switched")
	counter(descSwitches, st.SwitchesFailed, "kept")
	gauge(descOlder, older)
	gauge(descQueued, st.Queued)
	gauge(descLoading, st.Loading)
	gauge(descServing, st.Serving)
	counter(descLate, st.Late)
	ch <- prometheus.MustNewConstMetric(descRate, prometheus.GaugeValue, st.PrefillRate)
	shares[otherTenants] = others
	for tenant, s := range shares {
		counter(descGranted, uint64(s.Granted), tenant)
		gauge(descTenant, s.Queued, tenant)
	}
	groups, switching := map[string]int{"prefill": 0, "decode": 0}, 0
	for _, g := range view {
		for _, e := range g.Engines {
			c.s.mu.Lock()
			name, nics := c.s.engines.of(uint32(e.Engine)), c.s.nics[g.Group][e.Engine].loads()
			c.s.mu.Unlock()
			for _, n := range nics {
				counter(descNICs, n.Counters.BytesOut, name, n.Counters.Nic, "out")
				counter(descNICs, n.Counters.BytesIn, name, n.Counters.Nic, "in")
			}
		}
		groups[g.Role.String()]++
		if g.Leaving != 0 {
			switching++
		}
		for _, n := range g.Nodes {
			c.s.mu.Lock()
			name := c.s.nodes.of(uint32(n.Node))
			c.s.mu.Unlock()
			gauge(descQueue, n.ReadQueue, name)
		}
	}
	gauge(descSwitching, switching)
	for role, n := range groups {
		gauge(descGroups, n, role)
	}
}
