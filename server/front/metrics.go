package front

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the front's metrics. docs/metrics.md documents each.
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

	// For requests on a prefill/decode cluster.
	planned        *prometheus.CounterVec // outcome
	attempts       prometheus.Counter
	replans        prometheus.Counter
	failures       *prometheus.CounterVec // engine, side
	unknownEngines prometheus.Counter
	tokenizeErrors prometheus.Counter
	renderErrors   prometheus.Counter
	modelsErrors   prometheus.Counter
	unplanned      *prometheus.CounterVec // reason
	promptTokens   prometheus.Counter
	hitTokens      prometheus.Counter
	start          prometheus.Histogram
	confirming     prometheus.Gauge
}

// The reasons for responses that the front makes itself.
const (
	rejectAuth    = "auth"
	rejectBody    = "body"
	rejectMemory  = "memory"
	rejectQueue   = "queue"
	rejectWait    = "wait"
	rejectEngines = "engines"
	rejectGone    = "gone"
	// For requests on a prefill/decode cluster.
	rejectUnsupported = "unsupported"
	rejectPlanner     = "planner"
	rejectLate        = "late"
)

// The sides of a request on a prefill/decode cluster.
const (
	prefillSide = "prefill"
	decodeSide  = "decode"
)

// firstByteBuckets span 5 ms to 160 s, a factor 2 apart.
var firstByteBuckets = prometheus.ExponentialBuckets(0.005, 2, 16)

// newMetrics registers the metrics with r. Each series of an engine exists from the start.
func newMetrics(r prometheus.Registerer, engines []*engine) *metrics {
	const prefix = "penstock_gateway_"
	outcomes := []string{outcomeDone, outcomeUnconfirmed, outcomeEngine, outcomeRefused, outcomeFailed, outcomeCut, outcomeGone}
	reasons := []string{rejectAuth, rejectBody, rejectMemory, rejectQueue, rejectWait, rejectEngines, rejectGone, rejectUnsupported, rejectPlanner, rejectLate}
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
		hitBlocks:     prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "prefix_hits_blocks_total", Help: "Blocks of these prompts that were sent to the chosen engine before."}),

		planned:        prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + "planned_requests_total", Help: "Requests on a prefill/decode cluster that have ended (" + strings.Join(outcomes, ", ") + ")."}, []string{"outcome"}),
		attempts:       prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "attempts_total", Help: "Starts of such requests on two engines."}),
		replans:        prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "replans_total", Help: "Times the planner planned such a request again."}),
		failures:       prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + "engine_failures_total", Help: "Engines that failed their part of such a request before the first byte, by side (prefill, decode)."}, []string{"engine", "side"}),
		unknownEngines: prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "unknown_engines_total", Help: "Starts on an engine that the gateway does not have."}),
		tokenizeErrors: prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "tokenize_errors_total", Help: "Prompts of which no engine made tokens."}),
		renderErrors:   prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "render_errors_total", Help: "Chats with images or other media of which no engine sent the tokens with the hashes of the images. They went to one engine without a plan."}),
		modelsErrors:   prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "models_errors_total", Help: "Failed requests for the list of the engines' models, and for the identity of a LoRA adapter."}),
		unplanned:      prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + "unplanned_requests_total", Help: "Completions that went to one engine without a plan, because no engine identifies their LoRA adapter, because no engine sent the hashes of the images and other media in their prompt or because the engines have other hashes, because their model is not in the engines' list, because all attempts at a chat failed whose tokens came from /tokenize, because the engine computes the whole prompt for its logprobs, or for beam search (adapter, media, unlisted, tokens, prompt_logprobs, beam_search)."}, []string{"reason"}),
		promptTokens:   prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "prompt_tokens_total", Help: "Tokens of the prompts of such requests."}),
		hitTokens:      prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "hit_tokens_total", Help: "Tokens of these prompts that storage had when the request arrived."}),
		start:          prometheus.NewHistogram(prometheus.HistogramOpts{Name: prefix + "start_seconds", Help: "Time from the submission of such a request to its first start.", Buckets: firstByteBuckets}),
		confirming:     prometheus.NewGauge(prometheus.GaugeOpts{Name: prefix + "confirming_requests", Help: "Requests whose client has the answer and that the planner has not ended."}),
	}
	r.MustRegister(m.requests, m.retries, m.rejected, m.firstByte, m.inFlight, m.healthy, m.indexBlocks, m.queued, m.queriedBlocks, m.hitBlocks)
	r.MustRegister(m.planned, m.attempts, m.replans, m.failures, m.unknownEngines, m.tokenizeErrors, m.renderErrors, m.modelsErrors, m.unplanned, m.promptTokens, m.hitTokens, m.start, m.confirming)
	for _, outcome := range outcomes {
		m.planned.WithLabelValues(outcome)
	}
	for _, reason := range []string{unplannedAdapter, unplannedMedia, unplannedUnlisted, unplannedTokens, unplannedLogprobs, unplannedBeams} {
		m.unplanned.WithLabelValues(reason)
	}
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

// DescribeMetrics sends the definition of each metric of a gateway to ch.
func DescribeMetrics(ch chan<- *prometheus.Desc) {
	r := prometheus.NewRegistry()
	newMetrics(r, nil)
	r.Describe(ch)
}
