package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Node has the metrics that the storage node's code increments.
type Node struct {
	namespaces *namespaces

	MatchRequests *NamespaceCounter
	MatchCuts     *prometheus.CounterVec // reason
	MatchSeconds  prometheus.Histogram
	QueriedTokens *NamespaceCounter
	HitTokens     *NamespaceCounter
	QueriedBlocks *NamespaceCounter
	HitBlocks     *NamespaceCounter

	ReadRequests *NamespaceCounter
	ReadFailures *prometheus.CounterVec // reason
	ReadBlocks   *NamespaceCounter
	ReadBytes    *NamespaceCounter
	ReadLost     *prometheus.CounterVec // reason
	ReadSeconds  prometheus.Histogram

	WriteRequests *NamespaceCounter
	WriteFailures *prometheus.CounterVec // reason
	WrittenBlocks *NamespaceCounter
	WrittenBytes  *NamespaceCounter
	WriteSkipped  *prometheus.CounterVec // reason
	WriteSeconds  prometheus.Histogram

	RemovedBlocks *prometheus.CounterVec // reason
	RemovedBytes  *prometheus.CounterVec // reason
	EvictedBlocks *NamespaceCounter
	EvictedBytes  *NamespaceCounter

	LeasesGranted prometheus.Counter
	LeasesDenied  prometheus.Counter
	LeasesExpired prometheus.Counter

	ScrubbedBlocks prometheus.Counter
	ScrubbedBytes  prometheus.Counter
	CorruptBlocks  *prometheus.CounterVec // reason: where the corruption was detected
	// UnreadableBlocks counts blocks that were dropped from the index because their device cannot
	// read them.
	UnreadableBlocks *prometheus.CounterVec // reason: where the failure was detected

	Syncs        prometheus.Counter
	SyncFailures prometheus.Counter
	SyncSeconds  prometheus.Histogram

	EventsDropped prometheus.Counter

	HotCopiedBlocks prometheus.Counter
	HotCopiedBytes  prometheus.Counter
	HotReadBytes    prometheus.Counter

	Calls          *prometheus.CounterVec // transport, method
	CallsMalformed prometheus.Counter

	RecoverySeconds prometheus.Gauge
	RecoveredBlocks prometheus.Gauge
	RejectedEntries prometheus.Gauge

	Reloads *Reloads
}

// latencyBuckets span 5 µs (a match) to 20 s (a deadline), a factor 2 apart.
var latencyBuckets = prometheus.ExponentialBuckets(5e-6, 2, 22)

// NewNode registers the metrics with r, which must not hold them yet.
func NewNode(r prometheus.Registerer) *Node {
	reg := registrar{r}
	ns := newNamespaces()
	removals := []string{"evicted", "deleted", "epoch", "corrupt", "delivered", "volume"}
	return &Node{
		namespaces: ns,
		Reloads:    NewReloads(r),

		MatchRequests: ns.counter(reg, "match_requests_total", "Match calls."),
		MatchCuts:     reg.reasons("match_cuts_total", "Match calls by the reason for the length of the match", "complete", "absent", "epoch", "lease_denied", "state_missing", "window_missing", "limit", "too_long"),
		MatchSeconds:  reg.histogram("match_latency_seconds", "Time to look up one chain in the index, for a Match or a Read."),
		QueriedTokens: ns.counter(reg, "prefix_queries_tokens_total", "Tokens requested in Match calls. Reads are not included, because a client divides one prompt into several Reads."),
		HitTokens:     ns.counter(reg, "prefix_hits_tokens_total", "Tokens found by Match calls."),
		QueriedBlocks: ns.counter(reg, "prefix_queries_blocks_total", "Blocks requested in Match calls."),
		HitBlocks:     ns.counter(reg, "prefix_hits_blocks_total", "Blocks found by Match calls."),

		ReadRequests: ns.counter(reg, "read_requests_total", "Read calls."),
		ReadFailures: reg.reasons("read_failures_total", "Read calls that delivered no piece because of a refusal or an error", "busy", "deadline", "device", "read_only", "request"),
		ReadBlocks:   ns.counter(reg, "read_blocks_total", "Pieces delivered to readers."),
		ReadBytes:    ns.counter(reg, "read_payload_bytes_total", "Payload bytes delivered to readers."),
		ReadLost:     reg.reasons("read_lost_blocks_total", "Pieces requested and not delivered", "absent", "busy", "corrupt", "deadline", "device", "transfer"),
		ReadSeconds:  reg.histogram("read_latency_seconds", "Time of one Read call, from arrival to the last confirmed write."),

		WriteRequests: ns.counter(reg, "write_requests_total", "Reserve calls."),
		WriteFailures: reg.reasons("write_failures_total", "Reserve and Commit calls that stored no piece because of a refusal or an error", "busy", "deadline", "device", "expired", "read_only", "request"),
		WrittenBlocks: ns.counter(reg, "write_blocks_total", "Pieces stored."),
		WrittenBytes:  ns.counter(reg, "write_payload_bytes_total", "Payload bytes stored."),
		WriteSkipped:  reg.reasons("write_skipped_blocks_total", "Pieces offered by writers and not stored", "exists", "parent_absent", "parent_mismatch", "too_deep", "stale_epoch", "over_quota", "corrupt", "full", "device"),
		WriteSeconds:  reg.histogram("write_latency_seconds", "Time of one Commit call, from arrival to the acknowledgement."),

		RemovedBlocks: reg.reasons("removed_blocks_total", "Pieces removed", removals...),
		RemovedBytes:  reg.reasons("removed_bytes_total", "Slot bytes freed by removals", removals...),
		EvictedBlocks: ns.counter(reg, "evicted_blocks_total", "Pieces removed to make room."),
		EvictedBytes:  ns.counter(reg, "evicted_bytes_total", "Slot bytes freed by these evictions."),

		LeasesGranted: reg.counter("lease_granted_total", "Leases granted."),
		LeasesDenied:  reg.counter("lease_denied_total", "Leases denied because too many were open."),
		LeasesExpired: reg.counter("lease_expired_total", "Leases that ended by their time to live."),

		ScrubbedBlocks:   reg.counter("scrub_blocks_total", "Pieces verified by the scrubber."),
		ScrubbedBytes:    reg.counter("scrub_bytes_total", "Slot bytes read by the scrubber."),
		UnreadableBlocks: reg.reasons("unreadable_blocks_total", "Pieces dropped because their volume cannot read them, by the operation that detected it", "read", "scrub", "verify", "drain"),
		CorruptBlocks:    reg.reasons("corrupt_blocks_total", "Pieces with a wrong checksum, by the operation that detected it", "read", "scrub", "verify", "write", "drain"),

		Syncs:        reg.counter("sync_requests_total", "Syncs of data and index."),
		SyncFailures: reg.counter("sync_failures_total", "Syncs that failed."),
		SyncSeconds:  reg.histogram("sync_latency_seconds", "Time of one sync of data and index."),

		EventsDropped: reg.counter("events_dropped_total", "Events that a slow consumer missed."),

		HotCopiedBlocks: reg.counter("cluster_hot_copied_blocks_total", "Pieces of hot prefixes that this node has copied to other nodes of the cluster."),
		HotCopiedBytes:  reg.counter("cluster_hot_copied_bytes_total", "Payload of these pieces, once for all nodes that they were copied to."),
		HotReadBytes:    reg.counter("cluster_hot_read_bytes_total", "Payload that this node has delivered of copies of other nodes' hot prefixes."),

		Calls:          reg.vec2("calls_total", "Calls over transports other than gRPC: messages over the data plane, or the local socket.", "transport", "method"),
		CallsMalformed: reg.counter("calls_malformed_total", "Data sessions ended because a message was not a valid call, or there was no room for a reply."),

		RecoverySeconds: reg.gauge("recovery_seconds", "Duration of the last start, from opening the volumes to serving."),
		RecoveredBlocks: reg.gauge("recovery_blocks", "Pieces found in the index at the last start."),
		RejectedEntries: reg.gauge("recovery_rejected_blocks", "Index entries dropped at the last start because the volumes do not hold them."),
	}
}

// BusyCalls returns the number of Read, Reserve and Commit calls that were refused because a limit
// was reached.
func (m *Node) BusyCalls() uint64 {
	return valueOf(m.ReadFailures.WithLabelValues("busy")) + valueOf(m.WriteFailures.WithLabelValues("busy"))
}

type registrar struct{ prometheus.Registerer }

const prefix = "penstock_"

func (r registrar) vec(name, help, label string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + name, Help: help}, []string{label})
	r.MustRegister(c)
	return c
}

// reasons registers a counter with the label reason and the given values of that label. The help
// text lists the values. The series of each value is exported as 0 from the start: if a series
// began with its first count, an alert on an increase would miss that count.
func (r registrar) reasons(name, help string, all ...string) *prometheus.CounterVec {
	c := r.vec(name, help+" ("+strings.Join(all, ", ")+").", "reason")
	for _, reason := range all {
		c.WithLabelValues(reason)
	}
	return c
}

func (r registrar) vec2(name, help, label, other string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + name, Help: help}, []string{label, other})
	r.MustRegister(c)
	return c
}

func (r registrar) counter(name, help string) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + name, Help: help})
	r.MustRegister(c)
	return c
}

func (r registrar) gauge(name, help string) prometheus.Gauge {
	g := prometheus.NewGauge(prometheus.GaugeOpts{Name: prefix + name, Help: help})
	r.MustRegister(g)
	return g
}

func (r registrar) histogram(name, help string) prometheus.Histogram {
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: prefix + name, Help: help, Buckets: latencyBuckets})
	r.MustRegister(h)
	return h
}
