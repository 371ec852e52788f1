package leader

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/internal/testkit"
)

// outcome is the outcome of one read of an engine.
type outcome int

const (
	whole  outcome = iota // the part is read
	fails                 // storage fails at the second block
	gone                  // storage does not have the second block
	stalls                // the second block does not arrive until the read is cut
	silent                // no block arrives until the read is cut
)

// course is the behaviour of a request's engines: the outcomes of their reads in order, then whole,
// and the end of the first attempt's decode.
type course struct {
	name    string
	options dualpath.Options
	reads   map[Role][]outcome
	err     error
	// cancel: the gateway cancels the request when both engines have started it, and submits it
	// again.
	cancel bool
}

var courses = []course{
	{name: "read", options: split},
	{name: "moved", options: split, reads: map[Role][]outcome{Prefill: {fails}, Decode: {whole, gone}}},
	{
		name: "cut", options: dualpath.Options{MinPart: 16, Patience: time.Nanosecond, SlowFactor: 1.1, HedgeFactor: 1e9},
		reads: map[Role][]outcome{Prefill: {stalls}},
	},
	{
		name: "hedged", options: dualpath.Options{MinPart: 16, Patience: time.Nanosecond, SlowFactor: 1e9, HedgeFactor: 1},
		reads: map[Role][]outcome{Prefill: {silent}},
	},
	{name: "failed", options: split, err: errors.New("the device is lost")},
	{name: "cancelled", options: split, reads: map[Role][]outcome{Prefill: {silent}}, cancel: true},
}

// TestBrokenSession: the session of a group breaks at each message of a request's course, in either
// direction. The message is lost, or is the last one that arrives. The planner continues to run. No
// deadline and no group timeout is set. Each time the request ends as expected, and no state of it
// is left.
func TestBrokenSession(t *testing.T) {
	testkit.Long(t, "each of some 250 broken sessions waits until the leader tries again")
	for _, c := range courses {
		for _, role := range []Role{Prefill, Decode} {
			for _, to := range []string{"planner", "leader"} {
				for _, lose := range []bool{true, false} {
					t.Run(fmt.Sprintf("%s/%v/to %s/lost=%v", c.name, role, to, lose), func(t *testing.T) {
						for k, more := 1, true; more; k++ {
							more = t.Run(fmt.Sprint(k), func(t *testing.T) {
								b := &breaker{role: pb.Side(role), toPlanner: to == "planner", lose: lose, k: k}
								c.run(t, func(h *host) { h.breakers = []*breaker{b} })
								more = b.fired()
							}) && more
						}
					})
				}
			}
		}
	}
}

// TestKilledPlanner: the planner is killed at each message of a request's course, in either
// direction. A message to the planner is lost. A message to a leader is lost, or is the last one
// that arrives. The next planner has no state. Each time the request ends, is planned again at most
// once more than in its course, and leaves no state.
func TestKilledPlanner(t *testing.T) {
	testkit.Long(t, "after each of some 200 kills the leaders wait until they try again")
	for _, c := range courses {
		for _, role := range []Role{Prefill, Decode} {
			for _, at := range []struct {
				name            string
				toPlanner, lose bool
			}{{"lost to planner", true, true}, {"lost to leader", false, true}, {"last to leader", false, false}} {
				t.Run(fmt.Sprintf("%s/%v/%s", c.name, role, at.name), func(t *testing.T) {
					for k, more := 1, true; more; k++ {
						t.Run(fmt.Sprint(k), func(t *testing.T) {
							b := &breaker{role: pb.Side(role), toPlanner: at.toPlanner, lose: at.lose, kills: true, k: k}
							defer func() { more = b.fired() }()
							c.run(t, func(h *host) { h.breakers = []*breaker{b} })
						})
					}
				})
			}
		}
	}
}

// TestBrokenSessions: three sessions break during a request, at messages chosen by a seed.
func TestBrokenSessions(t *testing.T) {
	testkit.Long(t, "each of 120 requests waits until leaders try again")
	for _, c := range courses {
		for seed := range uint64(20) {
			t.Run(fmt.Sprintf("%s/%d", c.name, seed), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 1))
				c.run(t, func(h *host) {
					for range 3 {
						h.breakers = append(h.breakers, &breaker{
							role: pb.Side(Prefill + Role(rng.IntN(2))), toPlanner: rng.IntN(2) == 0, lose: rng.IntN(2) == 0, k: 1 + rng.IntN(8),
						})
					}
				})
			})
		}
	}
}

// TestOldPeers: a leader of an earlier version reports no orders and waits for no
// confirmation, and a planner of an earlier version has no number and confirms nothing.
func TestOldPeers(t *testing.T) {
	for name, peers := range map[string]struct {
		sending func(*pb.LeaderMessage)
		action  func(*pb.LeaderAction)
	}{
		"leader": {sending: func(m *pb.LeaderMessage) {
			if r := m.GetRegister(); r != nil {
				r.Confirm, r.Planner, r.Seen = false, 0, 0
				r.Holding = slices.DeleteFunc(r.Holding, func(h *pb.HeldRequest) bool { return h.Ended })
				for _, h := range r.Holding {
					h.Order, h.Parts, h.PeerEngine, h.Reading = 0, nil, "", nil
				}
			}
			if p := m.GetProgress(); p != nil {
				p.Read = 0
			}
			if s := m.GetStopped(); s != nil {
				s.Read = 0
			}
		}, action: func(a *pb.LeaderAction) { a.Planner = 0 }},
		"planner": {sending: func(m *pb.LeaderMessage) {
			if r := m.GetRegister(); r != nil {
				r.Confirm, r.Planner = false, 0
			}
		}, action: func(a *pb.LeaderAction) { a.Planner = 0 }},
	} {
		for _, c := range courses {
			t.Run(name+"/"+c.name, func(t *testing.T) {
				c.run(t, func(h *host) { h.sending, h.action = peers.sending, peers.action })
			})
		}
		t.Run(name+"/start lost", func(t *testing.T) {
			courses[0].run(t, func(h *host) {
				h.sending, h.action = peers.sending, peers.action
				h.breakers = []*breaker{{role: pb.Side_SIDE_DECODE, lose: true, k: 3}}
			})
		})
	}
}

// run serves one request. prepare changes the host before the sessions begin.
func (c *course) run(t *testing.T, prepare func(*host)) {
	h := newHost(t, c.options)
	prepare(h)
	s := &stage{h: h, course: c, attempts: map[string]*attempt{}, began: make(chan struct{}, 1)}
	var leaders []*Leader
	for _, role := range []Role{Prefill, Decode} {
		l, _ := h.lead(role, member(role.String(), &actor{s, role}))
		leaders = append(leaders, l)
	}
	r := h.serve("r", 8*16)
	if c.cancel {
		next(t, h.ctx, s.began)
		r.cancel()
		<-r.end
		h.await("the request's end, or that of the planner", func(top *pb.TopResponse) bool { return top.Serving+top.Waiting == 0 || h.killed() })
		s.resume(h.kills())
		r = h.serve("r", 8*16)
	}
	if err := next(t, h.ctx, r.end); err != nil {
		t.Fatal(err)
	}
	replanned := uint64(0)
	h.await("idle engines, and no report that is not confirmed", func(top *pb.TopResponse) bool {
		if top.Serving+top.Waiting != 0 || len(top.Groups) != 2 {
			return false
		}
		for i, g := range top.Groups {
			if g.Engines[0].Requests != 0 || g.Nodes[0].ReadQueueTokens != 0 {
				return false
			}
			l := leaders[i]
			l.mu.Lock()
			left := len(l.held) + len(l.ended) + len(l.reports)
			l.mu.Unlock()
			if left != 0 {
				return false
			}
		}
		replanned = top.Replanned
		return true
	})
	if most := c.replans(); h.kills() && replanned > most {
		t.Errorf("planned again %d times; want at most %d", replanned, most)
	}
	s.check(t, h.kills())
}

// replans returns the maximum number of times that a restarted planner plans the request again:
// once, and once for each failure in its course.
func (c *course) replans() uint64 {
	if c.err != nil {
		return 2
	}
	return 1
}

// stage has the engines of one request.
type stage struct {
	h      *host
	course *course
	began  chan struct{} // both engines have started an attempt

	mu       sync.Mutex
	attempts map[string]*attempt
	failed   bool // the decode of the first attempt has failed
	resumed  bool // the course continues without its outcomes
	decoded  []string
}

// attempt is an attempt at the request on both engines.
type attempt struct {
	work  map[Role]*Request
	reads map[Role]int
	// stalled is the read of each side that waits for its end.
	stalled map[Role]*traffic.Stop
	have    [8]bool
	ended   map[Role]bool
}

// actor is one engine.
type actor struct {
	*stage
	role Role
}

func (a *actor) Start(ctx context.Context, r *Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.attempts[r.Name]
	if t == nil {
		t = &attempt{work: map[Role]*Request{}, reads: map[Role]int{}, stalled: map[Role]*traffic.Stop{}, ended: map[Role]bool{}}
		a.attempts[r.Name] = t
	}
	t.work[a.role] = r
	context.AfterFunc(ctx, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if t.end(a.role, ctx.Err()) {
			// The traffic manager of the engine cancels the other engine's job.
			t.end(Prefill+Decode-a.role, errors.New("cancelled by the peer"))
		}
	})
	for _, p := range r.Parts {
		a.read(t, p)
	}
	if len(t.work) == 2 {
		select {
		case a.began <- struct{}{}:
		default:
		}
	}
	a.progress(t, r.Name)
}

func (a *actor) Read(request string, p traffic.Part) {
	a.order(request, func(t *attempt) { a.read(t, p) })
}

func (a *actor) Cut(request string) {
	a.order(request, func(t *attempt) {
		if stop := t.stalled[a.role]; stop != nil {
			delete(t.stalled, a.role)
			t.work[a.role].Stopped(*stop)
		}
	})
}

func (a *actor) Recompute(request string, p traffic.Part) {
	a.order(request, func(t *attempt) { t.addReady(p.From, p.To) })
}

// order performs an order about a running attempt.
func (a *actor) order(request string, f func(*attempt)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.attempts[request]
	if t == nil || t.ended[a.role] {
		return
	}
	f(t)
	a.progress(t, request)
}

// addReady records blocks that are in a buffer or are computed.
func (t *attempt) addReady(from, to int) {
	for i := from; i < to; i++ {
		t.have[i] = true
	}
}

// arrive marks the blocks of a part before upto as arrived.
func (t *attempt) arrive(role Role, p traffic.Part, upto int) {
	t.addReady(p.From, upto)
	t.work[role].Progress(traffic.Progress{Part: p, Upto: upto, Bytes: int64(upto-p.From) * geo.PieceBytes(0)})
}

// read reads a part as the course has it.
func (a *actor) read(t *attempt, p traffic.Part) {
	o := whole
	if n := t.reads[a.role]; n < len(a.course.reads[a.role]) && !a.resumed {
		o = a.course.reads[a.role][n]
	}
	t.reads[a.role]++
	r := t.work[a.role]
	upto := p.From + 1
	switch o {
	case whole:
		upto = p.To
	case silent:
		upto = p.From
	}
	t.arrive(a.role, p, upto)
	switch o {
	case fails:
		r.Stopped(traffic.Stop{Part: p, Upto: upto, Err: errors.New("the NIC is lost")})
	case gone:
		r.Stopped(traffic.Stop{Part: p, Upto: upto, Gone: true})
	case stalls, silent:
		t.stalled[a.role] = &traffic.Stop{Part: p, Upto: upto, Err: traffic.ErrCut}
	}
}

// progress ends prefill when every cached block has arrived and no read runs, and then decode.
func (s *stage) progress(t *attempt, name string) {
	if len(t.work) < 2 || len(t.stalled) > 0 {
		return
	}
	for _, have := range t.have {
		if !have {
			return
		}
	}
	if s.course.err != nil && !s.failed {
		s.failed = true
		t.end(Decode, s.course.err)
		return
	}
	t.end(Prefill, nil)
	if t.end(Decode, nil) {
		s.decoded = append(s.decoded, name)
	}
}

// end ends an engine's part, once, and reports whether this call did.
func (t *attempt) end(role Role, err error) bool {
	r := t.work[role]
	if r == nil || t.ended[role] {
		return false
	}
	t.ended[role] = true
	delete(t.stalled, role)
	r.Done(err)
	return true
}

// resume makes every further read succeed. With stalled, the reads that wait for their end succeed
// too. With a planner without state the cancelled attempt may continue.
func (s *stage) resume(stalled bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resumed = true
	for name, t := range s.attempts {
		for role, stop := range t.stalled {
			if stalled {
				delete(t.stalled, role)
				t.arrive(role, stop.Part, stop.Part.To)
			}
		}
		s.progress(t, name)
	}
}

// check fails the test if an engine has not ended an attempt, or if the request was decoded
// more than once. A planner without state may have a request decoded again.
func (s *stage) check(t *testing.T, killed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.decoded); n == 0 || n > 1 && !killed {
		t.Errorf("decoded %v; want one attempt", s.decoded)
	}
	for name, a := range s.attempts {
		for role := range a.work {
			if !a.ended[role] {
				t.Errorf("%v has not ended %s", role, name)
			}
		}
	}
}
