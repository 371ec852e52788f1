package dualpath

import (
	"cmp"
	"math"
	"slices"
)

// Waiting requests are ordered by priority, then fairly among tenants, then by age.
//
// Each tenant of a priority has a counter of the work that it was granted, divided by its weight.
// The tenant with the lowest counter is next. This is start-time fair queueing (Goyal, Vin, Cheng,
// SIGCOMM 1996) with the counters of the virtual token counter (Sheng et al., "Fairness in Serving
// Large Language Models", OSDI 2024). A counter is charged when a request is granted, not when the
// request arrives, so a request that is cancelled or expires costs nothing. Each priority has a
// virtual time: the highest counter that a tenant had just before a request of that tenant was
// granted. The counter of a new tenant starts at the virtual time, so a tenant gains nothing by its
// idle time.
//
// A tenant without requests is kept until the virtual time reaches its counter. If the tenant were
// deleted sooner, its next request would start with a lower counter, and the work of its last
// request would be forgotten.
//
//	level (priority)
//	 ├─ replanned           requests that are planned again, before all tenants
//	 └─ flow (tenant)       served = work / weight
//	     └─ lane (decode group)
//	         └─ requests    by age
//
// If a decode group has no room for the first request of its queue, that request reserves the
// group: the group is given no other request until it has room for this one or a request of a
// higher priority arrives. So small requests cannot take the memory for which a large request
// waits.

// maxDebts is the maximum number of tenants without requests that a level keeps.
const maxDebts = 1024

// maxIdleLevels is the number of levels above which a level without requests is deleted.
const maxIdleLevels = 4

// level has the waiting requests of one priority.
type level struct {
	priority int
	// at is the level's index in the heap Planner.levels.
	at    int
	flows map[string]*flow
	// replanned has the requests that are planned again, of all tenants.
	replanned *flow
	// virtual is the level's virtual time. floor is the highest counter of a tenant that was
	// deleted before the virtual time reached its counter. The counter of a new tenant starts at
	// the higher of the two, so such a tenant gains nothing by its deletion.
	virtual, floor float64
	// ready are the flows with a request that may be granted. debts are the flows of tenants
	// without requests. Both are ordered by counter, the lowest first. waiting is the number of
	// requests of the level.
	ready, debts ordered[flow]
	waiting      int
}

// flow has the waiting requests of one tenant and one priority.
type flow struct {
	level  *level
	tenant string
	weight float64
	// served is the tenant's counter: the work of its granted requests in prefill tokens (cost),
	// divided by the weight. It is -Inf for level.replanned.
	served float64
	// waiting is the number of the flow's requests, work the sum of their work. byHome has the
	// flow's lanes by decode group.
	waiting int
	work    float64
	byHome  map[*group]*lane
	// lanes are the lanes with a request that may be granted, the lane with the oldest request
	// first.
	lanes           ordered[lane]
	readyAt, debtAt int
}

// lane has the requests of a flow that wait for the decode group home, by age. home is nil with
// Options.Network, because then requests wait for no particular group.
type lane struct {
	flow  *flow
	home  *group
	queue ordered[request]
	at    int
	// closed is set while no request of the lane may be granted, because its decode group has no
	// room or is reserved for another request. The lane is then in home.closed.
	closed bool
}

// byPriority orders levels, the highest priority first.
func byPriority() ordered[level] {
	return ordered[level]{
		less:  func(a, b *level) bool { return a.priority > b.priority },
		index: func(l *level) *int { return &l.at },
	}
}

// cost is the work of a request in prefill tokens: the number of uncached tokens, plus the number
// of tokens that a prefill engine could compute in the time in which a storage NIC reads the cached
// tokens. So a tenant is charged both for engine time and for NIC time.
func (p *Planner) cost(r *request) float64 {
	return float64(r.Prompt-r.Hit) + float64(r.Hit)*p.opts.PrefillRate/p.opts.ReadRate
}

// levelOf returns the level of a priority (all of its waiting requests) and creates the level if
// necessary.
func (p *Planner) levelOf(priority int) *level {
	l := p.priorities[priority]
	if l == nil {
		l = &level{
			priority: priority, flows: make(map[string]*flow),
			ready: ordered[flow]{
				less: func(a, b *flow) bool {
					return a.served < b.served || (a.served == b.served && a.lanes.items[0].queue.items[0].order < b.lanes.items[0].queue.items[0].order)
				},
				index: func(f *flow) *int { return &f.readyAt },
			},
			debts: ordered[flow]{
				less:  func(a, b *flow) bool { return a.served < b.served || (a.served == b.served && a.tenant < b.tenant) },
				index: func(f *flow) *int { return &f.debtAt },
			},
		}
		l.replanned = newFlow(l, "", 1, math.Inf(-1))
		p.priorities[priority] = l
	}
	return l
}

// newFlow returns a flow (the queue of one tenant) without requests.
func newFlow(l *level, tenant string, weight, served float64) *flow {
	return &flow{
		level: l, tenant: tenant, weight: weight, served: served, byHome: make(map[*group]*lane),
		lanes: ordered[lane]{
			less:  func(a, b *lane) bool { return a.queue.items[0].order < b.queue.items[0].order },
			index: func(n *lane) *int { return &n.at },
		},
	}
}

// flowOf returns a tenant's flow (the queue of its requests of one priority) and creates the flow
// if necessary.
func (p *Planner) flowOf(l *level, tenant string) *flow {
	f := l.flows[tenant]
	if f == nil {
		f = newFlow(l, tenant, p.weightOf(tenant), max(l.virtual, l.floor))
		l.flows[tenant] = f
	}
	return f
}

// join adds a request to the flow (queue) of its tenant, or to level.replanned if again is set.
func (p *Planner) join(r *request, again bool) {
	l := p.levelOf(r.Priority)
	f := l.replanned
	if !again {
		f = p.flowOf(l, r.Tenant)
		l.debts.remove(f)
	}
	r.flow, r.work = f, p.cost(r)
	f.waiting++
	f.work += r.work
	l.waiting++
	p.shareOf(r.Tenant).Queued++
}

// leave removes a request from its flow (the queue that join chose). If the tenant has no other
// request, its flow is kept in level.debts or deleted. If the level has no other request, the
// counters of its tenants are deleted, because no tenant competes with another.
func (p *Planner) leave(r *request) {
	p.withdraw(r)
	f := r.flow
	l := f.level
	r.flow = nil
	f.waiting--
	f.work -= r.work
	l.waiting--
	p.shareOf(r.Tenant).Queued--
	switch {
	case l.waiting == 0:
		p.retireLevel(l, f)
	case f.waiting == 0 && f != l.replanned:
		f.work = 0
		l.debts.put(f)
		l.settle()
	}
}

// retireLevel is called when the last request of a level, a request of the flow last, has left. If
// there are more than maxIdleLevels levels, it deletes the level. Otherwise it resets the level's
// counters and keeps only that flow.
func (p *Planner) retireLevel(l *level, last *flow) {
	if len(p.priorities) > maxIdleLevels {
		delete(p.priorities, l.priority)
		return
	}
	clear(l.flows)
	l.debts.items = l.debts.items[:0]
	l.virtual, l.floor = 0, 0
	last.work = 0
	if last != l.replanned {
		last.served, last.debtAt = 0, 0
		l.flows[last.tenant] = last
		l.debts.put(last)
	}
}

// reprice updates the work (the cost in its queue) of a request whose Hit has changed, and the time
// at which the request's deadlines are checked.
func (p *Planner) reprice(r *request) {
	if r.flow != nil {
		r.flow.work -= r.work
		p.sizes.count(r.work, -1)
		r.work = p.cost(r)
		r.flow.work += r.work
		p.sizes.count(r.work, 1)
		p.watch(r)
	}
}

// charge adds a request's work to its tenant's counter. The request must still be in the queue. A
// request that is planned again is charged again, because its engines work again.
func (p *Planner) charge(r *request) {
	l := r.flow.level
	f := p.flowOf(l, r.Tenant)
	if r.flow != l.replanned {
		l.virtual = max(l.virtual, f.served)
	}
	work := p.cost(r)
	f.served += work / f.weight
	p.shareOf(r.Tenant).Granted += work
	if f.readyAt != 0 {
		l.ready.put(f)
	}
	if f.waiting == 0 {
		l.debts.put(f)
	}
	l.settle()
}

// settle deletes flows of tenants without requests: all whose counter the virtual time has reached,
// and, if more than maxDebts remain, those with the lowest counters.
func (l *level) settle() {
	for f := l.debts.first(); f != nil; f = l.debts.first() {
		if f.served > l.virtual {
			if len(l.debts.items) <= maxDebts {
				return
			}
			l.floor = max(l.floor, f.served)
		}
		l.debts.remove(f)
		delete(l.flows, f.tenant)
	}
}

// offer makes a request eligible to be granted: it adds the request to its lane, the part of the
// tenant's queue for the request's decode group (its home). Before retryAt the request is in
// Planner.cooling instead, and grant offers it again.
func (p *Planner) offer(r *request) {
	if p.now < r.retryAt {
		p.cooling.put(r)
		return
	}
	f, g := r.flow, r.home
	n := f.byHome[g]
	if n == nil {
		n = &lane{flow: f, home: g, queue: ordered[request]{
			less:  func(a, b *request) bool { return a.order < b.order },
			index: func(r *request) *int { return &r.laneAt },
		}}
		f.byHome[g] = n
	}
	n.queue.put(r)
	r.lane = n
	p.updateHeaps(n)
	if g != nil && g.reservedFor != nil && r.precedes(g.reservedFor) {
		p.endReservation(g)
	}
}

// withdraw removes a request from its lane (the part of the tenant's queue for one decode group),
// or from Planner.cooling, if it is in one of them. The request is then not granted until offer adds
// it again.
func (p *Planner) withdraw(r *request) {
	p.cooling.remove(r)
	n := r.lane
	if n == nil {
		return
	}
	r.lane = nil
	n.queue.remove(r)
	p.updateHeaps(n)
	if n.home != nil && n.home.reservedFor == r {
		p.endReservation(n.home)
	}
}

// precedes reports whether request r is granted before request o, which has reserved a group.
func (r *request) precedes(o *request) bool {
	switch {
	case r.Priority != o.Priority:
		return r.Priority > o.Priority
	case r.flow == o.flow:
		return r.order < o.order
	}
	return r.flow == r.flow.level.replanned
}

// updateHeaps updates the heaps after a change of lane n. The lane, its flow and its level are each
// in a heap only if they have a request that may be granted.
func (p *Planner) updateHeaps(n *lane) {
	f := n.flow
	l := f.level
	if n.queue.first() != nil && !n.closed {
		f.lanes.put(n)
	} else {
		f.lanes.remove(n)
	}
	if f.lanes.first() != nil {
		l.ready.put(f)
	} else {
		l.ready.remove(f)
	}
	if l.ready.first() != nil {
		p.levels.put(l)
	} else {
		p.levels.remove(l)
	}
}

// next returns the next request to be granted, or nil. It closes a lane (the requests that wait for
// one decode group) if the group has no room or is reserved for another request.
func (p *Planner) next() *request {
	for l := p.levels.first(); l != nil; l = p.levels.first() {
		n := l.ready.first().lanes.first()
		r, g := n.queue.first(), n.home
		if g == nil || g.reservedFor == nil || (g.reservedFor == r && !g.full) {
			return r
		}
		n.closed = true
		g.closed = append(g.closed, n)
		p.updateHeaps(n)
	}
	return nil
}

// reserveGroup reserves a request's decode group, which has no room for the request.
func (p *Planner) reserveGroup(r *request) {
	r.home.reservedFor = r
	p.setFull(r.home, true)
}

// setFull records whether a decode group lacks room for the request that reserved the group.
func (p *Planner) setFull(g *group, full bool) {
	switch {
	case full && !g.full:
		p.full++
	case !full && g.full:
		p.full--
	}
	g.full = full
}

// retryAll calls retry for all full groups. It is called when a request that has reserved a full
// group may be able to move to another group, which has room and no queue (rehome).
func (p *Planner) retryAll() {
	if p.full == 0 {
		return
	}
	for _, g := range p.order {
		if g.full {
			p.retry(g)
		}
	}
}

// retry handles a decode group that may have room again: it makes the request that reserved the
// group eligible to be granted.
func (p *Planner) retry(g *group) {
	p.setFull(g, false)
	if g.reservedFor == nil {
		return
	}
	if n := g.reservedFor.lane; n.closed {
		n.closed = false
		g.closed = deleteLane(g.closed, n)
		p.updateHeaps(n)
	}
}

// deleteLane removes lane n from a list of lanes. It does not keep the order of the list.
func deleteLane(list []*lane, n *lane) []*lane {
	for i := range list {
		if list[i] == n {
			last := len(list) - 1
			list[i] = list[last]
			return list[:last]
		}
	}
	return list
}

// endReservation ends the reservation of a group, so that all requests that wait for the group may
// be granted.
func (p *Planner) endReservation(g *group) {
	g.reservedFor = nil
	p.setFull(g, false)
	for _, n := range g.closed {
		n.closed = false
		p.updateHeaps(n)
	}
	g.closed = g.closed[:0]
}

// nextOf returns the next request for a prefill group that sent a Fetch. If the group keeps its
// memory for a request (group.keptFor) that may be granted, it returns that request, unless the
// result of next precedes the request.
func (p *Planner) nextOf(g *group) *request {
	r, o := p.next(), g.keptFor
	g.keptFor = nil
	if r == nil || o == nil || p.requests[o.ID] != o || o.lane == nil || o.lane.at == 0 || r.precedes(o) {
		return r
	}
	if h := o.lane.home; o.lane.queue.first() != o || (h != nil && h.reservedFor != nil && (h.reservedFor != o || h.full)) {
		return r
	}
	return o
}

// TenantView describes the waiting requests of one tenant and one priority.
type TenantView struct {
	Tenant   string
	Priority int
	Weight   float64
	Waiting  int
	// Work is the sum of the requests' work in prefill tokens. Cached tokens count as the tokens
	// that a prefill engine could compute in the time of their read.
	Work float64
}

// Tenants returns the waiting requests by tenant and priority: higher priorities first, and
// within a priority the tenants with the most requests first. Requests that are planned again
// count for their tenant.
func (p *Planner) Tenants() []TenantView {
	type key struct {
		priority int
		tenant   string
	}
	sums := make(map[key]*TenantView)
	add := func(l *level, tenant string, n int, work float64) {
		v := sums[key{l.priority, tenant}]
		if v == nil {
			v = &TenantView{Tenant: tenant, Priority: l.priority, Weight: p.weightOf(tenant)}
			sums[key{l.priority, tenant}] = v
		}
		v.Waiting += n
		v.Work += work
	}
	for _, l := range p.priorities {
		for _, f := range l.flows {
			if f.waiting > 0 {
				add(l, f.tenant, f.waiting, f.work)
			}
		}
		if l.replanned.waiting == 0 {
			continue
		}
		for _, r := range p.requests {
			if r.flow == l.replanned {
				add(l, r.Tenant, 1, r.work)
			}
		}
	}
	views := make([]TenantView, 0, len(sums))
	for _, v := range sums {
		views = append(views, *v)
	}
	slices.SortFunc(views, func(a, b TenantView) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(b.Waiting, a.Waiting), cmp.Compare(a.Tenant, b.Tenant))
	})
	return views
}

// Share is the granted work and the number of queued requests of a tenant in Options.Weights, over
// all priorities.
type Share struct {
	// Granted is the work of the granted requests in prefill tokens (as in TenantView.Work), since
	// the planner was made. Queued is the number of waiting requests.
	Granted float64
	Queued  int
}

// Shares returns the shares of the tenants in Options.Weights, and the sum of all other tenants.
// The size of the result does not grow with the number of tenants.
func (p *Planner) Shares() (named map[string]Share, others Share) {
	named = make(map[string]Share, len(p.opts.Weights))
	for tenant := range p.opts.Weights {
		named[tenant] = *p.shares[tenant]
	}
	return named, p.others
}

// shareOf returns a tenant's share. All tenants that are not in Options.Weights have one share.
func (p *Planner) shareOf(tenant string) *Share {
	if s := p.shares[tenant]; s != nil {
		return s
	}
	return &p.others
}

// weightOf returns a tenant's weight.
func (p *Planner) weightOf(tenant string) float64 {
	if w, ok := p.opts.Weights[tenant]; ok {
		return w
	}
	return 1
}
