package leader

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
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
