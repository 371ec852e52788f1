package leader

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

// split are options with which both sides read, from two blocks on, and with which no
// read is too slow.
var split = dualpath.Options{MinPart: 16, Patience: time.Hour}

// TestRequest: both engines get the submitted request, their own part of the cached prefix
// and the address of the other engine. The planner gets their reports, and the group's state.
func TestRequest(t *testing.T) {
	h := newHost(t, split)
	pe, de := h.newEngine(), h.newEngine()
	pm, dm := member("P", pe), member("D", de)
	pm.Peer.Token, dm.Peer.Token = rdma.Token("of P"), rdma.Token("of D")
	dm.Footprint = traffic.Footprint{Buffer: 1 << 20, Block: geo.PieceBytes(0), Sums: 16, Request: 4096}
	h.lead(Prefill, pm)
	h.lead(Decode, dm)
	h.await("two groups", groups(2))
	r := h.submit("r", 8*16)
	p, d := pe.started(), de.started()
	for _, w := range []*work{p, d} {
		if w.ID != "r" || w.Name != p.Name || w.Namespace != "m" || w.Epoch != kv.Epoch(3) || w.Prompt != 161 || w.Output != 5 || w.Hit != 8 || string(w.Payload) != "of r" {
			t.Errorf("started %v", w)
		}
	}
	if p.Role != Prefill || p.PeerEngine != "D" || string(p.Peer.Token) != "of D" || d.Role != Decode || d.PeerEngine != "P" || string(d.Peer.Token) != "of P" {
		t.Errorf("started %v and %v", p, d)
	}
	if parts := slices.Concat(p.Parts, d.Parts); len(parts) != 2 || parts[0].From != 0 || parts[0].To != parts[1].From || parts[1].To != 8 {
		t.Errorf("parts %v; want two that make up [0, 8)", parts)
	}
	r.want(pb.RequestUpdate_KIND_STARTED)
	h.await("the state of the engines", func(top *pb.TopResponse) bool {
		queue := uint64(0)
		for _, g := range top.Groups {
			e := g.Engines[0]
			if e.Requests != 1 || g.Role == pb.Side_SIDE_DECODE && (e.Tokens != 166 || e.HbmFreeTokens > 16*(1000-11)) {
				return false
			}
			queue += g.Nodes[0].ReadQueueTokens
		}
		return queue == 8*16
	})
	p.readAll()
	d.readAll()
	h.await("empty reading queues", func(top *pb.TopResponse) bool {
		return top.Groups[0].Nodes[0].ReadQueueTokens+top.Groups[1].Nodes[0].ReadQueueTokens == 0
	})
	p.Done(nil)
	r.want(pb.RequestUpdate_KIND_PREFILLED)
	d.Passed()
	d.Done(nil)
	d.Done(errors.New("a second end")) // has no effect
	r.want(pb.RequestUpdate_KIND_FINISHED)
	if p.ctx.Err() == nil || d.ctx.Err() == nil {
		t.Error("the contexts of the ended request have not ended")
	}
}

// TestPlannerRestart: the planner is killed while a request is computed and another one
// has just been prefilled. The leaders report the requests of their engines, and both requests
// continue without another start.
func TestPlannerRestart(t *testing.T) {
	h := newHost(t, split)
	pe, de := h.pair()
	h.submit("computed", 8*16)
	p1, d1 := pe.started(), de.started()
	r2 := h.submit("decoded", 0)
	p2, d2 := pe.started(), de.started()
	p2.Done(nil)
	r2.want(pb.RequestUpdate_KIND_STARTED)
	r2.want(pb.RequestUpdate_KIND_PREFILLED)
	h.Restart()
	r1, r2 := h.submit("computed", 8*16), h.submit("decoded", 0)
	h.await("both requests with their engines", func(top *pb.TopResponse) bool { return len(top.Groups) == 2 && top.Waiting == 0 && top.Serving == 2 })
	p1.readAll()
	p1.Done(nil)
	d1.readAll()
	d1.Done(nil)
	d2.Done(nil)
	r1.finished()
	r2.finished()
	pe.none()
	de.none()
	if p1.ctx.Err() == nil || d2.ctx.Err() == nil {
		t.Error("the contexts of ended requests have not ended")
	}
}

// TestAbortedIsNotHeld: an engine takes its time to end a request that the planner has
// aborted, and the planner is restarted meanwhile. The registration does not list the
// request, which no report would end.
func TestAbortedIsNotHeld(t *testing.T) {
	h := newHost(t, split)
	pe, de := h.pair()
	r := h.submit("r", 0)
	p, d := pe.started(), de.started()
	r.cancel()
	next(t, h.ctx, p.ctx.Done())
	next(t, h.ctx, d.ctx.Done())
	h.Restart()
	h.await("two groups whose engines report the load", func(top *pb.TopResponse) bool {
		return len(top.Groups) == 2 && top.Groups[0].Engines[0].Requests == 1 && top.Groups[1].Engines[0].Requests == 1
	})
	h.await("no request", func(top *pb.TopResponse) bool { return top.Waiting+top.Serving == 0 })
	p.Done(p.ctx.Err())
	d.Done(d.ctx.Err())
	h.await("idle engines", func(top *pb.TopResponse) bool {
		return top.Groups[0].Engines[0].Requests+top.Groups[1].Engines[0].Requests == 0
	})
}

// TestDoneOnce: an engine that calls Done when the context of a request ends does so also while
// its first Done ends the context. The first one counts.
func TestDoneOnce(t *testing.T) {
	h := newHost(t, split)
	pe, de := h.pair()
	r := h.submit("r", 0)
	p, d := pe.started(), de.started()
	for _, w := range []*work{p, d} {
		cancel, called := w.Request.cancel, false
		w.Request.cancel = func() {
			cancel()
			if !called {
				called = true
				w.Done(context.Canceled)
			}
		}
	}
	p.Done(nil)
	d.Done(nil)
	r.finished()
}

// TestEndDuringRegistration: a registration lists a request as held, and the request ends
// before the planner has taken the registration. The new session reports the end.
func TestEndDuringRegistration(t *testing.T) {
	h := newHost(t, split)
	var mu sync.Mutex
	var ending *work
	h.receiving = func(m *pb.LeaderMessage) {
		mu.Lock()
		defer mu.Unlock()
		if r := m.GetRegister(); r.GetRole() == pb.Side_SIDE_DECODE && ending != nil {
			if len(r.Holding) != 1 {
				t.Errorf("registered with %d requests; want 1", len(r.Holding))
			}
			ending.Done(nil)
			ending = nil
		}
	}
	pe, de := h.pair()
	h.submit("r", 0)
	p, d := pe.started(), de.started()
	h.Stop()
	mu.Lock()
	ending = d
	mu.Unlock()
	h.Start()
	r := h.submit("r", 0)
	r.finished()
	p.Done(nil)
	de.none()
}

// TestRestartLosesOrder: the planner has taken the end of a read, and is killed before the
// engine gets its order to compute the rest. The engines list their parts of the prefix, and
// the next planner starts the request again.
func TestRestartLosesOrder(t *testing.T) {
	h := newHost(t, split)
	b := &breaker{role: pb.Side_SIDE_PREFILL, lose: true, k: 4} // after REGISTERED, ASSIGN and START
	h.breakers = []*breaker{b}
	restarted := make(chan struct{})
	var stopped atomic.Bool
	h.sending = func(m *pb.LeaderMessage) {
		if m.GetRegister().GetRole() == pb.Side_SIDE_PREFILL && stopped.Load() {
			<-restarted
		}
	}
	pe, de := h.pair()
	h.submit("r", 8*16)
	p, d := pe.started(), de.started()
	d.readAll()
	stopped.Store(true)
	p.Stopped(traffic.Stop{Part: p.Parts[0], Upto: p.Parts[0].From + 1, Gone: true})
	h.await("the lost order", func(*pb.TopResponse) bool { return b.fired() })
	h.Restart()
	close(restarted)
	r := h.submit("r", 8*16)
	for _, w := range []*work{p, d} {
		next(t, h.ctx, w.ctx.Done())
		w.Done(w.ctx.Err())
	}
	p, d = pe.started(), de.started()
	p.readAll()
	d.readAll()
	p.Done(nil)
	d.Done(nil)
	r.finished()
	pe.none()
	de.none()
}

// TestMemberLost: one of two decode engines is lost. Its request is started on the other engine,
// whose own request continues. The engine returns and gets work.
func TestMemberLost(t *testing.T) {
	h := newHost(t, split)
	pe, d0, d1 := h.newEngine(), h.newEngine(), h.newEngine()
	h.lead(Prefill, member("P", pe))
	l, _ := h.lead(Decode, member("D0", d0), member("D1", d1))
	h.await("two groups", groups(2))
	ra := h.submit("a", 0)
	ra.want(pb.RequestUpdate_KIND_STARTED)
	rb := h.submit("b", 0)
	name := rb.want(pb.RequestUpdate_KIND_STARTED).DecodeEngine
	lost, other := d0, d1
	if name == "D1" {
		lost, other = d1, d0
	}
	pa, pb1 := pe.started(), pe.started()
	b, a := lost.started(), other.started()
	if !l.Remove(name) || l.Remove(name) {
		t.Error("Remove does not report whether the engine was a member")
	}
	next(t, h.ctx, b.ctx.Done())
	next(t, h.ctx, pb1.ctx.Done())
	b.Done(b.ctx.Err())
	pb1.Done(pb1.ctx.Err())
	rb.want(pb.RequestUpdate_KIND_REPLANNED)
	if u := rb.want(pb.RequestUpdate_KIND_STARTED); u.DecodeEngine == name {
		t.Errorf("started again on the lost engine %s", name)
	}
	p, d := pe.started(), other.started()
	for _, w := range []*work{pa, a, p, d} {
		w.Done(nil)
	}
	ra.finished()
	rb.finished()
	h.must(l.Add(member(name, lost)))
	if err := l.Add(member(name, lost)); err == nil || !strings.Contains(err.Error(), "is a member") {
		t.Errorf("a second engine of that name: %v", err)
	}
	h.await("two decode engines", func(top *pb.TopResponse) bool {
		return len(top.Groups) == 2 && len(top.Groups[0].Engines)+len(top.Groups[1].Engines) == 3
	})
	rc, rd := h.submit("c", 0), h.submit("d", 0)
	for _, e := range []*engine{pe, pe, lost, other} {
		e.started().Done(nil)
	}
	rc.finished()
	rd.finished()
}

// TestLastMember: the planner removes a group whose only engine is removed, at once, and has it
// again with its next engine.
func TestLastMember(t *testing.T) {
	h := newHost(t, split)
	pe, de := h.newEngine(), h.newEngine()
	h.lead(Prefill, member("P", pe))
	l, _ := h.lead(Decode, member("D", de))
	h.await("two groups", groups(2))
	r := h.submit("r", 0)
	p, d := pe.started(), de.started()
	l.Remove("D")
	for _, w := range []*work{p, d} {
		next(t, h.ctx, w.ctx.Done())
		w.Done(w.ctx.Err())
	}
	h.await("one group", groups(1))
	h.must(l.Add(member("E", de)))
	pe.started().Done(nil)
	de.started().Done(nil)
	r.finished()
}

// TestCancelWhileRead: the gateway cancels a request that is being read. The engines are aborted,
// and no part of the request stays in the reading queue.
func TestCancelWhileRead(t *testing.T) {
	h := newHost(t, split)
	pe, de := h.pair()
	r := h.submit("r", 8*16)
	p, d := pe.started(), de.started()
	part := d.Parts[0]
	d.Progress(traffic.Progress{Part: part, Upto: part.From, Bytes: geo.PieceBytes(0)})
	r.cancel()
	for _, w := range []*work{p, d} {
		next(t, h.ctx, w.ctx.Done())
		w.Done(w.ctx.Err())
		w.Stopped(traffic.Stop{Part: w.Parts[0]}) // too late to count
	}
	h.await("idle engines and storage NICs", func(top *pb.TopResponse) bool {
		for _, g := range top.Groups {
			if g.Engines[0].Requests != 0 || g.Engines[0].Tokens != 0 || g.Nodes[0].ReadQueueTokens != 0 {
				return false
			}
		}
		return true
	})
}

// TestDroppedRead: the read of the prefill side is late, and the planner lets the decode side read
// the same part. The decode side is first, and the prefill side's read is dropped.
func TestDroppedRead(t *testing.T) {
	h := newHost(t, dualpath.Options{MinPart: 16, Patience: time.Nanosecond, SlowFactor: 1e9, HedgeFactor: 1})
	pe, de := h.pair()
	r := h.submit("r", 8*16)
	p, d := pe.started(), de.started()
	d.readAll()
	o := next(t, h.ctx, de.orders)
	if o.what != "read" || o.request != d.Name || o.part != p.Parts[0] {
		t.Fatalf("ordered %+v; want a read of %v", o, p.Parts[0])
	}
	d.Progress(traffic.Progress{Part: o.part, Upto: o.part.To, Bytes: int64(o.part.Len()) * geo.PieceBytes(0)})
	if o := next(t, h.ctx, pe.orders); o.what != "cut" || o.request != p.Name {
		t.Fatalf("ordered %+v; want the end of the read", o)
	}
	p.Stopped(traffic.Stop{Part: p.Parts[0], Upto: p.Parts[0].From, Err: traffic.ErrCut})
	h.await("empty reading queues", func(top *pb.TopResponse) bool {
		return top.Groups[0].Nodes[0].ReadQueueTokens+top.Groups[1].Nodes[0].ReadQueueTokens == 0
	})
	p.Done(nil)
	d.Done(nil)
	r.finished()
}

// TestGoneBlock: a block of the prefill side's part was removed from storage. The engine gets an
// order to compute it.
func TestGoneBlock(t *testing.T) {
	h := newHost(t, split)
	pe, de := h.pair()
	r := h.submit("r", 8*16)
	p, d := pe.started(), de.started()
	d.readAll()
	part := p.Parts[0]
	p.Stopped(traffic.Stop{Part: part, Upto: part.From + 1, Gone: true})
	want := order{"recompute", p.Name, traffic.Part{From: part.From + 1, To: part.To}}
	if o := next(t, h.ctx, pe.orders); o != want {
		t.Errorf("ordered %+v; want %+v", o, want)
	}
	p.Done(nil)
	d.Done(nil)
	r.finished()
}

// TestFailedRequest: an engine fails a request, with the error context.Canceled of a
// context of its own. The planner starts the request again.
func TestFailedRequest(t *testing.T) {
	h := newHost(t, split)
	pe, de := h.pair()
	r := h.submit("r", 0)
	p, d := pe.started(), de.started()
	d.Done(errors.Join(errors.New("the device is lost"), context.Canceled))
	next(t, h.ctx, p.ctx.Done())
	p.Done(p.ctx.Err())
	pe.started().Done(nil)
	de.started().Done(nil)
	r.finished()
}

// TestUnknownEngine: an assignment names an engine that is not in the group. The leader
// reports the attempt as failed, and the planner plans the request again.
func TestUnknownEngine(t *testing.T) {
	h := newHost(t, split)
	var once sync.Once
	h.action = func(a *pb.LeaderAction) {
		if a.Kind == pb.LeaderAction_KIND_ASSIGN && a.Engine == "D" {
			once.Do(func() { a.Engine = "somebody else's" })
		}
	}
	pe, de := h.pair()
	r := h.submit("r", 0)
	p := pe.started()
	next(t, h.ctx, p.ctx.Done())
	p.Done(p.ctx.Err())
	pe.started().Done(nil)
	de.started().Done(nil)
	r.finished()
}

// TestSlowPlanner: the planner receives no message for a while. Reports wait, progress is merged,
// and the leader handles no further action, so that no more reports are made. Then every report
// arrives, and the actions are handled.
func TestSlowPlanner(t *testing.T) {
	h := newHost(t, split)
	var mu sync.Mutex
	stopped := 0
	h.sending = func(m *pb.LeaderMessage) {
		if m.GetStopped() != nil {
			mu.Lock()
			stopped++
			mu.Unlock()
		}
	}
	pe, de := h.newEngine(), h.newEngine()
	h.lead(Prefill, member("P", pe))
	l, _ := h.lead(Decode, member("D", de))
	h.await("two groups", groups(2))
	r := h.submit("a", 8*16)
	p, d := pe.started(), de.started()
	// The planner sends actions, and the leader of the decode group has handled none of them when
	// its reports are sent.
	h.gate.Lock()
	const reports = 8 * maxReports
	part := d.Parts[0]
	for range reports {
		d.Stopped(traffic.Stop{Part: part, Upto: part.From})
		d.Progress(traffic.Progress{Part: part, Upto: part.From, Bytes: 1})
	}
	l.mu.Lock()
	waiting := len(l.reports)
	l.mu.Unlock()
	if waiting < maxReports {
		t.Fatalf("%d reports wait; the planner was not slow", waiting)
	}
	r.cancel() // an action for both groups
	next(t, h.ctx, p.ctx.Done())
	if d.ctx.Err() != nil {
		l.mu.Lock()
		waiting = len(l.reports)
		l.mu.Unlock()
		t.Errorf("an action was taken while %d reports waited", waiting)
	}
	h.gate.Unlock()
	next(t, h.ctx, d.ctx.Done())
	p.Done(p.ctx.Err())
	d.Done(d.ctx.Err())
	h.await("idle engines", func(top *pb.TopResponse) bool {
		return top.Groups[0].Engines[0].Requests+top.Groups[1].Engines[0].Requests == 0
	})
	mu.Lock()
	defer mu.Unlock()
	if stopped != reports {
		t.Errorf("%d of %d reports were sent", stopped, reports)
	}
}

// TestEndOfRun: Run ends, with all its goroutines, while it waits for an unreachable planner, while
// a message waits for a slow planner, and without members. The contexts of its requests end.
func TestEndOfRun(t *testing.T) {
	t.Run("planner away", func(t *testing.T) {
		h := newHost(t, split)
		h.Stop()
		_, stop := h.lead(Prefill, member("P", h.newEngine()))
		stop()
	})
	t.Run("planner slow", func(t *testing.T) {
		h := newHost(t, split)
		pe, de := h.newEngine(), h.newEngine()
		h.lead(Prefill, member("P", pe))
		l, stop := h.lead(Decode, member("D", de))
		h.await("two groups", groups(2))
		h.submit("r", 8*16)
		d := de.started()
		pe.started()
		h.gate.Lock()
		for range 8 * maxReports {
			d.Stopped(traffic.Stop{Part: d.Parts[0]})
		}
		stop()
		h.gate.Unlock()
		if d.ctx.Err() == nil {
			t.Error("the context of a request has not ended")
		}
		d.Done(d.ctx.Err())
		if len(l.reports) != 0 || len(l.held) != 0 {
			t.Errorf("%d reports and %d requests are left", len(l.reports), len(l.held))
		}
	})
	t.Run("in order", func(t *testing.T) {
		h := newHost(t, split)
		pe, de := h.newEngine(), h.newEngine()
		h.lead(Prefill, member("P", pe))
		_, stop := h.lead(Decode, member("D", de))
		h.await("two groups", groups(2))
		r := h.submit("r", 0)
		r.want(pb.RequestUpdate_KIND_STARTED)
		stop()
		// The leader closed its stream, so the planner does not wait for the group to return.
		r.want(pb.RequestUpdate_KIND_REPLANNED)
		h.await("one group", groups(1))
	})
	t.Run("no members", func(t *testing.T) {
		h := newHost(t, split)
		_, stop := h.lead(Prefill)
		stop()
	})
}

// TestOptions: New refuses options that the planner would refuse, with the reason.
func TestOptions(t *testing.T) {
	h := newHost(t, split)
	good := func() Options {
		return Options{Group: "g", Node: "n", Role: Decode, Geometry: geo, Planner: h.Conn, Members: []Member{member("D", h.newEngine())}}
	}
	for want, change := range map[string]func(*Options){
		"name of the group":      func(o *Options) { o.Group = "" },
		"name of the node":       func(o *Options) { o.Node = strings.Repeat("n", maxName+1) },
		`"g\xff" of the group`:   func(o *Options) { o.Group = "g\xff" },
		"role 0":                 func(o *Options) { o.Role = 0 },
		"block of 0 tokens":      func(o *Options) { o.Geometry.BlockTokens = 0 },
		"no connection":          func(o *Options) { o.Planner = nil },
		"a fetch every -1ns":     func(o *Options) { o.FetchEvery = -1 },
		"is listed twice":        func(o *Options) { o.Members = append(o.Members, o.Members[0]) },
		"name of the engine":     func(o *Options) { o.Members[0].Name = "" },
		"no Engine":              func(o *Options) { o.Members[0].Engine = nil },
		"-1 device blocks":       func(o *Options) { o.Members[0].DeviceBlocks = -1 },
		"DeviceBlocks is 0":      func(o *Options) { o.Members[0].DeviceBlocks = 0 },
		"address with 1000 NICs": func(o *Options) { o.Members[0].Peer.Addr.NICs = make([]rdma.NetAddr, 1000) },
	} {
		o := good()
		change(&o)
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want an error with %q", err, want)
		}
	}
	if _, err := New(good()); err != nil {
		t.Error(err)
	}
}
