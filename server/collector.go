package server

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server/handoff"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// collector exports the counters of the index, the store, the arena, the data plane and other
// components. It reads them at each scrape.
type collector struct{ server *Server }

// A figure is one metric without labels.
type figure struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*scrape) float64
}

// volumeFigure is one metric with the label volume.
type volumeFigure struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(Volume) float64
}

// volumeState returns a metric with one series for each volume and state.
func volumeState() *prometheus.Desc {
	return prometheus.NewDesc("penstock_volume_state", "1 for the state that the volume is in (ok, suspect, failed, draining, removed), 0 for the others.", []string{"volume", "state"}, nil)
}

// clusterMoveState returns a metric with one series for each phase of a draining node.
func clusterMoveState() *prometheus.Desc {
	return prometheus.NewDesc("penstock_cluster_move_state", "1 for the phase of the copies to other nodes (copying, waiting: pieces could not be copied and are tried again, done), 0 for the others.", []string{"state"}, nil)
}

// moveFigure is one metric of volume draining, with the label volume.
type moveFigure struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(storage.VolumeInfo) float64
}

func perMove(kind prometheus.ValueType, name, help string, value func(storage.VolumeInfo) float64) moveFigure {
	return moveFigure{prometheus.NewDesc("penstock_"+name, help, []string{"volume"}, nil), kind, value}
}

func moveFigures() []moveFigure {
	return []moveFigure{
		perMove(prometheus.CounterValue, "volume_moved_blocks_total", "Pieces moved to other volumes while the volume was draining.", func(v storage.VolumeInfo) float64 { return float64(v.Move.MovedBlocks) }),
		perMove(prometheus.CounterValue, "volume_moved_bytes_total", "Slot bytes moved to other volumes while the volume was draining.", func(v storage.VolumeInfo) float64 { return float64(v.Move.MovedBytes) }),
		perMove(prometheus.CounterValue, "volume_move_failures_total", "Moves of pieces that failed. The node tries them again.", func(v storage.VolumeInfo) float64 { return float64(v.Move.Failures) }),
		perMove(prometheus.GaugeValue, "volume_used_bytes", "Bytes of slots on the volume that hold or receive a block. While the volume is draining, these remain to be moved.", func(v storage.VolumeInfo) float64 { return float64(v.Slots.UsedBytes()) }),
	}
}

// epochFigure is one metric of live epochs, with the labels namespace and epoch.
type epochFigure struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(trie.EpochStats) int64
}

func perEpoch(kind prometheus.ValueType, name, help string, value func(trie.EpochStats) int64) epochFigure {
	return epochFigure{prometheus.NewDesc("penstock_epoch_"+name, help, []string{"namespace", "epoch"}, nil), kind, value}
}

func epochFigures() []epochFigure {
	return []epochFigure{
		perEpoch(prometheus.GaugeValue, "blocks", "Pieces of a live epoch.", func(e trie.EpochStats) int64 { return e.Pieces }),
		perEpoch(prometheus.GaugeValue, "used_bytes", "Bytes of the slots of a live epoch.", func(e trie.EpochStats) int64 { return e.Bytes }),
		perEpoch(prometheus.CounterValue, "match_requests_total", "Match calls that a live epoch answered.", func(e trie.EpochStats) int64 { return e.Matches }),
		perEpoch(prometheus.CounterValue, "hits_blocks_total", "Blocks of a live epoch that Match calls found.", func(e trie.EpochStats) int64 { return e.Hits }),
		perEpoch(prometheus.GaugeValue, "leases", "Leases open on blocks of a live epoch.", func(e trie.EpochStats) int64 { return e.Leases }),
		perEpoch(prometheus.GaugeValue, "pins", "Pins that keep an epoch live.", func(e trie.EpochStats) int64 { return e.Pins }),
	}
}

// nicFigure is one metric with the label nic.
type nicFigure struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(rdma.NIC) float64
}

// principalFigure is one figure of a principal of the roles file.
type principalFigure struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(s *Server, name string, spent *spending) float64
}

func principalFigures() []principalFigure {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("penstock_principal_"+name, help, []string{"principal"}, nil)
	}
	of := func(name, help string, value func(*spending) uint64) principalFigure {
		return principalFigure{desc(name, help), prometheus.CounterValue, func(_ *Server, _ string, spent *spending) float64 { return float64(value(spent)) }}
	}
	return []principalFigure{
		of("read_bytes_total", "Bytes of blocks that a principal of the roles file has read.", func(s *spending) uint64 { return s.read.bytes.Load() }),
		of("write_bytes_total", "Bytes that a principal of the roles file has reserved for writing, with the headers of the slots.", func(s *spending) uint64 { return s.write.bytes.Load() }),
		of("limited_reads_total", "Reads of a principal that were Busy because it was above its rate.", func(s *spending) uint64 { return s.read.limited.Load() }),
		of("limited_writes_total", "Reservations of a principal that were Busy because it was above its rate.", func(s *spending) uint64 { return s.write.limited.Load() }),
		{desc("waiting_reads", "Reads of a principal that wait for others to end."), prometheus.GaugeValue, func(s *Server, name string, _ *spending) float64 { return float64(s.node.WaitingReads(name)) }},
		{desc("read_memory_bytes", "Arena memory of a principal's reads, also of blocks that they have put into the hot set."), prometheus.GaugeValue, func(s *Server, name string, _ *spending) float64 {
			reads, _ := s.node.Memory(name)
			return float64(reads)
		}},
		{desc("write_memory_bytes", "Arena memory of a principal's reservations."), prometheus.GaugeValue, func(s *Server, name string, _ *spending) float64 {
			_, writes := s.node.Memory(name)
			return float64(writes)
		}},
		{desc("weight", "Weight of a principal in the roles in use."), prometheus.GaugeValue, func(s *Server, name string, _ *spending) float64 { return float64(s.weightOf(name)) }},
	}
}

// tenantFigure is one metric of a tenant with a quota.
type tenantFigure struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(trie.TenantStats) int64
}

func tenantFigures() []tenantFigure {
	of := func(kind prometheus.ValueType, name, help string, value func(trie.TenantStats) int64) tenantFigure {
		return tenantFigure{prometheus.NewDesc("penstock_tenant_"+name, help, []string{"tenant"}, nil), kind, value}
	}
	return []tenantFigure{
		of(prometheus.GaugeValue, "used_bytes", "Bytes of the slots of all namespaces of a tenant with a quota, unmatchable blocks included.", func(s trie.TenantStats) int64 { return s.UsedBytes }),
		of(prometheus.GaugeValue, "quota_bytes", "Quota of a tenant on this node, by the roles in use.", func(s trie.TenantStats) int64 { return s.Bytes }),
		of(prometheus.CounterValue, "evicted_blocks_total", "Pieces evicted to keep a tenant within its quota.", func(s trie.TenantStats) int64 { return s.EvictedPieces }),
		of(prometheus.CounterValue, "evicted_bytes_total", "Slot bytes freed by these evictions.", func(s trie.TenantStats) int64 { return s.EvictedBytes }),
		of(prometheus.CounterValue, "refused_blocks_total", "Pieces not stored because of the quota of a tenant, their descendants in the same write included.", func(s trie.TenantStats) int64 { return s.RefusedPieces }),
	}
}

// erasureFigure is one metric of the erasures of epoch secrets that are not complete on a volume.
type erasureFigure struct {
	desc  *prometheus.Desc
	value func(e volumeErasures, now time.Time) float64
}

func erasureFigures() []erasureFigure {
	of := func(name, help string, value func(volumeErasures, time.Time) float64) erasureFigure {
		return erasureFigure{prometheus.NewDesc("penstock_volume_"+name, help, []string{"volume"}, nil), value}
	}
	return []erasureFigure{
		of("pending_erasures", "Namespaces with ended epochs whose secrets may still be on the volume (encryption.epoch_keys). The volumes of adopted nodes have series too.", func(e volumeErasures, _ time.Time) float64 { return float64(e.namespaces) }),
		of("pending_erasure_seconds", "Time since the first of these epochs ended; 0 if every erasure is complete.", func(e volumeErasures, now time.Time) float64 {
			if e.namespaces == 0 {
				return 0
			}
			return now.Sub(e.since).Seconds()
		}),
	}
}

func counter(name, help string, value func(*scrape) float64) figure {
	return figure{prometheus.NewDesc("penstock_"+name, help, nil, nil), prometheus.CounterValue, value}
}

func gauge(name, help string, value func(*scrape) float64) figure {
	return figure{prometheus.NewDesc("penstock_"+name, help, nil, nil), prometheus.GaugeValue, value}
}

func perVolume(kind prometheus.ValueType, name, help string, value func(Volume) float64) volumeFigure {
	return volumeFigure{prometheus.NewDesc("penstock_"+name, help, []string{"volume"}, nil), kind, value}
}

func perNIC(kind prometheus.ValueType, name, help string, value func(rdma.NIC) float64) nicFigure {
	return nicFigure{prometheus.NewDesc("penstock_"+name, help, []string{"nic"}, nil), kind, value}
}

// figures returns all metrics without labels. docs/metrics.md documents each.
func figures() []figure {
	return []figure{
		gauge("store_capacity_bytes", "Hard cap on the bytes of the volumes and the index.", func(s *scrape) float64 { return float64(s.server.opts.CapacityBytes) }),
		gauge("store_used_bytes", "Bytes of slots that hold or receive a block.", func(s *scrape) float64 { return float64(s.node.Store.Slots.UsedBytes()) }),
		gauge("store_file_bytes", "Bytes of all files of all volumes.", func(s *scrape) float64 { return float64(s.node.Store.FileBytes) }),
		gauge("store_blocks", "Pieces that can be matched or wait to be reclaimed.", func(s *scrape) float64 { return float64(s.node.Index.Pieces) }),
		counter("store_reads_total", "Slot reads requested from the block store.", func(s *scrape) float64 { return float64(s.node.Store.Counters.Reads) }),
		counter("store_read_stale_total", "Slot reads that found another block: misses.", func(s *scrape) float64 { return float64(s.node.Store.Counters.ReadStale) }),
		counter("store_read_corrupt_total", "Slot reads that failed a checksum: misses.", func(s *scrape) float64 { return float64(s.node.Store.Counters.ReadCorrupt) }),
		counter("store_read_failures_total", "Slot reads that the device failed.", func(s *scrape) float64 { return float64(s.node.Store.Counters.ReadFailures) }),
		counter("store_writes_total", "Slot writes given to a device.", func(s *scrape) float64 { return float64(s.node.Store.Counters.Writes) }),
		counter("store_write_failures_total", "Slot writes that the device failed.", func(s *scrape) float64 { return float64(s.node.Store.Counters.WriteFailures) }),

		gauge("index_disk_bytes", "Bytes of the index's files.", func(s *scrape) float64 { return float64(s.node.Index.DiskBytes) }),
		gauge("index_writable", "1 while the index can be written, 0 while its drive fails or hangs: writes are refused.", func(s *scrape) float64 {
			if s.server.node.IndexWritable() != nil {
				return 0
			}
			return 1
		}),
		gauge("index_memory_bytes", "DRAM of the index: nodes, tables, policy, leases.", func(s *scrape) float64 {
			i := s.node.Index
			return float64(i.NodeBytes + i.TableBytes + i.PolicyBytes + i.LeaseBytes)
		}),
		gauge("index_unmatchable_blocks", "Pieces of retired epochs and deleted blocks whose slots are not reclaimed yet.", func(s *scrape) float64 { return float64(s.node.Index.Unmatchable) }),
		gauge("lease_open", "Leases open, pins included.", func(s *scrape) float64 { return float64(s.node.Index.Leases) }),

		gauge("arena_size_bytes", "Memory for bytes in flight.", func(s *scrape) float64 { return float64(s.node.Arena.SizeBytes) }),
		gauge("arena_used_bytes", "Arena memory lent out, hot blocks included.", func(s *scrape) float64 { return float64(s.node.Arena.UsedBytes) }),
		counter("arena_requests_total", "Requests for arena memory that were served.", func(s *scrape) float64 { return float64(s.node.Arena.Allocs) }),
		counter("arena_waits_total", "Requests for arena memory that had to wait.", func(s *scrape) float64 { return float64(s.node.Arena.Waits) }),
		counter("arena_failures_total", "Requests for arena memory that were refused.", func(s *scrape) float64 { return float64(s.node.Arena.Busy + s.node.Arena.Cancelled) }),
		gauge("hot_bytes", "Blocks kept in arena memory that has no other use.", func(s *scrape) float64 { return float64(s.node.HotBytes) }),
		counter("hot_queries_total", "Pieces looked up among the hot blocks.", func(s *scrape) float64 { return float64(s.node.HotQueries) }),
		counter("hot_hits_total", "Pieces found among the hot blocks.", func(s *scrape) float64 { return float64(s.node.HotHits) }),
		gauge("loan_bytes", "Arena memory that engines on this host have on loan.", func(s *scrape) float64 { return float64(s.node.LoanBytes) }),
		gauge("loan_pieces", "Pieces that engines on this host have on loan.", func(s *scrape) float64 { return float64(s.node.Loans) }),
		gauge("staging_bytes", "Memory, in addition to the arena, in which engines on this host put the bytes of their writes.", func(s *scrape) float64 { return float64(s.local.StagingBytes) }),
		gauge("loan_sessions", "Engines connected to the local socket.", func(s *scrape) float64 { return float64(s.local.Sessions) }),
		counter("loan_connections_total", "Connections to the local socket.", func(s *scrape) float64 { return float64(s.local.Connections) }),
		counter("loan_refused_total", "Connections to the local socket that were refused: another user, or too many.", func(s *scrape) float64 { return float64(s.local.Refused) }),
		gauge("write_reservations", "Reservations open.", func(s *scrape) float64 { return float64(s.node.Reservations) }),

		gauge("data_sessions", "Transfer engine sessions with peers.", func(s *scrape) float64 { return float64(s.sessions) }),
		counter("data_writes_total", "One-sided writes to readers submitted.", func(s *scrape) float64 { return float64(s.data.WritesOut) }),
		counter("data_write_bytes_total", "Bytes of one-sided writes to readers.", func(s *scrape) float64 { return float64(s.data.WriteBytesOut) }),
		counter("data_write_failures_total", "One-sided writes to readers that failed.", func(s *scrape) float64 { return float64(s.data.WriteFailuresOut) }),
		counter("data_received_writes_total", "One-sided writes of writers that landed.", func(s *scrape) float64 { return float64(s.data.WritesIn) }),
		counter("data_received_bytes_total", "Bytes that writers put into reservations.", func(s *scrape) float64 { return float64(s.data.WriteBytesIn) }),
		counter("data_refused_total", "Operations of peers that were refused (key, bounds, revoked, size).", func(s *scrape) float64 {
			var n uint64
			for _, r := range s.data.RefusedIn {
				n += r
			}
			return float64(n)
		}),
		counter("data_auth_failures_total", "Data sessions refused because the token was wrong or missing.", func(s *scrape) float64 { return float64(s.data.AuthFailures) }),
		counter("data_malformed_total", "Data sessions ended by a malformed frame.", func(s *scrape) float64 { return float64(s.data.MalformedFrames) }),
		counter("data_timeouts_total", "Data sessions ended by silence.", func(s *scrape) float64 { return float64(s.data.PeersTimedOut) }),
		gauge("data_in_flight_bytes", "Bytes of one-sided writes not confirmed yet.", func(s *scrape) float64 { return float64(s.data.InFlightBytes) }),

		gauge("node_memory_bytes", "Resident memory of the process.", func(s *scrape) float64 { return float64(s.rssBytes) }),
		gauge("node_memory_budget_bytes", "What resident memory should stay below: arena, staging memory, index, slot tables, caches, 208 MiB and a tenth of the index and the slot tables.", func(s *scrape) (sum float64) {
			for _, p := range s.server.memoryParts() {
				sum += float64(p.Bytes)
			}
			return sum
		}),
		gauge("node_start_time_seconds", "When the node started, as Unix time.", func(s *scrape) float64 { return float64(s.server.started.UnixNano()) / float64(time.Second) }),
		gauge("cluster_lease_valid", "1 while the node's lease in etcd lets it serve, or the node is not in a cluster; 0: it serves nothing.", func(s *scrape) float64 {
			if c := s.server.opts.Cluster; c != nil && c.Admit("") != nil {
				return 0
			}
			return 1
		}),
		gauge("cluster_refused_namespaces", "Namespaces that the node refuses because it could not apply the cluster's last change of them.", func(s *scrape) float64 {
			if c := s.server.opts.Cluster; c != nil {
				return float64(c.Refused())
			}
			return 0
		}),
		counter("cluster_moved_blocks_total", "Pieces that this node has copied to other nodes of the cluster, because it drained or nodes had joined.", func(s *scrape) float64 { return float64(s.copies.Blocks) }),
		counter("cluster_moved_bytes_total", "Payload that this node has copied to other nodes of the cluster, because it drained or nodes had joined.", func(s *scrape) float64 { return float64(s.copies.Bytes) }),
		counter("cluster_move_failed_blocks_total", "Pieces that could not be copied to other nodes, once for each try.", func(s *scrape) float64 { return float64(s.copies.Failures) }),
		gauge("cluster_move_left_blocks", "Pieces that this node has still to compare with those of other nodes, or to copy to them; 0 without an order to do so.", func(s *scrape) float64 { return float64(s.move.Blocks - s.move.CopiedBlocks) }),
		gauge("cluster_move_left_bytes", "Payload of these pieces.", func(s *scrape) float64 { return float64(s.move.Bytes - s.move.CopiedBytes) }),
		gauge("cluster_hot_prefixes", "Hot prefixes of this node that have copies on other nodes of the cluster.", func(s *scrape) float64 { return float64(s.server.node.HotCopies()) }),
		gauge("node_writable", "1 while writes are taken, 0 while draining or read-only.", func(s *scrape) float64 {
			if state, _ := s.server.node.WriteState(); state == "serving" {
				return 1
			}
			return 0
		}),
	}
}

func volumeFigures() []volumeFigure {
	return []volumeFigure{
		perVolume(prometheus.CounterValue, "device_reads_total", "Device reads.", func(v Volume) float64 { return float64(v.Device.Stats().ReadRequests) }),
		perVolume(prometheus.CounterValue, "device_read_bytes_total", "Bytes read from the device.", func(v Volume) float64 { return float64(v.Device.Stats().ReadBytes) }),
		perVolume(prometheus.CounterValue, "device_read_failures_total", "Device reads that failed.", func(v Volume) float64 { return float64(v.Device.Stats().ReadFailures) }),
		perVolume(prometheus.CounterValue, "device_writes_total", "Device writes.", func(v Volume) float64 { return float64(v.Device.Stats().WriteRequests) }),
		perVolume(prometheus.CounterValue, "device_write_bytes_total", "Bytes written to the device.", func(v Volume) float64 { return float64(v.Device.Stats().WriteBytes) }),
		perVolume(prometheus.CounterValue, "device_write_failures_total", "Device writes that failed.", func(v Volume) float64 { return float64(v.Device.Stats().WriteFailures) }),
		perVolume(prometheus.CounterValue, "device_syncs_total", "Device syncs.", func(v Volume) float64 { return float64(v.Device.Stats().Syncs) }),
		perVolume(prometheus.CounterValue, "device_sync_failures_total", "Device syncs that failed.", func(v Volume) float64 { return float64(v.Device.Stats().SyncFailures) }),
		perVolume(prometheus.CounterValue, "device_resumed_total", "Short transfers that were continued.", func(v Volume) float64 { return float64(v.Device.Stats().Resumed) }),
		perVolume(prometheus.GaugeValue, "device_in_flight_bytes", "Bytes submitted and not completed.", func(v Volume) float64 { return float64(v.Device.Stats().InFlightBytes) }),
		perVolume(prometheus.GaugeValue, "device_in_flight_limit_bytes", "The adaptive bound on bytes in flight.", func(v Volume) float64 { return float64(v.Device.Stats().InFlightLimitBytes) }),
	}
}

func nicFigures() []nicFigure {
	return []nicFigure{
		perNIC(prometheus.GaugeValue, "data_nic_up", "1 while the data plane uses the NIC, 0 while it goes over the others.", func(n rdma.NIC) float64 {
			if n.Up {
				return 1
			}
			return 0
		}),
		perNIC(prometheus.CounterValue, "data_nic_sent_bytes_total", "Payload that the NIC sent, including repeated transmissions.", func(n rdma.NIC) float64 { return float64(n.BytesOut) }),
		perNIC(prometheus.CounterValue, "data_nic_received_bytes_total", "Payload that the NIC received.", func(n rdma.NIC) float64 { return float64(n.BytesIn) }),
	}
}

// DescribeMetrics sends the definition of each metric of a storage node to ch.
func DescribeMetrics(ch chan<- *prometheus.Desc) {
	r := prometheus.NewRegistry()
	metrics.NewNode(r)
	r.Describe(ch)
	(&collector{}).Describe(ch)
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range figures() {
		ch <- f.desc
	}
	for _, f := range volumeFigures() {
		ch <- f.desc
	}
	ch <- volumeState()
	ch <- clusterMoveState()
	for _, f := range principalFigures() {
		ch <- f.desc
	}
	for _, f := range tenantFigures() {
		ch <- f.desc
	}
	for _, f := range moveFigures() {
		ch <- f.desc
	}
	for _, f := range erasureFigures() {
		ch <- f.desc
	}
	for _, f := range nicFigures() {
		ch <- f.desc
	}
	for _, f := range epochFigures() {
		ch <- f.desc
	}
}

// scrape holds the values that one scrape reads.
type scrape struct {
	server   *Server
	node     storage.Stats
	data     rdma.Stats
	sessions int
	rssBytes int64
	local    handoff.Stats
	// move and copies are the results of membership.Cluster.MoveState.
	move   membership.Move
	copies membership.Copies
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	s := &scrape{server: c.server, node: c.server.node.Stats(), data: c.server.data.Stats(), sessions: len(c.server.data.Peers())}
	if c.server.opts.Local != nil {
		s.local = c.server.opts.Local.Stats()
	}
	if mem, err := sys.ReadMemory(); err == nil {
		s.rssBytes = mem.RSSBytes
	}
	if cluster := c.server.opts.Cluster; cluster != nil {
		s.move, s.copies = cluster.MoveState()
	}
	for _, phase := range []membership.MovePhase{membership.MoveCopying, membership.MoveWaiting, membership.MoveDone} {
		is := 0.0
		if s.move.Phase == phase {
			is = 1
		}
		ch <- prometheus.MustNewConstMetric(clusterMoveState(), prometheus.GaugeValue, is, string(phase))
	}
	for _, f := range figures() {
		ch <- prometheus.MustNewConstMetric(f.desc, f.kind, f.value(s))
	}
	for _, v := range c.server.opts.Volumes {
		for _, f := range volumeFigures() {
			ch <- prometheus.MustNewConstMetric(f.desc, f.kind, f.value(v), v.Device.Info().Path)
		}
	}
	for _, v := range c.server.node.Volumes() {
		for _, f := range moveFigures() {
			ch <- prometheus.MustNewConstMetric(f.desc, f.kind, f.value(v), v.Path)
		}
		for _, state := range health.States() {
			is := 0.0
			if v.Health.State == state {
				is = 1
			}
			ch <- prometheus.MustNewConstMetric(volumeState(), prometheus.GaugeValue, is, v.Path, state.String())
		}
	}
	now := c.server.opts.Now()
	for path, e := range c.server.erasuresByVolume() {
		for _, f := range erasureFigures() {
			ch <- prometheus.MustNewConstMetric(f.desc, prometheus.GaugeValue, f.value(e, now), path)
		}
	}
	for _, ns := range s.node.Index.Namespaces {
		for _, e := range ns.Live {
			for _, f := range epochFigures() {
				ch <- prometheus.MustNewConstMetric(f.desc, f.kind, float64(f.value(e)), ns.Name, strconv.FormatUint(uint64(e.Epoch), 10))
			}
		}
	}
	for name, s := range c.server.rates.snapshot() {
		for _, f := range principalFigures() {
			ch <- prometheus.MustNewConstMetric(f.desc, f.kind, f.value(c.server, name, s), name)
		}
	}
	for _, tn := range s.node.Index.Tenants {
		for _, f := range tenantFigures() {
			ch <- prometheus.MustNewConstMetric(f.desc, f.kind, float64(f.value(tn)), tn.Prefix+"*")
		}
	}
	for _, n := range c.server.data.NICs() {
		for _, f := range nicFigures() {
			ch <- prometheus.MustNewConstMetric(f.desc, f.kind, f.value(n), n.Name)
		}
	}
}
