package planner

import (
	"sync"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
)

// pods is a network of two pods: another pod is ten times as far.
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

func (p *pods) Decode(from, to dualpath.NodeID, tokens, _ int) float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pod[from] != "" && p.pod[from] == p.pod[to] {
		return float64(tokens)
	}
	return 10 * float64(tokens)
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

// TestNetwork: what the operator says reaches the planner with its numbers for
// machines, of those that come later too, and the request goes to the near group.
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
		t.Errorf("the planner was told %+v", r)
	}
	gw := h.submit("r1")
	pe.fetch(0)
	a := pe.want(pb.LeaderAction_KIND_ASSIGN, "r1", "P/0")
	// The far group asks first, and with as few tokens as the near one.
	far.fetch(a.Seq)
	near.fetch(a.Seq)
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
