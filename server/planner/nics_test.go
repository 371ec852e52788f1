package planner

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
)

// nics reports the compute NICs of one of the group's engines, at a second of the leader's clock, and waits
// until the planner has the report.
func (l *leading) nics(engine string, second float64, nics ...*pb.ComputeNIC) {
	l.Helper()
	l.seq++
	e := &pb.EngineState{Engine: engine, ComputeNics: nics, ComputeMicroseconds: uint64(second * 1e6)}
	l.send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Fetch{Fetch: &pb.FetchWork{Engines: []*pb.EngineState{e}}}})
	// The planner confirms this end after the fetch.
	l.send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Finished{Finished: &pb.RequestFinished{Request: "none", Attempt: l.seq}}})
	for {
		if a := l.next(); a.Kind == pb.LeaderAction_KIND_CONFIRMED && a.Attempt == l.seq {
			return
		}
	}
}

// loads returns the load of each compute NIC as NAME OUT/IN OUTRATE/INRATE, and a rate as "?" if it is
// unknown.
func (h *host) loads() []string {
	h.Helper()
	top, err := h.client.Top(h.ctx, &pb.TopRequest{})
	h.must(err)
	rate := func(r *float64) string {
		if r == nil {
			return "?"
		}
		return fmt.Sprintf("%.0f", *r)
	}
	var out []string
	for _, g := range top.Groups {
		for _, e := range g.Engines {
			for _, n := range e.ComputeNics {
				out = append(out, fmt.Sprintf("%s %s %d/%d %s/%s", e.Engine, n.Counters.Nic, n.Counters.BytesOut, n.Counters.BytesIn, rate(n.OutBytesPerSecond), rate(n.InBytesPerSecond)))
			}
		}
	}
	return out
}

func (h *host) wantLoads(want ...string) {
	h.Helper()
	if got := h.loads(); strings.Join(got, "\n") != strings.Join(want, "\n") {
		h.Errorf("the compute NICs are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func nic(name string, out, in uint64) *pb.ComputeNIC {
	return &pb.ComputeNIC{Nic: name, BytesOut: out, BytesIn: in}
}

// TestComputeNICs: the planner has the last counters of each compute NIC, and its rates between the
// last two reports by the leader's clock. It has none of older leaders, and of engines that have left.
func TestComputeNICs(t *testing.T) {
	reg := prometheus.NewRegistry()
	h := newHost(t, Options{Registry: reg})
	p := h.leadEngines(&pb.RegisterGroup{Group: "P", Role: pb.Side_SIDE_PREFILL, Confirm: true}, "P/0", "P/1")
	d := h.leadEngines(&pb.RegisterGroup{Group: "D", Role: pb.Side_SIDE_DECODE, Confirm: true}, "D/0", "D/1")
	p.fetch(0) // as a leader of an earlier version
	h.wantLoads()
	p.nics("P/0", 10, nic("eth1", 1000, 50), nic("eth0", 5, 0))
	h.wantLoads("P/0 eth0 5/0 ?/?", "P/0 eth1 1000/50 ?/?")
	p.nics("P/0", 12.5, nic("eth0", 5, 0), nic("eth1", 6000, 50))
	d.nics("D/1", 1, nic("mlx5_0", 0, 100))
	d.nics("D/1", 2, nic("mlx5_0", 1000, 5100))
	p.fetch(0) // a fetch without counters keeps the last ones
	h.wantLoads("P/0 eth0 5/0 0/0", "P/0 eth1 6000/50 2000/0", "D/1 mlx5_0 1000/5100 1000/5000")
	top, err := h.client.Top(h.ctx, &pb.TopRequest{})
	h.must(err)
	if out, in := top.ComputeOutMostOverMean, top.ComputeInMostOverMean; out != 2 || in != 3 { // 2000 / (3000 / 3), 5000 / (5000 / 3)
		t.Errorf("the highest rates are %v times the mean sent, %v received; want 2, 3", out, in)
	}
	metrics := `# HELP penstock_planner_compute_nic_bytes_total Payload bytes of a compute NIC of an engine, as its leader reported them last, by direction (out: sent). They count since the engine's start.
# TYPE penstock_planner_compute_nic_bytes_total counter
penstock_planner_compute_nic_bytes_total{direction="in",engine="D/1",nic="mlx5_0"} 5100
penstock_planner_compute_nic_bytes_total{direction="in",engine="P/0",nic="eth0"} 0
penstock_planner_compute_nic_bytes_total{direction="in",engine="P/0",nic="eth1"} 50
penstock_planner_compute_nic_bytes_total{direction="out",engine="D/1",nic="mlx5_0"} 1000
penstock_planner_compute_nic_bytes_total{direction="out",engine="P/0",nic="eth0"} 5
penstock_planner_compute_nic_bytes_total{direction="out",engine="P/0",nic="eth1"} 6000
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(metrics), "penstock_planner_compute_nic_bytes_total"); err != nil {
		t.Error(err)
	}
	// The engine starts again: its counters and its leader's clock begin again.
	d.nics("D/1", 3, nic("mlx5_0", 7, 8))
	d.nics("P/0", 3, nic("other", 7, 8)) // not an engine of the group
	h.wantLoads("P/0 eth0 5/0 0/0", "P/0 eth1 6000/50 2000/0", "D/1 mlx5_0 7/8 ?/?")
	p.nics("P/0", 1, nic("eth1", 7000, 60))
	h.wantLoads("P/0 eth1 7000/60 ?/?", "D/1 mlx5_0 7/8 ?/?")
	// The group registers without the engine.
	p.end()
	p = h.leadEngines(&pb.RegisterGroup{Group: "P", Role: pb.Side_SIDE_PREFILL, Confirm: true}, "P/1")
	p.nics("P/0", 3, nic("eth1", 7, 8))
	h.wantLoads("D/1 mlx5_0 7/8 ?/?")
	// The group leaves.
	h.must(d.stream.CloseSend())
	for len(h.loads()) > 0 {
	}
	h.service.mu.Lock()
	h.service.expireNICsLocked()
	if n := len(h.service.nics); n != 1 {
		t.Errorf("the planner keeps the compute NICs of %d groups; want 1", n)
	}
	h.service.mu.Unlock()
}

// TestComputeNICsOfNewLeader: the rates are unknown until the second report of a leader that has not registered
// before, because its clock is another one. They stay known when a leader registers again.
func TestComputeNICsOfNewLeader(t *testing.T) {
	h := newHost(t, Options{Registry: prometheus.NewRegistry()})
	r := &pb.RegisterGroup{Group: "P", Role: pb.Side_SIDE_PREFILL, Confirm: true}
	p := h.leadEngines(r, "P/0")
	p.nics("P/0", 1, nic("eth1", 1000, 50))
	p.nics("P/0", 2, nic("eth1", 2000, 50))
	h.wantLoads("P/0 eth1 2000/50 1000/0")
	r.Planner, r.Engines = h.service.number, nil
	p = h.leadEngines(r, "P/0")
	h.wantLoads("P/0 eth1 2000/50 1000/0")
	p.nics("P/0", 4, nic("eth1", 6000, 50))
	h.wantLoads("P/0 eth1 6000/50 2000/0")
	r.Planner, r.Engines = 0, nil
	p = h.leadEngines(r, "P/0")
	h.wantLoads("P/0 eth1 6000/50 ?/?")
	p.nics("P/0", 5, nic("eth1", 7000, 50))
	h.wantLoads("P/0 eth1 7000/50 ?/?")
	p.nics("P/0", 7205, nic("eth1", 79000, 50)) // two hours later
	h.wantLoads("P/0 eth1 79000/50 10/0")
}

// TestComputeNICsBounded: of one engine the planner keeps at most maxEngineNICs NICs, without those of
// too long names. It adds the counters of a NIC that is listed twice.
func TestComputeNICsBounded(t *testing.T) {
	h := newHost(t, Options{Registry: prometheus.NewRegistry()})
	p := h.leadEngines(&pb.RegisterGroup{Group: "P", Role: pb.Side_SIDE_PREFILL, Confirm: true}, "P/0")
	many := []*pb.ComputeNIC{nic(strings.Repeat("n", maxNameBytes+1), 1, 1)}
	for i := range 3 * maxEngineNICs {
		many = append(many, nic(fmt.Sprintf("n%03d", i), 1, 1))
	}
	p.nics("P/0", 1, append(many, nic("n003", 10, 20))...)
	got := h.loads()
	if len(got) != maxEngineNICs || got[3] != "P/0 n003 11/21 ?/?" {
		t.Errorf("%d NICs are kept, of which the fourth is %q", len(got), got[min(3, len(got)-1)])
	}
}

// TestComputeNICsNaive compares the rates and their imbalance with a naive computation, and the sums
// with the bytes that the random NICs have moved.
func TestComputeNICsNaive(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 9))
	s := &Service{nics: map[dualpath.GroupID]map[dualpath.EngineID]*engineNICs{}}
	engines := map[dualpath.EngineID]place{}
	for e := range dualpath.EngineID(8) {
		engines[e] = place{}
	}
	s.keepNICsLocked(1, engines, false)
	moved, total := map[string][2]uint64{}, [2]uint64{}
	for range 200 {
		e := dualpath.EngineID(rng.IntN(8))
		n := s.nics[1][e]
		before, at, reported := n.last, n.at, n.at+1+rng.Uint64N(5e6)
		var report []*pb.ComputeNIC
		for _, i := range rng.Perm(4) {
			name, out, in := fmt.Sprint(i), rng.Uint64N(1e9), rng.Uint64N(1e9)
			m := moved[fmt.Sprint(e, name)]
			m[0], m[1] = m[0]+out, m[1]+in
			moved[fmt.Sprint(e, name)] = m
			total[0], total[1] = total[0]+out, total[1]+in
			report = append(report, nic(name, m[0], m[1]))
		}
		n.report(report, reported)
		for _, l := range n.loads() {
			var want *float64
			for _, b := range before {
				if b.Nic == l.Counters.Nic {
					seconds := (time.Duration(reported-at) * time.Microsecond).Seconds()
					rate := float64(moved[fmt.Sprint(e, b.Nic)][0]-b.BytesOut) / seconds
					want = &rate
				}
			}
			if (want == nil) != (l.OutBytesPerSecond == nil) || want != nil && *want != *l.OutBytesPerSecond {
				t.Fatalf("NIC %s of engine %d: rate %v; want %v", l.Counters.Nic, e, l.OutBytesPerSecond, want)
			}
		}
	}
	var shown [2]uint64
	var rates []float64
	var sent imbalance
	for _, n := range s.nics[1] {
		for _, l := range n.loads() {
			shown[0], shown[1] = shown[0]+l.Counters.BytesOut, shown[1]+l.Counters.BytesIn
			sent.add(l.OutBytesPerSecond)
			if l.OutBytesPerSecond != nil {
				rates = append(rates, *l.OutBytesPerSecond)
			}
		}
	}
	if shown != total {
		t.Errorf("the sums are %d; %d bytes were moved", shown, total)
	}
	sum, most := 0.0, 0.0
	for _, r := range rates {
		sum, most = sum+r, max(most, r)
	}
	want := most / (sum / float64(len(rates)))
	if got := sent.mostOverMean(); got < want*(1-1e-9) || got > want*(1+1e-9) {
		t.Errorf("the imbalance is %v, want %v", got, want)
	}
}
