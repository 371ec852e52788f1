package planner

import (
	"sync"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
)

// pods is a network of two pods. Transfers between pods are ten times as slow.
type pods struct {
	mu    sync.Mutex
	pod   map[dualpath.NodeID]string
	last  dualpath.NetworkReport
	under int
}

func (p *pods) Update(r *dualpath.NetworkReport) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last, p.pod = *r, map[dualpath.NodeID]string{}
	for _, at := range r.Places {
		p.pod[at.Node] = at.Pod
	}
}

func (p *pods) Reserve() int { return 0 }

func (p *pods) Choose(r *dualpath.Transfer, candidates []dualpath.Candidate) (index int, seconds float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	index = -1
	for i, c := range candidates {
		took := 10 * float64(r.Tokens)
		if p.pod[r.From] != "" && p.pod[r.From] == p.pod[c.Node] {
			took = float64(r.Tokens)
		}
		if index < 0 || took < seconds {
			index, seconds = i, took
		}
	}
	return index, seconds
}

func (p *pods) Read(_, _ dualpath.NodeID, queue int, rate float64) (fixed, perToken float64) {
	return float64(queue) / rate, 1 / rate
}

func (p *pods) Begin(dualpath.NodeID, dualpath.NodeID) uint8 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.under++
	return 0
}

func (p *pods) End(dualpath.NodeID, uint8) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.under--
}

// TestNetwork: the description of the network reaches the planner with the numbers of the machines,
// also of machines that register later. The request goes to the near group.
func TestNetwork(t *testing.T) {
	net := &pods{}
	h := newHost(t, Options{Planner: dualpath.Options{Network: net}})
	h.service.SetNetwork(Network{
		Bandwidth: [dualpath.Tiers]float64{4, 3, 2, 1}, Congestion: [dualpath.Tiers]float64{3: 0.5}, Measured: h.service.start.Add(time.Second),
		Places: map[string]dualpath.NodePlace{"node-P": {Pod: "a"}, "node-far": {Pod: "b"}, "node-near": {Pod: "a"}, "node-elsewhere": {Pod: "c"}},
	})
	pe, far, near := h.lead("P", pb.Side_SIDE_PREFILL), h.lead("far", pb.Side_SIDE_DECODE), h.lead("near", pb.Side_SIDE_DECODE)
	net.mu.Lock()
	r := net.last
	net.mu.Unlock()
	if len(r.Places) != 3 || r.Bandwidth != [dualpath.Tiers]float64{4, 3, 2, 1} || r.Congestion[3] != 0.5 || r.Measured != time.Second {
		t.Errorf("the planner got %+v", r)
	}
	gw := h.submit("r1")
	// The far group came first and has as few tokens as the near one.
	far.fetch(0)
	near.fetch(0)
	pe.fetch(0)
	pe.want(pb.LeaderAction_KIND_ASSIGN, "r1", "P/0")
	near.want(pb.LeaderAction_KIND_ASSIGN, "r1", "near/0")
	near.want(pb.LeaderAction_KIND_START, "r1", "near/0")
	if u := gw.want(pb.RequestUpdate_KIND_STARTED); u.DecodeEngine != "near/0" {
		t.Errorf("decoded by %s", u.DecodeEngine)
	}
	near.send(finished("r1", pb.Side_SIDE_DECODE))
	gw.want(pb.RequestUpdate_KIND_FINISHED)
	net.mu.Lock()
	defer net.mu.Unlock()
	if net.under != 0 {
		t.Errorf("%d transfers are counted after the request's end", net.under)
	}
}
