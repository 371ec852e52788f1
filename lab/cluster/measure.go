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

// NIC is one of a node's.
type NIC struct {
	// Node is the node's name; Storage tells its storage NIC from its compute NIC.
	Node    string `json:"node"`
	Storage bool   `json:"storage"`
}

// String is the NIC's name: "P0 SNIC".
func (n NIC) String() string {
	if n.Storage {
		return n.Node + " SNIC"
	}
	return n.Node + " CNIC"
}

// Sample is what the NICs of all engines have carried since the replay began.
type Sample struct {
	At time.Duration
	// Received and Sent are bytes, in the order of NICs.
	Received, Sent []uint64
	// Turns that have ended.
	Turns int
}

// NICs returns those of the engines: a node's storage NIC, then its compute NIC.
func (c *Cluster) NICs() []NIC {
	var out []NIC
	for _, m := range c.engines {
		out = append(out, NIC{m.name, true}, NIC{m.name, false})
	}
	return out
}

// ports are those of NICs, in its order.
func (c *Cluster) ports() []nicPort {
	var out []nicPort
	for _, m := range c.engines {
		out = append(out, m.snic, m.cnic)
	}
	return out
}

// read takes the counters of all NICs.
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

// Result is what one replay showed.
type Result struct {
	Shape string `json:"shape"`
	// Completion is from the first request to the end of the last agent.
	Completion time.Duration `json:"completion_ns"`
	Turns      int           `json:"turns"`
	Failed     int           `json:"failed"`
	// Failures are the first few reasons.
	Failures []string `json:"failures,omitempty"`
	// PromptTokens of all turns, HitTokens found in storage; read by either side.
	PromptTokens  int64 `json:"prompt_tokens"`
	HitTokens     int64 `json:"hit_tokens"`
	PrefillTokens int64 `json:"prefill_side_tokens"`
	DecodeTokens  int64 `json:"decode_side_tokens"`
	// Replans of all turns; Planner counts since its last start.
	Replans int          `json:"replans"`
	Planner PlannerStats `json:"planner"`
	// FirstToken is the time from Submit to the end of prefill.
	// Longest is that of a turn, ended or failed.
	Longest       time.Duration `json:"longest_turn_ns"`
	FirstTokenP50 time.Duration `json:"first_token_p50_ns"`
	FirstTokenP99 time.Duration `json:"first_token_p99_ns"`
	// MeanMatch, MeanQueue, MeanPrefill and MeanDecode are the parts of a turn that
	// ended well, one after the other: finding the hit, until both engines are known,
	// until the first token, until the last one is stored.
	MeanMatch   time.Duration `json:"mean_match_ns"`
	MeanQueue   time.Duration `json:"mean_queue_ns"`
	MeanPrefill time.Duration `json:"mean_prefill_ns"`
	MeanDecode  time.Duration `json:"mean_decode_ns"`
	// ReceivedBytes and SentBytes of each NIC, with headers.
	NICs          []NIC    `json:"nics"`
	ReceivedBytes []uint64 `json:"received_bytes"`
	SentBytes     []uint64 `json:"sent_bytes"`
	// SNICBalance is max/avg of what storage NICs received in a second, mean over
	// windows; 0: there was none.
	SNICBalance float64 `json:"snic_max_over_avg"`
	// Usage is that of the storage NICs that may read: those of prefill alone with
	// dualpath.PrefillOnly, all otherwise.
	Usage Usage `json:"snic_usage"`
	// BusyBalance is max/avg over prefill engines of the time that compute took; 0
	// with fewer than two.
	BusyBalance float64 `json:"prefill_busy_max_over_avg,omitempty"`
	// CheckedBytes were compared on devices; WrongBlocks of them were wrong,
	// CaughtBlocks were found on the way.
	CheckedBytes uint64 `json:"checked_bytes"`
	WrongBlocks  uint64 `json:"wrong_blocks"`
	CaughtBlocks uint64 `json:"caught_blocks"`
	Flipped      int    `json:"flipped_bits,omitempty"`
	// CPU is the processor time of all processes, over Life: from their start to
	// their end.
	CPU  time.Duration `json:"cpu_ns"`
	Life time.Duration `json:"life_ns"`
	// Samples and Loads are for pictures and further questions.
	Samples []Sample         `json:"-"`
	Loads   []emulate.Loaded `json:"-"`
}

// sampleEvery is the time between two looks at the NICs.
const sampleEvery = 250 * time.Millisecond

// Workload is what is replayed.
type Workload struct {
	Agents   []emulate.Session
	Parallel int
	// Warm, if set, is replayed before anything is counted.
	Warm []emulate.Session
	// During, if set, runs beside the replay: faults. It ends before Run returns,
	// and its error is Run's.
	During func(ctx context.Context, c *Cluster) error
	// Watch, if set, is called with every sample.
	Watch func(nics []NIC, s Sample)
}

// Run starts a cluster, replays agents and returns what was seen.
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
	// The last counts came as the engines ended.
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

// warmParallel is how many agents' contexts are stored at a time: a node that has
// more to store than it may keep would drop blocks, which are then no hits.
const warmParallel = 8

// warm replays what is to be in storage beforehand.
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
			return fmt.Errorf("cluster: %s, before the measurement: %s", t.Session, t.Err)
		}
	}
	return nil
}

// kindOf is what an engine is; "": there is none of that name.
func (c *Cluster) kindOf(name string) Kind {
	for _, m := range c.engines {
		if m.name == name {
			return m.kind
		}
	}
	return ""
}

// busyBalance is Result.BusyBalance.
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

// measure replays and samples.
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
	if !c.spec.Oracle { // whose NICs have no limit
		r.Usage = use(r.NICs, append(samples, last), took, c.spec.SNICBits, func(n NIC) bool {
			return n.Storage && (c.spec.Policy != dualpath.PrefillOnly || c.kindOf(n.Node) == KindPrefill)
		})
	}
	return r, nil
}

// sample looks at the NICs until ctx ends.
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
			continue // a node whose network is gone; the next look may see it
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

// since takes away what was there before.
func (s *Sample) since(zero Sample) {
	for i := range s.Received {
		s.Received[i] -= zero.Received[i]
		s.Sent[i] -= zero.Sent[i]
	}
}

// failuresKept is how many reasons of failures are kept.
const failuresKept = 5

// count adds up the turns.
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

// Balance is max/avg over storage NICs of what each received in a second, mean
// over the windows of the first half of the replay in which there was at least 30 %
// of the load of the busiest one: a NIC with nothing to do at the end says nothing
// about the scheduler (DualPath section 7.4 has the metric and not its windows).
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
