package monitor

// Panel is a panel of the dashboard. The queries have no variables: Dashboard restricts each metric
// to the selected jobs and instances.
type Panel struct {
	Title string
	// Note precedes the help texts of the metrics in the description of the panel. It may be empty.
	Note string
	Kind Kind
	Unit Unit
	// Width is in columns. A row of panels has 24.
	Width   int
	Queries []Query
}

// Query is an expression and the legend of its series.
type Query struct {
	Expr   string
	Legend string
}

// Kind is a panel type of Grafana.
type Kind string

// The kinds of panels, which every Grafana has.
const (
	Stat       Kind = "stat"
	Timeseries Kind = "timeseries"
)

// Unit is a unit of Grafana.
type Unit string

// The units of the panels.
const (
	Count     Unit = "short"
	Bytes     Unit = "bytes"
	ByteRate  Unit = "binBps"
	CallRate  Unit = "ops"
	Seconds   Unit = "s"
	Share     Unit = "percentunit"
	TokenRate Unit = "short"
)

// Row is a titled row of panels.
type Row struct {
	Title  string
	Panels []Panel
}

// rateInterval is a variable of Grafana: at least four scrape intervals.
const rateInterval = "$__rate_interval"

// Rows returns the rows of the dashboard.
func Rows() []Row {
	graph := func(title string, unit Unit, queries ...Query) Panel {
		return Panel{Title: title, Kind: Timeseries, Unit: unit, Width: 8, Queries: queries}
	}
	stat := func(title string, unit Unit, expr string) Panel {
		return Panel{Title: title, Kind: Stat, Unit: unit, Width: 4, Queries: []Query{{Expr: expr}}}
	}
	noted := func(note string, p Panel) Panel {
		p.Note = note
		return p
	}
	rate := func(metric, legend string, by string) Query {
		return Query{"sum by (" + by + ") (rate(" + metric + "[" + rateInterval + "]))", legend}
	}
	quantile := func(q, metric, legend string) Query {
		return Query{"histogram_quantile(" + q + ", sum by (instance, le) (rate(" + metric + "_bucket[" + rateInterval + "])))", "{{instance}} " + legend}
	}
	const instance, volume, nic, namespace, tenant = "{{instance}}", "{{instance}} {{volume}}", "{{instance}} {{nic}}", "{{namespace}}", "{{tenant}}"
	return []Row{
		{"Cluster", []Panel{
			stat("Processes up", Count, "sum(up)"),
			stat("Processes down", Count, "sum(1 - up)"),
			stat("Hit rate in tokens", Share, "sum(rate(penstock_prefix_hits_tokens_total[5m])) / sum(rate(penstock_prefix_queries_tokens_total[5m]))"),
			stat("Bytes stored", Bytes, "sum(penstock_store_used_bytes)"),
			stat("Store full", Share, "sum(penstock_store_used_bytes) / sum(penstock_store_capacity_bytes)"),
			stat("Volumes with a fault", Count, `sum(penstock_volume_state{state=~"suspect|failed"})`),
			graph("Payload read and written", ByteRate,
				Query{"sum(rate(penstock_read_payload_bytes_total[" + rateInterval + "]))", "read"},
				Query{"sum(rate(penstock_write_payload_bytes_total[" + rateInterval + "]))", "written"}),
			graph("Calls", CallRate,
				Query{"sum(rate(penstock_match_requests_total[" + rateInterval + "]))", "matches"},
				Query{"sum(rate(penstock_read_requests_total[" + rateInterval + "]))", "reads"},
				Query{"sum(rate(penstock_write_requests_total[" + rateInterval + "]))", "writes"}),
			graph("Faults within an hour", Count,
				Query{"sum(increase(penstock_corrupt_blocks_total[1h]))", "corrupt blocks"},
				Query{"sum(increase(penstock_unreadable_blocks_total[1h]))", "unreadable blocks"},
				Query{"sum(increase(penstock_sync_failures_total[1h]))", "failed syncs"},
				Query{"sum(increase(penstock_data_write_failures_total[1h]))", "failed transfers"}),
		}},
		{"Storage nodes", []Panel{
			graph("Hit rate in tokens", Share, Query{"instance:penstock_prefix_hits_tokens:ratio_rate5m", instance}),
			graph("Time of a match", Seconds, quantile("0.5", "penstock_match_latency_seconds", "p50"), quantile("0.99", "penstock_match_latency_seconds", "p99")),
			graph("Matches by their end", CallRate, rate("penstock_match_cuts_total", "{{reason}}", "reason")),
			graph("Time of a read", Seconds, quantile("0.5", "penstock_read_latency_seconds", "p50"), quantile("0.99", "penstock_read_latency_seconds", "p99")),
			graph("Reads that failed", CallRate, rate("penstock_read_failures_total", "{{reason}}", "reason")),
			graph("Blocks found and not delivered", CallRate, rate(`penstock_read_lost_blocks_total{reason!="absent"}`, "{{instance}} {{reason}}", "instance, reason")),
			graph("Time of a write", Seconds, quantile("0.5", "penstock_write_latency_seconds", "p50"), quantile("0.99", "penstock_write_latency_seconds", "p99")),
			graph("Writes that failed", CallRate, rate("penstock_write_failures_total", "{{reason}}", "reason")),
			graph("Blocks offered and not stored", CallRate, rate("penstock_write_skipped_blocks_total", "{{reason}}", "reason")),
			graph("Store full", Share, Query{"instance:penstock_store_used_bytes:ratio", instance}),
			noted("The time in which evictions replace all bytes of the store. A block that is not used for that long is evicted. Infinite without evictions.",
				graph("Time that an unused block is kept", Seconds, Query{"instance:penstock_store_residence_seconds:rate1h", instance})),
			graph("Blocks removed", CallRate, rate("penstock_removed_blocks_total", "{{reason}}", "reason")),
			graph("Arena", Bytes, Query{"penstock_arena_used_bytes", "{{instance}} used"}, Query{"penstock_arena_size_bytes", "{{instance}} size"}, Query{"penstock_hot_bytes", "{{instance}} hot blocks"}),
			graph("Requests for arena memory", CallRate, rate("penstock_arena_waits_total", "{{instance}} waited", "instance"), rate("penstock_arena_failures_total", "{{instance}} refused", "instance")),
			graph("Hits among the hot blocks", Share, Query{"instance:penstock_hot_hits:ratio_rate5m", instance}),
			graph("Calls refused as busy", Share, Query{"instance:penstock_busy_calls:ratio_rate5m", instance}),
			graph("Leases", Count, Query{"penstock_lease_open", "{{instance}} open"}, Query{"increase(penstock_lease_denied_total[" + rateInterval + "])", "{{instance}} denied"}),
			graph("Memory of the process", Bytes, Query{"penstock_node_memory_bytes", "{{instance}} used"}, Query{"penstock_node_memory_budget_bytes", "{{instance}} budget"}),
			graph("Time of a sync", Seconds, quantile("0.99", "penstock_sync_latency_seconds", "p99")),
			noted("1 while true.", graph("Takes writes", Count, Query{"penstock_node_writable", instance}, Query{"penstock_index_writable", "{{instance}} index"})),
			noted("1 while true, and on nodes outside clusters.", graph("Lease in etcd", Count, Query{"penstock_cluster_lease_valid", instance}, Query{"penstock_cluster_refused_namespaces", "{{instance}} refused namespaces"})),
			graph("Copied to other nodes", ByteRate, rate("penstock_cluster_moved_bytes_total", instance, "instance")),
			graph("Left to copy to other nodes", Bytes, Query{"penstock_cluster_move_left_bytes", instance}),
			graph("Blocks not copied to other nodes", CallRate, rate("penstock_cluster_move_failed_blocks_total", instance, "instance")),
			graph("Scrubbed", ByteRate, rate("penstock_scrub_bytes_total", instance, "instance")),
		}},
		{"Volumes", []Panel{
			graph("Read from devices", ByteRate, rate("penstock_device_read_bytes_total", volume, "instance, volume")),
			graph("Written to devices", ByteRate, rate("penstock_device_write_bytes_total", volume, "instance, volume")),
			graph("Requests to devices", CallRate, rate("penstock_device_reads_total", volume+" reads", "instance, volume"), rate("penstock_device_writes_total", volume+" writes", "instance, volume")),
			graph("Bytes in flight and their bound", Bytes, Query{"penstock_device_in_flight_bytes", volume}, Query{"penstock_device_in_flight_limit_bytes", volume + " bound"}),
			graph("Requests that failed", CallRate,
				rate("penstock_device_read_failures_total", volume+" reads", "instance, volume"),
				rate("penstock_device_write_failures_total", volume+" writes", "instance, volume"),
				rate("penstock_device_sync_failures_total", volume+" syncs", "instance, volume")),
			noted("1 for the state of the volume.", graph("States other than ok", Count, Query{`penstock_volume_state{state!="ok"}`, volume + " {{state}}"})),
			graph("Bytes stored", Bytes, Query{"penstock_volume_used_bytes", volume}),
			graph("Moved by drains", ByteRate, rate("penstock_volume_moved_bytes_total", volume, "instance, volume")),
			noted("Not 0: a volume that was missing or had failed when an epoch ended may still have the epoch's secret.",
				graph("Namespaces with pending erasures", Count, Query{"penstock_volume_pending_erasures", volume})),
			graph("Moves that failed", CallRate, rate("penstock_volume_move_failures_total", volume, "instance, volume")),
		}},
		{"Namespaces", []Panel{
			graph("Hit rate in tokens", Share, Query{"namespace:penstock_prefix_hits_tokens:ratio_rate30m", namespace}),
			graph("Tokens requested, a second", TokenRate, rate("penstock_prefix_queries_tokens_total", namespace, "namespace")),
			graph("Tokens found, a second", TokenRate, rate("penstock_prefix_hits_tokens_total", namespace, "namespace")),
			graph("Read", ByteRate, rate("penstock_read_payload_bytes_total", namespace, "namespace")),
			graph("Written", ByteRate, rate("penstock_write_payload_bytes_total", namespace, "namespace")),
			graph("Blocks evicted", CallRate, rate("penstock_evicted_blocks_total", namespace, "namespace")),
			graph("Bytes evicted", ByteRate, rate("penstock_evicted_bytes_total", namespace, "namespace")),
			graph("Bytes by epoch", Bytes, Query{"sum by (namespace, epoch) (penstock_epoch_used_bytes)", "{{namespace}} epoch {{epoch}}"}),
			graph("Matches by epoch", CallRate, rate("penstock_epoch_match_requests_total", "{{namespace}} epoch {{epoch}}", "namespace, epoch")),
			graph("Leases by epoch", Count, Query{"sum by (namespace, epoch) (penstock_epoch_leases)", "{{namespace}} epoch {{epoch}}"}),
			graph("Pins by epoch", Count, Query{"sum by (namespace, epoch) (penstock_epoch_pins)", "{{namespace}} epoch {{epoch}}"}),
		}},
		{"Tenants", []Panel{
			graph("Bytes stored", Bytes, Query{"sum by (tenant) (penstock_tenant_used_bytes)", tenant}),
			noted("The used part of the quota on the node where it is the largest. A tenant at its quota evicts its old blocks for new ones.",
				graph("Used of the quota", Share, Query{"max by (tenant) (penstock_tenant_used_bytes / penstock_tenant_quota_bytes)", tenant})),
			graph("Blocks evicted because of the quota", CallRate, rate("penstock_tenant_evicted_blocks_total", tenant, "tenant")),
			graph("Bytes evicted because of the quota", ByteRate, rate("penstock_tenant_evicted_bytes_total", tenant, "tenant")),
			graph("Blocks refused because of the quota", CallRate, rate("penstock_tenant_refused_blocks_total", tenant, "tenant")),
		}},
		{"Transfer engine", []Panel{
			graph("Sessions", Count, Query{"penstock_data_sessions", instance}),
			graph("Bytes to readers and from writers", ByteRate, rate("penstock_data_write_bytes_total", "{{instance}} to readers", "instance"), rate("penstock_data_received_bytes_total", "{{instance}} from writers", "instance")),
			graph("Bytes in flight", Bytes, Query{"penstock_data_in_flight_bytes", instance}),
			graph("Transfers that failed", Share, Query{"instance:penstock_data_write_failures:ratio_rate5m", instance}),
			graph("Sessions ended or refused", CallRate,
				rate("penstock_data_timeouts_total", "{{instance}} silence", "instance"),
				rate("penstock_data_malformed_total", "{{instance}} malformed frame", "instance"),
				rate("penstock_calls_malformed_total", "{{instance}} malformed call", "instance"),
				rate("penstock_data_auth_failures_total", "{{instance}} token", "instance")),
			graph("Operations of peers that were refused", CallRate, rate("penstock_data_refused_total", instance, "instance")),
			graph("Sent by NICs", ByteRate, rate("penstock_data_nic_sent_bytes_total", nic, "instance, nic")),
			graph("Received by NICs", ByteRate, rate("penstock_data_nic_received_bytes_total", nic, "instance, nic")),
			noted("1 while true.", graph("NICs in use", Count, Query{"penstock_data_nic_up", nic})),
			graph("Calls that did not come over gRPC", CallRate, rate("penstock_calls_total", "{{transport}} {{method}}", "transport, method")),
			graph("Blocks on loan to engines on the host", Bytes, Query{"penstock_loan_bytes", instance}),
			graph("Engines at the local socket", Count, Query{"penstock_loan_sessions", instance}),
		}},
		{"Planner and dual path", []Panel{
			graph("Groups of engines", Count, Query{"penstock_planner_groups", "{{instance}} {{role}}"}, Query{"penstock_planner_switching_groups", "{{instance}} switching"}),
			graph("Requests", CallRate,
				rate("penstock_planner_requests_total", "submitted", "instance"),
				rate("penstock_planner_starts_total", "started", "instance"),
				rate("penstock_planner_finished_requests_total", "finished", "instance"),
				rate("penstock_planner_request_failures_total", "failed", "instance")),
			graph("Requests in progress", Count,
				Query{"penstock_planner_queued_requests", "wait for an engine"}, Query{"penstock_planner_loading_requests", "are read"}, Query{"penstock_planner_serving_requests", "all"}),
			graph("Reading queues of storage NICs, in tokens", Count, Query{"penstock_planner_read_queue_tokens", "{{node}}"}),
			noted("The longest reading queue over the average. 1 is perfect balance, 0 means empty queues.",
				graph("Imbalance of the storage NICs", Count, Query{"instance:penstock_planner_read_queue_tokens:max_over_avg", instance})),
			graph("Sent by compute NICs", ByteRate, rate(`penstock_planner_compute_nic_bytes_total{direction="out"}`, "{{engine}} {{nic}}", "engine, nic")),
			graph("Received by compute NICs", ByteRate, rate(`penstock_planner_compute_nic_bytes_total{direction="in"}`, "{{engine}} {{nic}}", "engine, nic")),
			noted("The highest rate over the average, sent and received. 1 is perfect balance, 0 means idle NICs.",
				graph("Imbalance of the compute NICs", Count, Query{
					"max by (instance, direction) (rate(penstock_planner_compute_nic_bytes_total[" + rateInterval + "]))\n/\nclamp_min(avg by (instance, direction) (rate(penstock_planner_compute_nic_bytes_total[" + rateInterval + "])), 1)", "{{instance}} {{direction}}",
				})),
			graph("Tokens read, a second, by side", TokenRate, rate("penstock_planner_read_tokens_total", "{{side}}", "side")),
			graph("Reads by side, and requests read by both", CallRate, rate("penstock_planner_reads_total", "{{side}}", "side"), rate("penstock_planner_splits_total", "both sides", "instance")),
			graph("Corrections of reads", CallRate,
				rate("penstock_planner_cuts_total", "stopped", "instance"), rate("penstock_planner_hedges_total", "read by both sides", "instance"),
				rate("penstock_planner_recomputes_total", "recomputed", "instance"), rate("penstock_planner_replans_total", "planned again", "instance")),
			graph("Time of a step of the planner", Seconds, quantile("0.99", "penstock_planner_step_seconds", "p99")),
			graph("Requests that ended without an answer", Share, Query{"instance:penstock_planner_request_failures:ratio_rate5m", instance}),
			graph("Waiting requests by tenant", Count, Query{"penstock_planner_tenant_queued_requests", "{{tenant}}"}),
			graph("Requests on older weights", Count, Query{"penstock_planner_older_weights_requests", instance}),
		}},
		{"Gateway", []Panel{
			graph("Answers by code", CallRate, rate("penstock_gateway_requests_total", "{{code}}", "code")),
			graph("Requests without an answer of an engine", CallRate, rate("penstock_gateway_rejected_total", "{{reason}}", "reason")),
			graph("Refused with 429, failed with 5xx", Share,
				Query{"instance:penstock_gateway_too_many_requests:ratio_rate5m", "{{instance}} 429"}, Query{"instance:penstock_gateway_server_errors:ratio_rate5m", "{{instance}} 5xx"},
				Query{"instance:penstock_gateway_planner_refusals:ratio_rate5m", "{{instance}} planner"}),
			graph("Time to the first byte", Seconds, quantile("0.5", "penstock_gateway_first_byte_seconds", "p50"), quantile("0.99", "penstock_gateway_first_byte_seconds", "p99")),
			graph("Requests in flight by engine", Count, Query{"penstock_gateway_in_flight_requests", "{{instance}} {{engine}}"}, Query{"penstock_gateway_queued_requests", "{{instance}} queued"}),
			noted("1 while the engine gets requests.", graph("Healthy engines", Count, Query{"penstock_gateway_engine_healthy", "{{instance}} {{engine}}"})),
			graph("Prompts that the engine had before", Share, Query{"instance:penstock_gateway_prefix_hits_blocks:ratio_rate5m", instance}),
			graph("Attempts that failed", CallRate, rate("penstock_gateway_retries_total", "{{instance}} {{engine}}", "instance, engine")),
			graph("Requests on a prefill/decode cluster", CallRate, rate("penstock_gateway_planned_requests_total", "{{outcome}}", "outcome")),
			graph("Time to the start on a prefill/decode cluster", Seconds, quantile("0.99", "penstock_gateway_start_seconds", "p99")),
			graph("Tokens on a prefill/decode cluster, a second", TokenRate, rate("penstock_gateway_prompt_tokens_total", "prompts", "job"), rate("penstock_gateway_hit_tokens_total", "in storage", "job")),
			graph("Requests planned again", CallRate, rate("penstock_gateway_replans_total", instance, "instance")),
		}},
	}
}
