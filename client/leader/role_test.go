package leader

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/dualpath"
)

// switcher is a group of one engine whose owner is the test.
type switcher struct {
	*engine
	name string
	// requested receives the roles that the leader requests, answers has the owner's replies.
	requested chan Role
	answers   chan answer
	stop      func()
}

// answer is what Options.SwitchRole returns.
type answer struct {
	members []Member
	err     error
}

// switching leads a group that can change its role.
func (h *host) switching(name string, role Role) *switcher {
	h.Helper()
	s := &switcher{engine: h.newEngine(), name: name, requested: make(chan Role, 1), answers: make(chan answer)}
	_, s.stop = h.leadOptions(Options{Group: name, Node: name, Role: role, Members: []Member{member(name, s.engine)}, SwitchRole: func(ctx context.Context, to Role) ([]Member, error) {
		s.requested <- to
		select {
		case a := <-s.answers:
			return a.members, a.err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}})
	return s
}

// awaitGroup waits until the condition holds for a group.
func (h *host) awaitGroup(name string, ok func(*pb.RolesResponse_Group) bool) {
	h.Helper()
	h.await("group "+name+" as wanted", func(*pb.TopResponse) bool {
		r, err := h.planner.Roles(h.ctx, &pb.RolesRequest{}, grpc.WaitForReady(true))
		for _, g := range r.GetGroups() {
			if err == nil && g.Group == name && ok(g) {
				return true
			}
		}
		return false
	})
}

// order makes the planner change a group's role.
func (h *host) order(name string, to Role, policy pb.Drain) {
	h.Helper()
	_, err := h.planner.SwitchRole(h.ctx, &pb.SwitchRoleRequest{Group: name, Role: pb.Side(to), Policy: policy})
	h.must(err)
}

// TestSwitchRole: a group changes its role while its engine still ends an aborted request, and the
// planner is restarted during the switch. The request is served by another group, and the group
// serves in its new role.
func TestSwitchRole(t *testing.T) {
	h := newHost(t, dualpath.Options{})
	pe := h.newEngine()
	h.lead(Prefill, member("P", pe))
	e := h.switching("E", Decode)
	h.await("two groups", groups(2))
	h.submit("r", 0)
	slow := e.started()
	pe.started().Done(nil)
	de := h.newEngine()
	h.lead(Decode, member("D", de))
	h.await("three groups", groups(3))

	h.order("E", Prefill, pb.Drain_DRAIN_RECOMPUTE)
	next(t, h.ctx, slow.ctx.Done())
	h.awaitGroup("E", func(g *pb.RolesResponse_Group) bool { return g.Ordered && g.Requests == 0 })
	p, d := pe.started(), de.started()
	select {
	case to := <-e.requested:
		t.Errorf("SwitchRole(%v) was called while an engine held a request", to)
	default:
	}
	slow.Done(slow.ctx.Err())
	if to := next(t, h.ctx, e.requested); to != Prefill {
		t.Errorf("role %v was requested", to)
	}
	h.Restart()
	r := h.submit("r", 0)
	h.awaitGroup("E", func(g *pb.RolesResponse_Group) bool {
		return g.Ordered && g.Switching == pb.Side_SIDE_PREFILL && g.Role == pb.Side_SIDE_DECODE
	})
	other := member("E2", e.engine)
	other.DeviceBlocks = 0 // only a prefill engine may have that
	e.answers <- answer{members: []Member{other}}
	h.awaitGroup("E", func(g *pb.RolesResponse_Group) bool {
		return g.Switching == 0 && g.Role == pb.Side_SIDE_PREFILL && g.DeviceTokens == 0
	})
	// A request whose engines end it before their groups have registered again starts anew.
	for _, name := range []string{"prefill", "decode"} {
		h.awaitGroup(name, func(g *pb.RolesResponse_Group) bool { return g.Requests == 1 })
	}
	p.Done(nil)
	d.Done(nil)
	r.finished()
	// The group receives requests once its engine has reported.
	for n := 2; ; n++ {
		id := fmt.Sprintf("r%d", n)
		h.submit(id, 0)
		next(t, h.ctx, de.starts)
		select {
		case <-pe.starts:
			continue
		case w := <-e.starts:
			if w.ID != id || w.Role != Prefill || w.PeerEngine != "D" {
				t.Errorf("started %v", w)
			}
		case <-h.ctx.Done():
			t.Fatalf("no prefill engine started %s", id)
		}
		return
	}
}

// TestRoleRefused: the owner refuses, members of the new role are invalid, or the role is fixed.
// The group continues in its role, and the operator gets the reason.
func TestRoleRefused(t *testing.T) {
	h := newHost(t, dualpath.Options{})
	var lie atomic.Bool
	h.receiving = func(m *pb.LeaderMessage) {
		if r := m.GetRegister(); r != nil && lie.Load() {
			r.Switches = true
		}
	}
	de := h.newEngine()
	h.lead(Decode, member("D", de))
	e := h.switching("E", Prefill)
	h.leadOptions(Options{Group: "Q", Node: "Q", Role: Prefill, Members: []Member{member("Q", h.newEngine())}})
	h.await("three groups", groups(3))
	kept := func(name, why string) {
		t.Helper()
		h.awaitGroup(name, func(g *pb.RolesResponse_Group) bool {
			return g.Switching == 0 && g.Role == pb.Side_SIDE_PREFILL && strings.Contains(g.Kept, why)
		})
	}
	h.order("E", Decode, 0)
	next(t, h.ctx, e.requested)
	e.answers <- answer{err: errors.New("no memory for the larger batch")}
	kept("E", "its leader refused: no memory for the larger batch")

	h.order("E", Decode, 0)
	next(t, h.ctx, e.requested)
	e.answers <- answer{members: []Member{{Name: "E", Engine: e}}}
	kept("E", "DeviceBlocks is 0")

	// A planner that orders a switch although the leader does not support it.
	if _, err := h.planner.SwitchRole(h.ctx, &pb.SwitchRoleRequest{Group: "Q", Role: pb.Side_SIDE_DECODE}); err == nil || !strings.Contains(err.Error(), "fixed role") {
		t.Errorf("a group with a fixed role: %v", err)
	}
	lie.Store(true)
	h.Restart()
	h.await("three groups", groups(3))
	h.order("Q", Decode, 0)
	kept("Q", "fixed role")

	// The leader ends while its owner has not replied.
	h.order("E", Decode, 0)
	next(t, h.ctx, e.requested)
	e.stop()
	h.await("two groups", groups(2))
}

// TestMembersChangeDuringSwitch: an engine that is removed while the group changes its role does not return with
// the new role, and an engine that is added meanwhile stays, whichever members SwitchRole returns.
func TestMembersChangeDuringSwitch(t *testing.T) {
	for _, c := range []struct {
		name     string
		returned []string // by SwitchRole; nil: the same members
		want     string
	}{
		{"the same members", nil, "[E1 E2]"},
		{"all members named", []string{"E0", "E1", "E2", "E3"}, "[E1 E2 E3]"},
		{"some members named", []string{"E0", "E1"}, "[E1 E2]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t, dualpath.Options{})
			e := h.newEngine()
			h.lead(Decode, member("D", e))
			requested, answers := make(chan Role, 1), make(chan []Member, 1)
			l, _ := h.leadOptions(Options{Group: "E", Node: "E", Role: Decode, Members: []Member{member("E0", e), member("E1", e)}, SwitchRole: func(ctx context.Context, to Role) ([]Member, error) {
				requested <- to
				select {
				case members := <-answers:
					return members, nil
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}})
			h.await("two groups", groups(2))
			h.order("E", Prefill, 0)
			next(t, h.ctx, requested)
			if !l.Remove("E0") {
				t.Fatal("E0 was not a member")
			}
			h.must(l.Add(member("E2", e)))
			var members []Member
			for _, name := range c.returned {
				members = append(members, member(name, e))
			}
			answers <- members
			var got string
			h.await("the new role", func(top *pb.TopResponse) bool {
				for _, g := range top.Groups {
					if g.Group == "E" && g.Role == pb.Side_SIDE_PREFILL {
						var names []string
						for _, engine := range g.Engines {
							names = append(names, engine.Engine)
						}
						slices.Sort(names)
						got = fmt.Sprint(names)
						return true
					}
				}
				return false
			})
			if got != c.want {
				t.Errorf("engines %s in the new role, want %s", got, c.want)
			}
			if members != nil && members[0].PromptBlocks != 0 {
				t.Error("the slice that SwitchRole returned was changed")
			}
		})
	}
}

// worker is an engine that ends its part of each request at once, or keeps the requests.
type worker struct {
	t    *testing.T
	name string

	mu   sync.Mutex
	role Role
	// keeps: the engine keeps the requests that it starts. kept are those, and started is signalled.
	keeps   bool
	kept    []*Request
	started chan struct{}
}

func (e *worker) Start(ctx context.Context, r *Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if r.Role != e.role {
		e.t.Errorf("engine %s, whose role is %v, has started %s as %v", e.name, e.role, r.Name, r.Role)
	}
	if !e.keeps {
		r.Done(nil)
		return
	}
	context.AfterFunc(ctx, func() { r.Done(ctx.Err()) })
	e.kept = append(e.kept, r)
	signal(e.started)
}

func (*worker) Read(string, traffic.Part)      {}
func (*worker) Cut(string)                     {}
func (*worker) Recompute(string, traffic.Part) {}

// release ends the requests that the engine has kept.
func (e *worker) release() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.keeps = false
	for _, r := range e.kept {
		r.Done(nil)
	}
}

// switchRole changes the engine's role; it is Options.SwitchRole.
func (e *worker) switchRole(_ context.Context, to Role) ([]Member, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.role = to
	return nil, nil
}

// workers leads a group for each name: P prefills, the others decode. E keeps its requests and can change its role.
func (h *host) workers(names ...string) map[string]*worker {
	h.Helper()
	engines := map[string]*worker{}
	for _, name := range names {
		e := &worker{t: h.T, name: name, role: Decode, keeps: name == "E", started: make(chan struct{}, 1)}
		if name == "P" {
			e.role = Prefill
		}
		engines[name] = e
		o := Options{Group: name, Node: name, Role: e.role, Members: []Member{member(name, e)}}
		if name == "E" {
			o.SwitchRole = e.switchRole
		}
		h.leadOptions(o)
	}
	h.await("the groups", groups(len(names)))
	return engines
}

// TestSwitchOfOldLeader: a leader of an earlier version ignores the announcement of a switch. The switch ends with
// the planner, and after a second order the group changes its role.
func TestSwitchOfOldLeader(t *testing.T) {
	h := newHost(t, dualpath.Options{})
	h.action = func(a *pb.LeaderAction) {
		if a.Kind == pb.LeaderAction_KIND_ANNOUNCE {
			a.Kind = 99
		}
	}
	e := h.workers("P", "E")["E"]
	s := h.serve("r", 0)
	next(t, h.ctx, e.started)
	h.lead(Decode, member("D", &worker{t: t, name: "D", role: Decode}))
	h.await("three groups", groups(3))
	h.order("E", Prefill, pb.Drain_DRAIN_FINISH)
	h.Restart()
	h.await("three groups", groups(3))
	h.awaitGroup("E", func(g *pb.RolesResponse_Group) bool { return g.Switching == 0 && g.Role == pb.Side_SIDE_DECODE })
	h.order("E", Prefill, pb.Drain_DRAIN_FINISH)
	e.release()
	h.awaitGroup("E", func(g *pb.RolesResponse_Group) bool { return g.Switching == 0 && g.Role == pb.Side_SIDE_PREFILL })
	if err := <-s.end; err != nil {
		t.Error(err)
	}
}

// TestSwitchOutlivesPlanner: group E has requests and gets the order to change its role. Then the planner
// is killed, or the session of the group breaks, at a message of the switch. At the next planner the
// group registers before or after the others. The order is repeated only if the call has failed, the
// group changes its role, and all requests end. No engine starts a request in a role that it does
// not have.
func TestSwitchOutlivesPlanner(t *testing.T) {
	action := func(k pb.LeaderAction_Kind) func(any) bool {
		return func(m any) bool { a, ok := m.(*pb.LeaderAction); return ok && a.Kind == k }
	}
	for _, at := range []struct {
		name            string
		toPlanner, lose bool
		role            Role
		counts          func(any) bool
	}{
		{"announce lost", false, true, Decode, action(pb.LeaderAction_KIND_ANNOUNCE)},
		{"announced", false, false, Decode, action(pb.LeaderAction_KIND_ANNOUNCE)},
		{"order lost", false, true, Decode, action(pb.LeaderAction_KIND_SWITCH)},
		{"ordered", false, false, Decode, action(pb.LeaderAction_KIND_SWITCH)},
		{"registration lost", true, true, Prefill, func(m any) bool {
			lm, ok := m.(*pb.LeaderMessage)
			return ok && lm.GetRegister().GetGroup() == "E"
		}},
		{"drained", false, false, Decode, func(any) bool { return false }},
	} {
		for _, kills := range []bool{true, false} {
			for _, last := range []string{"E", "D"} {
				if at.name == "drained" && !kills {
					continue
				}
				t.Run(fmt.Sprintf("%s/kills=%v/%s last", at.name, kills, last), func(t *testing.T) {
					switchAt(t, &breaker{role: pb.Side(at.role), toPlanner: at.toPlanner, lose: at.lose, kills: kills, counts: at.counts, k: 1}, last, at.name == "drained")
				})
			}
		}
	}
}

// switchAt runs one switch under load. restarts: the planner is restarted while the group is drained.
// After a restart the group named last registers after the others.
func switchAt(t *testing.T, b *breaker, last string, restarts bool) {
	h := newHost(t, dualpath.Options{})
	h.breakers = []*breaker{b}
	names := []string{"P", "D", "E"}
	var again atomic.Bool
	h.receiving = func(m *pb.LeaderMessage) {
		if r := m.GetRegister(); r == nil || r.Group != last || !again.Load() && !b.fired() {
			return
		}
		others := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == last })
		for have := 0; have < len(others) && h.ctx.Err() == nil; {
			r, err := h.planner.Roles(h.ctx, &pb.RolesRequest{})
			if have = 0; err != nil {
				return // the planner ends
			}
			for _, g := range r.Groups {
				if slices.Contains(others, g.Group) {
					have++
				}
			}
		}
	}
	engines := h.workers(names...)
	ctx, end := context.WithCancel(h.ctx)
	var load sync.WaitGroup
	defer load.Wait()
	defer end()
	for caller := range 3 {
		load.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				if err := <-h.serve(fmt.Sprintf("r%d.%d", caller, n), 0).end; err != nil {
					t.Errorf("request %d.%d: %v", caller, n, err)
				}
			}
		})
	}
	next(t, h.ctx, engines["E"].started)
	order := func() bool {
		_, err := h.planner.SwitchRole(h.ctx, &pb.SwitchRoleRequest{Group: "E", Role: pb.Side_SIDE_PREFILL}, grpc.WaitForReady(true))
		switch {
		case err == nil, strings.Contains(status.Convert(err).Message(), dualpath.Ordered.String()), strings.Contains(status.Convert(err).Message(), dualpath.SameRole.String()):
			return true
		case !slices.Contains([]codes.Code{codes.Unavailable, codes.NotFound, codes.FailedPrecondition}, status.Code(err)):
			t.Error(err)
		}
		return false
	}
	h.await("the order", func(*pb.TopResponse) bool { return order() })
	if restarts {
		again.Store(true)
		h.Restart()
	}
	engines["E"].release()
	h.awaitGroup("E", func(g *pb.RolesResponse_Group) bool { return g.Role == pb.Side_SIDE_PREFILL && g.Switching == 0 })
	if !restarts && !b.fired() {
		t.Error("no message of the switch was lost")
	}
	end()
	load.Wait()
	if err := <-h.serve("after", 0).end; err != nil {
		t.Errorf("a request after the switch: %v", err)
	}
}
