package dualpath

import (
	"flag"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// The number of seeds of TestEveryRequestEnds. .ci/run uses 10,000, and .ci/weekly other seeds
// each week.
var (
	requestSeeds = flag.Uint64("requests.seeds", testkit.Rounds[uint64](1000, 100), "number of seeds of TestEveryRequestEnds")
	requestFirst = flag.Uint64("requests.first", 0, "first seed of TestEveryRequestEnds")
)

// testCluster is a cluster in virtual time whose engines have memories of a fixed size and report
// their free memory correctly. Groups are lost and return, fall silent, or lose their sessions
// with all messages in transit. The planner is restarted. Engines fail, and reads stop. An engine finishes each request
// that it has started after some time, unless the engine is lost or the request is aborted. The
// testCluster checks that no memory is allocated twice.
type testCluster struct {
	t    *testing.T
	p    *Planner
	rng  *rand.Rand
	now  time.Duration
	seed uint64

	groups  []*testGroup
	engines map[EngineID]*testEngine
	jobs    map[RequestID]*task // the last start of each request
	waiting map[RequestID]bool  // submitted and neither started nor rejected
	over    map[RequestID]bool
	// lost counts the actions of each kind, and reports (0), that a broken session lost.
	lost map[ActionKind]int
	// checked counts the steps; every checkEvery-th step is checked.
	checked, checkEvery int
	trouble             conditions
	changing
	restarting
}

// testGroup is one group.
type testGroup struct {
	id   GroupID
	role Role
	up   bool
	// back is the time at which a lost or silent group, or its session, returns.
	back    time.Duration
	broken  bool
	engines []*testEngine
	// order is the leader's pending order to switch, announced the role of the switch that was announced last.
	order     order
	announced Role
	// known is the planner with which the group registered last, seen the highest number of an action
	// that has reached the group.
	known *Planner
	seen  uint64
}

// reached reports whether planner and group can exchange messages.
func (s *testGroup) reached() bool { return s.up && !s.broken }

// testEngine is one engine with its running requests and the unconfirmed reports of their ends.
type testEngine struct {
	spec  EngineSpec
	shop  *testGroup
	holds map[RequestID]*holding
	ended map[RequestID]*holding
}

// holding is a request at an engine.
type holding struct {
	room           room
	attempt, order uint64
	read           *pendingRead
	// asked is the request as it was submitted, peer its other engine. parts are what the engine has
	// read, reads or computes.
	asked Request
	peer  EngineID
	parts []Part
	// last is the last report about a read, end the report about the end of the engine's part.
	last, end Event
}

// pendingRead is a read that ends at a time, at the token upto.
type pendingRead struct {
	part         Part
	order        uint64
	until        time.Duration
	upto         int
	failed, gone bool
}

// used returns the sum of the memory in use at an engine.
func (b *testEngine) used() (u room) {
	for _, h := range b.holds {
		u.hbm, u.buffer = u.hbm+h.room.hbm, u.buffer+h.room.buffer
	}
	return u
}

// task is a start of a request.
type task struct {
	attempt           uint64
	engines           [2]*testEngine
	begun             [2]bool // the start has reached the engine
	have              []bool  // by cached block: in a buffer, or computed
	prefills, decodes time.Duration
	prefilled         bool
}

const (
	shopBlock = 16
	// calmWithin is longer than the time of all requests one after the other, including the
	// detection of a silent group.
	calmWithin = 60 * time.Second
)

func newTestCluster(t *testing.T, seed uint64, o Options) *testCluster {
	w := &testCluster{
		t: t, p: newPlanner(t, o), rng: rand.New(rand.NewPCG(seed, 3)), seed: seed, engines: map[EngineID]*testEngine{},
		jobs: map[RequestID]*task{}, waiting: map[RequestID]bool{}, over: map[RequestID]bool{}, lost: map[ActionKind]int{},
		checkEvery: 1, trouble: newTrouble(false), changing: changing{ended: map[Reason]int{}}, restarting: restarting{options: o, away: map[RequestID]bool{}},
	}
	for g := range GroupID(5) {
		s := &testGroup{id: g, role: Prefill}
		if g >= 2 {
			s.role = Decode
		}
		for i := range 1 + w.rng.IntN(2) {
			b := &testEngine{shop: s, spec: EngineSpec{Engine: EngineID(int(g)*2 + i), Node: NodeID(g), HBMTokens: 2000 + 16*w.rng.IntN(100)}}
			b.spec.Buffer = Buffer{Bytes: 2500 + w.rng.IntN(2000), Block: 16, Sums: 1, Request: 8}
			s.engines = append(s.engines, b)
			w.engines[b.spec.Engine] = b
		}
		w.groups = append(w.groups, s)
		w.clear(s)
		w.register(s)
	}
	return w
}

// clear empties the engines of a group.
func (w *testCluster) clear(s *testGroup) {
	for _, b := range s.engines {
		b.holds, b.ended = map[RequestID]*holding{}, map[RequestID]*holding{}
	}
}

// register registers a group again. After a loss the registration lists no request. After a broken
// session it lists the running and the ended requests, and the leader repeats its reports.
func (w *testCluster) register(s *testGroup) {
	ev := GroupUp{
		At: w.now, Group: s.id, Role: s.role, Again: s.known == w.p, Returns: s.known != nil, Seen: s.seen,
		Switching: s.order.to, Announced: s.announced,
	}
	s.up, s.broken, s.known = true, false, w.p
	var reports []Event
	var alone []RequestID // for the planner they begin again, and no gateway has them
	for _, b := range s.engines {
		ev.Engines = append(ev.Engines, b.spec)
		for _, id := range sortedIDs(b.holds) {
			h := b.holds[id]
			ev.Holding = append(ev.Holding, w.listed(b, h, false))
			if !ev.Again {
				h.last = nil // the registration has what the engine has read
			}
			if w.over[id] && !ev.Again {
				delete(w.over, id)
				alone = append(alone, id)
			}
			if h.last != nil {
				reports = append(reports, h.last)
			}
		}
		for _, id := range sortedIDs(b.ended) {
			h := b.ended[id]
			ev.Holding = append(ev.Holding, w.listed(b, h, true))
			reports = append(reports, h.end)
		}
	}
	w.step(ev)
	w.registered(&ev)
	for _, id := range alone {
		w.step(Cancelled{w.now, id})
	}
	for _, report := range reports {
		w.step(report)
	}
	for _, b := range s.engines {
		clear(b.ended)
	}
}

// sortedIDs returns the keys of a map in order.
func sortedIDs[V any](m map[RequestID]V) []RequestID { return slices.Sorted(maps.Keys(m)) }

// loseGroup ends a group and its requests: with a GroupDown, or silently.
func (w *testCluster) loseGroup(s *testGroup, silent bool) {
	s.up, s.broken, s.back = false, false, w.now+time.Duration(w.rng.IntN(3000))*time.Millisecond
	s.order, s.announced, s.known, s.seen = order{}, 0, nil, 0
	w.clear(s)
	if !silent {
		w.step(GroupDown{w.now, s.id})
	}
}

// breakSession loses all messages between the planner and a group for some time, which may
// exceed the planner's timeout.
func (w *testCluster) breakSession(s *testGroup) {
	s.broken, s.back = true, w.now+time.Duration(w.rng.IntN(1200))*time.Millisecond
}

// live returns the requests up to last that have not ended and that the planner has.
func (w *testCluster) live(last RequestID) (ids []RequestID) {
	for id := RequestID(1); id <= last; id++ {
		if !w.over[id] && w.p.requests[id] != nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// giveUp cancels a request, and submits another one with the same id half of the time.
func (w *testCluster) giveUp(id RequestID) {
	r := w.p.requests[id].Request
	w.step(Cancelled{w.now, id})
	if w.rng.IntN(2) == 0 {
		delete(w.over, id)
		w.waiting[id] = true
		r.Hit = r.Hit / 2 / shopBlock * shopBlock
		w.step(Submit{w.now, r})
	}
}

// step feeds an event and performs the actions.
func (w *testCluster) step(ev Event) {
	w.note(ev)
	for _, a := range slices.Clone(w.p.Step(ev)) {
		if w.over[a.Request] && a.Kind != Abort {
			w.t.Fatalf("seed %d, %v: %v of request %d, which has ended", w.seed, w.now, a.Kind, a.Request)
		}
		if f, ok := ev.(Finished); ok && a.Kind == Done && f.Attempt != w.jobs[a.Request].attempt {
			w.t.Fatalf("seed %d, %v: request %d has ended by attempt %d; it was started as %d", w.seed, w.now, a.Request, f.Attempt, w.jobs[a.Request].attempt)
		}
		w.checkDeadlines(&a)
		w.perform(&a)
	}
	if w.checked++; w.checked%w.checkEvery == 0 {
		check(w.p)
	}
}

// report passes an engine's report to the planner if its group is connected.
func (w *testCluster) report(b *testEngine, ev Event) {
	if !b.shop.reached() {
		w.lost[0]++
		return
	}
	w.step(ev)
}

// take allocates memory of an engine for a request.
func (w *testCluster) take(b *testEngine, h *holding, n room) {
	h.room = room{h.room.hbm + n.hbm, h.room.buffer + n.buffer}
	if u := b.used(); u.hbm > b.spec.HBMTokens || u.buffer > b.spec.Buffer.Bytes {
		w.t.Fatalf("seed %d, %v: engine %d has %+v for %d requests, which take %+v", w.seed, w.now, b.spec.Engine, b.spec.size(), len(b.holds), u)
	}
}

// perform performs one action, if it reaches its group.
func (w *testCluster) perform(a *Action) {
	switch a.Kind {
	case Start:
		w.start(a)
		return
	case Reject, Done:
		delete(w.waiting, a.Request)
		w.over[a.Request] = true
		return
	case Replan, Prefilled:
		return
	case Switch, Switched, Announce:
		w.switched(a)
		return
	}
	b := w.engines[a.Engine]
	if !b.shop.reached() {
		w.lost[a.Kind]++
		return
	}
	b.shop.seen = max(b.shop.seen, a.Seq)
	switch a.Kind {
	case Assign:
		if a.Side != b.shop.role {
			w.t.Fatalf("seed %d, %v: request %d is assigned for %v to engine %d, whose role is %v", w.seed, w.now, a.Request, a.Side, a.Engine, b.shop.role)
		}
		r := w.p.requests[a.Request]
		n := r.Prompt
		if a.Side == Decode {
			n += r.Output
		}
		delete(b.ended, a.Request)
		h := &holding{asked: w.trouble.asked[a.Request]}
		b.holds[a.Request] = h
		w.take(b, h, room{hbm: (n + shopBlock - 1) / shopBlock * shopBlock})
		return
	case Abort:
		delete(b.holds, a.Request)
		return
	}
	h, k := b.holds[a.Request], w.jobs[a.Request]
	if h == nil || h.attempt == 0 || h.attempt != k.attempt {
		return
	}
	if a.Seq <= h.order {
		w.t.Fatalf("seed %d, %v: engine %d got order %d of request %d after order %d", w.seed, w.now, a.Engine, a.Seq, a.Request, h.order)
	}
	h.order = a.Seq
	switch a.Kind {
	case Read:
		w.begin(b, h, a.Parts[0], a.Seq)
		if a.Side == Prefill {
			w.take(b, h, room{buffer: 16 * a.Parts[0].Len() / shopBlock})
		}
	case Cut:
		if h.read != nil {
			h.read.until, h.read.upto, h.read.failed, h.read.gone = w.now, h.read.part.From, true, false
		}
	case Drop:
		if h.read != nil {
			h.cut(h.read.part, h.read.part.From)
		}
		h.read = nil
	case Recompute:
		k.bring(a.Parts[0].From, a.Parts[0].To)
		h.parts = append(h.parts, a.Parts[0])
	}
}

// start starts a request on the engines that the action reaches.
func (w *testCluster) start(a *Action) {
	r := w.p.requests[a.Request]
	delete(w.waiting, a.Request)
	w.checkEpoch(a)
	k := &task{attempt: a.Seq, engines: [2]*testEngine{w.engines[a.PE], w.engines[a.DE]}, have: make([]bool, r.cached/shopBlock)}
	k.prefills = w.now + time.Duration(10+w.rng.IntN(200))*time.Millisecond
	k.decodes = k.prefills + time.Duration(w.rng.IntN(400))*time.Millisecond
	w.jobs[a.Request] = k
	blocks := (r.Prompt + shopBlock - 1) / shopBlock
	for i, b := range k.engines {
		h := b.holds[a.Request]
		if !b.shop.reached() {
			w.lost[Start]++
			continue
		}
		b.shop.seen = max(b.shop.seen, a.Seq)
		if h == nil || h.attempt != 0 {
			continue // its Assign was lost
		}
		h.attempt, h.order, k.begun[i], h.peer = a.Seq, a.Seq, true, k.engines[1-i].spec.Engine
		passing := blocks
		if b.shop.role == Prefill {
			passing = 0
		}
		for _, part := range a.Parts[:a.NParts] {
			if part.Side != b.shop.role {
				continue
			}
			w.begin(b, h, part, a.Seq)
			if part.Side == Prefill {
				passing = part.Len() / shopBlock
			}
		}
		w.take(b, h, room{buffer: 8 + 16*passing + blocks})
	}
}

// begin starts a read: most complete, some stop, some take much longer than the others.
func (w *testCluster) begin(b *testEngine, h *holding, part Part, order uint64) {
	if h.read != nil {
		w.t.Fatalf("seed %d, %v: engine %d reads %v already", w.seed, w.now, b.spec.Engine, h.read.part)
	}
	h.read = &pendingRead{part: part, order: order, upto: part.To, until: w.now + time.Duration(w.rng.IntN(150))*time.Millisecond}
	h.read.until += w.delayOf(b.shop.id)
	h.parts = append(h.parts, part)
	switch w.rng.IntN(8) {
	case 0:
		h.read.failed = true
	case 1:
		h.read.gone = true
	case 2:
		h.read.until += 2 * time.Second
	}
	if h.read.failed || h.read.gone {
		h.read.upto = part.From + w.rng.IntN(part.Len())/shopBlock*shopBlock
	}
}

// bring marks tokens as being in a buffer or computed.
func (k *task) bring(from, to int) {
	for i := from / shopBlock; i < to/shopBlock; i++ {
		k.have[i] = true
	}
}

// work advances the engines to the current time.
func (w *testCluster) work() {
	for _, id := range sortedIDs(w.jobs) {
		k := w.jobs[id]
		w.workOn(id, k)
		if w.jobs[id] == k && k.holding(id, 0) == nil && k.holding(id, 1) == nil {
			k.begun = [2]bool{} // the start has no further effect
		}
	}
	for _, s := range w.groups {
		for _, b := range s.engines {
			for _, id := range sortedIDs(b.holds) {
				w.failEarlier(b, id)
			}
		}
	}
}

// failEarlier ends an attempt on an engine in whose place another attempt has been started, because the
// other engine has given it up.
func (w *testCluster) failEarlier(b *testEngine, id RequestID) {
	h := b.holds[id]
	if h.attempt == 0 || h.attempt == w.jobs[id].attempt {
		return
	}
	delete(b.holds, id)
	h.end = Failed{At: w.now, Request: id, Attempt: h.attempt, Role: b.shop.role}
	b.ended[id] = h
	w.report(b, h.end)
}

// holding returns the entry of a side for a start, or nil.
func (k *task) holding(id RequestID, side int) *holding {
	if h := k.engines[side].holds[id]; h != nil && h.attempt == k.attempt {
		return h
	}
	return nil
}

// workOn advances the engines of a request to the current time.
func (w *testCluster) workOn(id RequestID, k *task) {
	if !k.begun[0] || !k.begun[1] {
		return // a side waits for the other
	}
	for side := range 2 {
		h := k.holding(id, side)
		if h == nil || h.read == nil || w.now < h.read.until {
			continue
		}
		q, role := h.read, k.engines[side].shop.role
		h.read = nil
		k.bring(q.part.From, q.upto)
		h.cut(q.part, q.upto)
		if q.upto == q.part.To {
			h.last = Progress{At: w.now, Request: id, Attempt: k.attempt, Side: role, Upto: q.upto, Read: q.order}
		} else {
			h.last = Stopped{At: w.now, Request: id, Attempt: k.attempt, Side: role, Upto: q.upto, Failed: q.failed, Gone: q.gone, Read: q.order}
		}
		w.report(k.engines[side], h.last)
	}
	pe, de := k.holding(id, 0), k.holding(id, 1)
	switch {
	case !k.prefilled && pe == nil && de != nil:
		w.end(k, id, 1, Failed{At: w.now, Request: id, Attempt: k.attempt, Role: Decode})
	case !k.prefilled && pe != nil && de == nil:
		w.end(k, id, 0, Failed{At: w.now, Request: id, Attempt: k.attempt, Role: Prefill})
	case !k.prefilled && pe != nil && w.now >= k.prefills && !slices.Contains(k.have, false):
		k.prefilled = true
		de.room.buffer = 0
		w.end(k, id, 0, Finished{At: w.now, Request: id, Attempt: k.attempt, Role: Prefill})
	case k.prefilled && de != nil && w.now >= k.decodes:
		w.end(k, id, 1, Finished{At: w.now, Request: id, Attempt: k.attempt, Role: Decode})
	}
}

// end ends a side's part. Its leader keeps the report until it is confirmed, possibly in the
// next session.
func (w *testCluster) end(k *task, id RequestID, side int, ev Event) {
	b := k.engines[side]
	h := b.holds[id]
	delete(b.holds, id)
	h.end = ev
	b.ended[id] = h
	w.report(b, ev)
	if b.shop.reached() && w.rng.IntN(2) == 0 {
		delete(b.ended, id)
	}
}

// advance advances the time by ten milliseconds: engines work, groups fetch.
func (w *testCluster) advance() {
	w.now += 10 * time.Millisecond
	w.resubmit()
	w.work()
	for _, s := range w.groups {
		w.answer(s)
		if !s.reached() {
			if w.now >= s.back {
				w.register(s)
			}
			continue
		}
		f := Fetch{At: w.now, Group: s.id, Seen: w.p.seq}
		for _, b := range s.engines {
			u := b.used()
			f.Engines = append(f.Engines, EngineReport{
				Engine: b.spec.Engine, Tokens: u.hbm, Requests: len(b.holds), HBMFree: b.spec.HBMTokens - u.hbm, BufferFree: b.spec.Buffer.Bytes - u.buffer,
			})
		}
		f.Nodes = []NodeReport{{Node: NodeID(s.id), Rate: w.rateOf(s.id)}}
		w.step(f)
		w.conserving(s)
	}
	w.step(Tick{w.now})
}

// TestEveryRequestEnds: groups are lost, fall silent or fail, broken sessions lose messages,
// the planner is restarted, and storage NICs are slow for some time. The weights change, and groups change their roles.
// Requests have tenants, priorities and deadlines. After the last loss each request ends within
// a bounded time, and no engine holds memory for it. No memory of an engine is allocated twice,
// and no engine is idle while a request waits that it could take (conserving). No request is
// started after a deadline or refused before it. No request is assigned to a group for a role that
// the group does not have, and a restarted planner continues the announced switches. Tenants that always have requests in the queue
// are granted work by weight, within 10 % in each run.
func TestEveryRequestEnds(t *testing.T) {
	t.Parallel()
	again := uint64(0)
	defer func() {
		if t.Failed() {
			t.Logf("again: go test ./dualpath -run TestEveryRequestEnds -requests.first=%d -requests.seeds=1", again)
		}
	}()
	seeds := *requestSeeds
	if testing.Short() {
		seeds = 10
	}
	lost, messages := 0, map[ActionKind]int{}
	ended, looked := map[Reason]int{}, 0
	all, resumed := changing{ended: map[Reason]int{}}, 0
	for seed := *requestFirst; seed < *requestFirst+seeds; seed++ {
		if !t.Failed() {
			again = seed
		}
		policy := ReadPolicy(seed % 4)
		w := newTestCluster(t, seed, Options{
			Policy: policy, Alpha: 4000, Beta: 3000, BlockTokens: shopBlock, MinPart: 64, ReadRate: 10_000, PrefillRate: 1000, Weights: troubleWeights, GroupTimeout: time.Second, MaxAttempts: 1000,
		})
		id := RequestID(0)
		next := func() Request {
			id++
			hit := shopBlock * w.rng.IntN(60)
			return Request{ID: id, Prompt: hit + 1 + w.rng.IntN(900), Hit: hit, Output: w.rng.IntN(300), Epoch: w.epoch, Exact: w.rng.IntN(8) == 0}
		}
		// Of 10,000 seeds 60 are longer, every third of them with a backlog of all tenants.
		longer := seed%10_000 < 60
		w.trouble, w.checkEvery = newTrouble(longer && seed%3 == 0), 1
		calm := 8 * time.Second
		switch {
		case w.trouble.backlog:
			calm, w.checkEvery = time.Minute, 16
		case !longer:
			calm, w.checkEvery = time.Second, 16
		}
		for w.now < calm {
			if w.trouble.backlog {
				w.fill(next)
			} else if len(w.waiting) < 20 && w.rng.IntN(4) == 0 {
				r := w.randomize(next())
				w.waiting[id] = true
				w.step(Submit{w.now, r})
			}
			w.slowNIC()
			if s := w.groups[w.rng.IntN(len(w.groups))]; s.up && w.rng.IntN(60) == 0 {
				lost++
				w.loseGroup(s, w.rng.IntN(2) == 0)
			}
			if s := w.groups[w.rng.IntN(len(w.groups))]; s.reached() && w.rng.IntN(30) == 0 {
				w.breakSession(s)
			}
			if live := w.live(id); len(live) > 0 && w.rng.IntN(40) == 0 {
				w.giveUp(live[w.rng.IntN(len(live))])
			}
			w.change()
			if !w.trouble.backlog && w.rng.IntN(250) == 0 { // a restarted planner has no shares
				w.restart()
			}
			w.advance()
		}
		if w.trouble.backlog {
			wantShares(t, w.trouble.granted, troubleWeights)
		}
		for _, s := range w.groups {
			s.back = min(s.back, w.now)
		}
		for end := w.now + calmWithin; len(w.over) < int(id); {
			if w.advance(); w.now > end {
				t.Fatalf("seed %d, policy %v: %d of %d requests have not ended, %d never started:\n%v", seed, policy, int(id)-len(w.over), id, len(w.waiting), w.p)
			}
		}
		if st := w.p.Stats(); st.Queued != 0 || st.Serving != 0 {
			t.Errorf("seed %d: something is left: %+v", seed, st)
		}
		w.settled()
		w.advance()
		for _, b := range w.engines {
			if len(b.holds) != 0 {
				t.Errorf("seed %d: engine %d holds %v of requests that have ended", seed, b.spec.Engine, sortedIDs(b.holds))
			}
		}
		for kind, n := range w.lost {
			messages[kind] += n
		}
		for why, n := range w.trouble.ended {
			ended[why] += n
		}
		looked += w.trouble.looked
		for policy, n := range w.bumps {
			all.bumps[policy] += n
		}
		for why, n := range w.ended {
			all.ended[why] += n
		}
		resumed += w.resumed
	}
	if seeds < 10 {
		return // too few runs to see every kind of event
	}
	if lost < int(seeds) {
		t.Errorf("%d groups were lost in %d runs: nothing was tested", lost, seeds)
	}
	for _, why := range []Reason{FirstTokenLate, PastDeadline, ByGateway, OldWeights} {
		if ended[why] == 0 {
			t.Errorf("requests ended as %v; none: %v", ended, why)
		}
	}
	if looked == 0 {
		t.Error("no engine was idle while a request waited for it: nothing was tested")
	}
	if seeds < 60 {
		return
	}
	for _, kind := range []ActionKind{0, Assign, Start, Read, Cut, Drop, Recompute, Abort, Switch, Switched, Announce} {
		if messages[kind] == 0 {
			t.Errorf("broken sessions lost %v; none of kind %v (none: reports)", messages, kind)
		}
	}
	checkChanged(t, all)
	if resumed == 0 {
		t.Error("no restarted planner has resumed a switch")
	}
}

// TestLostDecodeGroup: two requests could block each other for ever if one kept decode memory
// while it waits for a prefill engine and the other kept the prefill engine while it waits for
// decode memory. Here one starts as soon as the other decode group is lost, and the other when
// the first has ended.
func TestLostDecodeGroup(t *testing.T) {
	p := newPlanner(t, Options{Beta: 500})
	now := time.Duration(0)
	holds := map[EngineID]map[RequestID]bool{1: {}, 2: {}, 3: {}}
	started := map[RequestID]EngineID{} // the decode engine
	step := func(ev Event) {
		for _, a := range p.Step(ev) {
			switch a.Kind {
			case Assign:
				holds[a.Engine][a.Request] = true
			case Start:
				started[a.Request] = a.DE
			case Abort:
				delete(holds[a.Engine], a.Request)
				delete(started, a.Request)
			}
		}
	}
	fetch := func(e EngineID) { // an engine is a group
		tokens := 960 * len(holds[e])
		step(Fetch{At: now, Group: GroupID(e), Seen: p.seq, Engines: []EngineReport{{Engine: e, Tokens: tokens, HBMFree: 1000 - tokens}}})
	}
	step(GroupUp{Group: 1, Role: Prefill, Engines: []EngineSpec{{Engine: 1, Node: 1}}})
	for e := EngineID(2); e <= 3; e++ {
		step(GroupUp{Group: GroupID(e), Role: Decode, Engines: []EngineSpec{{Engine: e, Node: NodeID(e), HBMTokens: 1000}}})
	}
	for id := RequestID(1); id <= 2; id++ {
		step(Submit{Request: Request{ID: id, Prompt: 900, Output: 60}})
	}
	fetch(2)
	fetch(3)
	fetch(1)
	lost := started[1]
	if len(started) != 1 || lost == 0 {
		t.Fatalf("started %v; want request 1 alone: the prefill engine is full", started)
	}
	step(GroupDown{At: now, Group: GroupID(lost)})
	delete(started, 1)
	for range 100 {
		now += 10 * time.Millisecond
		for e := EngineID(1); e <= 3; e++ {
			if e != lost {
				fetch(e)
			}
		}
		for id := RequestID(1); id <= 2; id++ {
			if de, ok := started[id]; ok {
				step(Finished{At: now, Request: id, Role: Prefill})
				step(Finished{At: now, Request: id, Role: Decode})
				delete(started, id)
				delete(holds[1], id)
				delete(holds[de], id)
			}
		}
	}
	if st := p.Stats(); st.Finished != 2 {
		t.Errorf("a second after the loss: %+v\n%v", st, p)
	}
}
