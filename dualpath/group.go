package dualpath

import (
	"cmp"
	"container/list"
	"slices"
	"time"
)

// engine is one GPU.
type engine struct {
	id    EngineID
	group *group
	node  *node

	spec EngineSpec
	// size is the engine's total memory, left its free memory. tok is the number of tokens of the
	// engine's unfinished requests, seq the number of these requests.
	size, left room
	tok, seq   int
	// prefilling is the number of requests that were started on a prefill engine and are not
	// prefilled yet; prefillWork is the sum of their work. begun is the start of the engine's
	// current work: the end of its last prefill, or the time at which it became busy.
	prefilling  int
	prefillWork float64
	begun       time.Duration
	// strikes counts failures since the engine last served a request. Until avoidUntil, requests
	// avoid the engine (avoid.go).
	strikes    int
	avoidUntil time.Duration
	// since is the assigned work that the group's last report does not include.
	since []assigned
}

// assigned is the work of one action that the group's reports do not include yet. seq is the
// action's Seq.
type assigned struct {
	seq              uint64
	tokens, requests int
	room             room
}

// node is one machine. All storage NICs of a machine count as one NIC with one reading queue.
type node struct {
	id    NodeID
	queue int
	rate  float64
	total uint64 // tokens assigned since the planner was made
	since []assigned
	// engines counts the registered engines. A node without engines is not used for reads.
	engines int
}

// group is a set of engines that fetch work together.
type group struct {
	id      GroupID
	role    Role
	engines []*engine
	heard   time.Duration
	// returns and seen are the fields Returns and Seen of the group's GroupUp.
	returns bool
	seen    uint64
	// private is the queue of a decode group: a list of *request in the order of routing. total is
	// the number of tokens of the requests in that queue and on the group's engines.
	private *list.List
	total   int
	// reservedFor is the request for which a decode group keeps its free memory, or nil. full: no
	// engine of the group had room for that request at the last attempt. closed are the lanes
	// (fair.go) that wait for the end of the reservation.
	reservedFor *request
	full        bool
	closed      []*lane
	// keptFor is the request for which a prefill group keeps its free memory, or nil.
	keptFor *request
	// z and fitting are the last results of threshold, computed in the Step with number zStep.
	z       float64
	fitting int
	zStep   uint64
	// least is the number of unfinished tokens of the least loaded engine of a prefill group, after
	// the group's last Fetch; noEngine if no engine takes a request.
	least int
	// leaving is the group's change of role that is in progress, if any.
	leaving leaving
	// totalAt is the group's index in Planner.leastTotal.
	totalAt int
}

// size is the size of the engine's device memory and buffer.
func (s *EngineSpec) size() room {
	r := room{s.HBMTokens, s.Buffer.Bytes}
	if r.hbm == 0 {
		r.hbm = unlimited
	}
	if r.buffer == 0 {
		r.buffer = unlimited
	}
	return r
}

// groupUp registers a group and the requests that it holds. Requests that a returning group
// still holds continue. Its other requests are planned again.
func (p *Planner) groupUp(e *GroupUp) {
	p.seq = max(p.seq, e.Seen)
	g := &group{id: e.Group, role: e.Role, heard: p.now, returns: e.Returns, seen: e.Seen, least: noEngine}
	fresh := make(map[EngineID]*engine, len(e.Engines))
	for _, s := range e.Engines {
		n := p.nodes[s.Node]
		if n == nil {
			n = &node{id: s.Node, rate: p.opts.ReadRate}
			p.nodes[s.Node] = n
		}
		n.engines++
		n.since = nil // the group's first report will include every action that reached the group
		en := &engine{id: s.Engine, group: g, node: n, spec: s, size: s.size()}
		if e.Role == Decode && s.HBMTokens != 0 {
			en.size.hbm = max(en.size.hbm-p.reserve, 0)
		}
		en.left = en.size
		fresh[s.Engine] = en
		g.engines = append(g.engines, en)
	}
	for i := range e.Holding {
		h := &e.Holding[i]
		r, en := p.requests[h.Request.ID], fresh[h.Engine]
		if r == nil || en == nil || (h.Ended && h.Attempt != r.attempt) {
			continue
		}
		if old := r.engineOf(g.role); old != nil && old.id == h.Engine && old.group.id == g.id && old.group.role == g.role {
			r.setEngine(g.role, en)
			if g.role == Prefill {
				p.movePrefill(r)
			}
		}
	}
	old := p.groups[e.Group]
	p.returning(g, old, e)
	p.replace(old)
	for _, s := range e.Engines {
		if other := p.engines[s.Engine]; other != nil {
			p.replace(other.group)
		}
	}
	for _, en := range g.engines {
		p.engines[en.id] = en
	}
	p.groups[g.id] = g
	at, _ := slices.BinarySearchFunc(p.order, g.id, func(a *group, id GroupID) int { return cmp.Compare(a.id, id) })
	p.order = slices.Insert(p.order, at, g)
	if g.role == Decode {
		g.private = list.New()
		if !g.switching() {
			p.leastTotal.put(g)
			p.retryAll()
		}
	}
	for i := range e.Holding {
		p.hold(g, &e.Holding[i], e.Again)
	}
	p.reconsider()
	p.complete()
}

// groupDown deletes a group and plans its requests again.
func (p *Planner) groupDown(g *group) {
	if g != nil {
		p.remove(g)
		p.reconsider()
		p.replanAll(g)
	}
}

// replace is groupDown for a group in whose place another one registers. The caller calls reconsider
// after that, because until then the planner lacks the group's role.
func (p *Planner) replace(g *group) {
	if g != nil {
		p.remove(g)
		p.replanAll(g)
	}
}

// remove deletes a group.
func (p *Planner) remove(g *group) {
	delete(p.groups, g.id)
	if at := slices.Index(p.order, g); at >= 0 {
		p.order = slices.Delete(p.order, at, at+1)
	}
	p.leastTotal.remove(g)
	for _, en := range g.engines {
		delete(p.engines, en.id)
		en.node.engines--
		if en.node.engines == 0 {
			delete(p.nodes, en.node.id)
		}
	}
	if g.private != nil {
		p.unroute(g)
	}
	if g.leaving.to != 0 {
		p.endSwitch(g.id, g.leaving.to, GroupLost)
	}
}

// replanAll plans the requests of a group again that was removed.
func (p *Planner) replanAll(g *group) {
	var lost []*request
	for _, r := range p.requests {
		if (r.pe != nil && r.pe.group == g) || (r.de != nil && r.de.group == g) {
			lost = append(lost, r)
		}
	}
	youngestFirst(lost)
	for _, r := range lost {
		p.replan(r, g)
	}
}

// replan handles a request of a group that is gone: it returns the request to the queue. If the
// group only prefilled the request and prefill has ended, the request continues instead. After a
// restart of the planner that requires that the decode engine's group has registered with it.
func (p *Planner) replan(r *request, lost *group) {
	if r.pe != nil && r.pe.group == lost && r.prefilled && r.de != nil {
		r.pe = nil // prefill has ended, so the request does not need it
		return
	}
	r.why.note(p.now, "planned anew: group %d is gone", int(lost.id))
	for _, role := range [...]Role{Prefill, Decode} {
		if en := r.engineOf(role); en != nil && en.group == lost {
			r.setEngine(role, nil)
		}
	}
	p.requeue(r, GroupLost)
}

// fetch handles a group's report. A prefill group is then given requests, whose decode engines are
// chosen from the last reports of the decode groups.
func (p *Planner) fetch(e *Fetch) {
	g := p.groups[e.Group]
	if g == nil {
		return
	}
	g.heard = p.now
	for i := range e.Nodes {
		p.reportNode(&e.Nodes[i], e.Seen)
	}
	for i := range e.Engines {
		rep := &e.Engines[i]
		en := p.engines[rep.Engine]
		if en == nil || en.group != g {
			continue
		}
		en.since = unseen(en.since, e.Seen)
		g.total -= en.tok
		en.tok, en.seq, en.left = max(rep.Tokens, 0), max(rep.Requests, 0), en.size
		if en.spec.HBMTokens != 0 {
			en.left.hbm = max(rep.HBMFree-(en.spec.HBMTokens-en.size.hbm), 0)
		}
		if en.spec.Buffer.Bytes != 0 {
			en.left.buffer = max(rep.BufferFree, 0)
		}
		g.total += en.tok
		for i := range en.since {
			p.take(en, en.since[i])
		}
	}
	switch {
	case g.switching():
	case g.role == Decode:
		p.leastTotal.put(g)
		if p.retry(g); g.private.Len() == 0 {
			p.retryAll()
		}
	default:
		p.expire()
		p.grant(g)
	}
}

// reportNode handles a node's report.
func (p *Planner) reportNode(rep *NodeReport, seen uint64) {
	n := p.nodes[rep.Node]
	if n == nil {
		return
	}
	n.since = unseen(n.since, seen)
	n.queue = max(rep.ReadQueue, 0)
	for _, a := range n.since {
		n.queue += a.tokens
	}
	if rep.Rate > 0 {
		n.rate = rep.Rate
	}
}

// unseen removes from list the work of the actions up to number seen, which the group's report
// includes already.
func unseen(list []assigned, seen uint64) []assigned {
	i := 0
	for i < len(list) && list[i].seq <= seen {
		i++
	}
	return slices.Delete(list, 0, i)
}

// give adds the work of an action to an engine's load, until the next report of the engine's group
// that includes this work.
func (p *Planner) give(en *engine, a assigned) {
	p.take(en, a)
	en.since = append(en.since, a)
}

// take adds assigned work to the engine's load: its tokens, its requests and the memory they take.
func (p *Planner) take(en *engine, a assigned) {
	en.tok += a.tokens
	en.seq += a.requests
	en.left = en.left.minus(a.room)
	g := en.group
	g.total += a.tokens
	if g.totalAt != 0 {
		p.leastTotal.put(g)
	}
}
