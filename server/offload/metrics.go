package offload

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the counters of an Offload. docs/metrics.md documents each.
type metrics struct {
	requests *prometheus.CounterVec // outcome
	seconds  prometheus.Histogram
}

// secondsBuckets span 10 ms to 82 s, a factor 2 apart.
var secondsBuckets = prometheus.ExponentialBuckets(0.01, 2, 14)

// newMetrics registers the metrics with the registry of the options.
func newMetrics(f *Offload) *metrics {
	const prefix = "penstock_offload_"
	outcomes := []string{outcomeLocal, outcomeBusy, outcomeRemote, outcomeFetched, outcomeFailed}
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + "requests_total", Help: "Requests by where their prompt was prefilled (" + strings.Join(outcomes, ", ") + ")."}, []string{"outcome"}),
		seconds:  prometheus.NewHistogram(prometheus.HistogramOpts{Name: prefix + "seconds", Help: "Time of prefill in the other datacenter and of the copy of the KV, for requests whose KV has crossed the link.", Buckets: secondsBuckets}),
	}
	for _, o := range outcomes {
		m.requests.WithLabelValues(o)
	}
	link := f.opts.Link
	f.opts.Registry.MustRegister(m.requests, m.seconds,
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: prefix + "copied_bytes_total", Help: "Bytes of KV that have crossed the link from the other datacenter."}, func() float64 { return float64(link.Stats().CopiedBytes) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: prefix + "waiting_bytes", Help: "Bytes of KV that wait for the link from the other datacenter."}, func() float64 { return float64(link.Stats().WaitingBytes) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: prefix + "threshold_tokens", Help: "Uncached tokens of a prompt above which it is prefilled in the other datacenter."}, func() float64 { return f.opts.Router.Threshold }),
	)
	return m
}

// DescribeMetrics sends the definition of each metric of the offload to ch.
func DescribeMetrics(ch chan<- *prometheus.Desc) {
	r := prometheus.NewRegistry()
	newMetrics(&Offload{opts: Options{Registry: r}})
	r.Describe(ch)
}
