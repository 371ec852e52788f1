package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/emulate"
)

// NIC names a NIC of a node.
type NIC struct {
	// Node is the node's name. Storage is true for the node's storage NIC, false for its compute
	// NIC.
	Node    string `json:"node"`
	Storage bool   `json:"storage"`
}

// String returns the NIC's name, for example "P0 SNIC".
func (n NIC) String() string {
	if n.Storage {
		return n.Node + " SNIC"
	}
	return n.Node + " CNIC"
}

// Sample holds the counters of the NICs of all engines since the replay began.
type Sample struct {
	At time.Duration
	// Received and Sent are the bytes of each NIC, in the order of Cluster.NICs.
	Received, Sent []uint64
	// Turns is the number of turns (requests of agents) that have ended.
	Turns int
}

// NICs returns the NICs of the engines: for each node its storage NIC, then its compute NIC.
func (c *Cluster) NICs() []NIC {
	var out []NIC
	for _, m := range c.engines {
		out = append(out, NIC{m.name, true}, NIC{m.name, false})
	}
	return out
}

// ports returns the ports of NICs, in the same order.
func (c *Cluster) ports() []nicPort {
	var out []nicPort
	for _, m := range c.engines {
		out = append(out, m.snic, m.cnic)
	}
	return out
}

// read reads the counters of all NICs into s.
func (c *Cluster) read(s *Sample) error {
	for _, k := range c.ports() {
		n, err := k.Counters()
		if err != nil {
			return err
		}
		s.Received, s.Sent = append(s.Received, n.ReceivedBytes), append(s.Sent, n.SentBytes)
	}
	return nil
}

// Result is the measurements of one replay.
type Result struct {
	Shape string `json:"shape"`
	// Completion is the time from the first request to the end of the last agent.
	Completion time.Duration `json:"completion_ns"`
	Turns      int           `json:"turns"`
	Failed     int           `json:"failed"`
	// Failures are the errors of the first few failed turns.
	Failures []string `json:"failures,omitempty"`
	// PromptTokens and HitTokens (prompt tokens found in storage) are sums over all turns.
	// PrefillTokens and DecodeTokens are the hit tokens that prefill nodes and decode nodes read.
	PromptTokens  int64 `json:"prompt_tokens"`
	HitTokens     int64 `json:"hit_tokens"`
	PrefillTokens int64 `json:"prefill_side_tokens"`
	DecodeTokens  int64 `json:"decode_side_tokens"`
	// Replans is how often requests were planned again, over all turns. Planner has the planner's
	// counters since its last start.
	Replans int          `json:"replans"`
	Planner PlannerStats `json:"planner"`
	// Longest is the duration of the longest turn, whether it succeeded or failed. FirstTokenP50
	// and FirstTokenP99 are quantiles of the time from Submit to the end of prefill.
	Longest       time.Duration `json:"longest_turn_ns"`
	FirstTokenP50 time.Duration `json:"first_token_p50_ns"`
	FirstTokenP99 time.Duration `json:"first_token_p99_ns"`
	// MeanMatch, MeanQueue, MeanPrefill and MeanDecode are the mean durations of the consecutive
	// parts of a successful turn. The parts end when the hit length is known, when both engines are
	// assigned, at the first token, and when the last token is stored.
	MeanMatch   time.Duration `json:"mean_match_ns"`
	MeanQueue   time.Duration `json:"mean_queue_ns"`
	MeanPrefill time.Duration `json:"mean_prefill_ns"`
	MeanDecode  time.Duration `json:"mean_decode_ns"`
	// ReceivedBytes and SentBytes are the bytes of each NIC, in the order of NICs, headers
	// included.
	NICs          []NIC    `json:"nics"`
	ReceivedBytes []uint64 `json:"received_bytes"`
	SentBytes     []uint64 `json:"sent_bytes"`
	// SNICBalance is the number of bytes that the busiest storage NIC received in a second divided
	// by the mean over the storage NICs, averaged over windows (see Balance); 0: no window had
	// enough load.
	SNICBalance float64 `json:"snic_max_over_avg"`
	// Usage is the usage of the storage NICs that may read: with dualpath.PrefillOnly the storage
	// NICs of the prefill nodes, otherwise all storage NICs.
	Usage Usage `json:"snic_usage"`
	// BusyBalance is the longest compute time of a prefill engine divided by the mean over the
	// prefill engines; 0 with fewer than two engines.
	BusyBalance float64 `json:"prefill_busy_max_over_avg,omitempty"`
	// CheckedBytes is the size of the KV whose bytes were compared in device memory. WrongBlocks is
	// the number of blocks that had wrong bytes in device memory. CaughtBlocks is the number of
	// wrong blocks that a checksum rejected before they reached device memory.
	CheckedBytes uint64 `json:"checked_bytes"`
	WrongBlocks  uint64 `json:"wrong_blocks"`
	CaughtBlocks uint64 `json:"caught_blocks"`
	Flipped      int    `json:"flipped_bits,omitempty"`
	// CPU is the processor time of all processes of the cluster. Life is the time from the start of
	// the cluster to its end.
	CPU  time.Duration `json:"cpu_ns"`
	Life time.Duration `json:"life_ns"`
	// Samples and Loads are for charts and further evaluation.
	Samples []Sample         `json:"-"`
	Loads   []emulate.Loaded `json:"-"`
}

// sampleEvery is the interval between two samples of the NICs.
const sampleEvery = 250 * time.Millisecond

// Workload describes a replay and, if there are any, the faults during the replay.
type Workload struct {
	Agents   []emulate.Session
	Parallel int
	// Warm, if set, is replayed before the measurement, to fill storage.
	Warm []emulate.Session
	// During, if set, runs concurrently with the replay, usually to inject faults. Run waits until
	// During returns, and returns its error.
	During func(ctx context.Context, c *Cluster) error
	// Watch, if set, is called with every sample.
	Watch func(nics []NIC, s Sample)
}

// Run starts a cluster, replays agents and returns the measurements.
func Run(ctx context.Context, spec Spec, w Workload) (_ *Result, err error) {
	begin := time.Now()
	c, err := Start(ctx, spec)
	if err != nil {
		return nil, err
	}
	var r *Result
	closed := false
	defer func() {
		if !closed {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := c.warm(ctx, w); err != nil {
		return nil, err
	}
	if r, err = c.measure(ctx, w); err != nil {
		return nil, err
	}
	closed = true
	if err := c.Close(); err != nil {
		return nil, err
	}
	// Each engine sent its final counters before it ended.
	for name, n := range c.Counts() {
		r.CheckedBytes += n.CheckedBytes
		r.WrongBlocks += n.WrongBlocks
		r.CaughtBlocks += n.CaughtBlocks
		r.Flipped += c.flipped[name]
	}
	r.CPU, r.Life = c.CPU(), time.Since(begin)
	r.BusyBalance = c.busyBalance()
	return r, nil
}

// warmParallel is the number of agents whose contexts are stored at a time. With more, an engine
// could exceed its limit of KV that waits to be stored. The engine would then drop blocks, and the
// measured turns would miss these blocks.
const warmParallel = 8

// warm replays the agents that fill storage before the measurement.
func (c *Cluster) warm(ctx context.Context, w Workload) error {
	if len(w.Warm) == 0 {
		return nil
	}
	turns, _, err := c.Replay(ctx, w.Warm, min(w.Parallel, warmParallel))
	if err != nil {
		return err
	}
	for _, t := range turns {
		if t.Failed {
			return fmt.Errorf("cluster: warm-up of %s: %s", t.Session, t.Err)
		}
	}
	return nil
}

// kindOf returns the kind of the engine with the given name; "" if there is none.
func (c *Cluster) kindOf(name string) Kind {
	for _, m := range c.engines {
		if m.name == name {
			return m.kind
		}
	}
	return ""
}

// busyBalance returns Result.BusyBalance.
func (c *Cluster) busyBalance() float64 {
	sum, most, n := 0.0, 0.0, 0
	for _, m := range c.engines {
		if m.kind == KindPrefill {
			busy := c.counts[m.name].Busy.Seconds()
			sum, most, n = sum+busy, max(most, busy), n+1
		}
	}
	if n < 2 || sum == 0 {
		return 0
	}
	return most / (sum / float64(n))
}

// measure replays the workload and samples the NICs.
func (c *Cluster) measure(ctx context.Context, w Workload) (*Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var zero Sample
	if err := c.read(&zero); err != nil {
		return nil, err
	}
	begin := time.Now()
	sampled := make(chan []Sample, 1)
	sampling, stop := context.WithCancel(ctx)
	defer stop()
	go func() { sampled <- c.sample(sampling, begin, zero, w.Watch) }()
	during := make(chan error, 1)
	beside, endBeside := context.WithCancel(ctx)
	defer endBeside()
	go func() {
		if w.During == nil {
			during <- nil
			return
		}
		during <- w.During(beside, c)
	}()
	turns, stats, err := c.Replay(ctx, w.Agents, w.Parallel)
	took := time.Since(begin)
	endBeside()
	if failed := <-during; failed != nil && !errors.Is(failed, context.Canceled) {
		err = errors.Join(err, failed)
	}
	stop()
	samples := <-sampled
	if err != nil {
		return nil, err
	}
	r := &Result{Shape: c.spec.Shape(), Completion: took, NICs: c.NICs(), Samples: samples, Loads: c.Loads(), Planner: stats}
	r.count(turns)
	last := Sample{At: took}
	if err := c.read(&last); err != nil {
		return nil, err
	}
	last.since(zero)
	r.ReceivedBytes, r.SentBytes = last.Received, last.Sent
	r.SNICBalance = Balance(r.NICs, samples, took)
	if !c.spec.Oracle { // with Oracle, NICs have no limit
		r.Usage = use(r.NICs, append(samples, last), took, c.spec.SNICBits, func(n NIC) bool {
			return n.Storage && (c.spec.Policy != dualpath.PrefillOnly || c.kindOf(n.Node) == KindPrefill)
		})
	}
	return r, nil
}

// sample samples the NICs every sampleEvery until ctx ends.
func (c *Cluster) sample(ctx context.Context, begin time.Time, zero Sample, watch func([]NIC, Sample)) []Sample {
	var all []Sample
	t := time.NewTicker(sampleEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-ctx.Done():
			return all
		}
		s := Sample{At: time.Since(begin)}
		if c.read(&s) != nil {
			continue // the node's network may be down; the next sample may succeed
		}
		s.since(zero)
		c.mu.Lock()
		s.Turns = len(c.turns)
		c.mu.Unlock()
		all = append(all, s)
		if watch != nil {
			watch(c.NICs(), s)
		}
	}
}

// since subtracts the counters of zero.
func (s *Sample) since(zero Sample) {
	for i := range s.Received {
		s.Received[i] -= zero.Received[i]
		s.Sent[i] -= zero.Sent[i]
	}
}

// failuresKept is how many errors Result.Failures holds.
const failuresKept = 5

// count adds the measurements of the turns to the result.
func (r *Result) count(turns []Turn) {
	var first []time.Duration
	for _, t := range turns {
		r.Turns++
		r.PromptTokens += int64(t.Prompt)
		r.HitTokens += int64(t.Hit)
		r.PrefillTokens += int64(t.PrefillSide)
		r.DecodeTokens += int64(t.DecodeSide)
		r.Replans += t.Replans
		r.Longest = max(r.Longest, t.Took)
		if t.Failed {
			r.Failed++
			if len(r.Failures) < failuresKept {
				r.Failures = append(r.Failures, t.Err)
			}
			continue
		}
		first = append(first, t.FirstToken)
		r.MeanMatch += t.Matched
		r.MeanQueue += t.Started - t.Matched
		r.MeanPrefill += t.FirstToken - t.Started
		r.MeanDecode += t.Took - t.FirstToken
	}
	for _, d := range []*time.Duration{&r.MeanMatch, &r.MeanQueue, &r.MeanPrefill, &r.MeanDecode} {
		*d /= time.Duration(max(len(first), 1))
	}
	r.FirstTokenP50, r.FirstTokenP99 = bench.Quantile(first, 0.50), bench.Quantile(first, 0.99)
}

// Balance returns the number of bytes that the busiest storage NIC received in a second divided by
// the mean over the storage NICs, averaged over windows of a second. A window counts if it is in
// the first half of the replay and has at least 30 % of the load of the busiest window. The end of
// a replay is excluded, because a NIC that is idle there does not show a fault of the scheduler.
// Section 7.4 of the DualPath paper defines the metric, but not these windows.
func Balance(nics []NIC, samples []Sample, took time.Duration) float64 {
	const (
		window = time.Second
		floor  = 0.3
	)
	type load struct{ max, sum float64 }
	var loads []load
	storage, most := 0, 0.0
	for i := 0; i < len(samples); {
		j := i
		for j < len(samples) && samples[j].At-samples[i].At < window {
			j++
		}
		if j == len(samples) || samples[j].At > took/2 {
			break
		}
		l := load{}
		storage = 0
		for n, nic := range nics {
			if nic.Storage {
				got := float64(samples[j].Received[n] - samples[i].Received[n])
				l.max, l.sum = max(l.max, got), l.sum+got
				storage++
			}
		}
		loads, most = append(loads, l), max(most, l.sum)
		i = j
	}
	total, n := 0.0, 0
	for _, l := range loads {
		if l.sum >= floor*most && l.sum > 0 {
			total += l.max / (l.sum / float64(storage))
			n++
		}
	}
	if n == 0 {
		return 0
	}
	return total / float64(n)
}
