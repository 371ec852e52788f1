package agentic

import (
	"math"
	"slices"
	"time"
)

// Result has the measurements of a run.
type Result struct {
	System System
	// JCT is the time at which the last agent was done, or at which the run ended.
	JCT time.Duration
	// Agents and Rounds are the numbers of completed agents and rounds. AgentTime is the sum over
	// agents of the time from arrival to the last token.
	Agents, Rounds int
	AgentTime      time.Duration
	// Read has the number of tokens read by each storage NIC, prefill nodes first. Cached is the
	// number of cached tokens in the prompts of the completed rounds. If all rounds are complete,
	// the sum of Read equals Cached.
	Read   []int64
	Cached int64
	// Series has the latencies of the rounds that ended in each window of
	// SeriesWindow.
	Series []Window
	// Latency covers all rounds.
	Latency Window

	// Exceeded is set if the run ended because a window exceeded the SLO.
	Exceeded bool

	// Events is the number of simulated events, Digest a hash over them.
	Events, Digest uint64

	nodes    int
	capacity float64     // tokens per second of one storage NIC
	traffic  [][]float64 // tokens, by second and NIC
	steps    []stepBalance
}

// SeriesWindow is the length of a window of Result.Series.
const SeriesWindow = 10 * time.Second

// balanceWindow is the length of a window of storage traffic.
const balanceWindow = time.Second

// Window has sums over rounds.
type Window struct {
	// Rounds is the number of rounds that ended, Tokens the number of tokens that they generated.
	Rounds, Tokens int
	// Sums over the rounds, in seconds. TTFT is the time from Submit to the first token. Queued,
	// Reading and Prefill are the parts of TTFT: the waits for engines, for storage and for
	// prefill. TTST and TPOT cover the rounds with a second token. TTST is the time from the first
	// token to the second, as in the paper's Table 3. TPOT is the time from the first token to the
	// last, divided by the number of tokens after the first.
	TTFT, TTST, Queued, Reading, Prefill, TPOT float64
	// Second is the number of rounds with a second token, Met the number of rounds whose TTFT and
	// TPOT meet Options.SLO.
	Second, Met int
	// TTFTs is the distribution of the TTFT.
	TTFTs Distribution
}

// Distribution counts times by their logarithm: twenty steps per decade from a millisecond, so a
// quantile is within 6 %.
type Distribution [140]uint32

// distributionStart is the start of the first step, in seconds.
const distributionStart = 1e-3

// add counts a time in seconds.
func (d *Distribution) add(seconds float64) {
	step := int(20 * math.Log10(max(seconds, distributionStart)/distributionStart))
	d[min(step, len(d)-1)]++
}

// Quantile returns the time, in seconds, that a share q of the rounds did not exceed. The result is
// the middle of a step of the distribution, or NaN without rounds.
func (d *Distribution) Quantile(q float64) float64 {
	total := 0
	for _, n := range d {
		total += int(n)
	}
	below := 0
	for i, n := range d {
		if below += int(n); total > 0 && float64(below) >= q*float64(total) {
			return distributionStart * math.Pow(10, (float64(i)+0.5)/20)
		}
	}
	return math.NaN()
}

// Attainment returns the share of the rounds that met the SLO.
func (w Window) Attainment() float64 { return float64(w.Met) / float64(w.Rounds) }

// Goodput returns the rate of the rounds that met the SLO, per second.
func (w Window) Goodput(length time.Duration) float64 { return float64(w.Met) / length.Seconds() }

// MeanTTFT returns the mean time to first token in seconds; NaN without rounds.
func (w Window) MeanTTFT() float64 { return w.TTFT / float64(w.Rounds) }

// MeanTTST returns the mean time from the first token to the second.
func (w Window) MeanTTST() float64 { return w.TTST / float64(w.Second) }

// MeanTPOT returns the mean time per token after the first.
func (w Window) MeanTPOT() float64 { return w.TPOT / float64(w.Second) }

// addRound adds o, a window of one round, to w.
func (w *Window) addRound(o *Window) {
	w.sum(o)
	w.TTFTs.add(o.TTFT)
}

// add adds the sums of o to w.
func (w *Window) add(o *Window) {
	w.sum(o)
	for i, n := range o.TTFTs {
		w.TTFTs[i] += n
	}
}

// sum adds all fields of o to w except the distribution TTFTs.
func (w *Window) sum(o *Window) {
	w.Rounds, w.Tokens, w.Second = w.Rounds+o.Rounds, w.Tokens+o.Tokens, w.Second+o.Second
	w.TTFT, w.TTST, w.TPOT = w.TTFT+o.TTFT, w.TTST+o.TTST, w.TPOT+o.TPOT
	w.Queued, w.Reading, w.Prefill = w.Queued+o.Queued, w.Reading+o.Reading, w.Prefill+o.Prefill
	w.Met += o.Met
}

// Between returns the sum of the windows in [from, to).
func (r *Result) Between(from, to time.Duration) Window {
	var w Window
	for i := range r.Series {
		if at := time.Duration(i) * SeriesWindow; at >= from && at < to {
			w.add(&r.Series[i])
		}
	}
	return w
}

// stepBalance shows how evenly one prefill step of a group was spread over its engines: ratio is the
// longest attention time of an engine divided by the mean, and at is the start of the step.
type stepBalance struct {
	at    time.Duration
	ratio float64
}

// begin prepares the result of a run.
func (r *Result) begin(c *Cluster) {
	r.System = c.opts.System
	r.nodes = len(c.nodes)
	r.Read = make([]int64, r.nodes)
	r.capacity = c.opts.SNIC / float64(c.opts.Model.KVBytes)
}

// end completes the result.
func (r *Result) end(c *Cluster) {
	for i := range c.nodes {
		r.Read[i] = c.nodes[i].snic.Carried()
	}
	if c.opts.Until != 0 && c.left > 0 {
		r.JCT = c.k.Now()
	}
	r.Events, r.Digest = c.k.Fired(), c.k.Digest()
}

// read records the tokens that a storage NIC read between two times, at a constant rate.
func (r *Result) read(nic int, from, to time.Duration, tokens int64) {
	for int(to/balanceWindow) >= len(r.traffic) {
		r.traffic = append(r.traffic, make([]float64, r.nodes))
	}
	if to == from {
		r.traffic[from/balanceWindow][nic] += float64(tokens)
		return
	}
	rate := float64(tokens) / float64(to-from)
	for at := from; at < to; {
		w := at / balanceWindow
		end := min(to, (w+1)*balanceWindow)
		r.traffic[w][nic] += rate * float64(end-at)
		at = end
	}
}

// step records the balance of a prefill step: the longest attention time of an engine divided by
// the mean.
func (r *Result) step(c *Cluster, longest, mean float64) {
	r.steps = append(r.steps, stepBalance{c.k.Now(), longest / mean})
}

// round records a completed round.
func (r *Result) round(c *Cluster, q *request) {
	now := c.k.Now()
	r.Rounds++
	r.Cached += int64(q.hit)
	c.k.Note(uint64(q.id), uint64(q.first))
	w := Window{
		Rounds: 1, Tokens: q.gen,
		TTFT: (q.first - q.submitted).Seconds(), Queued: (q.started - q.submitted).Seconds(),
		Reading: (q.loaded - q.started).Seconds(), Prefill: (q.first - q.loaded).Seconds(),
	}
	if q.gen > 1 {
		w.Second, w.TTST = 1, (q.second - q.first).Seconds()
		w.TPOT = (now - q.first).Seconds() / float64(q.gen-1)
	}
	if slo := c.opts.SLO; w.TTFT <= slo.TTFT.Seconds() && w.TPOT <= slo.TPOT.Seconds() {
		w.Met = 1
	}
	i := int(now / SeriesWindow)
	for i >= len(r.Series) {
		r.Series = append(r.Series, Window{})
	}
	for _, sum := range [...]*Window{&r.Series[i], &r.Latency} {
		sum.addRound(&w)
	}
	if c.opts.Progress != nil && r.Rounds%4096 == 0 {
		c.opts.Progress(r.Rounds, now)
	}
}

// agentDone records the end of an agent.
func (r *Result) agentDone(now, arrived time.Duration) {
	r.Agents++
	r.AgentTime += now - arrived
	r.JCT = now
}

// NICBalance returns the traffic of the busiest storage NIC divided by the mean traffic of a NIC, for
// the first nics storage NICs (all, or those of the prefill nodes). The result is the mean over
// windows of the given length (whole seconds) before until, as in the paper's Figure 13. A window
// counts only if these NICs together read at more than the share floor of their capacity.
func (r *Result) NICBalance(window, until time.Duration, floor float64, nics int) float64 {
	width := max(1, int(window/balanceWindow))
	sum, n := 0.0, 0
	for i := 0; i+width <= len(r.traffic) && time.Duration(i+width)*balanceWindow <= until; i += width {
		total, most := 0.0, 0.0
		for nic := range nics {
			t := 0.0
			for _, second := range r.traffic[i : i+width] {
				t += second[nic]
			}
			total, most = total+t, max(most, t)
		}
		mean := total / float64(nics)
		if mean > floor*r.capacity*float64(width) {
			sum, n = sum+most/mean, n+1
		}
	}
	if n == 0 {
		return math.NaN()
	}
	return sum / float64(n)
}

// BalanceSeries returns, for each window before until, its middle in seconds, and the traffic of
// the busiest storage NIC divided by the mean traffic of a NIC.
func (r *Result) BalanceSeries(window, until time.Duration) (at, ratio []float64) {
	width := max(1, int(window/balanceWindow))
	for i := 0; i+width <= len(r.traffic) && time.Duration(i+width)*balanceWindow <= until; i += width {
		sums := make([]float64, r.nodes)
		total := 0.0
		for _, second := range r.traffic[i : i+width] {
			for nic, t := range second {
				sums[nic] += t
				total += t
			}
		}
		if total > 0 {
			at = append(at, (float64(i)+float64(width)/2)*balanceWindow.Seconds())
			ratio = append(ratio, slices.Max(sums)/(total/float64(r.nodes)))
		}
	}
	return at, ratio
}

// AttentionBalance returns the mean of stepBalance.ratio over the steps before until, as in the
// paper's Figure 14.
func (r *Result) AttentionBalance(until time.Duration) float64 {
	sum, n := 0.0, 0
	for _, s := range r.steps {
		if s.at < until {
			sum, n = sum+s.ratio, n+1
		}
	}
	if n == 0 {
		return math.NaN()
	}
	return sum / float64(n)
}

// StorageShare returns the utilization of the storage NICs: the tokens that they read, divided by
// the tokens that they could read at full rate in the duration of the job.
func (r *Result) StorageShare() float64 {
	sum := int64(0)
	for _, t := range r.Read {
		sum += t
	}
	return float64(sum) / (r.capacity * float64(r.nodes) * r.JCT.Seconds())
}
