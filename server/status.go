package server

import (
	"context"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/trie"
)

func (s *adminService) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	return s.status(), nil
}

// status returns the current state of the node.
func (s *Server) status() *pb.StatusResponse {
	st := s.node.Stats()
	recovered := s.node.Recovered()
	m := &pb.StatusResponse{
		Node:            s.opts.Node,
		Version:         s.opts.Version,
		StartUnixMs:     s.started.UnixMilli(),
		CapacityBytes:   s.opts.CapacityBytes - st.Store.LostBytes,
		UsedBytes:       st.Store.Slots.UsedBytes() + st.Index.DiskBytes,
		Blocks:          st.Index.Pieces,
		Namespaces:      int64(len(st.Index.Namespaces)) + st.Index.Announced,
		Leases:          st.Index.Leases,
		Durability:      s.opts.Durability,
		EvictionPolicy:  st.Index.Policy,
		ArenaBytes:      st.Arena.SizeBytes,
		ArenaUsedBytes:  st.Arena.UsedBytes,
		ArenaPages:      string(st.Arena.Kind),
		IndexDiskBytes:  st.Index.DiskBytes,
		RecoverySeconds: recovered.Took.Seconds(),
		RecoveredBlocks: recovered.Blocks,
		CorruptBlocks:   st.Store.Counters.ReadCorrupt + st.Store.Counters.ScrubCorrupt,
		LastEvent:       s.node.Events().Last(),
	}
	m.State, m.StateReason = s.node.WriteState()
	m.StateReason = clip(m.StateReason)
	for _, p := range s.memoryParts() {
		m.MemoryBudgetBytes += p.Bytes
		m.MemoryParts = append(m.MemoryParts, &pb.MemoryPart{Name: p.Name, Bytes: p.Bytes})
	}
	if mem, err := sys.ReadMemory(); err == nil {
		m.RssBytes = mem.RSSBytes
	}
	m.Volumes = s.volumes()
	for _, k := range s.node.KeyUse() {
		m.Keys = append(m.Keys, &pb.KeyStatus{Id: k.ID, Blocks: k.Slots, Bytes: k.Bytes, Newest: k.Newest})
	}
	m.EpochKeys = s.epochKeys()
	for _, tn := range st.Index.Tenants {
		m.Tenants = append(m.Tenants, tenantProto(tn))
	}
	m.Io, m.IoReason = common(m.Volumes)
	info := s.data.Info()
	m.DataProvider, m.DataDetail = info.Provider, info.Detail
	for _, n := range s.data.NICs() {
		nic := &pb.NICStatus{Name: n.Name, Address: string(n.Addr), Up: n.Up, Reason: n.Reason, SentBytes: n.BytesOut, ReceivedBytes: n.BytesIn}
		if s.opts.LinkRate != nil {
			nic.LinkBitsPerSecond = s.opts.LinkRate(n)
		}
		m.Nics = append(m.Nics, nic)
	}
	m.RunningReads, m.WaitingReads, m.RunningReadsLimit = int64(st.RunningReads), int64(st.WaitingReads), int64(st.ReadsMax)
	m.Reservations = int64(st.Reservations)
	m.BusyCalls = s.opts.Metrics.BusyCalls()
	m.Counters = countersProto(s.opts.Metrics, (*metrics.NamespaceCounter).Total)
	if s.opts.RolesDocument != nil {
		state := s.opts.RolesState()
		m.Roles = &pb.RolesStatus{Principals: int64(state.Policy.Principals()), Revision: state.Revision, Problem: clip(state.Problem)}
	}
	m.UptimeUs = s.opts.Now().Sub(s.started).Microseconds()
	return m
}

// epochKeys returns the state of the secrets of epochs, nil if the node has none.
func (s *Server) epochKeys() *pb.EpochKeysStatus {
	k := s.node.EpochKeys()
	if !k.On && len(k.Erasures) == 0 {
		return nil
	}
	return &pb.EpochKeysStatus{On: k.On, BlocksWithout: k.Without, BytesWithout: k.WithoutBytes, Pending: s.pendingErasures(k.Erasures)}
}

// PendingErasures returns the erasures of the secrets of epochs that are not complete on the volumes of this
// node, sorted by namespace id.
func (s *Server) PendingErasures() []*pb.PendingErasure {
	return s.pendingErasures(s.node.Erasures())
}

func (s *Server) pendingErasures(erasures []blockstore.Erasure) (all []*pb.PendingErasure) {
	if len(erasures) == 0 {
		return nil
	}
	names := make(map[kv.NamespaceID]string)
	for _, ns := range s.node.Namespaces() {
		names[ns.ID] = ns.Name
	}
	for _, e := range erasures {
		all = append(all, &pb.PendingErasure{
			NamespaceId: uint32(e.Namespace), Namespace: names[e.Namespace], Epoch: uint64(e.UpTo), Volumes: e.Volumes, SinceUnixMs: e.Since.UnixMilli(),
		})
	}
	return all
}

// volumeErasures are the erasures that are not complete on one volume: the number of namespaces, and the
// time at which the first of their epochs ended.
type volumeErasures struct {
	namespaces int
	since      time.Time
}

// addErasure adds the erasures of one namespace, which are not complete on the volumes.
func addErasure(all map[string]volumeErasures, volumes []string, since time.Time) {
	for _, path := range volumes {
		v := all[path]
		if v.namespaces++; v.namespaces == 1 || since.Before(v.since) {
			v.since = since
		}
		all[path] = v
	}
}

// erasuresByVolume returns the erasures that are not complete, by the path of the volume. The map has all volumes
// of the node and of the nodes that it has adopted.
func (s *Server) erasuresByVolume() map[string]volumeErasures {
	all := make(map[string]volumeErasures)
	for _, v := range s.node.Volumes() {
		all[v.Path] = volumeErasures{}
	}
	pending := s.PendingErasures()
	if s.opts.Adopter != nil {
		for _, a := range s.opts.Adopter.Adopted() {
			for _, path := range a.GetPaths() {
				if _, ok := all[path]; !ok {
					all[path] = volumeErasures{}
				}
			}
			pending = append(pending, a.GetPending()...)
		}
	}
	for _, e := range pending {
		addErasure(all, e.GetVolumes(), time.UnixMilli(e.GetSinceUnixMs()))
	}
	return all
}

// ListTenants returns the tenants of which the caller may see all namespaces.
func (s *adminService) ListTenants(ctx context.Context, _ *pb.ListTenantsRequest) (*pb.ListTenantsResponse, error) {
	resp := &pb.ListTenantsResponse{}
	for _, tn := range s.node.Tenants() {
		if seesAll(ctx, access.Any, tn.Prefix) {
			resp.Tenants = append(resp.Tenants, tenantProto(tn))
		}
	}
	return resp, nil
}

func tenantProto(tn trie.TenantStats) *pb.TenantStatus {
	return &pb.TenantStatus{
		Namespaces: tn.Prefix + "*", QuotaBytes: tn.Bytes, UsedBytes: tn.UsedBytes, NamespaceCount: tn.Namespaces,
		EvictedBlocks: tn.EvictedPieces, EvictedBytes: tn.EvictedBytes, RefusedBlocks: tn.RefusedPieces,
	}
}

// countersProto returns the counters of a node or of a namespace. The function of reads one counter
// from its metric.
func countersProto(m *metrics.Node, of func(*metrics.NamespaceCounter) uint64) *pb.Counters {
	return &pb.Counters{
		QueriedTokens: of(m.QueriedTokens), HitTokens: of(m.HitTokens),
		ReadBlocks: of(m.ReadBlocks), ReadBytes: of(m.ReadBytes),
		WrittenBlocks: of(m.WrittenBlocks), WrittenBytes: of(m.WrittenBytes),
		EvictedBlocks: of(m.EvictedBlocks), EvictedBytes: of(m.EvictedBytes),
	}
}

// memoryParts returns the present parts of the memory budget.
func (s *Server) memoryParts() []MemoryPart {
	if s.opts.MemoryBudget == nil {
		return nil
	}
	return s.opts.MemoryBudget()
}

// describe fills in the fields of m that describe the device.
func (v Volume) describe(m *pb.VolumeStatus) {
	info, stats := v.Device.Info(), v.Device.Stats()
	m.Io, m.IoReason, m.IoDetail = info.Backend, v.Reason, info.Detail
	m.ReadBytes, m.WriteBytes = stats.ReadBytes, stats.WriteBytes
	m.ReadFailures, m.WriteFailures = stats.ReadFailures, stats.WriteFailures
	m.InFlightBytes, m.InFlightLimitBytes = stats.InFlightBytes, stats.InFlightLimitBytes
}

// common returns the I/O backend that all present volumes have, with the reason for its choice, or
// "mixed" if they have different backends.
func common(volumes []*pb.VolumeStatus) (io, reason string) {
	for _, v := range volumes {
		if v.GetIo() == "" {
			continue
		}
		if io != "" && v.GetIo() != io {
			return "mixed", "see the volumes"
		}
		io, reason = v.GetIo(), v.GetIoReason()
	}
	return io, reason
}
