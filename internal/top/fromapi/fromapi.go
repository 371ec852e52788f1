package fromapi

import (
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/top"
)

// Node converts the status of the node at address. The result has no namespaces.
func Node(address string, s *pb.StatusResponse) top.Node {
	n := top.Node{
		Address: address, Name: s.GetNode(), Version: s.GetVersion(), State: s.GetState(), Reason: s.GetStateReason(),
		Started: time.UnixMilli(s.GetStartUnixMs()), Up: time.Duration(s.GetUptimeUs()) * time.Microsecond,
		CapacityBytes: s.GetCapacityBytes(), UsedBytes: s.GetUsedBytes(),
		Counters: counters(s.GetCounters()), BusyCalls: s.GetBusyCalls(),
		RunningReads: s.GetRunningReads(), WaitingReads: s.GetWaitingReads(), ReadsMax: s.GetRunningReadsLimit(), Reservations: s.GetReservations(),
	}
	for _, v := range s.GetVolumes() {
		n.Volumes = append(n.Volumes, top.Volume{
			Path: v.GetPath(), State: v.GetState(), Reason: v.GetStateReason(), BelowFloor: v.GetBelowFloor(),
			CapacityBytes: v.GetCapacityBytes(), UsedBytes: v.GetUsedBytes(),
			ReadBytes: v.GetReadBytes(), WriteBytes: v.GetWriteBytes(), Failures: v.GetReadFailures() + v.GetWriteFailures(),
			InFlightBytes: v.GetInFlightBytes(), InFlightLimitBytes: v.GetInFlightLimitBytes(),
		})
	}
	for _, nic := range s.GetNics() {
		n.NICs = append(n.NICs, top.NIC{
			Name: nic.GetName(), Address: nic.GetAddress(), Up: nic.GetUp(), Reason: nic.GetReason(),
			SentBytes: nic.GetSentBytes(), ReceivedBytes: nic.GetReceivedBytes(), LinkBits: nic.GetLinkBitsPerSecond(),
		})
	}
	return n
}

// Namespace converts a namespace of one node.
func Namespace(ns *pb.Namespace) top.Namespace {
	n := top.Namespace{
		ID: ns.GetId(), Name: ns.GetName(), Epoch: ns.GetEpoch(), LiveEpochs: len(ns.GetLive()),
		UsedBytes: ns.GetUsedBytes(), QuotaBytes: ns.GetQuotaBytes(), Leases: ns.GetLeases(), Counters: counters(ns.GetCounters()),
	}
	if ms := ns.GetEpochSinceUnixMs(); ms != 0 {
		n.EpochSince = time.UnixMilli(ms)
	}
	if live := ns.GetLive(); len(live) > 0 {
		n.NewestBytes = live[0].GetBytes()
	}
	return n
}

// counters converts counters; nil stays nil.
func counters(c *pb.Counters) *top.Counters {
	if c == nil {
		return nil
	}
	return &top.Counters{
		QueriedTokens: c.GetQueriedTokens(), HitTokens: c.GetHitTokens(), ReadBlocks: c.GetReadBlocks(), ReadBytes: c.GetReadBytes(),
		WrittenBlocks: c.GetWrittenBlocks(), WrittenBytes: c.GetWrittenBytes(), EvictedBlocks: c.GetEvictedBlocks(), EvictedBytes: c.GetEvictedBytes(),
	}
}
