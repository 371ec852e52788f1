package fair

import (
	"cmp"
	"math"
	"slices"
)

// A Share identifies the principal for which a call competes with others while calls wait. The zero
// Share is that of all calls without a principal.
type Share struct {
	Principal string
	// Weight returns the present weight of the principal, at least 1. It is called at each grant, for each
	// principal with waiting calls, so that a change applies to calls that wait. It must not block. Nil: the
	// weight is 1.
	Weight func() int
}

// CurrentWeight returns the weight of the principal at this moment.
func (s Share) CurrentWeight() float64 {
	if s.Weight == nil {
		return 1
	}
	return float64(max(1, s.Weight()))
}

// A Caller is the principal of a call and the tenant of its namespace, "" if there is none.
type Caller struct {
	Share  Share
	Tenant string
}

// A Queue orders the waiting calls for one resource, and counts the units of it that each principal
// holds. The caller has a lock. See the package comment for the order.
type Queue struct {
	flows map[string]*Flow // by principal
	// list has the flows in the order of their creation.
	list    []*Flow
	virtual float64
	waiting int
	// held is the sum of the units that the principals hold.
	held int64
}

// A Flow has the waiting calls of one principal, and the number of units that its granted calls hold.
type Flow struct {
	queue *Queue
	share Share
	// start is the finish tag of the last call that was granted. While calls wait, it is the start tag of
	// the first of them.
	start float64
	// queues has the waiting calls of each tenant, the longest waiting first. turns has the tenants with
	// waiting calls, the one whose call is granted next first. waiting is the number of all calls.
	queues  map[string][]*Turn
	turns   []string
	waiting int
	// held is the number of units that were granted and not released.
	held int64
}

// A Turn is a call that waits.
type Turn struct {
	// Units is the number of units that the call gets when it is granted.
	Units int64
	// Value is set by the caller of Grant, for the call that waits.
	Value any

	flow    *Flow
	tenant  string
	bytes   int64
	done    chan struct{}
	refused bool
}

const (
	// flowsMax is the number of principals above which a Queue forgets principals without waiting calls and
	// without units.
	flowsMax = 512
	// turnBytesMin is the number of bytes that a smaller call counts, because each call has a fixed cost.
	turnBytesMin = 4096
	// virtualMax is the virtual time above which all tags are reduced by it. At 2^56 a float64 is
	// too coarse for a call of turnBytesMin with the weight 1000: its tag would not change.
	virtualMax = 1 << 40
)

// New returns an empty queue.
func New() *Queue { return &Queue{flows: make(map[string]*Flow)} }

// Waiting returns the number of waiting calls.
func (q *Queue) Waiting() int { return q.waiting }

// Held returns the number of units that all principals hold.
func (q *Queue) Held() int64 { return q.held }

// Of returns the number of waiting calls of a principal, and the number of units that it holds.
func (q *Queue) Of(principal string) (waiting int, held int64) {
	if f := q.flows[principal]; f != nil {
		return f.waiting, f.held
	}
	return 0, 0
}

// Done returns a channel that is closed when the call was granted or refused.
func (t *Turn) Done() <-chan struct{} { return t.done }

// Refused reports whether the call was refused in favour of a principal or tenant with fewer waiting
// calls. It may be called after Done is closed.
func (t *Turn) Refused() bool { return t.refused }

// Flow returns the flow that holds the units of the call after its grant.
func (t *Turn) Flow() *Flow { return t.flow }

// flowOf returns the flow of a principal and creates it if necessary.
func (q *Queue) flowOf(share Share) *Flow {
	f := q.flows[share.Principal]
	if f == nil {
		if len(q.list) >= flowsMax {
			q.forget()
		}
		f = &Flow{queue: q, queues: make(map[string][]*Turn)}
		q.flows[share.Principal] = f
		q.list = append(q.list, f)
	}
	f.share = share
	if f.waiting == 0 {
		f.start = max(f.start, q.virtual)
	}
	return f
}

// idle reports whether the principal has neither waiting calls nor units.
func (f *Flow) idle() bool { return f.waiting == 0 && f.held == 0 }

// forget removes the idle flows whose tag the virtual time has reached. If there is none, it advances
// the virtual time to the lowest tag, so that the removed principal does not begin with a lower tag.
func (q *Queue) forget() {
	lowest := math.Inf(1)
	for _, f := range q.list {
		if f.idle() {
			lowest = min(lowest, f.start)
		}
	}
	if math.IsInf(lowest, 1) {
		return // as many principals have waiting calls or units
	}
	q.advance(lowest)
	q.list = slices.DeleteFunc(q.list, func(f *Flow) bool {
		gone := f.idle() && f.start <= q.virtual
		if gone {
			delete(q.flows, f.share.Principal)
		}
		return gone
	})
}

// advance sets the virtual time to at least start. A principal that was passed over because of the units
// that it holds does not get the bytes of that time later.
func (q *Queue) advance(start float64) {
	if start <= q.virtual {
		return
	}
	q.virtual = start
	if q.waiting > 0 {
		for _, f := range q.list {
			if f.waiting > 0 {
				f.start = max(f.start, start)
			}
		}
	}
	if q.virtual > virtualMax {
		for _, f := range q.list {
			f.start = max(0, f.start-q.virtual)
		}
		q.virtual = 0
	}
}

// Take records a call that was granted without waiting.
func (q *Queue) Take(by Caller, units, bytes int64) *Flow {
	f := q.flowOf(by.Share)
	f.take(units, bytes)
	return f
}

func (f *Flow) take(units, bytes int64) {
	f.queue.advance(f.start)
	f.start += float64(max(bytes, turnBytesMin)) / f.share.CurrentWeight()
	f.held += units
	f.queue.held += units
}

// Release returns units of a granted call. If nothing is held and no call waits, all tags begin again at
// 0.
func (f *Flow) Release(units int64) {
	q := f.queue
	f.held -= units
	q.held -= units
	if q.held == 0 && q.waiting == 0 {
		q.restart()
	}
}

// Push adds a call that needs units, and that counts bytes in the order of the grants.
func (q *Queue) Push(by Caller, units, bytes int64) *Turn {
	f := q.flowOf(by.Share)
	t := &Turn{Units: units, flow: f, tenant: by.Tenant, bytes: bytes, done: make(chan struct{})}
	if len(f.queues[t.tenant]) == 0 {
		f.turns = append(f.turns, t.tenant)
	}
	f.queues[t.tenant] = append(f.queues[t.tenant], t)
	f.waiting++
	q.waiting++
	return t
}

// Next returns the call that is granted next, or nil if none waits. free is the number of free units.
func (q *Queue) Next(free int64) *Turn {
	if q.waiting == 0 {
		return nil
	}
	weights, units := 0.0, float64(max(0, free))
	for _, f := range q.list {
		if f.waiting > 0 {
			weights += f.share.CurrentWeight()
			units += float64(f.held)
		}
	}
	var first *Flow
	var firstAbove bool
	for _, f := range q.list {
		if f.waiting == 0 {
			continue
		}
		above := float64(f.held)*weights > units*f.share.CurrentWeight()
		if first == nil || firstAbove && !above || firstAbove == above && f.start < first.start {
			first, firstAbove = f, above
		}
	}
	return first.queues[first.turns[0]][0]
}

// Grant grants a call that Next returned.
func (q *Queue) Grant(t *Turn) {
	f := t.flow
	f.turns = append(f.turns[1:], t.tenant) // its next call waits for the other tenants
	q.Remove(t)
	f.take(t.Units, t.bytes)
	close(t.done)
}

// Remove removes a call. It returns false if the call does not wait any more.
func (q *Queue) Remove(t *Turn) bool {
	f := t.flow
	i := slices.Index(f.queues[t.tenant], t)
	if i < 0 {
		return false
	}
	f.queues[t.tenant] = slices.Delete(f.queues[t.tenant], i, i+1)
	if len(f.queues[t.tenant]) == 0 {
		delete(f.queues, t.tenant)
		f.turns = slices.DeleteFunc(f.turns, func(other string) bool { return other == t.tenant })
	}
	f.waiting--
	q.waiting--
	return true
}

// Refuse refuses a waiting call in favour of a further call of by, if by has fewer waiting calls: the
// newest call of the principal with the most calls per weight, or, if no other principal has more than the
// principal of by, of a tenant of the same principal. Within a principal it chooses the tenant with the most
// calls. It returns false if it refused none.
func (q *Queue) Refuse(by Caller) bool {
	own := q.flows[by.Share.Principal]
	most := 1.0
	if own != nil {
		most += float64(own.waiting)
	}
	most /= by.Share.CurrentWeight()
	victim, above := own, 0
	for _, f := range q.list {
		if n := float64(f.waiting) / f.share.CurrentWeight(); n > most {
			most, victim = n, f
		}
	}
	if victim == nil {
		return false
	}
	if victim == own {
		above = len(own.queues[by.Tenant]) + 1
	}
	longest := slices.MaxFunc(append(victim.turns, by.Tenant), func(a, b string) int {
		return cmp.Compare(len(victim.queues[a]), len(victim.queues[b]))
	})
	calls := victim.queues[longest]
	if len(calls) <= above {
		return false
	}
	t := calls[len(calls)-1]
	q.Remove(t)
	t.refused = true
	close(t.done)
	return true
}

// restart sets all tags to 0. No call may wait.
func (q *Queue) restart() {
	q.virtual = 0
	for _, f := range q.list {
		f.start = 0
	}
}
