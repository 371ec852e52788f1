package front

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are what the front counts; docs/metrics.md documents each.
type metrics struct {
	requests      *prometheus.CounterVec // engine, code
	retries       *prometheus.CounterVec // engine
	rejected      *prometheus.CounterVec // reason
	firstByte     *prometheus.HistogramVec
	inFlight      *prometheus.GaugeVec
	healthy       *prometheus.GaugeVec
	indexBlocks   *prometheus.GaugeVec
	queued        prometheus.Gauge
	queriedBlocks prometheus.Counter
	hitBlocks     prometheus.Counter
}

// The reasons for which the front itself answers.
const (
	rejectAuth    = "auth"
	rejectBody    = "body"
	rejectMemory  = "memory"
	rejectQueue   = "queue"
	rejectWait    = "wait"
	rejectEngines = "engines"
	rejectGone    = "gone"
)

// firstByteBuckets span 5 ms to 160 s, a factor 2 apart.
var firstByteBuckets = prometheus.ExponentialBuckets(0.005, 2, 16)

// newMetrics registers the metrics with r. Each series of an engine is there from the start.
func newMetrics(r prometheus.Registerer, engines []*engine) *metrics {
	const prefix = "penstock_gateway_"
	reasons := []string{rejectAuth, rejectBody, rejectMemory, rejectQueue, rejectWait, rejectEngines, rejectGone}
	m := &metrics{
		requests:      prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + "requests_total", Help: "Answers of engines that were passed on."}, []string{"engine", "code"}),
		retries:       prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + "retries_total", Help: "Attempts that an engine failed before its first byte and that were made again."}, []string{"engine"}),
		rejected:      prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + "rejected_total", Help: "Requests that got no answer of an engine (" + strings.Join(reasons, ", ") + ")."}, []string{"reason"}),
		firstByte:     prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: prefix + "first_byte_seconds", Help: "Time from the arrival of a completion request to the first byte of the engine's answer.", Buckets: firstByteBuckets}, []string{"engine"}),
		inFlight:      prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: prefix + "in_flight_requests", Help: "Requests that an engine serves."}, []string{"engine"}),
		healthy:       prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: prefix + "engine_healthy", Help: "Whether an engine gets requests: 1 or 0."}, []string{"engine"}),
		indexBlocks:   prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: prefix + "prefix_index_blocks", Help: "Blocks of prompts that are remembered for an engine."}, []string{"engine"}),
		queued:        prometheus.NewGauge(prometheus.GaugeOpts{Name: prefix + "queued_requests", Help: "Requests that wait for an engine."}),
		queriedBlocks: prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "prefix_queries_blocks_total", Help: "Blocks of 256 bytes of the prompts that were sent to engines."}),
		hitBlocks:     prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "prefix_hits_blocks_total", Help: "Those of them that the chosen engine had been sent before."}),
	}
	r.MustRegister(m.requests, m.retries, m.rejected, m.firstByte, m.inFlight, m.healthy, m.indexBlocks, m.queued, m.queriedBlocks, m.hitBlocks)
	for _, e := range engines {
		m.requests.WithLabelValues(e.name, "200")
		m.retries.WithLabelValues(e.name)
		m.firstByte.WithLabelValues(e.name)
		m.inFlight.WithLabelValues(e.name)
		m.healthy.WithLabelValues(e.name)
		m.indexBlocks.WithLabelValues(e.name)
	}
	for _, reason := range reasons {
		m.rejected.WithLabelValues(reason)
	}
	return m
}
