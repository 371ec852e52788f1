package storage

import (
	"cmp"
	"math"
	"slices"
)

// A Share identifies the principal for which a call competes with others while calls wait. The zero
// Share is that of all calls without a principal.
type Share struct {
	Principal string
	// Weight returns the present weight of the principal, at least 1. It is called at each grant, so that
	// a change applies to calls that wait. It must not block. Nil: the weight is 1.
	Weight func() int
}

func (s Share) weight() float64 {
	if s.Weight == nil {
		return 1
	}
	return float64(max(1, s.Weight()))
}

// A reader is the principal of a Load and the tenant of its namespace, "" if there is none.
type reader struct {
	share  Share
	tenant string
}

// A fairQueue orders waiting calls. Principals are granted bytes in proportion to their weights, and
// within a principal one call of each tenant is granted in turn:
//
//	          principal a, weight 3   tenant x  2 1 ─┐ in turn
//	                                  tenant y    1 ─┴─► head, start tag 40 MiB ─┐
//	waiting                                                                      ├─► the lowest start tag
//	          principal b, weight 1   tenant z  2 1 ───► head, start tag 44 MiB ─┘
//
// The order among principals is start-time fair queueing (Goyal, Vin, Cheng, "Start-time Fair Queueing: A
// Scheduling Algorithm for Integrated Services Packet Switching Networks", SIGCOMM 1996, section 2). The
// call j of principal f has the tags
//
//	start(f,j)  = max(v, finish(f,j-1))
//	finish(f,j) = start(f,j) + bytes(f,j) / weight(f)
//
// where v, the virtual time at the arrival of the call, is the start tag of the call that was granted last.
// When nothing waits or runs, all tags begin again at 0. With several calls in progress at a time this is SFQ(D)
// (Jin, Chase, Kaur, "Interposed Proportional Sharing for a Storage Service Utility", SIGMETRICS 2004). While two
// principals both wait, the bytes that they are granted, divided by their weights, differ by at most one
// call of each, divided by its weight. A principal gains nothing by its idle time. It also loses nothing by the bytes that
// it was granted while no other principal waited.
//
// Only the first call of each principal needs a tag, so a tag is computed with the weight at the time of
// the grant. A call that is cancelled costs nothing. The caller has a lock.
type fairQueue struct {
	flows map[string]*flow // by principal
	// list has the flows in the order of their creation.
	list    []*flow
	virtual float64
	waiting int
}

// flow has the waiting calls of one principal.
type flow struct {
	share Share
	// start is the finish tag of the last call that was granted. While calls wait, it is the start tag of
	// the first of them.
	start float64
	// queues has the waiting calls of each tenant, the longest waiting first. turns has the tenants with
	// waiting calls, the one whose call is granted next first. waiting is the number of all calls.
	queues  map[string][]*turn
	turns   []string
	waiting int
}

// turn is a call that waits. done is closed when the call was granted, or refused in favour of a
// principal or tenant with fewer waiting calls.
type turn struct {
	flow    *flow
	tenant  string
	bytes   int64
	done    chan struct{}
	refused bool
}

const (
	// flowsMax is the number of principals above which a fairQueue forgets principals without waiting calls.
	flowsMax = 512
	// turnBytesMin is the number of bytes that a smaller call counts, because each call has a fixed cost.
	turnBytesMin = 4096
)

func newFairQueue() fairQueue { return fairQueue{flows: make(map[string]*flow)} }

// flowOf returns the flow of a principal and creates it if necessary.
func (q *fairQueue) flowOf(share Share) *flow {
	f := q.flows[share.Principal]
	if f == nil {
		if len(q.list) >= flowsMax {
			q.forget()
		}
		f = &flow{queues: make(map[string][]*turn)}
		q.flows[share.Principal] = f
		q.list = append(q.list, f)
	}
	f.share = share
	if f.waiting == 0 {
		f.start = max(f.start, q.virtual)
	}
	return f
}

// forget removes the flows without waiting calls whose tag the virtual time has reached. If there is none, it
// advances the virtual time to the lowest tag, so that the removed principal does not begin with a
// lower tag.
func (q *fairQueue) forget() {
	lowest := math.Inf(1)
	for _, f := range q.list {
		if f.waiting == 0 {
			lowest = min(lowest, f.start)
		}
	}
	if math.IsInf(lowest, 1) {
		return // as many principals have waiting calls
	}
	q.virtual = max(q.virtual, lowest)
	q.list = slices.DeleteFunc(q.list, func(f *flow) bool {
		gone := f.waiting == 0 && f.start <= q.virtual
		if gone {
			delete(q.flows, f.share.Principal)
		}
		return gone
	})
}

// charge records that a call of a principal was granted.
func (q *fairQueue) charge(f *flow, bytes int64) {
	q.virtual = max(q.virtual, f.start)
	f.start += float64(max(bytes, turnBytesMin)) / f.share.weight()
}

// push adds a call.
func (q *fairQueue) push(by reader, bytes int64) *turn {
	f := q.flowOf(by.share)
	t := &turn{flow: f, tenant: by.tenant, bytes: bytes, done: make(chan struct{})}
	if len(f.queues[t.tenant]) == 0 {
		f.turns = append(f.turns, t.tenant)
	}
	f.queues[t.tenant] = append(f.queues[t.tenant], t)
	f.waiting++
	q.waiting++
	return t
}

// next returns the call that is granted next, or nil if none waits.
func (q *fairQueue) next() *turn {
	var first *flow
	for _, f := range q.list {
		if f.waiting > 0 && (first == nil || f.start < first.start) {
			first = f
		}
	}
	if first == nil {
		return nil
	}
	return first.queues[first.turns[0]][0]
}

// grant removes a call that next returned.
func (q *fairQueue) grant(t *turn) {
	f := t.flow
	f.turns = append(f.turns[1:], t.tenant) // its next call waits for the other tenants
	q.remove(t)
	q.charge(f, t.bytes)
	close(t.done)
}

// remove removes a call. It returns false if the call does not wait any more.
func (q *fairQueue) remove(t *turn) bool {
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

// refuse refuses a waiting call in favour of a further call of by, if by has fewer waiting calls: the
// newest call of the principal with the most calls per weight, or, if no other principal has more than the
// principal of by, of a tenant of the same principal. Within a principal it chooses the tenant with the most
// calls. It returns false if it refused none.
func (q *fairQueue) refuse(by reader) bool {
	own := q.flows[by.share.Principal]
	most := 1.0
	if own != nil {
		most += float64(own.waiting)
	}
	most /= by.share.weight()
	victim, above := own, 0
	for _, f := range q.list {
		if n := float64(f.waiting) / f.share.weight(); n > most {
			most, victim = n, f
		}
	}
	if victim == nil {
		return false
	}
	if victim == own {
		above = len(own.queues[by.tenant]) + 1
	}
	longest := slices.MaxFunc(append(victim.turns, by.tenant), func(a, b string) int {
		return cmp.Compare(len(victim.queues[a]), len(victim.queues[b]))
	})
	calls := victim.queues[longest]
	if len(calls) <= above {
		return false
	}
	t := calls[len(calls)-1]
	q.remove(t)
	t.refused = true
	close(t.done)
	return true
}

// restart sets all tags to 0. No call may wait.
func (q *fairQueue) restart() {
	q.virtual = 0
	for _, f := range q.list {
		f.start = 0
	}
}
