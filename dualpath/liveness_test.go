package dualpath

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// workshop is a cluster in virtual time whose engines have memories of a size and
// report truly what is left of them. Groups are lost and come back, fall silent,
// engines fail; whatever an engine has started it finishes some time later, unless
// it is lost or told to leave it. It checks that no memory is given twice.
type workshop struct {
	t    *testing.T
	p    *Planner
	rng  *rand.Rand
	now  time.Duration
	seed uint64

	groups  []*shop
	engines map[EngineID]*bench
	jobs    map[RequestID]*task
	waiting map[RequestID]time.Duration // submitted and neither started nor rejected
	started map[RequestID]bool
	over    map[RequestID]bool
}

// shop is one group.
type shop struct {
	id   GroupID
	role Role
	up   bool
	// back is when a lost or silent group is back.
	back    time.Duration
	silent  bool
	engines []*bench
}

// bench is one engine and what it holds.
type bench struct {
	spec  EngineSpec
	role  Role
	holds map[RequestID]room
}

// used is the sum of what an engine holds.
func (b *bench) used() (u room) {
	for _, h := range b.holds {
		u.hbm, u.buffer = u.hbm+h.hbm, u.buffer+h.buffer
	}
	return u
}

// task is a request that has been started.
type task struct {
	attempt           uint64
	pe, de            EngineID
	parts             []Part
	prefills, decodes time.Duration
	prefilled         bool
}

const (
	shopBlock = 16
	// calmWithin is longer than all requests take one after the other, with the time
	// in which a silent group is noticed.
	calmWithin = 60 * time.Second
)

func newWorkshop(t *testing.T, seed uint64, o Options) *workshop {
	w := &workshop{
		t: t, p: newPlanner(t, o), rng: rand.New(rand.NewPCG(seed, 3)), seed: seed, engines: map[EngineID]*bench{},
		jobs: map[RequestID]*task{}, waiting: map[RequestID]time.Duration{}, started: map[RequestID]bool{}, over: map[RequestID]bool{},
	}
	for g := range GroupID(5) {
		s := &shop{id: g, role: Prefill}
		if g >= 2 {
			s.role = Decode
		}
		for i := range 1 + w.rng.IntN(2) {
			b := &bench{role: s.role, spec: EngineSpec{Engine: EngineID(int(g)*2 + i), Node: NodeID(g), HBMTokens: 2000 + 16*w.rng.IntN(100)}}
			b.spec.Buffer = Buffer{Bytes: 2500 + w.rng.IntN(2000), Block: 16, Sums: 1, Request: 8}
			s.engines = append(s.engines, b)
			w.engines[b.spec.Engine] = b
		}
		w.groups = append(w.groups, s)
		w.raise(s)
	}
	return w
}

// raise brings a group up, holding nothing.
func (w *workshop) raise(s *shop) {
	s.up, s.silent = true, false
	ev := GroupUp{At: w.now, Group: s.id, Role: s.role}
	for _, b := range s.engines {
		b.holds = map[RequestID]room{}
		ev.Engines = append(ev.Engines, b.spec)
	}
	w.step(ev)
}

// lose ends a group and what it held: at once, or without a word.
func (w *workshop) lose(s *shop, silent bool) {
	s.up, s.silent, s.back = false, silent, w.now+time.Duration(w.rng.IntN(3000))*time.Millisecond
	for _, b := range s.engines {
		b.holds = map[RequestID]room{}
	}
	if !silent {
		w.step(GroupDown{w.now, s.id})
	}
}

// step feeds an event and performs the actions.
func (w *workshop) step(ev Event) {
	for _, a := range slices.Clone(w.p.Step(ev)) {
		w.perform(&a)
	}
	check(w.p)
}

// groupOf returns the group of an engine.
func (w *workshop) groupOf(e EngineID) *shop { return w.groups[int(e)/2] }

// hold has an engine take memory for a request.
func (w *workshop) hold(e EngineID, id RequestID, n room) {
	b := w.engines[e]
	if !w.groupOf(e).up {
		return // it does not hear of it
	}
	h := b.holds[id]
	b.holds[id] = room{h.hbm + n.hbm, h.buffer + n.buffer}
	if u := b.used(); u.hbm > b.spec.HBMTokens || u.buffer > b.spec.Buffer.Bytes {
		w.t.Fatalf("seed %d, %v: engine %d has %+v for %d requests, which take %+v", w.seed, w.now, e, b.size(), len(b.holds), u)
	}
}

// size is what an engine has.
func (b *bench) size() room { return b.spec.size() }

// perform does one action.
func (w *workshop) perform(a *Action) {
	r := w.p.requests[a.Request]
	switch a.Kind {
	case Assign:
		n := r.Prompt
		if a.Side == Decode {
			n += r.Output
		}
		w.hold(a.Engine, a.Request, room{hbm: (n + shopBlock - 1) / shopBlock * shopBlock})
	case Start:
		delete(w.waiting, a.Request)
		w.started[a.Request] = true
		blocks := (r.Prompt + shopBlock - 1) / shopBlock
		reads := 0
		k := &task{attempt: a.Seq, pe: a.PE, de: a.DE, parts: slices.Clone(a.Parts[:a.NParts])}
		for _, part := range k.parts {
			if part.Side == Prefill {
				reads += part.Len() / shopBlock
			}
		}
		w.hold(a.PE, a.Request, room{buffer: 8 + 16*reads + blocks})
		w.hold(a.DE, a.Request, room{buffer: 8 + 17*blocks})
		k.prefills = w.now + time.Duration(10+w.rng.IntN(200))*time.Millisecond
		k.decodes = k.prefills + time.Duration(w.rng.IntN(400))*time.Millisecond
		w.jobs[a.Request] = k
	case Read:
		if a.Side == Prefill {
			w.hold(a.Engine, a.Request, room{buffer: 16 * a.Parts[0].Len() / shopBlock})
		}
		if k := w.jobs[a.Request]; k != nil {
			k.parts = append(k.parts, a.Parts[0])
		}
	case Abort:
		delete(w.engines[a.Engine].holds, a.Request)
		delete(w.jobs, a.Request)
	case Reject:
		delete(w.waiting, a.Request)
		delete(w.jobs, a.Request)
		w.over[a.Request] = true
	}
}

// work lets the engines come to the present.
func (w *workshop) work() {
	ids := make([]RequestID, 0, len(w.jobs))
	for id := range w.jobs {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		k := w.jobs[id]
		if k == nil {
			continue
		}
		pe, de := w.engines[k.pe], w.engines[k.de]
		_, prefills := pe.holds[id]
		_, decodes := de.holds[id]
		if (!k.prefilled && !prefills) || !decodes {
			// A side is gone. The other notices, and reports it.
			if k.prefilled && decodes || !k.prefilled && (prefills || decodes) {
				role := Decode
				if prefills && !k.prefilled {
					role = Prefill
				}
				delete(pe.holds, id)
				delete(de.holds, id)
				delete(w.jobs, id)
				w.step(Failed{At: w.now, Request: id, Attempt: k.attempt, Role: role})
			}
			continue
		}
		if !k.prefilled && w.now >= k.prefills {
			for _, part := range k.parts {
				w.step(Progress{At: w.now, Request: id, Attempt: k.attempt, Side: part.Side, Upto: part.To})
			}
			k.prefilled = true
			delete(pe.holds, id)
			h := de.holds[id]
			de.holds[id] = room{hbm: h.hbm}
			w.step(Finished{At: w.now, Request: id, Attempt: k.attempt, Role: Prefill})
		}
		if w.now >= k.decodes && w.jobs[id] == k {
			delete(de.holds, id)
			delete(w.jobs, id)
			w.over[id] = true
			w.step(Finished{At: w.now, Request: id, Attempt: k.attempt, Role: Decode})
		}
	}
}

// pass lets ten milliseconds pass: engines work, groups fetch.
func (w *workshop) pass() {
	w.now += 10 * time.Millisecond
	w.work()
	for _, s := range w.groups {
		if !s.up {
			if w.now >= s.back {
				w.raise(s)
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
		f.Nodes = []NodeReport{{Node: NodeID(s.id)}}
		w.step(f)
	}
	w.step(Tick{w.now})
}

// TestEveryRequestStarts: whatever groups are lost, fall silent or fail, no request
// waits for ever: when the losses end, each starts, or was rejected, within a bounded
// time; and no memory of an engine was given twice meanwhile.
func TestEveryRequestStarts(t *testing.T) {
	t.Parallel()
	seeds := uint64(60)
	if testing.Short() {
		seeds = 10
	}
	lost := 0
	for seed := range seeds {
		policy := ReadPolicy(seed % 4)
		w := newWorkshop(t, seed, Options{
			Policy: policy, Alpha: 4000, Beta: 3000, BlockTokens: shopBlock, MinPart: 64, ReadRate: 10_000, GroupTimeout: time.Second, MaxAttempts: 1000,
		})
		id := RequestID(0)
		for w.now < 8*time.Second {
			if len(w.waiting) < 20 && w.rng.IntN(4) == 0 {
				id++
				hit := shopBlock * w.rng.IntN(60)
				r := Request{ID: id, Prompt: hit + 1 + w.rng.IntN(900), Hit: hit, Output: w.rng.IntN(300)}
				w.waiting[id] = w.now
				w.step(Submit{w.now, r})
			}
			if s := w.groups[w.rng.IntN(len(w.groups))]; s.up && w.rng.IntN(60) == 0 {
				lost++
				w.lose(s, w.rng.IntN(2) == 0)
			}
			w.pass()
		}
		for _, s := range w.groups {
			s.back = min(s.back, w.now)
		}
		for end := w.now + calmWithin; len(w.over) < int(id); {
			if w.pass(); w.now > end {
				t.Fatalf("seed %d, policy %v: %d of %d requests have not ended, %d never started:\n%v", seed, policy, int(id)-len(w.over), id, len(w.waiting), w.p)
			}
		}
		if st := w.p.Stats(); st.Queued != 0 || st.Serving != 0 {
			t.Errorf("seed %d: something is left: %+v", seed, st)
		}
	}
	if lost < int(seeds) {
		t.Errorf("%d groups were lost in %d runs: nothing was tested", lost, seeds)
	}
}

// TestLostDecodeGroup: two requests are enough to hold each other for ever, where one
// keeps decode memory while it waits for a prefill engine and the other the prefill
// engine while it waits for decode memory. Here one starts as soon as the other decode
// group is lost, and the other one when the first has ended.
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
