package monitor

// Record is a recording rule: Prometheus evaluates Expr periodically and stores the result as the
// metric Name. A name is LEVEL:METRIC:OPERATION, where the level is the labels of the result.
type Record struct {
	Name string
	Expr string
}

// Records returns the recording rules: the ratios and quantiles that several panels and alerts use.
func Records() []Record {
	share := func(part, whole string) string { return part + "\n/\n" + whole }
	perInstance := func(expr string) string { return "sum by (job, instance) (" + expr + ")" }
	p99 := func(metric string) string {
		return "histogram_quantile(0.99, sum by (job, instance, le) (rate(" + metric + "_bucket[5m])))"
	}
	// Each engine has a series for code 200 from the start.
	gatewayAll := "(" + perInstance("rate(penstock_gateway_requests_total[5m])") + " + " + perInstance("rate(penstock_gateway_rejected_total[5m])") + ")"
	// A series of a namespace or of a code begins with its first count. Until then the sum of the
	// series is absent, and a ratio with this sum would be absent too. orZero replaces an absent
	// sum by 0 for each instance that has the metric exists.
	orZero := func(expr, exists string) string { return "(" + expr + " or 0 * " + perInstance(exists) + ")" }
	orZeroOfNode := func(expr string) string { return orZero(perInstance(expr), "penstock_node_start_time_seconds") }
	return []Record{
		{"instance:penstock_prefix_hits_tokens:ratio_rate5m", share(
			perInstance("rate(penstock_prefix_hits_tokens_total[5m])"),
			perInstance("rate(penstock_prefix_queries_tokens_total[5m])"))},
		{"namespace:penstock_prefix_hits_tokens:ratio_rate30m", share(
			"sum by (job, namespace) (rate(penstock_prefix_hits_tokens_total[30m]))",
			"sum by (job, namespace) (rate(penstock_prefix_queries_tokens_total[30m]))")},
		{"instance:penstock_hot_hits:ratio_rate5m", share(
			perInstance("rate(penstock_hot_hits_total[5m])"),
			perInstance("rate(penstock_hot_queries_total[5m])"))},
		{"instance:penstock_read_lost_blocks:ratio_rate5m", share(
			perInstance(`rate(penstock_read_lost_blocks_total{reason!="absent"}[5m])`),
			"("+orZeroOfNode("rate(penstock_read_blocks_total[5m])")+" + "+perInstance("rate(penstock_read_lost_blocks_total[5m])")+")")},
		{"instance:penstock_busy_calls:ratio_rate5m", share(
			"("+perInstance(`rate(penstock_read_failures_total{reason="busy"}[5m])`)+" + "+perInstance(`rate(penstock_write_failures_total{reason="busy"}[5m])`)+")",
			"("+orZeroOfNode("rate(penstock_read_requests_total[5m])")+" + "+orZeroOfNode("rate(penstock_write_requests_total[5m])")+")")},
		{"instance:penstock_write_refused_blocks:ratio_rate5m", share(
			perInstance(`rate(penstock_write_skipped_blocks_total{reason=~"full|device|over_quota"}[5m])`),
			"("+orZeroOfNode("rate(penstock_write_blocks_total[5m])")+" + "+perInstance("rate(penstock_write_skipped_blocks_total[5m])")+")")},
		{"instance:penstock_store_used_bytes:ratio", share("penstock_store_used_bytes", "penstock_store_capacity_bytes")},
		{"instance:penstock_store_residence_seconds:rate1h", share(
			"penstock_store_used_bytes",
			`sum without (reason) (rate(penstock_removed_bytes_total{reason="evicted"}[1h]))`)},
		{"instance:penstock_match_latency_seconds:p99_rate5m", p99("penstock_match_latency_seconds")},
		{"instance:penstock_read_latency_seconds:p99_rate5m", p99("penstock_read_latency_seconds")},
		{"instance:penstock_data_write_failures:ratio_rate5m", share(
			"rate(penstock_data_write_failures_total[5m])",
			"rate(penstock_data_writes_total[5m])")},
		// Where all queues are empty the result is 0.
		{"instance:penstock_planner_read_queue_tokens:max_over_avg", share(
			"max by (job, instance) (penstock_planner_read_queue_tokens)",
			"clamp_min(avg by (job, instance) (penstock_planner_read_queue_tokens), 1)")},
		{"instance:penstock_planner_request_failures:ratio_rate5m", share(
			"rate(penstock_planner_request_failures_total[5m])",
			"rate(penstock_planner_requests_total[5m])")},
		{"instance:penstock_gateway_too_many_requests:ratio_rate5m", share(
			perInstance(`rate(penstock_gateway_rejected_total{reason=~"memory|queue|wait|late"}[5m])`), gatewayAll)},
		{"instance:penstock_gateway_planner_refusals:ratio_rate5m", share(
			perInstance(`rate(penstock_gateway_rejected_total{reason="planner"}[5m])`), gatewayAll)},
		{"instance:penstock_gateway_server_errors:ratio_rate5m", share(
			"("+perInstance(`rate(penstock_gateway_rejected_total{reason="engines"}[5m])`)+
				" + "+orZero(perInstance(`rate(penstock_gateway_requests_total{code=~"5.."}[5m])`), "penstock_gateway_queued_requests")+")",
			gatewayAll)},
		{"instance:penstock_gateway_prefix_hits_blocks:ratio_rate5m", share(
			"rate(penstock_gateway_prefix_hits_blocks_total[5m])",
			"rate(penstock_gateway_prefix_queries_blocks_total[5m])")},
	}
}
