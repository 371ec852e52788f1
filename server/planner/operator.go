package planner

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
)

// roles holds what dualpath.Planner does not keep about the role changes of a group.
type roles struct {
	// switches is set if the leader supports the action SWITCH.
	switches bool
	// refusal is the reason in the leader's last RoleRefused. kept is the reason why the group kept
	// its role at the last switch; empty: the group changed its role, or there was no switch.
	refusal, kept string
	// order is the number of the last Announce or Switch, seen the highest number of an action that
	// the leader has confirmed. heard, if not nil, is closed when seen changes.
	order, seen uint64
	heard       chan struct{}
}

// heardLocked records that the leader has all actions up to the number seen.
func (r *roles) heardLocked(seen uint64) {
	if seen <= r.seen {
		return
	}
	r.seen = seen
	if r.heard != nil {
		close(r.heard)
		r.heard = nil
	}
}

// maxRefusalBytes is the length to which the reason of a leader's refusal is cut.
const maxRefusalBytes = 1 << 10

// drainOf converts the drain policy of a call from its wire form. If the call names no policy, the
// result is the argument named unspecified.
func drainOf(d, unspecified pb.Drain) (dualpath.Drain, error) {
	if d == pb.Drain_DRAIN_UNSPECIFIED {
		d = unspecified
	}
	switch d {
	case pb.Drain_DRAIN_RECOMPUTE:
		return dualpath.DrainRecompute, nil
	case pb.Drain_DRAIN_FINISH:
		return dualpath.DrainFinish, nil
	case pb.Drain_DRAIN_ABORT:
		return dualpath.DrainAbort, nil
	}
	return 0, status.Errorf(codes.InvalidArgument, "the policy is %v; it must be recompute, finish or abort", d)
}

// BumpWeights implements penstock.v1.Planner.
func (s *Service) BumpWeights(ctx context.Context, r *pb.BumpWeightsRequest) (*pb.BumpWeightsResponse, error) {
	policy, err := drainOf(r.Policy, pb.Drain_DRAIN_RECOMPUTE)
	if err != nil {
		return nil, err
	}
	if r.Epoch == 0 {
		return nil, status.Errorf(codes.InvalidArgument, "namespace %q: the epoch is 0; epochs begin at 1", r.Namespace)
	}
	one := bump{Namespace: r.Namespace, Epoch: r.Epoch, Policy: policy}
	older, err := s.older(one, r.DryRun)
	if err != nil || r.DryRun {
		return bumped(older, policy), err
	}
	if err := s.keep(ctx, one); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if older, err = s.olderLocked(one, false); err != nil {
		return nil, err
	}
	if err := s.bumpLocked(one); err != nil {
		return nil, err
	}
	if s.closed {
		return nil, errNotPlanned
	}
	return bumped(older, policy), nil
}

// older returns the requests of weights older than those of a bump, or an error if the bump is not
// possible. Without known, the namespace may be new to this planner.
func (s *Service) older(b bump, known bool) (dualpath.Older, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.olderLocked(b, known)
}

func (s *Service) olderLocked(b bump, known bool) (dualpath.Older, error) {
	if _, ok := s.namespaces.ids[b.Namespace]; known && !ok {
		return dualpath.Older{}, status.Errorf(codes.NotFound, "no gateway has submitted a request of namespace %q to this planner; penstock ns list lists the namespaces", b.Namespace)
	}
	id, err := s.namespaces.id(b.Namespace)
	if err != nil {
		return dualpath.Older{}, err
	}
	ns := dualpath.NamespaceID(id)
	if newest := s.planner.Newest(ns); b.Epoch < newest {
		return dualpath.Older{}, status.Errorf(codes.FailedPrecondition, "namespace %q: the epoch is %d, but the planner has already seen epoch %d", b.Namespace, b.Epoch, newest)
	}
	return s.planner.Older(ns, b.Epoch), nil
}

// bumped returns the response of BumpWeights, with the numbers of requests that a change of weights
// affects.
func bumped(older dualpath.Older, policy dualpath.Drain) *pb.BumpWeightsResponse {
	out := &pb.BumpWeightsResponse{Older: &pb.OlderRequests{
		Queued: uint32(older.Queued), Prefilling: uint32(older.Prefilling), Decoding: uint32(older.Decoding), Exact: uint32(older.Exact),
	}}
	prefilling, decoding := out.Older.Prefilling, out.Older.Decoding
	switch policy {
	case dualpath.DrainAbort:
		out.Aborted = prefilling + decoding
	case dualpath.DrainFinish:
		out.GoingOn = prefilling + decoding
	default:
		out.Replanned, out.GoingOn = prefilling, decoding
	}
	return out
}

// SwitchRole implements penstock.v1.Planner. It returns when the group's leader has the order, with
// which a later planner continues the switch.
func (s *Service) SwitchRole(ctx context.Context, r *pb.SwitchRoleRequest) (*pb.SwitchRoleResponse, error) {
	out, of, err := s.switchRole(r)
	if err != nil || r.DryRun {
		return out, err
	}
	return out, s.awaitLeader(ctx, r.Group, of)
}

// awaitLeader waits until the leader of a group has the group's last order.
func (s *Service) awaitLeader(ctx context.Context, group string, of *roles) error {
	s.mu.Lock()
	order := of.order
	s.mu.Unlock()
	limit := time.NewTimer(keepWithin)
	defer limit.Stop()
	for {
		s.mu.Lock()
		has := of.seen >= order
		if of.heard == nil {
			of.heard = make(chan struct{})
		}
		heard := of.heard
		s.mu.Unlock()
		if has {
			return nil
		}
		select {
		case <-heard:
			continue
		case <-s.stop:
			return errNotPlanned
		case <-limit.C:
		case <-ctx.Done():
		}
		return status.Errorf(codes.Unavailable, "group %q: its leader has not confirmed the order within %v; the switch continues, but a restart of the planner may end it: repeat the call", group, keepWithin)
	}
}

// switchRole passes the order to the planner. It returns the state of the group, too.
func (s *Service) switchRole(r *pb.SwitchRoleRequest) (*pb.SwitchRoleResponse, *roles, error) {
	policy, err := drainOf(r.Policy, pb.Drain_DRAIN_FINISH)
	switch {
	case err != nil:
		return nil, nil, err
	case policy == dualpath.DrainAbort:
		return nil, nil, status.Error(codes.InvalidArgument, "the policy is abort, but a switch of roles must not end requests; it must be finish or recompute")
	case r.Role != pb.Side_SIDE_PREFILL && r.Role != pb.Side_SIDE_DECODE:
		return nil, nil, status.Errorf(codes.InvalidArgument, "group %q: the role is %v; it must be SIDE_PREFILL or SIDE_DECODE", r.Group, r.Role)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	id, known := s.groups.ids[r.Group]
	g, role := dualpath.GroupID(id), dualpath.Role(r.Role)
	if !known || !s.planner.Has(g) {
		return nil, nil, status.Errorf(codes.NotFound, "no group %q is up; penstock plan roles lists the groups", r.Group)
	}
	if why := s.planner.SwitchCheck(g, role); why != dualpath.NoReason {
		return nil, nil, status.Errorf(codes.FailedPrecondition, "group %q cannot change its role to %v: %v", r.Group, role, why)
	}
	if !s.roles[g].switches {
		return nil, nil, status.Errorf(codes.FailedPrecondition, "group %q cannot change its role to %v: its engines have a fixed role, such as kv_role of vLLM; restart them with the other role", r.Group, role)
	}
	out := &pb.SwitchRoleResponse{Requests: uint32(s.planner.Holding()[g])}
	if !r.DryRun {
		s.roles[g].kept = ""
		s.stepLocked(dualpath.SwitchRole{At: s.now(), Group: g, Role: role, Drain: policy})
		if s.closed {
			return nil, nil, errNotPlanned
		}
	}
	return out, s.roles[g], nil
}

// refusedLocked handles a leader's refusal to change its role.
func (s *Service) refusedLocked(l *leader, r *pb.RoleRefused) {
	s.roles[l.group].refusal = r.Reason[:min(len(r.Reason), maxRefusalBytes)]
	s.stepLocked(dualpath.SwitchRefused{At: s.now(), Group: l.group})
}

// switchedLocked records the end of a role change (switch) of a group.
func (s *Service) switchedLocked(a *dualpath.Action) {
	g := s.roles[a.Group]
	name := s.groups.of(uint32(a.Group))
	if g == nil || a.Why == dualpath.NoReason {
		s.log.Info("group changed its role", "group", name, "role", a.Side.String())
		return
	}
	g.kept = a.Why.String()
	if a.Why == dualpath.RoleRefused {
		g.kept = fmt.Sprintf("%s: %s", g.kept, g.refusal)
	}
	s.log.Warn("group keeps its role", "group", name, "requested", a.Side.String(), "why", g.kept)
}

// Roles implements penstock.v1.Planner.
func (s *Service) Roles(context.Context, *pb.RolesRequest) (*pb.RolesResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	recent, holding := s.planner.Recent(), s.planner.Holding()
	out := &pb.RolesResponse{
		Waiting: uint32(s.planner.Stats().Queued), MeanTokens: recent.Tokens, MeanOutputTokens: recent.Output, StepSeconds: recent.Step,
		PrefillTokensPerSecond: s.prefillRate,
	}
	for _, n := range recent.Uncached {
		out.UncachedTokens = append(out.UncachedTokens, uint32(n))
	}
	for _, v := range s.planner.View() {
		g := &pb.RolesResponse_Group{
			Group: s.groups.of(uint32(v.Group)), Role: pb.Side(v.Role), Engines: uint32(len(v.Engines)), Queued: uint32(v.Queued),
			Requests: uint32(holding[v.Group]), Use: s.planner.Use(v.Group), Switching: pb.Side(v.Leaving), Ordered: v.Ordered,
			Switches: s.roles[v.Group].switches, Kept: s.roles[v.Group].kept,
		}
		for _, e := range v.Engines {
			g.DeviceTokens += uint64(e.HBMTokens)
		}
		out.Groups = append(out.Groups, g)
	}
	return out, nil
}
