package monitor

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// situation is a time at which an alert fires, or does not fire: series in promtool's notation
// (one value a minute) and, for an alert that fires, its labels besides severity, and its summary.
// The time of an alert that fires is the first at which it does.
type situation struct {
	series  []series
	at      string
	labels  string // name=value, separated by blanks
	summary string
}

type series struct{ name, values string }

// alertCases are, for each alert, a situation in which it fires and others in which it does not.
type alertCases struct {
	fires situation
	quiet []situation
}

// quietAt returns situations of one series, which differ by the values of the series.
func quietAt(at, name string, values ...string) (all []situation) {
	for _, v := range values {
		all = append(all, situation{at: at, series: []series{{name, v}}})
	}
	return all
}

const (
	node    = `job="penstock-node",instance="n1"`
	plan    = `job="penstock-planner",instance="p1"`
	gateway = `job="penstock-gateway",instance="g1"`
)

// latency returns the series of a histogram whose requests, 60 a minute, all take between the
// bounds low and high.
func latency(metric, labels, low, high string) []series {
	return []series{
		{metric + `_bucket{` + labels + `,le="` + low + `"}`, "0x60"},
		{metric + `_bucket{` + labels + `,le="` + high + `"}`, "0+60x60"},
		{metric + `_bucket{` + labels + `,le="+Inf"}`, "0+60x60"},
	}
}

// hits returns the counters of a namespace on a node: 600 tokens a minute are requested, of which
// then are found during eight hours, and later afterwards.
func hits(then, later string) []series {
	return []series{
		{`penstock_prefix_queries_tokens_total{` + node + `,namespace="m"}`, "0+600x600"},
		{`penstock_prefix_hits_tokens_total{` + node + `,namespace="m"}`, "0+" + then + "x480 " + later},
	}
}

func cases() map[string]alertCases {
	calls := func(busy, read string) []series {
		return []series{
			{"penstock_node_start_time_seconds{" + node + "}", "1000x60"},
			{"penstock_read_failures_total{" + node + `,reason="busy"}`, "0+" + busy + "x60"},
			{"penstock_read_failures_total{" + node + `,reason="device"}`, "0+50x60"},
			{"penstock_write_failures_total{" + node + `,reason="busy"}`, "0x60"},
			{"penstock_read_requests_total{" + node + `,namespace="m"}`, "0+" + read + "x60"},
		}
	}
	skipped := func(reason, n string) []series {
		return []series{
			{"penstock_node_start_time_seconds{" + node + "}", "1000x60"},
			{"penstock_write_skipped_blocks_total{" + node + `,reason="exists"}`, "0+10x60"},
			{"penstock_write_skipped_blocks_total{" + node + `,reason="` + reason + `"}`, "0+" + n + "x60"},
			{"penstock_write_blocks_total{" + node + `,namespace="m"}`, "0+85x60"},
		}
	}
	refusedOf := func(values string) []series {
		tenant := "{" + node + `,tenant="team-a/*"}`
		return []series{
			{"penstock_tenant_used_bytes" + tenant, "1000x60"}, {"penstock_tenant_quota_bytes" + tenant, "1000x60"},
			{"penstock_tenant_evicted_blocks_total" + tenant, "0+60x60"}, {"penstock_tenant_refused_blocks_total" + tenant, values},
		}
	}
	lost := func(reason, n string) []series {
		return []series{
			{"penstock_node_start_time_seconds{" + node + "}", "1000x60"},
			{"penstock_read_lost_blocks_total{" + node + `,reason="` + reason + `"}`, "0+" + n + "x60"},
			{"penstock_read_lost_blocks_total{" + node + `,reason="device"}`, "0x60"},
			{"penstock_read_blocks_total{" + node + `,namespace="m"}`, "0+90x60"},
		}
	}
	// A store of 1000 bytes, from which evictions remove perMinute bytes a minute.
	evictions := func(used, perMinute string) []series {
		return []series{
			{"penstock_store_used_bytes{" + node + "}", used + "x180"},
			{"penstock_store_capacity_bytes{" + node + "}", "1000x180"},
			{"penstock_removed_bytes_total{" + node + `,reason="evicted"}`, "0+" + perMinute + "x180"},
			{"penstock_removed_bytes_total{" + node + `,reason="deleted"}`, "0+1000x180"},
		}
	}
	transfers := func(failed string) []series {
		return []series{{"penstock_data_writes_total{" + node + "}", "0+100x60"}, {"penstock_data_write_failures_total{" + node + "}", "0+" + failed + "x60"}}
	}
	queues := func(a, b string) (all []series) {
		all = append(all, series{`penstock_planner_read_queue_tokens{` + plan + `,node="a"}`, a})
		for _, other := range []string{"b", "c", "d", "e"} {
			all = append(all, series{`penstock_planner_read_queue_tokens{` + plan + `,node="` + other + `"}`, b})
		}
		return all
	}
	planned := func(failed string) []series {
		return []series{{"penstock_planner_requests_total{" + plan + "}", "0+100x60"}, {"penstock_planner_request_failures_total{" + plan + "}", "0+" + failed + "x60"}}
	}
	answered := func(rejections ...series) []series {
		return append([]series{
			{"penstock_gateway_queued_requests{" + gateway + "}", "0x60"},
			{"penstock_gateway_requests_total{" + gateway + `,engine="e1",code="200"}`, "0+90x60"},
			{"penstock_gateway_rejected_total{" + gateway + `,reason="auth"}`, "0x60"},
			{"penstock_gateway_rejected_total{" + gateway + `,reason="engines"}`, "0x60"},
		}, rejections...)
	}
	rejected := func(reason, values string) series {
		return series{"penstock_gateway_rejected_total{" + gateway + `,reason="` + reason + `"}`, values}
	}
	volume := func(state string) string {
		return `penstock_volume_state{` + node + `,volume="/d1",state="` + state + `"}`
	}
	moving := func(state, moved, left string) (all []series) {
		for _, s := range []string{"copying", "waiting", "done"} {
			values := "0x60"
			if s == state {
				values = "1x60"
			}
			all = append(all, series{"penstock_cluster_move_state{" + node + `,state="` + s + `"}`, values})
		}
		return append(all, series{"penstock_cluster_moved_bytes_total{" + node + "}", moved}, series{"penstock_cluster_move_left_blocks{" + node + "}", left})
	}
	const onNode, onPlanner, onFront = "job=penstock-node instance=n1", "job=penstock-planner instance=p1", "job=penstock-gateway instance=g1"
	return map[string]alertCases{
		"PenstockNodeDown": {
			situation{[]series{{"up{" + node + "}", "1 1 0x8"}}, "4m", onNode, "Storage node n1 does not answer."},
			append(quietAt("5m", "up{"+node+"}", "1x9", "1 1 0 0 1x8"), quietAt("3m", "up{"+node+"}", "1 1 0x9")...),
		},
		"PenstockNodeRestarts": {
			situation{[]series{{"penstock_node_start_time_seconds{" + node + "}", "10x10 20x10 30x10 40x60"}}, "34m", onNode, "Storage node n1 has started 3 times within an hour."},
			quietAt("40m", "penstock_node_start_time_seconds{"+node+"}", "10x10 20x10 30x60", "10x90"),
		},
		"PenstockReloadFailed": {
			situation{[]series{{"penstock_config_last_reload_successful{" + node + "}", "1 0x30"}}, "6m", onNode, "n1 has not applied its configuration."},
			append(quietAt("7m", "penstock_config_last_reload_successful{"+node+"}", "1x30"), quietAt("3m", "penstock_config_last_reload_successful{"+node+"}", "1 0x30")...),
		},
		"PenstockRolesInvalid": {
			situation{[]series{{"penstock_config_roles_valid{" + node + "}", "1 0x30"}}, "3m", onNode, "n1 does not use the roles document that etcd has."},
			append(quietAt("5m", "penstock_config_roles_valid{"+node+"}", "1x30"), quietAt("1m", "penstock_config_roles_valid{"+node+"}", "1 0x30")...),
		},
		"PenstockNoLease": {
			situation{[]series{{"penstock_cluster_lease_valid{" + node + "}", "1 0x30"}}, "2m", onNode, "Storage node n1 has no lease in etcd and serves nothing."},
			quietAt("4m", "penstock_cluster_lease_valid{"+node+"}", "1x30", "1 1 1 1 0x30"),
		},
		"PenstockNamespaceRefused": {
			situation{[]series{{"penstock_cluster_refused_namespaces{" + node + "}", "0 2x30"}}, "6m", onNode, "Storage node n1 refuses 2 namespaces."},
			append(quietAt("7m", "penstock_cluster_refused_namespaces{"+node+"}", "0x30"), quietAt("4m", "penstock_cluster_refused_namespaces{"+node+"}", "0 2x30")...),
		},
		"PenstockNodeCopiesStall": {
			situation{moving("waiting", "500x60", "100x60"), "11m", onNode, "Storage node n1 has blocks to copy to other nodes, and has copied nothing for 10 minutes."},
			[]situation{
				{series: moving("waiting", "0+500x60", "100x60"), at: "40m"},
				{series: moving("copying", "500x60", "6000-100x60"), at: "40m"},
				{series: moving("done", "500x60", "0x60"), at: "40m"},
				{series: moving("waiting", "0+500x10 5000x60", "100x60"), at: "19m"},
			},
		},
		"PenstockNodeReadOnly": {
			situation{[]series{{"penstock_node_writable{" + node + "}", "1 0x30"}}, "11m", onNode, "Storage node n1 takes no writes."},
			append(quietAt("12m", "penstock_node_writable{"+node+"}", "1x30"), quietAt("8m", "penstock_node_writable{"+node+"}", "1 0x30")...),
		},
		"PenstockIndexNotWritable": {
			situation{[]series{{"penstock_index_writable{" + node + "}", "1 0x30"}}, "2m", onNode, "The index of storage node n1 cannot be written."},
			quietAt("3m", "penstock_index_writable{"+node+"}", "1x30", "1 1 1 0x30"),
		},
		"PenstockMemoryOverBudget": {
			situation{[]series{{"penstock_node_memory_bytes{" + node + "}", "2147483648x30"}, {"penstock_node_memory_budget_bytes{" + node + "}", "2000000000x30"}}, "15m", onNode, "Storage node n1 uses 2GiB of memory, which is more than its budget."},
			[]situation{{series: []series{{"penstock_node_memory_bytes{" + node + "}", "1999999999x30"}, {"penstock_node_memory_budget_bytes{" + node + "}", "2000000000x30"}}, at: "16m"}},
		},
		"PenstockEventsDropped": {
			situation{[]series{{"penstock_events_dropped_total{" + node + "}", "0+15x30"}}, "2m", onNode, "A consumer of the events of n1 missed 30 events within 15 minutes."},
			quietAt("20m", "penstock_events_dropped_total{"+node+"}", "7x30"),
		},

		"PenstockVolumeFailed": {
			situation{[]series{{volume("failed"), "0 1x30"}}, "2m", onNode + " volume=/d1 state=failed", "Volume /d1 of n1 has failed."},
			append(quietAt("3m", volume("failed"), "0x30"), quietAt("3m", volume("suspect"), "1x30")...),
		},
		"PenstockVolumeSuspect": {
			situation{[]series{{volume("suspect"), "0 1x30"}}, "11m", onNode + " volume=/d1 state=suspect", "Volume /d1 of n1 is slow or had errors."},
			append(quietAt("12m", volume("suspect"), "0 0 0 0 0 1x30"), quietAt("12m", volume("ok"), "1x30")...),
		},
		"PenstockDeviceErrors": {
			situation{[]series{
				{"penstock_device_read_failures_total{" + node + `,volume="/d1"}`, "0x30"},
				{"penstock_device_write_failures_total{" + node + `,volume="/d1"}`, "0+2x30"},
				{"penstock_device_sync_failures_total{" + node + `,volume="/d1"}`, "0x30"},
			}, "2m", onNode + " volume=/d1", "The device of volume /d1 of n1 failed 4 reads, writes or syncs within 15 minutes."},
			[]situation{{at: "20m", series: []series{
				{"penstock_device_read_failures_total{" + node + `,volume="/d1"}`, "0x30"},
				{"penstock_device_write_failures_total{" + node + `,volume="/d1"}`, "3x30"},
				{"penstock_device_sync_failures_total{" + node + `,volume="/d1"}`, "1x30"},
			}}},
		},
		"PenstockCorruptBlocks": {
			situation{[]series{{"penstock_corrupt_blocks_total{" + node + `,reason="read"}`, "0x10 1 2 3x20"}}, "12m", onNode + " reason=read", "Storage node n1 found 2 corrupt blocks within 15 minutes (read)."},
			quietAt("13m", "penstock_corrupt_blocks_total{"+node+`,reason="read"}`, "3x30", "0x30"),
		},
		"PenstockUnreadableBlocks": {
			situation{[]series{{"penstock_unreadable_blocks_total{" + node + `,reason="scrub"}`, "0+1x30"}}, "2m", onNode + " reason=scrub", "Storage node n1 dropped 2 blocks within 15 minutes because a volume cannot read them (scrub)."},
			quietAt("20m", "penstock_unreadable_blocks_total{"+node+`,reason="scrub"}`, "4x30"),
		},
		"PenstockSyncFailures": {
			situation{[]series{{"penstock_sync_failures_total{" + node + "}", "0+1x30"}}, "2m", onNode, "2 syncs of storage node n1 failed within 15 minutes."},
			quietAt("20m", "penstock_sync_failures_total{"+node+"}", "4x30"),
		},
		"PenstockDrainFails": {
			situation{[]series{{"penstock_volume_move_failures_total{" + node + `,volume="/d1"}`, "0+1x90"}}, "31m", onNode + " volume=/d1", "Blocks of volume /d1 of n1, which is draining, cannot be moved."},
			append(quietAt("40m", "penstock_volume_move_failures_total{"+node+`,volume="/d1"}`, "0 1x90"), quietAt("25m", "penstock_volume_move_failures_total{"+node+`,volume="/d1"}`, "0+1x90")...),
		},
		"PenstockErasurePending": {
			situation{[]series{{"penstock_volume_pending_erasure_seconds{" + node + `,volume="/d1"}`, "0x10 3600+60x30"}}, "21m", onNode + " volume=/d1", "Volume /d1 of n1 may have the secrets of epochs that ended up to 1h 10m 0s ago."},
			append(quietAt("40m", "penstock_volume_pending_erasure_seconds{"+node+`,volume="/d1"}`, "0x60"), // all erasures are complete
				quietAt("20m", "penstock_volume_pending_erasure_seconds{"+node+`,volume="/d1"}`, "0x10 60+60x5 0x30")...), // the volume was back soon
		},

		"PenstockEvictsRecentBlocks": {
			situation{evictions("950", "19"), "1h25m", onNode, "Storage node n1 is full and keeps an unused block for only 50m 0s."},
			[]situation{{series: evictions("950", "15"), at: "2h"}, {series: evictions("890", "19"), at: "2h"}, {series: evictions("950", "0"), at: "2h"}, {series: evictions("950", "19"), at: "25m"}},
		},
		"PenstockWritesRefused": {
			situation{skipped("full", "1.5"), "11m", onNode, "Storage node n1 does not store 1.554% of the blocks offered."},
			[]situation{{series: skipped("parent_absent", "5"), at: "20m"}, {series: skipped("full", "0.5"), at: "20m"}, {series: skipped("full", "5"), at: "8m"}},
		},
		"PenstockTenantRefused": {
			situation{refusedOf("0+30x60"), "11m", onNode + " tenant=team-a/*", "Storage node n1 refuses 500m blocks a second of tenant team-a/*, which is at its quota."},
			[]situation{
				{series: refusedOf("30x60"), at: "20m"},
				{series: refusedOf("0+30x60"), at: "8m"},
				{series: refusedOf("0x20 30x40"), at: "30m"}, // one write that was too large
			},
		},

		"PenstockHitRateCollapse": {
			situation{append(hits("300", "144000+60x120"), series{"penstock_epoch_blocks{" + node + `,namespace="m",epoch="4"}`, "10x600"}), "8h35m", "job=penstock-node namespace=m", "The hit rate of namespace m has fallen to 10%, less than half of the rate of the six hours before."},
			[]situation{
				{series: append(hits("300", "144000+300x120"), series{"penstock_epoch_blocks{" + node + `,namespace="m",epoch="4"}`, "10x600"}), at: "9h"},
				{series: append(hits("300", "144000+160x120"), series{"penstock_epoch_blocks{" + node + `,namespace="m",epoch="4"}`, "10x600"}), at: "9h"},
				// A low rate that has always been low, and few tokens.
				{series: append(hits("54", "25920+12x120"), series{"penstock_epoch_blocks{" + node + `,namespace="m",epoch="4"}`, "10x600"}), at: "9h"},
				{series: []series{
					{`penstock_prefix_queries_tokens_total{` + node + `,namespace="m"}`, "0+300x600"},
					{`penstock_prefix_hits_tokens_total{` + node + `,namespace="m"}`, "0+150x480 72000+30x120"},
					{"penstock_epoch_blocks{" + node + `,namespace="m",epoch="4"}`, "10x600"},
				}, at: "9h"},
				// The weights changed when the hit rate fell.
				{series: append(hits("300", "144000+60x120"), series{"penstock_epoch_blocks{" + node + `,namespace="m",epoch="4"}`, "10x480"}, series{"penstock_epoch_blocks{" + node + `,namespace="m",epoch="5"}`, "_x480 10x120"}), at: "9h"},
			},
		},
		"PenstockReadsLost": {
			situation{lost("transfer", "1.5"), "11m", onNode, "Storage node n1 does not deliver 1.639% of the blocks that engines read."},
			[]situation{{series: lost("absent", "10"), at: "20m"}, {series: lost("transfer", "0.5"), at: "20m"}, {series: lost("transfer", "10"), at: "8m"}},
		},
		"PenstockMatchSlow": {
			situation{latency("penstock_match_latency_seconds", node, "0.01", "0.015"), "11m", onNode, "1 % of the matches of storage node n1 take longer than 14.95ms."},
			[]situation{{series: latency("penstock_match_latency_seconds", node, "0.001", "0.01"), at: "20m"}},
		},
		"PenstockReadSlow": {
			situation{latency("penstock_read_latency_seconds", node, "2", "4"), "11m", onNode, "1 % of the reads of storage node n1 take longer than 3.98s."},
			[]situation{{series: latency("penstock_read_latency_seconds", node, "1", "2"), at: "20m"}, {series: latency("penstock_read_latency_seconds", node, "2", "4"), at: "9m"}},
		},
		"PenstockBusy": {
			situation{calls("10", "100"), "11m", onNode, "Storage node n1 refuses 10% of its calls as busy."},
			[]situation{{series: calls("4", "100"), at: "20m"}, {series: calls("10", "100"), at: "8m"}},
		},

		"PenstockSessionsLost": {
			situation{[]series{{"penstock_data_timeouts_total{" + node + "}", "0x10 1 2 3x30"}, {"penstock_data_malformed_total{" + node + "}", "0x60"}}, "14m", onNode, "Storage node n1 lost 3 data sessions within 10 minutes."},
			[]situation{
				{series: []series{{"penstock_data_timeouts_total{" + node + "}", "0x10 1 2x20"}, {"penstock_data_malformed_total{" + node + "}", "0x30"}}, at: "18m"},
				{series: []series{{"penstock_data_timeouts_total{" + node + "}", "9x30"}, {"penstock_data_malformed_total{" + node + "}", "9x30"}}, at: "15m"},
			},
		},
		"PenstockNICDown": {
			situation{[]series{{"penstock_data_nic_up{" + node + `,nic="eth1"}`, "1 0x30"}, {"penstock_data_nic_up{" + node + `,nic="eth2"}`, "1x30"}}, "2m", onNode + " nic=eth1", "The data plane of n1 does not use NIC eth1."},
			quietAt("3m", "penstock_data_nic_up{"+node+`,nic="eth1"}`, "1x30", "1 1 1 0x30"),
		},
		"PenstockTransferFailures": {
			situation{transfers("2"), "6m", onNode, "2% of the transfers of storage node n1 to engines fail."},
			[]situation{{series: transfers("0.8"), at: "15m"}, {series: transfers("2"), at: "4m"}},
		},
		"PenstockDataPlaneAuthFailures": {
			situation{[]series{{"penstock_data_auth_failures_total{" + node + "}", "0+2x30"}}, "2m", onNode, "Storage node n1 refused 4 data sessions within 10 minutes because of their token."},
			quietAt("15m", "penstock_data_auth_failures_total{"+node+"}", "5x30"),
		},

		"PenstockPlannerDown": {
			situation{[]series{{"up{" + plan + "}", "1 0x30"}}, "2m", onPlanner, "Planner p1 does not answer."},
			append(quietAt("3m", "up{"+plan+"}", "1x30", "1 1 1 0x30"), quietAt("3m", "up{"+node+"}", "0x30")...),
		},
		"PenstockPlannerNoLeader": {
			situation{[]series{{"penstock_planner_term{" + plan + "}", "7 0x30"}}, "2m", onPlanner, "Planner p1 finds no leader in etcd."},
			quietAt("3m", "penstock_planner_term{"+plan+"}", "7x30", "7 0 0 8x30"),
		},
		"PenstockPlannerElections": {
			situation{[]series{{"penstock_planner_term{" + plan + "}", "3 4 5 6 7x30"}}, "5m", onPlanner, "Planner p1 has seen 4 changes of the leader in the last hour."},
			quietAt("6m", "penstock_planner_term{"+plan+"}", "3x30", "3 4 5 6x30"),
		},
		"PenstockPlannerNoGroups": {
			situation{[]series{{"penstock_planner_groups{" + plan + `,role="prefill"}`, "0x30"}, {"penstock_planner_groups{" + plan + `,role="decode"}`, "2x30"}}, "2m", onPlanner + " role=prefill", "Planner p1 has no prefill engines."},
			quietAt("3m", "penstock_planner_groups{"+plan+`,role="prefill"}`, "1x30", "1 1 0x30"),
		},
		"PenstockPlannerQueues": {
			situation{[]series{{"penstock_planner_queued_requests{" + plan + "}", "0 0 3 4 5x30"}}, "17m", onPlanner, "During the last 10 minutes, at least 5 requests have waited for an engine at planner p1."},
			append(quietAt("20m", "penstock_planner_queued_requests{"+plan+"}", "0x30", "9x6 0 9x6 0 9x20"), quietAt("12m", "penstock_planner_queued_requests{"+plan+"}", "0 0 9x30")...),
		},
		"PenstockStorageNICImbalance": {
			situation{queues("900000x30", "100000x30"), "10m", onPlanner, "The longest reading queue of a storage NIC is 3.462 times the average at planner p1."},
			[]situation{{series: queues("900000x30", "300000x30"), at: "12m"}, {series: queues("90000x30", "0x30"), at: "12m"}, {series: queues("900000x30", "100000x30"), at: "9m"}},
		},
		"PenstockPlannerFailures": {
			situation{planned("10"), "6m", onPlanner, "Planner p1 ends 10% of the requests without an answer."},
			[]situation{{series: planned("4"), at: "15m"}, {series: planned("10"), at: "4m"}},
		},
		"PenstockNetworkSourceDown": {
			situation{[]series{{"penstock_network_source_up{" + plan + `,source="prometheus"}`, "0x30"}}, "5m", onPlanner + " source=prometheus", "Planner p1 cannot read the network's state from prometheus."},
			quietAt("6m", "penstock_network_source_up{"+plan+`,source="prometheus"}`, "1x30", "1 1 1 0x30"),
		},

		"PenstockGatewayDown": {
			situation{[]series{{"up{" + gateway + "}", "1 0x30"}}, "2m", onFront, "Gateway g1 does not answer."},
			append(quietAt("3m", "up{"+gateway+"}", "1x30", "1 1 1 0x30"), quietAt("3m", "up{"+plan+"}", "0x30")...),
		},
		"PenstockGatewayNoEngine": {
			situation{[]series{{"penstock_gateway_engine_healthy{" + gateway + `,engine="e1"}`, "0x30"}, {"penstock_gateway_engine_healthy{" + gateway + `,engine="e2"}`, "0x30"}}, "1m", onFront, "Gateway g1 has no healthy engine."},
			[]situation{{series: []series{{"penstock_gateway_engine_healthy{" + gateway + `,engine="e1"}`, "0x30"}, {"penstock_gateway_engine_healthy{" + gateway + `,engine="e2"}`, "1x30"}}, at: "2m"}},
		},
		"PenstockEngineUnhealthy": {
			situation{[]series{{"penstock_gateway_engine_healthy{" + gateway + `,engine="e1"}`, "1 0x30"}, {"penstock_gateway_engine_healthy{" + gateway + `,engine="e2"}`, "1x30"}}, "6m", onFront + " engine=e1", "Gateway g1 sends no requests to engine e1."},
			quietAt("7m", "penstock_gateway_engine_healthy{"+gateway+`,engine="e1"}`, "1x30", "1 1 1 1 0x30"),
		},
		"PenstockGatewayPlannerRefusals": {
			situation{answered(rejected("planner", "0+10x60")), "3m", onFront, "Gateway g1 refuses 10% of the requests because of the planner or storage."},
			[]situation{{series: answered(rejected("planner", "0+3x60")), at: "10m"}, {series: answered(rejected("queue", "0+10x60")), at: "10m"}},
		},
		"PenstockGatewayTooManyRequests": {
			situation{answered(rejected("queue", "0+6x60"), rejected("late", "0+4x60")), "6m", onFront, "Gateway g1 answers 10% of the requests with status 429."},
			[]situation{{series: answered(rejected("queue", "0+3x60")), at: "10m"}, {series: answered(rejected("body", "0+10x60")), at: "10m"}, {series: answered(rejected("queue", "0+10x60")), at: "4m"}},
		},
		"PenstockGatewayServerErrors": {
			situation{answered(series{"penstock_gateway_requests_total{" + gateway + `,engine="e2",code="503"}`, "0+3x60"}), "6m", onFront, "Gateway g1 answers 3.226% of the requests with a status of 500 or more."},
			[]situation{
				{series: answered(series{"penstock_gateway_requests_total{" + gateway + `,engine="e2",code="404"}`, "0+10x60"}), at: "10m"},
				{series: answered(series{"penstock_gateway_requests_total{" + gateway + `,engine="e2",code="503"}`, "0+1x60"}), at: "10m"},
			},
		},
	}
}

// The file of promtool test rules.
type (
	testFile struct {
		RuleFiles          []string   `yaml:"rule_files"`
		EvaluationInterval string     `yaml:"evaluation_interval"`
		Tests              []testCase `yaml:"tests"`
	}
	testCase struct {
		Name        string        `yaml:"name"`
		Interval    string        `yaml:"interval"`
		InputSeries []inputSeries `yaml:"input_series"`
		AlertTest   []alertTest   `yaml:"alert_rule_test"`
	}
	inputSeries struct {
		Series string `yaml:"series"`
		Values string `yaml:"values"`
	}
	alertTest struct {
		EvalTime  string     `yaml:"eval_time"`
		Alertname string     `yaml:"alertname"`
		ExpAlerts []expAlert `yaml:"exp_alerts"`
	}
	expAlert struct {
		Labels      map[string]string `yaml:"exp_labels"`
		Annotations map[string]string `yaml:"exp_annotations"`
	}
)

// caseOf returns the test of an alert in a situation.
func caseOf(a Alert, name string, s situation) testCase {
	c := testCase{Name: name, Interval: "1m", AlertTest: []alertTest{{EvalTime: s.at, Alertname: a.Name, ExpAlerts: []expAlert{}}}}
	for _, in := range s.series {
		c.InputSeries = append(c.InputSeries, inputSeries{in.name, in.values})
	}
	if s.summary != "" {
		labels := map[string]string{"severity": string(a.Severity)}
		for pair := range strings.FieldsSeq(s.labels) {
			name, value, _ := strings.Cut(pair, "=")
			labels[name] = value
		}
		c.AlertTest[0].ExpAlerts = []expAlert{{labels, map[string]string{"summary": s.summary, "description": a.Description}}}
	}
	return c
}

// before returns s an interval earlier, as a situation in which the alert does not fire.
func before(t *testing.T, s situation, interval string) situation {
	t.Helper()
	at, err := time.ParseDuration(s.at)
	step, wrong := time.ParseDuration(interval)
	if err := errors.Join(err, wrong); err != nil {
		t.Fatal(err)
	}
	return situation{series: s.series, at: fmt.Sprintf("%dm", (at-step)/time.Minute)}
}

func writeYAML(t *testing.T, path string, v any) {
	t.Helper()
	raw, err := yaml.Marshal(v)
	if err == nil {
		err = os.WriteFile(path, raw, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestAlerts: Prometheus fires each alert, with its labels and texts, in the situation that it is
// for, and does not fire it in similar ones.
func TestAlerts(t *testing.T) {
	testkit.Long(t, "promtool evaluates the rules over hours of samples")
	promtool := testkit.Program(t, "promtool", "prometheus")
	dir := t.TempDir()
	rules := NewRules()
	files := make(map[string]*testFile)
	add := func(a Alert, name string, s situation) {
		// Rules are evaluated once a minute, and less often in situations of hours. Only the records
		// and the group of the alert are evaluated.
		file, interval := a.Group, "1m"
		if strings.Contains(s.at, "h") {
			file, interval = a.Group+"-hours", "5m"
		}
		if files[file] == nil {
			// promtool evaluates groups in random order, and the rules of a group in theirs.
			one := Group{Name: file}
			for _, g := range rules.Groups {
				if g.Name == recordsGroup || g.Name == groupPrefix+a.Group {
					one.Rules = append(one.Rules, g.Rules...)
				}
			}
			writeYAML(t, filepath.Join(dir, file+"-rules.yaml"), Rules{Groups: []Group{one}})
			files[file] = &testFile{RuleFiles: []string{file + "-rules.yaml"}, EvaluationInterval: interval}
		}
		files[file].Tests = append(files[file].Tests, caseOf(a, name, s))
		if s.summary != "" {
			files[file].Tests = append(files[file].Tests, caseOf(a, name+" not before", before(t, s, interval)))
		}
	}
	all, situations := cases(), 0
	for _, a := range Alerts() {
		c, ok := all[a.Name]
		delete(all, a.Name)
		if !ok || c.fires.summary == "" || len(c.quiet) == 0 {
			t.Errorf("%s needs a situation in which it fires, and one in which it does not", a.Name)
			continue
		}
		add(a, a.Name+" fires", c.fires)
		for _, q := range c.quiet {
			add(a, a.Name+" does not fire", q)
		}
		situations += 1 + len(c.quiet)
	}
	for name := range all {
		t.Errorf("%s is no alert", name)
	}
	args := []string{"test", "rules"}
	for name, file := range files {
		path := filepath.Join(dir, name+".yaml")
		writeYAML(t, path, file)
		args = append(args, path)
	}
	if out, err := exec.CommandContext(t.Context(), promtool, args...).CombinedOutput(); err != nil {
		t.Errorf("promtool test rules: %v\n%s", err, out)
	}
	t.Logf("%d alerts in %d situations", len(Alerts()), situations)
}

// TestAlertTexts: an alert has all its texts, a known severity and a time, and its name is unique.
func TestAlertTexts(t *testing.T) {
	var names []string
	for _, a := range Alerts() {
		if a.Meaning == "" || a.For == "" || !strings.HasSuffix(a.Summary, ".") || !strings.HasSuffix(a.Description, ".") || strings.Count(a.Description, ". ") < 1 {
			t.Errorf("%s: a text is missing: %+v", a.Name, a)
		}
		if a.Severity != Critical && a.Severity != Warning {
			t.Errorf("%s: severity %q", a.Name, a.Severity)
		}
		names = append(names, a.Name)
	}
	slices.Sort(names)
	if n := len(slices.Compact(slices.Clone(names))); n != len(names) {
		t.Errorf("%d names of %d alerts", n, len(names))
	}
}
