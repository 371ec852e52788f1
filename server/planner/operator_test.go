package planner

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// bump changes the weights of the tests' namespace.
func (h *host) bump(epoch uint64, policy pb.Drain, dryRun bool) *pb.BumpWeightsResponse {
	h.Helper()
	r, err := h.client.BumpWeights(h.ctx, &pb.BumpWeightsRequest{Namespace: "m", Epoch: epoch, Policy: policy, DryRun: dryRun})
	h.must(err)
	return r
}

// wantBumped checks the counts of requests before a change of weights and after it.
func wantBumped(t *testing.T, r *pb.BumpWeightsResponse, want string) {
	t.Helper()
	o := r.Older
	if got := fmt.Sprintf("queued %d, prefilling %d, decoding %d, exact %d; aborted %d, replanned %d, going on %d",
		o.Queued, o.Prefilling, o.Decoding, o.Exact, r.Aborted, r.Replanned, r.GoingOn); got != want {
		t.Errorf("bump: %s; want %s", got, want)
	}
}

// TestBumpPolicies: a dry run changes nothing. Policy finish lets a started request continue. A
// repeated bump with policy abort rejects the request, and its gateway gets the refusal class for
// that.
func TestBumpPolicies(t *testing.T) {
	h := newHost(t, Options{})
	pe, de := h.lead("P", pb.Side_SIDE_PREFILL), h.lead("D", pb.Side_SIDE_DECODE)
	gw := h.submit("r1")
	h.startOn(pe, de, gw, "r1")
	waiting := h.submit("r2")

	wantBumped(t, h.bump(1, pb.Drain_DRAIN_ABORT, true), "queued 1, prefilling 1, decoding 0, exact 0; aborted 1, replanned 0, going on 0")
	wantBumped(t, h.bump(1, pb.Drain_DRAIN_RECOMPUTE, true), "queued 1, prefilling 1, decoding 0, exact 0; aborted 0, replanned 1, going on 0")
	wantBumped(t, h.bump(1, pb.Drain_DRAIN_FINISH, false), "queued 1, prefilling 1, decoding 0, exact 0; aborted 0, replanned 0, going on 1")
	pe.send(finished("r1", pb.Side_SIDE_PREFILL))
	gw.want(pb.RequestUpdate_KIND_PREFILLED)
	wantBumped(t, h.bump(1, pb.Drain_DRAIN_FINISH, true), "queued 0, prefilling 0, decoding 1, exact 0; aborted 0, replanned 0, going on 1")
	wantBumped(t, h.bump(1, pb.Drain_DRAIN_ABORT, false), "queued 0, prefilling 0, decoding 1, exact 0; aborted 1, replanned 0, going on 0")
	if u := gw.want(pb.RequestUpdate_KIND_REJECTED); u.Refusal != pb.Refusal_REFUSAL_OLD_WEIGHTS || u.Reason == "" {
		t.Errorf("rejected with %v", u)
	}
	de.want(pb.LeaderAction_KIND_ABORT, "r1", "D/0")

	// The request that waited is started with the new weights, and its prefix is recomputed.
	de.fetch(100)
	pe.fetch(100)
	if u := waiting.want(pb.RequestUpdate_KIND_STARTED); u.Epoch != 1 || len(u.Parts) != 0 {
		t.Errorf("started with %v", u)
	}
	for _, c := range []struct {
		r    *pb.BumpWeightsRequest
		code codes.Code
	}{
		{&pb.BumpWeightsRequest{Namespace: "m"}, codes.InvalidArgument},
		{&pb.BumpWeightsRequest{Namespace: "m", Epoch: 2, Policy: 9}, codes.InvalidArgument},
		{&pb.BumpWeightsRequest{Namespace: "n", Epoch: 2, DryRun: true}, codes.NotFound},
	} {
		if _, err := h.client.BumpWeights(h.ctx, c.r); status.Code(err) != c.code {
			t.Errorf("%v: %v; want %v", c.r, err, c.code)
		}
	}
	h.bump(5, pb.Drain_DRAIN_UNSPECIFIED, false)
	if _, err := h.client.BumpWeights(h.ctx, &pb.BumpWeightsRequest{Namespace: "m", Epoch: 4}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("an older epoch: %v", err)
	}
}

// leadSwitching registers a group whose leader supports SWITCH.
func (h *host) leadSwitching(group string, role, switching pb.Side) *leading {
	h.Helper()
	stream, err := h.client.Lead(h.ctx)
	h.must(err)
	l := &leading{host: h, stream: stream}
	l.send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{
		Group: group, Role: role, Switches: true, Switching: switching,
		Engines: []*pb.EngineSpec{{Engine: group + "/0", Node: "node-" + group, HbmTokens: 100_000}},
	}}})
	if a := l.next(); a.Kind != pb.LeaderAction_KIND_REGISTERED {
		h.Fatalf("group %s: %v before registered", group, a)
	}
	return l
}

// group returns the planner's status of a group.
func (h *host) group(name string) *pb.RolesResponse_Group {
	h.Helper()
	r, err := h.client.Roles(h.ctx, &pb.RolesRequest{})
	h.must(err)
	for _, g := range r.Groups {
		if g.Group == name {
			return g
		}
	}
	h.Fatalf("no group %q in %v", name, r)
	return nil
}

// TestSwitchRole: a group with a request is drained, gets the order to switch and refuses it. After
// a second order the group switches.
func TestSwitchRole(t *testing.T) {
	h := newHost(t, Options{})
	pe, de := h.lead("P", pb.Side_SIDE_PREFILL), h.leadSwitching("D", pb.Side_SIDE_DECODE, 0)
	ask := func(group string, role pb.Side, policy pb.Drain, dryRun bool) (*pb.SwitchRoleResponse, error) {
		return h.client.SwitchRole(h.ctx, &pb.SwitchRoleRequest{Group: group, Role: role, Policy: policy, DryRun: dryRun})
	}
	// order makes the planner change the role of group D. The call returns when the leader has the order.
	order := func(want pb.LeaderAction_Kind) {
		t.Helper()
		ended := make(chan error, 1)
		go func() {
			_, err := ask("D", pb.Side_SIDE_PREFILL, 0, false)
			ended <- err
		}()
		a := de.next()
		if a.Kind != want || a.Side != pb.Side_SIDE_PREFILL || a.Seq == 0 {
			t.Errorf("got %v; want %v", a, want)
		}
		select {
		case err := <-ended:
			t.Errorf("the call has ended before the leader confirmed the order: %v", err)
		default:
		}
		de.fetch(a.Seq)
		h.must(<-ended)
	}
	if _, err := ask("D", pb.Side_SIDE_PREFILL, 0, false); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the last decode group: %v", err)
	}
	h.lead("E", pb.Side_SIDE_DECODE)
	h.lead("Q", pb.Side_SIDE_PREFILL)
	gw := h.submit("r1")
	h.startOn(pe, de, gw, "r1")
	for _, c := range []struct {
		group  string
		role   pb.Side
		policy pb.Drain
		code   codes.Code
	}{
		{"X", pb.Side_SIDE_PREFILL, 0, codes.NotFound},
		{"D", 0, 0, codes.InvalidArgument},
		{"D", pb.Side_SIDE_PREFILL, pb.Drain_DRAIN_ABORT, codes.InvalidArgument},
		{"D", pb.Side_SIDE_DECODE, 0, codes.FailedPrecondition},
		{"Q", pb.Side_SIDE_DECODE, 0, codes.FailedPrecondition}, // its leader does not support SWITCH
	} {
		if _, err := ask(c.group, c.role, c.policy, false); status.Code(err) != c.code {
			t.Errorf("group %s to %v with %v: %v; want %v", c.group, c.role, c.policy, err, c.code)
		}
	}
	r, err := ask("D", pb.Side_SIDE_PREFILL, 0, true)
	if h.must(err); r.Requests != 1 || h.group("D").Switching != 0 {
		t.Errorf("a dry run: %v, %v", r, h.group("D"))
	}
	order(pb.LeaderAction_KIND_ANNOUNCE)
	if h.group("D").Switching != pb.Side_SIDE_PREFILL || h.group("D").Ordered || h.group("D").Requests != 1 {
		t.Errorf("a group that is drained: %v", h.group("D"))
	}
	pe.send(finished("r1", pb.Side_SIDE_PREFILL))
	de.send(finished("r1", pb.Side_SIDE_DECODE))
	if a := de.next(); a.Kind != pb.LeaderAction_KIND_SWITCH || a.Side != pb.Side_SIDE_PREFILL || a.Seq == 0 {
		t.Errorf("got %v; want the order to switch", a)
	}
	if !h.group("D").Ordered {
		t.Errorf("a group with the order: %v", h.group("D"))
	}
	de.send(&pb.LeaderMessage{Message: &pb.LeaderMessage_RoleRefused{RoleRefused: &pb.RoleRefused{Reason: "no room for weights"}}})
	de.fetch(0)
	for h.group("D").Switching != 0 { // until the refusal has arrived
	}
	if g := h.group("D"); g.Kept != "its leader refused: no room for weights" || g.Role != pb.Side_SIDE_DECODE {
		t.Errorf("after a refusal: %v", g)
	}

	// Without a request the order is sent at once. A planner that takes the group over during a
	// switch gives it no request.
	order(pb.LeaderAction_KIND_SWITCH)
	h.leadSwitching("D", pb.Side_SIDE_DECODE, pb.Side_SIDE_PREFILL)
	if g := h.group("D"); !g.Ordered || g.Kept != "" {
		t.Errorf("a group whose engines switch: %v", g)
	}
	h.leadSwitching("D", pb.Side_SIDE_PREFILL, 0)
	if g := h.group("D"); g.Role != pb.Side_SIDE_PREFILL || g.Switching != 0 || g.Kept != "" {
		t.Errorf("a group that has switched: %v", g)
	}
}

// heldLease is a lease that the test ends, without a notice for the planner.
type heldLease struct{ over atomic.Bool }

func (*heldLease) Number() uint64                                      { return 1 }
func (l *heldLease) Held() bool                                        { return !l.over.Load() }
func (*heldLease) Lost() <-chan struct{}                               { return nil }
func (*heldLease) Keep(context.Context, []byte) error                  { return nil }
func (*heldLease) Kept(context.Context) ([]byte, error)                { return nil, nil }
func (*heldLease) Resign()                                             {}
func (*heldLease) Deleted(context.Context, []string) ([]string, error) { return nil, nil }

// TestOperatorWithoutLease: a change of weights or of a role that the planner did not plan, because its
// lease has ended meanwhile, is an error.
func TestOperatorWithoutLease(t *testing.T) {
	for name, call := range map[string]func(*host) error{
		"BumpWeights": func(h *host) error {
			_, err := h.client.BumpWeights(h.ctx, &pb.BumpWeightsRequest{Namespace: "m", Epoch: 2})
			return err
		},
		"SwitchRole": func(h *host) error {
			_, err := h.client.SwitchRole(h.ctx, &pb.SwitchRoleRequest{Group: "P", Role: pb.Side_SIDE_DECODE})
			return err
		},
	} {
		lease := &heldLease{}
		h := newHost(t, Options{Lease: lease, TickEvery: time.Hour})
		h.leadSwitching("P", pb.Side_SIDE_PREFILL, 0)
		h.leadSwitching("D", pb.Side_SIDE_DECODE, 0)
		h.leadSwitching("P2", pb.Side_SIDE_PREFILL, 0)
		lease.over.Store(true)
		if err := call(h); status.Code(err) != codes.Unavailable {
			t.Errorf("%s without a lease: %v", name, err)
		}
		h.close()
	}
}

// TestResumeRefuses: resume returns an error for bumps of another version, with unknown fields, policies or names, and for an empty value.
func TestResumeRefuses(t *testing.T) {
	for _, kept := range []string{`{"version":2,"bumps":[]}`, `{"version":1,"bumps":[],"more":1}`, `{"version":1,"bumps":[{"namespace":"m","epoch":2,"policy":"x"}]}`, `{"version":1,"bumps":[{"epoch":2,"policy":"finish"}]}`, ""} {
		h := newHost(t, Options{TickEvery: time.Hour})
		if err := h.service.resume([]byte(kept)); err == nil {
			t.Errorf("%q is accepted", kept)
		}
		h.close()
	}
}

// TestSwitchNotConfirmed: the planner ends before the leader has confirmed the order to switch. The operator's call
// is an error, because a later planner may not have the switch.
func TestSwitchNotConfirmed(t *testing.T) {
	h := newHost(t, Options{})
	h.lead("P", pb.Side_SIDE_PREFILL)
	d := h.leadSwitching("D", pb.Side_SIDE_DECODE, 0)
	h.lead("E", pb.Side_SIDE_DECODE)
	ended := make(chan error, 1)
	go func() {
		_, err := h.client.SwitchRole(h.ctx, &pb.SwitchRoleRequest{Group: "D", Role: pb.Side_SIDE_PREFILL})
		ended <- err
	}()
	if a := d.next(); a.Kind != pb.LeaderAction_KIND_SWITCH {
		t.Errorf("got %v", a)
	}
	h.service.Close()
	if err := <-ended; status.Code(err) != codes.Unavailable {
		t.Errorf("a switch that the leader has not confirmed: %v", err)
	}
}
