package monitor

// Alert is an alert for Prometheus. Summary is a template over the labels and the value of Expr.
// Description contains the cause and what to do, and is not a template.
type Alert struct {
	Group string `json:"group"`
	Name  string `json:"name"`
	// Meaning is the condition in words.
	Meaning string `json:"meaning"`
	Expr    string `json:"expr"`
	// For is the time for which Expr must have a result before the alert fires.
	For         string   `json:"for"`
	Severity    Severity `json:"severity"`
	Summary     string   `json:"summary"`
	Description string   `json:"description"`
}

// Severity is the label severity of an alert.
type Severity string

const (
	// Critical: blocks or requests are lost until someone acts.
	Critical Severity = "critical"
	// Warning: someone must act, but not at once.
	Warning Severity = "warning"
)

// The jobs of the components in the configuration of Prometheus. The alerts for components that
// do not answer, and the variables of the dashboard, depend on these names.
const (
	NodeJob    = "penstock-node"
	PlannerJob = "penstock-planner"
	GatewayJob = "penstock-gateway"
)

// Alerts returns all alerts. The alerts of a group follow each other.
func Alerts() []Alert {
	const at, volume = "{{ $labels.instance }}", "{{ $labels.volume }} of {{ $labels.instance }}"
	percent, seconds := "{{ $value | humanizePercentage }}", "{{ $value | humanizeDuration }}"
	return []Alert{
		{
			Group: "node", Name: "PenstockNodeDown", For: "2m", Severity: Critical,
			Meaning:     "A storage node does not answer.",
			Expr:        `up{job="` + NodeJob + `"} == 0`,
			Summary:     "Storage node " + at + " does not answer.",
			Description: "Prometheus cannot read the node's metrics. Its blocks are misses, and engines compute them again. On its host, look at `systemctl status penstock` and `journalctl -u penstock`, and start the service if it has ended. If the service runs, test the network to its HTTP address.",
		},
		{
			Group: "node", Name: "PenstockNodeRestarts", For: "1m", Severity: Warning,
			Meaning:     "A storage node has started more than twice within an hour.",
			Expr:        "changes(penstock_node_start_time_seconds[1h]) > 2",
			Summary:     "Storage node " + at + " has started {{ $value }} times within an hour.",
			Description: "The process ends and is started again. The last lines of `journalctl -u penstock` before each start have the error. Compare the node's memory with the host's if the kernel ended the process (`dmesg`).",
		},
		{
			Group: "node", Name: "PenstockReloadFailed", For: "5m", Severity: Warning,
			Meaning:     "A process runs with other settings, tokens or certificates than its files have.",
			Expr:        "penstock_config_last_reload_successful == 0",
			Summary:     at + " has not applied its configuration.",
			Description: "The last reload changed nothing, because a value or a file is bad, or because a setting needs a restart. The process's log names it. Of a storage node, `penstock config diff` shows the differences. Correct the file and reload, or restart the process.",
		},
		{
			Group: "node", Name: "PenstockRolesInvalid", For: "2m", Severity: Critical,
			Meaning:     "A process does not use the roles document that etcd has.",
			Expr:        "penstock_config_roles_valid == 0",
			Summary:     at + " does not use the roles document that etcd has.",
			Description: "The document is missing, invalid, or etcd does not answer. The document that the process has read before stays in use: for `cluster.lease_ttl` if etcd does not answer, and as long as the document in etcd is invalid, in which time removed principals still have access. A process that has read none refuses every call (`penstock_config_roles_revision` is 0). `penstock status` and the log have the reason. Correct the document with `penstock cluster roles`.",
		},
		{
			Group: "node", Name: "PenstockNoLease", For: "1m", Severity: Critical,
			Meaning:     "A storage node of a cluster has no lease in etcd.",
			Expr:        "penstock_cluster_lease_valid == 0",
			Summary:     "Storage node " + at + " has no lease in etcd and serves nothing.",
			Description: "The node cannot reach etcd, or etcd has no majority. All its blocks are misses, because it may have missed new weights. The node's log has the error. Check etcd (`etcdctl endpoint health`) and the network to it. The node joins again by itself.",
		},
		{
			Group: "node", Name: "PenstockNamespaceRefused", For: "5m", Severity: Warning,
			Meaning:     "A storage node could not apply a change of a namespace of its cluster.",
			Expr:        "penstock_cluster_refused_namespaces > 0",
			Summary:     "Storage node " + at + " refuses {{ $value }} namespaces.",
			Description: "Their blocks on this node are misses. The node's log names each namespace and the reason: volumes that take no writes, a limit that is smaller than the blocks, or a record of another release. The node tries again by itself.",
		},
		{
			Group: "node", Name: "PenstockNodeCopiesStall", For: "10m", Severity: Warning,
			Meaning:     "The draining of a storage node, or its copies to nodes that have joined, make no progress.",
			Expr:        `sum without (state) (penstock_cluster_move_state{state=~"copying|waiting"}) == 1 and on (job, instance) increase(penstock_cluster_moved_bytes_total[10m]) == 0 and on (job, instance) delta(penstock_cluster_move_left_blocks[10m]) >= 0`,
			Summary:     "Storage node " + at + " has blocks to copy to other nodes, and has copied nothing for 10 minutes.",
			Description: "The other nodes do not take the blocks that are left. `penstock cluster members` has the reason: a node is full or down, the token is refused, or the model has no layer group of full attention. Nothing is lost while the node serves. To give the blocks up, stop the node; `penstock cluster undrain` ends the draining, and `penstock cluster rebalance --stop` the copies to nodes that have joined.",
		},
		{
			Group: "node", Name: "PenstockNodeReadOnly", For: "10m", Severity: Warning,
			Meaning:     "A storage node takes no writes.",
			Expr:        "penstock_node_writable == 0",
			Summary:     "Storage node " + at + " takes no writes.",
			Description: "The node is draining or read-only, so new blocks are not stored there. `penstock status` has the reason. If a volume or the index has failed, replace the disk. If the node is drained on purpose, silence this alert.",
		},
		{
			Group: "node", Name: "PenstockIndexNotWritable", For: "1m", Severity: Critical,
			Meaning:     "The index of a storage node cannot be written.",
			Expr:        "penstock_index_writable == 0",
			Summary:     "The index of storage node " + at + " cannot be written.",
			Description: "The disk of the index fails or hangs. Reads continue. Writes, epoch bumps and changes of namespaces are refused. `penstock status` has the error. The index is written again, without a restart, when the disk works. If the disk is dead, replace it and run `penstock store rebuild-index`.",
		},
		{
			Group: "node", Name: "PenstockMemoryOverBudget", For: "15m", Severity: Warning,
			Meaning:     "A storage node uses more memory than its budget.",
			Expr:        "penstock_node_memory_bytes > penstock_node_memory_budget_bytes",
			Summary:     "Storage node " + at + " uses {{ $value | humanize1024 }}B of memory, which is more than its budget.",
			Description: "The kernel may end the process. `penstock status` lists the parts of the budget. If the host has no more memory, make the arena or the caches smaller. Otherwise report the difference with a heap profile from /debug/pprof/heap.",
		},
		{
			Group: "node", Name: "PenstockEventsDropped", For: "1m", Severity: Warning,
			Meaning:     "A consumer of events missed some.",
			Expr:        "increase(penstock_events_dropped_total[15m]) > 0",
			Summary:     "A consumer of the events of " + at + " missed {{ $value | humanize }} events within 15 minutes.",
			Description: "A router or another consumer reads events more slowly than the node makes them. Its view of the cache is wrong until it reads the list of blocks again. Give the consumer more CPU. If it reconnects often, increase `limits.event_history`.",
		},

		{
			Group: "volumes", Name: "PenstockVolumeFailed", For: "1m", Severity: Critical,
			Meaning:     "A volume has failed.",
			Expr:        `penstock_volume_state{state="failed"} == 1`,
			Summary:     "Volume " + volume + " has failed.",
			Description: "The volume takes no more writes, and the blocks that it cannot read are misses. `penstock volume list` has the error. The node uses the volume again if a probe succeeds. Otherwise look at the disk (`dmesg`, `smartctl -a`), run `penstock volume remove`, and replace it.",
		},
		{
			Group: "volumes", Name: "PenstockVolumeSuspect", For: "10m", Severity: Warning,
			Meaning:     "A volume is slow or had errors.",
			Expr:        `penstock_volume_state{state="suspect"} == 1`,
			Summary:     "Volume " + volume + " is slow or had errors.",
			Description: "New blocks go to other volumes, as long as one that is ok takes them. `penstock volume list` has the reason. Look at the disk (`dmesg`, `smartctl -a`). If it is about to fail, `penstock volume drain` moves its blocks to the other volumes.",
		},
		{
			Group: "volumes", Name: "PenstockDeviceErrors", For: "1m", Severity: Warning,
			Meaning:     "A device failed reads, writes or syncs.",
			Expr:        "increase(penstock_device_read_failures_total[15m]) + increase(penstock_device_write_failures_total[15m]) + increase(penstock_device_sync_failures_total[15m]) > 0",
			Summary:     "The device of volume " + volume + " failed {{ $value | humanize }} reads, writes or syncs within 15 minutes.",
			Description: "Each failed read is a miss, and each failed write is repeated on another volume. Look at the disk (`dmesg`, `smartctl -a`), and drain and replace it if the errors continue.",
		},
		{
			Group: "volumes", Name: "PenstockCorruptBlocks", For: "1m", Severity: Warning,
			Meaning:     "A storage node found corrupt blocks.",
			Expr:        "increase(penstock_corrupt_blocks_total[15m]) > 0",
			Summary:     "Storage node " + at + " found {{ $value | humanize }} corrupt blocks within 15 minutes ({{ $labels.reason }}).",
			Description: "The checksums of these blocks were wrong. No reader got them: each is a miss and was dropped. With reason `write` the bytes were wrong on arrival, so look at the writer's memory and network. With another reason, look at the node's disk and memory (`dmesg`, `smartctl -a`, ECC counters), and run `penstock scrub`.",
		},
		{
			Group: "volumes", Name: "PenstockUnreadableBlocks", For: "1m", Severity: Warning,
			Meaning:     "A storage node dropped blocks that a volume cannot read.",
			Expr:        "increase(penstock_unreadable_blocks_total[15m]) > 0",
			Summary:     "Storage node " + at + " dropped {{ $value | humanize }} blocks within 15 minutes because a volume cannot read them ({{ $labels.reason }}).",
			Description: "Parts of a disk cannot be read. The blocks are misses and will be stored elsewhere. `penstock volume list` names the volume. Drain and replace the disk.",
		},
		{
			Group: "volumes", Name: "PenstockSyncFailures", For: "1m", Severity: Warning,
			Meaning:     "Syncs of a storage node failed.",
			Expr:        "increase(penstock_sync_failures_total[15m]) > 0",
			Summary:     "{{ $value | humanize }} syncs of storage node " + at + " failed within 15 minutes.",
			Description: "Blocks that were committed since the last sync may be lost in a power loss. They are misses then. `penstock status` and the log name the volume. Look at its disk.",
		},
		{
			Group: "volumes", Name: "PenstockDrainFails", For: "30m", Severity: Warning,
			Meaning:     "Blocks of a draining volume cannot be moved.",
			Expr:        "increase(penstock_volume_move_failures_total[15m]) > 0",
			Summary:     "Blocks of volume " + volume + ", which is draining, cannot be moved.",
			Description: "The other volumes have no room, or reads of this volume fail. `penstock volume list` has the reason. Add a volume, or evict blocks with `penstock evict`. If the disk cannot be read, run `penstock volume remove --force`: the blocks that are left are misses.",
		},
		{
			Group: "volumes", Name: "PenstockErasurePending", For: "10m", Severity: Warning,
			Meaning:     "A volume may still have the secrets of ended epochs.",
			Expr:        "penstock_volume_pending_erasure_seconds > 0",
			Summary:     "Volume " + volume + " may have the secrets of epochs that ended up to " + seconds + " ago.",
			Description: "Whoever has the volume and its key can decrypt blocks of these epochs. The volume was missing or had failed when the epochs ended (`encryption.epoch_keys`), and `penstock status` names the namespaces. Bring the volume back: the secrets are erased before it is used. If it is lost, run `penstock volume remove --force`, erase or destroy its disk, and replace the key.",
		},

		{
			Group: "capacity", Name: "PenstockEvictsRecentBlocks", For: "30m", Severity: Warning,
			Meaning:     "A storage node is full, and evictions replace its bytes within an hour.",
			Expr:        "instance:penstock_store_residence_seconds:rate1h < 3600 and on (job, instance) instance:penstock_store_used_bytes:ratio > 0.9",
			Summary:     "Storage node " + at + " is full and keeps an unused block for only " + seconds + ".",
			Description: "At the present rate of evictions, all bytes of the store are replaced within an hour, so conversations that continue after a pause are misses. Add a volume or a node, give namespaces quotas, or unpin what is not needed (`penstock pin list`).",
		},
		{
			Group: "capacity", Name: "PenstockWritesRefused", For: "10m", Severity: Warning,
			Meaning:     "More than 1 % of the offered blocks are not stored, because of room, quota or a device.",
			Expr:        "instance:penstock_write_refused_blocks:ratio_rate5m > 0.01",
			Summary:     "Storage node " + at + " does not store " + percent + " of the blocks offered.",
			Description: "There is no room, a device fails, or a namespace or a tenant is over its quota: the reasons are in `penstock_write_skipped_blocks_total`. With `full`, look for pins and leases that prevent evictions (`penstock pin list`) and for free space below `free_floor`. With `over_quota`, look at `penstock ns list` and, for tenants, at `penstock ns tenants`: refused are blocks for which nothing of the namespace or tenant can be evicted. With `device`, look at `penstock volume list`.",
		},

		{
			Group: "capacity", Name: "PenstockTenantRefused", For: "10m", Severity: Warning,
			Meaning:     "A tenant is at its quota, and its blocks are refused.",
			Expr:        "rate(penstock_tenant_refused_blocks_total[5m]) > 0",
			Summary:     "Storage node " + at + " refuses {{ $value | humanize }} blocks a second of tenant {{ $labels.tenant }}, which is at its quota.",
			Description: "Evictions replace the old blocks of a tenant by its new ones, so blocks are refused only if leases or pins hold nearly all of the quota, if the quota was lowered, or if one write needs more than the quota. `penstock ns tenants` shows the use, `penstock pin list` the pins. End pins, delete namespaces that are no longer used, or raise the quota in the roles.",
		},

		{
			Group: "cache", Name: "PenstockHitRateCollapse", For: "15m", Severity: Warning,
			Meaning: "The hit rate of a namespace has halved, and its weights have not changed.",
			Expr: `sum by (job, namespace) (increase(penstock_prefix_hits_tokens_total[30m])) / sum by (job, namespace) (increase(penstock_prefix_queries_tokens_total[30m]))
< 0.5 *
(sum by (job, namespace) (increase(penstock_prefix_hits_tokens_total[6h] offset 1h)) / sum by (job, namespace) (increase(penstock_prefix_queries_tokens_total[6h] offset 1h)) > 0.1)
and
sum by (job, namespace) (increase(penstock_prefix_queries_tokens_total[30m])) > 10000
unless on (job, namespace)
(count by (job, namespace, epoch) (penstock_epoch_blocks) unless count by (job, namespace, epoch) (penstock_epoch_blocks offset 2h))`,
			Summary:     "The hit rate of namespace {{ $labels.namespace }} has fallen to " + percent + ", less than half of the rate of the six hours before.",
			Description: "The weights of the namespace have not changed within two hours, so this is no consequence of an epoch bump. Look for a node that is down or read-only, for evictions of recent blocks, for a deleted prefix (`penstock events`), and for engines whose prompts or block size have changed.",
		},
		{
			Group: "cache", Name: "PenstockReadsLost", For: "10m", Severity: Warning,
			Meaning:     "More than 1 % of the read blocks were found and not delivered.",
			Expr:        "instance:penstock_read_lost_blocks:ratio_rate5m > 0.01",
			Summary:     "Storage node " + at + " does not deliver " + percent + " of the blocks that engines read.",
			Description: "Blocks that were found were not delivered: the reasons are in `penstock_read_lost_blocks_total`. With `busy` or `deadline` the node is overloaded. With `device` or `corrupt`, look at its volumes. With `transfer`, look at the network to the engines.",
		},
		{
			Group: "cache", Name: "PenstockMatchSlow", For: "10m", Severity: Warning,
			Meaning:     "The p99 of matches is above 10 ms.",
			Expr:        "instance:penstock_match_latency_seconds:p99_rate5m > 0.01",
			Summary:     "1 % of the matches of storage node " + at + " take longer than " + seconds + ".",
			Description: "A match reads memory only and takes microseconds. The node's CPUs are overloaded or its memory is swapped. Look at the load of the host, and at CPU limits of its container.",
		},
		{
			Group: "cache", Name: "PenstockReadSlow", For: "10m", Severity: Warning,
			Meaning:     "The p99 of reads is above 2 s.",
			Expr:        "instance:penstock_read_latency_seconds:p99_rate5m > 2",
			Summary:     "1 % of the reads of storage node " + at + " take longer than " + seconds + ".",
			Description: "Engines may compute faster than they read. Compare the rates of the node's devices and NICs with what they can do (`penstock bench store`, `penstock profile`). Look for a suspect volume, for a NIC that is down, and for a storage NIC with a long reading queue.",
		},
		{
			Group: "cache", Name: "PenstockBusy", For: "10m", Severity: Warning,
			Meaning:     "A storage node refuses more than 5 % of its calls as busy.",
			Expr:        "instance:penstock_busy_calls:ratio_rate5m > 0.05",
			Summary:     "Storage node " + at + " refuses " + percent + " of its calls as busy.",
			Description: "A limit of the node is reached: memory of the arena, or requests in flight on a volume (`limits`). If its devices are idle, increase the arena (`penstock_arena_waits_total` grows) or the limits. If its devices are busy, add a volume or a node.",
		},

		{
			Group: "transfer", Name: "PenstockSessionsLost", For: "1m", Severity: Warning,
			Meaning:     "A storage node lost more than 2 data sessions within 10 minutes.",
			Expr:        "increase(penstock_data_timeouts_total[10m]) + increase(penstock_data_malformed_total[10m]) > 2",
			Summary:     "Storage node " + at + " lost {{ $value | humanize }} data sessions within 10 minutes.",
			Description: "Engines were silent for longer than the timeout, or sent bytes that are no frame. Look for engines that were killed or hang, for processes that get no CPU (`heartbeats were late` in their logs), and for packet loss between them and the node. Engines open a new session by themselves.",
		},
		{
			Group: "transfer", Name: "PenstockNICDown", For: "1m", Severity: Warning,
			Meaning:     "The data plane does not use a NIC.",
			Expr:        "penstock_data_nic_up == 0",
			Summary:     "The data plane of " + at + " does not use NIC {{ $labels.nic }}.",
			Description: "The traffic goes over the other NICs, if there are any. `penstock status` has the reason. Look at the cable and the switch port, and run `penstock nic check` on the host.",
		},
		{
			Group: "transfer", Name: "PenstockTransferFailures", For: "5m", Severity: Warning,
			Meaning:     "More than 1 % of the transfers to engines fail.",
			Expr:        "instance:penstock_data_write_failures:ratio_rate5m > 0.01",
			Summary:     percent + " of the transfers of storage node " + at + " to engines fail.",
			Description: "Blocks do not reach the memory of the engines, and are misses. Look for engines that end during reads, and at the errors of the NICs and of the network (`penstock nic check`).",
		},
		{
			Group: "transfer", Name: "PenstockDataPlaneAuthFailures", For: "1m", Severity: Warning,
			Meaning:     "Data sessions had a wrong token or none.",
			Expr:        "increase(penstock_data_auth_failures_total[10m]) > 0",
			Summary:     "Storage node " + at + " refused {{ $value | humanize }} data sessions within 10 minutes because of their token.",
			Description: "A peer has a wrong token or none. Compare the token files of engines and node. If the addresses in the log are not those of your engines, block them.",
		},

		{
			Group: "planner", Name: "PenstockPlannerDown", For: "1m", Severity: Critical,
			Meaning:     "A planner does not answer.",
			Expr:        `up{job="` + PlannerJob + `"} == 0`,
			Summary:     "Planner " + at + " does not answer.",
			Description: "Unless it is one of several planners, no request is planned, and gateways with `--planner` let requests wait. Look at the planner's log and start it again. It needs no files: the groups register again and list their requests. `penstock plan status` shows whether a standby leads.",
		},
		{
			Group: "planner", Name: "PenstockPlannerNoLeader", For: "1m", Severity: Critical,
			Meaning:     "Of several planners, none leads.",
			Expr:        "penstock_planner_term == 0",
			Summary:     "Planner " + at + " finds no leader in etcd.",
			Description: "No request is planned: requests wait in the gateways. Running attempts continue. The planner cannot reach etcd, or etcd refuses it: the planner's log has the error. If only some planners have this alert, the others have a leader.",
		},
		{
			Group: "planner", Name: "PenstockPlannerElections", For: "1m", Severity: Warning,
			Meaning:     "The leader of several planners has changed more than 3 times in an hour.",
			Expr:        "changes(penstock_planner_term[1h]) > 3",
			Summary:     "Planner " + at + " has seen {{ $value }} changes of the leader in the last hour.",
			Description: "At each change, requests that wait to be planned are delayed. The leader does not renew its lease in time: look at the log of the planners, at the latency of etcd, and for planners without enough CPU. A longer `cluster.lease_ttl` tolerates longer pauses.",
		},
		{
			Group: "planner", Name: "PenstockPlannerNoGroups", For: "2m", Severity: Critical,
			Meaning:     "A planner has no engines of a role.",
			Expr:        "penstock_planner_groups == 0",
			Summary:     "Planner " + at + " has no {{ $labels.role }} engines.",
			Description: "Requests wait or are refused, because no leader of a group with this role is registered. Look at the logs of these engines. They need the planner's address and its token.",
		},
		{
			Group: "planner", Name: "PenstockPlannerQueues", For: "5m", Severity: Warning,
			Meaning:     "Requests have waited for an engine during all of 10 minutes.",
			Expr:        "min_over_time(penstock_planner_queued_requests[10m]) > 0",
			Summary:     "During the last 10 minutes, at least {{ $value }} requests have waited for an engine at planner " + at + ".",
			Description: "The engines cannot serve the arriving requests. `penstock plan top` lists groups and queues, and `penstock plan explain` the reason for one request. Add engines, or change roles (`penstock plan roles`).",
		},
		{
			Group: "planner", Name: "PenstockStorageNICImbalance", For: "10m", Severity: Warning,
			Meaning:     "A storage NIC's reading queue is more than 3 times the average, and longer than 100,000 tokens.",
			Expr:        "instance:penstock_planner_read_queue_tokens:max_over_avg > 3 and on (job, instance) max by (job, instance) (penstock_planner_read_queue_tokens) > 100000",
			Summary:     "The longest reading queue of a storage NIC is {{ $value | humanize }} times the average at planner " + at + ".",
			Description: "The reads of requests are not spread over the storage NICs. `penstock plan top` names the machine. Look for a NIC that is slower than the others (`penstock nic check`), and for wrong constants of the planner (`penstock profile`).",
		},
		{
			Group: "planner", Name: "PenstockPlannerFailures", For: "5m", Severity: Warning,
			Meaning:     "A planner ends more than 5 % of the requests without an answer.",
			Expr:        "instance:penstock_planner_request_failures:ratio_rate5m > 0.05",
			Summary:     "Planner " + at + " ends " + percent + " of the requests without an answer.",
			Description: "Requests are rejected, cancelled by their clients, or past their deadline. `penstock plan explain` has the reason for one request. Look at the queue and at the failures of the engines.",
		},
		{
			Group: "planner", Name: "PenstockNetworkSourceDown", For: "5m", Severity: Warning,
			Meaning:     "A planner cannot read the network's state.",
			Expr:        "penstock_network_source_up == 0",
			Summary:     "Planner " + at + " cannot read the network's state from {{ $labels.source }}.",
			Description: "The planner uses old figures of the network's congestion. Look at the source and at the planner's log (docs/network.md).",
		},

		{
			Group: "gateway", Name: "PenstockGatewayDown", For: "1m", Severity: Critical,
			Meaning:     "A gateway does not answer.",
			Expr:        `up{job="` + GatewayJob + `"} == 0`,
			Summary:     "Gateway " + at + " does not answer.",
			Description: "Its clients get no answers. Look at the gateway's log and start it again.",
		},
		{
			Group: "gateway", Name: "PenstockGatewayNoEngine", For: "1m", Severity: Critical,
			Meaning:     "A gateway has no healthy engine.",
			Expr:        "sum by (job, instance) (penstock_gateway_engine_healthy) == 0",
			Summary:     "Gateway " + at + " has no healthy engine.",
			Description: "Each request gets status 503. Look at the engines, and at the network from the gateway to them: the gateway asks each for /health.",
		},
		{
			Group: "gateway", Name: "PenstockEngineUnhealthy", For: "5m", Severity: Warning,
			Meaning:     "A gateway sends no requests to an engine.",
			Expr:        "penstock_gateway_engine_healthy == 0",
			Summary:     "Gateway " + at + " sends no requests to engine {{ $labels.engine }}.",
			Description: "The engine fails its health checks or its requests. The others serve its requests. Look at the engine's log.",
		},
		{
			Group: "gateway", Name: "PenstockGatewayPlannerRefusals", For: "2m", Severity: Critical,
			Meaning:     "A gateway refuses more than 5 % of the requests because of the planner or storage.",
			Expr:        "instance:penstock_gateway_planner_refusals:ratio_rate5m > 0.05",
			Summary:     "Gateway " + at + " refuses " + percent + " of the requests because of the planner or storage.",
			Description: "The gateway cannot reach the planner or the storage nodes (status 503), the planner's queue is full (status 429), or the planner finds the requests invalid (status 400). The gateway's log has the errors. If the planner is up, test the network from the gateway to it, and look at the planner's queue (`penstock plan top`).",
		},
		{
			Group: "gateway", Name: "PenstockGatewayTooManyRequests", For: "5m", Severity: Warning,
			Meaning:     "A gateway answers more than 5 % of the requests with 429.",
			Expr:        "instance:penstock_gateway_too_many_requests:ratio_rate5m > 0.05",
			Summary:     "Gateway " + at + " answers " + percent + " of the requests with status 429.",
			Description: "The gateway's queue or memory is full, requests wait too long for an engine, or a first token would be late: the reasons are in `penstock_gateway_rejected_total`. Add engines, or make the clients send less.",
		},
		{
			Group: "gateway", Name: "PenstockGatewayServerErrors", For: "5m", Severity: Critical,
			Meaning:     "A gateway answers more than 2 % of the requests with 5xx.",
			Expr:        "instance:penstock_gateway_server_errors:ratio_rate5m > 0.02",
			Summary:     "Gateway " + at + " answers " + percent + " of the requests with a status of 500 or more.",
			Description: "Engines fail or there is no healthy engine. `penstock_gateway_requests_total` has the codes of each engine, and `penstock_gateway_retries_total` the failed attempts. Look at the logs of these engines.",
		},
	}
}
