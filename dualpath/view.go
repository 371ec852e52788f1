package dualpath

import (
	"fmt"
	"time"
)

// GroupView is the planner's state of one group.
type GroupView struct {
	Group GroupID
	Role  Role
	// Queued is the number of requests in a decode group's queue. Total is the number of tokens of
	// the requests in that queue and on the group's engines.
	Queued, Total int
	// Silent is the time since the group's last Fetch.
	Silent  time.Duration
	Engines []EngineView
	// Leaving is the role to which the group is changing; 0: none. Ordered is set if the order to
	// change has been sent to the group's leader.
	Leaving Role
	Ordered bool
	// Nodes are the machines of the engines, without duplicates.
	Nodes []NodeView
}

// EngineView is the state of one engine: its last report plus later assignments.
type EngineView struct {
	Engine                    EngineID
	Node                      NodeID
	Tokens, Requests, HBMFree int
	// HBMTokens is the size of the engine's device memory in tokens; 0: the engine's leader
	// reported no size.
	HBMTokens int
	// BufferFree is the free part of the engine's buffer in bytes; also 0 if the engine's leader
	// reported no size.
	BufferFree int
}

// NodeView is the state of the storage reads of one machine. ReadQueue is in tokens, Rate in tokens
// per second. Assigned is the number of tokens assigned to the machine since the planner was made.
type NodeView struct {
	Node      NodeID
	ReadQueue int
	Rate      float64
	Assigned  uint64
}

// Has reports whether a group is registered. A group that has left, or has sent no Fetch for
// Options.GroupTimeout, is no longer registered.
func (p *Planner) Has(g GroupID) bool { return p.groups[g] != nil }

// GroupOf returns the registered group of an engine; ok is false if there is none.
func (p *Planner) GroupOf(e EngineID) (g GroupID, ok bool) {
	if en := p.engines[e]; en != nil {
		return en.group.id, true
	}
	return 0, false
}

// View returns all groups, by ID.
func (p *Planner) View() []GroupView {
	views := make([]GroupView, 0, len(p.order))
	for _, g := range p.order {
		v := GroupView{Group: g.id, Role: g.role, Total: g.total, Silent: p.now - g.heard, Leaving: g.leaving.to, Ordered: g.leaving.ordered}
		if g.private != nil {
			v.Queued = g.private.Len()
		}
		seen := make(map[NodeID]bool, len(g.engines))
		for _, en := range g.engines {
			v.Engines = append(v.Engines, en.view())
			if !seen[en.node.id] {
				seen[en.node.id] = true
				v.Nodes = append(v.Nodes, NodeView{en.node.id, en.node.queue, en.node.rate, en.node.total})
			}
		}
		views = append(views, v)
	}
	return views
}

// view returns the planner's state of an engine.
func (en *engine) view() EngineView {
	v := EngineView{Engine: en.id, Node: en.node.id, Tokens: en.tok, Requests: en.seq, HBMTokens: en.spec.HBMTokens}
	if en.spec.HBMTokens != 0 {
		v.HBMFree = en.left.hbm + en.spec.HBMTokens - en.size.hbm
	}
	if en.spec.Buffer.Bytes != 0 {
		v.BufferFree = en.left.buffer
	}
	return v
}

// String draws the planner's state.
func (p *Planner) String() string {
	var b []byte
	for _, g := range p.View() {
		b = fmt.Appendf(b, "%v group %d", g.Role, g.Group)
		if g.Role == Decode {
			b = fmt.Appendf(b, ", %d queued, total %d", g.Queued, g.Total)
		}
		b = append(b, '\n')
		for _, n := range g.Nodes {
			b = fmt.Appendf(b, "  node %d: read queue %d at %.0f tokens/s\n", n.Node, n.ReadQueue, n.Rate)
			for _, en := range g.Engines {
				if en.Node != n.Node {
					continue
				}
				b = fmt.Appendf(b, "    engine %d: tok %d, seq %d", en.Engine, en.Tokens, en.Requests)
				if spec := &p.engines[en.Engine].spec; spec.HBMTokens != 0 {
					b = fmt.Appendf(b, ", hbm %d", en.HBMFree)
				}
				if spec := &p.engines[en.Engine].spec; spec.Buffer.Bytes != 0 {
					b = fmt.Appendf(b, ", buffer %d", en.BufferFree)
				}
				b = append(b, '\n')
			}
		}
	}
	return string(fmt.Appendf(b, "waiting %d, loading %d\n", p.queued, p.loading.Len()))
}
