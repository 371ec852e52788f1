package planner

import (
	"cmp"
	"math"
	"slices"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
)

// maxEngineNICs is the number of compute NICs of an engine that the planner keeps.
const maxEngineNICs = 64

// engineNICs has the last two reports about the compute NICs of an engine. The leader's clock times
// them: after a pause of the planner it receives several reports at once.
type engineNICs struct {
	last, before []*pb.ComputeNIC // by name
	// interval is the time between the two reports; 0: the rates are unknown.
	interval time.Duration
	at       uint64 // microseconds of last; math.MaxUint64: of the clock of an earlier leader
}

// keepNICsLocked keeps the compute NICs of the engines that a group registers, and of no others. again
// is set if the leader has registered before: another leader has another clock.
func (s *Service) keepNICsLocked(g dualpath.GroupID, engines map[dualpath.EngineID]place, again bool) {
	kept := make(map[dualpath.EngineID]*engineNICs, len(engines))
	for id := range engines {
		kept[id] = cmp.Or(s.nics[g][id], &engineNICs{})
		if !again {
			kept[id].at, kept[id].interval = math.MaxUint64, 0
		}
	}
	s.nics[g] = kept
}

// expireNICsLocked removes the compute NICs of the groups that are not registered.
func (s *Service) expireNICsLocked() {
	for g := range s.nics {
		if !s.planner.Has(g) {
			delete(s.nics, g)
		}
	}
}

// nicsLocked records the compute NICs in a fetch of a group. It leaves out engines of other groups.
func (s *Service) nicsLocked(g dualpath.GroupID, f *pb.FetchWork) {
	for _, e := range f.Engines {
		if n := s.nics[g][dualpath.EngineID(s.engines.ids[e.Engine])]; n != nil && len(e.ComputeNics) > 0 {
			n.report(e.ComputeNics, e.ComputeMicroseconds)
		}
	}
}

// report records the counters of all NICs at a time of the leader's clock.
func (n *engineNICs) report(nics []*pb.ComputeNIC, at uint64) {
	n.interval = 0
	if n.last != nil && at > n.at {
		n.interval = time.Duration(min(at-n.at, math.MaxInt64/uint64(time.Microsecond))) * time.Microsecond
	}
	n.before, n.at, n.last = n.last, at, nil
	for _, nic := range nics {
		if len(nic.GetNic()) > maxNameBytes {
			continue
		}
		i, found := slices.BinarySearchFunc(n.last, nic.GetNic(), byName)
		switch {
		case found: // the NIC is listed by several processes of the engine
			n.last[i].BytesOut += nic.BytesOut
			n.last[i].BytesIn += nic.BytesIn
		case len(n.last) < maxEngineNICs:
			n.last = slices.Insert(n.last, i, &pb.ComputeNIC{Nic: nic.GetNic(), BytesOut: nic.GetBytesOut(), BytesIn: nic.GetBytesIn()})
		}
	}
}

func byName(nic *pb.ComputeNIC, name string) int { return cmp.Compare(nic.Nic, name) }

// loads returns the load of each NIC, by name.
func (n *engineNICs) loads() []*pb.TopResponse_NIC {
	if n == nil {
		return nil
	}
	out := make([]*pb.TopResponse_NIC, 0, len(n.last))
	for _, nic := range n.last {
		l := &pb.TopResponse_NIC{Counters: nic}
		i, found := slices.BinarySearchFunc(n.before, nic.Nic, byName)
		// A smaller counter is that of an engine that has started again.
		if found && n.interval > 0 && nic.BytesOut >= n.before[i].BytesOut && nic.BytesIn >= n.before[i].BytesIn {
			sent, received := float64(nic.BytesOut-n.before[i].BytesOut)/n.interval.Seconds(), float64(nic.BytesIn-n.before[i].BytesIn)/n.interval.Seconds()
			l.OutBytesPerSecond, l.InBytesPerSecond = &sent, &received
		}
		out = append(out, l)
	}
	return out
}

// imbalance is the sum, the highest and the number of rates.
type imbalance struct{ sum, most, n float64 }

func (b *imbalance) add(rate *float64) {
	if rate != nil {
		b.sum, b.most, b.n = b.sum+*rate, max(b.most, *rate), b.n+1
	}
}

// mostOverMean returns the highest rate divided by the mean, or 0 if all rates are 0.
func (b *imbalance) mostOverMean() float64 {
	if b.sum == 0 {
		return 0
	}
	return b.most * b.n / b.sum
}
