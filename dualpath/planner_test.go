package dualpath

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
	"testing"
	"time"
)

// check panics unless the planner's state is consistent.
func check(p *Planner) {
	fail := func(format string, a ...any) { panic("dualpath: " + fmt.Sprintf(format, a...)) }
	waiting := 0
	for id, r := range p.requests {
		if r.ID != id {
			fail("request %d filed under %d", r.ID, id)
		}
		if r.at != nil {
			waiting++
		}
		if (r.phase == queued) == (r.at == nil) {
			fail("request %d: phase %d, and in the queue: %v", id, r.phase, r.at != nil)
		}
		if r.phase == queued && (r.pe != nil || r.de != nil) {
			fail("request %d waits and holds an engine", id)
		}
		if busy := r.sides[0].state != idle || r.sides[1].state != idle; busy && r.loadingAt == nil {
			fail("request %d reads and is not on the list", id)
		}
		for _, en := range [...]*engine{r.pe, r.de} {
			if en != nil && p.engines[en.id] != en {
				fail("request %d is with engine %d, which is gone", id, en.id)
			}
		}
	}
	if waiting != p.queued {
		fail("%d wait, %d are counted", waiting, p.queued)
	}
	for _, g := range p.order {
		total := 0
		for _, en := range g.engines {
			total += en.tok
		}
		if g.private != nil {
			for el := g.private.Front(); el != nil; el = el.Next() {
				total += el.Value.(*request).decodeLen()
			}
			checkReservation(g, fail)
			if g.switching() && g.private.Len() > 0 {
				fail("group %d changes its role and has %d requests in its queue", g.id, g.private.Len())
			}
		}
		if (g.totalAt != 0) != (g.role == Decode && !g.switching()) {
			fail("group %d, role %v, switching: %v: place %d among the decode groups", g.id, g.role, g.switching(), g.totalAt)
		}
		if total != g.total {
			fail("group %d: total %d, counted %d", g.id, g.total, total)
		}
	}
	full := 0
	for _, g := range p.order {
		if g.full {
			full++
		}
	}
	if full != p.full {
		fail("%d groups are full, %d are counted", full, p.full)
	}
	checkHeap("decode groups", &p.leastTotal, fail)
	checkFair(p, fail)
	checkSLO(p, fail)
}

// ledger is a cluster of engines that obey the actions, and a record of every cached token of
// every request: the reference model of the fuzz target. It does not model how the planner
// chooses, only the required results.
type ledger struct {
	t    testing.TB
	p    *Planner
	now  time.Duration
	seen map[GroupID]uint64
	up   map[GroupID]bool
	live map[RequestID]*requestRecord
	// epochs of the namespaces.
	epochs [2]uint64
	// over are requests that ended, by Reject or by decode.
	over map[RequestID]bool
}

// requestRecord is the record of one request.
type requestRecord struct {
	req      Request
	started  bool
	pe, de   EngineID
	have     []bool // by token: in a buffer, or to be recomputed
	reads    [2]Part
	cut      [2]bool
	assigned [2]bool
}

const (
	ledgerGroups  = 4 // 0 and 1 prefill, 2 and 3 decode
	ledgerEngines = 3 // of each group; each pair of groups has its own nodes
)

func newLedger(t testing.TB, o Options) *ledger {
	l := &ledger{t: t, p: newPlanner(t, o), seen: map[GroupID]uint64{}, up: map[GroupID]bool{}, live: map[RequestID]*requestRecord{}, over: map[RequestID]bool{}}
	for g := range GroupID(ledgerGroups) {
		l.groupUp(g)
	}
	return l
}

// role of a group.
func (l *ledger) role(g GroupID) Role {
	if g < ledgerGroups/2 {
		return Prefill
	}
	return Decode
}

// groupUp brings a group up.
func (l *ledger) groupUp(g GroupID) {
	e := GroupUp{At: l.now, Group: g, Role: l.role(g)}
	for i := range ledgerEngines {
		e.Engines = append(e.Engines, EngineSpec{Engine: EngineID(int(g)*ledgerEngines + i), Node: NodeID(int(g)*2 + i%2), HBMTokens: 6000})
	}
	l.up[g] = true
	l.step(e)
}

// step feeds an event and records the actions.
func (l *ledger) step(ev Event) {
	l.t.Helper()
	for _, a := range l.p.Step(ev) {
		l.record(a)
	}
	check(l.p)
}

// groupOf is the group of an engine.
func groupOf(e EngineID) GroupID { return GroupID(int(e) / ledgerEngines) }

// record records one action.
func (l *ledger) record(a Action) {
	t := l.live[a.Request]
	if t == nil {
		if a.Kind == Reject {
			return // an invalid or repeated submission
		}
		l.t.Fatalf("%v for request %d, which is not alive", a.Kind, a.Request)
	}
	for _, part := range a.Parts[:a.NParts] {
		most := t.req.Hit
		if a.Kind == Recompute {
			most = len(t.have) // includes cached tokens of earlier epochs
		}
		if part.From < 0 || part.To > most || part.Len() <= 0 {
			l.t.Fatalf("%v of request %d: part %+v of %d cached tokens", a.Kind, a.Request, part, most)
		}
	}
	switch a.Kind {
	case Assign:
		if !l.up[groupOf(a.Engine)] || l.role(groupOf(a.Engine)) != a.Side {
			l.t.Fatalf("request %d assigned to engine %d", a.Request, a.Engine)
		}
		if t.assigned[sideAt(a.Side)] {
			l.t.Fatalf("request %d assigned twice on the %v side", a.Request, a.Side)
		}
		t.assigned[sideAt(a.Side)] = true
	case Start:
		if !t.assigned[0] || !t.assigned[1] || t.started {
			l.t.Fatalf("request %d started: assigned %v, started %v", a.Request, t.assigned, t.started)
		}
		t.started, t.pe, t.de = true, a.PE, a.DE
		sum := 0
		for _, part := range a.Parts[:a.NParts] {
			t.reads[sideAt(part.Side)] = part
			sum += part.Len()
		}
		if sum != t.req.Hit {
			l.t.Fatalf("request %d: parts %+v do not cover %d cached tokens", a.Request, a.Parts[:a.NParts], t.req.Hit)
		}
	case Read:
		if t.reads[sideAt(a.Side)].Len() > 0 {
			l.t.Fatalf("request %d: the %v side reads already", a.Request, a.Side)
		}
		t.reads[sideAt(a.Side)] = a.Parts[0]
	case Cut:
		t.cut[sideAt(a.Side)] = true
	case Drop:
		t.reads[sideAt(a.Side)], t.cut[sideAt(a.Side)] = Part{}, false
	case Recompute:
		for i := a.Parts[0].From; i < a.Parts[0].To; i++ {
			t.have[i] = true
		}
	case Abort:
		t.unstart()
	case Reject:
		delete(l.live, a.Request)
		l.over[a.Request] = true
	}
}

// unstart undoes a start: the request is planned again.
func (t *requestRecord) unstart() {
	t.started, t.assigned, t.reads, t.cut = false, [2]bool{}, [2]Part{}, [2]bool{}
	clear(t.have)
}

// groupDown takes a group down, without its requests.
func (l *ledger) groupDown(g GroupID) {
	if !l.up[g] {
		return
	}
	l.up[g] = false
	for _, t := range l.live {
		if t.started && (groupOf(t.pe) == g || groupOf(t.de) == g) {
			t.unstart()
		}
	}
	l.step(GroupDown{l.now, g})
}

// ids returns the live requests in order.
func (l *ledger) ids() []RequestID {
	ids := make([]RequestID, 0, len(l.live))
	for id := range l.live {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// bump starts an epoch: earlier prefixes are not used after it.
func (l *ledger) bump(ns NamespaceID, epoch uint64) {
	l.step(Epoch{At: l.now, Namespace: ns, Epoch: epoch})
	if epoch <= l.epochs[ns] {
		return
	}
	l.epochs[ns] = epoch
	for _, t := range l.live {
		if t.req.Namespace == ns && t.req.Epoch < epoch && !t.req.Exact {
			t.req.Hit = 0
		}
	}
}

// fetch reports the planner's state, or less because engines have finished work.
func (l *ledger) fetch(g GroupID, x byte) {
	if !l.up[g] {
		l.groupUp(g)
		return
	}
	f := Fetch{At: l.now, Group: g, Seen: l.p.seq}
	for i := range ledgerEngines {
		en := l.p.engines[EngineID(int(g)*ledgerEngines+i)]
		busy := int(x) * 16
		f.Engines = append(f.Engines, EngineReport{Engine: en.id, Tokens: min(en.tok, busy), Requests: min(en.seq, int(x)%4), HBMFree: 6000 - min(en.tok, busy)})
		f.Nodes = append(f.Nodes, NodeReport{en.node.id, min(en.node.queue, busy), float64(1000 * (1 + int(x)%10))})
	}
	l.step(f)
}

// read advances a side of a request: to its end, or half-way and then to a failure.
func (l *ledger) read(id RequestID, s int, x byte) {
	t := l.live[id]
	if t == nil || !t.started || t.reads[s].Len() == 0 {
		return
	}
	part, side := t.reads[s], Role(s)+Prefill
	upto := part.From + part.Len()*int(x%5)/4
	for i := part.From; i < upto; i++ {
		t.have[i] = true
	}
	switch {
	case upto == part.To || t.cut[s] || x >= 200:
		t.reads[s], t.cut[s] = Part{}, false
		if upto == part.To {
			l.step(Progress{At: l.now, Request: id, Side: side, Upto: upto, Landed: part.Len()})
			return
		}
		l.step(Stopped{At: l.now, Request: id, Side: side, Upto: upto, Failed: x >= 200, Gone: x >= 240})
	default:
		t.reads[s].From = upto
		// More has landed than is verified, or less than the model counts: an estimate must not
		// determine which tokens are read.
		l.step(Progress{At: l.now, Request: id, Side: side, Upto: upto, Landed: int(x) * part.Len() / 128})
	}
}

// finish ends a request whose tokens are all available.
func (l *ledger) finish(id RequestID) {
	t := l.live[id]
	if !t.started || t.reads[0].Len() > 0 || t.reads[1].Len() > 0 || len(l.p.requests[id].rest) > 0 {
		return
	}
	// Engines wait until each cached token has been read or recomputed. This holds also for the
	// tokens behind the end of the usable hit.
	for i, ok := range t.have {
		if !ok {
			l.t.Fatalf("request %d: no engine has cached token %d of %d", id, i, len(t.have))
		}
	}
	l.step(Finished{l.now, id, 0, Prefill})
	l.step(Finished{l.now, id, 0, Decode})
	delete(l.live, id)
	l.over[id] = true
}

// FuzzPlanner drives the planner with a cluster that fetches, reads, fails and dies according
// to the input. Then every engine lives, and each request must end exactly once with every
// cached token read or recomputed.
func FuzzPlanner(f *testing.F) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 8 {
		b := make([]byte, 300)
		for i := 0; i < len(b); i += 4 {
			binary.LittleEndian.PutUint32(b[i:], rng.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(runScript)
}

// TestScripts runs random scripts that are longer than those of a fuzzer.
func TestScripts(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for range 100 {
		script := make([]byte, 1+rng.IntN(3000))
		for i := range script {
			script[i] = byte(rng.Uint32())
		}
		runScript(t, script)
	}
}

// runScript is one run of FuzzPlanner.
func runScript(t *testing.T, script []byte) {
	if len(script) == 0 {
		return
	}
	l := newLedger(t, Options{
		Policy: ReadPolicy(script[0] % 4), Alpha: 4000, Beta: 8000, BlockTokens: 16, MinPart: 64, ReadRate: 10_000,
		MaxExplain: 8, GroupTimeout: time.Hour,
	})
	next := RequestID(1)
	for i := 1; i+2 < len(script); i += 3 {
		op, x, y := script[i], script[i+1], script[i+2]
		l.now += time.Duration(x) * time.Millisecond
		l.event(op, x, y, &next)
	}
	// Finally every live request is completed.
	for round := 0; len(l.live) > 0; round++ {
		if round > 4*int(next)+100 {
			t.Fatalf("%d requests never end:\n%v", len(l.live), l.p)
		}
		l.now += 10 * time.Millisecond
		for g := range GroupID(ledgerGroups) {
			l.fetch(g, 0)
		}
		l.step(Tick{l.now})
		for _, id := range l.ids() {
			for s := range 2 {
				l.read(id, s, 4) // to the end
			}
			if l.live[id] != nil {
				l.finish(id)
			}
		}
	}
	for id := RequestID(1); id < next; id++ {
		if !l.over[id] {
			t.Errorf("request %d was lost", id)
		}
	}
	if st := l.p.Stats(); st.Serving != 0 || st.Loading != 0 || st.Queued != 0 {
		t.Errorf("something is left: %+v", st)
	}
}

// event performs one step of the script.
func (l *ledger) event(op, x, y byte, next *RequestID) {
	ids := l.ids()
	pick := func() (RequestID, bool) {
		if len(ids) == 0 {
			return 0, false
		}
		return ids[int(x)%len(ids)], true
	}
	switch op % 12 {
	case 0, 1, 2:
		hit := int(x) * 8
		r := Request{ID: *next, Prompt: hit + 1 + int(y), Hit: hit, Output: int(y), Epoch: uint64(y % 4), Namespace: NamespaceID(x % 2), Exact: y&64 != 0}
		*next++
		l.live[r.ID] = &requestRecord{req: r, have: make([]bool, hit)}
		if r.Epoch < l.epochs[r.Namespace] && !r.Exact {
			l.live[r.ID].req.Hit = 0
		}
		l.step(Submit{l.now, r})
	case 3, 4, 5:
		l.fetch(GroupID(y%ledgerGroups), x)
	case 6, 7:
		if id, ok := pick(); ok {
			l.read(id, int(y%2), y)
		}
	case 8:
		l.step(Tick{l.now})
	case 9:
		if id, ok := pick(); ok {
			l.finish(id)
		}
	case 10:
		if y < 60 {
			l.groupDown(GroupID(x % ledgerGroups))
		} else if id, ok := pick(); ok && y < 120 {
			l.step(Cancelled{l.now, id})
		}
	case 11:
		if id, ok := pick(); ok && y >= 128 && l.live[id].started {
			upto := int(y) * 4
			l.step(Failed{l.now, id, 0, Role(y%2) + Prefill, upto})
			if t := l.live[id]; t != nil { // it was planned again
				t.unstart()
				t.req.Hit = min(t.req.Hit, l.p.requests[id].Hit)
			}
		}
		if y < 30 {
			l.bump(NamespaceID(x%2), uint64(y%5))
		}
	}
}

// TestSeenAccounts: a fetch that is older than an assignment does not remove the assignment
// from the engine's state.
func TestSeenAccounts(t *testing.T) {
	p := newPlanner(t, Options{Beta: 1000})
	p.Step(GroupUp{Group: 1, Role: Prefill, Engines: []EngineSpec{{Engine: 1, Node: 1}}})
	p.Step(GroupUp{Group: 2, Role: Decode, Engines: []EngineSpec{{Engine: 2, Node: 2}}})
	for id := range RequestID(3) {
		p.Step(Submit{Request: Request{ID: id, Prompt: 600}})
	}
	starts := func(seen uint64) (n int) {
		for _, a := range p.Step(Fetch{Group: 1, Seen: seen, Engines: []EngineReport{{Engine: 1}}}) {
			if a.Kind == Start {
				n++
			}
		}
		return n
	}
	if got := starts(0); got != 2 { // 0 and 600 are below 1000, 1200 is not
		t.Fatalf("%d starts, want 2", got)
	}
	if got := starts(0); got != 0 {
		t.Errorf("an old report made the planner start %d requests", got)
	}
	if got := starts(p.seq); got != 1 {
		t.Errorf("a new report: %d starts, want 1", got)
	}
}

// TestOrderOfEquals: the order of requests of one length that arrive at the same time does not
// change any engine's or NIC's totals.
func TestOrderOfEquals(t *testing.T) {
	totals := func(order []int) string {
		p := newPlanner(t, Options{ReadRate: 10_000})
		up := func(g GroupID, role Role) {
			e := GroupUp{Group: g, Role: role}
			for i := range 4 {
				e.Engines = append(e.Engines, EngineSpec{Engine: EngineID(int(g)*4 + i), Node: NodeID(int(g)*2 + i/2), HBMTokens: 1 << 20})
			}
			p.Step(e)
		}
		up(0, Prefill)
		up(1, Decode)
		up(2, Decode)
		for _, id := range order {
			p.Step(Submit{Request: Request{ID: RequestID(id), Prompt: 5000, Hit: 4096, Output: 10}})
		}
		for g := range GroupID(3) {
			p.Step(Fetch{Group: g})
		}
		p.Step(Fetch{Group: 0})
		var lines []string
		for _, en := range p.engines {
			lines = append(lines, fmt.Sprint(en.id, en.tok, en.seq, en.node.id, en.node.queue, en.node.total))
		}
		sort.Strings(lines)
		return fmt.Sprint(lines)
	}
	order := make([]int, 20)
	for i := range order {
		order[i] = i + 1
	}
	want := totals(order)
	rng := rand.New(rand.NewPCG(3, 4))
	for range 20 {
		rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		if got := totals(order); got != want {
			t.Fatalf("order %v:\n%s\nwant\n%s", order, got, want)
		}
	}
}

// TestSplitBalances: for all queues and rates, the two parts of a split end within one block of
// each other, or one side has all of it.
func TestSplitBalances(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	p := newPlanner(t, Options{})
	for range 10_000 {
		a := &node{queue: rng.IntN(1 << 20), rate: 1 + rng.Float64()*1e6}
		b := &node{queue: rng.IntN(1 << 20), rate: 1 + rng.Float64()*1e6}
		hit := rng.IntN(1<<20) / 64 * 64
		x := p.balance(a, b, hit)
		if x < 0 || x > hit {
			t.Fatalf("x = %d of %d", x, hit)
		}
		if x%64 != 0 && x != hit {
			t.Fatalf("x = %d is within a block", x)
		}
		ta, tb := float64(a.queue+x)/a.rate, float64(b.queue+hit-x)/b.rate
		slack := 64/a.rate + 64/b.rate
		switch {
		case x == 0 && ta+slack < tb && hit > 0, x == hit && tb+slack < ta && hit > 0, x > 0 && x < hit && (ta-tb > slack || tb-ta > slack):
			t.Fatalf("queues %d, %d, rates %.0f, %.0f, hit %d: x = %d is done after %.3f and %.3f s", a.queue, b.queue, a.rate, b.rate, hit, x, ta, tb)
		}
	}
}

// BenchmarkPlanner measures one request from Submit to both Finished, with the fetches of its
// groups, on clusters of several sizes. It makes three decisions: the prefill engine, the
// decode engine, and the division of the read.
func BenchmarkPlanner(b *testing.B) {
	for _, nodes := range []int{3, 12, 48, 144} {
		const gpus = 8 // a group is a node
		b.Run(fmt.Sprintf("engines=%d", nodes*gpus), func(b *testing.B) {
			p := newPlanner(b, Options{})
			groups := make([]Fetch, nodes)
			for g := range groups {
				role := Decode
				if g < nodes/3 {
					role = Prefill
				}
				up := GroupUp{Group: GroupID(g), Role: role}
				groups[g] = Fetch{Group: GroupID(g), Nodes: []NodeReport{{Node: NodeID(g)}}}
				for i := range gpus {
					id := EngineID(g*gpus + i)
					up.Engines = append(up.Engines, EngineSpec{Engine: id, Node: NodeID(g), HBMTokens: 1 << 20})
					groups[g].Engines = append(groups[g].Engines, EngineReport{Engine: id, HBMFree: 1 << 20})
				}
				p.Step(up)
			}
			// Each fetch brings work for a whole group, as in a loaded cluster.
			const batch = 2 * gpus
			b.ReportAllocs()
			b.ResetTimer()
			id := RequestID(0)
			pg, dg := 0, 0
			fetch := func(g int) {
				groups[g].Seen = p.seq
				p.Step(groups[g])
			}
			for b.Loop() {
				first := id
				for range batch {
					id++
					p.Step(Submit{Request: Request{ID: id, Prompt: 33_000, Hit: 32_768, Output: 200}})
				}
				// There are twice as many decode groups as prefill groups. All fetch in turn.
				for p.queued > 0 {
					for range 2 {
						fetch(nodes/3 + dg)
						dg = (dg + 1) % (nodes - nodes/3)
					}
					fetch(pg)
					pg = (pg + 1) % (nodes / 3)
				}
				for r := first + 1; r <= id; r++ {
					p.Step(Finished{Request: r, Role: Prefill})
					p.Step(Finished{Request: r, Role: Decode})
				}
			}
			b.ReportMetric(float64(id)*3/b.Elapsed().Seconds(), "decisions/s")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// TestEpochOfFoundRequest: the weights change while a request is known from its decode group
// only, after a restart of the planner. The request continues.
func TestEpochOfFoundRequest(t *testing.T) {
	p, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	p.Step(GroupUp{
		Group: 1, Role: Decode, Engines: []EngineSpec{{Engine: 1, Node: 1, HBMTokens: 1 << 20}},
		Holding: []Held{{Request: Request{ID: 7, Prompt: 100, Hit: 64, Output: 5}, Engine: 1}},
	})
	if got := p.Step(Epoch{At: 1, Epoch: 1}); len(got) != 0 {
		t.Errorf("the planner sent %v; the prefill has ended", got)
	}
	p.Step(Finished{At: 2, Request: 7, Role: Decode})
	if st := p.Stats(); st.Finished != 1 || st.Serving != 0 {
		t.Errorf("%+v; the request has ended", st)
	}
}
