package netoracle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/dualpath/netcost"
)

// CongestionMax is the highest congestion in a State. Higher values are lowered to CongestionMax
// (Reading.clean).
const CongestionMax = 0.99

// maxAnswerBytes is the maximum size of a source's answer, in bytes.
const maxAnswerBytes = 64 << 20

// Reading is the answer of a source. Fields that the source does not provide are nil or zero.
type Reading struct {
	Fabric     *netcost.Fabric
	Places     map[string]netcost.Place
	Congestion map[netcost.Tier]float64
	// Measured is the time at which the congestion was measured; zero means the time of the answer.
	Measured time.Time
}

// Source is one source of the network's state.
type Source interface {
	// Name returns the name of the source in logs and metrics.
	Name() string
	// Every returns the polling interval.
	Every() time.Duration
	// Read polls the source and returns its answer. It must return when ctx ends. It is not called
	// concurrently.
	Read(ctx context.Context) (Reading, error)
}

// State is the merged state of the network.
type State struct {
	Fabric netcost.Fabric
	// Known is set if a source has provided the fabric.
	Known      bool
	Places     map[string]netcost.Place
	Congestion netcost.Congestion
	// Measured is the time at which the oldest congestion value was measured; zero if there is
	// none.
	Measured time.Time
	Sources  []SourceState
}

// SourceState is the state of one source.
type SourceState struct {
	Name string
	// Answered is the time of the last answer; zero if there was none.
	Answered time.Time
	// Err is the error of the last poll, or nil. Failures is the number of failed polls since the
	// last answer.
	Err      error
	Failures int
}

// Age returns the time since the source's last answer.
func (s *SourceState) Age(now time.Time) time.Duration { return now.Sub(s.Answered) }

// Options are the options of an Oracle.
type Options struct {
	// Sources are the sources to poll. If two sources provide the same field, the field of the
	// later source is used.
	Sources []Source
	// Timeout is the maximum duration of one poll. Default 5 s.
	Timeout time.Duration
	Logger  *slog.Logger
	// Registry is the registry for the metrics; nil means no metrics.
	Registry prometheus.Registerer
}

// Oracle polls its sources and merges their readings.
type Oracle struct {
	opts   Options
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu       sync.Mutex
	readings []Reading
	states   []SourceState
	watch    func(State)
}

// New returns an oracle that has polled each source once. The oracle continues to poll until Close.
// If a source fails, New returns no error, and the oracle polls the source again.
func New(opts Options) (*Oracle, error) {
	if len(opts.Sources) == 0 {
		return nil, errors.New("netoracle: no source; name a file, Kubernetes or Prometheus")
	}
	if opts.Timeout == 0 {
		opts.Timeout = 5 * time.Second
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(context.Background())
	o := &Oracle{opts: opts, cancel: cancel, readings: make([]Reading, len(opts.Sources)), states: make([]SourceState, len(opts.Sources))}
	for i, s := range opts.Sources {
		if s.Every() <= 0 {
			cancel()
			return nil, fmt.Errorf("netoracle: source %s has the polling interval %v; it must be more than 0", s.Name(), s.Every())
		}
		o.states[i].Name = s.Name()
	}
	if opts.Registry != nil {
		if err := opts.Registry.Register(&collector{o}); err != nil {
			cancel()
			return nil, fmt.Errorf("netoracle: register metrics: %w", err)
		}
	}
	for i := range opts.Sources {
		o.ask(ctx, i)
	}
	for i := range opts.Sources {
		o.done.Go(func() { o.keepAsking(ctx, i) })
	}
	return o, nil
}

// Close stops polling and returns when no poll is running. It may be called twice.
func (o *Oracle) Close() {
	o.cancel()
	o.done.Wait()
}

// Watch calls f with the present state, and again after each answer of a source. The calls do not
// overlap. f must not block and must not call the oracle. A second call of Watch replaces f.
func (o *Oracle) Watch(f func(State)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.watch = f
	f(o.stateLocked())
}

// State returns the current state.
func (o *Oracle) State() State {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.stateLocked()
}

// keepAsking polls one source until ctx ends.
func (o *Oracle) keepAsking(ctx context.Context, i int) {
	t := time.NewTicker(o.opts.Sources[i].Every())
	defer t.Stop()
	for {
		select {
		case <-t.C:
			o.ask(ctx, i)
		case <-ctx.Done():
			return
		}
	}
}

// ask polls one source once.
func (o *Oracle) ask(ctx context.Context, i int) {
	src := o.opts.Sources[i]
	within, cancel := context.WithTimeout(ctx, o.opts.Timeout)
	r, err := src.Read(within)
	cancel()
	if err == nil {
		err = r.clean()
	}
	if ctx.Err() != nil {
		return // the poll failed because the oracle is being closed
	}
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	st := &o.states[i]
	if err != nil {
		if st.Err == nil {
			o.opts.Logger.Warn("the network oracle's source failed; its last values stay", "source", st.Name, "err", err, "answered", st.Answered)
		}
		st.Err = err
		st.Failures++
		return
	}
	if st.Err != nil {
		o.opts.Logger.Info("the network oracle's source answers again", "source", st.Name, "failures", st.Failures)
	}
	if r.Measured.IsZero() {
		r.Measured = now
	}
	st.Answered, st.Err, st.Failures = now, nil, 0
	o.readings[i] = r
	if o.watch != nil {
		o.watch(o.stateLocked())
	}
}

// clean refuses a reading with a value that is out of range, and lowers congestion above
// CongestionMax to CongestionMax.
func (r *Reading) clean() error {
	if r.Fabric != nil {
		if err := r.Fabric.Validate(); err != nil {
			return err
		}
	}
	for t, c := range r.Congestion {
		if !(c >= 0) || t >= netcost.Tiers {
			return fmt.Errorf("congestion of tier %d is %v; it must be a share of the tier, 0 to 1", t, c)
		}
		r.Congestion[t] = min(c, CongestionMax)
	}
	return nil
}

// stateLocked merges the readings.
func (o *Oracle) stateLocked() State {
	s := State{Places: map[string]netcost.Place{}, Sources: slices.Clone(o.states)}
	var measured [netcost.Tiers]time.Time
	for _, r := range o.readings {
		if r.Fabric != nil {
			s.Fabric, s.Known = *r.Fabric, true
		}
		maps.Copy(s.Places, r.Places)
		for t, c := range r.Congestion {
			s.Congestion[t], measured[t] = c, r.Measured
		}
	}
	for _, at := range measured {
		if !at.IsZero() && (s.Measured.IsZero() || at.Before(s.Measured)) {
			s.Measured = at
		}
	}
	return s
}

// collector exports the states of the sources.
type collector struct{ o *Oracle }

var (
	upDesc         = prometheus.NewDesc("penstock_network_source_up", "1 if the last poll of the oracle's source succeeded, else 0.", []string{"source"}, nil)
	ageDesc        = prometheus.NewDesc("penstock_network_source_age_seconds", "Time since the oracle's source last answered.", []string{"source"}, nil)
	congestionDesc = prometheus.NewDesc("penstock_network_congestion_ratio", "Share of a tier of the network that other traffic uses, as reported to the planner.", []string{"tier"}, nil)
	bandwidthDesc  = prometheus.NewDesc("penstock_network_bandwidth_bytes_per_second", "Bandwidth of one path of a tier, as reported to the planner.", []string{"tier"}, nil)
)

// DescribeMetrics sends the definition of each metric of the network to ch.
func DescribeMetrics(ch chan<- *prometheus.Desc) { (&collector{}).Describe(ch) }

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{upDesc, ageDesc, congestionDesc, bandwidthDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	s, now := c.o.State(), time.Now()
	gauge := func(d *prometheus.Desc, v float64, label string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, label)
	}
	for i := range s.Sources {
		src := &s.Sources[i]
		up := 0.0
		if src.Err == nil {
			up = 1
		}
		gauge(upDesc, up, src.Name)
		if !src.Answered.IsZero() {
			gauge(ageDesc, src.Age(now).Seconds(), src.Name)
		}
	}
	for t := range netcost.Tier(netcost.Tiers) {
		gauge(congestionDesc, s.Congestion[t], t.String())
		if s.Known {
			gauge(bandwidthDesc, s.Fabric.Bandwidth[t], t.String())
		}
	}
}
